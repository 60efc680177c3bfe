"""Faults as they happen to users, by name in PROVOKE: put on PYTHONPATH, read by every rank before its first line.

Each fault is the real one (an allocation that fails, a port that is taken, a signal), and most are over once the option
that is at fault has changed. AT_STEP (default 3) says when, ON_RANK (default 0) where.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import mmap
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP = int(os.environ.get("AT_STEP", "3"))


def rows(context: Any) -> int:
    """Rows of a micro-batch beyond one: what is at fault is over with one."""
    return context.config.per_device_train_batch_size - 1


# -- memory ------------------------------------------------------------------------------------------------------------


def allocate(context: Any) -> None:
    import torch

    torch.empty(rows(context) << 50)


def allocate_unless_recomputed(context: Any) -> None:
    import torch

    torch.empty(0 if context.config.gradient_checkpointing else 1 << 50)


def allocate_unless_sharded(context: Any) -> None:
    import torch

    torch.empty(0 if "FSDP" in type(context.backend.model).__name__ else 1 << 50)


def allocate_in_evaluation(context: Any) -> None:
    import torch

    torch.empty(0 if context.config.per_device_eval_batch_size <= 4 else 1 << 50)


def little_memory(context: Any) -> None:
    """Address space for one row of 512 MiB and not for two."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (768 << 20),) * 2)
    torch.zeros((rows(context) + 1) << 27)


def python_memory(context: Any) -> None:
    bytearray(rows(context) << 62)


def map_memory(context: Any) -> None:
    if rows(context):
        mmap.mmap(-1, 1 << 62)


def kill(context: Any) -> None:
    if rows(context):
        os.kill(os.getpid(), signal.SIGKILL)


# -- crashes -----------------------------------------------------------------------------------------------------------


def read_nothing(context: Any) -> None:
    if context.config.attn_implementation != "eager":
        ctypes.string_at(0)


def abort(context: Any) -> None:
    if context.config.attn_implementation != "eager":
        os.abort()


def truncated_map(context: Any) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        mapped[1 << 19]


def send(number: signal.Signals) -> Callable[[Any], None]:
    def sent(context: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # a shell that starts the tests in the background has SIGQUIT ignored
        os.kill(os.getpid(), number)

    return sent


def end_launcher(context: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def end_at_once(context: Any) -> None:
    os._exit(3)


def missing_package(context: Any) -> None:
    __import__("flash_attention_of_tomorrow")


def index_out_of_range(context: Any) -> None:
    import torch

    torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(4, 2))


def own_mistake(context: Any) -> None:
    raise ValueError("CUDA out of memory is what this row talks about")


# -- numbers -----------------------------------------------------------------------------------------------------------


def spoil(spoilt: Callable[[Any], Any], while_: Callable[[Any], bool] = lambda context: True) -> Callable[[Any], None]:
    def fault(context: Any) -> None:
        model = context.backend.model
        if not while_(context) or hasattr(model, "spoilt"):
            return
        forward, model.spoilt = model.forward, True

        def wrong(*args: Any, **kwargs: Any) -> Any:
            loss, correct = forward(*args, **kwargs)
            model.forward = forward
            del model.spoilt
            return spoilt(loss), correct

        model.forward = wrong

    return fault


def infinite_gradient(loss: Any) -> Any:
    spoilt = loss * 1
    spoilt.register_hook(lambda gradient: gradient * float("inf"))
    return spoilt


# -- waiting -----------------------------------------------------------------------------------------------------------


def pause(context: Any) -> None:
    time.sleep(6)


def stop(context: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_rank(context: Any) -> None:
    if not hasattr(context.backend, "slowed"):
        forward, context.backend.slowed = context.backend.model.forward, True

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.5)
            return forward(*args, **kwargs)

        context.backend.model.forward = slowly


def groups(seconds: float) -> list[Any]:
    """Two members of a gloo group, of which the second never comes to a collective."""
    from torch import distributed

    store, members = distributed.HashStore(), [None, None]

    def join(rank: int) -> None:
        members[rank] = distributed.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=seconds))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members


def lonely_collective(context: Any) -> None:
    import torch

    members = groups(1)
    members[0].allreduce(torch.ones(1)).wait()


def lonely_barrier(context: Any) -> None:
    members = groups(1)
    members[0].monitored_barrier(datetime.timedelta(seconds=1))


# -- network -----------------------------------------------------------------------------------------------------------


def store(host: str, port: int, is_server: bool) -> None:
    from torch.distributed import TCPStore

    TCPStore(host, port, 2, is_server, datetime.timedelta(seconds=1), wait_for_workers=False)


