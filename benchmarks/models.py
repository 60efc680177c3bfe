"""What can be trained, and how: a table of the causal model types of transformers: `python -m benchmarks.models`.

    python -m benchmarks.models [--only TYPE ...] [--json FILE] [--sampled TYPE ...]
    python -m benchmarks.models --page

The second writes docs/models.md from the newest of benchmarks/results/DATE-models.json.

They are its causal language models and, trained on text, its models of images and text. For a small random model of
each type, on the CPU:
- a real first optimizer step, all weights and LoRA, unpacked and packed rows. Its loss, and the norm of its gradients
  where all weights are trained, must be those of the stock model, which transformers loads and which gets one document
  at a time;
- for a sample of the types, three real steps from `accelerate launch` by one process and by two under `fsdp2` (all
  weights and LoRA), `tp` and `pp`, whose losses must be those of one process; and the export, which stock transformers
  must load without a missing weight and to the loss of the trained model.

A cell is yes, no (for the reason of the row), WRONG, or empty where it was not tried. Exits with 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.families import in_own_process
from tests.families import FAMILIES, IMAGE_FAMILIES

COLUMNS = ("full", "lora", "packed", "chunked_loss", "fsdp2", "fsdp2_lora", "tp", "pp", "export")
SAMPLE = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "olmo3", "helium"),
    *("gpt_oss", "qwen3_moe", "deepseek_v3", "mamba", "qwen3_5_text", "lfm2"),
    *("qwen2", "mistral", "mixtral", "qwen3_5", "qwen3_next", "gemma4_text", "glm4_moe", "ministral3", "smollm3"),
    *("granitemoehybrid", "nemotron_h", "falcon_h1", "ernie4_5_moe", "hunyuan_v1_dense", "seed_oss"),
)
"""Types whose runs on two ranks and exports are tried: of each kind of layer some, those that people use most."""
KINDS = sorted({*FAMILIES, *IMAGE_FAMILIES})
TOLERANCE = 1e-5
"""Largest relative difference of the losses of a first step: kernels sum in other orders. Ten times as much for norms
of gradients, and for losses on two ranks, as AdamW turns the rounding of small gradients into whole steps."""
SECONDS = 900
"""Time limit of one type."""
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_WRONG = "WRONG"
_FULL_LOGITS = "its logits are not a scaled or capped linear product of its decoder's output"
_NOTHING_SEEN: Any = lambda section, step: None  # noqa: E731


def judge(kind: str, sampled: bool = False, seconds: float = SECONDS) -> dict[str, Any]:
    """The row of one model type, found in a process of its own.

    Args:
        kind: `model_type`.
        sampled: also try two ranks and the export.
        seconds: time limit, after which the reason says so.

    Returns:
        `model_type`, a value for each of `COLUMNS` (True, False, "WRONG", or None where it was not tried) and `reason`,
        the sentences behind every no; None if there is none.
    """
    row = in_own_process("benchmarks.models", "find_row", (kind, sampled), seconds)
    return row if "model_type" in row else _row(kind, {}, row["unknown"])


def _row(kind: str, cells: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"model_type": kind, **{name: cells.get(name) for name in COLUMNS}, "reason": reason}


def find_row(kind: str, sampled: bool, folder: Path) -> dict[str, Any]:
    """See `judge`; in this process, with files in a folder."""
    row = _find_row(kind, sampled, folder, {})
    if "is_decoder=true" not in (row["reason"] or ""):
        return row
    row = _find_row(kind, sampled, folder / "decoder", {"is_decoder": True})
    why_not = f"; {row['reason']}" if row["reason"] else ""
    return {**row, "reason": f"needs is_decoder=true in its config.json{why_not}"}


def _find_row(kind: str, sampled: bool, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    from tests.families import save_small

    try:
        save_small(folder / "model", kind, **changes)
    except Exception as error:  # families raise what they like
        return _row(kind, {}, f"no small model: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    cells: dict[str, Any] = {}
    reasons: dict[str, None] = {}  # in their order, each once
    for method, packing in (("full", False), ("lora", False), ("full", True), ("lora", True)):
        column = "packed" if packing else method
        verdict, chunked, reason = _first_step(folder, method, packing)
        cells[column] = min(cells.get(column, True), verdict, key=[_WRONG, False, True].index)
        cells["chunked_loss"] = chunked if cells.get("chunked_loss") is None else cells["chunked_loss"]
        reasons |= {reason: None} if reason else {}
    if cells["chunked_loss"] is False:
        reasons[_FULL_LOGITS] = None
    if sampled and cells["full"] is True:
        more, found = _launched(folder, cells["packed"] is True)
        cells, reasons = cells | more, reasons | dict.fromkeys(found)
    return _row(kind, cells, "; ".join(reasons) or None)


def _first_step(folder: Path, method: str, packing: bool) -> tuple[Any, bool | None, str | None]:
    """Whether a first step is the stock model's, whether its loss needs no full logits, and the reason of a no."""
    from accelerate.state import AcceleratorState, GradientState

    from tests.families import config_for
    from tests.steps import Steps
    from trainers.config.mistakes import ConfigError

    try:
        # With a loss on all tokens: the first of a document would show what leaks from the one before.
        options = {"assistant_only_loss": False, "cache_dir": str(folder / "cache")}
        config = config_for(folder / "model", method=method, packing=packing, **options)
        steps = Steps(config, _NOTHING_SEEN)
        batch = steps.context.plan.batch(0, 0)
        result = steps.take(0)
    except ConfigError as error:
        return False, None, "; ".join(error.lines).replace(f"model_name_or_path={config.model_name_or_path}: ", "")
    except Exception as error:  # a traceback for the user
        return _WRONG, None, f"{method} crashes: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # the next step in this process is another run's
        GradientState._reset_state()
    loss, norm = stock_step(folder / "model", batch)
    where = f"{method}, {'packed' if packing else 'unpacked'}"
    if not math.isclose(result.loss, loss, rel_tol=TOLERANCE):
        return _WRONG, steps.loss.chunked, f"{where}: loss {result.loss:.6f}, the stock model's is {loss:.6f}"
    compares_norm = method == "full" and steps.loss.balancing is None  # whose gradients include the load balancing's
    if compares_norm and not math.isclose(result.grad_norm, norm, rel_tol=10 * TOLERANCE):
        return _WRONG, steps.loss.chunked, f"{where}: gradient norm {result.grad_norm:.6f}, stock {norm:.6f}"
    return True, steps.loss.chunked, None


