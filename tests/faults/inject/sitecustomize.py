"""Faults that no signal from outside can place: put on PYTHONPATH, read by every rank before its first line.

FAULT is one of
- `save:PHASE:RANK:STEP`: the rank kills itself there, in its first attempt; `term:…`: it sends SIGTERM to the launcher
- `nan:RANK:STEP`, `spike:RANK:STEP` (a thousand times the loss), `inf:RANK:STEP` (a gradient of a finite loss)
- `hang:RANK:STEP`, `flood:RANK:STEP` (of the log)
- `memory:RANK:ROWS` (it runs out with more rows than that in a micro-batch of training)
- `slow:RANK:MILLISECONDS` (each forward pass takes that much longer), `slow_disk:RANK:SECONDS` (each write of a share)
FAULT_NOTE names a file that tells what stood in `checkpoints/` at that moment.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def note(checkpoints: Path) -> None:
    Path(os.environ["FAULT_NOTE"]).write_text("\n".join(sorted(path.name for path in checkpoints.iterdir())))


def die(checkpoints: Path) -> None:
    note(checkpoints)
    os.kill(os.getpid(), signal.SIGKILL)


def end_launcher(checkpoints: Path) -> None:
    note(checkpoints)
    os.kill(os.getppid(), signal.SIGTERM)


def act_in_save(act: Callable[[Path], None], phase: str, step: int) -> None:
    from trainers.checkpoint.checkpoint import Checkpoints

    write, publish, prune = Checkpoints._write_share, Checkpoints._publish, Checkpoints._prune

    def due(kept: Checkpoints, at: int) -> bool:
        return kept.attempt == 0 and at == step

    def write_share(self, temporary, tensors):
        if phase == "writing" and due(self, int(temporary.name[5:13])):
            if act is die:
                (temporary / "rank-00009.safetensors").write_bytes(b"half a file")
            act(self.folder)
        entry = write(self, temporary, tensors)
        if phase == "written" and due(self, int(temporary.name[5:13])):
            act(self.folder)
        return entry

    def publish_it(self, temporary, final, progress, entries):
        if phase == "publishing" and due(self, progress.step):
            if act is die:
                (temporary / "manifest.json").write_text('{"format":')
            act(self.folder)
        publish(self, temporary, final, progress, entries)

    def prune_old(self, progress):
        if phase == "pruning" and due(self, progress.step):
            act(self.folder)
        prune(self, progress)

    Checkpoints._write_share, Checkpoints._publish, Checkpoints._prune = write_share, publish_it, prune_old


def slow_disk(seconds: int) -> None:
    from trainers.checkpoint.checkpoint import Checkpoints

    write = Checkpoints._write_share

    def write_slowly(self, temporary, tensors):
        time.sleep(seconds)
        return write(self, temporary, tensors)

    Checkpoints._write_share = write_slowly


def poison(step: int, spoil: Callable[[Any], Any]) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def train_step(context, batch, number, requests):
        if number + 1 != step:
            return step_of_it(context, batch, number, requests)
        model = context.backend.model
        forward = model.forward

        def poisoned(*args, **kwargs):
            loss, correct = forward(*args, **kwargs)
            return spoil(loss), correct

        model.forward = poisoned
        try:
            return step_of_it(context, batch, number, requests)
        finally:
            model.forward = forward

    loop.train_step = train_step


def slow(milliseconds: int) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def train_step(context, batch, number, requests):
        if not hasattr(context.backend, "slowed"):
            forward, context.backend.slowed = context.backend.model.forward, True

            def slowly(*args, **kwargs):
                time.sleep(milliseconds / 1000)
                return forward(*args, **kwargs)

            context.backend.model.forward = slowly
        return step_of_it(context, batch, number, requests)

    loop.train_step = train_step


def to_infinite_gradient(loss: Any) -> Any:
    spoiled = loss * 1  # a tensor of its own, whose gradient alone goes wrong
    spoiled.register_hook(lambda gradient: gradient * float("inf"))
    return spoiled


def memory(rows: int) -> None:
    import torch

    from trainers.objectives.loss_module import LossModule

    forward = LossModule.forward

    def in_little_memory(self, input_ids, *args, **kwargs):
        if torch.is_grad_enabled() and len(input_ids) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        return forward(self, input_ids, *args, **kwargs)

    LossModule.forward = in_little_memory


def hang(step: int) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def never_ends(context, batch, number, requests):
        while number + 1 == step:
            time.sleep(1)
        return step_of_it(context, batch, number, requests)

    loop.train_step = never_ends


def flood(step: int) -> None:
    from trainers import loop

    step_of_it = loop.train_step

    def train_step(context, batch, number, requests):
        if number + 1 == step:
            sys.stdout.flush()
            with open(1, "wb", closefd=False) as out:
                out.write(b"the flood begins\n" + b"\x1b[31mred\x1b[0m \x1b[2K\x1b[1;1H\n" * 1000)
                out.write(b"".join(b"\r%d%%" % percent for percent in range(101)) + b"\n")
                out.write(b"x" * 2**20 + b"\n" + bytes(range(256)) * 100 + b"\n")
                out.write(b"".join(b"flood line %d\n" % line for line in range(100_000)) + b"the flood ends\n")
        return step_of_it(context, batch, number, requests)

    loop.train_step = train_step


if os.environ.get("FAULT") and "RANK" in os.environ:
    kind, *rest = os.environ["FAULT"].split(":")
    *more, rank, at = rest
    if os.environ["RANK"] == rank:
        faults: dict[str, Callable[[int], None]] = {
            "save": lambda step: act_in_save(die, more[0], step),
            "term": lambda step: act_in_save(end_launcher, more[0], step),
            "nan": lambda step: poison(step, lambda loss: loss * float("nan")),
            "spike": lambda step: poison(step, lambda loss: loss * 1000.0),
            "inf": lambda step: poison(step, to_infinite_gradient),
            "memory": memory,
            "hang": hang,
            "flood": flood,
            "slow": slow,
            "slow_disk": slow_disk,
        }
        faults[kind](int(at))
