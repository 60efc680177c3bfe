"""One sentence for why a run ended, from logs as launchers and ranks write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launch.exit_cause import cause_of, root_cause
from trainers.run.folder import RunFolder, log_line

ECHO = [
    "Traceback (most recent call last):",
    '  File "launch.py", line 3, in <module>',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
]


def cause(tmp_path: Path, lines: list[tuple[str, str]], status: int = 1, otherwise: str = "") -> str:
    run = RunFolder(tmp_path)
    run.log.write_text("".join(log_line(who, text) for who, text in lines), encoding="utf-8")
    return cause_of(run, 0, status, otherwise)


def trace(who: str, *raised: str) -> list[tuple[str, str]]:
    """A chain of tracebacks as Python prints it."""
    lines = []
    for text in raised:
        lines += ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f(x)", text, ""]
        lines += ["During handling of the above exception, another exception occurred:", ""]
    return [(who, line) for line in lines[:-2]]


def test_the_rank_that_fell_first_is_named_and_not_its_victims(tmp_path: Path) -> None:
    lines = [
        *trace("rank 1", "ValueError: bad"),
        *trace("rank 0", "RuntimeError: closed"),
        *[("launcher", x) for x in ECHO],
    ]
    assert cause(tmp_path, lines) == "rank 1: ValueError: bad"


def test_of_a_chain_of_exceptions_the_last_counts(tmp_path: Path) -> None:
    assert (
        cause(tmp_path, trace("rank 0", "KeyError: 'a'", "my.pkg.DataError: row 3"))
        == "rank 0: my.pkg.DataError: row 3"
    )


def test_an_exception_of_a_small_letter_is_told_with_its_module(tmp_path: Path) -> None:
    assert cause(tmp_path, trace("launcher", "socket.gaierror: [Errno -2] Name or service not known")).startswith(
        "launcher: socket.gaierror: [Errno -2]"
    )
    assert "gaierror" not in cause(tmp_path, [("launcher", "socket.gaierror: said in passing"), ("launcher", "x")])


def test_an_exception_without_words_and_one_with_more_lines(tmp_path: Path) -> None:
    assert cause(tmp_path, trace("rank 0", "NotImplementedError")) == "rank 0: NotImplementedError"
    lines = [*trace("rank 0", "OutOfMemoryError: CUDA out of memory."), ("rank 0", "Tried: to allocate 2 GiB")]
    assert cause(tmp_path, lines) == "rank 0: OutOfMemoryError: CUDA out of memory."


def test_a_rank_killed_by_a_signal_is_told_by_the_launchers_summary(tmp_path: Path) -> None:
    words = "E1121 10:00 api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python"
    lines = [("launcher", words), *[("launcher", line) for line in ECHO]]
    assert cause(tmp_path, lines) == "rank 1 was killed by SIGKILL (manually, or by the system when memory ran out)"


def test_one_process_without_elastic(tmp_path: Path) -> None:
    died = "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGSEGV: 11>."
    lines = [("launcher", "Traceback (most recent call last):"), ("launcher", died)]
    assert cause(tmp_path, lines) == "rank 0 was killed by SIGSEGV"


@pytest.mark.parametrize(
    ("status", "otherwise", "expected"),
    [
        (-15, "", "the launcher was killed by SIGTERM"),
        (-250, "", "the launcher was killed by signal 250"),
        (1, "stopped by request before the first step", "stopped by request before the first step"),
        (3, "", "the launcher ended with exit status 3 and no traceback; the last line of the log: Warning: fine"),
    ],
)
def test_without_a_traceback_the_exit_speaks(tmp_path: Path, status: int, otherwise: str, expected: str) -> None:
    assert cause(tmp_path, [("rank 0", "Step: 1"), ("launcher", "Warning: fine")], status, otherwise) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_cannot_be_started_is_told_by_its_last_words(ranks: int, tmp_path: Path) -> None:
    words = "python: can't open file '/x/train.py': [Errno 2] No such file or directory"
    summary = "E1122 00:01 api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 2898) of binary: python"
    alone = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 2."
    lines = [words, summary, *ECHO] if ranks == 2 else [words, *ECHO[:-1], alone]
    told = cause(tmp_path, [("launcher", line) for line in lines])
    assert "exit status" in told
    assert told.endswith(f"; the last line of the log: {words}")


def test_an_earlier_attempts_traceback_is_not_this_ones(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.log.write_text(
        "".join(log_line(who, text) for who, text in trace("rank 0", "ValueError: old")), encoding="utf-8"
    )
    assert "old" not in cause_of(run, run.log.stat().st_size, 1)


def test_no_log_and_a_log_of_rubbish(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert "exit status 1" in cause_of(run, 0, 1)
    run.log.write_bytes(bytes(range(256)) * 1000)
    assert "exit status 1" in cause_of(run, 0, 1)


CLOSED = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:34525"
SUMMARY = "E1121 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8485) of binary: python"


def test_a_lost_connection_is_blamed_on_the_rank_that_was_killed(tmp_path: Path) -> None:
    lines = [*trace("rank 0", CLOSED), ("launcher", SUMMARY), *[("launcher", line) for line in ECHO]]
    assert cause(tmp_path, lines).startswith("rank 1 was killed by SIGKILL")
    assert root_cause(CLOSED, RunFolder(tmp_path), 0).startswith("rank 1 was killed by SIGKILL")


def failures(*ranks: tuple[int, int, int]) -> list[str]:
    """torchrun's summary of ranks, each with its exit status and process."""
    lines = ["Failures:"]
    for index, (rank, status, pid) in enumerate(ranks):
        how = "traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        lines += [f"[{index}]:", "  time      : 2026-11-25_09:12:44", f"  rank      : {rank} (local_rank: {rank})",
                  f"  exitcode  : {status} (pid: {pid})", "  error_file: <N/A>", f"  {how}"]  # fmt: skip
    return lines


