"""Tokens per second of DPO: Tunesmith's packed pairs and TRL's padded ones: `python -m benchmarks.preferences`.

Both train the same weights on the same pairs in the same steps, in turns, with the reference computed before the steps
that are timed; first and last loss show that the work is equal. TRL gets the pairs of a step as one batch, padded to
the longest. Ratios as in `benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Case, Measured, RunFailed
from benchmarks.intervals import LEAST_TURNS
from benchmarks.rows import write_chat
from benchmarks.shapes import model_folder
from benchmarks.throughput import measure, table
from tests.launching import ROOT, flags
from trainers.config.validation import build
from trainers.data.prepare import prepare
from trainers.tools.preflight import plan_training

CASES = [
    Case("embedded", True, 1, warm=4, timed=24, micro=4, global_batch=4, rate=1e-5),
    Case("24M", True, 1, warm=1, timed=5, micro=4, global_batch=4, rate=1e-5),
]


class PairBench(Bench):
    """Runs DPO on pairs whose answers have log-normal lengths."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        chats = [write_chat(folder / f"{name}.jsonl", 600, seed) for name, seed in (("chosen", 2), ("rejected", 3))]
        self.data = folder / "pairs.jsonl"
        with open(self.data, "w", encoding="utf-8") as file:
            for lines in zip(*(path.read_text(encoding="utf-8").splitlines() for path in chats), strict=True):
                (prompt, chosen), (_, rejected) = (json.loads(line)["messages"] for line in lines)
                row = {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}
                file.write(json.dumps(row) + "\n")

    def options(self, case: Case) -> dict[str, Any]:
        """See `Bench`."""
        return {**super().options(case), "objective": "dpo", "group_by_length": False}

    def batches(self, case: Case) -> Path:
        """The pairs of each step as a file."""
        return _write_pairs(self, case)

    def run(self, case: Case, tool: str) -> Measured:
        """See `Bench`; the tokens are those of both answers and their prompts."""
        pairs, output = self.batches(case), self.output()
        seconds, peak, losses = (self._tunesmith if tool == "tunesmith" else self._other)(case, tool, pairs, output)
        timed = json.loads(pairs.read_text())[case.warm :]
        tokens = sum(len(ids) for step in timed for pair in step for ids in (*pair.values(), pair["prompt_ids"]))
        return Measured(tokens / seconds, peak, *losses)

    def other_argv(self, case: Case, tool: str, batches: Path, output: Path, torchrun: bool) -> list[Any]:
        """See `Bench`."""
        options = {"model": model_folder(case.model, self.folder), "pairs": batches, "warm": case.warm,
                   "rate": case.rate, "out": output}  # fmt: skip
        return [ROOT / "benchmarks" / "trl_dpo.py", *flags(options)]


@cache
def _write_pairs(bench: PairBench, case: Case) -> Path:
    """Writes the pairs of each step in TRL's columns of token ids."""
    config = build(bench.options(case))
    plan = plan_training(config, prepare(config, "train"), 1)
    steps = []
    for step in range(case.steps):
        pairs = []
        for row in plan.rows_of(step):
            members = plan.rows.members[plan.rows.offsets[row] : plan.rows.offsets[row + 1]]
            for first in range(0, len(members), 2):
                (chosen, mask), (rejected, _) = (
                    plan.rows.documents.document(int(member)) for member in members[first : first + 2]
                )
                start = int(mask.argmax())
                ids = {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}
                pairs.append({name: values.tolist() for name, values in ids.items()})
        steps.append(pairs)
    path = bench.folder / f"pairs-{case.model}.json"
    path.write_text(json.dumps(steps))
    return path


def main() -> None:
    """Prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[case.model for case in CASES], help="default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=LEAST_TURNS)
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = PairBench(Path(folder))
            chosen = [case for case in CASES if args.model in (None, case.model)]
            results = [measure(bench, case, args.turns, ["tunesmith", "trl"]) for case in chosen]
    except RunFailed as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(results, indent=2, default=asdict) if args.json else table(results), file=sys.stdout)


if __name__ == "__main__":
    main()
