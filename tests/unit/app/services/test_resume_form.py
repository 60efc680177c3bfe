"""The form that goes on with a run: the options it gives are those of `tunesmith resume`, with the same guards."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from app.command_line import TRAIN
from app.launch.job import resume_job
from app.services.resume_form import ResumeForm, resume_form, resume_preview
from tests.made_runs import add_sealed_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import RunFolder, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")
RUNS = Path("runs")


@pytest.fixture
def stopped() -> RunFolder:
    """A stopped run with a checkpoint that knows its config."""
    run = made_run(RUNS.absolute(), "mine", "stopped")
    add_sealed_checkpoint(run, 20, world=2)
    return run


def form() -> ResumeForm:
    return resume_form("mine", RUNS.absolute())


def shown(**changed: Any) -> dict[str, Any]:
    return {**form().texts, **changed}


def test_an_untouched_form_is_a_plain_resume(stopped: RunFolder) -> None:
    preview = resume_preview(form(), shown(), num_processes="2")
    assert preview.errors == {}
    assert preview.job
    assert (preview.job.run.path, preview.job.resume_from) == (stopped.path, "auto")
    words = shlex.split(preview.command)
    assert words[-2:] == ["resume", str(stopped.path)]


def test_a_remedy_is_applied_and_the_command_does_the_same(stopped: RunFolder) -> None:
    changes = {"per_device_train_batch_size": "4", "gradient_checkpointing": True, "save_steps": " 7 "}
    preview = resume_preview(form(), shown(**changes), "fsdp2", num_processes="4")
    assert preview.errors == {}
    assert preview.job
    assert preview.job.config.per_device_train_batch_size == 4
    assert (preview.job.config.gradient_checkpointing, preview.job.config.save_steps) == (True, 7)
    assert (preview.job.strategy.name, preview.job.devices.num_processes) == ("fsdp2", 4)
    words = shlex.split(preview.command)
    typed = resume_job(stopped, TRAIN.read(words[words.index(str(stopped.path)) + 1 :]))
    assert (typed.config, typed.strategy.values, typed.devices) == (
        preview.job.config, preview.job.strategy.values, preview.job.devices
    )  # fmt: skip


@pytest.mark.parametrize("launch", [{"num_processes": "2"}, {"num_processes": "4"}, {"strategy": "fsdp2"}])
def test_the_command_of_several_machines_starts_machine_0(stopped: RunFolder, launch: dict[str, str]) -> None:
    network = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "127.0.0.1", "main_process_port": 29511}
    write_json(stopped.accelerate, {**read_yaml(stopped.accelerate), **network})
    stopped.write_state(machines={"count": 2, "minimum": None})
    preview = resume_preview(form(), shown(), **{"num_processes": "2", **launch})
    assert preview.errors == {}
    assert preview.job
    assert preview.job.devices.machines
    args = shlex.split(preview.command)
    typed = resume_job(stopped, TRAIN.read(args[args.index(str(stopped.path)) + 1 :]))
    assert (typed.strategy.values, typed.devices) == (preview.job.strategy.values, preview.job.devices)


def test_what_would_train_something_else_needs_force(stopped: RunFolder) -> None:
    preview = resume_preview(form(), shown(learning_rate="1e-5"))
    assert list(preview.errors) == ["learning_rate"]
    assert "--force" in preview.errors["learning_rate"][0].remedy
    forced = resume_preview(form(), shown(learning_rate="1e-5"), force=True)
    assert forced.errors == {}
    assert forced.command.endswith("--learning_rate=1e-5 --force")
    assert list(resume_preview(form(), shown(lora_r="4"), force=True).errors) == ["lora_r"], "no force makes it fit"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"output_dir": "/tmp/x"}, "output_dir"),
        ({"runs_dir": "elsewhere"}, "runs_dir"),
        ({"max_length": "abc"}, "max_length"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"dataset_name": "/etc/passwd"}, "dataset_name"),
        ({"dataset_name": ["x", {}]}, "dataset_name"),
    ],
)
def test_what_is_refused_is_told_at_its_field(stopped: RunFolder, changed: dict[str, Any], field: str) -> None:
    preview = resume_preview(form(), shown(**changed), roots=[Path.cwd()])
    assert list(preview.errors) == [field]
    assert preview.job is None


def test_a_strategy_file_outside_the_roots_is_refused(stopped: RunFolder) -> None:
    assert list(resume_preview(form(), shown(), "/etc/passwd", roots=[Path.cwd()]).errors) == ["strategy"]


@pytest.mark.parametrize("state", ["done", "gone"])
def test_only_a_run_that_can_go_on_has_such_a_form(state: str) -> None:
    if state == "done":
        made_run(RUNS.absolute(), "mine", "done")
    with pytest.raises(ConfigError, match="is done" if state == "done" else "there is no run"):
        form()


def test_the_command_line_refuses_the_same(stopped: RunFolder) -> None:
    with pytest.raises(ConfigError) as refused:
        resume_job(stopped, TRAIN.read(["--learning_rate", "1e-5"]))
    assert refused.value.mistakes == resume_preview(form(), shown(learning_rate="1e-5")).mistakes