def stock_step(folder: Path, batch: Any) -> tuple[float, float]:
    """Mean loss over the trained tokens of a batch, and the norm of its gradients, by the stock model.

    Args:
        folder: the model.
        batch: a `StepBatch`, whose documents are run one at a time.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    total = 0.0
    for micro in batch.micro_batches:
        width = micro.input_ids.shape[1]
        ids = micro.input_ids.flatten()
        borders = range(0, len(ids) + 1, width) if micro.documents is None else micro.documents.host_borders
        for start, end in pairwise(borders):
            trained = (micro.positions >= start) & (micro.positions < end)
            if not trained.any():
                continue
            logits = model(input_ids=ids[None, start:end], use_cache=False).logits[0].float()
            picked = logits[micro.positions[trained] - start]
            loss = torch.nn.functional.cross_entropy(picked, micro.labels[trained], reduction="sum")
            total += float(loss.detach())
            (loss / batch.trained_tokens).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return total / batch.trained_tokens, float(torch.nn.utils.get_total_norm(gradients))


def _launched(folder: Path, packing: bool) -> tuple[dict[str, Any], list[str]]:
    """The cells of a sampled type, and the reasons of each no."""
    from tests.launching import launch

    options = {"model_name_or_path": str(folder / "model"), "dataset_name": "embedded", "eval_dataset_name": "none",
               "method": "full", "packing": packing, "max_train_samples": 40, "max_length": 256, "global_batch_size": 4,
               "per_device_train_batch_size": 1, "max_steps": 3, "cache_dir": str(folder / "cache"),
               "learning_rate": 1e-4, "save_steps": 3}  # fmt: skip
    single = launch(folder / "single", 1, options)
    if single.state.get("state") != "done":
        return {"export": _WRONG}, [f"single: {single.state.get('cause') or 'its launch fails'}"]
    cells, reasons = dict[str, Any](export=True), list[str]()
    if problem := _stock_refuses(single.run.model):
        cells["export"] = _WRONG
        reasons.append(problem)
    for strategy in ("fsdp2", "tp", "pp"):
        finished = launch(folder / strategy, 2, options, strategy=strategy)
        cells[strategy], reason = _compared(finished, single, strategy)
        reasons += [reason] if reason else []
    if cells["fsdp2"] is True:
        adapters = options | {"method": "lora", "save_steps": 0}
        alone = launch(folder / "single-lora", 1, adapters)
        together = launch(folder / "fsdp2-lora", 2, adapters, strategy="fsdp2")
        cells["fsdp2_lora"], reason = _compared(together, alone, "fsdp2, lora")
        reasons += [reason] if reason else []
    return cells, reasons


def _compared(finished: Any, single: Any, label: str) -> tuple[Any, str | None]:
    """The cell of a run on two ranks, whose losses must be those of one process, and the reason of a no."""
    if finished.state.get("state") == "done":
        apart = max(abs(a / b - 1) for a, b in zip(finished.series("loss"), single.series("loss"), strict=True))
        problem = f"{label}: losses differ from one process's by {apart:.1e}"
        return (True, None) if apart <= 10 * TOLERANCE else (_WRONG, problem)
    refused = re.search(r"exitcode +: 2 ", finished.output) is not None  # of a rank that refuses what it is given
    last = finished.output.strip().rpartition("\n")[2][:200]
    return False if refused else _WRONG, f"{label}: {finished.state.get('cause') or f'its launch fails: {last}'}"


def _stock_refuses(export: Path) -> str | None:
    """Why stock transformers does not load an export whole; None if it does. A run checks the export's loss itself."""
    from transformers import AutoModelForCausalLM

    _, information = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    lacking = {key: sorted(information[key]) for key in ("missing_keys", "unexpected_keys") if information[key]}
    return f"export: stock transformers reports {lacking}" if lacking else None


