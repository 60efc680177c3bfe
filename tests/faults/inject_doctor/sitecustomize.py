"""Faults for `tunesmith doctor`: put on PYTHONPATH, read by every process before its first line.

DOCTOR_FAULT is `KIND:RANK:FUNCTION` of torch.distributed, with KIND one of `wrong` (one element of what it receives
there, or sends to another), `skipped` (it does nothing), `stop` and `kill` (the rank does so to itself there); or
`nice:RANK:` (all ranks share a core, and that one has the lowest priority), or `clock:SECONDS:` (of every process; the
clock is so far ahead).
"""

import contextlib
import os
import signal
import time

KIND, WHICH, FUNCTION = [*os.environ.get("DOCTOR_FAULT", "").split(":"), "", ""][:3]


def spoil() -> None:
    import torch
    import torch.distributed as dist

    call = getattr(dist, FUNCTION)

    def spoiled(*values, **more):
        if KIND == "skipped":
            return None
        if KIND in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if KIND == "stop" else signal.SIGKILL)
        if FUNCTION == "batch_isend_irecv":
            values[0][0].tensor[-1] += 1  # of what it sends
        done = call(*values, **more)
        written = values[1][-1] if FUNCTION == "gather" else values[0]
        if isinstance(written, torch.Tensor):
            written.view(-1)[-1] += 1
        return done

    setattr(dist, FUNCTION, spoiled)


if KIND == "clock":
    true_time = time.time
    time.time = lambda: true_time() + float(WHICH)
if "RANK" in os.environ and KIND == "nice":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.environ.get("RANK") == WHICH and KIND == "nice":
    os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write("19")  # the launcher makes a session of each rank, and Linux gives sessions equal shares
elif os.environ.get("RANK") == WHICH:
    spoil()
