"""Which GPUs, strategy and micro-batch a run gets by itself, on machines with any number of GPUs (stand-ins)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import app.hardware
import app.plan.command
from app.command_line import TRAIN
from app.hardware import Gpu
from app.launch.job import TrainJob, train_job
from app.plan.command import plan_verb
from app.plan.scale import SHAPES
from app.services.choices import GpuChoice
from app.services.form import default_gpus, preview
from tests.presets import left_to_the_user
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.config.presets import preset_names
from trainers.strategy.micro_batch import OPTION, fit_micro_batch
from trainers.strategy.pipeline_schedules import micro_batch_mistake
from trainers.strategy.strategy import load_strategy, resolve
from trainers.train import with_micro_batch
from ui.pages.train_parts import panel

pytestmark = pytest.mark.usefixtures("elsewhere")
COUNTS = (0, 1, 2, 3, 4, 5, 6, 8)


def stand_in(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    machine = [Gpu(index, f"GPU-{index}", "H100", 80 << 30) for index in range(count)]
    monkeypatch.setattr(app.hardware, "find_gpus", lambda: machine)


def job_of(*words: str) -> TrainJob:
    return train_job(TRAIN.read(words))


@pytest.mark.parametrize("count", COUNTS)
def test_every_preset_starts_on_any_number_of_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first screen is green, and says what was chosen where it is not all that the machine and the preset have."""
    stand_in(monkeypatch, count)
    for name in preset_names():
        options = left_to_the_user(name)
        shown = preview(options, preset=name)
        assert shown.errors == {}, name
        assert shown.job
        job, config, plain = shown.job, shown.job.config, Request(name, options=options).resolve()
        micro = config.per_device_train_batch_size
        assert plain.model_copy(update={OPTION: micro}) == config, "nothing else has changed"
        assert config.accumulation_steps(job.strategy.data_parallel_size) >= 1
        used = job.devices.num_processes
        changed = used != (count or 2) or micro != plain.per_device_train_batch_size
        assert changed == any("global_batch_size=" in line for line in job.notes), job.notes
        # Their batches are powers of two.
        assert used == {0: 2, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}[count]
        assert all("\n" not in line for line in [*job.notes, *job.warnings])


def test_a_preset_without_its_teacher_is_not_ready() -> None:
    """The page leads to the option; with a teacher it is green, as above."""
    shown = preview({}, preset="tiny-distill")
    assert list(shown.errors) == ["teacher"]
    text = str(panel(shown))
    assert 'data-field="teacher"' in text
    assert "tunesmith train tiny-full" in text
    assert "ts-verdict-good" not in text


@pytest.mark.parametrize("count", [3, 8])
def test_the_command_line_gets_what_the_page_gets(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, count)
    for name in ("tiny-lora", "llama-3.3-70b-lora", "qwen3-8b-qlora"):
        shown, job = preview({}, preset=name).job, job_of(name)
        assert shown
        assert (shown.config, shown.strategy.values, shown.notes) == (job.config, job.strategy.values, job.notes)
        ticked = default_gpus(name, [GpuChoice(n, "H100", 80 << 30, None, "") for n in range(count)])
        assert list(ticked.ids) == job.devices.gpu_ids
        assert bool(ticked.note) == (count == 3)


def test_the_page_shows_no_gpu_as_chosen_that_is_held() -> None:
    gpus = [GpuChoice(n, "H100", 80 << 30, None, "other" if n == 1 else "") for n in range(4)]
    assert default_gpus("tiny-lora", gpus).ids == (0, 2)
    assert "2 of 3 GPUs used: global_batch_size=16 is not divisible" in default_gpus("tiny-lora", gpus).note
    assert default_gpus("tiny-lora", gpus[1:2]).ids == ()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "0,1,2"], "global_batch_size=16 is not divisible by per_device_train_batch_size=8 x 3"),
        (["--num_processes", "3"], "x 3 data-parallel ranks = 24"),
        (["--gpus", "0,1,2,3", "--per_device_train_batch_size", "8"], "8 x 4 data-parallel ranks = 32"),
        (["--gpus", "0,1", "--strategy", "hsdp"], "use at least 4"),
    ],
)
def test_what_the_user_named_is_never_changed(words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 4)
    with pytest.raises(ConfigError, match=re.escape(text)):
        job_of("tiny-lora", *words)


def test_what_the_user_left_open_gives_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, 8)
    job = job_of("tiny-lora", "--per_device_train_batch_size", "8")
    assert (job.devices.gpu_ids, job.config.per_device_train_batch_size) == ([0, 1], 8)
    assert "use 64, or 2 data-parallel ranks" in job.notes[0]
    (tmp_path / "own.yaml").write_text("preset: tiny-lora\nper_device_train_batch_size: 4\n")
    job = job_of("--config", str(tmp_path / "own.yaml"))
    assert (job.devices.num_processes, job.config.per_device_train_batch_size) == (4, 4)
    job = job_of("tiny-lora", "--gpus", "0,1,2,3")
    assert (job.devices.num_processes, job.config.per_device_train_batch_size) == (4, 4)
    assert job.notes == [
        "per_device_train_batch_size=4 instead of 8: global_batch_size=16 is shared by 4 data-parallel ranks"
    ]
    assert job_of("tiny-lora", "--gpus", "0,1").notes == []


