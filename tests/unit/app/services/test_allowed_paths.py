"""Which files a request may touch, and where what is uploaded goes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from app.services.allowed_paths import path_mistakes, strategy_mistake
from app.services.form import preview
from app.services.uploads import EXTENSIONS, safe_name, store
from trainers.config.local_paths import INPUT_PATHS, OUTPUT_FOLDERS
from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import COMPRESSED
from trainers.data.files import KINDS
from trainers.strategy.deepspeed_schema import OUTPUT_PATHS, DeepSpeedJson
from trainers.strategy.schema import Section, nested_section

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed folder beside one that is not, with links from the one into the other."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "data", inside / "model", outside / "data"):
        folder.mkdir(parents=True)
    (inside / "data" / "a.jsonl").write_text("{}\n")
    (inside / "data" / "b.jsonl").symlink_to("a.jsonl")
    (outside / "secret.jsonl").write_text("{}\n")
    (inside / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (inside / "way out").symlink_to(outside)
    (inside / "mixed").mkdir()
    (inside / "mixed" / "x.jsonl").symlink_to(outside / "secret.jsonl")
    (inside / "circle").symlink_to("circle")
    return inside


def refused(root: Path, **values: str) -> dict[str, str]:
    return {mistake.option: str(mistake) for mistake in path_mistakes(values, [root])}


@pytest.mark.parametrize("value", ["data/a.jsonl", "data", "data/*.jsonl", "model"])
def test_what_lies_inside_is_allowed(root: Path, value: str) -> None:
    assert refused(root, dataset_name=str(root / value)) == {}


@pytest.mark.parametrize("value", ["org/name", "gpt2", "embedded", "Qwen/Qwen3-1.7B", "none", ""])
def test_hub_ids_and_our_own_names_are_no_paths(root: Path, value: str) -> None:
    assert refused(root, model_name_or_path=value, dataset_name=value) == {}


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd", "../outside/secret.jsonl", "{root}/../outside/secret.jsonl", "{root}/data/..%2f..%2foutside",
        "..%2F..%2Fetc", "~/x", "~root/x", "file:///etc/passwd", "http://169.254.169.254/x", "https://a.b/c.jsonl",
        "s3://bucket/x", "hf://datasets/a/b/c.jsonl", "gs://bucket/x", "sqlite:///{root}/data.db", "postgresql://a.b/c",
        "sqlite:/x.db", "{root}/link.jsonl", "{root}/way out/secret.jsonl", "{root}/way out", "{root}/mixed",
        "{root}/mixed/*.jsonl", "{root}/*/x.jsonl", "{root}/**", "{root}/way out/*.jsonl", "{root}/circle", "/", ".",
        "{root}/data/a\u202e.jsonl", "{root}/" + "x" * 300, "..\\..\\etc", "nothing.jsonl", "{root}/nothing",
        "/proc/self/environ", "{root}/data/none*.jsonl",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["dataset_name", "eval_dataset_name", "model_name_or_path"])
def test_what_leads_out_is_refused(root: Path, value: str, name: str) -> None:
    found = refused(root, **{name: value.replace("{root}", str(root))})
    assert list(found) == [name]
    assert found[name].startswith(f"{name}=")


def test_a_link_inside_to_the_inside_is_allowed(root: Path) -> None:
    assert refused(root, dataset_name=str(root / "data" / "b.jsonl")) == {}


@pytest.mark.parametrize("name", OUTPUT_FOLDERS)
def test_what_is_written_lies_inside_too(root: Path, name: str) -> None:
    assert refused(root, **{name: str(root / "new" / "folder")}) == {}
    for value in ("/tmp/elsewhere", str(root / "way out" / "x"), "~/x", "../x"):
        assert list(refused(root, **{name: value})) == [name]
    assert refused(root, resume_from_checkpoint="auto") == {}


def test_the_line_names_option_value_and_roots(root: Path) -> None:
    (mistake,) = path_mistakes({"dataset_name": "/etc", "runs_dir": str(root)}, [root])
    assert re.fullmatch(f"dataset_name=/etc is outside .* under {root}.*", str(mistake))


def test_without_the_check_the_outside_is_read(root: Path) -> None:
    values = {"dataset_name": str(root / "link.jsonl"), "runs_dir": str(root)}
    assert preview(values, "tiny-lora", num_processes=1).job is not None
    assert list(preview(values, "tiny-lora", num_processes=1, roots=[root]).errors) == ["dataset_name"]


@pytest.mark.parametrize("name", [*INPUT_PATHS, *OUTPUT_FOLDERS])
def test_a_preview_refuses_every_kind_of_path(root: Path, name: str) -> None:
    for path in ("/etc/passwd", "s3://bucket/x"):
        values = {"runs_dir": str(root), name: path}
        assert list(preview(values, "tiny-lora", num_processes=1, roots=[root]).errors) == [name]


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("dataset_name: data/a.jsonl", False), ("dataset_name: org/name", False), ("dataset_name: embedded", False),
        ("dataset_name: ../outside/secret.jsonl", True), ("dataset_name: /etc/hosts", True),
        ("dataset_name: link.jsonl", True), ("dataset_name: mixed", True), ("dataset_name: ~/x.jsonl", True),
        ("dataset_name: http://a.b/c.jsonl", True), ("dataset_name: hf://datasets/a/b.jsonl", True),
        ("dataset_name: sqlite:///data.db\n    dataset_query: select 1", True),
        ("dataset_name: ../outside/*/*.jsonl", True),
        ("dataset_name: embedded\n    chat_template: /etc/hosts", True), ("dataset_nam: x", True),
    ],
)  # fmt: skip
def test_the_sources_of_a_mix_lie_inside(root: Path, source: str, is_refused: bool) -> None:
    file = root / "mix.yaml"
    file.write_text(f"sources:\n  - {source}\n")
    mistakes = path_mistakes({"mix": str(file)}, [root])
    assert bool(mistakes) == is_refused
    assert all("root:" not in str(mistake) for mistake in mistakes)


def test_a_strategy_and_its_json_lie_inside(root: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    (root / "out.yaml").write_text(text.format("/etc/passwd"))
    (root / "in.yaml").write_text(text.format(root / "zero.json"))
    assert strategy_mistake("ddp", [root]) is None
    assert strategy_mistake(str(root / "in.yaml"), [root]) is None
    assert "deepspeed_config_file=/etc/passwd" in str(strategy_mistake(str(root / "out.yaml"), [root]))
    assert "outside" in str(strategy_mistake("/etc/x.yaml", [root]))
    assert list(preview({"runs_dir": str(root)}, "tiny-lora", "/etc/x.yaml", roots=[root]).errors) == ["strategy"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("flops_profiler", "output_file"),
        ("zero_optimization.offload_optimizer", "nvme_path"),
        ("zero_optimization.offload_param", "nvme_path"),
    ],
)
def test_what_a_json_writes_to_lies_inside(root: Path, section: str, key: str) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    file, strategy = root / "zero.json", root / "zero.yaml"
    strategy.write_text(text.format(file))
    for path in ("/etc/passwd", "../x", f"{root}/../x", str(root / "way out" / "x"), "~/x", str(root / "new")):
        content: dict[str, Any] = {key: path}
        for name in reversed(section.split(".")):
            content = {name: content}
        file.write_text(json.dumps(content))
        line = strategy_mistake(str(strategy), [root])
        assert (line is None) == (path == str(root / "new")), line
        assert line is None or f"{section}.{key}={path} " in str(line)
    assert path == str(root / "new"), "the control"


def test_every_text_of_a_json_that_is_no_path_is_known() -> None:
    """A key that DeepSpeed takes for a path must be held against the allowed folders too."""
    no_paths = {"optimizer.type", "log_level", "seq_parallel_communication_data_type"}

    def texts(section: type[Section], where: str = "") -> set[str]:
        found = set()
        for name, field in section.model_fields.items():
            if nested := nested_section(field):
                found |= texts(nested, f"{where}{name}.")
            elif field.annotation == str | None:
                found.add(f"{where}{name}")
        return found

    assert texts(DeepSpeedJson) == no_paths | set(OUTPUT_PATHS)


def test_a_very_large_folder_is_not_looked_through(root: Path) -> None:
    many = root / "many"
    many.mkdir()
    for number in range(10_001):
        os.link(root / "data" / "a.jsonl", many / str(number))
    assert "more than 10,000 files" in refused(root, dataset_name=str(many))["dataset_name"]


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_the_endings_are_those_of_plain_files() -> None:
    """What is compressed could fill the disk; Arrow files are for those who have them already."""
    assert {*EXTENSIONS, ".arrow"} == set(KINDS)
    assert not {*EXTENSIONS} & {*COMPRESSED, ".tar"}


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("data.jsonl", "data.jsonl"),
        ("../../etc/cron.d/x.csv", "x.csv"),
        ("C:\\data\\My Data.CSV", "My-Data.csv"),
        ("..jsonl.txt", "jsonl.txt"),
        (".hidden.json", "hidden.json"),
        ("gnl\u202enosj.txt", "gnlnosj.txt"),
        ("a\x00b\nc.txt", "abc.txt"),
        ("*?[x].txt", "x-.txt"),
        ("-rf.txt", "rf.txt"),
        ("日本 🙂.jsonl", "日本-🙂.jsonl"),
    ],
)
def test_a_name_is_only_a_name(sent: str, stored: str) -> None:
    assert safe_name(sent) == stored


def test_a_long_name_is_cut() -> None:
    assert len(safe_name("x" * 300 + ".jsonl")) == 100
    assert len(safe_name("日" * 300 + ".jsonl").encode()) < 255


@pytest.mark.parametrize("name", ["x.py", "x", "x.jsonl.exe", "x.safetensors", "", ".", "..", "x.pkl", "\u202e.txt"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use one of"):
        safe_name(name)


def test_an_upload_is_stored_and_never_over_another(tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    for number in range(3):
        (tmp_path / "sent").write_text(f"{number}")
        store(tmp_path / "sent", "data.jsonl", uploads)
    assert {path.name: path.read_text() for path in uploads.iterdir()} == {
        "data.jsonl": "0", "data-2.jsonl": "1", "data-3.jsonl": "2"
    }  # fmt: skip


def test_links_and_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("12345")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    uploads = tmp_path / "uploads"
    for name in ("link", "pipe", "missing"):
        with pytest.raises(ConfigError):
            store(tmp_path / name, "x.txt", uploads)
    with pytest.raises(ConfigError, match="more than 4"):
        store(tmp_path / "real", "x.txt", uploads, max_bytes=4)
    uploads.mkdir(exist_ok=True)
    (uploads / "x.txt").symlink_to(tmp_path / "target")
    assert store(tmp_path / "real", "x.txt", uploads).name == "x-2.txt"
    assert not (tmp_path / "target").exists()
