"""This machine's hardware and its use: GPUs, CPU, memory, disk, versions. Imports no torch."""

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

from trainers.config.mistakes import ConfigError
from trainers.run import host_memory
from trainers.run.device_locks import cpu_slots, holders

PACKAGES = (
    "tunesmith", "torch", "accelerate", "transformers", "peft", "datasets", "gradio", "deepspeed", "bitsandbytes",
)  # fmt: skip


def machine(runs_dir: Path) -> dict[str, Any]:
    """The state of the machine, as JSON values.

    Args:
        runs_dir: folder of run folders, whose disk is reported; need not exist.

    Returns:
        `gpus` (see `gpus`) and `cpu_slots` (`slot`), each with its holder; `lock_error` (None, or why the locks cannot
        be read); `cpu` (recent `percent` of all cores, `per_core`, `load`, `name`); `memory` and `disk` (`used` and
        `total` in bytes; the disk also `path`); `versions` (version by name, None if not installed).
    """
    holder_of, error = _read_holders()
    slots = [{"slot": slot, **_holder(holder_of.get(slot))} for slot in cpu_slots()]
    return {
        "gpus": [{**gpu, **_holder(holder_of.get(str(gpu["uuid"])))} for gpu in gpus()],
        "cpu_slots": slots,
        "lock_error": error,
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(runs_dir),
        "versions": dict(versions()),
    }


def _read_holders() -> tuple[dict[str, dict[str, Any]], str | None]:
    try:
        return holders(), None
    except (ConfigError, OSError) as error:
        return {}, str(error)


def _holder(entry: dict[str, Any] | None) -> dict[str, Any]:
    """The holder of a slot: name of the run, its folder, and pid; each None when free."""
    holder = entry or {}
    return {"held_by": holder.get("run"), "run_dir": holder.get("run_dir") or None, "pid": holder.get("pid")}


def _cpu() -> dict[str, Any]:
    cores = _CORE_USAGE.percent()
    percent = sum(cores) / len(cores) if cores else 0.0
    return {"percent": percent, "per_core": cores, "load": list(psutil.getloadavg()), "name": _cpu_name()}


_SAMPLE_SECONDS = 0.2


class _CoreUsage:
    """Use of each core during a moment; samples closer than `MIN_INTERVAL` return the same values.

    psutil keeps the previous sample of each thread apart, and many threads answer pages: "since the previous sample"
    would be 0 % in each new one.
    """

    MIN_INTERVAL = 0.5
    """Seconds between two samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampled_at = -math.inf
        self._percent = [0.0]

    def percent(self) -> list[float]:
        with self._lock:
            now = time.monotonic()
            if now - self._sampled_at > self.MIN_INTERVAL:
                self._percent = psutil.cpu_percent(interval=_SAMPLE_SECONDS, percpu=True)
                self._sampled_at = now
            return self._percent


_CORE_USAGE = _CoreUsage()


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
    """The disk of a folder, or of its nearest existing parent."""
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        disk = shutil.disk_usage(existing)
    except OSError:
        return {"path": str(folder), "used": None, "total": None}
    return {"path": str(folder), "used": disk.total - disk.free, "total": disk.total}


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of its main dependencies; None if not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    installed |= {
        "driver": _driver(),
        "system": f"{platform.system()} {platform.release()}",
        "interpreter": sys.executable,
    }
    return installed


# -- GPUs ------------------------------------------------------------------------------------------------------------


def _nvml() -> Any:
    """NVML, initialized; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _driver() -> str | None:
    nvml = _nvml()
    return _query(nvml, nvml.nvmlSystemGetDriverVersion) if nvml else None


def gpus() -> list[dict[str, Any]]:
    """All GPUs of the machine, including those hidden by CUDA_VISIBLE_DEVICES.

    Returns:
        For each `index`, `uuid`, `name`, and its current `percent` of time in use, `memory_used` and `memory_total`
        (bytes), `temperature` (degrees Celsius), `power` and `power_limit` (watts); None for values it does not report.
    """
    nvml = _nvml()
    count = _query(nvml, nvml.nvmlDeviceGetCount) if nvml else None
    readings = [_gpu(nvml, index) for index in range(count or 0)]
    return [gpu for gpu in readings if gpu is not None]


def _gpu(nvml: Any, index: int) -> dict[str, Any] | None:
    handle = _query(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    memory = _query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    use = _query(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power = _query(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    limit = _query(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "index": index,
        "uuid": str(_query(nvml, nvml.nvmlDeviceGetUUID, handle)),
        "name": str(_query(nvml, nvml.nvmlDeviceGetName, handle)),
        "percent": None if use is None else int(use.gpu),
        "memory_used": None if memory is None else int(memory.used),
        "memory_total": None if memory is None else int(memory.total),
        "temperature": _query(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power": None if power is None else power / 1000,
        "power_limit": None if limit is None else limit / 1000,
    }


def _query(nvml: Any, query: Callable[..., Any], *args: Any) -> Any:
    """The result of an NVML query; None where the GPU does not support it."""
    try:
        return query(*args)
    except nvml.NVMLError:
        return None