@pytest.mark.parametrize(("by_torchrun", "expected"), [(False, "rank 1 was killed by SIGKILL"), (True, CLOSED)])
def test_where_torchrun_names_the_victim_its_summary_tells_who_was_killed(
    by_torchrun: bool, expected: str, tmp_path: Path
) -> None:
    """Negative control: a rank that torchrun ended itself, for the first one's failure, is not the cause of it."""
    closing = ["W1125 api.py:1028] Sending process 78 closing signal SIGTERM"] * by_torchrun
    first = "E1125 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 77) of binary: python"
    launcher = [*closing, first, *ECHO, *failures((0, 1, 77), (1, -9, 78))]
    lines = [*trace("rank 0", CLOSED), *[("launcher", line) for line in launcher]]
    assert expected in cause(tmp_path, lines)
    assert expected in root_cause(CLOSED, RunFolder(tmp_path), 0)


def test_processes_of_two_machines_with_one_number_are_two(tmp_path: Path) -> None:
    closing = "W1125 api.py:1028] Sending process 78 closing signal SIGTERM"
    lines = [closing, *ECHO, *(f"machine 2: {line}" for line in failures((3, -9, 78))), *failures((1, -9, 78))]
    assert cause(tmp_path, [("launcher", line) for line in lines]).startswith("local rank 3 of machine 2 was killed by")


def test_a_lost_connection_is_blamed_on_the_rank_that_crashed(tmp_path: Path) -> None:
    lines = [*trace("rank 0", CLOSED), *trace("rank 1", "ValueError: bad row")]
    assert cause(tmp_path, lines) == "rank 1: ValueError: bad row"
    assert root_cause(CLOSED, RunFolder(tmp_path), 0) == "rank 1: ValueError: bad row"


def test_a_cause_that_is_one_stays(tmp_path: Path) -> None:
    cause(tmp_path, trace("rank 1", "ValueError: bad row"))
    assert root_cause("step 3: loss nan", RunFolder(tmp_path), 0) == "step 3: loss nan"


def test_a_lost_connection_alone_is_all_that_is_known(tmp_path: Path) -> None:
    assert cause(tmp_path, trace("rank 0", CLOSED)) == f"rank 0: {CLOSED}"
    assert root_cause(CLOSED, RunFolder(tmp_path), 0).endswith(CLOSED)
