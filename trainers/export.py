"""Exports weights as transformers and peft expect them: adapter, merged or full, with tokenizer and model card.

`python -m trainers.export --run RUN --output DIR --kind adapter|merged|full [--checkpoint NAME]` exports again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from trainers.checkpoint import load_weights, sync, verify
from trainers.config import ConfigError, TrainConfig
from trainers.data.prepare import load_tokenizer
from trainers.models import build_model
from trainers.options import Request, dump_yaml
from trainers.run_folder import RunFolder, read_json

SHARD_SIZE = "5GB"
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "peft", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    return {name: version(name) for name in PACKAGES}


def export_kind(config: TrainConfig) -> str:
    """What a run exports: `full`, `adapter` or `merged`."""
    return "full" if config.method == "full" else "merged" if config.merge_adapter else "adapter"


def export(model: nn.Module, config: TrainConfig, target: Path, kind: str, results: dict[str, Any]) -> None:
    """Writes a model folder that appears whole or not at all.

    Args:
        model: the unwrapped model with the trained weights; merging changes it.
        config: the run's config; it goes into the model card.
        target: the folder to publish; one that is there is replaced.
        kind: `adapter`, `merged` or `full`.
        results: last metrics, for the model card.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # Merged in fp32: a bf16 base would round a small adapter away.
    whole: Any = model.float().merge_and_unload() if kind == "merged" else model  # type: ignore[operator]
    base = whole.get_base_model() if kind == "adapter" else whole
    base.config.use_cache = True
    if base.generation_config is not None and kind != "adapter":
        base.generation_config.save_pretrained(temporary)
    whole.save_pretrained(temporary, max_shard_size=SHARD_SIZE, safe_serialization=True)
    load_tokenizer(config).save_pretrained(temporary)
    (temporary / "README.md").write_text(model_card(config, kind, results), encoding="utf-8")
    for path in [*temporary.iterdir(), temporary]:
        sync(path)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(temporary, target)
    shutil.rmtree(old, ignore_errors=True)


def model_card(config: TrainConfig, kind: str, results: dict[str, Any]) -> str:
    """What the model is, what made it, and how to load it."""
    numbers = "\n".join(f"| {name} | {value} |" for name, value in results.items()) or "| none | |"
    packages = "\n".join(f"- {name} {number}" for name, number in versions().items())
    load = (
        "AutoPeftModelForCausalLM.from_pretrained(folder)  # from peft"
        if kind == "adapter"
        else "AutoModelForCausalLM.from_pretrained(folder)  # from transformers"
    )
    base = config.model_name_or_path
    header = f"---\nlibrary_name: {'peft' if kind == 'adapter' else 'transformers'}\ntags: [tunesmith, sft]\n---\n"
    return f"""{header}
# {config.run_name or config.preset or Path(base).name}, fine-tuned

{kind.capitalize()} weights of `{base}`, fine-tuned with Tunesmith on `{config.dataset_name}`.

```python
model = {load}
```

| result | value |
|---|---|
{numbers}

## Configuration

```yaml
{dump_yaml(config).strip()}
```

## Versions

{packages}
"""


def main(argv: list[str]) -> int:
    """Exports the weights of a finished run's checkpoint; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainers.export", description="Export a run's weights.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--kind", required=True, choices=("adapter", "merged", "full"))
    parser.add_argument("--checkpoint", help="name of one of the run's checkpoints; default: the newest")
    arguments = parser.parse_args(argv)
    try:
        export_again(RunFolder(arguments.run), Path(arguments.output), arguments.kind, arguments.checkpoint)
    except ConfigError as error:
        print("\n".join(error.mistakes), file=sys.stderr)
        return 2
    return 0


def export_again(run: RunFolder, target: Path, kind: str, checkpoint: str | None) -> None:
    """Exports the weights of a checkpoint.

    Raises:
        ConfigError: when run or checkpoint are not there or bad, or the kind does not fit the method.
    """
    config = Request(config=str(run.config)).resolve()
    fitting = ("full",) if config.method == "full" else ("adapter", "merged")
    if kind not in fitting:
        raise ConfigError(f"--kind {kind} does not fit method={config.method}; use {' or '.join(fitting)}")
    names = sorted(path.name for path in run.checkpoints.glob("step-" + "[0-9]" * 8))
    if not names or (checkpoint and checkpoint not in names):
        known = ", ".join(names) or "none"
        raise ConfigError(f"checkpoint {checkpoint or 'of this run'} is not there; the run {run.id} has: {known}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output {target} is not empty; name a new folder, so that nothing is written over")
    folder = run.checkpoints / (checkpoint or _chosen(run, names, config))
    try:
        manifest = verify(folder)
        model = build_model(config)
        load_weights(folder, model)
    except (ValueError, OSError) as error:
        raise ConfigError(f"checkpoint {folder.name} cannot be exported: {error}; name another --checkpoint") from None
    export(model, config, target, kind, {"step": manifest["step"]})
    print(json.dumps({"export_dir": str(target.absolute()), "kind": kind, "step": manifest["step"]}))


def _chosen(run: RunFolder, names: list[str], config: TrainConfig) -> str:
    """The checkpoint that the run itself exports: the best one where it wants that, else the newest."""
    newest = read_json(run.checkpoints / names[-1] / "manifest.json") or {}
    best = (newest.get("progress") or {}).get("best_step") if config.load_best_model_at_end else None
    name = f"step-{best:08d}" if best is not None else names[-1]
    return name if name in names else names[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
