"""What each backend offers beside the files that ship, in a user's own Accelerate YAML or DeepSpeed JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import forked
from tests.launching import ROOT, SCRIPT, Finished, environment, flags, free_port, launch, launch_well
from tests.parity.checks import equal_after_resume, reference, resumed
from tests.parity.runs import HALF, config, curve, long, mostly_long, options, run
from trainers.config.mistakes import ConfigError
from trainers.model.load import build_model
from trainers.objectives.loss_module import LossModule
from trainers.parallel.fsdp import _classes_by_size, _refuse_odd_adapters
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard, check_coverage
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": False}
FSDP1 = {
    **{**FSDP2, "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    **{"fsdp_sync_module_states": False, "fsdp_use_orig_params": True},
}
SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 50_000}
FSDP = {
    "fsdp2 keeps weights whole until the backward pass": FSDP2 | {"fsdp_reshard_after_forward": False},
    "fsdp2 cut by size": FSDP2 | SIZE | {"fsdp_reshard_after_forward": True},
    "fsdp1 prefetch": FSDP1 | {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True},
    "fsdp1 cut by size": FSDP1 | SIZE,
    "fsdp1 no shard": FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"},
}
PROBE = """import os
if "RANK" in os.environ:
    import json
    from torch.distributed.fsdp import FullyShardedDataParallel, FSDPModule
    from trainers.parallel import backend
    probe = backend.Backend.warm_up_buckets

    def written(made):
        units = [part for part in made.model.modules() if isinstance(part, (FullyShardedDataParallel, FSDPModule))]
        unit = units[0] if isinstance(units[0], FullyShardedDataParallel) else None
        seen = {"units": len(units)}
        if unit is not None:
            seen |= {"backward_prefetch": str(unit.backward_prefetch).rpartition(".")[2],
                      "sharding": unit.sharding_strategy.name, "group": unit.process_group.size()}
        with open(os.path.join(FOLDER, os.environ["RANK"] + ".json"), "w") as file:
            json.dump(seen, file)
        probe(made)

    backend.Backend.warm_up_buckets = written
    if os.environ.get("DEVICES_PER_MACHINE"):  # by which FSDP 1 makes its groups; a CPU counts as one device
        import torch
        torch.cpu.device_count = lambda: int(os.environ["DEVICES_PER_MACHINE"])
"""
"""Each rank writes what FSDP was told, once the model is wrapped."""
NO_WRAP = {"fsdp_auto_wrap_policy": "NO_WRAP"}
TOLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp1 prefetch after": (
        FSDP1 | {"fsdp_backward_prefetch": "BACKWARD_POST"},
        {"backward_prefetch": "BACKWARD_POST"},
    ),
    "fsdp1 no prefetch": (FSDP1 | {"fsdp_backward_prefetch": "NO_PREFETCH"}, {"backward_prefetch": "None"}),
    "fsdp1 in one unit": (FSDP1 | NO_WRAP, {"units": 1, "sharding": "FULL_SHARD"}),
    "fsdp2 in one unit": (FSDP2 | NO_WRAP | {"fsdp_reshard_after_forward": True}, {"units": 1}),
}
"""Settings of FSDP, and what a rank must then find in the wrapped model."""
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "overlap_comm": False}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
ZERO: dict[str, dict[str, Any]] = {
    "zero1 with small buckets": {"zero_optimization": {"stage": 1, **BUCKETS}},
    "zero2, optimizer on the CPU": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3 with auto everywhere": {
        "zero_optimization": {"stage": 3, **AUTO},
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        **{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
    },
    "zero3 cut to the last weight": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero2 with DeepSpeed's own AdamW": {"zero_optimization": {"stage": 2}, "optimizer": ADAMW},
}


def write(folder: Path, kind: str, **settings: Any) -> str:
    """A user's own Accelerate file."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": kind, "num_processes": 2, **settings}))
    return str(path)


@pytest.mark.parametrize("name", mostly_long(FSDP, ["fsdp2 cut by size"]))
def test_fsdp(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, "FSDP", fsdp_config=FSDP[name])
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file)
    assert curve(finished).agrees(reference("full", True))


