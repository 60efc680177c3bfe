"""The shipped strategies in order of fit for one job: what each does, whether it can run, its memory and its speed.

Which can run is known at once. Memory and speed come from the planner, which counts the model in a program of its own
and takes seconds: one count runs at a time, only the newest request waits, and results are kept by job.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.hardware import Devices, find_gpus
from app.plan.command import count
from app.plan.estimate import CLOSE, Candidate, Row, best_first, candidate, plan_row
from app.plan.hardware import Hardware
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import dump_yaml
from trainers.run import host_memory
from trainers.strategy.strategy import STRATEGIES_DIR, Strategy, load_strategy, strategy_names

_AS_FAST = 1.02
"""Strategies whose estimated times differ by less are ranked by what they send."""
_MAX_KEPT = 64
_MOST_TRIED = 16
"""Most processes that are tried to say on how many a strategy runs, where the machine has no GPUs to count."""
_ELSEWHERE = (
    "The memory of the nodes is not known on this machine. `tunesmith plan` with `--num_processes` and `--gpu_memory` "
    "says what fits there, and how fast it is."
)
_FAILURE_SECONDS = 30.0
"""Seconds for which an estimate that failed is not tried again; the cause may have been the network's."""
_NO_EFFECT = (
    "preset", "dataset_name", "eval_dataset_name", "eval_share", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_num_cycles", "lr_power", "lr_decay_ratio", "lr_decay_type", "warmup_steps", "warmup_ratio",
    "weight_decay", "run_name", "runs_dir", "output_dir", "seed", "report_to", "logging_steps", "save_steps",
    "ddp_timeout",
)  # fmt: skip
"""Options that people change often, and on which neither memory nor speed depends."""


