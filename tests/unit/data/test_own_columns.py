"""Numeric columns that an objective in a file of one's own names: read, refused or named with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from tests.unit.data.test_preferences import RIGHT, USER, WRONG
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.data.layout import SequenceShard
from trainers.data.prepare import TokenSet, prepare
from trainers.tools.data_preview import Preview
from trainers.tools.preflight import make_rows

WEIGHTED = "class Own: spec = {'like': 'dpo', 'columns': ['weight']}"


def weighted(folder: Path, rows: list[dict[str, Any]], source: str = WEIGHTED, **options: Any) -> TokenSet:
    """The prepared data under an objective in a file, whose source is never run."""
    (folder / "own.py").write_text(source)
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    needed = {"model_name_or_path": "embedded", "dataset_name": str(path), "cache_dir": str(folder / "cache")}
    return prepare(build({**needed, "objective": f"{folder}/own.py:Own", **options}), "train")


def row(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"prompt": [{**USER, "content": f"{number}+1?"}], "chosen": [RIGHT], "rejected": [WRONG], **more}


def test_a_column_of_a_file_is_a_number_of_the_row(tmp_path: Path) -> None:
    weights = [0.5, 2, "3.5", 0, -1]
    rows = [row(number, weight=weight, margin=9) for number, weight in enumerate(weights)]
    data = weighted(tmp_path, rows)
    assert data.numbers.tolist() == [[float(weight)] for weight in weights for _ in range(2)]
    assert list(data.report.unused) == ["margin"], "it is like dpo, which reads none"
    other = weighted(tmp_path, [{**row, "margin": 1} for row in rows], WEIGHTED.replace("['w", "['margin', 'w"))
    assert other.numbers[::2].tolist() == [[1, float(weight)] for weight in weights]
    assert other.fingerprint != data.fingerprint
    plain = weighted(tmp_path, rows, "class Own: spec = {'like': 'dpo'}")
    assert plain.numbers.shape == (10, 0)
    assert sorted(plain.report.unused) == ["margin", "weight"]
    assert plain.fingerprint not in (data.fingerprint, other.fingerprint)


@pytest.mark.parametrize("packing", [True, False])
def test_each_document_of_a_batch_has_the_number_of_its_row(packing: bool, tmp_path: Path) -> None:
    data = weighted(tmp_path, [row(number, weight=number) for number in range(9)])
    needed = {"model_name_or_path": "embedded", "dataset_name": "x", "max_length": 64, "packing": packing}
    settings = build({**needed, "objective": f"{tmp_path}/own.py:Own"})
    for count in (1, 2):
        rows = make_rows(settings, data, SequenceShard(0, count))
        scored = rows.collate(np.arange(len(rows))).scored
        assert scored is not None
        assert scored.columns["weight"].tolist() == [number // 2 for number in scored.numbers.tolist()]


def test_a_column_is_mapped_and_read_of_every_kind_of_file(tmp_path: Path) -> None:
    rows = [row(number, my_col=number / 2) for number in range(3)]
    assert weighted(tmp_path, rows, columns={"weight": "my_col"}).numbers[::2, 0].tolist() == [0, 0.5, 1]
    for name, write in (("rows.parquet", pq.write_table), ("rows.csv", csv.write_csv)):
        table = {
            "prompt": ["1+1?", "2"],
            "chosen": [" 2", " 3"],
            "rejected": [" 3", " 4"],
            "my_col": [1.5, 2],
            "x": [0, 0],
        }
        write(pa.table(table), tmp_path / name)
        data = weighted(tmp_path, [], columns={"weight": "my_col"}, dataset_name=str(tmp_path / name))
        assert data.numbers[:, 0].tolist() == [1.5, 1.5, 2, 2]
        assert list(data.report.unused) == ["x"]


@pytest.mark.parametrize("value", ["much", "1_5", "\u0663", True, float("nan"), float("inf"), [1], 1e30, "", None, ...])
def test_what_is_no_number_in_a_column_is_refused_with_file_and_line(value: Any, tmp_path: Path) -> None:
    cell = {} if value is ... else {"my_col": value}
    lacking = value is None or value is ...
    problem = "'my_col' is missing or null" if lacking else "my_col is .*, not a number from -1e6 to 1e6"
    with pytest.raises(ConfigError, match=rf"rows.jsonl:2: .*{problem}"):
        weighted(tmp_path, [row(1, my_col=1), row(2, **cell)], columns={"weight": "my_col"})
    data = weighted(tmp_path, [row(1, my_col=1), row(2, **cell)], columns={"weight": "my_col"}, bad_rows="skip")
    assert (data.numbers.tolist(), data.report.bad) == ([[1], [1]], 1)


def test_data_without_a_column_is_not_taken_from_where_it_may_lack(tmp_path: Path) -> None:
    rows = [row(1), row(2)]
    assert np.isnan(weighted(tmp_path, rows, "class Own: spec = {'like': 'reward'}").numbers).all()
    required = "class Own: spec = {'like': 'reward', 'columns': ['margin']}"
    with pytest.raises(ConfigError, match="'margin' is missing or null, and the objective reads it"):
        weighted(tmp_path, rows, required)


def test_a_single_answer_has_its_number_and_a_pair_gives_its_own_to_both(tmp_path: Path) -> None:
    source = WEIGHTED.replace("dpo", "kto")
    answers = [
        {"prompt": "1+1?", "completion": f" {number}", "label": number == 2, "weight": number} for number in (2, 3)
    ]
    data = weighted(tmp_path, answers, source)
    assert (data.numbers[:, 0].tolist(), data.desirable.tolist()) == ([2, 3], [True, False])
    data = weighted(tmp_path, [row(1, weight=7), row(2, weight=8)], source)
    assert (data.numbers[:, 0].tolist(), data.desirable.tolist()) == ([7, 7, 8, 8], [True, False, True, False])
    settings = build({"model_name_or_path": "embedded", "dataset_name": "x", "objective": f"{tmp_path}/own.py:Own"})
    rows = make_rows(settings, data)
    assert rows.mismatched is not None
    scored = rows.mismatched.collate(np.arange(len(rows.mismatched))).scored
    assert scored is not None
    assert (scored.desirable, scored.columns) == (None, {}), "mismatched documents are no examples"


def test_the_preview_shows_what_training_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WEIGHTED)

    def preview(*rows: dict[str, Any], objective: str) -> Preview:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        needed = {"model_name_or_path": "embedded", "dataset_name": str(path), "cache_dir": str(tmp_path / "cache")}
        return Preview(build({**needed, "objective": objective, "global_batch_size": 1}))

    own = preview(row(1, weight=1), row(2, weight="x"), objective=f"{tmp_path}/own.py:Own")
    good, bad = own.rows(0, 2)["rows"]
    assert (good["mistake"], bad["mistake"][0]) == (None, "wrong number")
    assert any("weight is 'x', not a number" in line for line in own.statistics()["mistakes"])
    lines = preview(row(1, margin=1), row(2), objective="reward").statistics()["mistakes"]
    assert any("'margin' is missing, and other rows have one" in line for line in lines)
    assert not preview(row(1, margin=1), row(2, margin=0), objective="reward").statistics()["mistakes"]  # control
