"""The port that launchers take by default is taken, and two runs start at once: both train as if alone."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detached import TUNESMITH, ended, inside, train_words
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import OPTIONS, exact
from tests.forked import Popen
from tests.launching import ROOT, SCRIPT, flags
from trainers.run.folder import RunFolder

TOGETHER = {**OPTIONS, "share_gpus": True}  # the machine has slots for one of them


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """29500, which torch and accelerate take unless told otherwise."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 29500))
        held.listen()
        yield held


def by_hand(run: RunFolder, strategy: str) -> list[str]:
    """As the README has it, which names no port."""
    words = ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), str(SCRIPT)]
    options = {"preset": "tiny-lora", **TOGETHER, "output_dir": run.path}
    return [TUNESMITH[0], "-m", "accelerate.commands.launch", *words, *flags(options)]


def by_tunesmith(run: RunFolder, strategy: str) -> list[str]:
    return [*TUNESMITH, *train_words(run, 2, strategy=strategy, **TOGETHER)]


WAYS = [(way, strategy) for way in (by_hand, by_tunesmith) for strategy in ("ddp", "fsdp2", "zero3")]


@pytest.mark.long
@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(("way", "strategy"), WAYS)
def test_two_runs_at_once_while_the_port_is_taken(
    way, strategy: str, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed(strategy), noted(f"port taken, two runs at once, {way.__name__}", strategy)
    runs = [RunFolder(home / "runs" / name) for name in ("first", "second")]
    fault.at()
    starts = [
        Popen(way(run, strategy), cwd=home, env=inside(home), stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for run in runs
    ]  # fmt: skip
    for start in starts:
        said = start.communicate(timeout=200)[0]
        assert start.returncode == 0, said
    for run in runs:
        ended(run)
        exact(run, whole, replays=0)
    fault.harmless()
