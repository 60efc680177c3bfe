"""Reports of `tunesmith prove`: the table, and a folder with `report.json`, `report.md` and `config.yaml`."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.console import clean, report, show_table
from app.hardware import cpu_count, find_gpus
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import dump_yaml
from trainers.embedded import BASE_DIR
from trainers.run.folder import write_atomic, write_json

HEADERS = ("strategy", "world", "max loss difference", "max gradient-norm difference", "bit-equal steps", "verdict",
           "reason")  # fmt: skip
_SHORT = ("strategy", "world", "loss diff", "norm diff", "same bits", "verdict")
_EXPENDABLE = ("same bits", "norm diff", "world", "loss diff")
"""Columns to drop on a narrow terminal; never the strategy, whose names may differ only at their end."""
_PACKAGES = ("tunesmith", "torch", "accelerate", "transformers", "datasets", "peft", "safetensors", "deepspeed",
             "bitsandbytes")  # fmt: skip
_MODEL_FILES = ("config.json", "*.safetensors", "tokenizer.json", "tokenizer_config.json")


def facts(config: TrainConfig) -> dict[str, Any]:
    """What a reader needs to judge or reproduce a report: versions, hardware, hashes of the base model."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    hardware = {"cpu": _cpu_name(), "cores": cpu_count(), "gpus": [gpu.name for gpu in find_gpus()]}
    base = {"model_name_or_path": config.model_name_or_path, "model_revision": config.model_revision}
    return {"versions": versions, "hardware": hardware, "base_model": {**base, "sha256": _hashes(config)}}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _hashes(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of the base model's files by name; empty if it is not a local folder."""
    folder = BASE_DIR if config.model_name_or_path == EMBEDDED else Path(config.model_name_or_path).expanduser()
    digests: dict[str, str] = {}
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def name_of(row: Mapping[str, Any]) -> str:
    """The display name of a row: the strategy, or the pair of a resume."""
    return f"{row['from']} -> {row['to']}" if "from" in row else str(row["strategy"])


def matrix(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the from-to table of resumes; a cell has the largest loss difference, `FAIL` or `not run`."""
    rows_by_pair = {(row["from"], row["to"]): row for row in rows}
    names = list(dict.fromkeys(row["from"] for row in rows))
    lines = [[first, *(_cell(rows_by_pair[first, second]) for second in names)] for first in names]
    return ["from \\ to", *names], lines


def _cell(row: Mapping[str, Any]) -> str:
    return _difference(row["max_loss_difference"]) if row["passed"] else _word(row, False)


def cells(row: Mapping[str, Any], control: bool) -> list[str]:
    """The cells of a row of the table."""
    differences = [_difference(row[key]) for key in ("max_loss_difference", "max_grad_norm_difference")]
    equal = "-" if row["bit_equal_steps"] is None else str(row["bit_equal_steps"])
    return [name_of(row), str(row["world_size"]), *differences, equal, _word(row, control), row["reason"] or ""]


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _word(row: Mapping[str, Any], control: bool) -> str:
    if row["passed"] is None:
        return "not run"
    if control:
        return "fault seen" if row.get("fault_seen") else "NOT SEEN"
    return "pass" if row["passed"] else "FAIL"


def verdict(row: Mapping[str, Any], control: bool) -> str:
    """A row in one line, printed when its run has ended."""
    _, _, loss, norm, equal, word, reason = cells(row, control)
    numbers = f"loss within {loss}, gradient norm within {norm}, {equal} steps bit-equal"
    return "; ".join(filter(None, [f"{word}: {numbers}" if loss != "-" else word, reason]))


def summary(document: Mapping[str, Any]) -> list[str]:
    """The closing lines of a report."""
    rows, control, within = document["rows"], document["control"], document["tolerance"]
    passed, failed = (sum(row["passed"] is wanted for row in rows) for wanted in (True, False))
    lines = ["interrupted: the rows above are the results so far"] if document["interrupted"] else []
    if document["reference"]["cause"]:
        lines.append(f"the reference failed: {document['reference']['cause']}")
    if control:
        lines.append(f"control: the test saw the fault in {control['seen']} of {control['rows']} rows")
    elif passed or failed:
        bound = f"loss within {within['loss']:g}, gradient norm within {within['grad_norm']:g} (relative)"
        summary = f"{passed} of {passed + failed} rows match one process"
        lines.append(f"{summary}: {bound}, {document['steps']} steps")
    skipped = len(rows) - passed - failed
    return [*lines, f"{skipped} of {len(rows)} rows were not run; the reasons are above"] if skipped else lines


def show(document: Mapping[str, Any]) -> None:
    """Prints the table and the closing lines on stdout."""
    control = document["control"] is not None
    if "resumed_at" in document:
        show_table(*matrix(document["rows"]))
    else:
        show_table(_SHORT, [cells(row, control)[: len(_SHORT)] for row in document["rows"]], _EXPENDABLE)
    for row in document["rows"]:
        if row["reason"]:
            report(clean(f"{name_of(row)}: {row['reason']}").replace("\n", " "))
    report("")
    for line in summary(document):
        report(clean(line))
    if Path(document["report_dir"]).is_dir():
        report("checkpoints and exported weights of these runs are deleted; their metrics and logs are kept")
        report(f"report {document['report_dir']}/report.md")


def write_report(folder: Path, document: Mapping[str, Any], config: TrainConfig) -> None:
    """Writes the current report."""
    write_json(folder / "report.json", document)
    write_atomic(folder / "report.md", markdown(document))
    write_atomic(folder / "config.yaml", dump_yaml(config))


def markdown(document: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    hardware, control = document.get("hardware", {}), document["control"] is not None
    gpus = ", ".join(hardware.get("gpus") or []) or "no GPU"
    versions = ", ".join(f"{name} {number}" for name, number in document.get("versions", {}).items())
    resumed = _resumed(document) if "resumed_at" in document else []
    batch = f"{document['global_batch_size']} rows in micro-batches of {document['per_device_train_batch_size']}"
    lines = [
        "# Does the strategy change the model?", "",
        f"`{shlex.join(document['command'])}`", "",
        f"Reference: {document['reference']['strategy']}, one process; {document['steps']} steps of {batch}.", "",
        *resumed,
        _markdown_row(list(HEADERS)), "|---" * len(HEADERS) + "|",
        *(_markdown_row(cells(row, control)) for row in document["rows"]), "",
        *(f"- {line}" for line in summary(document)),
        *(f"- warning: {name_of(row)}: {line}" for row in document["rows"] for line in row.get("warnings", ())),
        f"- machine: {hardware.get('cpu', '?')}, {hardware.get('cores', '?')} cores, {gpus}",
        f"- versions: {versions}",
        f"- data: {document.get('data_fingerprint')}",
        *(f"- {name}: sha256 {value}" for name, value in document.get("base_model", {}).get("sha256", {}).items()),
        *(f"- `{entry['option']}`: {entry['used']} instead of {entry['given']}" for entry in document["overrides"]),
        "", "`config.yaml` is what one process trained; each run's folder keeps its metrics and its log. Checkpoints",
        "and exported weights were deleted after the comparison.",
    ]  # fmt: skip
    return clean("\n".join(lines)) + "\n"


def _resumed(document: Mapping[str, Any]) -> list[str]:
    headers, lines = matrix(document["rows"])
    caption = (
        f"Saved after step {document['resumed_at']} under each strategy (rows) and resumed under each (columns): the"
    )
    table = [_markdown_row(headers), "|---" * len(headers) + "|", *(_markdown_row(line) for line in lines)]
    return [f"{caption} largest difference of the loss after it.", "", *table, ""]


def _markdown_row(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
