"""The embedded preference data: the prompts of the chat data, each with a right and a wrong answer.

A wrong answer has another format, a value of another record, or lacks a field. `python -m
benchmarks.embedded.preference_data --output DIR` writes the three splits; without `--output` it overwrites the shipped
ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.embedded.chat_data import SEED, rows
from benchmarks.embedded.records import Record, Split, to_json, to_lines, to_xml
from trainers.embedded import PREFERENCES_DIR

SIZES: dict[Split, int] = {"train": 1200, "eval": 150, "test": 150}
MISTAKES = ("format", "value", "field")


def wrong_answer(task: str, record: Record, other: Record, mistake: str, rng: random.Random) -> str:
    """An answer with one mistake.

    Args:
        task: task of the prompt.
        record: record that the prompt is about.
        other: another record, from which a wrong value is taken.
        mistake: one of `MISTAKES`.
        rng: chooses what is wrong.
    """
    write = to_xml if task == "record_to_xml" else to_json
    if mistake == "format":
        return rng.choice((to_lines, to_json if write is to_xml else to_xml))(record)
    keys = [key for key in record if key != "kind"]
    key = rng.choice(keys[1:])
    if mistake == "field":
        return write({name: value for name, value in record.items() if name != key})
    value = rng.choice([value for name, value in other.items() if name != "kind" and value != record[key]])
    return write({**record, key: value})


def pairs(split: Split, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Rows `{"prompt": [user], "chosen": [assistant], "rejected": [assistant], "task", "mistake"}` of a split."""
    rng = random.Random(f"{seed} preferences {split}")
    chats = list(rows(split, seed))
    for index in range(SIZES[split]):
        row, record = chats[index]
        other, mistake = rng.choice(chats)[1], rng.choice(MISTAKES)
        prompt, answer = row["messages"]
        wrong = wrong_answer(row["task"], record, other, mistake, rng)
        yield {
            "prompt": [prompt],
            "chosen": [answer],
            "rejected": [{"role": "assistant", "content": wrong}],
            "task": row["task"],
            "mistake": mistake,
        }


def write_splits(folder: Path, seed: int = SEED) -> None:
    """Writes `train.jsonl`, `eval.jsonl` and `test.jsonl` into `folder`, the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        text = "".join(json.dumps(row) + "\n" for row in pairs(split, seed))
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the embedded preference data.")
    parser.add_argument("--output", type=Path, default=PREFERENCES_DIR)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    write_splits(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
