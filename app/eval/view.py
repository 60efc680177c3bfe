"""What is told of an evaluation: its state and progress from its folder, and its report in parts of limited size.

A report may be of another version, or hold anything: only known keys are read, and each is checked.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.console import clean, counted
from app.eval.folder import EvaluationFolder, evaluations, tasks_file
from app.eval.metrics import LOWER_IS_BETTER
from app.eval.report import verdict
from app.runs.fixed_prompts import changes
from app.runs.runs import true_state
from app.runs.safe_read import Stamp, stamp
from trainers.config.objective_file import short_name
from trainers.run.folder import END_STATES, RunFolder, read_json

MOST_LISTED = 100
"""Evaluations that are listed."""
_MOST_ROWS = 2000
_MOST_CHANGED = 60
_MOST_NOTES = 50
_MAX_TEXT = 4000
"""Characters that are shown of a prompt or an answer."""
_MAX_NAME = 200
_VERDICTS = frozenset({"better", "worse", "forgot", "differs", "no difference shown", "cannot be compared"})
"""Those that a comparison in a report may bring itself."""
_OF_ERROR = 1.96
"""Standard errors on each side of a 95 % interval."""
_OF_LOSS = 0.25
"""Share of a model's progress that its losses are; answers take longer."""

View = dict[str, Any]


# -- state and progress ----------------------------------------------------------------------------------------------


def entry(folder: EvaluationFolder) -> View:
    """The state of an evaluation.

    Returns:
        `id`, `models` (names, possibly none), `started_at` (ISO time; empty if unknown), `command`, `path`; `state`:
        `running`, `stopping`, `done`, `stopped` or `failed`; `reason`, why it failed; `doing` and `progress` (0 to 1)
        while it runs, else empty and None; `has_report`; and once it is done, its `standings`, as `standings` has them.
    """
    note, running = folder.note(), folder.is_running()
    ended = _summary(folder.path, *map(stamp, (folder.path, folder.report, folder.output)))
    models = _names(note.get("models")) or ended["models"]
    state, (doing, progress) = ended["state"], _progress(folder, models) if running else ("", None)
    if running:
        state = "stopping" if note.get("stopped_at") else "running"
    command = _names(note.get("command")) or ended["command"]
    return {
        "id": folder.id, "path": str(folder.path), "models": models, "state": state,
        "reason": "" if running else ended["reason"],
        "started_at": _text(note.get("started_at"), 40) or ended["written_at"], "doing": doing, "progress": progress,
        "command": shlex.join(_without_output(command)), "has_report": ended["has_report"],
        "standings": [] if running else ended["standings"],
    }  # fmt: skip


@functools.lru_cache(maxsize=2048)
def _summary(path: Path, *versions: Stamp | None) -> View:
    """What is told of an evaluation that has ended, read again when its files change."""
    folder = EvaluationFolder(path)
    document, _ = folder.document()
    state, reason = _ended(folder, document)
    return {
        "state": state, "reason": reason, "models": _models_of(document), "command": _names(document.get("command")),
        "has_report": bool(document), "written_at": _written_at(folder),
        "standings": standings(result(folder)) if state == "done" else [],
    }  # fmt: skip


def _without_output(argv: list[str]) -> list[str]:
    """A command line without the folder of the report, which was chosen for this one evaluation."""
    pairs = zip(argv, ["", *argv], strict=False)
    return [word for word, before in pairs if "--output_dir" not in (word, before)]


def _ended(folder: EvaluationFolder, document: Mapping[str, Any]) -> tuple[str, str]:
    """How an evaluation has ended, and why if it failed."""
    failed = document.get("failed")
    if document.get("interrupted") is True or (not document and folder.note().get("stopped_at")):
        return "stopped", ""
    if document and isinstance(document.get("rows"), list) and not failed:
        return "done", ""
    if document and isinstance(failed, dict) and failed:
        first = next(iter(failed.items()))
        return "failed", f"{_text(first[0], _MAX_NAME)}: {_text(first[1], _MAX_TEXT)}"
    if folder.report.exists():
        return "failed", "its report cannot be read; it may be damaged, or of another version"
    return "failed", _last_words(folder)


