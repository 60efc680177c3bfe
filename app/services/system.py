"""What this machine has and how much of it is in use: GPUs, CPU, memory, disk, versions. Imports no torch."""

from __future__ import annotations

import functools
import math
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from trainers.config.options import ConfigError
from trainers.run import host_memory
from trainers.run.device_locks import cpu_slots, holders

PACKAGES = (
    "tunesmith", "torch", "accelerate", "transformers", "peft", "datasets", "gradio", "deepspeed", "bitsandbytes",
)  # fmt: skip


def machine(runs_dir: Path) -> dict[str, Any]:
    """A picture of the machine, as JSON can hold it.

    Args:
        runs_dir: folder of run folders, whose disk is looked at; need not exist.

    Returns:
        `gpus` (see `gpus`), `cpu_slots` (`slot`, and who holds it), `lock_error` (None, or why the locks cannot be
        read), `cpu` (`percent` of all cores lately, `per_core`, `load`), `memory` and `disk` (`used` and
        `total`, bytes; the disk also `path`), `versions` (name to version, None where it is not installed).
    """
    held, error = _held()
    slots = [{"slot": slot, **_holder(held.get(slot))} for slot in cpu_slots()]
    return {
        "gpus": [{**gpu, **_holder(held.get(str(gpu["uuid"])))} for gpu in gpus()],
        "cpu_slots": slots,
        "lock_error": error,
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(runs_dir),
        "versions": dict(versions()),
    }


def _held() -> tuple[dict[str, dict[str, Any]], str | None]:
    try:
        return holders(), None
    except (ConfigError, OSError) as error:
        return {}, str(error)


def _holder(entry: dict[str, Any] | None) -> dict[str, Any]:
    """Who holds a slot: name of the run, its folder, and the process; each None for nobody."""
    found = entry or {}
    return {"held_by": found.get("run"), "run_dir": found.get("run_dir") or None, "pid": found.get("pid")}


def _cpu() -> dict[str, Any]:
    cores = _CORES.percent()
    percent = sum(cores) / len(cores) if cores else 0.0
    return {"percent": percent, "per_core": cores, "load": list(psutil.getloadavg()), "name": _cpu_name()}


class _Cores:
    """How busy each core was between two looks; looks that follow each other too closely get the same answer."""

    LEAST = 0.5
    """Seconds between two looks that tell something."""

    def __init__(self) -> None:
        self._lock, self._seen_at, self._percent = threading.Lock(), -math.inf, [0.0]

    def percent(self) -> list[float]:
        with self._lock:
            now = time.monotonic()
            if now - self._seen_at > self.LEAST:
                first = self._seen_at == -math.inf
                self._percent = psutil.cpu_percent(interval=0.1 if first else None, percpu=True)
                self._seen_at = now
            return self._percent


_CORES = _Cores()


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    total = host_memory.total()
    return {"used": max(0, total - host_memory.available()), "total": total}


def _disk(folder: Path) -> dict[str, Any]:
    """The disk of a folder, or of the nearest one above that exists."""
    near = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        disk = shutil.disk_usage(near)
    except OSError:
        return {"path": str(folder), "used": None, "total": None}
    return {"path": str(folder), "used": disk.total - disk.free, "total": disk.total}


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of what it stands on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found |= {"driver": _driver(), "system": f"{platform.system()} {platform.release()}", "interpreter": sys.executable}
    return found


# -- GPUs ------------------------------------------------------------------------------------------------------------


def _nvml() -> Any:
    """NVML, started; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _driver() -> str | None:
    nvml = _nvml()
    return _ask(nvml, nvml.nvmlSystemGetDriverVersion) if nvml else None


def gpus() -> list[dict[str, Any]]:
    """Every GPU of the machine, those that an outer CUDA_VISIBLE_DEVICES hides too.

    Returns:
        For each `index`, `uuid`, `name`, and what it does now: `percent` of the time in use, `memory_used` and
        `memory_total` (bytes), `temperature` (degrees Celsius), `power` and `power_limit` (watts); None for what it
        does not tell.
    """
    nvml = _nvml()
    count = _ask(nvml, nvml.nvmlDeviceGetCount) if nvml else None
    found = [_gpu(nvml, index) for index in range(count or 0)]
    return [gpu for gpu in found if gpu is not None]


def _gpu(nvml: Any, index: int) -> dict[str, Any] | None:
    handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    use = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    limit = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "index": index,
        "uuid": str(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)),
        "name": str(_ask(nvml, nvml.nvmlDeviceGetName, handle)),
        "percent": None if use is None else int(use.gpu),
        "memory_used": None if memory is None else int(memory.used),
        "memory_total": None if memory is None else int(memory.total),
        "temperature": _ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power": None if power is None else power / 1000,
        "power_limit": None if limit is None else limit / 1000,
    }


def _ask(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """What NVML answers; None where the GPU cannot tell."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None