def _shipped(name: str) -> Strategy:
    return _loaded(name, (STRATEGIES_DIR / f"{name}.yaml").stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _loaded(name: str, modified: int) -> Strategy:
    """A strategy of a file that was modified then: reading all of them takes longer than all else about the cards."""
    return load_strategy(name)


@dataclass(frozen=True)
class StrategyCard:
    """A strategy and its estimate for a job.

    Args:
        name: its name.
        title: its name in words.
        summary: what it does, in a sentence.
        reason: why it cannot run here or does not fit, or what its estimate leaves out; may be empty.
        memory: bytes on the fullest rank by use; None if not known (yet).
        fits: whether that fits; None if not known (yet).
        speed: upper bound on speed as a share of the fastest strategy that fits; None if not known (yet).
        tokens_per_second: the upper bound itself; None if not known.
    """

    name: str
    title: str
    summary: str
    reason: str = ""
    memory: dict[str, float] | None = None
    fits: bool | None = None
    speed: float | None = None
    tokens_per_second: float | None = None

    @property
    def total(self) -> float:
        """Bytes over all uses."""
        return sum((self.memory or {}).values())


@dataclass(frozen=True)
class StrategyCards:
    """All shipped strategies for a job.

    Args:
        state: `counting` until the estimate is there, then `estimated`; `unknown` where it failed.
        able: strategies that can run here, best first, each on the mesh of its file and with the form's micro-batch.
        unable: those that cannot, with the reason.
        memory: bytes of memory of each GPU, or of each process on the CPU.
        unit: what has this memory: `GPU` or `process`.
        default: name of the strategy that the job gets without a choice.
        is_local: whether the devices are this machine's; of others' the memory is 0, as it is not known.
        recommended: name of the best one that fits; empty if none does or nothing is estimated.
        why: one sentence about `recommended`, or about why there is none.
    """

    state: Literal["counting", "estimated", "unknown"]
    able: tuple[StrategyCard, ...]
    unable: tuple[StrategyCard, ...]
    memory: float
    unit: str
    default: str
    is_local: bool = True
    recommended: str = ""
    why: str = ""


@dataclass(frozen=True)
class _Request:
    """What an estimate is made of: a config, its devices, and the strategy that it gets without a choice.

    Nothing but the number is known of devices that are not this machine's, so that there is no estimate for them.
    """

    config: TrainConfig
    devices: Devices
    default: str
    is_local: bool = True

    def key(self) -> str:
        deciding = dump_yaml(self.config.model_copy(update={name: _default_of(name) for name in _NO_EFFECT}))
        return hashlib.sha256(f"{deciding}{self.devices}{self.default}{self.is_local}".encode()).hexdigest()[:24]

    def hardware(self) -> Hardware:
        """The devices as the planner takes them. GPUs are not used for the count: a run may hold them."""
        devices, host = self.devices, float(host_memory.total())
        machines = devices.machines.count if devices.machines else 1
        if not self.is_local:
            kind = "gpu" if devices.gpu_ids else "cpu"
            return Hardware(kind, devices.num_processes, 0.0, is_local=False, machines=machines)
        if devices.gpu_ids:
            memory = min(gpu.memory for gpu in find_gpus() if gpu.index in devices.gpu_ids)
            return Hardware("gpu", devices.num_processes, memory, is_local=False, host=host, machines=machines)
        return Hardware("cpu", devices.num_processes, host / devices.local_processes, machines=machines)


def _default_of(name: str) -> object:
    field = TrainConfig.model_fields[name]
    return "" if field.is_required() else field.get_default(call_default_factory=True)


def _candidates(request: _Request) -> tuple[list[Candidate], dict[str, str]]:
    """Strategies that can run the job on exactly its devices, and the reasons of the others by name. Starts nothing."""
    able, reasons, hardware = [], {}, request.hardware()
    for name in strategy_names():
        strategy, processes = _shipped(name), hardware.processes
        try:
            able.append(_candidate(strategy, request.config, hardware))
        except ConfigError as error:
            counts = _other_counts(request)
            other = next((count for count in counts if _runs_on(strategy, request.config, hardware, count)), None)
            lines = "; ".join(str(replace(mistake, source="")) for mistake in error.mistakes)
            reasons[name] = f"runs on {_counted(other, hardware.kind)}; {processes} chosen" if other else lines
    return able, reasons


def _candidate(strategy: Strategy, config: TrainConfig, hardware: Hardware) -> Candidate:
    """As the planner's, which lets a strategy of one process leave devices idle; a form would refuse it.

    Raises:
        ConfigError: if the strategy cannot run the config on exactly these devices.
    """
    if strategy.distributed_type == "NO" and hardware.processes > 1:
        raise ConfigError("is one process")
    return candidate(strategy, config, hardware)


def _other_counts(request: _Request) -> list[int]:
    """Process counts beside the chosen one: first fewer, then more, the nearest first, up to the machine's GPUs."""
    devices, chosen = request.devices, request.devices.num_processes
    is_counted = devices.gpu_ids and not devices.machines and request.is_local
    most = len(find_gpus()) if is_counted else _MOST_TRIED
    return [*range(chosen - 1, 0, -1), *range(chosen + 1, most + 1)]


def _runs_on(strategy: Strategy, config: TrainConfig, hardware: Hardware, processes: int) -> bool:
    """Whether a strategy could run the config on another number of processes."""
    try:
        _candidate(strategy, config, replace(hardware, processes=processes))
    except ConfigError:
        return False
    return True


def _counted(count: int, kind: str) -> str:
    return f"{count} {'GPU' if kind == 'gpu' else 'process'}{'' if count == 1 else 's' if kind == 'gpu' else 'es'}"


def _plan(request: _Request) -> list[Row]:
    """The planner's rows for a request, best first; takes seconds. The only caller of the planner's count.

    Raises:
        ConfigError: if the model cannot be counted here.
        CheckBroke: if the count crashed.
    """
    hardware, (able, _) = request.hardware(), _candidates(request)
    counted = count(request.config, hardware, able)
    return best_first([plan_row(strategy, config, counted, hardware) for strategy, config in able])


class _Estimates:
    """Estimates by key, counted one at a time in the background."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = OrderedDict[str, _Request]()
        self._results = OrderedDict[str, list[Row] | str]()
        self._failed = dict[str, float]()
        self._running: str | None = None
        self._waiting: str | None = None

    def register(self, request: _Request) -> str:
        """Remembers a request, and returns its key; starts nothing."""
        key = request.key()
        with self._lock:
            self._requests[key] = request
            self._requests.move_to_end(key)
            while len(self._requests) > _MAX_KEPT:
                self._requests.popitem(last=False)
        return key

    def request(self, key: str) -> _Request | None:
        """The request of a key; None if it is not known here, or no longer."""
        with self._lock:
            return self._requests.get(key)

    def result(self, key: str) -> list[Row] | str | None:
        """The rows, or why there are none; None while it is not counted, and again some time after it failed."""
        with self._lock:
            return self._result(key)

    def _result(self, key: str) -> list[Row] | str | None:
        failed = self._failed.get(key)
        if failed is not None and time.monotonic() - failed >= _FAILURE_SECONDS:
            del self._failed[key], self._results[key]
        return self._results.get(key)

    def start(self, key: str) -> None:
        """Counts a request after the one that is being counted, in place of any that waits."""
        with self._lock:
            if self._result(key) is None and key != self._running:
                self._waiting = key
                self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts the request that waits, unless another is being counted; the lock is held."""
        if self._running is not None or self._waiting is None:
            return
        key, self._waiting = self._waiting, None
        if request := self._requests.get(key):
            threading.Thread(target=self._work, args=(key, request), daemon=True).start()
            self._running = key

    def _work(self, key: str, request: _Request) -> None:
        result: list[Row] | str = "the estimate was broken off"
        try:
            result = _plan(request)
        except Exception as error:  # the planner reads files and counts models of any kind
            result = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._keep(key, result)
                self._running = None
                self._start_waiting()

    def _keep(self, key: str, result: list[Row] | str) -> None:
        self._results[key] = result
        self._failed.pop(key, None)
        if isinstance(result, str):
            self._failed[key] = time.monotonic()
        while len(self._results) > _MAX_KEPT:
            oldest, _ = self._results.popitem(last=False)
            self._failed.pop(oldest, None)


_ESTIMATES = _Estimates()


def register_job(config: TrainConfig, devices: Devices, default: str, is_local: bool = True) -> str:
    """Remembers a job, and returns its key; starts nothing.

    Args:
        config: the validated config.
        devices: what it would run on.
        default: name of the strategy that it gets without a choice.
        is_local: whether the devices are this machine's.
    """
    return _ESTIMATES.register(_Request(config, devices, default, is_local))


def strategy_cards(key: str, estimate: bool = False) -> StrategyCards | None:
    """The cards of a job; None if the key is not known here, or no longer.

    Args:
        key: from `register_job`.
        estimate: start the estimate in the background if there is none and the devices are this machine's.
    """
    request = _ESTIMATES.request(key)
    if request is None:
        return None
    if estimate and request.is_local:
        _ESTIMATES.start(key)
    return _cards(key, request)


def _cards(key: str, request: _Request) -> StrategyCards:
    (able, reasons), hardware = _candidates(request), request.hardware()
    unit = "GPU" if hardware.kind == "gpu" else "process"
    unable = tuple(_card(_shipped(name), reason) for name, reason in reasons.items())
    result = _ESTIMATES.result(key)
    if not isinstance(result, list):
        strategies = sorted(
            (strategy for strategy, _ in able), key=lambda strategy: _plainness(strategy, request.default)
        )
        cards = tuple(_card(strategy) for strategy in strategies)
        waits = result is None and request.is_local
        state: Literal["counting", "unknown"] = "counting" if waits else "unknown"
        why = f"Memory and speed cannot be estimated: {result}" if result else "" if request.is_local else _ELSEWHERE
        return StrategyCards(state, cards, unable, hardware.memory, unit, request.default, request.is_local, "", why)
    rows = _ranked(result, request.default)
    timed = [row.seconds for row in rows if row.fits and row.seconds and not row.host]
    fastest = min(timed, default=None)
    cards = tuple(_estimated_card(row, fastest) for row in rows)
    best = cards[0] if cards and cards[0].fits else None
    why = _why(best, rows, hardware, unit)
    name = best.name if best else ""
    return StrategyCards("estimated", cards, unable, hardware.memory, unit, request.default, True, name, why)


def _plainness(strategy: Strategy, default: str) -> tuple[bool, ...]:
    """Sorts strategies before they are estimated, so that few change places after: what sends least comes first."""
    sizes = strategy.sizes
    splits_rows_or_layers = sizes.tp * sizes.pp * sizes.sequence_shards > 1
    return (strategy.name != default, strategy.offload != "none", splits_rows_or_layers, bool(strategy.fsdp))


def _card(strategy: Strategy, reason: str = "") -> StrategyCard:
    title, _, summary = strategy.summary.partition(": ")
    return StrategyCard(strategy.name, title, summary[:1].upper() + summary[1:], reason)


def _estimated_card(row: Row, fastest: float | None) -> StrategyCard:
    strategy = _shipped(row.strategy)
    speed = min(1.0, fastest / row.seconds) if fastest and row.seconds else None
    if strategy.offload != "none" or row.fits is False:  # the time that offloading takes is not estimated
        speed = None
    return replace(
        _card(strategy, row.reason or ""), memory=row.memory, fits=row.fits, speed=speed,
        tokens_per_second=row.tokens_per_second,
    )  # fmt: skip


def _ranked(rows: Sequence[Row], default: str) -> list[Row]:
    """The planner's order, where strategies that are as fast are ordered by what they send, the default before all."""
    ranked: list[Row] = []
    ties: list[Row] = []

    def settle() -> None:
        ranked.extend(sorted(ties, key=lambda row: (row.strategy != default, row.sent or 0.0)))
        ties.clear()

    for row in rows:
        first = ties[0] if ties else None
        # Compared with the fastest of the tie: otherwise the default may come first although it is slower than `CLOSE`.
        fastest = min((tie.seconds or 0.0 for tie in ties), default=0.0)
        as_fast = fastest and row.seconds and row.seconds <= fastest * _AS_FAST
        if first and not (as_fast and row.fits and first.fits and bool(row.host) == bool(first.host)):
            settle()
        ties.append(row)
    settle()
    return ranked


def _why(best: StrategyCard | None, rows: Sequence[Row], hardware: Hardware, unit: str) -> str:
    """One sentence about the best strategy, or about what to do without one."""
    memory = f"the {byte_text(hardware.memory)} of each {unit}"
    if best is None:
        smaller = "fewer rows at once, LoRA or QLoRA, a shorter row, gradient checkpointing, or more GPUs"
        return (
            f"Nothing fits into {memory} with so many rows at once, as each strategy's file divides the work. Try "
            f"{smaller}; tunesmith plan also tries other divisions."
            if any(row.fits is False for row in rows)
            else ""
        )
    first, *others = [row for row in rows if row.fits]
    if first.host:
        comparison = "nothing fits without offloading"
    elif not others:
        comparison = "nothing else fits"
    elif all(row.host for row in others):
        comparison = "nothing else fits without offloading"
    else:
        comparison = f"no other that fits is more than {CLOSE:.0%} faster"
    return f"It needs {byte_text(best.total)} of {memory}, and {comparison}."
