"""The embedded chat data set: rewrite a record in another format. Each answer can be checked exactly.

`python -m benchmarks.embedded.chat_data --output DIR` writes the three splits; without `--output` it overwrites the
shipped ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.embedded.records import (
    Record,
    Split,
    make_record,
    read_json,
    read_xml,
    to_json,
    to_lines,
    to_sentence,
    to_sentences,
    to_xml,
)
from trainers.embedded import DATA_DIR

SEED = 20240
SIZES: dict[Split, int] = {"train": 4000, "eval": 200, "test": 200}

_REQUESTS: dict[str, tuple[str, ...]] = {
    "record_to_json": (
        "Write this record as JSON.",
        "Turn the record below into JSON.",
        "Please give me this record as JSON.",
    ),
    "sentence_to_json": (
        "Read the text and give its facts as JSON.",
        "Turn the text below into JSON.",
        "Please write this text as JSON.",
    ),
    "record_to_xml": (
        "Write this record as XML.",
        "Turn the record below into XML.",
        "Please give me this record as XML.",
    ),
}
TASKS = tuple(_REQUESTS)


def make_row(rng: random.Random, split: Split) -> tuple[dict[str, Any], Record]:
    """Returns a chat row and the record that it is about.

    Args:
        rng: random number generator.
        split: split whose names are used.

    Returns:
        The row, `{"messages": [user, assistant], "task": name}`, and its record.
    """
    task = rng.choice(TASKS)
    record = make_record(rng, split)
    read = rng.choice((to_sentence, to_sentences)) if task == "sentence_to_json" else to_lines
    write: Callable[[Record], str] = to_xml if task == "record_to_xml" else to_json
    messages = [
        {"role": "user", "content": f"{rng.choice(_REQUESTS[task])}\n\n{read(record)}"},
        {"role": "assistant", "content": write(record)},
    ]
    return {"messages": messages, "task": task}, record


def rows(split: Split, seed: int = SEED) -> Iterator[tuple[dict[str, Any], Record]]:
    """All rows of a split with their records, without duplicate prompts."""
    rng = random.Random(f"{seed} {split}")
    seen: set[str] = set()
    while len(seen) < SIZES[split]:
        row, record = make_row(rng, split)
        prompt = row["messages"][0]["content"]
        if prompt not in seen:
            seen.add(prompt)
            yield row, record


def read_answer(task: str, text: str) -> Record:
    """Parses the record in an answer; raises ValueError or xml's ParseError if there is none."""
    return read_xml(text) if task == "record_to_xml" else read_json(text)


def write_splits(folder: Path, seed: int = SEED) -> None:
    """Writes `train.jsonl`, `eval.jsonl` and `test.jsonl` into `folder`, the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        text = "".join(json.dumps(row) + "\n" for row, _ in rows(split, seed))
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the embedded chat data set.")
    parser.add_argument("--output", type=Path, default=DATA_DIR)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    write_splits(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
