"""Chooses the devices, strategy and micro-batch that a run leaves open, such that its global batch divides evenly.

Values that the user has set are never changed; if the batch does not divide with them, the run is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from app.hardware import Devices
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.presets import find_preset
from trainers.strategy.mesh_options import refuse_other_sizes, with_sizes
from trainers.strategy.micro_batch import OPTION, fit_micro_batch, micro_batch_line
from trainers.strategy.strategy import Strategy, default_strategy, load_strategy, over_machines, refusal, resolve

_OWN_MODEL = ("model_name_or_path", "method")


@dataclass(frozen=True)
class DeviceFit:
    """The result of `fit_devices`.

    Args:
        config: the config, with a micro-batch that divides the global batch.
        strategy: the strategy, resolved for the devices.
        devices: the devices to use.
        notes: lines about what was chosen for the user.
        warnings: a line if the preset has no strategy for these GPUs.
    """

    config: TrainConfig
    strategy: Strategy
    devices: Devices
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def fit_devices(
    config: TrainConfig, strategy: Strategy | None, devices: Devices, fixed: bool, chosen: Collection[str],
    sizes: Mapping[str, int],
) -> DeviceFit:  # fmt: skip
    """Uses as many devices as divide the global batch, with the largest micro-batch up to the config's.

    Args:
        config: the validated config.
        strategy: the strategy that the user named; None for the preset's, otherwise the default.
        devices: all devices that the run may use.
        fixed: whether the user named the devices, so that all must be used.
        chosen: options that the user set, which are not changed.
        sizes: mesh sizes that the user set, by axis; they replace those of the strategy.

    Raises:
        ConfigError: why the run cannot use all of the devices, if it cannot use fewer either.
    """
    most = devices.num_processes
    preset = _preset_of(config) if devices.gpu_ids else None
    first: ConfigError | None = None
    for count in [most] if fixed or devices.machines else range(most, 0, -1):
        some = replace(devices, gpu_ids=devices.gpu_ids[:count], num_processes=count) if count < most else devices
        try:
            open_strategy = strategy or load_strategy(default_strategy(count, preset))
            fitted, resolved = _on(config, open_strategy, some, OPTION not in chosen, sizes)
        except ConfigError as error:
            first = first or error
            continue
        notes = [f"{_share(devices, count)} used: {first.mistakes[0]}"] if first else []
        notes += [_left_out_line(devices)] if devices.left_out else []
        notes += [micro_batch_line(config, fitted, resolved)] if fitted != config else []
        if preset and not strategy and resolved.name not in ("single", "ddp"):
            notes.append(f"strategy {resolved.name}: preset {preset} names it for {_gpus(count)}")
        return DeviceFit(fitted, resolved, some, notes, _lacks(preset, count))
    raise first or AssertionError("a run has at least one process")


def _on(
    config: TrainConfig, strategy: Strategy, devices: Devices, fit: bool, sizes: Mapping[str, int]
) -> tuple[TrainConfig, Strategy]:
    """Config and strategy for exactly these devices.

    Raises:
        ConfigError: if the run cannot use them.
    """
    spread = over_machines(with_sizes(strategy, sizes, config.pp_size), devices.machines)
    resolved = resolve(spread, devices.num_processes, config.mixed_precision, config.pp_size, config.pp_schedule)
    refuse_other_sizes(resolved, sizes)
    fitted = fit_micro_batch(config, resolved) if fit else config
    if reason := refusal(resolved, fitted, bool(devices.gpu_ids)):
        raise ConfigError(reason, source=f"strategy {resolved.name}")
    return fitted, resolved


def _preset_of(config: TrainConfig) -> str | None:
    """The config's preset if its strategies apply, that is, if model and method are unchanged; otherwise None."""
    if config.preset is None:
        return None
    values = find_preset(config.preset).options
    same = all(getattr(config, name) == values[name] for name in _OWN_MODEL)
    return config.preset if same else None


def _left_out_line(devices: Devices) -> str:
    listed, every = (",".join(map(str, ids)) for ids in (devices.left_out, [*devices.gpu_ids, *devices.left_out]))
    several = len(devices.left_out) > 1
    return (
        f"GPU{'s' * several} {listed} left out: other programs use {'them' if several else 'it'}; "
        f"--gpus {every} takes {'them' if several else 'it'} anyway"
    )


def _share(devices: Devices, count: int) -> str:
    return f"{count} of {_gpus(devices.num_processes) if devices.gpu_ids else f'{devices.num_processes} processes'}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _lacks(preset: str | None, count: int) -> list[str]:
    """A warning if the preset names no strategy for this number of GPUs."""
    if preset is None:
        return []
    gpus = find_preset(preset).gpus
    nearest = [placement for number, placement in gpus.items() if number <= count][-1]
    if nearest.strategies:
        return []
    able = {number: placement.strategies[0] for number, placement in gpus.items() if placement.strategies}
    remedy = next((f"; it names {strategy} for {_gpus(number)}" for number, strategy in able.items()), "")
    return [f"preset {preset} names no strategy for {_gpus(count)} (estimated: {nearest.gib:g} GiB on each){remedy}"]
