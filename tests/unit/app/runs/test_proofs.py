"""Which proof of a run is running, what that refuses, and files that anyone may have written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.launch import actions
from app.runs.proofs import PROOFS, ProofFolder
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, RunFolder, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def run() -> RunFolder:
    run = made_run(Path("runs"), "a-run")
    run.own_folder("proofs")
    for number in (1, 2):
        ProofFolder(run.path / "proofs" / str(number)).path.mkdir(parents=True)
    return run


@pytest.fixture
def holder(run: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that inherited the lock of the proofs, as `prove` does."""
    with PROOFS.lock(run) as lock:
        words = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]
        process = subprocess.Popen(words, pass_fds=[lock.fileno()])
    yield process
    process.kill()
    process.wait()


def test_the_newest_proof_runs_until_its_process_ends(run: RunFolder, holder: subprocess.Popen[bytes]) -> None:
    assert PROOFS.running(run) == ProofFolder(run.path / "proofs" / "2")
    with pytest.raises(ConfigError, match="a proof of run a-run is running"), PROOFS.lock(run):
        pass
    holder.kill()
    holder.wait()
    assert PROOFS.running(run) is None
    with PROOFS.lock(run):
        assert PROOFS.running(run) is not None


def test_a_note_with_a_living_process_is_no_running_proof(run: RunFolder) -> None:
    """After a reboot, its pid may be another's."""
    proof = PROOFS.of(run)[0]
    proof.write_note({"host": os.uname().nodename, "processes": [Process.of("prove").as_json()]})
    assert proof.process() is not None
    assert PROOFS.running(run) is None


def test_readers_do_not_keep_a_proof_from_starting(run: RunFolder) -> None:
    """A reader takes the lock for a moment."""
    with PROOFS.lock(run):
        pass
    reader = threading.Thread(target=lambda: [PROOFS.running(run) for _ in range(3000)])
    reader.start()
    while reader.is_alive():
        with PROOFS.lock(run):
            pass


@pytest.mark.usefixtures("elsewhere", "holder")
def test_a_run_that_is_being_proved_is_neither_renamed_nor_deleted(run: RunFolder) -> None:
    run.hold().close()
    before = sorted(run.path.rglob("*"))
    for action in (lambda: actions.rename(run, "other"), lambda: actions.delete(run)):
        with pytest.raises(ConfigError, match="a proof of run a-run is running; wait for its end, or stop it"):
            action()
    assert sorted(run.path.rglob("*")) == before


def test_proofs_are_renamed_and_deleted_with_their_run(run: RunFolder) -> None:
    with PROOFS.lock(run):
        pass
    (PROOFS.of(run)[0].path / "output.txt").write_text("x")
    renamed = actions.rename(run, "other")
    assert [proof.number for proof in PROOFS.of(renamed)] == [2, 1]
    actions.delete(renamed)
    assert not renamed.path.exists()


def test_numbers_count_on_and_other_names_are_none(run: RunFolder) -> None:
    for name in ("10", "x", "-1", "1.5", "²", "9" * 10):
        (run.path / "proofs" / name).mkdir()
    assert [proof.number for proof in PROOFS.of(run)] == [10, 2, 1]
    assert PROOFS.following(run).path == run.path / "proofs" / "11"
    other = made_run(Path("runs"), "other")
    assert (PROOFS.of(other), PROOFS.following(other).number, PROOFS.running(other)) == ([], 1, None)


@pytest.mark.parametrize("content", ["", "[]", "7", "{", "[" * 99_999, '{"x": 1}' + " " * (1 << 18), b"\xff"])
def test_what_is_no_note_is_none(run: RunFolder, content: Any) -> None:
    proof = PROOFS.of(run)[0]
    for name in ("proof.json", "report/report.json"):
        (proof.path / name).parent.mkdir(exist_ok=True)
        (proof.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert (proof.note(), proof.document(), proof.process()) == ({}, {}, None)
    write_json(proof.path / "proof.json", {"x": 1})
    assert proof.note() == {"x": 1}, "what is cached is the file as it was"


def test_links_and_pipes_are_not_opened(run: RunFolder, tmp_path: Path) -> None:
    proof = PROOFS.of(run)[0]
    write_json(tmp_path / "secret.json", {"secret": 1})
    (proof.path / "proof.json").symlink_to(tmp_path / "secret.json")
    proof.report.mkdir()
    os.mkfifo(proof.report / "report.json")
    os.mkfifo(run.path / "proofs" / ".lock")
    assert (proof.note(), proof.document(), PROOFS.running(run)) == ({}, {}, None)
