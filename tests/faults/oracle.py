"""What "nothing lost" means for a run that met a fault, against one that never did.

N1 a published step is never lost. N2 every step's numbers are the same to the last bit, and so are the weights.
N3 at most one save interval is computed again. N4 every step is in the metrics, each repetition with its attempt.
N5 nothing of the run lives or holds anything, no half-written folder is left. N6 it is said why and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.runs.detail import run_view
from app.runs.metrics import Curves
from tests.detached import SMALL, ended, gone
from tests.launching import Finished
from tests.parity.checks import weights
from trainers.run.device_locks import holders
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify

STEPS, INTERVAL = 24, 5
OPTIONS: dict[str, Any] = {**SMALL, "max_steps": STEPS, "save_steps": INTERVAL, "logging_steps": 1}
_EXACT = ("loss", "grad_norm", "learning_rate", "tokens")


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """The metrics of each step, the newest attempt's where it was computed twice; N4."""
    found = Finished(run, 0, "").rows()
    assert len({(row["step"], row["attempt"]) for row in found}) == len(found), "a repetition has its own attempt"
    newest = {row["step"]: row for row in sorted(found, key=lambda row: row["attempt"])}
    assert sorted(newest) == list(range(1, len(newest) + 1))
    return [newest[step] for step in sorted(newest)]


def numbers(run: RunFolder) -> list[list[str]]:
    """What must be the same to the last bit."""
    return [[float(row[name]).hex() for name in _EXACT] for row in rows(run)]


def replayed(run: RunFolder) -> int:
    """Steps that were computed more than once."""
    found = Finished(run, 0, "").rows()
    return len(found) - len({row["step"] for row in found})


def clean(run: RunFolder) -> None:
    """N5."""
    gone(run)
    assert str(run.path) not in {held["run_dir"] for held in holders().values()}
    assert [path.name for path in run.checkpoints.iterdir() if not path.name.startswith(("step-", "bad-"))] == []
    assert list(run.checkpoints.glob("*.tmp-*")) == []


def told(run: RunFolder) -> str:
    """N6: the cause; the next thing to do is there as well."""
    seen = run_view(run, Curves())
    assert seen["cause"]
    assert seen["next"]
    return str(seen["cause"])


def exact(
    run: RunFolder, undisturbed: RunFolder, replays: int, steps: int = STEPS, interval: int = INTERVAL, limit: int = 100
) -> None:
    """It is done, and N1 to N5 hold.

    Args:
        run: the one that met faults.
        undisturbed: the same one without.
        replays: how many steps may have been computed again.
        steps: of the whole run; it saves every `interval` and keeps `limit` checkpoints.
    """
    state = ended(run)
    assert (state["state"], state["step"]) == ("done", steps), state
    assert numbers(run) == numbers(undisturbed)
    mine, theirs = (weights(Finished(one, 0, "")) for one in (run, undisturbed))
    assert set(mine) == set(theirs)
    assert all(mine[name].equal(theirs[name]) for name in mine)
    assert replayed(run) <= replays
    saved = sorted(run.checkpoints.glob("step-" + "[0-9]" * 8))
    due = {*range(interval, steps, interval), steps}
    assert {f"step-{step:08d}" for step in sorted(due)[-limit:]} <= {path.name for path in saved}
    for path in saved:
        verify(path)
    clean(run)


def note(home: Path) -> Path:
    """Where an injected fault tells what it saw."""
    return home / "fault.txt"
