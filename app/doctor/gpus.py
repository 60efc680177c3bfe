"""Checks of the GPUs and their driver, through NVML. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pynvml

from app.doctor.check import Check, judged
from trainers.config.byte_text import byte_text

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver for the CUDA version that torch was built with, by its major number.

Minor versions within it are compatible: https://docs.nvidia.com/deploy/cuda-compatibility/
"""
NAMES = ("GPUs", "driver", "peer access", "NVLink")


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, read from its `version.py` without importing it; None for a CPU."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def gpu_checks(ids: Sequence[int], cuda: str | None) -> list[Check]:
    """Checks of the GPUs of a run on this machine.

    Args:
        ids: the GPUs that the run uses, as `nvidia-smi` numbers them; empty for a run on the CPU.
        cuda: CUDA version of torch, see `torch_cuda`.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = f"no NVIDIA GPU or driver is visible here ({error})"
        return [Check(name, None, reason) for name in NAMES]
    try:
        driver = _driver(cuda)
        if not ids:
            reason = "the run uses no GPU"
            return [Check("GPUs", None, reason), driver, *(Check(name, None, reason) for name in NAMES[2:])]
        handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in ids}
        return [_health(handles), driver, _peers(handles), _links(handles)]
    except pynvml.NVMLError as error:
        remedy = "see `nvidia-smi` and `dmesg`; a GPU that has fallen off the bus needs a restart of the machine"
        return [Check("GPUs", False, f"NVML reports: {error}", remedy)]
    finally:
        pynvml.nvmlShutdown()


def _query(query: Any, *args: Any) -> Any:
    """The answer of NVML; None if this GPU does not give it."""
    try:
        return query(*args)
    except pynvml.NVMLError:
        return None


def _health(handles: dict[int, Any]) -> Check:
    """Names and memory; memory errors that could not be corrected since the driver was loaded."""
    lines, faults = [], []
    for index, handle in handles.items():
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        lines.append(f"{index}: {pynvml.nvmlDeviceGetName(handle)}, {byte_text(memory.total)}")
        errors = _query(pynvml.nvmlDeviceGetTotalEccErrors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                        pynvml.NVML_VOLATILE_ECC)  # fmt: skip
        if errors:
            faults.append(f"GPU {index} has had {errors} uncorrected memory errors since the driver was loaded")
    return judged("GPUs", faults, "; ".join(lines), "leave it out with --gpus, and reset or replace it")


def _driver(cuda: str | None) -> Check:
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    if cuda is None:
        remedy = "install a CUDA build of torch: `make setup TORCH=cuda` in a clone, or from https://pytorch.org"
        return Check("driver", False, f"driver {driver}, but torch is built for the CPU only", remedy)
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    value = f"driver {driver}, torch for CUDA {cuda}"
    if least is None:
        return Check("driver", None, f"{value}: the oldest driver for it is not known to this version of Tunesmith")
    if int(driver.partition(".")[0]) >= least:
        return Check("driver", True, value)
    remedy = f"update the driver to {least} or later, or install a torch for an older CUDA"
    return Check("driver", False, f"{value}, which needs driver {least} or later", remedy)


def _peers(handles: dict[int, Any]) -> Check:
    """Whether each GPU can read and write the others' memory directly; consumer GPUs never can, which is no fault."""
    name = "peer access"
    if len(handles) < 2:
        return Check(name, None, "one GPU: there is no other")
    lacking = (pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED, pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
    statuses = dict[tuple[int, int], set[int | None]]()
    for pair in permutations(handles, 2):
        first, second = (handles[index] for index in pair)
        statuses[pair] = {
            _query(pynvml.nvmlDeviceGetP2PStatus, first, second, kind)
            for kind in (pynvml.NVML_P2P_CAPS_INDEX_READ, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
        }
    reported = set[int | None]().union(*statuses.values())
    if None in reported:
        return Check(name, None, "the driver does not report it")
    if reported <= set(lacking):
        return Check(name, None, "these GPUs do not have it: their data goes through host memory")
    pairs = [f"GPU {pair[0]} and {pair[1]}" for pair, status in statuses.items()
             if status != {pynvml.NVML_P2P_STATUS_OK}]  # fmt: skip
    problem = [f"none between {', '.join(pairs)}: their data goes through host memory"] if pairs else []
    remedy = (
        "see `nvidia-smi topo -p2p r` and `nvidia-smi topo -m`; turn off PCIe access control (ACS) in the BIOS, or "
        "choose other --gpus"
    )
    return judged(name, problem, "between all GPUs", remedy)


def _links(handles: dict[int, Any]) -> Check:
    """NVLink connections that are up and down; a GPU that has fewer than its peers has a fault."""
    up, down = dict[int, int](), dict[int, int]()
    for index, handle in handles.items():
        states = [_query(pynvml.nvmlDeviceGetNvLinkState, handle, link)
                  for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]  # fmt: skip
        up[index] = states.count(pynvml.NVML_FEATURE_ENABLED)
        down[index] = states.count(pynvml.NVML_FEATURE_DISABLED)
    most = max(up.values())
    if not most:
        return Check("NVLink", None, "these GPUs have none in use")
    faults = [f"GPU {index} has {count} of {most} links up" for index, count in up.items() if count < most]
    remedy = "see `nvidia-smi nvlink --status`; restart the fabric manager or the machine, then look for a bad bridge"
    return judged("NVLink", faults, f"{most} links up on each GPU", remedy)
