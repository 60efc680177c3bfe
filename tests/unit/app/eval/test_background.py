"""What a page may have evaluated, and the process that evaluates it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.eval.background import FIELDS, METRICS, arguments, command, model_choices, start, stop
from app.eval.folder import evaluations
from app.eval.plan import EVAL
from app.eval.view import entry
from app.launch import background_work
from tests.made_runs import add_sealed_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("elsewhere")
SLEEPS = (
    "import json, os, sys, time; print(json.dumps(sys.argv[1:]), os.environ.get('HF_TOKEN'), flush=True); "
    "time.sleep(60)"
)
RUNS = Path("runs")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of `eval`, a program that prints its arguments and sleeps."""
    monkeypatch.setattr(
        background_work, "module_argv", lambda module, argv: [sys.executable, "-I", "-S", "-c", SLEEPS, *argv]
    )


@pytest.fixture
def run() -> RunFolder:
    """A run with a checkpoint and an export, with evaluation data."""
    run = made_run(RUNS, "a-run", config={"eval_dataset_name": "embedded"})
    add_sealed_checkpoint(run, 60)
    (run.path / "model").mkdir()
    (run.path / "model" / "config.json").write_text("{}")
    return run


def roots() -> list[Path]:
    return [Path.cwd()]


# -- the command line --------------------------------------------------------------------------------------------------


def test_values_become_a_command_line() -> None:
    values = {"models": ["a-run", "b-run@model", "a-run"], "base": "base", "dataset_name": " rows.jsonl ",
              "max_eval_samples": 7, "answer_tokens": "", "metrics": ["loss", "f1"], "gpus": ["0", "2"]}  # fmt: skip
    argv = ["a-run", "b-run@model", "--dataset_name", "rows.jsonl", "--max_eval_samples", "7", "--metrics", "loss,f1",
             "--gpus", "0,2"]  # fmt: skip
    assert arguments(values, RUNS) == argv
    assert command(values, RUNS) == " ".join(["tunesmith eval", *argv])
    args = EVAL.read(argv)
    assert args is not None
    assert (args.names, args.request.mistakes) == (["a-run", "b-run@model"], [])
    assert arguments({}, Path("other"))[:2] == ["--runs_dir", str(Path("other").absolute())]
    assert command({"models": ["my run; rm -rf ~"]}, RUNS) == "tunesmith eval 'my run; rm -rf ~'"


ODD = [True, 1.5, {}, {"path": "/etc/passwd"}, [[]], [{}], [None, ["x"]], "--trust_remote_code=true", ["--config=x"],
     "-x", "a\0b", "a\nb", "x" * 5000, ["x" * 5000], ["a"] * 5000, "\ud800"]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_no_form_sends_is_refused_and_starts_nothing(name: str) -> None:
    for value in ODD:
        with pytest.raises(ConfigError):
            start({"models": ["embedded"], name: value}, RUNS, roots())
    assert not RUNS.exists()


def test_no_value_at_all_is_refused_with_what_to_do() -> None:
    for values in ({}, dict.fromkeys(FIELDS), dict.fromkeys(FIELDS, ""), {"models": []}):
        with pytest.raises(ConfigError, match="models are missing; choose a run"):
            start(values, RUNS, roots())


# -- what a page may name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ["no-run"]}, "models=no-run is not a run of this folder"),
        ({"models": ["a-run@step-00000001"]}, "has no weights 'step-00000001'"),
        ({"models": ["a-run@../../x"]}, "has no weights"),
        ({"models": ["/etc"]}, "models=/etc is outside the allowed folders"),
        ({"models": ["../x"]}, "`..` and `~` are not allowed"),
        ({"models": ["link"]}, "models=link is outside the allowed folders"),
        ({"models": ["a-run"], "base": "/etc"}, "base=/etc is outside the allowed folders"),
        ({"models": ["a-run"], "base": "nothing"}, "base=nothing is not a run"),
        ({"models": [f"o/{number}" for number in range(40)]}, "models=40 are more than 32"),
        ({"dataset_name": "/etc/passwd"}, "dataset_name=/etc/passwd is outside"),
        ({"dataset_name": "link/passwd"}, "is outside the allowed folders"),
        ({"dataset_name": "https://example.org/x.jsonl"}, "is a URL"),
        ({"metric_schema": "/etc/passwd", "metrics": ["json_schema"]}, "metric_schema=/etc/passwd is outside"),
        ({"metrics": ["mine.py:score"]}, "metrics=mine.py:score is not a metric of this page"),
        ({"metrics": ["judge"]}, "others from a terminal: tunesmith eval --metrics"),
        ({"strategy": "mine.yaml"}, "strategy=mine.yaml is no strategy that ships"),
        ({"strategy": "tp", "num_processes": "2"}, "only data-parallel ranks evaluate"),
        ({"answer_tokens": "many"}, "--answer_tokens='many' is not a whole number"),
        ({"max_eval_samples": "-"}, "begins with a dash"),
        ({"max_eval_samples": "x"}, "max_eval_samples='x'"),
        ({"metrics": ["f1"], "answer_tokens": "0"}, "no answer is generated"),
        ({"metrics": ["json_schema"]}, "the metric json_schema needs it"),
    ],
)
def test_what_a_page_may_not_have_is_refused_with_the_option(
    run: RunFolder, values: dict[str, Any], message: str
) -> None:
    Path("link").symlink_to("/etc")
    Path("mine.py").write_text("def score(prompts, answers, expected): raise SystemExit")
    with pytest.raises(ConfigError) as refused:
        start({"models": [run.id], "num_processes": "1", **values}, RUNS, roots())
    assert message in str(refused.value)
    assert evaluations(RUNS) == []


