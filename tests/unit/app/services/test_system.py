"""The picture of the machine: true numbers, who holds a slot, and GPUs that do not tell everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from app.services import system
from trainers.run import host_memory
from trainers.run.device_locks import Holder, Need, cpu_slots, take_now
from ui.pages.system import render


@pytest.fixture
def found(elsewhere: None, tmp_path: Path) -> dict[str, Any]:
    return system.machine(tmp_path / "runs")


def test_the_numbers_are_those_of_the_machine(found: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads(json.dumps(found)) == found
    assert len(found["cpu"]["per_core"]) == psutil.cpu_count()
    assert 0 <= found["cpu"]["percent"] <= 100
    assert found["memory"]["total"] == host_memory.total() <= psutil.virtual_memory().total
    assert found["disk"]["total"] == shutil.disk_usage(tmp_path).total
    assert found["disk"]["path"] == str(tmp_path / "runs")
    assert found["versions"]["torch"] == metadata.version("torch")


def test_the_memory_is_the_containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert system.machine(tmp_path)["memory"]["total"] != 64, "control"
    monkeypatch.setattr(host_memory, "_groups", lambda root: [(64, 40)])
    assert system.machine(tmp_path)["memory"] == {"used": 40, "total": 64}
    monkeypatch.setattr(
        host_memory, "_groups", lambda root: [(64, 80)]
    )  # for a moment, before the system ends a process
    assert system.machine(tmp_path)["memory"] == {"used": 64, "total": 64}


def test_a_package_that_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PACKAGES", ("torch", "no-such-package"))
    system.versions.cache_clear()
    assert system.versions()["no-such-package"] is None
    system.versions.cache_clear()


def test_the_holder_of_a_slot_is_named(found: dict[str, Any], tmp_path: Path) -> None:
    assert [slot["held_by"] for slot in found["cpu_slots"]] == [None] * len(cpu_slots())
    with take_now(Need(cpu_slots=1), Holder("a <run>", str(tmp_path), 4321)):
        slots = system.machine(tmp_path)["cpu_slots"]
        held = [slot for slot in slots if slot["held_by"]]
    assert [(slot["held_by"], slot["run_dir"], slot["pid"]) for slot in held] == [("a <run>", str(tmp_path), 4321)]
    assert not any(slot["held_by"] for slot in system.machine(tmp_path)["cpu_slots"])


def test_locks_that_cannot_be_read_are_said(elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    found = system.machine(tmp_path)
    assert "cannot be written" in found["lock_error"]
    assert found["cpu_slots"][0]["held_by"] is None


class _Nvml:
    """A machine with one GPU that tells its memory and its heat, and nothing of its power."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": object(),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42),
            "nvmlDeviceGetUUID": "GPU-12345678-90ab",
            "nvmlDeviceGetName": "A <fast> one",
            "nvmlDeviceGetTemperature": 61,
            "nvmlSystemGetDriverVersion": "1.2",
        }

        def answer(*about: Any) -> Any:
            if name not in answers:
                raise self.NVMLError(name)
            return answers[name]

        return answer


def test_a_gpu_that_does_not_tell_everything(elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_nvml", _Nvml)
    with take_now(Need(gpus=("GPU-12345678-90ab",)), Holder("run-7", str(tmp_path))):
        found = system.machine(tmp_path)
    gpu = found["gpus"][0]
    assert (gpu["percent"], gpu["memory_total"], gpu["temperature"], gpu["power"]) == (42, 80 << 30, 61, None)
    assert gpu["held_by"] == "run-7"
    shown = render(found)
    assert "A &lt;fast&gt; one" in shown
    assert "<fast>" not in shown
    assert 'href="/run?run=run-7"' in shown
    assert "3.0 GiB of 80.0 GiB" in shown


def test_a_thread_that_asks_for_the_first_time_sees_the_use_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system._CoreUsage, "MIN_INTERVAL", 0.0)
    usage = system._CoreUsage()

    def of_new_thread(read: Callable[[], list[float]]) -> list[float]:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            while not reading.done():  # keeps a core busy
                pass
        return reading.result()

    assert max(of_new_thread(usage.percent)) > 0
    assert max(of_new_thread(usage.percent)) > 0

    def since_never() -> list[float]:
        psutil._last_per_cpu_times.clear()  # type: ignore[attr-defined]  # ids of threads are used again
        return psutil.cpu_percent(percpu=True)

    assert any(max(of_new_thread(since_never)) == 0 for _ in range(50))  # the control, unless each met a tick
