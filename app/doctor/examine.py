"""Examines a machine, or several together: all checks of `tunesmith doctor`, for the command and the System page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.doctor.check import Check
from app.doctor.exchange import Exchange, Unreachable, meet
from app.doctor.gpus import gpu_checks, torch_cuda
from app.doctor.machine import disk_checks, names_check
from app.doctor.ranks import run_ranks
from app.doctor.together import together
from app.doctor.verdict import COLLECTIVES, bandwidth_rows, network_checks, ranks_of
from app.doctor.versions import Setting, version_checks
from app.hardware import Devices, find_gpus
from app.launch.network import interface_variables, own_interface
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import Holder, Need, take_now
from trainers.strategy.strategy import Strategy

NEEDED = ("host name", "equal versions", "connections")
"""Checks without which the ranks would only hang."""
RANK_TIMEOUTS = 3
"""A machine may come this many timeouts later than another to the end of its ranks."""


@dataclass(frozen=True)
class Request:
    """What to examine.

    Args:
        strategy: the strategy of the run, resolved for its processes.
        devices: its devices.
        runs_dir: folder of run folders.
        timeout: seconds that other machines have to come, and that a step of the ranks may take.
        quick: leave out all measurements of speed.
    """

    strategy: Strategy
    devices: Devices
    runs_dir: Path
    timeout: float = 120.0
    quick: bool = False


@dataclass
class Examination:
    """The checks so far.

    Args:
        checks: in the order of the report.
        bandwidth: see `bandwidth_rows`.
    """

    checks: list[Check] = field(default_factory=list)
    bandwidth: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether no check found a fault."""
        return all(check.passed is not False for check in self.checks)

    def document(self, request: Request) -> dict[str, Any]:
        """The report as plain values."""
        return {"checks": [check.as_json() for check in self.checks], "strategy": request.strategy.name,
                "world_size": request.devices.num_processes, "bandwidth": self.bandwidth}  # fmt: skip


Listener = Callable[[Check], None]


def examine(request: Request, on_check: Listener, env: Mapping[str, str] | None = None) -> Examination:
    """Makes all checks.

    Args:
        request: what to examine.
        on_check: receives each check when it is done.
        env: environment of the run; default: this process's.
    """
    return _Examiner(request, on_check, os.environ if env is None else env).go()


class _Examiner:
    """One examination; see `examine` for the arguments."""

    def __init__(self, request: Request, on_check: Listener, env: Mapping[str, str]):
        self.request, self.on_check, self.env, self.result = request, on_check, env, Examination()

    def go(self) -> Examination:
        """Makes all checks."""
        machines = self.request.devices.machines
        if machines is None:
            for check in self._local():
                self._add(check)
            self._network(None)
            return self.result
        local = self._local()
        try:
            with meet(machines, self.request.timeout) as exchange:
                everyone = exchange.gather([check.as_json() for check in local], self.request.timeout)
                for rank, checks in enumerate(everyone):
                    for check in checks:
                        self._add(Check(**{**check, "name": f"machine {rank}: {check['name']}"}))
                for check in together(exchange, self.request.runs_dir, self.env):
                    self._add(check)
                self._network(exchange)
        except Unreachable as error:
            known = {check.name for check in self.result.checks}
            for check in local if not known else []:
                self._add(replace(check, name=f"machine {machines.rank}: {check.name}"))
            name = "machines" if "port" in known else "port"
            self._add(Check(name, False, error.problem, error.remedy))
            self._skip(f"the machines are not connected: see {name}")
        return self.result

    def _local(self) -> list[Check]:
        """The checks of this machine alone."""
        request = self.request
        devices = request.devices
        return [
            *version_checks(Setting(request.strategy, bool(devices.gpu_ids))),
            *gpu_checks(devices.gpu_ids, torch_cuda()),
            *disk_checks(request.runs_dir, request.quick),
            names_check(devices.machines, self.env),
        ]

    def _add(self, check: Check) -> None:
        self.result.checks.append(check)
        self.on_check(check)

    def _skip(self, reason: str) -> None:
        """Adds the collectives as not checked."""
        for name in COLLECTIVES:
            if name not in {check.name for check in self.result.checks}:
                self._add(Check(name, None, reason))

    def _network(self, exchange: Exchange | None) -> None:
        """Starts the ranks, unless a failed check would only make them hang, and judges what they report."""
        request = self.request
        broken = [check.name for check in self.result.checks
                  if check.passed is False and check.name.rpartition(": ")[2] in NEEDED]  # fmt: skip
        if request.devices.num_processes == 1:
            return self._skip("one process has nothing to exchange; name more with --num_processes or --gpus")
        if broken and exchange:
            return self._skip(f"not tried: mend {', '.join(broken)} first")
        with ExitStack() as stack:
            problem = self._take_gpus(stack)
            problems = exchange.gather(problem) if exchange else [problem]
            if held := [text for text in problems if text]:
                return self._skip(held[0])
            sizes = request.strategy.sizes
            report = run_ranks(request.devices, sizes, request.timeout, request.quick, self._env(exchange))
        reports = exchange.gather(report, RANK_TIMEOUTS * request.timeout) if exchange else [report]
        for check in network_checks(reports, request.timeout, request.quick):
            self._add(check)
        self.result.bandwidth = bandwidth_rows(ranks_of(reports))

    def _env(self, exchange: Exchange | None) -> Mapping[str, str]:
        """The environment of the ranks; as in a run, they use the network interface that leads to machine 0."""
        if exchange is None:
            return self.env
        interface = own_interface(exchange.machines, self.env, exchange.own_address())
        return {**self.env, **interface_variables(interface, self.env)}

    def _take_gpus(self, stack: ExitStack) -> str | None:
        """Holds the GPUs while ranks use them; returns why they cannot be had."""
        ids = self.request.devices.gpu_ids
        if not ids:
            return None
        need = Need(gpus=tuple(gpu.uuid for gpu in find_gpus() if gpu.index in ids))
        try:
            stack.enter_context(take_now(need, Holder("tunesmith doctor")))
        except ConfigError as error:
            return str(error).partition(";")[0]
        return None