def test_rows_of_a_run_that_are_outside_the_allowed_folders_are_refused(run: RunFolder, tmp_path: Path) -> None:
    rows = tmp_path.parent / f"{tmp_path.name}-outside.jsonl"
    rows.write_text('{"text": "secret"}\n')
    made_run(RUNS, "b-run", config={"eval_dataset_name": str(rows)})
    (RUNS / "b-run" / "model").mkdir()
    (RUNS / "b-run" / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{rows.name} is outside the allowed folders"):
        start({"models": ["b-run"], "num_processes": "1"}, RUNS, roots())
    assert evaluations(RUNS) == []


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sleeper")
def test_an_evaluation_is_a_process_of_its_own_until_it_is_stopped(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = start({"models": [run.id], "metrics": list(METRICS[:2]), "num_processes": 1}, RUNS, roots())
    process = folder.process()
    assert process is not None
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    until(folder.output.read_text)
    argv, _, secret = folder.output.read_text().strip().rpartition(" ")
    assert secret == os.environ["HF_TOKEN"], "it comes by the environment"
    assert "hf_secret" not in "".join(path.read_text() for path in folder.path.iterdir() if path != folder.output)
    options = ["a-run", "--metrics", "loss,perplexity", "--num_processes", "1"]
    assert json.loads(argv) == ["eval", *options, "--output_dir", str(folder.path)]
    state = entry(folder)
    assert (state["state"], state["doing"], state["progress"]) == ("running", "checking models and rows", 0.0)
    assert state["models"] == ["base", "a-run"]
    assert state["command"] == " ".join(["tunesmith eval", *options])
    other = start({"models": [run.id], "num_processes": 1}, RUNS, roots())
    assert other != folder, "two at once are two folders"
    for each in (other, folder):
        stop(each)
    until(lambda: not folder.is_running() and not other.is_running())
    assert entry(folder)["state"] == "stopped"
    with pytest.raises(ConfigError, match="is not running"):
        stop(folder)


@pytest.mark.usefixtures("sleeper")
def test_one_that_was_killed_is_not_running(run: RunFolder) -> None:
    folder = start({"models": [run.id], "num_processes": 1}, RUNS, roots())
    process = folder.process()
    assert process is not None
    until(folder.output.read_text)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not folder.is_running())
    state = entry(folder)
    assert state["state"] == "failed"
    assert state["reason"].startswith("it ended early; its last line is: [")


@pytest.mark.usefixtures("sleeper")
def test_one_of_another_machine_is_not_stopped_from_here(run: RunFolder) -> None:
    from app.runs.locks import lock_file

    folder = start({"models": [run.id], "num_processes": 1}, RUNS, roots())
    note = folder.note()
    folder.write_note({**note, "host": "elsewhere"})
    with lock_file(folder.lock, ""), pytest.raises(ConfigError, match="stop it on elsewhere"):
        stop(folder)
    folder.write_note(note)
    stop(folder)


def test_models_are_offered_as_they_are_named_on_the_command_line(run: RunFolder) -> None:
    made_run(RUNS, "empty-run")
    assert model_choices(RUNS) == ["a-run", "a-run@step-00000060", "embedded"]
    assert model_choices(RUNS, most=1) == ["a-run", "embedded"]
