"""What is shown of a run that SLURM starts, from recorded answers of its programs (SLURM 22.05, unless named)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.runs import runs, state
from app.runs.scheduled import cancel_waiting, kill_job, submission
from app.schedulers import slurm
from app.schedulers.slurm import SlurmError
from trainers.run.folder import RunFolder, write_json

Answers = dict[str, str | SlurmError]
FORGOTTEN = SlurmError("slurm_load_jobs error: Invalid job id specified")
NO_ACCOUNTING = SlurmError("Slurm accounting storage is disabled")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What each program answers; nothing is kept between two tests."""
    table: Answers = {"squeue": "", "scontrol": FORGOTTEN, "sacct": NO_ACCOUNTING, "scancel": ""}

    def call(argv: Sequence[str]) -> str:
        answer = table[argv[0]]
        table.setdefault("calls", "")
        table["calls"] = f"{table['calls']} {argv[0]}"
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(slurm, "call", call)
    monkeypatch.setattr(slurm, "_JOBS", slurm._Jobs())
    return table


def submitted(folder: Path, **values: object) -> RunFolder:
    run = RunFolder(folder / "run")
    run.create()
    # The state was written on another machine, or by a command that has ended.
    run.write_state(**{"state": "queued", "scheduler": {"kind": "slurm", "job": "12"}, "processes": [], **values})
    return run


@pytest.mark.parametrize("host", [socket.gethostname(), "login"])
@pytest.mark.parametrize(
    ("written", "squeue", "expected", "cause"),
    [
        ("queued", "12|PENDING|0|Resources|\n", "queued", "SLURM job 12 waits for free nodes (Resources)"),
        ("queued", "11|RUNNING|0|None|\n12|PENDING|0|Priority|\n", "queued",
         "SLURM job 12 waits behind jobs of higher priority (Priority)"),
        ("queued", "12|PENDING|0|AssocGrpGRES|\n", "queued", "SLURM job 12 waits (AssocGrpGRES)"),
        ("queued", "12|PENDING|0|None|\n", "queued", "SLURM job 12 waits"),
        ("queued", "12|CONFIGURING|0|None|\n", "starting", None),
        ("queued", "12|RUNNING|0|None|\n", "starting", None),
        ("running", "12|RUNNING|0|None|\n", "running", None),
        ("stopping", "12|COMPLETING|0|None|\n", "stopping", None),
        ("running", "12|PENDING|0|BeginTime|\n", "queued",
         "SLURM job 12 was interrupted and queued again, and is to start a little later (BeginTime)"),
    ],
)  # fmt: skip
def test_a_job_that_is_listed(
    tmp_path: Path, answers: Answers, host: str, written: str, squeue: str, expected: str, cause: str | None
) -> None:
    answers["squeue"] = squeue
    shown = runs.true_state(submitted(tmp_path, state=written, host=host))
    assert (shown["state"], shown["cause"]) == (expected, cause)


@pytest.mark.parametrize(
    ("scontrol", "expected", "cause"),
    [
        ("JobId=12 JobName=run JobState=CANCELLED Reason=None ExitCode=0:15", "stopped", "SLURM job 12 was cancelled"),
        ("JobId=12 JobState=NODE_FAIL Reason=None", "failed",
         "SLURM job 12 ended (NODE_FAIL) before the run reported its end"),
        ("JobId=12 JobState=TIMEOUT Reason=TimeLimit", "failed",
         "SLURM job 12 ended (TIMEOUT, TimeLimit) before the run reported its end"),
        (FORGOTTEN, "failed", "SLURM no longer knows job 12, which reported no end"),
    ],
)  # fmt: skip
def test_a_job_that_is_not_listed_any_more(
    tmp_path: Path, answers: Answers, scontrol: str | SlurmError, expected: str, cause: str
) -> None:
    answers["scontrol"] = scontrol
    shown = runs.true_state(submitted(tmp_path, state="running"))
    assert (shown["state"], shown["cause"]) == (expected, cause)


@pytest.mark.parametrize(
    ("job", "expected", "end"),
    [
        ("30", "failed", "ended (COMPLETED) before the run reported its end"),
        ("31", "stopped", "was cancelled"),
        ("32", "failed", "ended (TIMEOUT) before the run reported its end"),
        ("33", "failed", "ended (OUT_OF_MEMORY) before the run reported its end"),
        ("34", "failed", "ended (NODE_FAIL) before the run reported its end"),
        ("35", "failed", "ended (PREEMPTED) before the run reported its end"),
        ("36", "failed", "ended (FAILED) before the run reported its end"),
        ("37", "failed", "ended (DEADLINE) before the run reported its end"),
        ("38", "running", None),  # the accounting lags behind
        ("3", "failed", None),  # of no line, though lines begin with it
    ],
)
def test_the_accounting_knows_how_an_old_job_ended(
    tmp_path: Path, answers: Answers, job: str, expected: str, end: str | None
) -> None:
    """Lines in the format of `sacct`, written by hand: no accounting ran."""
    answers["sacct"] = (Path(__file__).parent / "sacct-handwritten.txt").read_text()
    scheduler = {"kind": "slurm", "job": job}
    shown = runs.true_state(submitted(tmp_path, state="running", scheduler=scheduler))
    forgotten = f"SLURM no longer knows job {job}, which reported no end" if expected == "failed" else None
    assert (shown["state"], shown["cause"]) == (expected, f"SLURM job {job} {end}" if end else forgotten)


