"""Answers with the summary of each run whose path it reads; one process, as starting Python takes long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from app.runs.runs import last_checkpoint, summary
from trainers.run.folder import RunFolder

for line in sys.stdin:
    run = RunFolder(Path(line.rstrip("\n")))
    print(json.dumps({**summary(run), "last_checkpoint": last_checkpoint(run)}), flush=True)