def read_results() -> dict[str, Any]:
    """The newest results in the repository."""
    return dict(json.loads(max(RESULTS.glob("*-models.json")).read_text(encoding="utf-8")))


def page(results: dict[str, Any]) -> str:
    """The page of the documentation."""
    rows, newline = results["rows"], "\n"
    versions = ", ".join(f"{name} {results[name]}" for name in ("transformers", "torch", "peft"))
    sampled = wrap(", ".join(f"`{row['model_type']}`" for row in rows if row["export"] is not None), 118)
    totals = wrap(f"{versions}: {summary(rows)}.", 118)
    return f"""# Which models can be trained

The causal language model types of transformers, and its types for images and text, which are trained on text, each by
a small random model on the CPU, on {results["date"]} with
{newline.join(totals)}

- **full, LoRA, packed**: a real first step. Its loss, and with all weights trained the norm of its gradients, are those
  of the stock model, which gets one document at a time. *packed* is yes where both methods train packed rows.
- **loss without logits**: the loss never holds the logits of a whole batch.
- **fsdp2, fsdp2 LoRA, tp, pp**: three steps of two processes from `accelerate launch` have the losses of one process,
  with all weights but for *fsdp2 LoRA*.
- **export**: stock transformers loads it without a missing weight.

The last five, *fsdp2 LoRA* not always, were tried for
{newline.join(sampled)}.

An empty cell was not tried. A type that is not here may train too: the start of every run, and `--check` where a small
model can be made, compare it with its stock model. What no gradient reaches is trained with
`ddp_find_unused_parameters=true`, which leaves it as it is.

{table(rows)}
"""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per type."""
    words = {True: "yes", False: "no", None: "", _WRONG: _WRONG}
    lines = [
        "| model type | full | LoRA | packed | loss without logits | fsdp2 | fsdp2 LoRA | tp | pp | export | why not |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model_type"], *(words[row[name]] for name in COLUMNS), (row["reason"] or "").replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """One line of totals."""
    counts = [f"{name} {sum(row[name] is True for row in rows)}" for name in COLUMNS]
    all_three = sum(all(row[name] is True for name in ("full", "lora", "packed")) for row in rows)
    wrong = sum(_WRONG in (row[name] for name in COLUMNS) for row in rows)
    untried = sum(row["full"] is None for row in rows)
    return (
        f"{len(rows)} types, {untried} without a small model; {', '.join(counts)}; "
        f"{all_three} full, LoRA and packed; {wrong} wrong"
    )


def main() -> int:
    """Judges the types and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", default=KINDS, choices=KINDS)
    parser.add_argument(
        "--sampled", nargs="*", metavar="TYPE", default=SAMPLE, help="run these on two ranks, and export"
    )
    parser.add_argument("--page", action="store_true", help="write the page of the documentation, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows, date and versions as JSON; its rows are kept")
    args = parser.parse_args()
    if args.page:
        (ROOT / "docs" / "models.md").write_text(page(read_results()), encoding="utf-8")
        return 0
    began = time.monotonic()
    known = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows = {row["model_type"]: row for row in known}
    for kind in args.only:
        rows[kind] = judge(kind, kind in args.sampled)
        print(table([rows[kind]]).splitlines()[-1], flush=True)
        if args.json:
            versions = {name: version(name) for name in ("torch", "transformers", "peft")}
            ordered = [rows[name] for name in sorted(rows)]
            args.json.write_text(json.dumps({"date": f"{date.today()}", **versions, "rows": ordered}, indent=1) + "\n")
    print(f"{summary([rows[kind] for kind in args.only])}; {time.monotonic() - began:.0f} s")
    return 1 if any(_WRONG in row.values() for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
