"""Causes that only CUDA, NCCL or a driver can give, on logs in their format, written for these tests.

None of them was produced on this project's machines: they follow what PyTorch, NCCL and the kernel print. They are
counted apart from the failures of `tests/faults/test_diagnosis.py`, which are provoked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from app.diagnosis.advice import diagnose
from app.launch.exit_cause import cause_of
from tests.made_runs import made_run
from trainers.run.folder import RunFolder, log_line

pytestmark = pytest.mark.usefixtures("elsewhere")
TRACE = ["Traceback (most recent call last):", '  File "/app/trainers/loop.py", line 170, in train_step']
SUMMARY = "E1120 09:12:44.101000 4711 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) " \
          "local_rank: {} (pid: 4790) of binary: /env/bin/python"  # fmt: skip
WATCHDOG = (
    "[rank0]:[E1120 09:12:43.007116852 ProcessGroupNCCL.cpp:693] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000) ran for "
    "600052 milliseconds before timing out."
)
RECORDED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "out of memory in a kernel's allocator": ("out_of_memory", [
        ("rank 1", "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 1 has a total "
                   "capacity of 79.11 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has "
                   "78.07 GiB memory in use. Of the allocated memory 75.90 GiB is allocated by PyTorch")]),
    "out of memory in older PyTorch": ("out_of_memory", [
        ("rank 0", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 23.69 GiB "
                   "total capacity; 21.96 GiB already allocated)")]),
    "out of memory in a library": ("out_of_memory", [
        ("rank 0", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]),
    "out of memory in the driver": ("out_of_memory", [("rank 0", "RuntimeError: CUDA error: out of memory")]),
    "an assertion on the device": ("cuda_assert", [
        ("rank 0", "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [214,0,0], "
                   "thread: [32,0,0] Assertion `srcIndex < srcSelectDimSize` failed."),
        ("rank 0", "torch.AcceleratorError: CUDA error: device-side assert triggered")]),
    "an illegal access": ("cuda_access", [
        ("rank 0", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered")]),
    "memory that cannot be corrected": ("gpu_lost", [
        ("rank 3", "RuntimeError: CUDA error: uncorrectable ECC error encountered")]),
    "a launch that failed": ("gpu_lost", [("rank 0", "RuntimeError: CUDA error: unspecified launch failure")]),
    "no code for the GPU": ("no_kernel", [
        ("rank 0", "RuntimeError: CUDA error: no kernel image is available for execution on the device")]),
    "a driver too old": ("driver_too_old", [
        ("rank 0", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update "
                   "your GPU driver by downloading and installing a new version")]),
    "a driver too old for the runtime": ("driver_too_old", [
        ("rank 0", "RuntimeError: Unexpected error from cudaGetDeviceCount(). CUDA driver version is insufficient for "
                   "CUDA runtime version")]),
    "a collective times out and aborts": ("collective_timeout", [
        ("rank 0", WATCHDOG), ("rank 0", "terminate called after throwing an instance of 'c10::DistBackendError'"),
        ("launcher", SUMMARY.format(-6, 0))]),
    "NCCL cannot connect": ("nccl_network", [
        ("rank 1", "node2:4790:4851 [1] NCCL WARN socketStartConnect: Connect to 10.0.0.7<51235> failed : "
                   "Software caused connection abort"),
        ("rank 1", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
                   "NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
                   "2.27.5")]),
    "NCCL reports a remote process": ("nccl_error", [
        ("rank 0", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
                   "ProcessGroupNCCL.cpp:3690, internal error - please report this issue to the NCCL developers, NCCL "
                   "version 2.27.5")]),
    "a GPU falls off the bus": ("gpu_lost", [
        ("launcher", "NVRM: Xid (PCI:0000:1b:00): 79, pid=4790, GPU has fallen off the bus."),
        ("launcher", SUMMARY.format(-6, 1))]),
}  # fmt: skip


def recorded(tmp_path: Path, lines: list[tuple[str, str]], **more: str) -> RunFolder:
    """A failed run whose log ends so; an error stands at the end of a traceback, as Python prints it."""
    run = made_run(tmp_path, "mine", "failed", steps=20, launched_at="2026-11-20T08:00:00.000+00:00", **more)
    with open(run.log, "a", encoding="utf-8") as log:
        for writer, text in lines:
            raised = "Error: " in text.partition(" ")[0] + " " + text.partition(" ")[2][:60] and "WARN" not in text
            for line in [*(TRACE if raised and not text.startswith(("/", "NVRM", "E1", "[rank0]:[E")) else []), text]:
                log.write(log_line(writer, line))
    run.write_state(cause=more.get("cause") or cause_of(run, 0, 1))
    return run


@pytest.mark.parametrize("name", RECORDED)
def test_the_cause_is_found_in_a_recorded_log(name: str, tmp_path: Path) -> None:
    rule, lines = RECORDED[name]
    run = recorded(tmp_path, lines)
    (found,) = diagnose(run)
    assert found.rule == rule, (run.read_state() or {})["cause"]
    assert found.evidence


def test_they_are_counted_apart() -> None:
    assert len(RECORDED) >= 12


@pytest.mark.parametrize("name", ["an assertion on the device", "a collective times out and aborts"])
def test_without_rules_there_is_no_cause(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    monkeypatch.setattr("app.diagnosis.advice.RULES", ())
    (found,) = diagnose(recorded(tmp_path, RECORDED[name][1]))
    assert found.rule == ""
