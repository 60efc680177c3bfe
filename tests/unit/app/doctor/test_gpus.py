"""GPUs and their driver, as a stand-in for NVML tells of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.doctor import gpus
from app.doctor.check import Check
from app.doctor.gpus import gpu_checks, torch_cuda


class Nvml:
    """Two GPUs; `changes` replaces an answer, by a value or a function, and None is an error.

    Constants are those of the real module.
    """

    def __init__(self, **changes: Any):
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return getattr(gpus_module, name)
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30),
            "nvmlDeviceGetName": "H100",
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlDeviceGetP2PStatus": gpus_module.NVML_P2P_STATUS_OK,
            "nvmlDeviceGetNvLinkState": lambda handle, link: gpus_module.NVML_FEATURE_ENABLED,
            "nvmlInit": 0, "nvmlShutdown": 0,
            **self.changes,
        }  # fmt: skip

        def answer(*about: Any) -> Any:
            value = answers[name]
            if value is None:
                raise gpus_module.NVMLError(gpus_module.NVML_ERROR_NOT_SUPPORTED)
            return value(*about) if callable(value) else value

        return answer


gpus_module = gpus.pynvml
Examined = Callable[..., dict[str, Check]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    def examine(ids: tuple[int, ...] = (0, 1), cuda: str | None = "13.0", **changes: Any) -> dict[str, Check]:
        monkeypatch.setattr(gpus, "pynvml", Nvml(**changes))
        return {check.name: check for check in gpu_checks(ids, cuda)}

    return examine


def passed(checks: dict[str, Check]) -> list[bool | None]:
    assert all(bool(check.remedy) == (check.passed is False) for check in checks.values())
    return [checks[name].passed for name in ("GPUs", "driver", "peer access", "NVLink")]


def test_sound_gpus(examined: Examined) -> None:
    checks = examined()
    assert passed(checks) == [True] * 4
    assert checks["GPUs"].value == "0: H100, 80.0 GiB; 1: H100, 80.0 GiB"


def test_without_a_driver_nothing_is_judged(examined: Examined) -> None:
    assert passed(examined(nvmlInit=None)) == [None] * 4


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("580.65.06", "13.0", True),
        ("570.86.10", "13.0", False),
        ("570.86.10", "12.8", True),
        ("520.1", "12.1", False),
        ("580.1", None, False),
        ("580.1", "14.0", None),
    ],
)
def test_the_driver_must_suit_torchs_cuda(driver: str, cuda: str | None, verdict: bool, examined: Examined) -> None:
    assert examined(cuda=cuda, nvmlSystemGetDriverVersion=driver)["driver"].passed is verdict


def test_no_peer_access(examined: Examined) -> None:
    def status(first: int, second: int, kind: int) -> int:
        return int(gpus_module.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED if first == 1 else gpus_module.NVML_P2P_STATUS_OK)

    check = examined(nvmlDeviceGetP2PStatus=status)["peer access"]
    assert check.passed is False
    assert check.value.startswith("none between GPU 1 and 0: ")
    assert examined(nvmlDeviceGetP2PStatus=None)["peer access"].passed is None
    consumer = examined(nvmlDeviceGetP2PStatus=gpus_module.NVML_P2P_STATUS_GPU_NOT_SUPPORTED)["peer access"]
    assert consumer.passed is None
    assert "do not have it" in consumer.value
    assert examined(ids=(0,))["peer access"].passed is None


def test_a_link_that_is_down(examined: Examined) -> None:
    def state(handle: int, link: int) -> int:
        down = handle == 1 and link < 3
        return int(gpus_module.NVML_FEATURE_DISABLED if down else gpus_module.NVML_FEATURE_ENABLED)

    check = examined(nvmlDeviceGetNvLinkState=state)["NVLink"]
    assert check.passed is False
    assert (
        check.value
        == f"GPU 1 has {gpus_module.NVML_NVLINK_MAX_LINKS - 3} of {gpus_module.NVML_NVLINK_MAX_LINKS} links up"
    )
    assert examined(nvmlDeviceGetNvLinkState=None)["NVLink"].passed is None


def test_memory_errors(examined: Examined) -> None:
    check = examined(nvmlDeviceGetTotalEccErrors=lambda handle, *kinds: 7 * handle)["GPUs"]
    assert check.value == "GPU 1 has had 7 uncorrected memory errors since the driver was loaded"
    assert examined(nvmlDeviceGetTotalEccErrors=None)["GPUs"].passed is True, "not every GPU counts them"


def test_a_gpu_that_is_lost(examined: Examined) -> None:
    (check,) = examined(nvmlDeviceGetMemoryInfo=None).values()
    assert check.passed is False


def test_torchs_cuda_is_read_without_importing_it() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda
