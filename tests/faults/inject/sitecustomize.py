"""Faults that no signal from outside can place: put on PYTHONPATH, read by every rank before its first line.

FAULT is `save:PHASE:RANK:STEP` (the rank kills itself there, in its first attempt), `nan:RANK:STEP`,
`spike:RANK:STEP` (its loss is a thousand times as large), `hang:RANK:STEP`, `slow:RANK:MILLISECONDS` (each forward pass
takes that much longer) or `slow_disk:RANK:SECONDS` (each write of a checkpoint does).
FAULT_NOTE names a file that tells what stood in `checkpoints/` at that moment.
"""

import os
import signal
import time
from pathlib import Path


def die(checkpoints: Path) -> None:
    Path(os.environ["FAULT_NOTE"]).write_text("\n".join(sorted(path.name for path in checkpoints.iterdir())))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(phase: str, step: int) -> None:
    from trainers.checkpoint import Checkpoints

    write, publish, prune = Checkpoints._write_share, Checkpoints._publish, Checkpoints._prune

    def due(kept: Checkpoints, at: int) -> bool:
        return kept.attempt == 0 and at == step

    def write_share(self, temporary, tensors):
        if phase == "writing" and due(self, int(temporary.name[5:13])):
            (temporary / "rank-00009.safetensors").write_bytes(b"half a file")
            die(self.folder)
        entry = write(self, temporary, tensors)
        if phase == "written" and due(self, int(temporary.name[5:13])):
            die(self.folder)
        return entry

    def publish_it(self, temporary, final, progress, entries):
        if phase == "publishing" and due(self, progress.step):
            (temporary / "manifest.json").write_text('{"format":')
            die(self.folder)
        publish(self, temporary, final, progress, entries)

    def prune_old(self, progress):
        if phase == "pruning" and due(self, progress.step):
            die(self.folder)
        prune(self, progress)

    Checkpoints._write_share, Checkpoints._publish, Checkpoints._prune = write_share, publish_it, prune_old


def slow_disk(seconds: int) -> None:
    from trainers.checkpoint import Checkpoints

    write = Checkpoints._write_share

    def write_slowly(self, temporary, tensors):
        time.sleep(seconds)
        return write(self, temporary, tensors)

    Checkpoints._write_share = write_slowly


def poison(step: int, factor: float = float("nan")) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def train_step(job, batch, number, requests):
        if number + 1 != step:
            return step_of_it(job, batch, number, requests)
        model = job.backend.model
        forward = model.forward

        def poisoned(*args, **kwargs):
            loss, correct = forward(*args, **kwargs)
            return loss * factor, correct

        model.forward = poisoned
        try:
            return step_of_it(job, batch, number, requests)
        finally:
            model.forward = forward

    loop.train_step = train_step


def spike(step: int) -> None:
    poison(step, 1000.0)


def slow(milliseconds: int) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def train_step(job, batch, number, requests):
        if not hasattr(job.backend, "slowed"):
            forward, job.backend.slowed = job.backend.model.forward, True

            def slowly(*args, **kwargs):
                time.sleep(milliseconds / 1000)
                return forward(*args, **kwargs)

            job.backend.model.forward = slowly
        return step_of_it(job, batch, number, requests)

    loop.train_step = train_step


def hang(step: int) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def never_ends(job, batch, number, requests):
        while number + 1 == step:
            time.sleep(1)
        return step_of_it(job, batch, number, requests)

    loop.train_step = never_ends


if "FAULT" in os.environ and "RANK" in os.environ:
    kind, *rest = os.environ["FAULT"].split(":")
    *more, rank, at = rest
    if os.environ["RANK"] == rank:
        faults = {
            "save": lambda step: kill_in_save(more[0], step),
            "nan": poison,
            "spike": spike,
            "hang": hang,
            "slow": slow,
            "slow_disk": slow_disk,
        }
        faults[kind](int(at))
