"""Every failure is provoked for real; its cause is found, and with its remedy the run finishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.diagnosis.advice import diagnose
from tests.detached import tunesmith
from tests.faults.failures import FAILURES, SMALL, Failure, chat, lines
from tests.faults.healthy import HEALTHY, TALK
from tests.launching import ROOT, flags, launch
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder

IN_CHECK = (
    "a limit on memory", "no smaller micro-batch is left", "only sharding helps", "one of two is killed",
    "a loss that is not a number", "a rate far too high", "a spike of the loss", "a rank is stopped",
    "a collective that one never joins", "a port is taken", "nobody listens", "a segmentation fault",
    "the launcher is killed", "a package is missing", "an error that no rule knows", "the disk is full",
    "the data is removed", "rows that cannot be read", "no such model", "weights cut off", "an export that differs",
    "a template without an end",
)  # fmt: skip
"""One failure of each kind; `make faults` provokes all of them."""
HEALTHY_IN_CHECK = (
    "short", "noisy", "the best is exported", "two ranks, sharded", "data that talks of failures",
    "stopped and resumed",
)  # fmt: skip
PROVOKE = f"{ROOT}:{Path(__file__).resolve().parent / 'provoke'}"


def provoked(failure: Failure, home: Path) -> tuple[RunFolder, dict[str, str], list[dict[str, Any]]]:
    """Runs into a failure; returns the run, the variables that provoke it, and the diagnosis that was printed."""
    made = failure.make(home)
    variables = {"PYTHONPATH": PROVOKE, "PROVOKE": failure.provoke, "ON_RANK": str(failure.processes - 1)}
    variables |= {"AT_STEP": "12" if failure.provoke == "spike" else "3"}
    variables |= {name: value for name, value in made.items() if name.isupper()}
    options = {"preset": "tiny-lora", **SMALL, **failure.options}
    options |= {name: value for name, value in made.items() if not name.isupper()}
    run = RunFolder(home / "runs" / "mine")
    if failure.direct:
        strategy = options.pop("strategy", None)
        launch(run.path, failure.processes, options, strategy, XDG_STATE_HOME=str(home / "state"), **variables)
        shown = tunesmith("runs", "show", "mine", "--json", home=home)
    else:
        words = ["--num_processes", str(failure.processes), "--output_dir", str(run.path), "--json"]
        shown = tunesmith("train", *words, *flags(options), home=home, **variables)
    document = json.loads(shown.stdout)
    assert document["state"] == failure.state, (document, shown.stderr[-2000:])
    return run, variables, document["diagnosis"]


def test_what_make_check_provokes_is_listed() -> None:
    assert set(IN_CHECK) <= {failure.name for failure in FAILURES}
    assert set(HEALTHY_IN_CHECK) <= set(HEALTHY)


@pytest.mark.parametrize(
    "failure",
    mostly_long(FAILURES, [failure for failure in FAILURES if failure.name in IN_CHECK]),
    ids=lambda failure: failure.name.replace(" ", "-"),
)
def test_the_cause_is_found_and_its_remedy_helps(failure: Failure, home: Path) -> None:
    _, variables, causes = provoked(failure, home)
    assert [cause["rule"] for cause in causes] == [failure.rule or None], causes
    assert failure.says in causes[0]["cause"]
    assert causes[0]["evidence"] or failure.state == "done", "something shows it"
    remedies = causes[0]["remedies"]
    if failure.applied is None:
        assert remedies == [] or failure.rule == "native_crash", remedies
        return
    verb = ["resume"] if failure.state == "failed" else ["runs", "clone"]
    done = tunesmith(*verb, "mine", "--apply", str(failure.applied), "--json", home=home, **variables)
    document = json.loads(done.stdout)
    assert document["state"] == "done", (document, remedies, done.stderr[-2000:])
    chosen = remedies[failure.applied - 1]
    config = RunFolder(document["run_dir"]).config.read_text()
    for name, value in chosen["options"].items():
        assert name in config, (name, value)


def test_changed_data_is_named_and_may_be_gone_on_with(home: Path) -> None:
    data = home / "data.jsonl"
    lines(data, [chat(f"{number}?", "yes") for number in range(60)])
    options = {**SMALL, "dataset_name": data, "save_steps": 2, "packing": False}
    failure = Failure("then the data changes", "killed", "kill", options)
    run, _, (cause,) = provoked(failure, home)
    assert cause["rule"] == "killed"
    lines(data, [chat(f"{number}?", "no") for number in range(60)])
    again = tunesmith("resume", "mine", "--json", home=home)
    (cause,) = json.loads(again.stdout)["diagnosis"]
    assert (cause["rule"], cause["remedies"][0]["force"]) == ("changed_data", True)
    done = tunesmith("resume", "mine", "--apply", "1", "--json", home=home)
    assert json.loads(done.stdout)["state"] == "done", done.stderr
    assert "warning: the data has changed" in run.log.read_text()


def test_at_least_forty_are_provoked() -> None:
    assert len({failure.name for failure in FAILURES}) >= 40
    assert len({failure.rule for failure in FAILURES}) >= 30


def test_without_rules_no_cause_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what the table above expects does not come from anywhere else."""
    run, _, (cause,) = provoked(FAILURES[0], home)
    assert cause["rule"] == FAILURES[0].rule
    monkeypatch.setattr("app.diagnosis.advice.RULES", ())
    (unknown,) = diagnose(run)
    assert (unknown.rule, unknown.remedies) == ("", [])


@pytest.mark.parametrize("name", mostly_long(HEALTHY, HEALTHY_IN_CHECK))
def test_a_healthy_run_is_given_no_cause(name: str, home: Path) -> None:
    shape = dict(HEALTHY[name])
    processes, make, stops = shape.pop("processes", 1), shape.pop("make", None), shape.pop("stops", False)
    variables = {"PYTHONPATH": PROVOKE, "PROVOKE": "print_rows" if shape.pop("print_rows", False) else ""}
    variables |= {"PROVOKE": "ask_to_stop", "AT_STEP": "20"} if stops else {}
    variables |= {"PROVOKE": shape.pop("provoke")} if "provoke" in shape else {}
    variables |= shape.pop("variables", {})
    shape |= shape.pop("make_data")(home) if "make_data" in shape else {}
    options = {"preset": "tiny-lora", **SMALL, **shape, **(make(home) if make else {})}
    words = ["--num_processes", str(processes), "--output_dir", str(home / "runs" / "mine"), "--json"]
    ended = tunesmith("train", *words, *flags(options), home=home, **variables)
    document = json.loads(ended.stdout)
    assert (document["state"], document["diagnosis"]) == ("stopped" if stops else "done", []), ended.stderr[-2000:]
    if stops:
        document = json.loads(tunesmith("resume", "mine", "--json", home=home).stdout)
        assert (document["state"], document["diagnosis"]) == ("done", [])
    if make:
        log = (home / "runs" / "mine" / "log.txt").read_text()
        assert all(f"] {line}\n" in log for line in TALK), "control: the log has these lines"


def test_at_least_twenty_healthy_runs() -> None:
    assert len(HEALTHY) >= 20
