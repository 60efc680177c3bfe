"""The folder of a sweep: names and records that come from anywhere, and the verbs that read them."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.cli import run_verb
from app.commands.sweep import list_sweeps_verb, show_sweep
from app.runs.runs import sweep_of
from app.sweep.record import SweepFolder, find_sweep, list_sweeps, true_state
from app.sweep.report import compared_runs
from app.sweep.trial_runs import TrialRuns
from tests.made_runs import made_run
from tests.unit.app.sweep.test_runner import record_of
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, write_json
from ui.pages.compare import _sweeps


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    sweep = SweepFolder(tmp_path / "sweep-x")
    record_of(sweep, options={"runs_dir": str(tmp_path)})
    return sweep


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def reads_or_refuses(read: Callable[[], Any]) -> None:
    """A record, or one line that says that it is damaged."""
    try:
        assert read().trials is not None
    except ConfigError as error:
        (line,) = error.lines
        assert "sweep" in line


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_record_is_read_or_refused(folder: SweepFolder, data: st.DataObject) -> None:
    record_of(folder)
    content = json.loads(folder.file.read_text())
    trial = content["trials"][0]
    for number, other in enumerate(content["trials"]):
        other["runs"][0] |= {"state": "done", "scores": [float(number)]}
    parts = {"sweep": content, "axis": content["axes"][0], "trial": trial, "run": trial["runs"][0]}
    part = parts[data.draw(st.sampled_from(sorted(parts)))]
    key = data.draw(st.sampled_from([*part, "new"]))
    part[key] = data.draw(JSON | st.sampled_from([[], {}, [math.inf, -math.inf], "\x1b[31mred", "\ud800"]))
    if data.draw(st.booleans()):
        del part[key]
    folder.file.write_text(json.dumps(content))
    reads_or_refuses(folder.read)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for as_json in (False, True):
            list_sweeps_verb(folder.path.parent, as_json)
            with contextlib.suppress(ConfigError):
                show_sweep(str(folder.path), folder.path.parent, as_json)
        str(_sweeps(list_sweeps(folder.path.parent)))
    assert "\x1b" not in output.getvalue()


def test_a_reader_that_trusts_the_file_would_be_seen(folder: SweepFolder) -> None:
    """Control."""
    folder.file.write_text("[]")
    reads_or_refuses(folder.read)
    with pytest.raises(AttributeError):
        reads_or_refuses(lambda: json.loads(folder.file.read_text()))


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "/etc", "", "a/b", "."])
def test_a_run_is_beside_its_sweep(name: str, folder: SweepFolder) -> None:
    """No record names a folder elsewhere, which `sweep stop` and `sweep resume` would then write to."""
    content = json.loads(folder.file.read_text())
    content["trials"][0]["runs"][0]["id"] = name
    folder.file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="damaged"):
        folder.read()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(max_size=300))
def test_any_name_is_found_or_refused(folder: SweepFolder, name: str) -> None:
    if name != folder.id:
        with pytest.raises(ConfigError, match="there is no sweep"):
            find_sweep(name, folder.path.parent)
    assert find_sweep(folder.id, folder.path.parent).path == folder.path


def test_the_verbs_on_a_sweep_whose_process_is_gone(folder: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    runs_dir = ["--runs_dir", str(folder.path.parent), "--json"]
    assert true_state(folder.read()) == "interrupted"
    assert run_verb(["sweep", "list", *runs_dir]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "interrupted"
    assert run_verb(["sweep", "stop", folder.id, *runs_dir]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
    assert run_verb(["sweep", "show", folder.id, *runs_dir]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["best"], len(document["runs"])) == ("stopped", None, 8)
    assert run_verb(["sweep", "show", "sweep-y", *runs_dir]) == 2
    assert "did you mean sweep-x?" in capsys.readouterr().err
    assert run_verb(["sweep", "stop", folder.id, "--timeout", "soon", *runs_dir]) == 2


def test_stop_does_not_wait_for_ever(folder: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """For a run that does not end, such as one on a machine that is gone, whose state says nothing of use."""
    record = folder.read()
    record.trials[0].runs[0].state = "running"
    folder.write(record)
    run = folder.run(record.trials[0].runs[0])
    run.create()
    write_json(run.state_file, {"state": "running", "host": "another", "step": "many"})
    argv = ["sweep", "stop", folder.id, "--timeout", "0.1", "--runs_dir", str(folder.path.parent)]
    assert run_verb(argv) == 1
    assert "is interrupted" in capsys.readouterr().out
    write_json(run.state_file, {"state": "stopped", "host": "another", "step": [3]})
    assert run_verb(argv) == 0
    assert "is stopped" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".lock", "log.txt", "stop"])
def test_a_link_in_a_sweep_leads_nowhere(name: str, folder: SweepFolder, tmp_path: Path) -> None:
    """Neither is the file that it names emptied, nor is one made there."""
    others = [tmp_path / "mine", tmp_path / "new"]
    others[0].write_text("kept")
    for other in others:
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to(other)
        with contextlib.suppress(ConfigError):
            folder.hold().close()
        folder.ask_stop()
    assert others[0].read_text() == "kept"
    assert not others[1].exists()


def ended(folder: SweepFolder, number: int) -> RunFolder:
    """A run of a trial that has been measured, with its folder."""
    record = folder.read()
    trial = record.trials[number - 1]
    trial.runs[0].state, trial.runs[0].scores = "done", [float(number)]
    run = made_run(folder.path.parent, trial.runs[0].id)
    write_json(run.sweep, {"sweep": folder.id, "trial": number, "seed": trial.runs[0].seed})
    folder.write(record)
    return run


def test_a_renamed_run_is_found_and_one_that_is_gone_is_named(
    folder: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ended(folder, 1), ended(folder, 2)
    assert compared_runs(folder, folder.read()) == [first.id, second.id]
    first.path.rename(first.path.with_name("mine"))
    assert compared_runs(folder, folder.read()) == ["mine", second.id]
    second.path.rename(second.path.with_name("hostile\x1b[2J"))
    second.path.with_name("link").symlink_to(second.path.with_name("hostile\x1b[2J"))
    assert compared_runs(folder, folder.read()) == ["mine"], "no terminal shows this name, and links are not followed"
    second.path.with_name("hostile\x1b[2J").rename(second.path.with_name("copy"))
    write_json(RunFolder(second.path.with_name("copy")).sweep, {"sweep": "sweep-other", "trial": 2, "seed": 42})
    assert compared_runs(folder, folder.read()) == ["mine"], "it names another sweep"
    runs_dir = ["--runs_dir", str(folder.path.parent)]
    assert run_verb(["sweep", "show", folder.id, *runs_dir]) == 0
    assert f"gone     {second.id}: deleted or moved; what was measured stays" in capsys.readouterr().out
    assert run_verb(["sweep", "show", folder.id, *runs_dir, "--json"]) == 0
    assert [run["gone"] for run in json.loads(capsys.readouterr().out)["runs"]] == [False, True, *[False] * 6]


def test_a_run_says_which_trial_of_which_sweep_it_is(folder: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended(folder, 2)
    runs_dir = ["--runs_dir", str(folder.path.parent)]
    assert run_verb(["runs", "show", run.id, *runs_dir]) == 0
    assert "trial 2 of sweep-x" in capsys.readouterr().out
    assert run_verb(["runs", "show", run.id, *runs_dir, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sweep"] == {"sweep": "sweep-x", "trial": 2, "seed": 42}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.fixed_dictionaries({}, optional={"sweep": JSON | st.text(), "trial": JSON, "seed": JSON}) | JSON)
@example({"sweep": "..", "trial": 1, "seed": 1})
@example({"sweep": "../sweep-x", "trial": 1, "seed": 1})
@example({"sweep": "x" * 300, "trial": 1, "seed": 1})
@example({"sweep": "sweep-x", "trial": True, "seed": 1})
def test_no_run_belongs_to_a_folder_elsewhere(tmp_path: Path, document: Any) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir(exist_ok=True)
    run.sweep.write_text(json.dumps(document))
    member = sweep_of(run)
    if member:
        assert (tmp_path / member["sweep"]).parent == tmp_path
        assert not (tmp_path / member["sweep"]).exists() or member["sweep"] == "run"
        assert member == {key: document[key] for key in ("sweep", "trial", "seed")}
        assert type(member["trial"]) is type(member["seed"]) is int


def test_one_process_runs_a_sweep(folder: SweepFolder) -> None:
    with folder.hold(), pytest.raises(ConfigError, match="is running"):
        folder.hold()
    folder.hold().close()


@pytest.mark.parametrize("measure", ["accuracy", "step", "best_eval_loss "])
def test_a_sweep_by_an_unknown_measure_is_not_resumed(
    measure: str, folder: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may come from elsewhere; it is refused before anything is started, with `--detach` too."""
    folder.write(folder.read().model_copy(update={"measure": measure, "state": "stopped"}))
    before = folder.file.read_text()
    for words in ([], ["--detach"]):
        assert run_verb(["sweep", "resume", str(folder.path), *words]) == 2
        error = capsys.readouterr().err
        assert f"{folder.file}: measure='{measure}' is not a measure; use one of best_eval_loss, " in error
    assert folder.file.read_text() == before
    assert [path.name for path in folder.path.parent.iterdir()] == [folder.id]


def test_a_run_has_no_value_of_an_unknown_measure(folder: SweepFolder) -> None:
    """So that `sweep stop` ends the runs of such a sweep."""
    record = folder.read().model_copy(update={"measure": "accuracy"})
    assert TrialRuns(folder).score(record, record.trials[0].runs[0]) is None


@pytest.mark.parametrize(("word", "verb"), [("shw", "show"), ("lst", "list"), ("stpo", "stop"), ("resum", "resume")])
def test_a_misspelled_verb_is_answered_with_the_near_one(
    word: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(["sweep", word, "sweep-x"]) == 2
    assert f"sweep has no verb '{word}', and no preset has this name; did you mean {verb}?" in capsys.readouterr().err


def test_a_misspelled_preset_is_no_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["sweep", "tiny-lroa"]) == 2
    assert "tiny has no method 'lroa'" in capsys.readouterr().err
    assert run_verb(["sweep", "list.yaml"]) == 2
    assert "--config list.yaml" in capsys.readouterr().err
