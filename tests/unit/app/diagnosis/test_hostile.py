"""Damaged numbers and misleading words: a diagnosis leaves out what it cannot say, and never breaks a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import yaml

from app.diagnosis import changes
from app.diagnosis.advice import advice, diagnose
from app.diagnosis.facts import Metrics
from app.diagnosis.plan import Plan, plan_of
from app.launch import background
from app.runs.metrics import Curves
from app.services.diagnosis import Diagnoses, remedied
from tests.made_runs import add_sealed_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder
from ui.context import ServerContext
from ui.pages.run import _Page

pytestmark = pytest.mark.usefixtures("elsewhere")
BAD_STEP = "step 9: loss nan, gradient norm nan, on rank 1, in the batch from data.jsonl:7; no weight was updated; x"
RULE_AND_CAUSE = {
    "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)":
        ("disk_full", "The disk is full."),
    "SafetensorError: Error while serializing: I/O error: File too large (os error 27)": ("file_limit", ""),
    "OSError: Disk quota exceeded in /runs/a/checkpoints, a checkpoint needs 9,000 bytes; free space, then resume":
        ("file_limit", "A file may not grow: a limit on its size, or a quota."),
    "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered":
        ("damaged_model", ""),
    "OSError: [Errno 28] No space left on device: '/runs/x'": ("disk_full", "The disk is full: '/runs/x'."),
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory":
        ("missing_library", "A shared library cannot be loaded: libcudart.so.12."),
    "ImportError: cannot import name 'x' from 'y' (/env/y.py)":
        ("other_version", "The Python package y is of a version without x."),
    "ImportError: cannot import name 'x' from partially initialized module 'y' (most likely due to a circular import)":
        ("", ""),
    "ModuleNotFoundError: No module named 'x.y'": ("missing_package", "The Python package x.y is missing."),
    "PermissionError: [Errno 13] Permission denied: '/root/.triton/cache'":
        ("not_writable", "The system denies access: /root/.triton/cache."),
    "PermissionError: [Errno 1] Operation not permitted": ("not_writable", "The system denies access."),
    "its processes ended without reporting a cause, and nothing can be written to /runs/a":
        ("run_not_writable", "The run may not write to its folder: /runs/a."),
    "its processes ended without reporting a cause, and the disk of /runs/a has 12 bytes free":
        ("disk_full", "The disk is full: /runs/a has 12 bytes free."),
    "its processes ended without reporting a cause": ("vanished", ""),
    "BlockingIOError: [Errno 11] Unable to lock file, errno = 11": ("", ""),
    "BlockingIOError: [Errno 11] Resource temporarily unavailable": ("too_many_threads", ""),
    "RuntimeError: can't start new thread": ("too_many_threads", ""),
    "rank 1: ConnectionRefusedError: [Errno 111] Connection refused":
        ("connection_refused",
         "Nothing answers where rank 1 connects to: the connection was refused or timed out."),
    "RuntimeError: Error compiling gloo thing": ("", ""),
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9":
        ("peer_lost", ""),
    "RuntimeError: Connection reset by peer": ("peer_lost", ""),
    "OSError: [Errno 98] Address already in use": ("port_taken", "A port is taken by another program."),
    "RuntimeError: The server socket has failed to bind. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE":
        ("port_taken", "A port is taken by another program: 29500."),
    "the launcher was killed by SIGTERM": ("launcher_killed", "The launcher was killed (SIGTERM)."),
    "rank 1 was killed by SIGTERM": ("terminated", "Rank 1 was ended from outside (SIGTERM)."),
    "local rank 1 of machine 2 was killed by SIGTERM": ("terminated", "Rank 1 was ended from outside (SIGTERM)."),
}  # fmt: skip


def plan_for(tmp_path: Path, **more: Any) -> Plan:
    plan = plan_of(made_run(tmp_path, "planned", "failed", **more), {"state": "failed"})
    assert plan is not None
    return plan


def own_strategy(run: RunFolder, **values: Any) -> Plan:
    """The run with other values in its strategy."""
    text = run.accelerate.read_text()
    run.accelerate.write_text(text.partition("\n")[0] + "\n" + yaml.safe_dump(yaml.safe_load(text) | values))
    plan = plan_of(run, {"state": "failed"})
    assert plan is not None
    return plan


@pytest.mark.parametrize("text", RULE_AND_CAUSE)
def test_a_cause_says_no_more_than_the_error(text: str, tmp_path: Path) -> None:
    rule, cause = RULE_AND_CAUSE[text]
    (entry,) = advice({"state": "failed", "cause": text}, Metrics(), [], plan_for(tmp_path))
    assert entry.rule == rule
    assert cause in ("", entry.cause)


def test_machine_0_is_named_only_among_several(tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", "failed")
    plan = own_strategy(run, num_machines=2, main_process_ip="10.0.0.1", main_process_port=29500)
    state = {"state": "failed", "cause": "ConnectionRefusedError: [Errno 111] Connection refused"}
    (entry,) = advice(state, Metrics(), [], plan)
    assert entry.cause.startswith("Machine 0 does not answer")


@pytest.mark.parametrize(("strategy", "more"), [("zero1", "zero2"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2_offload")])
def test_only_a_bundled_strategy_as_it_is_gives_way_to_one_that_shards_more(
    strategy: str, more: str, tmp_path: Path
) -> None:
    run = made_run(tmp_path, "mine", "failed", strategy=strategy, world=4)
    plan = plan_of(run, {"state": "failed"})
    assert plan is not None
    assert changes.more_sharded(plan, {}) == more
    assert changes.more_sharded(own_strategy(run, downcast_bf16="yes"), {}) is None
    machines = made_run(tmp_path, "machines", "failed", strategy="ddp", world=4)
    spread = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    assert changes.more_sharded(own_strategy(machines, **spread), {}) == "fsdp2"


def test_a_mesh_is_not_dropped(tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", "failed", strategy="zero1", world=4)
    sizes = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2}
    plan = own_strategy(run, parallelism_config=sizes)
    assert plan.strategy.sizes.tp == 2
    assert changes.more_sharded(plan, {}) is None


def test_activations_are_offloaded_only_from_a_gpu(tmp_path: Path) -> None:
    for gpus, text, offered in [("0,1", "CUDA out of memory", True), ("", "CUDA out of memory", False),
                                ("0,1", "DefaultCPUAllocator: can't allocate memory", False)]:  # fmt: skip
        error = "OutOfMemoryError: " if "CUDA" in text else "RuntimeError: [enforce fail at x.cpp:1] . "
        run = made_run(tmp_path / f"{gpus}{text[:4]}", "mine", "failed", gpus=gpus, cause=f"rank 0: {error}{text}")
        (entry,) = diagnose(run)
        assert entry.rule == "out_of_memory"
        options = [change.options for change in entry.remedies]
        assert ({"gradient_checkpointing": "true", "activation_offloading": "true"} in options) == offered


# -- force -------------------------------------------------------------------------------------------------------------


def test_a_forced_remedy_says_so_and_nothing_is_applied_by_an_empty_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = "the data, its tokenizer or its options changed since it was saved"
    run = made_run(tmp_path, "mine", "failed", cause=f"checkpoint step-5: {changed}")
    add_sealed_checkpoint(run, 5)
    (entry,) = diagnoses = diagnose(run)
    assert [change.flags for change in entry.remedies] == ["--force"]
    assert remedied(run, diagnoses, "--force").config.force_resume
    with pytest.raises(ConfigError, match="no longer among those of the run"):
        remedied(run, diagnoses, "")
    started: list[Any] = []
    monkeypatch.setattr(background, "start", started.append)
    with gr.Blocks():
        page = _Page(ServerContext(tmp_path, (tmp_path,), tmp_path))
    for index, listed in [(1, "--force"), (0, ""), (0, "--learning_rate=9")]:
        with pytest.raises(ConfigError, match="no longer among those of the run"):
            page._apply_remedy(index)(run, listed)
        assert not started
    page._apply_remedy(0)(run, "--force")
    assert len(started) == 1


# -- damaged numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1" + "0" * 400, "NaN", "Infinity", "-1" + "0" * 400])
def test_numbers_out_of_range_break_nothing(value: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", "done")
    row = '{{"step": {}, "loss": {v}, "learning_rate": {v}, "data_wait": {v}, "mfu": {v}, "memory_gib": {v}, ' \
          '"elapsed_s": {v}, "slow_ranks": [1], "memory_reserved_gib_by_rank": [{v}, {v}]}}\n'  # fmt: skip
    rows = [row.format(step, v=value) for step in range(1, 60)]
    rows += [f'{{"step": {step}, "eval_loss": {value}}}\n' for step in range(10, 60, 10)]
    run.metrics.write_text("".join(rows))
    assert diagnose(run) == []
    plan = plan_of(run, {"state": "done"})
    assert plan is not None
    object.__setattr__(plan, "gpu_gib", 80.0)
    points = {"step": [float(step) for step in range(30)], "mfu": [0.01] * 30, "data_wait": [0.9] * 30}
    latest = {"elapsed_s": json.loads(value), "memory_gib": json.loads(value)}
    json.dumps([entry.as_json() for entry in advice({"state": "done"}, Metrics(30, points, {}, latest), [], plan)])


def test_long_numbers_in_a_cause_or_a_note_break_nothing(tmp_path: Path) -> None:
    plan, digits = plan_for(tmp_path), "9" * 5000
    memory = "OutOfMemoryError: CUDA out of memory"
    for state in [
        {"cause": f"rank {digits} was killed by SIGKILL"},
        {"cause": BAD_STEP.replace("9", digits)},
        {"cause": memory, "out_of_memory": {"rank": digits}},
        {"cause": memory, "out_of_memory": {"rank": 1, "section": "forward"},
         "heartbeats": {1: {"step": 10**4300 - 1, "section": "forward"}}},
        {"cause": BAD_STEP, "step": digits},
    ]:  # fmt: skip
        (entry,) = advice({"state": "failed", **state}, Metrics(), [], plan)
        json.dumps(entry.as_json())


def test_a_rule_that_cannot_compute_drops_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*values: Any) -> Any:
        raise OverflowError

    monkeypatch.setattr("app.diagnosis.trends.statistics.fmean", broken)
    run = made_run(tmp_path, "mine", "done")
    run.metrics.write_text("".join(f'{{"step": {n}, "loss": 2.0, "slow_ranks": [1]}}\n' for n in range(1, 60)))
    with open(run.metrics, "a") as file:
        file.write('{"step": 60, "elapsed_s": 60}\n')
    assert [entry.rule for entry in diagnose(run)] == ["slow_rank"]


# -- a page ------------------------------------------------------------------------------------------------------------


def test_a_page_looks_again_until_it_has_read_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, "mine", "done")
    rows = (json.dumps({"step": step, "loss": 2.0, "learning_rate": 1e-9}) for step in range(1, 20_000))
    run.metrics.write_text("\n".join(rows) + "\n")
    curves = Curves()
    known, view, latest, seconds_each = Diagnoses(curves), curves.view, curves.latest, 0.0
    monkeypatch.setattr(curves, "latest", lambda run: latest(run, seconds=seconds_each))
    monkeypatch.setattr(curves, "view", lambda run, seconds: view(run, seconds=seconds_each))
    assert known.of(run, "done") == []
    seconds_each = 60.0
    first = known.of(run, "done")
    assert [entry.rule for entry in first] == ["flat_loss"]
    assert known.of(run, "done") is first
