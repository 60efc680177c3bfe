"""Files that are not what their names say: one sentence each, and nothing hangs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import run_verb
from app.command_line import TRAIN
from app.launch.job import train_job
from tests.made_runs import add_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.run.folder import RunFolder, read_json
from trainers.run.json_file import load_json
from trainers.run.manifest import read_manifest
from trainers.tools.preflight import check_model

pytestmark = pytest.mark.usefixtures("elsewhere")
DEEP = "[" * 100_000
WRONG: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text(f'{{"state": {DEEP}'),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "binary": lambda path: path.write_bytes(b"\xff\x00" * 100),
    "empty": lambda path: path.write_text(""),
    "a long number": lambda path: path.write_text('{"state": "done", "step": ' + "9" * 10_000 + "}"),
    "a list": lambda path: path.write_text("[1]"),
}


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    WRONG[kind](path)


@pytest.mark.parametrize("kind", WRONG)
def test_no_file_is_an_error_of_another_kind(kind: str, tmp_path: Path) -> None:
    replace(tmp_path / "x.json", kind)
    assert read_json(tmp_path / "x.json") is None
    if kind != "a list":
        with pytest.raises((OSError, ValueError)):
            load_json(tmp_path / "x.json")
    (tmp_path / "large.json").write_text('"' + "x" * 100 + '"')
    with pytest.raises(ValueError, match="larger than 50 bytes"):
        load_json(tmp_path / "large.json", most=50)
    assert load_json(tmp_path / "large.json") == "x" * 100  # the control


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ["state.json", "config.yaml", "accelerate.yaml", "command.txt", "metrics.jsonl"])
def test_one_bad_run_does_not_break_the_list(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("bad", "good"):
        made_run(Path("runs"), run)
    replace(Path("runs/bad") / name, kind)
    assert run_verb(["runs", "list", "--json"]) == 0
    listed = {row["id"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert listed["good"] == "done"
    assert ("bad" in listed) == (name != "state.json"), listed
    assert run_verb(["runs", "show", "good"]) in (0, 2)


@pytest.mark.parametrize("kind", WRONG)
def test_a_manifest_that_is_none_is_a_bad_checkpoint(kind: str) -> None:
    folder = add_checkpoint(made_run(Path("runs"), "a"), 5)
    replace(folder / "manifest.json", kind)
    with pytest.raises(ValueError, match="its manifest"):
        read_manifest(folder)


@pytest.mark.parametrize("kind", WRONG)
def test_a_models_config_is_refused_in_one_sentence(kind: str) -> None:
    Path("model").mkdir()
    Path("model/model.safetensors").write_bytes(b"")
    replace(Path("model/config.json"), kind)
    config = build({"model_name_or_path": "model", "dataset_name": "embedded"})
    (mistake,) = check_model(config)[:1]
    line = str(mistake)
    assert line.startswith("model_name_or_path=model: config.json "), line
    assert "\n" not in line


def test_a_weights_header_that_is_nested_is_damage() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    config = build({"model_name_or_path": "model", "dataset_name": "embedded"})
    assert any("model.safetensors is damaged" in str(line) for line in check_model(config))
    Path("model/model.safetensors").unlink()
    os.mkfifo("model/model.safetensors")
    assert any("not a regular file" in str(line) for line in check_model(config))


@pytest.mark.parametrize(
    "text",
    [
        "num_processes: 1000000000",
        "num_processes: " + "9" * 4000,
        "num_processes: 2\nnum_machines: 1000000000",
        "num_processes: 2\nparallelism_config: {parallelism_config_tp_size: 1000000000}",
        "num_processes: 1000000000\nparallelism_config: {parallelism_config_dp_replicate_size: 1000000000}",
        "num_processes: 2\n# pp_size: 1000000000",
        "num_processes: 60000",
    ],
)
def test_a_number_that_no_machine_has_is_refused_before_anything_counts_to_it(text: str) -> None:
    Path("mine.yaml").write_text(f"distributed_type: MULTI_GPU\n{text}\n")
    with pytest.raises(ConfigError, match=r"write at most|write 1 to|is out of range"):
        train_job(TRAIN.read(["tiny-lora", "--strategy", "mine.yaml"]))


@pytest.mark.parametrize("option", ["max_steps", "pp_size", "global_batch_size", "per_device_train_batch_size"])
def test_an_option_of_26_digits_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=.* is refused: input should be less than or equal to"):
        train_job(TRAIN.read(["tiny-lora", f"--{option}", "9" * 26]))


def test_a_pipe_in_place_of_the_state_is_no_run() -> None:
    run = RunFolder("runs/a")
    run.create()
    os.mkfifo(run.state_file)
    assert run.read_state() is None
