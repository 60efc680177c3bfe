"""From a request to its run folder: the pre-flight check with the real training script, and what is left behind."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.accelerate_launch import command_line, launch_argv, read_command_line
from app.cli import run_verb
from app.command_line import TRAIN
from app.hardware import Devices
from app.launch.foreground import (
    CheckBroke,
    preflight,
    print_summary,
    result,
    run_program,
    speed,
    take_back,
    train,
    write_folder,
)  # fmt: skip
from app.launch.job import resume_job, train_job
from app.runs.runs import summary
from tests.made_runs import add_sealed_checkpoint
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.parse import Request
from trainers.run.compatibility import versions
from trainers.run.folder import Process, RunFolder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def chats(path: Path, count: int) -> str:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(count)))
    return str(path)


def test_the_folder_holds_what_repeats_the_run(tmp_path: Path) -> None:
    data = chats(tmp_path / "my data.jsonl", 3)
    job = train_job(TRAIN.read(["tiny-lora", "--dataset_name", "my data.jsonl", "--seed", "7", "--num_processes", "4",
                                "--per_device_train_batch_size", "1"]))  # fmt: skip
    write_folder(job)
    assert job.run.path.parent == tmp_path / "runs"
    again = Request(config=str(job.run.config)).resolve()
    assert (again.dataset_name, again.seed, again.preset) == (data, 7, "tiny-lora")
    assert again.model_dump() == job.config.model_dump()
    assert yaml.safe_load(job.run.accelerate.read_text())["num_processes"] == 4
    line = job.run.command.read_text()
    assert line == command_line(job.run, Devices([], 4)) + "\n"
    assert [*read_command_line(line)[1], "--output_dir", str(job.run.path)] == launch_argv(job.run, 4)
    job.run.write_state(state="done")
    row = summary(job.run)
    assert (row["strategy"], row["world_size"], row["preset"], row["gpus"]) == ("ddp", 4, "tiny-lora", [])


@pytest.mark.parametrize(
    ("words", "strategy", "processes"),
    [
        ([], "ddp", 2),
        (["--strategy", "single"], "single", 1),
        (["--num_processes", "1"], "single", 1),
        (["--num_processes", "2"], "ddp", 2),
    ],
)
def test_strategy_and_processes_follow_from_each_other(words: list[str], strategy: str, processes: int) -> None:
    job = train_job(TRAIN.read(["tiny-lora", *words]))
    assert (job.strategy.name, job.devices.num_processes) == (strategy, processes)
    assert job.strategy.num_processes == processes


def test_a_strategy_of_ones_own_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    job = train_job(TRAIN.read(["tiny-lora", "--strategy", "mine.yaml"]))
    write_folder(job)
    assert job.strategy.name == "mine"
    assert train_job(TRAIN.read(["tiny-lora", "--strategy", str(job.run.accelerate)])).strategy.name == "mine"


def test_one_folder_is_given_once(tmp_path: Path) -> None:
    first, second = (train_job(TRAIN.read(["tiny-lora", "--output_dir", "one"])) for _ in range(2))
    write_folder(first)
    with pytest.raises(ConfigError, match="holds a run"):
        write_folder(second)


def test_a_start_that_is_taken_back_leaves_the_users_files(tmp_path: Path) -> None:
    for where in ("mine", "new"):
        job = train_job(TRAIN.read(["tiny-lora", "--output_dir", where]))
        write_folder(job)
        if where == "mine":
            (tmp_path / "mine" / "thesis.txt").write_text("all of it")
        take_back(job.run)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("step", "argv", "stop"),
    [(10, [], None), (10, ["--stop_at_step", "10"], 10), (10, ["--stop_at_step", "15"], 15), (9, [], 10)],
)
def test_a_resume_after_a_planned_stop_goes_on(step: int, argv: list[str], stop: int | None) -> None:
    """As the last line of the stopped run promises; before that step, as after a crash, it still stops there."""
    job = train_job(TRAIN.read(["tiny-lora", "--num_processes", "1", "--stop_at_step", "10"]))
    write_folder(job)
    job.run.write_state(state="stopped", step=step)
    again = resume_job(job.run, TRAIN.read(["one", *argv]))
    assert again.config.stop_at_step == stop
    assert any("goes on to the end" in note for note in again.notes) is (stop is None)


def test_a_resume_goes_on_as_before_with_what_is_given_again() -> None:
    job = train_job(TRAIN.read(["tiny-lora", "--num_processes", "1", "--seed", "7"]))
    write_folder(job)
    job.run.write_state(state="stopped")
    again = resume_job(job.run, TRAIN.read(["one", "--max_steps", "9"]))
    assert (again.config.seed, again.config.max_steps) == (7, 9)
    assert (again.strategy.name, again.devices.num_processes) == ("single", 1)
    assert (again.run.path, again.resume_from) == (job.run.path, "auto")
    moved = resume_job(job.run, TRAIN.read(["one", "--strategy", "ddp", "--num_processes", "2"]))
    assert (moved.strategy.name, moved.devices.num_processes) == ("ddp", 2)


def test_a_wrong_request_is_refused_by_the_training_script_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, part in (
        (["--dataset_name", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dataset_name", chats(tmp_path / "few.jsonl", 3), "--packing", "false"], "global_batch_size"),
        (["--model_name_or_path", "./nothing"], "./nothing"),
    ):
        assert run_verb(["train", "tiny-lora", "--eval_dataset_name", "none", *words, "--json"]) == 2
        shown = capsys.readouterr()
        assert any(part in line for line in json.loads(shown.out)["mistakes"])
        assert "Traceback" not in shown.err
        assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("by_hand")
def test_a_good_request_is_checked_and_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["train", "tiny-lora", "--check", "--json", "--seed", "3"]) == 0
    plan = {"strategy": "ddp", "world_size": 2, "ok": True}
    assert json.loads(capsys.readouterr().out) == {**plan, "notes": [], "warnings": []}
    assert not (tmp_path / "runs").exists()


def test_a_check_that_crashes_is_no_mistake_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stderr.write('Traceback\\n  x\\nmy.OddError: disk\\n'); sys.exit(1)"
    monkeypatch.setattr("app.launch.foreground.check_argv", lambda config: [sys.executable, "-c", code])
    with pytest.raises(CheckBroke, match=r"failed: my\.OddError: disk"):
        preflight(train_job(TRAIN.read(["tiny-lora"])), quiet=True)
    assert run_verb(["train", "tiny-lora", "--json"]) == 1


def test_an_interrupted_program_is_ended(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from app.launch.foreground import run_program
inner = "import os, signal, time; open('pid', 'w').write(str(os.getpid())); os.kill(os.getppid(), signal.SIGTERM); "
inner += "time.sleep(60)"
try:
    run_program([sys.executable, "-c", inner], os.environ)
except KeyboardInterrupt:
    print("interrupted")
"""
    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, timeout=30
    )
    assert done.stdout == "interrupted\n"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_programs_output_comes_apart() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_program([sys.executable, "-c", code], {}) == (3, "out\n", "err\n")


