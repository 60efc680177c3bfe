"""Which machines take part in a launch, and the settings of a run on fewer machines than it was started for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from app.hardware import Devices
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.strategy.micro_batch import fit_micro_batch
from trainers.strategy.strategy import Machines, Strategy, load_strategy, over_machines, refusal, resolve


def choose_participants(present: Collection[int], minimum: int, fits: Callable[[int], bool]) -> list[int]:
    """The machines that take part in a launch, in the order of their ranks; empty if too few are there.

    As many as fit, and of those present the ones with the lowest numbers, so that machine 0 is among them.

    Args:
        present: numbers of the machines that could take part.
        minimum: fewest machines to use.
        fits: whether the run can use so many machines.
    """
    count = next((count for count in range(len(present), minimum - 1, -1) if fits(count)), 0)
    return sorted(present)[:count]


def part_of(machines: Machines, participants: list[int]) -> Machines | None:
    """The machines of a launch as seen by one that takes part in it; None if it is alone.

    Args:
        machines: the machines of the run.
        participants: numbers of those that take part.
    """
    if len(participants) == 1:
        return None
    return replace(machines, count=len(participants), rank=participants.index(machines.rank))


class Layouts:
    """The settings of a run on any number of its machines: always the same global batch.

    Args:
        config: the config on all machines.
        strategy: the strategy, resolved for all machines.
        devices: the devices of all machines.
    """

    def __init__(self, config: TrainConfig, strategy: Strategy, devices: Devices):
        self.config, self.strategy, self.devices = config, strategy, devices

    def on(self, count: int) -> tuple[TrainConfig, Strategy]:
        """Config, with a micro-batch that divides the global batch, and strategy on so many machines.

        Raises:
            ConfigError: if the global batch or the sizes of the mesh do not divide.
        """
        machines = self.devices.machines
        if machines is None or count == machines.count:
            return self.config, self.strategy
        spread = replace(machines, count=count) if count > 1 else None
        processes = self.devices.local_processes * count
        try:
            return self._resolved(self.strategy, processes, spread)
        except ConfigError:
            if processes > 1 or self.strategy.has_mesh:
                raise
        return self._resolved(load_strategy("single"), processes, spread)  # there is nothing left to share

    def _resolved(self, strategy: Strategy, processes: int, machines: Machines | None) -> tuple[TrainConfig, Strategy]:
        config = self.config
        resolved = resolve(
            over_machines(strategy, machines), processes, config.mixed_precision, config.pp_size, config.pp_schedule
        )
        fitted = fit_micro_batch(config, resolved)
        if reason := refusal(resolved, fitted, bool(self.devices.gpu_ids)):
            raise ConfigError(reason, source=f"strategy {resolved.name}")
        return fitted, resolved

    def fits(self, count: int) -> bool:
        """Whether the run can use so many machines."""
        return not self.mistakes(count)

    def mistakes(self, count: int) -> list[str]:
        """Why the run cannot use so many machines."""
        try:
            self.on(count)
        except ConfigError as error:
            return error.lines
        return []
