"""What will hardly fit is told with numbers before anything is launched, and nothing is called ready that is not."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import app.hardware
import app.launch.machines
from app.command_line import TRAIN
from app.commands import runs
from app.hardware import Devices, Gpu, choose_devices
from app.launch.job import TrainJob, train_job
from app.services import memory_check
from app.services.form import preview
from app.services.memory_check import Verdict, known_verdict, memory_verdict
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR
from trainers.run import host_memory
from ui.pages.train_parts import panel

pytestmark = pytest.mark.usefixtures("elsewhere")
GIB = 2**30
EIGHT_BILLION = ["llama-3.1-8b-full"]


def stand_in(monkeypatch: pytest.MonkeyPatch, *used: float, busy: int = 0) -> None:
    """A GPU of 80 GiB for each number of GiB that others use of it."""
    machine = [Gpu(n, f"GPU-{n}", "H100", 80 * GIB, int(gib * GIB), busy) for n, gib in enumerate(used)]
    monkeypatch.setattr(app.hardware, "find_gpus", lambda: machine)


def job_of(*words: str) -> TrainJob:
    return train_job(TRAIN.read(words))


def test_a_run_that_will_hardly_fit_says_so_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted once; what is free is looked at each time."""
    stand_in(monkeypatch, 0)
    counted, real = list[Any](), memory_check.count

    def count_once(*asked: Any) -> Any:
        counted.extend([] if counted else [real(*asked)])
        return counted[0]

    monkeypatch.setattr(memory_check, "count", count_once)
    job = job_of(*EIGHT_BILLION)
    assert known_verdict(job) is None
    verdict = memory_verdict(job)
    assert verdict.fits is False
    assert "not expected to fit: single on GPU 0 needs 12" in verdict.line
    assert "GiB for 73.6 GiB usable; most of it is optimizer, 59.8 GiB" in verdict.line
    assert "80.0 GiB free for each GPU" in verdict.line
    assert known_verdict(job) == verdict, "a page need not count again"

    lora = [*EIGHT_BILLION, "--method", "lora"]
    stand_in(monkeypatch, 0)
    counted.clear()
    assert memory_verdict(job_of(*lora)).fits
    stand_in(monkeypatch, 70)
    crowded = memory_verdict(job_of(*lora, "--gpus", "0"))
    assert crowded.fits is False
    assert "10.0 GiB free" in crowded.line


def test_what_is_small_by_far_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "count", lambda *_: pytest.fail("counted"))
    assert memory_verdict(job_of("tiny-lora")) == Verdict(True)
    stand_in(monkeypatch, 0, 0)
    assert memory_verdict(job_of("tiny-full")) == Verdict(True)
    assert known_verdict(job_of("tiny-lora", "--max_length", "1000000")) is None, "its activations are large"
    assert known_verdict(job_of("qwen3-8b-lora")) is None, "its files are not here"