def test_the_document_of_train_has_the_keys_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    job = train_job(TRAIN.read(["tiny-lora"]))
    write_folder(job)
    rows = [{"loss": 2.0, "tokens_per_second": 10.0, "elapsed_s": 1.0}, {"loss": 1.0, "tokens_per_second": 30.0},
            {"eval_loss": 0.5, "elapsed_s": 3.0}]  # fmt: skip
    job.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = job.run.write_state(state="done", step=2, export_dir="/m")
    document = result(job, state)
    assert [document[key] for key in ("state", "step", "strategy", "world_size", "train_loss", "eval_loss")] == [
        "done", 2, "ddp", 2, 1.0, 0.5,
    ]  # fmt: skip
    assert (document["run_dir"], document["export_dir"]) == (str(job.run.path), "/m")
    assert speed(job.run) == (3.0, 20.0)
    print_summary(job.run, state)
    assert "done: 2 steps" in capsys.readouterr().out
    job.run.evaluation.write_text("")
    print_summary(job.run, state)
    assert f"rows   {job.run.evaluation}" in capsys.readouterr().out, "of a run that trained nothing"


def test_a_failure_says_why_where_and_what_next(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder("runs/a")
    run.create()
    (run.checkpoints / "step-00000004").mkdir()
    print_summary(run, run.write_state(state="failed", cause="rank 1: ValueError: bad row", step=6))
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("failed at step 6: rank 1: ValueError: bad row", "step-00000004", "log.txt", "tunesmith resume"):
        assert part in shown.err


def stopped(*words: str) -> RunFolder:
    """A stopped run of one process."""
    job = train_job(TRAIN.read(["tiny-lora", "--num_processes", "1", *words]))
    write_folder(job)
    job.run.write_state(state="stopped")
    return job.run


def with_checkpoint(run: RunFolder, **changes: Any) -> RunFolder:
    """The run with a checkpoint of step 4, as far as it is looked at before a launch."""
    add_sealed_checkpoint(run, 4, **changes)
    return run


NO_FORCE_HELPS = {"lora_r", "method", "lora_target_modules"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lora_r 4", "lora_r=4, and 16 when the checkpoint of step 4 was saved; its tensors do not fit"),
        ("--method full", "method=full, and lora when"),
        (
            "--packing=false",
            "packing=false, and true when the checkpoint of step 4 was saved; the remaining steps would",
        ),
        ("--lora_target_modules q_proj,v_proj", "lora_target_modules=q_proj,v_proj, and all-linear when"),
        ("--seed 9 --lora_alpha 1", "lora_alpha=1, and 32 when"),
        ("--learning_rate 0.5", "learning_rate=0.5, and"),
        ("--max_steps 9", "max_steps=9, and"),
    ],
)
def test_a_resume_refuses_what_its_checkpoints_cannot_follow(words: str, line: str) -> None:
    run = with_checkpoint(stopped())
    before = run.config.read_bytes()
    with pytest.raises(ConfigError) as refused:
        resume_job(run, TRAIN.read(["one", *words.split()]))
    assert sum(told.startswith(line) for told in refused.value.lines) == 1
    assert len(refused.value.lines) == words.count("--")
    assert run.config.read_bytes() == before
    again = ["tiny-lora", "--output_dir", str(run.path), "--resume_from_checkpoint", "auto", *words.split()]
    with pytest.raises(ConfigError, match="when the checkpoint of step 4 was saved"):
        train_job(TRAIN.read(again))
    forced = TRAIN.read(["one", *words.split(), "--force"])
    if NO_FORCE_HELPS & {word.removeprefix("--") for word in words.split()}:
        with pytest.raises(ConfigError, match="its tensors do not fit"):
            resume_job(run, forced)
    else:
        assert resume_job(run, forced).config.force_resume


