"""Exports weights as transformers and peft expect them: adapter, merged or full, with tokenizer and model card.

`python -m trainers.export --run RUN --output DIR --kind adapter|merged|full [--checkpoint NAME]` exports again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers.checkpoint import load_weights
from trainers.config import ConfigError, TrainConfig
from trainers.data.prepare import load_tokenizer
from trainers.differences import versions
from trainers.manifest import sync, verify
from trainers.models import add_adapters, build_model, compute_dtype
from trainers.options import Request, dump_yaml
from trainers.quantise import dequantise
from trainers.run_folder import RunFolder, read_json

SHARD_SIZE = "5GB"


def export_kind(config: TrainConfig) -> str:
    """What a run exports: `full`, `adapter` or `merged`."""
    return "full" if config.method == "full" else "merged" if config.merge_adapter else "adapter"


def export_checkpoint(folder: Path, config: TrainConfig, target: Path, kind: str, results: dict[str, Any]) -> None:
    """Exports the weights of a checkpoint, which any strategy may have written: the one way to an export.

    The model is built anew on the CPU of one process, so that no strategy's wrapper is in its names or its tensors.
    """
    model = build_model(config)
    load_weights(folder, model)
    export(model, config, target, kind, results)


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
    if kind == "merged" and config.method == "qlora":
        model = _unquantised(model, config)
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


def _unquantised(model: Any, config: TrainConfig) -> nn.Module:
    """The same adapters on the dequantised base; peft would merge into 4 bits and round most of them away."""
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    plain = add_adapters(dequantise(model.unload()), config)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if weight.requires_grad:
                weight.copy_(trained.pop(name))
    assert not trained, f"adapter weights without a place: {sorted(trained)}"
    return plain


def model_card(config: TrainConfig, kind: str, results: dict[str, Any]) -> str:
    """What the model is, what made it, and how to load it."""
    numbers = "\n".join(f"| {name} | {value} |" for name, value in results.items()) or "| none | |"
    packages = "\n".join(f"- {name} {number}" for name, number in versions().items())
    base = config.model_name_or_path
    header = f"---\nlibrary_name: {'peft' if kind == 'adapter' else 'transformers'}\ntags: [tunesmith, sft]\n---\n"
    return f"""{header}
# {config.run_name or config.preset or Path(base).name}, fine-tuned

{kind.capitalize()} weights of `{base}`, fine-tuned with Tunesmith on `{config.dataset_name}`.

```python
{_loading(config, kind)}
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


def _loading(config: TrainConfig, kind: str) -> str:
    """The lines that load the export; an adapter of a quantised base belongs on the same 4 bits."""
    if kind != "adapter":
        return "model = AutoModelForCausalLM.from_pretrained(folder)  # from transformers"
    if config.method == "lora":
        return "model = AutoPeftModelForCausalLM.from_pretrained(folder)  # from peft"
    dtype = str(compute_dtype(config))
    return f"""base = BitsAndBytesConfig(  # from transformers
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype={dtype},
)
model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype={dtype}, quantization_config=base)  # from peft"""


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
    if not names:
        raise ConfigError(f"run {run.id} has no checkpoint; it saves one every save_steps, and when it is stopped")
    if checkpoint and checkpoint not in names:
        raise ConfigError(f"checkpoint {checkpoint} is not there; the run {run.id} has: {', '.join(names)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output {target} is not empty; name a new folder, so that nothing is written over")
    folder = run.checkpoints / (checkpoint or _chosen(run, names, config))
    try:
        manifest = verify(folder)
        export_checkpoint(folder, config, target, kind, {"step": manifest["step"]})
    except (ValueError, OSError) as error:
        raise ConfigError(f"checkpoint {folder.name} cannot be exported: {error}; name another --checkpoint") from None
    print(json.dumps({"export_dir": str(target.absolute()), "kind": kind, "step": manifest["step"]}))


def _chosen(run: RunFolder, names: list[str], config: TrainConfig) -> str:
    """The checkpoint that the run itself exports: the best one where it wants that, else the newest."""
    newest = read_json(run.checkpoints / names[-1] / "manifest.json") or {}
    best = (newest.get("progress") or {}).get("best_step") if config.load_best_model_at_end else None
    name = f"step-{best:08d}" if best is not None else names[-1]
    return name if name in names else names[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
