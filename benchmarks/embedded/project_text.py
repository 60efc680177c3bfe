"""The embedded text: pages of this project's documentation and files of its code, each a document.

`python -m benchmarks.embedded.project_text --output DIR` writes the splits from the project as it is now; without
`--output` it overwrites the shipped ones, which are a copy of the project at some time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainers.embedded import TEXT_DIR

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("docs/*.md", "trainers/config/*.py", "trainers/data/*.py")
LEFT_OUT = ("LOG.md", "OPTIONS.md", "__init__.py")
LARGEST = 12_000  # characters
EVERY = 9
"""Every ninth document is for evaluation."""


def documents() -> list[str]:
    """The texts in the order of their paths; long ones are left out."""
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if path.name not in LEFT_OUT]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [text for text in texts if len(text) <= LARGEST]


def write_splits(folder: Path) -> None:
    """Writes `train.jsonl` and `eval.jsonl`, of rows with a `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[str]] = {"train": [], "eval": []}
    for number, text in enumerate(documents(), 1):
        splits["train" if number % EVERY else "eval"].append(json.dumps({"text": text}) + "\n")
    for split, lines in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the embedded text.")
    parser.add_argument("--output", type=Path, default=TEXT_DIR)
    write_splits(parser.parse_args().output)


if __name__ == "__main__":
    main()