def test_a_resume_takes_the_rest_and_the_same_again() -> None:
    words = "--lora_r 16 --save_steps 3 --logging_steps 2 --eval_steps 4 --per_device_train_batch_size 1"
    config = resume_job(with_checkpoint(stopped()), TRAIN.read(["one", *words.split()])).config
    assert (config.lora_r, config.save_steps, config.eval_steps, config.force_resume) == (16, 3, 4, False)


def test_a_run_without_checkpoints_begins_anew_with_whatever_is_asked_for() -> None:
    assert resume_job(stopped(), TRAIN.read(["one", "--learning_rate", "0.5"])).config.learning_rate == 0.5


def test_a_longer_run_is_refused_only_where_its_rates_depend_on_the_length() -> None:
    run = with_checkpoint(stopped("--lr_scheduler_type", "constant", "--warmup_ratio", "0"))
    assert resume_job(run, TRAIN.read(["one", "--max_steps", "900"])).config.max_steps == 900


def test_other_code_is_refused_unless_forced() -> None:
    run = with_checkpoint(stopped(), versions={**versions(), "torch": "2.0.0", "tunesmith": "0.0.1 (0123456789)"})
    with pytest.raises(ConfigError) as refused:
        resume_job(run, TRAIN.read(["one"]))
    torch, own = sorted(refused.value.lines)
    assert re.match(r"torch is 2\.[\d.]+, and was 2\.0\.0 when the checkpoint of step 4 was saved; .*--force", torch)
    assert "was 0.0.1 (0123456789)" in own
    assert resume_job(run, TRAIN.read(["one", "--force"])).config.force_resume


