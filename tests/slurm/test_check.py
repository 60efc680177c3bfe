"""What `make check` says where there can be no cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import ROOT
from tests.slurm import check, cluster


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("net_admin", "no network namespaces: RTNETLINK answers: Operation not permitted"),
        ("sys_admin", "no network namespaces: mount --make-shared /run/netns failed: Operation not permitted"),
    ],
)
def test_a_machine_without_namespaces_is_not_passed_over_in_silence(capability: str, reason: str) -> None:
    line = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}", sys.executable, "-m"]
    done = subprocess.run([*line, "tests.slurm.check"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"NOT TESTED here: SLURM ({reason})\n"), done.stderr


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cluster, "PROGRAMS", (*cluster.PROGRAMS, "no-such-program"))
    monkeypatch.setattr(check, "_INSTALL", 0.001)
    assert check.main([]) == 0
    assert capsys.readouterr().out.startswith("NOT TESTED here: SLURM (slurm-wlm and munge cannot be installed: ")


@pytest.mark.parametrize("status", [0, 1, 5])
def test_the_check_ends_as_its_tests_do(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(check, "unable", lambda: "")
    monkeypatch.setattr(check.subprocess, "run", lambda argv: subprocess.CompletedProcess(argv, status))
    assert check.main([]) == status
