"""A profile divides the time of the chosen steps, and changes nothing that is trained."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from trainers.config.mistakes import ConfigError
from trainers.config.option_types import MAX_PROFILED
from trainers.config.validation import build
from trainers.monitor.profiler import SHARES, Interval, StepProfiler, summary, time_shares
from trainers.run.folder import RunFolder

KINDS = st.sampled_from(["compute", "communication", "data"])
INTERVALS = st.lists(st.builds(Interval, KINDS, st.integers(0, 99), st.integers(0, 99)), max_size=12)


def config(**options: Any) -> Any:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", **options})


def test_time_is_divided_by_what_hides_what() -> None:
    intervals = [Interval("data", 0, 20), Interval("compute", 10, 40), Interval("compute", 30, 50),
                 Interval("communication", 40, 70)]  # fmt: skip
    shares = time_shares(intervals, 0, 100)
    assert shares == pytest.approx({"data": 0.1, "compute": 0.3, "overlapped": 0.1, "exposed": 0.2, "host": 0.3})


def by_moments(intervals: list[Interval], length: int) -> dict[str, float]:
    """The same division, moment by moment."""
    shares = dict.fromkeys(SHARES, 0.0)
    for moment in range(length):
        kinds = {each.kind for each in intervals if each.start <= moment < each.end}
        both = {"compute", "communication"} <= kinds
        name = (
            "overlapped" if both else "compute" if "compute" in kinds else "exposed" if "communication" in kinds
            else "data" if "data" in kinds else "host"
        )  # fmt: skip
        shares[name] += 1 / length
    return shares


@given(INTERVALS)
def test_the_shares_are_those_of_each_moment(intervals: list[Interval]) -> None:
    assert time_shares(intervals, 0, 80) == pytest.approx(by_moments(intervals, 80), abs=1e-9)


def test_a_wrong_division_would_be_seen() -> None:
    intervals = [Interval("compute", 0, 80)]
    assert by_moments([Interval("communication", 0, 80)], 80) != pytest.approx(time_shares(intervals, 0, 80))


@pytest.mark.parametrize(
    "value", ["10", "0:3", "5:4", "a:b", "1:2:3", "-1:2", f"1:{MAX_PROFILED + 1}", 613, [1, 2], 1.5]
)
def test_a_range_of_steps_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"profile_steps.*two steps such as"):
        config(profile_steps=value)


@pytest.mark.parametrize("value", ["all,0", "x", "-1", "0,,all", "1.5", "9999999"])
def test_ranks_are_checked(value: str) -> None:
    with pytest.raises(ConfigError, match="profile_ranks"):
        config(profile_ranks=value)


def run_profiled(folder: Path, steps: int, rank: int = 0, **options: Any) -> Path:
    run = RunFolder(folder / "run")
    run.create()
    profiler = StepProfiler(config(**options), run, rank)
    passed: list[str] = []
    beats = SimpleNamespace(at=lambda section, step: passed.append(f"{section} {step}"))
    ranks = SimpleNamespace(gather=lambda value: passed.append("gather"))
    weight = torch.ones(256, 256, requires_grad=True)
    for step in range(1, steps + 1):
        profiler.begin(step)
        with profiler.data():
            time.sleep(0.01)
        (weight @ weight).sum().backward()
        profiler.end(step, nullcontext(), beats, ranks)
    profiler.finish()
    last = (config(**options).profiled_steps() or (0, 0))[1]
    # Every rank waits for the profiles, also one that makes none.
    assert passed == ([f"save {last - 1}", "gather"] if 0 < last <= steps else [])
    return run.path / "profile"


def test_a_profile_has_trace_operators_and_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_profiled(tmp_path, 6, profile_steps="2:4")
    document = json.loads((folder / "rank-0.json").read_text())
    assert (document["first_step"], document["steps"], document["device"]) == (2, 3, "cpu")
    assert sum(document["shares"].values()) == pytest.approx(1)
    assert document["shares"]["data"] * document["seconds"] >= 0.03
    assert {row["name"]: row["calls"] for row in document["operators"]}["aten::mm"] == 9
    trace = json.loads(gzip.decompress((folder / document["trace"]).read_bytes()))
    assert sum(event.get("name") == "tunesmith::data" for event in trace["traceEvents"]) == 3
    assert "profile of steps 2 to 4 on rank 0: compute" in capsys.readouterr().out


def test_a_run_that_ends_early_keeps_what_it_has(tmp_path: Path) -> None:
    folder = run_profiled(tmp_path, 3, profile_steps="2:9")
    assert json.loads((folder / "rank-0.json").read_text())["steps"] == 2


def test_only_chosen_ranks_and_steps_are_profiled(tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"profile_steps": "7:8"}, {"profile_steps": "1:2", "profile_ranks": "1"}]):
        assert not run_profiled(tmp_path / str(number), 3, **options).exists()
    assert run_profiled(tmp_path / "all", 2, rank=3, profile_steps="1:1", profile_ranks="all").exists()


def raw(name: str, start: float, end: float, gpu: bool = False, annotation: bool = False) -> Any:
    """An event of kineto, in microseconds."""
    values = {
        "name": name, "start_ns": 1000 * start, "duration_ns": 1000 * (end - start), "is_hidden_event": False,
        "device_type": DeviceType.CUDA if gpu else DeviceType.CPU, "is_user_annotation": annotation,
        "device_resource_id": 7, "start_thread_id": 1,
    }  # fmt: skip
    return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})


def test_on_a_gpu_the_work_of_its_streams_counts_and_no_range_of_the_host() -> None:
    events = [
        raw("aten::mm", 0, 90), raw("tunesmith::data", 0, 10), raw("gemm", 10, 40, gpu=True),
        raw("ncclDevKernel_AllReduce", 30, 60, gpu=True), raw("FSDP::all_gather", 30, 100, gpu=True, annotation=True),
        raw("tunesmith::data", 0, 10, gpu=True, annotation=True), raw("Optimizer.step", 90, 100),
    ]  # fmt: skip
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    seen = summary(SimpleNamespace(profiler=results))
    shares = {"compute": 0.2, "overlapped": 0.1, "exposed": 0.2, "data": 0.1, "host": 0.4}
    assert (seen["device"], seen["shares"]) == ("cuda", pytest.approx(shares))
    assert {each["name"]: each["calls"] for each in seen["operators"]} == {"gemm": 1, "ncclDevKernel_AllReduce": 1}


def test_the_time_of_an_operator_is_without_those_that_it_calls() -> None:
    events = [
        raw("outer", 0, 100),
        raw("inner", 10, 40),
        raw("leaf", 20, 30),
        raw("inner", 50, 60),
        raw("next", 100, 120),
    ]
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    operators = summary(SimpleNamespace(profiler=results))["operators"]
    own = {each["name"]: (each["calls"], round(1e6 * each["seconds"])) for each in operators}
    assert own == {"outer": (1, 60), "inner": (2, 30), "leaf": (1, 10), "next": (1, 20)}


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StepProfiler, "_write", full)
    run_profiled(tmp_path, 2, profile_steps="1:1")
    assert "warning: the profile of rank 0 cannot be written: [Errno 28]" in capsys.readouterr().out
