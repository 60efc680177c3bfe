"""Profiles in a run folder are read as data that anyone may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.runs.profiles import SHARES, profiles
from tests.made_runs import made_run
from trainers.monitor import profiler
from trainers.run.folder import RunFolder
from ui.pages.run_parts import _profile

HOSTILE = "<img src=x onerror=alert(1)>"


def profile(rank: int = 0, **changes: Any) -> dict[str, Any]:
    operators = [{"name": HOSTILE, "calls": 4, "seconds": 0.5, "share": 0.25}]
    shares = dict(zip(SHARES, (0.5, 0.1, 0.2, 0.05, 0.15), strict=True))
    return {"rank": rank, "first_step": 4, "steps": 3, "device": "cpu", "seconds": 2.0, "shares": shares,
            "operators": operators, "trace": "x", **changes}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = made_run(tmp_path, "a-run")
    (run.path / "profile").mkdir()
    return run


def write(run: RunFolder, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (run.path / "profile" / name).write_text(text, encoding="utf-8")


def test_the_shares_are_those_that_are_written() -> None:
    assert tuple(SHARES) == profiler.SHARES


def test_profiles_are_read_by_rank_and_shown(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "rank-10.json", profile(10))
    write(run, "rank-2.json", profile(2))
    assert [each["rank"] for each in profiles(run)] == [2, 10]
    page = _profile(profiles(run))
    assert "Steps 4 to 6" in page
    assert "50%" in page
    assert HOSTILE not in page
    assert "&lt;img" in page
    assert run_verb(["runs", "show", str(run.path)]) == 0
    assert (
        "profile of rank 2, 3 steps from 4: 50% computing, 10% computing and communicating" in capsys.readouterr().out
    )
    write(run, "rank-2.json", profile(2, steps=9))
    assert profiles(run)[0]["steps"] == 9, "what is cached is the file as it was"


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "7", "null", "{}", "[" * 99_999, profile(steps="many"), profile(seconds=None), profile(shares={}),
        profile(operators=[7]), profile(operators=7), profile(shares=dict.fromkeys(SHARES, float("nan"))),
        profile(seconds=1e999), json.dumps(profile()) + " " * (1 << 16),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_left_out(run: RunFolder, content: Any) -> None:
    write(run, "rank-0.json", content)
    write(run, "rank-1.json", profile(1))
    assert [each["rank"] for each in profiles(run)] == [1]


def test_links_and_other_files_are_left_out(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(profile()))
    (run.path / "profile" / "rank-0.json").symlink_to(tmp_path / "secret.json")
    write(run, "rank-x.json", profile())
    assert profiles(run) == []
    assert _profile([]) == ""