def test_force_needs_a_checkpoint_to_go_on_from() -> None:
    with pytest.raises(ConfigError, match="--force is for continuing from a checkpoint"):
        train_job(TRAIN.read(["tiny-lora", "--force"]))
    words = ["--output_dir", "one", "--resume_from_checkpoint", "auto", "--num_processes", "1", "--force"]
    assert train_job(TRAIN.read(["tiny-lora", *words])).config.force_resume


def test_a_checkpoint_of_another_run_does_not_open_a_used_folder() -> None:
    words = ["--output_dir", str(stopped().path), "--resume_from_checkpoint", "elsewhere/checkpoints/step-00000001"]
    with pytest.raises(ConfigError, match="holds a run"):
        train_job(TRAIN.read(["tiny-lora", *words]))


def test_another_count_of_processes_gets_a_strategy_that_can_have_it() -> None:
    run = stopped()
    job = resume_job(run, TRAIN.read(["one", "--num_processes", "2"]))
    assert (job.strategy.name, job.devices.num_processes) == ("ddp", 2)
    write_folder(job)
    for count, name in (("1", "single"), ("2", "ddp"), ("4", "ddp")):
        job = resume_job(run, TRAIN.read(["one", "--num_processes", count, "--per_device_train_batch_size", "1"]))
        assert (job.strategy.name, job.devices.num_processes) == (name, int(count))


def test_of_two_resumes_at_once_the_loser_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped()
    monkeypatch.setattr("app.launch.foreground.preflight", lambda job, quiet: [])
    first, second = (resume_job(run, TRAIN.read(["one", "--max_steps", steps])) for steps in ("7", "9"))
    trained = []

    def run_to_end(run: RunFolder, *more: object) -> dict:
        run.write_state(state="starting", processes=[Process.of("supervisor").as_json()])
        with pytest.raises(ConfigError, match="already running"):
            train(second, quiet=True)
        trained.append(Request(config=str(run.config)).resolve().max_steps)
        return run.write_state(state="stopped", attempt=1)

    monkeypatch.setattr("app.launch.foreground.run_to_end", run_to_end)
    train(first, quiet=True)
    with pytest.raises(ConfigError, match="resumed by another command"):
        train(second, quiet=True)
    assert trained == [7]
    assert Request(config=str(run.config)).resolve().max_steps == 7


def test_the_mistakes_of_a_check_are_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that reads like another mistake stays a value."""
    given = [Mistake("seed", "1; gpus=3 is refused", "is bad", "use 2"), Mistake("", None, "b")]
    printed = "retry 1\n" + json.dumps({"mistakes": ConfigError(given).as_json()})
    silent = [Mistake("", None, "the training script refused this run without giving a reason")]
    for text, mistakes in ((printed, given), ("retry 1\n{}", silent), ("", silent), ("[]", silent)):
        code = f"print({text!r}); import sys; print('a warning', file=sys.stderr); sys.exit(2)"
        monkeypatch.setattr("app.launch.foreground.check_argv", lambda config, code=code: [sys.executable, "-c", code])
        with pytest.raises(ConfigError) as refused:
            preflight(train_job(TRAIN.read(["tiny-lora"])), quiet=True)
        assert refused.value.mistakes == mistakes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_check_ends_as_stopped(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(60)"
    monkeypatch.setattr("app.launch.foreground.check_argv", lambda config: [sys.executable, "-c", code])
    assert run_verb(["train", "tiny-lora", "--json"]) == 130
    shown = capsys.readouterr()
    assert json.loads(shown.out)["state"] == "stopped"
    assert shown.err.splitlines()[-1] == "interrupted"
    assert not Path("runs").exists()


def test_the_way_on_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder("my runs/a b")
    run.create()
    print_summary(run, run.write_state(state="stopped"))
    line = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(line.partition(": ")[2]) == ["tunesmith", "resume", str(run.path)]