def test_a_large_teacher_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.3 70B, whose config ships with its presets, in bf16: 131 GiB."""
    stand_in(monkeypatch, 0)
    flags = ["tiny-full", "--mixed_precision", "bf16", "--objective", "distill", "--teacher"]
    assert known_verdict(job_of(*flags, "embedded")) == Verdict(True), "control"
    job = job_of(*flags, "meta-llama/Llama-3.3-70B-Instruct")
    assert known_verdict(job) is None
    verdict = memory_verdict(job)
    assert verdict.fits is False
    assert "most of it is weights, 131 GiB" in verdict.line


@pytest.mark.parametrize("content", [None, '{"a":' * 100_000, '{"num_hidden_layers": 1e999}'])
def test_a_config_that_cannot_be_read_is_not_waited_for(content: str | None) -> None:
    """The check that comes before a launch says why."""
    Path("m").mkdir()
    Path("m/model.safetensors").write_bytes(bytes(100))
    if content is None:
        os.mkfifo("m/config.json")
    else:
        Path("m/config.json").write_text(content)
    assert known_verdict(job_of("tiny-full", "--model_name_or_path", "m")) is None


def test_the_page_is_green_only_for_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0)
    ready = str(panel(preview({}, preset="tiny-lora")))
    assert "ts-verdict-good" in ready
    assert 'data-field="strategy">Single process</button>' in ready, "it leads to the strategies"
    shown = preview({}, preset="llama-3.3-70b-lora")
    assert "memory is checked at launch" in str(panel(shown))
    assert "ts-verdict-good" not in str(panel(shown))
    assert shown.job
    memory_check._VERDICTS.put(memory_check._key(shown.job), Verdict(False, "needs 151 GiB"))
    assert "needs 151 GiB" in str(panel(shown))
    assert "ts-verdict-bad" in str(panel(shown))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "words", "status"),
    [(Terminal("n\n"), [], 2), (Terminal("\n"), [], 2), (Terminal("y\n"), [], 0), (io.StringIO(), [], 0)],
)
def test_on_a_terminal_it_asks(
    stdin: io.StringIO, words: list[str], status: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from app.cli import run_verb

    started: list[TrainJob] = []
    monkeypatch.setattr(runs, "memory_verdict", lambda job: Verdict(False, "needs 99 GiB"))
    monkeypatch.setattr(runs, "_train", lambda job, words: started.append(job) or 0)
    monkeypatch.setattr("sys.stdin", stdin)
    assert run_verb(["train", "tiny-lora", *words]) == status
    assert bool(started) == (status == 0)
    assert "warning: needs 99 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["needs 99 GiB", ""])
def test_the_check_says_it_too(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from app.cli import run_verb

    monkeypatch.setattr(runs, "memory_verdict", lambda job: Verdict(not line, line))
    monkeypatch.setattr(runs, "preflight", lambda job, quiet: None)
    assert run_verb(["train", "tiny-lora", "--check", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == ([line] if line else [])
    assert ("warning: needs 99 GiB" in err) == bool(line)


def test_gpus_that_others_use_are_not_taken_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0.6, 40, 0.6)
    assert choose_devices(None, None) == Devices([0, 2], 2)
    job = job_of("tiny-lora")
    assert job.devices.gpu_ids == [0, 2]
    assert "GPU 1 left out: other programs use it; --gpus 0,2,1 takes it anyway" in job.notes
    assert job_of("tiny-lora", "--gpus", "1,2").devices.gpu_ids == [1, 2]
    assert job_of("tiny-lora", "--gpus", "1,2").notes == []
    assert choose_devices(None, 3).gpu_ids == [0, 2, 1], "asked for, they come last"
    monkeypatch.setattr(app.hardware, "holders", lambda: {"GPU-1": {"run": "mine"}})
    assert choose_devices(None, None).gpu_ids == [0, 1, 2], "a run of ours is waited for"
    stand_in(monkeypatch, 40, 50)
    monkeypatch.setattr(app.hardware, "holders", dict)
    assert choose_devices(None, None).gpu_ids == [0, 1], "where each is used there is nothing better"
    stand_in(monkeypatch, 0, busy=90)
    assert app.hardware.find_gpus()[0].in_use


def test_the_demo_asks_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from app.commands import demo

    started: list[TrainJob] = []
    monkeypatch.setattr(runs, "memory_verdict", lambda job: Verdict(False, "needs 99 GiB"))
    monkeypatch.setattr(demo, "train", lambda job, quiet: started.append(job) or {"state": "stopped", "step": 0})
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(ConfigError, match="needs more memory"):
        demo.run_demo("tiny-lora", None, "1", Path("runs"), False)
    assert not started
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert demo.run_demo("tiny-lora", None, "1", Path("runs"), False) == 130
    assert started
    assert "warning: needs 99 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "option", "steps"), [("tiny-distill", "teacher", None), ("tiny-grpo", "from_run", 30)]
)
def test_the_demo_first_trains_what_a_preset_builds_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    preset: str, option: str, steps: int | None,
) -> None:  # fmt: skip
    from app.commands import demo

    started: list[TrainJob] = []

    def export_the_base(job: TrainJob, quiet: bool) -> dict[str, Any]:
        started.append(job)
        shutil.copytree(BASE_DIR, job.run.model)
        return {"state": "done", "step": 1}

    monkeypatch.setattr(demo, "train", export_the_base)
    monkeypatch.setattr(demo, "speed", lambda run: (1.0, 1.0))
    scored: list[list[str]] = []
    scores = {"eval_loss": 0.1, "exact_match": 0.9, "samples": []}
    monkeypatch.setattr(
        demo, "run_program", lambda argv, *more, **named: scored.append(argv) or (0, json.dumps([scores, scores]), "")
    )
    assert demo.run_demo(preset, None, "2", tmp_path / "runs", False) == 0
    first, second = started
    assert (first.config.preset, second.config.preset) == ("tiny-full", preset)
    assert first.config.max_steps == steps
    assert getattr(second.config, option) == str(first.run.model)
    before = str(first.run.model) if option == "from_run" else str(BASE_DIR)
    models = [scored[0][at + 1] for at, text in enumerate(scored[0]) if text == "--model"]
    assert models == [before, str(second.run.model)]
    assert f"tunesmith train {preset} --{option} {first.run.model}" in capsys.readouterr().out
    started.clear()
    monkeypatch.setattr(demo, "train", lambda job, quiet: started.append(job) or {"state": "stopped", "step": 0})
    assert demo.run_demo(preset, None, "2", Path("runs"), False) == 130
    assert [job.config.preset for job in started] == ["tiny-full"], "nothing to build on"
    started.clear()
    assert demo.run_demo("tiny-lora", None, "2", Path("runs"), False) == 130
    assert [job.config.preset for job in started] == ["tiny-lora"]


@pytest.mark.parametrize("by_count", [True, False])
def test_a_script_is_told_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_count: bool) -> None:
    import gradio as gr

    from ui.context import ServerContext
    from ui.pages import train, train_scripts

    served: dict[str, Any] = {}
    monkeypatch.setattr(gr, "api", lambda function, api_name, **_: served.update({api_name: function}))
    monkeypatch.setattr(train_scripts, "start", lambda job: None)
    monkeypatch.setattr(train_scripts, "memory_verdict", lambda job: Verdict(False, "needs 99 GiB" if by_count else ""))
    with gr.Blocks():
        form = train._Form(ServerContext(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False))
        train_scripts.serve_scripts(form.preview_request)
    made = served["launch"]({"preset": "tiny-lora", "num_processes": 1})
    assert made["warnings"] == ["needs 99 GiB"] * by_count


def test_of_several_machines_this_ones_share_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0, 0)
    monkeypatch.setattr(app.launch.machines, "find_gpus", app.hardware.find_gpus)
    two = [
        "--num_machines",
        "2",
        "--machine_rank",
        "0",
        "--main_process_ip",
        "10.0.0.1",
        "--main_process_port",
        "29500",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    # A machine's two ranks copy half of the weights and both moments to save them.
    quarter = job_of(*EIGHT_BILLION, *two, "--strategy", "fsdp2")
    for host, fits in ((44, False), (47, True)):
        monkeypatch.setattr(host_memory, "available", lambda host=host: host * GIB)
        verdict = memory_verdict(quarter)
        assert verdict.fits is fits, "four GPUs hold a quarter each"
        assert ("while saving" in verdict.line) is not fits
        memory_check._VERDICTS._verdicts.clear()
    crowded = job_of(*EIGHT_BILLION, *two, "--strategy", "ddp")
    assert "on GPUs 0, 1 of machine 0 of 2 needs" in memory_verdict(crowded).line
