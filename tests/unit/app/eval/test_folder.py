"""The folder of an evaluation: who holds it, what may be read of it, and reports that are damaged or far too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.eval import command
from app.eval import folder as module
from app.eval.folder import EvaluationFolder, beginning_of, evaluation_of_id, evaluations, held
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError

pytestmark = pytest.mark.usefixtures("elsewhere")
HOLDS = """import sys, time; from pathlib import Path; from app.eval.folder import EvaluationFolder, held
with held(EvaluationFolder(Path(sys.argv[1])), ["a"], ["tunesmith"]): print("held", flush=True); time.sleep(60)"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds a folder."""
    root = str(Path(__file__).resolve().parents[4])
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], env={**os.environ, "PYTHONPATH": root},
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_is_held_by_one_process_until_it_is_killed() -> None:
    folder = EvaluationFolder(Path("runs/eval-1").absolute())
    assert not folder.is_running()
    process = holder(folder.path)
    assert folder.is_running()
    assert folder.note()["models"] == ["a"]
    known = folder.process()
    assert known is not None
    assert known.pid == process.pid
    with pytest.raises(ConfigError, match="holds an evaluation that is running"), held(folder, [], []):
        raise AssertionError("held twice")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    assert not folder.is_running()
    with held(folder, ["b"], []):
        assert folder.note()["models"] == ["a"], "what was noted when it was started stays"


def test_who_comes_second_leaves_the_folder_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see no folder; the second one fails as the first has the lock by then."""
    folder = EvaluationFolder(Path("new").absolute())
    plan = SimpleNamespace(folder=folder.path, candidates=[], samples=(), tasks=None)
    monkeypatch.setattr(command, "make_plan", lambda args: plan)
    processes = []

    def is_beaten(*args: Any) -> Any:
        processes.append(holder(folder.path))
        return held(*args)

    monkeypatch.setattr(command, "held", is_beaten)
    args = command.EVAL.read(["a"])
    assert args is not None
    with pytest.raises(ConfigError, match="holds an evaluation that is running"):
        command._evaluate(args, ["a"], True)
    assert folder.note()["models"] == ["a"]
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["report.json", "notes.txt", "1-base", ".git"])
def test_a_folder_of_other_things_is_refused_and_left_alone(name: str) -> None:
    folder = EvaluationFolder(Path("elsewhere").absolute())
    (folder.path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds other files; name a new folder"), held(folder, [], []):
        raise AssertionError("taken")
    assert [path.name for path in folder.path.iterdir()] == [name]


def test_an_error_of_the_work_is_not_told_as_one_of_the_folder() -> None:
    with pytest.raises(FileNotFoundError), held(EvaluationFolder(Path("eval-1").absolute()), [], []):
        Path("missing").read_text(encoding="utf-8")


def test_only_folders_of_evaluations_are_found() -> None:
    runs = Path("runs")
    for name in ("eval-2", "eval-10", "a-run"):
        (runs / name).mkdir(parents=True)
    (runs / "eval-file").write_text("")
    (runs / "eval-link").symlink_to("/etc")
    assert [folder.id for folder in evaluations(runs)] == ["eval-2", "eval-10"]
    assert evaluations(Path("nowhere")) == []
    assert evaluation_of_id("eval-2", runs).path == runs / "eval-2"


@pytest.mark.parametrize(
    "name",
    [None, 3, [], {}, True, "", "a-run", "eval-3", "eval-file", "eval-link", "eval-2/..", "../eval-2", "/etc",
     "eval-\0", "eval-\n", "eval-" + "x" * 10_000, "eval-<img src=x>", "\ud800", "eval-\ud800"],
)  # fmt: skip
def test_any_other_name_is_refused(name: Any) -> None:
    for name_of_folder in ("eval-2", "a-run"):
        Path("runs", name_of_folder).mkdir(parents=True)
    Path("runs/eval-file").write_text("")
    Path("runs/eval-link").symlink_to("/etc")
    with pytest.raises(ConfigError, match="there is no such evaluation"):
        evaluation_of_id(name, Path("runs"))


def test_the_runs_of_an_evaluation_are_in_the_order_of_its_models() -> None:
    folder = EvaluationFolder(Path("runs/eval-1"))
    for name in ("10-b", "2-a", "x-c", "exports"):
        made_run(folder.path, name)
    (folder.path / "3-not-a-run").mkdir()
    assert [run.id for run in folder.runs()] == ["2-a", "10-b"]


def test_of_a_report_that_is_too_long_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPORT_BYTES", 20_000)
    folder = EvaluationFolder(Path("runs/eval-1"))
    folder.path.mkdir(parents=True)
    changed = [{"row": f"{number}: ünï", "answer_a": "x" * 100} for number in range(1000)]
    document = {"rows": [{"model": "a"}], "notes": ["n"], "failed": {}, "interrupted": False, "changed": changed}
    folder.report.write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    read, is_complete = folder.document()
    assert not is_complete
    assert {**read, "changed": []} == {**document, "changed": []}
    assert 50 < len(read["changed"]) < 1000
    assert read["changed"] == changed[: len(read["changed"])]
    folder.report.write_text(json.dumps({**document, "changed": changed[:10]}), encoding="utf-8")
    assert folder.document() == ({**document, "changed": changed[:10]}, True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "nonsense", '{"a"', '{"a":', '{"a": [', '{"a": [1', "\0", "{" * 100_000, "[" * 100_000,
     '{"a": ' * 5000, '{"a": [' + "[" * 100_000],
)  # fmt: skip
def test_what_is_no_report_is_read_as_an_empty_one(text: str) -> None:
    folder = EvaluationFolder(Path("runs/eval-1"))
    folder.path.mkdir(parents=True)
    folder.report.write_text(text)
    assert folder.document()[0] in ({}, {"a": []}, {"a": [1]})
    assert isinstance(beginning_of(text), dict)


def test_a_list_that_is_far_too_long_ends_the_reading() -> None:
    entries = beginning_of(f'{{"a": [{",".join(["1"] * 5000)}], "b": 1}}')
    assert entries == {"a": [1] * 2000}