def probed(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of ranks that write into the folder what FSDP was told."""
    (inject := folder / "inject").mkdir()
    (inject / "sitecustomize.py").write_text(PROBE.replace("FOLDER", repr(str(folder))))
    return {"PYTHONPATH": f"{inject}{os.pathsep}{ROOT}", **variables}


@pytest.mark.parametrize("name", mostly_long(TOLD, []))
def test_fsdp_is_told(name: str, tmp_path: Path) -> None:
    """The curve is that of one process, and the setting has reached FSDP, which has another default."""
    settings, expected = TOLD[name]
    file = write(tmp_path, "FSDP", fsdp_config=settings)
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file, **probed(tmp_path))
    assert curve(finished).agrees(reference("full", True))
    seen = json.loads((tmp_path / "0.json").read_text())
    assert {key: seen[key] for key in expected} == expected


def on_two_machines(folder: Path, file: str, processes: int, **variables: str) -> Finished:
    """Two plain launchers with half of the ranks each, as on two machines."""
    port, programs, values = str(free_port()), [], options("full", True, output_dir=folder / "run")
    for machine in ("0", "1"):
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
        line += ["--num_processes", str(processes), "--num_machines", "2", "--machine_rank", machine]
        line += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, str(SCRIPT), *flags(values)]
        env = environment(**variables, XDG_STATE_HOME=str(folder / machine))  # where devices are locked
        programs.append(forked.Popen(line, env=env))
    try:
        assert [program.wait(500) for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.terminate()
    return Finished(RunFolder(folder / "run"), 0, "")


@pytest.mark.parametrize("sharding", mostly_long(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], []))
def test_fsdp1_shards_within_machines_and_replicates_across(sharding: str, tmp_path: Path) -> None:
    """Machines of two devices each."""
    file = write(tmp_path, "FSDP", fsdp_config=FSDP1 | {"fsdp_sharding_strategy": sharding}, num_machines=2)
    finished = on_two_machines(tmp_path, file, 4, **probed(tmp_path, DEVICES_PER_MACHINE="2"))
    assert curve(finished).agrees(reference("full", True))
    for rank in range(4):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen["sharding"], seen["group"]) == (sharding, 2)


@long
def test_a_pipeline_over_two_machines(tmp_path: Path) -> None:
    finished = on_two_machines(tmp_path, str(ROOT / "accelerate_configs/pp.yaml"), 2)
    assert curve(finished).agrees(reference("full", True))
    assert (finished.run.read_state() or {})["state"] == "done"


DDP_BUCKETS = """import os
if "RANK" in os.environ:
    import json
    from trainers.parallel import replicated
    probe = replicated.Replicated.warm_up_buckets

    def written(made):
        with open(os.path.join(FOLDER, os.environ["RANK"] + ".json"), "w") as file:
            json.dump(made.model._get_ddp_logging_data()["bucket_cap_bytes"], file)
        probe(made)

    replicated.Replicated.warm_up_buckets = written
"""


@long
def test_ddp_has_buckets_of_the_size_asked_for(tmp_path: Path) -> None:
    (inject := tmp_path / "inject").mkdir()
    (inject / "sitecustomize.py").write_text(DDP_BUCKETS.replace("FOLDER", repr(str(tmp_path))))
    more = {"PYTHONPATH": f"{inject}{os.pathsep}{ROOT}"}
    finished = launch_well(tmp_path / "run", 2, options("full", True, ddp_bucket_cap_mb=1), **more)
    assert json.loads((tmp_path / "0.json").read_text()) == 2**20, "the default is 25 MiB"
    assert curve(finished).agrees(reference("full", True))


@long
def test_zero_offload_in_one_process(tmp_path: Path) -> None:
    """As on a single GPU: what does not fit rests in host memory, and nothing is divided."""
    finished = launch_well(tmp_path / "run", 1, options("full", True), strategy="zero3_offload")
    assert curve(finished).agrees(reference("full", True))
    assert re.search(r"offload +cpu", finished.output)


@long
def test_deepspeeds_own_lion_is_lion(tmp_path: Path) -> None:
    lion = {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99], "weight_decay": "auto"}}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero, "optimizer": lion}))
    inline = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    finished = launch_well(tmp_path / "run", 2, options("full", True, learning_rate=5e-5), strategy=file)
    assert "DeepSpeed's optimizer Lion" in finished.output, "it is listed as outside the promise"
    assert curve(finished).agrees(curve(run(1, "full", True, optim="lion", learning_rate=5e-5)))
    assert not curve(finished).agrees(curve(run(1, "full", True, learning_rate=5e-5))), "control: AdamW"


def test_profilers_show_what_they_see_and_change_nothing(tmp_path: Path) -> None:
    """torch's profiler on both ranks, and DeepSpeed's profiler of FLOPs and logger of communication."""
    content = ZERO["zero1 with small buckets"] | {
        "flops_profiler": {"enabled": True, "profile_step": 3, "detailed": False},
        "comms_logger": {"enabled": True},
    }
    (tmp_path / "zero.json").write_text(json.dumps(content))
    inline = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    profiled = options("full", True, profile_steps="5:7", profile_ranks="all")
    finished = launch_well(tmp_path / "run", 2, profiled, strategy=file)
    assert curve(finished).agrees(reference("full", True))
    assert "DeepSpeed Flops Profiler" in finished.output
    assert re.search(r"busbw_avg \(Gbps\)[^$]*\n\s+\d+\.\d+ [KM]B +[1-9]", finished.output)
    for rank in (0, 1):
        seen = json.loads((finished.run.path / "profile" / f"rank-{rank}.json").read_text())
        assert (seen["first_step"], seen["steps"]) == (5, 3)
        assert sum(seen["shares"].values()) == pytest.approx(1)
        assert seen["shares"]["compute"] > 0 < seen["shares"]["exposed"] + seen["shares"]["overlapped"]


RENDEZVOUS = """import os
if "RANK" not in os.environ:
    from torch.distributed.elastic.rendezvous import registry
    handler = registry.get_rendezvous_handler

    def written(parameters):
        with open(FILE, "w") as file:
            file.write(parameters.backend)
        return handler(parameters)

    registry.get_rendezvous_handler = written
"""


@long
@pytest.mark.parametrize("backend", ["c10d", None])
def test_ranks_meet_by_c10d(backend: str | None, tmp_path: Path) -> None:
    """torchrun's elastic rendezvous, by the flag of `accelerate launch`; without it, the static one."""
    (inject := tmp_path / "inject").mkdir()
    (inject / "sitecustomize.py").write_text(RENDEZVOUS.replace("FILE", repr(str(tmp_path / "backend"))))
    chosen = ("--rdzv_backend", backend) if backend else ()
    path = f"{inject}{os.pathsep}{ROOT}"
    finished = launch_well(tmp_path / "run", 2, options("full", True), launcher_flags=chosen, PYTHONPATH=path)
    assert (tmp_path / "backend").read_text() == (backend or "static")
    assert curve(finished).agrees(reference("full", True))


@pytest.mark.parametrize("name", mostly_long(ZERO, []))
def test_zero(name: str, tmp_path: Path) -> None:
    json_file = tmp_path / "zero.json"
    json_file.write_text(json.dumps(ZERO[name]))
    inline = {"deepspeed_config_file": str(json_file), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file)
    assert curve(finished).agrees(reference("full", True))


@long
def test_zero3_on_nvme(tmp_path: Path) -> None:
    """The optimizer's state rests on a disk: the same curve, a bit-exact resume, and a checkpoint that moves."""
    disk = tmp_path / "nvme"
    place = {"device": "nvme", "nvme_path": str(disk), "pin_memory": False}
    (killed := disk / "tunesmith-of-a-killed-process").mkdir(parents=True)
    (tmp_path / "zero.json").write_text(json.dumps(
        {"zero_optimization": {"stage": 3, "sub_group_size": 600_000, "offload_optimizer": place}}
    ))  # fmt: skip
    inline = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file, timeout=900)
    assert re.search(r"offload +nvme\n", finished.output)
    assert not killed.exists()
    assert not list(disk.glob("tunesmith-*/")), "what was written is removed"
    assert curve(finished).agrees(reference("full", True))
    again = resumed(tmp_path / "again", 2, "full", finished.checkpoints[0], file)
    assert equal_after_resume(finished, again)
    moved = resumed(tmp_path / "moved", 2, "full", finished.checkpoints[0], "fsdp2")
    assert moved.series("loss") == pytest.approx(reference("full", True).losses[HALF:], abs=1e-5)


