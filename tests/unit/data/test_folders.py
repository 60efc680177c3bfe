"""Folders of data: every file is data of the split, or named with the reason why it is not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.test_support import configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data.files import ignored_files, resolve
from trainers.data.folders import split_of
from trainers.data.prepare import prepare
from trainers.tools.data_preview import Preview


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [{"text": f"{name} {number}"} for number in range(4)])
    return folder


def names_of(config, split="train"):
    return [file.name for file in resolve(config, split)]


def test_a_folder_gives_its_data_files_in_order(tmp_path):
    data = fill(tmp_path / "data", "z.jsonl", "b/a.txt", "notes.md", "readme_corpus.jsonl", "licenses.csv")
    assert names_of(configure(tmp_path, data)) == [
        "b/a.txt",
        "licenses.csv",
        "notes.md",
        "readme_corpus.jsonl",
        "z.jsonl",
    ]
    assert names_of(configure(tmp_path, f"{data}/**/*.jsonl")) == ["readme_corpus.jsonl", "z.jsonl"]


def test_what_is_no_data_is_named_in_report_log_and_page(tmp_path):
    data = fill(tmp_path / "data", "a.jsonl", "README.md", "LICENSE", ".hidden.jsonl", "b.pdf.gz", "c.pt", ".git/x.txt")
    (tmp_path / "elsewhere").mkdir()
    (data / "link").symlink_to(tmp_path / "elsewhere")
    config = configure(tmp_path, data, global_batch_size=1)
    report = prepare(config, "train").report
    assert report.ignored_files == [
        ".git/ (hidden)", ".hidden.jsonl (hidden)", "LICENSE (about the data)", "README.md (about the data)",
        "b.pdf.gz (ends in '.gz')", "c.pt (ends in '.pt')", "link/ (a link to a folder)",
    ]  # fmt: skip
    said = f"files left out: {', '.join(report.ignored_files)}"
    assert report.lines()[1].endswith(said)
    assert Preview(config).statistics()["notes"] == [said]
    fill(data, "d.parket")
    assert (
        "d.parket (ends in '.parket')" in prepare(config, "train").report.ignored_files
    )  # though the tokens are cached


def test_a_state_json_that_save_to_disk_did_not_write_is_data(tmp_path):
    assert names_of(configure(tmp_path, fill(tmp_path / "a", "state.json"))) == ["state.json"]


def test_files_named_after_a_split_are_that_split(tmp_path):
    data = fill(tmp_path / "data", "train.jsonl", "more.jsonl", "validation.jsonl", "test/x.jsonl", "gsm-test.jsonl")
    config = configure(tmp_path, data, eval_dataset_name=str(data))
    assert names_of(config) == ["more.jsonl", "train.jsonl"]
    assert names_of(config, "eval") == ["validation.jsonl"]
    assert names_of(configure(tmp_path, data, dataset_split="test")) == ["gsm-test.jsonl", "test/x.jsonl"]
    assert ignored_files(config, "train") == [
        "gsm-test.jsonl (split test)", "test/x.jsonl (split test)", "validation.jsonl (split eval)",
    ]  # fmt: skip
    texts = len(prepare(config, "train")), len(prepare(config, "eval"))
    assert texts == (8, 4)


def test_a_glob_of_several_splits_gives_one_and_of_a_single_split_all(tmp_path):
    data = fill(tmp_path / "data", "train.jsonl", "test.jsonl", "test-2.jsonl")
    assert names_of(configure(tmp_path, f"{data}/*.jsonl")) == ["train.jsonl"]
    assert names_of(configure(tmp_path, f"{data}/test*.jsonl")) == ["test-2.jsonl", "test.jsonl"]
    assert names_of(configure(tmp_path, data / "test.jsonl")) == ["test.jsonl"]


def test_a_folder_without_the_split_says_what_it_has(tmp_path):
    data = fill(tmp_path / "data", "test.jsonl", "dev.jsonl")
    with pytest.raises(
        ConfigError, match=r"dataset_split=train: no file of .* only after eval, test; set dataset_split"
    ):
        resolve(configure(tmp_path, data), "train")


def test_a_folder_of_other_files_says_which(tmp_path):
    data = fill(tmp_path / "data", "a.gz")
    with pytest.raises(ConfigError, match=r"holds no data file.* and not a.gz \(ends in '.gz'\)"):
        resolve(configure(tmp_path, data), "train")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"), ("data/Validation/a.csv", "eval"), ("my_dev.jsonl", "eval"),
        ("test/train.jsonl", "train"), ("trains.jsonl", None), ("contest.jsonl", None), ("latest.jsonl", None),
        ("train_test.jsonl", None), ("a/b.jsonl", None), ("test_questions.jsonl", "test"),
        ("test_questions.md", None), ("dev_notes.txt", None), ("train-00001-of-00002.txt", "train"),
        ("validation.txt", "eval"), ("train/dev_notes.txt", "train"),
    ],
)  # fmt: skip
def test_the_split_of_a_name(name, split):
    assert split_of(name) == split


NAMES = st.lists(
    st.builds(
        "".join,
        st.tuples(
            st.sampled_from(["", "sub/", "test/", ".git/"]),
            st.sampled_from(["a", "train", "valid", ".b", "README", "readme_x", "license"]),
            st.sampled_from(["", ".jsonl", ".JSONL", ".md", ".gz", ".pdf.gz", ".pt"]),
        ),
    ),
    unique_by=str.lower,
    max_size=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES)
def test_every_file_of_a_folder_is_read_or_named(tmp_path_factory, names):
    data = fill(tmp_path_factory.mktemp("data"), "train-0.jsonl", *names)
    config = configure(data.parent, data)
    read, ignored = names_of(config), [entry.rpartition(" (")[0] for entry in ignored_files(config, "train")]
    everything = {"train-0.jsonl", *names}
    assert {name for name in everything if name not in read} == {
        name for name in everything if any(name == entry or name.startswith(entry) for entry in ignored)
    } - set(read)
    assert len(read) + sum(name not in read for name in everything) == len(everything)
