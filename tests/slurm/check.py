"""What `make check` does about SLURM: its tests where this machine can have a cluster, else a last line that says why.

`python -m tests.slurm.check [words for pytest]`
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import Cluster, missing

_INSTALL = 900.0
"""Seconds for `make slurm`, which fetches the packages."""


def unable() -> str:
    """Why this machine cannot have a cluster, in one line; empty if it can, as a cluster of one node has just shown."""
    if absent := missing():
        if "root" in absent:
            return "not root, which network namespaces need"
        if problem := _install():
            return problem
    home = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        return _trial(Cluster(home / "cluster", nodes=1))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _install() -> str:
    """Installs the packages; returns why that failed."""
    try:
        done = subprocess.run(["make", "slurm"], capture_output=True, text=True, errors="replace", timeout=_INSTALL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"slurm-wlm and munge cannot be installed: {error}"
    absent = missing()
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("E:", "W:"))]
    return f"slurm-wlm and munge cannot be installed: {lines[-1] if lines else ', '.join(absent)}" if absent else ""


def _trial(cluster: Cluster) -> str:
    """Starts a cluster and ends it; returns why that failed."""
    steps: dict[str, Callable[[], object]] = {
        "network namespaces": cluster.make_network,
        "host name and hosts file of a node's own": lambda: cluster.run("true"),
    }
    try:
        for name, step in steps.items():
            try:
                step()
            except (OSError, subprocess.SubprocessError) as error:
                printed = getattr(error, "stderr", None) or b""
                text = printed if isinstance(printed, str) else printed.decode(errors="replace")
                return f"no {name}: {(text.strip().splitlines() or [str(error)])[-1]}"
    finally:
        cluster.remove_network()
    try:
        with cluster:
            return ""
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)  # with the ends of the daemons' logs
        return f"a cluster of one node does not start: {str(error).splitlines()[0]}"


def main(words: list[str]) -> int:
    """Entry point."""
    if reason := unable():
        print(f"NOT TESTED here: SLURM ({reason})", flush=True)
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", "tests/slurm", "-n", "2", *words]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