@pytest.mark.parametrize(
    ("strategy", "count", "used"),
    [("hsdp", 5, 4), ("hsdp", 6, 4), ("3d", 8, 8), ("3d", 9, 8), ("pp", 3, 2), ("tp", 7, 4), ("single", 4, 1)],
)
def test_a_mesh_gets_the_gpus_that_it_can_use(
    strategy: str, count: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, count)
    job = job_of("tiny-lora", "--strategy", strategy)
    assert job.devices.num_processes == job.strategy.num_processes == used
    assert job.strategy.sizes.world == used


@pytest.mark.parametrize("count", [3, 5, 6, 8])
def test_a_plan_ranks_what_train_would_start(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row's command, read as `train` reads it, is the row."""
    stand_in(monkeypatch, count)
    monkeypatch.setattr(app.plan.command, "find_gpus", app.hardware.find_gpus)
    monkeypatch.setattr(app.plan.command, "run_checker", lambda *_: json.dumps(SHAPES[0].counted()))
    assert plan_verb(["tiny-lora", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    refused = {row["strategy"] for row in rows if row["command"] is None}
    assert refused == {"ep"} if count == 8 else refused >= {"ep", "3d", "hsdp_tp"}
    for row in rows:
        if row["command"]:
            job = job_of(*shlex.split(row["command"])[2:])
            assert job.strategy.name == row["strategy"]
            assert job.strategy.sizes.by_axis == row["sizes"]
            assert job.config.per_device_train_batch_size == row["per_device_train_batch_size"]
            assert job.devices.num_processes == row["world_size"]


def test_too_few_gpus_for_a_strategy_are_refused_with_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 3)
    with pytest.raises(ConfigError, match="num_processes=3"):
        job_of("tiny-lora", "--strategy", "3d")


# -- the strategy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "by_count"),
    [
        ("qwen3-8b-lora", {1: "single", 2: "ddp", 4: "ddp", 8: "ddp"}),
        ("llama-3.3-70b-lora", {1: "single", 2: "fsdp2", 4: "fsdp2", 8: "fsdp2"}),
        ("llama-3.3-70b-full", {2: "fsdp2_offload", 8: "fsdp2_offload"}),
        ("qwen3-32b-full", {2: "fsdp2_offload", 4: "fsdp2_offload"}),
    ],
)
def test_the_strategy_is_the_presets_for_these_gpus(
    preset: str, by_count: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, name in by_count.items():
        stand_in(monkeypatch, count)
        job = job_of(preset)
        assert job.strategy.name == name
        assert any(f"preset {preset} names it" in line for line in job.notes) == (name not in ("single", "ddp"))
    assert job_of(preset, "--strategy", "zero2").strategy.name == "zero2"
    other = job_of(preset, "--model_name_or_path", "embedded")
    assert other.strategy.name == "ddp", "its list is for its own model"


def test_a_preset_that_these_gpus_do_not_hold_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 1)
    [line] = [line for line in job_of("llama-3.3-70b-lora").warnings if "names no strategy" in line]
    assert line == (
        "preset llama-3.3-70b-lora names no strategy for 1 GPU (estimated: 139 GiB on each); it names fsdp2 for 8 GPUs"
    )
    assert not any("names no strategy" in line for line in job_of("qwen3-8b-lora").warnings)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_launch_by_hand_derives_the_micro_batch_alone() -> None:
    request = Request("tiny-lora")
    config = request.resolve()
    eight, three = (resolve(load_strategy("ddp"), count, "no") for count in (8, 3))
    fitted, [line] = with_micro_batch(config, eight, request)
    assert fitted == config.model_copy(update={OPTION: 2})
    assert line.startswith("per_device_train_batch_size=2 instead of 8: global_batch_size=16")
    assert with_micro_batch(config, three, request) == (config, []), "refused later, with the arithmetic"
    chosen = Request("tiny-lora", options={OPTION: "8"})
    assert with_micro_batch(chosen.resolve(), eight, chosen) == (config, [])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_a_pipeline_gets_as_many_micro_batches_as_its_schedule_needs(schedule: str) -> None:
    config = Request("tiny-lora").resolve()
    strategy = resolve(load_strategy("pp"), 4, "no", 4, schedule)
    fitted = fit_micro_batch(config, strategy)
    count = fitted.accumulation_steps(strategy.data_parallel_size)
    assert micro_batch_mistake(schedule, 4, count) is None
    assert fitted.per_device_train_batch_size == (8 if schedule == "gpipe" else 4)