def taken_port(context: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        store("127.0.0.1", holder.getsockname()[1], True)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def bind_twice(context: Any) -> None:
    with socket.socket() as holder, socket.socket() as second:
        holder.bind(("127.0.0.1", 0))
        second.bind(holder.getsockname())


# -- disk --------------------------------------------------------------------------------------------------------------


def full_disk(context: Any) -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def no_growth(context: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


def forbidden(context: Any) -> None:
    Path("/proc/sys/kernel/ostype").write_text("other")


def bad_disk(context: Any) -> None:
    with open("/proc/self/mem", "rb") as file:
        file.read(1)


def no_descriptors(context: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.ExitStack() as files:
        for _ in range(100):
            files.enter_context(open("/dev/null"))


def no_threads(context: Any) -> None:
    threading.stack_size(1 << 40)
    threading.Thread(target=print).start()


def in_the_way(context: Any) -> None:
    """A file where the run's checkpoints go: as read-only folders are, for a superuser too."""
    folder = Path(context.config.output_dir) / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")


def remove_base(context: Any) -> None:
    shutil.rmtree(os.environ["BASE"])


def other_version(context: Any) -> None:
    """A package of another version has no such name."""
    from peft import LoraConfigOfTomorrow  # noqa: F401


def no_library(context: Any) -> None:
    ctypes.CDLL("libcudart.so.99")


def clock_set_back(context: Any) -> None:
    """The machine's clock goes back by an hour."""
    now = time.time
    time.time = lambda: now() - 3600


# -- no faults ---------------------------------------------------------------------------------------------------------


def print_rows(context: Any) -> None:
    from tests.faults.healthy import TALK

    print("\n".join(TALK), flush=True)


def ask_to_stop(context: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# -- where they happen -------------------------------------------------------------------------------------------------

AT_STEP: dict[str, Callable[[Any], None]] = {
    "allocate": allocate, "allocate_unless_recomputed": allocate_unless_recomputed, "little_memory": little_memory,
    "allocate_unless_sharded": allocate_unless_sharded, "python_memory": python_memory, "map_memory": map_memory,
    "kill": kill, "read_nothing": read_nothing, "abort": abort, "truncated_map": truncated_map,
    "sigill": send(signal.SIGILL), "sigfpe": send(signal.SIGFPE), "sigquit": send(signal.SIGQUIT),
    "end_launcher": end_launcher, "end_at_once": end_at_once, "missing_package": missing_package,
    "index_out_of_range": index_out_of_range, "own_mistake": own_mistake,
    "nan": spoil(lambda loss: loss * float("nan")),
    "nan_at_a_high_rate": spoil(lambda loss: loss * float("nan"), lambda context: context.config.learning_rate > 1e-3),
    "infinite_gradient": spoil(infinite_gradient), "spike": spoil(lambda loss: loss * 1000.0),
    "pause": pause, "stop": stop, "slow_rank": slow_rank, "lonely_collective": lonely_collective,
    "lonely_barrier": lonely_barrier, "taken_port": taken_port,
    "refused": lambda context: store("127.0.0.1", closed_port(), False),
    "unknown_host": lambda context: store("no-such-machine.invalid", 29500, False),
    "refused_by_python": lambda context: socket.create_connection(("127.0.0.1", closed_port())).close(),
    "unknown_to_python": lambda context: socket.create_connection(("no-such-machine.invalid", 80)).close(),
    "bind_twice": bind_twice, "full_disk": full_disk, "no_growth": no_growth, "forbidden": forbidden,
    "print_rows": print_rows, "ask_to_stop": ask_to_stop,
    "in_the_way": in_the_way, "remove_base": remove_base,
    "other_version": other_version, "no_library": no_library, "clock_set_back": clock_set_back,
    "bad_disk": bad_disk, "no_descriptors": no_descriptors, "no_threads": no_threads,
}  # fmt: skip


def provoke(name: str) -> None:
    from trainers import loop
    from trainers.checkpoint.checkpoint import Checkpoints

    if name == "allocate_in_evaluation":
        score = loop.TrainLoop._score

        def in_evaluation(self: Any) -> Any:
            self.context.heartbeat.at("evaluation", self.progress.step)
            allocate_in_evaluation(self.context)
            return score(self)

        loop.TrainLoop._score = in_evaluation  # type: ignore[method-assign]
    elif name == "full_disk":
        write = Checkpoints._write_share

        def write_share(self: Any, temporary: Path, tensors: Any) -> Any:
            full_disk(self)
            return write(self, temporary, tensors)

        Checkpoints._write_share = write_share
    elif name == "slow_data":
        from trainers.data.batches import TrainPlan

        batches = TrainPlan.batches

        def slowly(self: Any, *args: Any) -> Any:
            for batch in batches(self, *args):
                time.sleep(0.15)
                yield batch

        TrainPlan.batches = slowly
    elif name == "remove_data":
        Path(os.environ["DATA"]).unlink(missing_ok=True)
    elif name == "block_tracker":
        from trainers import build

        module = build.module

        def and_block(*args: Any, **kwargs: Any) -> Any:
            Path(os.environ["BLOCKED"]).write_text("in the way")
            return module(*args, **kwargs)

        build.module = and_block
    elif name == "other_export":
        from trainers.checkpoint import export

        load_back = export.load_back

        def differs(folder: Path, config: Any, *args: Any) -> Any:
            checked = load_back(folder, config, *args)
            return checked if config.export_dtype == "float32" else dataclasses.replace(checked, limit=-1.0)

        export.load_back = differs
    elif name == "full_disk_in_export":
        from trainers.checkpoint import export

        def full(*args: Any, **kwargs: Any) -> Any:
            full_disk(None)

        export.load_back = full  # what it writes is read back next
    elif name == "hub":
        from huggingface_hub import constants, hf_api

        url = os.environ["HUB"]
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = url, False, os.environ["HUB_CACHE"]
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
        hf_api.api.endpoint = url
    else:
        step_of_it, fault, always = loop.train_step, AT_STEP[name], name in ("slow_rank", "nan_at_a_high_rate")

        def train_step(context: Any, batch: Any, number: int, requests: Any) -> Any:
            if number + 1 == STEP or (always and number + 1 > STEP):
                context.heartbeat.at("forward", number)
                fault(context)
            return step_of_it(context, batch, number, requests)

        loop.train_step = train_step


IS_RANK = "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
if os.environ.get("PROVOKE") and IS_RANK and os.environ.get("RANK", "0") in os.environ.get("ON_RANK", "0").split(","):
    sys.stderr.flush()
    provoke(os.environ["PROVOKE"])
