"""What models have forgotten: their losses on texts that they were not trained for, against those of the first model.

The losses are those of further runs of the training script, as on the rows of the evaluation; only the texts differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.eval.comparison import Settings, compare
from app.eval.folder import SAMPLES
from app.eval.rows import Row
from trainers.embedded import GENERAL_DIR

GENERAL = "general text"
OWN = "own"


@dataclass(frozen=True)
class Sample:
    """Texts on which forgetting is measured.

    Args:
        name: its name in the report.
        dataset: file or data set.
    """

    name: str
    dataset: str

    def options(self, folder: Path) -> dict[str, Any]:
        """Options of the run that evaluates a model on it.

        Args:
            folder: the run folder of the model's evaluation; that of the sample is in a folder beside it.
        """
        return {
            "dataset_name": self.dataset, "eval_dataset_name": self.dataset, "eval_answer_tokens": 0,
            "overlong": "truncate", "report_to": "",
            "output_dir": str(folder.parent / SAMPLES / f"{folder.name}-{self.name.replace(' ', '-')}"),
        }  # fmt: skip


def samples_of(values: Mapping[str, Any]) -> list[Sample]:
    """The samples that a command line asks for.

    Args:
        values: `forgetting` and `forgetting_dataset`, as far as they are given.
    """
    samples = []
    if values.get("forgetting"):
        samples.append(Sample(GENERAL, str(GENERAL_DIR / "passages.jsonl")))
    if dataset := values.get("forgetting_dataset"):
        samples.append(Sample(OWN, str(dataset)))
    return samples


def forgetting(samples: Sequence[Sample], rows: Mapping[str, Mapping[str, Sequence[Row]]]) -> dict[str, Any]:
    """The part of the report about forgetting.

    Args:
        samples: the samples.
        rows: of each sample by its name, the rows of each model; the first is the one that others are compared with.

    Returns:
        `samples` `[{name, dataset}]`; `rows` and `comparisons` as of `compare`, each with its `sample`, and
        comparisons with a `verdict`: forgot, better, no difference shown, or cannot be compared; `notes`.

    Raises:
        ConfigError: if a sample has no row.
    """
    document: dict[str, Any] = {"samples": [], "rows": [], "comparisons": [], "notes": []}
    for sample in samples:
        if not rows.get(sample.name):
            continue
        document["samples"].append({"name": sample.name, "dataset": sample.dataset})
        compared = compare(rows[sample.name], Settings(["loss"], most_changed=0))
        for key in ("rows", "comparisons"):
            document[key] += [{"sample": sample.name, **entry} for entry in compared[key]]
        document["notes"] += [f"{sample.name}: {note}" for note in compared["notes"]]
    for entry in document["comparisons"]:
        entry["verdict"] = verdict(entry)
    return document


def verdict(comparison: Mapping[str, Any]) -> str:
    """What a comparison of losses shows; never that nothing was forgotten, which no test can show."""
    if comparison["difference"] is None:
        return "cannot be compared"
    if not comparison["significant"]:
        return "no difference shown"
    return "forgot" if comparison["difference"] > 0 else "better"
