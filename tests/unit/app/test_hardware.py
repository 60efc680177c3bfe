"""Which GPUs or how many CPU processes a run gets."""

from __future__ import annotations

import os

import pytest

from app.hardware import Devices, Gpu, choose_devices, cpu_count, find_gpus, visible
from trainers.config.mistakes import ConfigError
from trainers.run import gpus

FOUR = [Gpu(index, f"GPU-{index}{index}ab-cd", "Some GPU", 80 * 2**30) for index in range(4)]


def test_two_processes_without_gpus_and_more_than_cores_when_asked() -> None:
    assert choose_devices(None, None, []) == Devices([], 2)
    assert choose_devices(None, str(cpu_count() * 3), []) == Devices([], cpu_count() * 3)


def test_the_strategys_own_number_is_the_default_on_a_cpu() -> None:
    assert choose_devices(None, None, [], strategy_processes=8).num_processes == 8
    assert choose_devices(None, None, [], strategy_processes=1).num_processes == 1
    assert choose_devices(None, 4, [], strategy_processes=8).num_processes == 4


def test_one_process_per_chosen_gpu() -> None:
    assert choose_devices(None, None, FOUR) == Devices([0, 1, 2, 3], 4)
    assert choose_devices("2,0", None, FOUR) == Devices([2, 0], 2)
    assert choose_devices(" 3 ", 1, FOUR) == Devices([3], 1)
    assert choose_devices(None, 2, FOUR) == Devices([0, 1], 2)
    assert choose_devices(None, None, FOUR, strategy_processes=1) == Devices([0], 1)


@pytest.mark.parametrize(
    ("gpus", "processes", "machine", "parts"),
    [
        ("0,7", None, FOUR, ["no GPU 7", "use 0, 1, 2, 3"]),
        ("0,0", None, FOUR, ["GPU 0 twice"]),
        ("0,x", None, FOUR, ["'x'", "--gpus 0,2"]),
        ("", None, FOUR, ["''"]),
        ("-1", None, FOUR, ["'-1'"]),
        ("²", None, FOUR, ["is not a GPU id"]),
        ("0", None, [], ["no GPU is visible", "--num_processes"]),
        ("0,2", 3, FOUR, ["num_processes=3", "2 GPUs", "leave num_processes out"]),
        (None, 5, FOUR, ["num_processes=5", "at most 4"]),
        (None, "two", [], ["'two'", "is not a whole number"]),
        (None, "1.5", [], ["'1.5'"]),
        (None, 0, [], ["num_processes=0", "1 to 256"]),
        (None, 10**9, [], ["out of range"]),
    ],
)
def test_mistakes_are_one_line_with_the_value_and_a_way_out(
    gpus: str | None, processes: int | str | None, machine: list[Gpu], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_devices(gpus, processes, machine)
    assert all(part in str(refused.value) for part in parts)
    assert all("\n" not in line for line in refused.value.lines)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        choose_devices("0,0,9", "x", FOUR)
    assert len(refused.value.lines) == 3


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("3,1", [3, 1]),
        ("GPU-22ab,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,1,2", [1]),
        ("GPU-", []),
    ],
)
def test_an_outer_choice_of_gpus_is_honoured_as_cuda_reads_it(variable: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(FOUR, variable)] == indices


def test_the_machines_own_gpus_can_be_asked_for() -> None:
    assert all(gpu.memory > 0 and gpu.uuid for gpu in find_gpus())


def test_the_capability_is_that_of_the_gpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU beside them does not count; it does where it may be used."""
    capabilities = {0: (7, 5), 1: (9, 0), 2: (8, 9), 3: (9, 0)}
    monkeypatch.setattr(gpus, "find_gpus", lambda: visible(FOUR, os.environ.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setattr(gpus.pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(gpus.pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(gpus.pynvml, "nvmlDeviceGetCudaComputeCapability", capabilities.__getitem__)
    for variable, expected in {"1,2": (8, 9), "0,3": (7, 5), "": (0, 0)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert gpus.capability() == expected
