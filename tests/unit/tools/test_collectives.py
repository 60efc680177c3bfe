"""A rank of `tunesmith doctor` says that it was terminated, even while it is in a collective."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.detached import until
from tests.launching import ROOT

WAITS_IN_A_LIBRARY = """
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from trainers.tools.collective_trials import Report
from trainers.tools.collectives import report_termination
report = Report(Path(sys.argv[1]))
report_termination(report)
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
report.step("waiting")
store.wait(["never"], timedelta(seconds=100))
"""


def test_a_rank_inside_a_library_reports_that_it_was_terminated(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with subprocess.Popen([sys.executable, "-c", WAITS_IN_A_LIBRARY, str(path)], cwd=ROOT) as rank:
        try:
            until(lambda: path.exists() and "waiting" in path.read_text(), 60)
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(20) == 128 + signal.SIGTERM
        finally:
            rank.kill()
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["step", "terminated"]
