"""Folders whose `README.md` lists configurations, as copies of data sets on the Hub do."""

from __future__ import annotations

import os

import pytest
from datasets import load_dataset

from tests.unit.data.test_folders import fill, names_of
from tests.unit.data.test_support import configure
from trainers.config.mistakes import ConfigError
from trainers.data.files import ignored_files
from trainers.data.prepare import prepare

HEADER = """\
---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train_sft, path: data/a-*.jsonl}
  - {split: validation, path: data/held.jsonl}
- config_name: other
  data_files: data/b.jsonl
---
# A set
"""


@pytest.fixture
def copy(tmp_path):
    folder = fill(tmp_path / "set", "data/a-2.jsonl", "data/a-1.jsonl", "data/b.jsonl", "data/held.jsonl", "old.jsonl")
    (folder / "README.md").write_text(HEADER)
    return folder


@pytest.mark.parametrize(
    ("options", "config_name", "split"),
    [({"dataset_split": "train_sft"}, None, "train_sft"), ({"dataset_config_name": "other"}, "other", "train"),
     ({"dataset_split": "eval"}, None, "validation"), ({"dataset_split": "dev"}, None, "validation")],
)  # fmt: skip
def test_the_rows_are_those_that_datasets_loads(copy, tmp_path, options, config_name, split):
    names = names_of(configure(tmp_path, copy, **options))
    ours = [row for name in names for row in (copy / name).read_text().splitlines()]
    theirs = load_dataset(str(copy), config_name, split=split, cache_dir=str(tmp_path / "hf"))
    assert len(ours) == len(theirs) > 0
    assert all(text in row for row, text in zip(ours, theirs["text"], strict=True))
    (copy / "README.md").unlink()
    everything = configure(tmp_path, copy, **{**options, "dataset_config_name": None, "dataset_split": "train"})
    assert len(names_of(everything)) == 5, "without the header, every file is data"


def test_other_files_are_named(copy, tmp_path):
    config = configure(tmp_path, copy, dataset_split="train_sft", global_batch_size=1)
    assert ignored_files(config, "train") == [
        f"{name} (not in split train_sft of configuration default)"
        for name in ("data/b.jsonl", "data/held.jsonl", "old.jsonl")
    ]
    assert prepare(config, "train").report.rows == 8


@pytest.mark.parametrize(
    ("header", "options", "problem"),
    [
        (
            HEADER,
            {},
            "no such split; its .* default has the splits train_sft, validation; set dataset_split",
        ),
        (HEADER, {"dataset_config_name": "nope"}, "'nope' not found. Available: .*'other'.*set dataset_config_name"),
        (HEADER.replace("config_name: default", "config_name: first"), {}, "first.*other.* set dataset_config_name"),
        (HEADER.replace("data/b.jsonl", "data/gone.jsonl"), {"dataset_config_name": "other"}, "gone.jsonl"),
        (
            HEADER.replace("data/b.jsonl", "../x/a.jsonl"),
            {"dataset_config_name": "other"},
            "elsewhere, .* ../x/a",
        ),
        ("---\nconfigs: [{\n---\n", {}, "is not YAML"),
        ("---\nconfigs: 3\n---\n", {}, "README.md"),
        ("---\nconfigs:\n- data_files: 3\n---\n", {}, "README.md"),
    ],
)
def test_what_cannot_be_followed_is_refused(copy, tmp_path, header, options, problem):
    fill(tmp_path / "x", "a.jsonl")
    (copy / "README.md").write_text(header)
    with pytest.raises(ConfigError, match=problem):
        names_of(configure(tmp_path, copy, **options))


@pytest.mark.parametrize(
    "text", ["", "# configs:\n", "---\nlicense: mit\n---\nconfigs:\n- data_files: a\n", "---\nconfigs: []\n---\n"]
)
def test_a_readme_without_configurations_changes_nothing(copy, tmp_path, text):
    (copy / "README.md").write_text(text)
    assert len(names_of(configure(tmp_path, copy))) == 5


def test_a_readme_of_any_kind_changes_nothing(copy, tmp_path):
    (copy / "README.md").write_bytes("# Café\n".encode("latin-1"))
    assert len(names_of(configure(tmp_path, copy))) == 5
    (copy / "README.md").unlink()
    os.mkfifo(copy / "README.md")
    assert len(names_of(configure(tmp_path, copy))) == 5


def test_a_snapshot_of_the_hub_s_cache_is_followed(copy, tmp_path):
    """Its files are links to others, below a hidden folder; its lines may end as those of Windows."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / ".cache" / "snapshots" / "0f"
    copy.rename(blobs)
    (blobs / "README.md").write_bytes(HEADER.replace("\n", "\r\n").encode())
    for file in [path for path in blobs.rglob("*") if path.is_file()]:
        link = snapshot / file.relative_to(blobs)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file, link.parent))
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        config = configure(tmp_path, folder, dataset_split="train_sft")
        assert names_of(config) == ["data/a-1.jsonl", "data/a-2.jsonl"]


@pytest.mark.parametrize("name", ["data", "old.jsonl", "*.jsonl", "embedded"])
def test_a_configuration_of_what_has_none_is_refused(copy, tmp_path, name):
    data = name if name == "embedded" else copy / name
    with pytest.raises(ConfigError, match=r"dataset_config_name=other has no meaning for .*; leave it out"):
        names_of(configure(tmp_path, data, dataset_config_name="other"))
    assert names_of(configure(tmp_path, data))