@pytest.mark.parametrize(
    ("least", "classes"),
    [
        (0, ["LlamaAttention", "LlamaMLP"]),
        (100_000, ["LlamaMLP"]),
        (150_000, ["LlamaDecoderLayer"]),
        (10_000_000, []),
    ],
)
def test_units_by_size(least: int, classes: list[str]) -> None:
    loss = LossModule(build_model(config("full", True)))
    assert _classes_by_size(loss, ["LlamaDecoderLayer"], least) == classes


@pytest.mark.parametrize(("precision", "fits"), [("no", True), ("bf16", False)])
def test_fsdp1_refuses_adapters_that_it_cannot_flatten(precision: str, fits: bool) -> None:
    targets = "embed_tokens,q_proj"
    settings = config("lora", True, lora_target_modules=targets, mixed_precision=precision)
    with (
        nullcontext() if fits else pytest.raises(ConfigError, match=r"fsdp1 cannot shard the adapter at .*embed_tokens")
    ):
        _refuse_odd_adapters(LossModule(build_model(settings)))


def test_weights_that_are_not_whole_are_seen() -> None:
    """Control: a rank that misses an element, and two that hold the same one."""
    ranks = Ranks(torch.device("cpu"))
    check_coverage([Shard("w", torch.Size([3]), 0, {WEIGHT: torch.zeros(3)})], ranks)
    with pytest.raises(TrainingError, match=r"w has 3 elements, the ranks hold \[2\] of them"):
        check_coverage([Shard("w", torch.Size([3]), 0, {WEIGHT: torch.zeros(2)})], ranks)


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "FSDP", fsdp_config=FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "LamaDecoderLayer"})
    refused = launch(tmp_path / "run", 2, options("full", True), strategy=file)
    assert refused.status != 0
    assert "fsdp_transformer_layer_cls_to_wrap=LamaDecoderLayer is not a layer class of llama" in refused.output
    assert "its layer classes are LlamaDecoderLayer" in refused.output
