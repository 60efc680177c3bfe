"""Which mixtures of experts train under expert parallelism: `python -m benchmarks.experts [--only TYPE ...]`.

For a small random model of each causal type of transformers that has experts, on the CPU: three steps of two processes
under `ep` must have the losses and gradient norms of one process, once with all weights trained, once with adapters on
attention and on the experts. Prints a line per type: agrees, refused with the reason, or WRONG. Exits with 1 if any is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.families import FAMILIES, IMAGE_FAMILIES

METHODS = ("full", "adapters")
STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
"""As in the parity tests."""
SECONDS = 3600
"""Time limit of one launch."""
ROOT = Path(__file__).resolve().parent.parent


def expert_types() -> list[str]:
    """The causal model types of transformers that have experts, and have a default config."""
    from transformers import AutoConfig

    from tests.families import REQUIRED
    from trainers.model.experts import has_experts

    found = []
    for kind in sorted({*FAMILIES, *IMAGE_FAMILIES}):
        try:
            has = has_experts(AutoConfig.for_model(kind, **REQUIRED.get(kind, {})).get_text_config())
        except Exception as error:  # families raise what they like
            print(f"{kind:24} no config: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        found += [kind] if has else []
    return found


def curves(kinds: list[str], strategy: str, processes: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What `run_ranks` writes, by type and method; a launch that ends early is started again for the others."""
    results = folder / f"{strategy}.json"
    left = list(kinds)
    while left:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--num_processes", str(processes)]
        command += ["--main_process_port", "0", "-m", "benchmarks.experts", "--ranks", strategy, str(folder)]
        try:
            done = subprocess.run([*command, "--only", *left], cwd=ROOT, capture_output=True, text=True,
                                  timeout=SECONDS)  # fmt: skip
            end = f"its launch ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"not done after {SECONDS} s"
        found = json.loads(results.read_text()) if results.exists() else {}
        unfinished = [kind for kind in left if set(found.get(kind, {})) != set(METHODS)]
        seen_ending = any("error" in each for kind in left if kind not in unfinished for each in found[kind].values())
        if unfinished and not seen_ending:  # the first of them ended it
            kind = unfinished.pop(0)
            found[kind] = {method: {"error": end} for method in METHODS} | found.get(kind, {})
            results.write_text(json.dumps(found))
        left = unfinished
    return dict(json.loads(results.read_text())) if results.exists() else {}


def run_ranks(kinds: list[str], strategy: str, folder: Path) -> None:
    """Trains each type both ways as one rank; rank 0 writes `curve`, `refused` or `error` of each to a JSON file."""
    import torch

    from trainers.strategy.strategy import load_strategy, resolve

    torch.set_num_threads(1)
    loaded = resolve(load_strategy(strategy), int(os.environ.get("WORLD_SIZE", "1")), "no")
    results = folder / f"{strategy}.json"
    for kind in kinds:
        for method in METHODS:
            found = _train(kind, method, loaded, folder)
            if os.environ.get("RANK", "0") == "0":
                known = json.loads(results.read_text()) if results.exists() else {}
                known.setdefault(kind, {})[method] = found
                results.write_text(json.dumps(known))
            if "error" in found:  # the other rank may be in another collective
                os._exit(1)


def _train(kind: str, method: str, strategy: Any, folder: Path) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    from tests.families import config_for
    from tests.steps import Steps
    from trainers.config.mistakes import ConfigError

    options: dict[str, Any] = {
        "method": "full", "packing": False, "max_length": 256, "max_train_samples": 60, "global_batch_size": 8,
        "learning_rate": 1e-3, "max_steps": 10, "cache_dir": str(folder / "cache"), "ddp_timeout": 60,
        "ddp_find_unused_parameters": True,
    }  # fmt: skip
    try:
        if method == "adapters":
            options |= {"method": "lora", "lora_target_parameters": _stacks(folder / kind)}
        taken = Steps(config_for(folder / kind, **options), lambda section, step: None, strategy, folder / "run")
        taken.loss.eval()
        results = [taken.take(step) for step in range(STEPS)]
    except ConfigError as error:
        return {"refused": "; ".join(error.lines).replace(f"model_name_or_path={folder / kind}: ", "")}
    except Exception as error:  # a traceback for the user
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return {"curve": [(result.loss, result.grad_norm) for result in results]}


def _stacks(model: Path) -> list[str]:
    """Ends of the names of the stacks of experts that transformers' plan divides."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainers.objectives.output_head import decoder_of
    from trainers.parallel.experts import expert_stacks

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    decoder = decoder_of(base)
    matrices = [name for name in expert_stacks(base) if decoder.get_parameter(name).ndim == 3]
    return sorted({".".join(name.split(".")[-2:]) for name in matrices})


def verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Compares what two processes wrote under `ep` with what one process wrote."""
    if "refused" in ours:
        return f"refused: {ours['refused']}"
    if problem := ours.get("error") or theirs.get("error") or theirs.get("refused"):
        return f"WRONG: {problem}"
    pairs = list(zip(ours["curve"], theirs["curve"], strict=True))
    loss = max(abs(mine[0] - other[0]) for mine, other in pairs)
    norm = max(abs(mine[1] / other[1] - 1) for mine, other in pairs)
    good = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
    return f"{'agrees' if good else 'WRONG'}: losses within {loss:.1e}, norms within {norm:.1e}"


def main() -> int:
    """Prints a line per type and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="some types; all by default")
    parser.add_argument("--ranks", nargs=2, metavar=("STRATEGY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        run_ranks(args.only, args.ranks[0], Path(args.ranks[1]))
        return 0
    from tests.families import save_small

    lines, wrong = [], 0
    with tempfile.TemporaryDirectory(prefix="experts-") as name:
        folder, kinds = Path(name), []
        for kind in args.only or expert_types():
            try:
                save_small(folder / kind, kind)
                kinds.append(kind)
            except Exception as error:  # families raise what they like
                lines.append(f"{kind:24} no small model: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        ours = curves(kinds, "ep", 2, folder)
        trained = [kind for kind in kinds if any("curve" in found for found in ours[kind].values())]
        theirs = curves(trained, "single", 1, folder)
        nothing = {"error": "not tried on one process"}
        for kind in kinds:
            for method in METHODS:
                said = verdict(ours[kind][method], theirs.get(kind, {}).get(method, nothing))
                lines.append(f"{kind:24} {method:8} {said}")
                wrong += said.startswith("WRONG")
    print("\n".join(lines))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
