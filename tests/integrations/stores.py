"""Reads what trackers stored on this machine: the values of a metric by tracked run, in the order of logging."""

from __future__ import annotations

import json
import sqlite3
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

Points = list[tuple[int, float]]
"""Step and value."""
_HEADER, _BLOCK = 7, 32768
"""Bytes of a header of LevelDB's log format, and of a block."""
_FULL, _LAST = 1, 4


def tensorboard(folder: Path, metric: str) -> dict[str, Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {"": [(point.step, point.value) for point in events.Scalars(metric)]}


def trackio(folder: Path, metric: str) -> dict[str, Points]:
    with sqlite3.connect(folder / "tunesmith.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    runs: dict[str, Points] = {name: [] for name, _, _ in rows}
    for name, step, text in rows:
        if metric in (values := json.loads(text)):
            runs[name].append((step, values[metric]))
    return runs


def mlflow(uri: str, metric: str) -> dict[str, Points]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tunesmith")
    assert experiment is not None
    ids = [run.info.run_id for run in client.search_runs([experiment.experiment_id])]
    return {id: [(point.step, point.value) for point in client.get_metric_history(id, metric)] for id in ids}


def wandb(folder: Path, metric: str) -> dict[str, Points]:
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, Points] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        points = runs.setdefault(file.stem.removeprefix("run-"), [])
        for data in _log_records(file):
            history = Record.FromString(data).history
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
            if metric in items:
                points.append((items["_step"], items[metric]))
    return runs


def swanlab(folder: Path, metric: str) -> dict[str, Points]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    runs: dict[str, Points] = {}
    for file in sorted(folder.glob("run-*/*.swanlab")):
        points = runs.setdefault(file.stem.removeprefix("run-"), [])
        for data in _log_records(file):
            scalar = Record.FromString(data).scalar
            if scalar.key == metric:
                points.append((scalar.step, scalar.value.number))
    return runs


def comet(folder: Path, metric: str) -> dict[str, Points]:
    """Of what was archived: an experiment that was killed left an empty file."""
    runs: dict[str, Points] = {}
    for file in sorted(folder.glob("*.zip"), key=lambda file: file.stat().st_mtime):
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            lines = archive.read("messages.json").splitlines() if "messages.json" in names else []
        points = runs.setdefault(file.name[:32], [])
        values = [json.loads(line)["payload"].get("metric") for line in lines]
        points += [(value["step"], value["metricValue"]) for value in values if value and value["metricName"] == metric]
    return runs


def _log_records(file: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which W&B and SwanLab use; a killed writer leaves the last cut."""
    data, position, record = file.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        part = data[position + _HEADER : position + _HEADER + length]
        if len(part) < length or not kind:
            return
        position += _HEADER + length
        record += part
        if kind in (_FULL, _LAST):
            yield record
            record = b""