def _last_words(folder: EvaluationFolder) -> str:
    """Why an evaluation left no report: the last error that it printed."""
    lines = [line.strip() for line in folder.end_of_output().splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = f"it ended early; its last line is: {lines[-1]}" if lines else "it ended early, and left no report"
    return _text(errors[-1] if errors else last, _MAX_TEXT)


def _written_at(folder: EvaluationFolder) -> str:
    for path in (folder.report, folder.path):
        if version := stamp(path):
            return datetime.fromtimestamp(version[1] / 1e9, UTC).isoformat(timespec="seconds")
    return ""


def _progress(folder: EvaluationFolder, models: list[str]) -> tuple[str, float]:
    """What a running evaluation is doing, and the share that is done."""
    runs, total = folder.runs()[: max(1, len(models))], max(1, len(models))
    if not runs:
        return "checking models and rows", 0.0
    run, number = runs[-1], len(runs)
    state, name = true_state(run)["state"], _name(models, number)
    if state in END_STATES:
        if state == "done" and (doing := _beside(folder, run)):
            return f"model {number} of {total}, {name}: {doing}", number / total
        if number >= total:
            return "comparing the models", 1.0
        return f"model {number + 1} of {total}, {_name(models, number + 1)}: preparing", number / total
    doing, share = ("waits for its devices", 0.0) if state == "queued" else _of_rows(run)
    return f"model {number} of {total}, {name}: {doing}", (number - 1 + share) / total


def _beside(folder: EvaluationFolder, run: RunFolder) -> str:
    """What is measured of a model after its rows; empty if nothing is under way."""
    if of_samples := folder.runs_of_samples(run):
        ended = true_state(of_samples[-1])["state"] in END_STATES
        return "" if ended else f"forgetting, {_of_rows(of_samples[-1])[0]}"
    has_tasks = any(word.partition("=")[0] == "--tasks" for word in _names(folder.note().get("command")))
    return "tasks of lm-evaluation-harness" if has_tasks and not tasks_file(run).exists() else ""


def _of_rows(run: RunFolder) -> tuple[str, float]:
    """What a run that evaluates is doing, and the share of it that is done."""
    beat = read_json(run.heartbeats / "rank-0.json") or {}
    section, rows = beat.get("section"), beat.get("rows")
    if section not in ("evaluation", "sampling") or not isinstance(rows, list) or len(rows) != 2:
        return "loading the model", 0.0
    done, total = (_number(value) for value in rows)
    if done is None or not total or total < 0:
        return "loading the model", 0.0
    part = min(1.0, max(0.0, done / total))
    at = f"{min(done, total):,.0f} of {counted(int(total), 'row', 'rows')}"
    if section == "evaluation":
        return f"loss, {at}", _OF_LOSS * part
    return f"answers, {at}", _OF_LOSS + (1 - _OF_LOSS) * part


def _name(models: list[str], number: int) -> str:
    return models[number - 1] if number <= len(models) else f"model {number}"


# -- the list --------------------------------------------------------------------------------------------------------


def listed(runs_dir: Path, run: str | None = None) -> tuple[list[View], int]:
    """The newest evaluations, newest first, and how many there are.

    Args:
        runs_dir: folder of runs.
        run: only those of this run, and of its checkpoints; None for all.
    """
    folders = evaluations(runs_dir)
    if run is None:
        return [entry(folder) for folder in folders[:MOST_LISTED]], len(folders)
    own = [folder for folder in folders[:10 * MOST_LISTED] if _has_run(folder, run)]  # fmt: skip
    return [entry(folder) for folder in own[:MOST_LISTED]], len(own)


def _has_run(folder: EvaluationFolder, run: str) -> bool:
    names = _names(folder.note().get("models")) or entry(folder)["models"]
    return any(name == run or name.startswith(f"{run}@") for name in names)


def _models_of(document: Mapping[str, Any]) -> list[str]:
    """The models of a report: the one that others are compared with first, and those that failed."""
    failed = document.get("failed")
    names = [_text(row["model"], _MAX_NAME) for row in _entries(document, "rows", ("model",))]
    return list(dict.fromkeys([*names, *(_names(list(failed)) if isinstance(failed, dict) else [])]))


# -- the report ------------------------------------------------------------------------------------------------------


def result(folder: EvaluationFolder) -> View:
    """The report of an evaluation.

    Returns:
        `models`, the one that the others are compared with first; `metrics`, see `_metric`; `changed`, see `_changes`;
        `parts`, what was measured besides, see `_parts_besides`; `notes` and `failed`, sentences; and `left_out`,
        sentences about what is not listed here.
    """
    return _result(folder.report, stamp(folder.report))


@functools.lru_cache(maxsize=32)
def _result(path: Path, version: Stamp | None) -> View:
    document, complete = EvaluationFolder(path.parent).document()
    rows = _entries(document, "rows", ("model", "metric"))[:_MOST_ROWS]
    comparisons = _entries(document, "comparisons", ("b", "metric"))[:_MOST_ROWS]
    compared = {_key(entry, "b"): entry for entry in comparisons}
    names = list(dict.fromkeys(_text(row["metric"], _MAX_NAME) for row in rows))
    every = _entries(document, "changed", ("a", "b"))
    failed = document.get("failed")
    left_out = [] if complete else ["the report is too long to be read here as a whole; report.json has the rest"]
    if len(every) > _MOST_CHANGED:
        left_out.append(f"{_MOST_CHANGED} of {len(every):,} changed answers are listed here")
    return {
        "models": list(dict.fromkeys(_text(row["model"], _MAX_NAME) for row in rows)),
        "metrics": [_metric(name, rows, compared) for name in names],
        "parts": _parts_besides(document),
        "changed": _changes(every[:_MOST_CHANGED]),
        "notes": [_text(note, _MAX_TEXT) for note in _list(document, "notes")[:_MOST_NOTES]],
        "failed": [f"{_text(name, _MAX_NAME)}: {_text(why, _MAX_TEXT)}" for name, why in failed.items()]
        if isinstance(failed, dict) else [],
        "left_out": left_out,
    }  # fmt: skip


def _parts_besides(document: Mapping[str, Any]) -> list[View]:
    """Forgetting, the judge's verdicts, and tasks of lm-evaluation-harness, as far as the report has them.

    Returns:
        `[{name, about, first, metrics, notes}]`: `first` is the model that others are compared with, `metrics` as of
        `_metric`, whose `lower` is None if nothing says which is better.
    """
    parts = []
    for name, part_of in (("forgetting", _forgetting), ("judge", _judged), ("tasks", _tasks)):
        if isinstance(part := document.get(name), dict):
            comparisons = _entries(part, "comparisons", ("a", "b", "metric"))[:_MOST_ROWS]
            rows = _entries(part, "rows", ("model", "metric"))[:_MOST_ROWS]
            first = (comparisons or [{"a": rows[0]["model"] if rows else ""}])[0]["a"]
            notes = [_text(note, _MAX_TEXT) for note in _list(part, "notes")[:_MOST_NOTES]]
            own = part_of(part, rows, comparisons)
            notes = [*own.pop("notes", []), *notes]
            parts.append({"name": name, "about": "", "first": _text(first, _MAX_NAME), "notes": notes, **own})
    return parts


def _forgetting(part: View, rows: list[View], comparisons: list[View]) -> View:
    return {"metrics": _by_group("sample", rows, comparisons)}


def _judged(part: View, rows: list[View], comparisons: list[View]) -> View:
    names = [_text(part.get(key), _MAX_NAME) for key in ("model", "url")]
    pairs = {_key(entry, "b"): entry for entry in comparisons}
    # Of a pair each model has a row, and one says it all.
    rows = [row for row in rows if "against" not in row or _key(row, "model") in pairs]
    metrics = [_metric(name, rows, pairs) for name in dict.fromkeys(_text(row["metric"], _MAX_NAME) for row in rows)]
    outcomes = (("won", "wins"), ("lost", "losses"), ("tied", "ties"), ("identical", "identical"))
    notes = []
    for entry in comparisons:
        counts = [(word, _number(entry.get(key))) for word, key in outcomes]
        if all(count is not None for _, count in counts):
            pair = f"{_text(entry['b'], _MAX_NAME)} against {_text(entry['a'], _MAX_NAME)}"
            notes.append(f"{pair}: {', '.join(f'{count:,.0f} {word}' for word, count in counts)}")
    return {"about": " at ".join(filter(None, names)), "metrics": metrics, "notes": notes[:_MOST_NOTES]}


def _tasks(part: View, rows: list[View], comparisons: list[View]) -> View:
    for row in rows:  # the harness has standard errors
        value, error = _number(row.get("value")), _number(row.get("stderr"))
        if value is not None and error is not None:
            row |= {"low": value - _OF_ERROR * error, "high": value + _OF_ERROR * error}
    metrics = _by_group("task", rows, comparisons)
    for metric in metrics:
        of_metric = [row for row in rows if (row.get("task"), row["metric"]) == (metric["group"], metric["name"])]
        higher = of_metric[0].get("higher_is_better") if of_metric else None
        metric["lower"] = not higher if isinstance(higher, bool) else None
    version = _text(part.get("version"), _MAX_NAME)
    return {"about": f"Version {version}" if version else "", "metrics": metrics}


def _by_group(key: str, rows: list[View], comparisons: list[View]) -> list[View]:
    """The metrics of each group of rows, which have its name under a key; each with its `group`."""
    metrics = []
    names = dict.fromkeys((row[key], row["metric"]) for row in rows if isinstance(row.get(key), str))
    for group, name in names:
        own, of_group = ([entry for entry in entries if entry.get(key) == group and entry["metric"] == name]
                         for entries in (rows, comparisons))  # fmt: skip
        compared = {_key(entry, "b"): entry for entry in of_group}
        metrics.append({**_metric(_text(name, _MAX_NAME), own, compared), "group": _text(group, _MAX_NAME)})
    return metrics


def _key(entry: Mapping[str, Any], model: str) -> tuple[str, str | None, str]:
    source = entry.get("source")
    return entry[model], source if isinstance(source, str) else None, entry["metric"]


def _metric(name: str, rows: Iterable[View], compared: Mapping[Any, View]) -> View:
    """A metric of all models.

    Returns:
        `name`, `title`, `lower` (whether lower is better), and `rows` `[{model, source, value, low, high, rows,
        difference, difference_low, difference_high, p_value, compared_rows, verdict}]`, whose source is None for all
        rows; the verdict is None for the model that others are compared with.
    """
    entries = []
    for row in rows:
        if _text(row["metric"], _MAX_NAME) != name:
            continue
        source, comparison = row.get("source"), compared.get(_key(row, "model"))
        values = {key: _number(row.get(key)) for key in ("value", "low", "high", "rows")}
        entries.append({"model": _text(row["model"], _MAX_NAME),
                        "source": _text(source, _MAX_NAME) if isinstance(source, str) else None,
                        **values, **_comparison(name, comparison)})  # fmt: skip
    return {"name": name, "title": short_name(name), "lower": name in LOWER_IS_BETTER, "rows": entries}


def _comparison(metric: str, comparison: View | None) -> View:
    entry = comparison or {}
    difference = _number(entry.get("difference"))
    shows = None if comparison is None else verdict(metric, difference, entry.get("significant") is True)
    if shows is not None and isinstance(own := entry.get("verdict"), str) and own in _VERDICTS:
        shows = own
    return {
        "difference": difference, "difference_low": _number(entry.get("low")),
        "difference_high": _number(entry.get("high")), "p_value": _number(entry.get("p_value")),
        "compared_rows": _number(entry.get("rows")), "verdict": shows,
    }  # fmt: skip


def _changes(entries: Iterable[View]) -> list[View]:
    """The answers that changed, by row.

    Returns:
        `[{row, source, metric, prompt, expected, before, was_right, a, answer_a, others}]`, with `others` `[{b, answer,
        after, is_right}]`. An answer is a list of parts of its text, each with whether the answer that it is compared
        with lacks it; None without answers. That of the first model is compared only if there is one other.
    """
    rows: dict[tuple[str, ...], View] = {}
    for change in entries:
        names = {key: _text(change.get(key), _MAX_NAME) for key in ("a", "b", "row", "metric")}
        texts = {key: _text(change[key], _MAX_TEXT) if isinstance(change.get(key), str) else None
                 for key in ("source", "prompt", "expected", "answer_a", "answer_b")}  # fmt: skip
        rights = {key: change[key] if isinstance(change.get(key), bool) else None for key in ("was_right", "is_right")}
        texts = {key: text if text is None else text.strip() for key, text in texts.items()}
        answer, other = texts.pop("answer_a"), texts.pop("answer_b")
        b, after, is_right = names.pop("b"), _number(change.get("after")), rights.pop("is_right")
        row: View = {
            **names,
            **texts,
            **rights,
            "before": _number(change.get("before")),
            "answer_a": answer,
            "others": [],
        }
        row = rows.setdefault((names["a"], names["row"], str(row["source"]), str(answer)), row)
        row["others"].append({"b": b, "answer": _parts(answer, other), "text": other, "after": after,
                              "is_right": is_right})  # fmt: skip
    for row in rows.values():
        others = [other.pop("text") for other in row["others"]]
        row["answer_a"] = _parts(others[0] if len(others) == 1 else row["answer_a"], row["answer_a"])
    return list(rows.values())


def _parts(before: str | None, after: str | None) -> list[tuple[str, bool]] | None:
    """The second text in parts, each with whether the first lacks it; None without one."""
    return None if after is None else changes(before or "", after)


def standings(view: View) -> list[View]:
    """How each model but the first compares with it on all rows.

    Returns:
        `[{model, better, worse, forgot, same, unknown}]`: titles of metrics; `same` shows no difference, which is not
        equal; `forgot` has names of samples.
    """
    kinds = {"better": "better", "worse": "worse", "no difference shown": "same"}
    models: dict[str, View] = {}
    for metric in view["metrics"]:
        for row in metric["rows"]:
            if row["source"] is not None or row["verdict"] is None:
                continue
            lists: View = {"better": [], "worse": [], "forgot": [], "same": [], "unknown": []}
            model = models.setdefault(row["model"], {"model": row["model"], **lists})
            model[kinds.get(row["verdict"], "unknown")].append(metric["title"])
    for part in view["parts"]:
        for metric in part["metrics"]:
            for row in metric["rows"]:
                if row["verdict"] == "forgot" and row["source"] is None and row["model"] in models:
                    models[row["model"]]["forgot"].append(metric["group"])
    return list(models.values())


# -- values that a file may hold -------------------------------------------------------------------------------------


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    return value if isinstance(value, list) else []


def _entries(document: Mapping[str, Any], name: str, texts: tuple[str, ...]) -> list[View]:
    """The objects of a list that have texts under these keys."""
    return [entry for entry in _list(document, name)
            if isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in texts)]  # fmt: skip


def _names(value: Any) -> list[str]:
    return (
        [_text(name, _MAX_NAME) for name in value[:_MOST_ROWS] if isinstance(name, str)]
        if isinstance(value, list)
        else []
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def _text(value: Any, most: int) -> str:
    """A text without control characters and halves of surrogate pairs, cut at `most` characters."""
    text = clean(value[: most + 1].encode(errors="replace").decode()) if isinstance(value, str) else ""
    return text if len(text) <= most else f"{text[:most]}…"