def test_an_end_that_is_written_is_the_end(tmp_path: Path, answers: Answers) -> None:
    for listed in ("", "11|PENDING|0|Resources|\n", "12|COMPLETING|0|None|\n"):
        answers["squeue"] = listed
        slurm.forget_jobs()
        for end in ("done", "stopped", "failed"):
            assert runs.true_state(submitted(tmp_path, state=end, cause="as written"))["state"] == end
    assert set(str(answers["calls"]).split()) == {"squeue"}


def test_a_job_that_slurm_has_queued_again_has_not_ended(tmp_path: Path, answers: Answers) -> None:
    """Whatever its supervisor wrote while it was preempted, or a node was lost; but for a run that was done."""
    answers["squeue"] = "12|PENDING|0|BeginTime|\n"
    for end in ("stopped", "failed"):
        shown = runs.true_state(submitted(tmp_path, state=end, cause="a signal"))
        assert shown["state"] == "queued"
        assert shown["cause"].startswith(
            "SLURM job 12 was interrupted and queued again, and is to start a little later"
        )
    assert runs.true_state(submitted(tmp_path, state="done"))["state"] == "done"


def test_a_preempted_job_says_so_while_it_waits(tmp_path: Path, answers: Answers) -> None:
    answers["squeue"] = "12|PENDING|1|Resources|\n"
    scheduler = {"kind": "slurm", "job": "12", "restarts": 0, "preempted": True}
    shown = runs.true_state(submitted(tmp_path, state="stopped", cause="preempted", scheduler=scheduler))
    assert shown["cause"] == "SLURM job 12 was preempted and queued again, and waits for free nodes (Resources)"


@pytest.mark.parametrize(
    ("squeue", "expected"),
    [("12|RUNNING|2|None|", "starting"), ("12|CONFIGURING|2|None|", "starting"),
     ("12|RUNNING|1|None|", "failed"), ("12|COMPLETING|2|None|", "failed"), ("", "failed")],
)  # fmt: skip
def test_a_job_that_has_started_again_has_not_ended_either(
    tmp_path: Path, answers: Answers, squeue: str, expected: str
) -> None:
    """Until its first node has taken over the run; in the start that wrote the end, the job is on its way out."""
    answers["squeue"] = squeue
    scheduler = {"kind": "slurm", "job": "12", "restarts": 1}
    assert runs.true_state(submitted(tmp_path, state="failed", scheduler=scheduler))["state"] == expected


def test_where_slurm_does_not_answer_the_file_counts(tmp_path: Path, answers: Answers) -> None:
    answers["squeue"] = SlurmError("squeue is not installed here")
    shown = runs.true_state(submitted(tmp_path, state="running"))
    assert (shown["state"], shown["cause"]) == (
        "running", "SLURM cannot be asked about job 12: squeue is not installed here",
    )  # fmt: skip


def test_many_runs_are_asked_for_at_once(tmp_path: Path, answers: Answers) -> None:
    answers["squeue"] = "12|RUNNING|0|None|\n"
    run = submitted(tmp_path, state="running")
    for _ in range(20):
        runs.true_state(run)
    assert answers["calls"] == " squeue"


@pytest.mark.parametrize("scheduler", [None, 3, [], {}, {"kind": "slurm"}, {"kind": "slurm", "job": "1; rm"},
                                       {"kind": "slurm", "job": 12}, {"kind": "pbs", "job": "12"}])  # fmt: skip
def test_a_state_that_names_no_job_is_that_of_its_processes(
    tmp_path: Path, answers: Answers, scheduler: object
) -> None:
    run = submitted(tmp_path, scheduler=scheduler)
    assert runs.true_state(run)["state"] == "failed"
    assert "calls" not in answers


@pytest.mark.parametrize("kind", [None, 3, True, [], {}, ["slurm"], "sge"])
def test_a_damaged_submission_is_none(tmp_path: Path, kind: object) -> None:
    run = submitted(tmp_path)
    write_json(run.scheduler, {"kind": kind, "options": {}})
    assert submission(run) is None
    write_json(run.scheduler, {"kind": "slurm", "options": {}})
    assert submission(run)


def test_a_job_of_another_folder_is_not_cancelled(tmp_path: Path, answers: Answers) -> None:
    """The state of a copied run names the job of the run that it was copied from."""
    answers["squeue"] = "12|PENDING|0|Resources|\n"
    answers["scontrol"] = "JobId=12 JobName=original\n   Command=/runs/original/slurm.sh\n"
    run = submitted(tmp_path)
    assert not cancel_waiting(run)
    assert not kill_job(run)
    assert "scancel" not in str(answers["calls"])


def test_a_waiting_job_is_cancelled_and_cannot_be_moved_in_our_queue(tmp_path: Path, answers: Answers) -> None:
    answers["squeue"] = "12|PENDING|0|Resources|\n"
    run = submitted(tmp_path)
    answers["scontrol"] = f"JobId=12 JobName=run\n   Command={run.path}/slurm.sh\n"
    assert state.allowed(run) == ["cancel", "clone"]
    stopped = runs.stop_run(run, 5)
    assert (stopped.in_time, stopped.state["state"]) == (True, "stopped")
    assert stopped.state["cause"] == "cancelled before it started"
    assert "scancel" in str(answers["calls"])
    assert run.stop_asked() is None


def test_a_running_job_is_asked_to_stop_through_its_folder(tmp_path: Path, answers: Answers) -> None:
    """Control: it is not cancelled, so that it can save."""
    answers["squeue"] = "12|RUNNING|0|None|\n"
    run = submitted(tmp_path, state="running")
    assert runs.stop_run(run, 0.1).in_time is False
    assert run.stop_asked() is True
    assert "scancel" not in str(answers["calls"])
