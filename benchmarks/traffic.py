"""What each rank sends, counted against formulas and papers: `python -m benchmarks.traffic [--only ddp] [--save FILE]`.

Every strategy that runs on a CPU trains a few steps of four micro-batches, and its collectives are counted (see
`benchmarks/collectives.py`): bytes per step and rank that are sent as a result, by algorithms that send the least, the
mean over ranks and steps. The formulas (`trainers/strategy/traffic.py`) leave out the sums of the gradient norm. The
papers' formulas are in `published`.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.parallelism import OPTIONS, Measured, format_bytes, head, line, measure, sized
from benchmarks.shapes import empty_model
from tests.families import save_small
from trainers.embedded import BASE_DIR
from trainers.model.experts import chosen_count
from trainers.parallel.experts import expert_stacks
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Strategy, strategy_names
from trainers.strategy.traffic import FP32, ModelSizes, wire_bytes

STEPS, MICRO_BATCHES = 4, 4
MIXTURE = "olmoe"
"""Family of the small model for expert parallelism; all others train the embedded one."""
NAMES = [name for name in strategy_names() if name not in ("single", "fsdp2_offload")]
"""One process sends nothing, and the memory to which FSDP 2 offloads needs a GPU."""
COLUMNS = ("strategy", "ranks", "counted", "predicted", "ratio", "papers", "ratio", "formula of the papers")


def mixture(folder: Path) -> Path:
    """A folder with a small mixture of experts."""
    return save_small(folder / MIXTURE, MIXTURE)


def sizes_of(folder: Path) -> ModelSizes:
    """Sizes of the model in a folder, with its experts."""
    model = empty_model(folder)
    stacks, text = expert_stacks(model), model.config.get_text_config()
    if not stacks:
        return ModelSizes.of(model)
    weights = dict(model.get_decoder().named_parameters())
    layers = len({name.rpartition(".")[0] for name in stacks})
    experts = sum(weights[name].numel() for name in stacks)
    return replace(ModelSizes.of(model), experts=experts, expert_layers=layers, chosen=chosen_count(text))


def counted(folder: Path, strategy: Strategy, model: Path) -> Measured:
    """Trains `STEPS` steps of `MICRO_BATCHES` micro-batches and counts; arguments as for `measure`."""
    rows = OPTIONS["global_batch_size"] // (strategy.sizes.data * MICRO_BATCHES)
    return measure(folder, strategy, model, steps=STEPS, per_device_train_batch_size=rows)


def published(strategy: Strategy, model: ModelSizes, slots: int) -> tuple[float, str]:
    """Bytes per step that the papers say each rank sends, and how.

    W: weights of a rank before it shards them over n ranks, in bytes; a: micro-batches; A: hidden states of a
    micro-batch on a rank; L: layers.

    Data parallelism, ZeRO (https://arxiv.org/abs/1910.02054, section 7) and FSDP (https://arxiv.org/abs/2304.11277,
    section 3.2); tensor parallelism: Megatron-LM (https://arxiv.org/abs/1909.08053); Ulysses
    (https://arxiv.org/abs/2309.14509); keys and values gathered: Llama 3 (https://arxiv.org/abs/2407.21783, section
    3.3.2); pipelines: GPipe (https://arxiv.org/abs/1811.06965); experts: GShard (https://arxiv.org/abs/2006.16668).

    Args:
        slots: tokens of a micro-batch on a rank.
    """
    sizes, micro_batches = strategy.sizes, MICRO_BATCHES
    kind = "hsdp" if sizes.dp_replicate > 1 and strategy.sharded else _kind(strategy)
    weights = FP32 * (model.parameters - model.experts) / sizes.tp / sizes.pp
    ways = sizes.grad_group_size if kind in ("ddp", "zero1") else sizes.dp_shard * sizes.sequence_shards
    times, formula = {
        "ddp": (2, "2W"), "zero1": (2, "2W"), "zero2": (micro_batches + 1, "(a + 1) W"),
        "grad_op": (2 * micro_batches, "2aW"), "sharded": (3 * micro_batches, "3aW"),
        "hsdp": (3 * micro_batches, "3aW"),
    }[kind]  # fmt: skip
    parts = [(times * weights * (ways - 1) / ways, f"{formula} (n - 1) / n")] if ways > 1 else []
    if kind == "hsdp":
        among = wire_bytes("all-reduce", weights / ways, sizes.dp_replicate)
        parts.append((among, "2 (W / n) (groups - 1) / groups"))
    # Activations of all layers of a rank.
    hidden = FP32 * slots * model.hidden * micro_batches
    every = hidden * model.layers / sizes.pp
    keys = every * model.key_heads / model.heads / sizes.tp
    if sizes.tp > 1:
        parts.append((4 * wire_bytes("all-reduce", every, sizes.tp), "8aLA (tp - 1) / tp"))
    if sizes.sp > 1:
        exchanged = 2 * wire_bytes("all-to-all", 2 * (every / sizes.tp + keys), sizes.sp)
        parts.append((exchanged, "8aLA (sp - 1) / sp"))
    if sizes.cp > 1:
        parts.append((4 * keys * (sizes.cp - 1), "4aLA (cp - 1)"))
    if sizes.pp > 1:
        borders = sizes.pp * SCHEDULES[strategy.pp_schedule].chunks - 1
        parts.append((2 * hidden * borders / sizes.pp, "2aA x borders / pp"))
    if sizes.ep > 1:
        chosen = FP32 * slots * model.hidden * micro_batches * model.expert_layers * model.chosen
        parts.append((4 * wire_bytes("all-to-all", chosen, sizes.ep), "4aLA x experts per token (ep - 1) / ep"))
    return sum(size for size, _ in parts), " + ".join(text for _, text in parts)


def _kind(strategy: Strategy) -> str:
    """Which paper's formula holds for weights and gradients."""
    if strategy.zero_stage in (1, 2):
        return f"zero{strategy.zero_stage}"
    stays_gathered = strategy.fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP"
    stays_gathered |= strategy.fsdp_version == 2 and not strategy.fsdp.get("fsdp_reshard_after_forward", True)
    return "ddp" if not strategy.sharded else "grad_op" if stays_gathered else "sharded"


def compared(measured: Measured, model: ModelSizes) -> dict[str, Any]:
    """What was counted, what was predicted, and what the papers say: bytes and calls per step and rank."""
    terms = measured.expected(model)
    # Rows are split alike, so that every micro-batch of a rank has as many slots.
    steps = [counts[0] for step in measured.ranks[0]["steps"] for counts in step]
    paper, formula = published(measured.strategy, model, round(sum(steps) / len(steps)))
    return {
        "strategy": measured.strategy.name,
        "ranks": measured.strategy.num_processes,
        "mesh": str(measured.strategy.sizes),
        "sent": measured.wire(),
        "predicted": sum(term.wire for term in terms),
        "papers": paper,
        "formula": formula,
        "collectives": [
            {
                "collective": term.collective,
                "formula": term.formula,
                "predicted": term.bytes,
                "counted": measured.sent(term.collective),
                "predicted_calls": term.calls,
                "counted_calls": measured.calls(term.collective),
            }
            for term in terms
        ],
        "without_formula": {
            name: measured.sent(name)
            for name in sorted({name for rank in measured.ranks for name in rank["sent"]} - {"control"})
            if name not in {term.collective for term in terms}
        },
    }


def row(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    sent, expected, paper = (result[name] for name in ("sent", "predicted", "papers"))
    return [
        f"`{result['strategy']}`", str(result["ranks"]), format_bytes(sent), format_bytes(expected),
        f"{sent / expected:.3f}", format_bytes(paper), f"{sent / paper:.2f}", result["formula"],
    ]  # fmt: skip


def main() -> None:
    """Prints a Markdown table, and saves all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="STRATEGY", help="default: all")
    parser.add_argument("--save", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    about = {"date": datetime.now(UTC).date().isoformat(), "torch": version("torch"), "machine": platform.machine(),
             "micro_batches": MICRO_BATCHES}  # fmt: skip
    print(head(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            strategy = sized(name)
            model = mixture(Path(folder)) if strategy.sizes.ep > 1 else BASE_DIR
            results.append(compared(counted(Path(folder) / name, strategy, model), sizes_of(model)))
            print(line(row(results[-1])), flush=True)
            if args.save:
                args.save.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
