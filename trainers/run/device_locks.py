"""GPU allocation without a daemon: one lock file per GPU, and a queue of tickets. Imports no torch.

A lock is a `flock` on a file in the user's state folder, which the kernel releases when its holder ends. Without GPUs,
the locks stand for CPU slots, one per core. Code that reads several locks or tickets holds a single mutex, for
milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, read_json, state_folder, write_json

CPU = "cpu-"


@dataclass(frozen=True)
class Need:
    """The slots that a run needs, which are taken all at once.

    Args:
        gpus: UUIDs of specific GPUs.
        cpu_slots: Number of CPU slots; any will do. Capped at the number of slots that exist.
    """

    gpus: tuple[str, ...] = ()
    cpu_slots: int = 0


@dataclass(frozen=True)
class Holder:
    """The holder of a slot, as shown to others.

    Args:
        name: Run id, or another name if it is not a run.
        run_dir: The run folder; empty if it is not a run.
        pid: Process that took the slot.
    """

    name: str
    run_dir: str = ""
    pid: int = field(default_factory=os.getpid)


class HeldSlots:
    """Slots that are held until `close`, or until every process with the file descriptors has ended."""

    def __init__(self, files: dict[str, TextIO]):
        self.files = files

    @property
    def slots(self) -> list[str]:
        return sorted(self.files)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors for `pass_fds` of a child that must keep the slots if this process is killed."""
        return [file.fileno() for file in self.files.values()]

    def share(self) -> HeldSlots:
        """The same slots once more; they are held until both are closed."""
        copies = {slot: os.dup(file.fileno()) for slot, file in self.files.items()}
        return HeldSlots({slot: open(copy, "r+", encoding="utf-8") for slot, copy in copies.items()})

    def close(self) -> None:
        """Releases the slots; idempotent."""
        for file in self.files.values():
            file.close()
        self.files = {}

    def __enter__(self) -> HeldSlots:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def cpu_slots() -> list[str]:
    """Returns the names of the CPU slots, one for each core that this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [f"{CPU}{number}" for number in range(cores)]


def _locks() -> Path:
    return state_folder() / "hosts" / socket.gethostname() / "locks"  # machines may share a home folder


def _queue() -> Path:
    return _locks().with_name("queue")


@contextlib.contextmanager
def _mutex() -> Iterator[None]:
    try:
        _locks().mkdir(parents=True, exist_ok=True)
        _queue().mkdir(parents=True, exist_ok=True)
        file = open(_locks() / ".mutex", "w", encoding="utf-8")  # noqa: SIM115 - entered below
    except OSError as error:
        remedy = "make it writable, or set XDG_STATE_HOME to a folder that is"
        raise ConfigError(f"{state_folder()} cannot be written: {error.strerror}; {remedy}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- locks: functions with an underscore must be called under the mutex ------------------------------------------------


def _open(slot: str) -> TextIO:
    descriptor = os.open(_locks() / f"{slot}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    return open(descriptor, "r+", encoding="utf-8")


def _try_lock(slot: str, holder: Holder) -> TextIO | None:
    file = _open(slot)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.truncate()
    file.write(json.dumps({"run": holder.name, "run_dir": holder.run_dir, "pid": holder.pid}))
    file.flush()
    return file


def _is_held(slot: str) -> bool:
    with _open(slot) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _lock_all(need: Need, holder: Holder) -> HeldSlots | None:
    """Locks all slots that are needed, or none."""
    devices = list(need.gpus)
    if need.cpu_slots:
        every = cpu_slots()
        free = [slot for slot in every if not _is_held(slot)]
        count = min(need.cpu_slots, len(every))
        if len(free) < count:
            return None
        devices += free[:count]
    held = HeldSlots({})
    for slot in devices:
        file = _try_lock(slot, holder)
        if file is None:
            held.close()
            return None
        held.files[slot] = file
    return held


def holders() -> dict[str, dict[str, Any]]:
    """Returns the holder of each slot that is held: slot (GPU UUID, `cpu-0`, …) -> `{"run", "run_dir", "pid"}`."""
    with _mutex():
        names = [path.name.removesuffix(".lock") for path in sorted(_locks().glob("*.lock"))]
        return {slot: read_json(_locks() / f"{slot}.lock") or {"run": "?"} for slot in names if _is_held(slot)}


def take_now(need: Need, holder: Holder, timeout: float = 0.0) -> HeldSlots:
    """Takes slots without queueing, unless a ticket waits for them.

    Args:
        need: The slots.
        holder: Who takes them.
        timeout: Seconds to keep trying, as processes of a killed run may take a while to end.

    Raises:
        ConfigError: If a slot is held or waited for; names the holder.
    """
    deadline = time.monotonic() + timeout
    while True:
        with _mutex():
            waited_for = any(_clash(ticket.need, need) for ticket in live_tickets())
            held = None if waited_for else _lock_all(need, holder)
        if held is not None or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    if held is None:
        raise ConfigError(
            f"{describe_need(need)} cannot be taken: {who_has(need) or 'a queued run waits for it'}; wait for it to "
            "end, queue this one with `tunesmith train --detach`, or pass --share_gpus true"
        )
    return held


def describe_need(need: Need) -> str:
    """Formats a need as `GPU-1a2b…, GPU-3c4d…` or `2 CPU slots`."""
    if need.gpus:
        return ", ".join(gpu[:12] for gpu in need.gpus)
    return f"{need.cpu_slots} CPU slot{'s' * (need.cpu_slots > 1)}"


def who_has(need: Need) -> str:
    """Lists who holds the needed slots, as in `GPU-1a2b… held by RUN; …`; empty if nobody does."""
    wanted = set(need.gpus) | (set(cpu_slots()) if need.cpu_slots else set())
    by_name: dict[str, list[str]] = {}
    for slot, holder in holders().items():
        if slot in wanted:
            by_name.setdefault(str(holder.get("run")), []).append(slot[:12])
    return "; ".join(f"{', '.join(slots)} held by {name}" for name, slots in by_name.items())


# -- the queue ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ticket:
    """A place in the queue.

    Args:
        name: Run id.
        run_dir: The run folder.
        need: The slots that it waits for.
        position: Sort key; lower goes first.
        owner: The waiting process.
    """

    name: str
    run_dir: str
    need: Need
    position: int
    owner: Process

    @property
    def path(self) -> Path:
        return _queue() / f"{self.owner.pid}-{self.owner.started:.2f}.json"

    def write(self, position: int) -> None:
        """Writes the ticket to the queue folder with a new position; must be called under the mutex."""
        need = {"gpus": list(self.need.gpus), "cpu_slots": self.need.cpu_slots}
        entry = {"name": self.name, "run_dir": self.run_dir, "need": need, "place": position}
        write_json(self.path, {**entry, "owner": self.owner.as_json()})


def _read_ticket(path: Path) -> Ticket | None:
    entry = read_json(path)
    try:
        if entry is None:
            return None
        need = Need(tuple(map(str, entry["need"]["gpus"])), int(entry["need"]["cpu_slots"]))
        owner = Process(**entry["owner"])
        return Ticket(str(entry["name"]), str(entry["run_dir"]), need, int(entry["place"]), owner)
    except (KeyError, TypeError, ValueError):
        return None


def _tickets() -> list[Ticket]:
    """Returns all tickets in queue order, including those whose owner has died."""
    read = [ticket for path in _queue().glob("*.json") if (ticket := _read_ticket(path)) is not None]
    return sorted(read, key=lambda ticket: (ticket.position, ticket.owner.started, ticket.owner.pid))


def live_tickets() -> list[Ticket]:
    """Returns the tickets of living owners in queue order; removes the others."""
    tickets = []
    for ticket in _tickets():
        if ticket.owner.alive():
            tickets.append(ticket)
        else:
            ticket.path.unlink(missing_ok=True)
    return tickets


def _clash(first: Need, two: Need) -> bool:
    """Whether two needs overlap; needs for CPU slots always do, as the slots are interchangeable."""
    return bool(set(first.gpus) & set(two.gpus)) or (first.cpu_slots > 0 and two.cpu_slots > 0)


def enqueue(run_dir: Path, name: str, need: Need) -> Ticket:
    """Adds a ticket owned by this process to the end of the queue."""
    ticket = Ticket(name, str(run_dir), need, 0, Process.of("supervisor"))
    with _mutex():
        ticket.write(_end_of(live_tickets()))
    return ticket


def _end_of(tickets: Sequence[Ticket]) -> int:
    return max((ticket.position for ticket in tickets), default=0) + 1


def try_take(ticket: Ticket) -> HeldSlots | None:
    """Takes the slots of a ticket and removes it; None if a slot is held, or an earlier ticket waits for one."""
    with _mutex():
        held = _lock_all(ticket.need, Holder(ticket.name, ticket.run_dir))
        if held is None:
            return None  # the common case: no need to read the tickets
        tickets = _tickets()
        order = [other.path for other in tickets]
        if ticket.path not in order:
            ticket.write(_end_of(tickets))  # its file is missing: the folder was cleared
            order.append(ticket.path)
        # The slots are free, but go to earlier tickets that need any of them.
        earlier = tickets[: order.index(ticket.path)]
        if any(_clash(other.need, ticket.need) and other.owner.alive() for other in earlier):
            held.close()
            return None
        ticket.path.unlink(missing_ok=True)
        return held


def give_up(ticket: Ticket) -> None:
    """Removes a ticket from the queue."""
    with _mutex():
        ticket.path.unlink(missing_ok=True)


def move(
    run_dir: Path, places: int = 0, *, to: int | None = None, before: Path | None = None, after: Path | None = None
) -> int:
    """Moves a run's ticket in the queue.

    Args:
        run_dir: The run folder.
        places: Number of places to move back; negative moves it forward.
        to: In place of `places`: its new place, from 1.
        before: In place of `places`: the run to be right in front of. Unlike a number, it means the same after others
            have started or moved.
        after: In place of `places`: the run to be right behind.

    Returns:
        Its new place, from 1.

    Raises:
        ConfigError: If a run is not in the queue; nothing has moved then.
    """
    with _mutex():
        tickets = live_tickets()
        index = _index_in(tickets, run_dir)
        ticket = tickets.pop(index)
        there = index + places if to is None else to - 1
        if (anchor := before or after) and anchor != run_dir:
            there = _index_in(tickets, anchor) + (before is None)
        there = min(max(there, 0), len(tickets))
        tickets.insert(there, ticket)
        if there != index:
            # From the end, with numbers above all others: wherever this is killed, only the moved run's place is open.
            for position, other in reversed(list(enumerate(tickets[there:], start=_end_of(tickets)))):
                other.write(position)
        return there + 1


def _index_in(tickets: Sequence[Ticket], run_dir: Path) -> int:
    index = _place_of(run_dir, tickets)
    if index is None:
        raise ConfigError(f"run {run_dir.name} is not in the queue; it may have started: `tunesmith runs list`")
    return index


def queue() -> list[Ticket]:
    """Returns the tickets of living owners in queue order."""
    with _mutex():
        return live_tickets()


def place_of(run_dir: Path) -> int | None:
    """Returns a run's place in the queue, from 1; None if it is not in the queue."""
    with _mutex():
        index = _place_of(run_dir, live_tickets())
    return None if index is None else index + 1


def _place_of(run_dir: Path, tickets: Sequence[Ticket]) -> int | None:
    places = [index for index, ticket in enumerate(tickets) if Path(ticket.run_dir) == run_dir]
    return places[0] if places else None


def local_need(local_world: int, gpu_uuids: Sequence[str]) -> Need:
    """Returns what the ranks of this machine need: the first `local_world` visible GPUs, or a CPU slot each."""
    return Need(gpus=tuple(gpu_uuids[:local_world])) if gpu_uuids else Need(cpu_slots=local_world)
