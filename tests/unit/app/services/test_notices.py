"""What a browser is told of the runs that it watches, whatever it asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.services.notices import MOST_RUNS, run_ends
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.ending import Ending
from trainers.run.folder import Process

GONE = {"state": "", "cause": ""}
CAUSE = "step 9: loss nan, gradient norm nan, on rank 0, in the batch from data.jsonl:7; no weight was updated"


def test_only_runs_that_are_over_are_told_and_why(elsewhere: None, tmp_path: Path) -> None:
    supervisor = Process.of("supervisor", pid=os.getpid()).as_json()
    made_run(tmp_path, "live", "running", processes=[supervisor])
    made_run(tmp_path, "done")
    made_run(tmp_path, "stopped", "stopped", cause="stopped by a stop request")
    made_run(tmp_path, "failed", "failed", cause=CAUSE)
    made_run(tmp_path, "lost", "running", processes=[{**supervisor, "started": 1.0, "since_boot": 1.0}])
    answer = run_ends({"runs": "live\ndone\nstopped\nfailed\nlost\ndone"}, tmp_path)
    ends = {row["id"]: (row["state"], row["cause"]) for row in answer["ended"]}
    assert len(ends) == len(answer["ended"])
    assert ends.keys() == {"done", "stopped", "failed", "lost"}
    assert ends["done"] == ("done", "")
    assert ends["stopped"] == ("stopped", "stopped by a stop request")
    assert ends["failed"][0] == ends["lost"][0] == "failed"
    assert "at step 9, on rank 0" in ends["failed"][1]  # the diagnosis, and not what the trainer recorded
    assert ends["failed"][1] != CAUSE
    assert "ended without" in ends["lost"][1]


def test_a_long_cause_is_short_and_on_one_line(elsewhere: None, tmp_path: Path) -> None:
    made_run(tmp_path, "failed", "failed", cause="rank 0: ValueError: \x1b[31m" + "x\n" * 5000)
    (row,) = run_ends({"runs": "failed"}, tmp_path)["ended"]
    assert 10 < len(row["cause"]) <= 300
    assert "\x1b" not in row["cause"]


def test_a_secret_in_a_cause_is_not_told(elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_notforanyone")
    run = made_run(tmp_path, "failed", "running")
    run.end(Ending("failed", "401 for hf_notforanyone"), by_supervisor=False)
    assert "notforanyone" not in str(run_ends({"runs": "failed"}, tmp_path))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../secret", "/etc", "link", "done/", "done\0", "\u202edone", "x" * 5000, "~", "*", "%2e"]
)
def test_only_runs_of_the_folder_are_told_of(elsewhere: None, tmp_path: Path, name: str) -> None:
    """A run outside is answered as one that does not exist."""
    made_run(tmp_path, "secret", cause="nobody reads this")
    made_run(tmp_path / "runs", "done")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "secret")
    known = {"id": "done", "state": "done", "cause": ""}
    assert run_ends({"runs": f"{name}\ndone"}, tmp_path / "runs")["ended"] == [{"id": name, **GONE}, known]


@pytest.mark.parametrize(
    "request_",
    [{}, {"runs": None}, {"runs": 1}, {"runs": True}, {"runs": ["done"]}, {"runs": "x\n" * MOST_RUNS},
     {"runs": "x\n" * 1_000_000}],
)  # fmt: skip
def test_a_wrong_request_is_refused(tmp_path: Path, request_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^runs (is not a text|has more than 100 lines)"):
        run_ends(request_, tmp_path)


def test_as_many_as_the_limit_are_answered(elsewhere: None, tmp_path: Path) -> None:
    assert len(run_ends({"runs": "\n".join(map(str, range(MOST_RUNS)))}, tmp_path)["ended"]) == MOST_RUNS


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(["runs", "x"]), st.none() | st.booleans() | st.integers() | st.text()))
def test_any_plain_values_are_answered_or_refused(request_: dict[str, Any]) -> None:
    try:
        answer = run_ends(request_, Path("/nonexistent"))
    except ConfigError:
        assert not isinstance(request_.get("runs"), str)
    else:
        assert [row["id"] for row in answer["ended"]] == list(dict.fromkeys(request_["runs"].split("\n")))
        assert all(row["state"] == "" for row in answer["ended"])
