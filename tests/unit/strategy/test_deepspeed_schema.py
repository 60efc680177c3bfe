"""A DeepSpeed JSON is read as strictly as the YAML that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.services.deepspeed_import import import_deepspeed
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import MAX_BYTES
from trainers.strategy.deepspeed_rules import (
    drop_without_effect,
    leaves_parity,
    parse_json,
    read_json,
)
from trainers.strategy.deepspeed_schema import (
    OPTIMIZERS,
    UNTRIED,
    Bf16,
    DeepSpeedJson,
    Fp16,
    LeafModule,
    OffloadOptimizer,
    OffloadParam,
    ZeroOptimization,
)
from trainers.strategy.schema import Section, parse
from trainers.strategy.strategy import cannot_run, load_strategy, resolve

ZERO2: dict[str, Any] = {"stage": 2}


def content(*, zero: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {**ZERO2, **(zero or {})}, **keys}


AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
# As in transformers' ds_config_zero3.json.
WARMUP: dict[str, Any] = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}


def adam(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return content(optimizer={"type": kind, "params": AUTO | params})


NVME = {"device": "nvme", "nvme_path": "/nvme"}
CPU = {"device": "cpu"}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "zero_optimization.stage is missing; write 1, 2 or 3"),
    ({"zero_optimization": {}}, "zero_optimization.stage is missing"),
    (
        content(zero={"stage": 0}),
        "zero_optimization.stage=0 is refused: ZeRO stages are 1, 2 and 3; write one as a number",
    ),
    (
        content(zero={"stage": "auto"}),
        "zero_optimization.stage='auto' is refused: ZeRO stages are",
    ),
    (
        content(zero_optimisation={}),
        "zero_optimisation: unknown DeepSpeed key zero_optimisation; did you mean zero_optimizat",
    ),
    (
        content(sparse_attention={"mode": "fixed"}),
        "sparse_attention: removed from DeepSpeed; remove it; long rows: --strategy cp or sp, and packing; see docs/",
    ),
    (
        content(zero={"stage": 3, "mics_shard_size": 2}),
        "zero_optimization.mics_shard_size: removed from DeepSpeed; remove it; shards within groups: --strategy hsdp",
    ),
    (
        content(zero={"overlap_com": True}),
        "zero_optimization.overlap_com: unknown DeepSpeed key overlap_com; did you mean ov",
    ),
    (
        content(zero={"offload_optimizer": {"device": "cpu", "pin_memry": True}}),
        "zero_optimization.offload_optimizer.pin_memry: unknown DeepSpeed key pin_memry; did you mean pin_memory?",
    ),
    (
        content(zero={"max_live_parameters": 1}),
        "zero_optimization.max_live_parameters: the DeepSpeed key has a prefix; writ",
    ),
    (
        content(zero={"cpu_offload": True}),
        "zero_optimization.cpu_offload=true is refused: DeepSpeed has renamed it; write offload",
    ),
    (
        content(zero={"round_robin_gradients": True}),
        "zero_optimization.round_robin_gradients=true is refused: its layout is not the one that DeepSpeed reports",
    ),
    (content(zero={"zenflow": {}}), "zero_optimization.zenflow is refused: it steps with stale gradients"),
    (content(zero={"overlap_comm": "yes"}), "zero_optimization.overlap_comm='yes' is refused; write true or false"),
    (
        content(zero={"reduce_bucket_size": "big"}),
        "zero_optimization.reduce_bucket_size='big' is refused; write a number, or 'auto'",
    ),
    (
        content(zero={"reduce_bucket_size": -1}),
        "zero_optimization.reduce_bucket_size=-1 is refused; write at least 1, or",
    ),
    (
        content(zero={"compute_grad_norm": False}),
        "zero_optimization.compute_grad_norm=false is refused: the gradient norm",
    ),
    (
        content(zero={"offload_param": {"device": "cpu"}}),
        "zero_optimization.offload_param needs stage 3, not 2; remove it",
    ),
    (
        content(zero={"offload_optimizer": {"device": "gpu"}}),
        "zero_optimization.offload_optimizer.device='gpu' is refused; write 'none', 'cpu' or 'nvme'",
    ),
    (
        content(zero={"offload_optimizer": {"device": "nvme"}, "stage": 3}),
        "zero_optimization.offload_optimizer.device=nvme n",
    ),
    (
        content(zero={"offload_optimizer": NVME}),
        "zero_optimization.offload_optimizer.device=nvme is treated as cpu under stag",
    ),
    (
        content(zero={"stage": 3, "offload_param": NVME}),
        "zero_optimization.offload_param.device=nvme: it could not be checkpointed; write cpu",
    ),
    (
        content(zero={"offload_optimizer": {"ratio": 0.5}}),
        "zero_optimization.offload_optimizer.ratio=0.5 needs stage 3",
    ),
    (
        content(train_batch_size=8),
        'train_batch_size=8 is refused: the batch follows from global_batch_size; write "auto"',
    ),
    (content(train_micro_batch_size_per_gpu=8), "train_micro_batch_size_per_gpu=8 is refused: the batch follows from"),
    (content(gradient_accumulation_steps=1), "gradient_accumulation_steps=1 is refused: the batch follows from"),
    (
        content(gradient_clipping=1.0),
        "gradient_clipping=1.0 is refused: max_grad_norm of the config sets gradient clipping",
    ),
    (content(bf16={"enabled": True}), "bf16.enabled=true is refused: it would break the compute rule"),
    (content(fp16={"enabled": True}), "fp16.enabled=true is refused: it would break the compute rule"),
    (content(bf16={"enable": "auto"}), "bf16.enable: unknown DeepSpeed key enable; did you mean enabled?"),
    (content(amp={"enabled": True}), "amp is refused: it would break the compute rule"),
    (content(torch_autocast={"enabled": True}), "torch_autocast is refused: it would break the compute rule"),
    (
        content(data_types={"grad_accum_dtype": "bf16"}),
        "data_types.grad_accum_dtype='bf16' is refused: gradients are summed",
    ),
    (content(amp={"opt_level": "O1"}), "amp is refused: it would break the compute rule"),
    (
        content(prescale_gradients=True),
        "prescale_gradients=true is refused: ZeRO asserts at launch that it is off; remove it",
    ),
    (content(gradient_predivide_factor=2.0), "gradient_predivide_factor=2.0 is refused: ZeRO asserts at launch"),
    (content(zero={"_comment": "big"}), "zero_optimization._comment: JSON has no comments; remove it"),
    (adam(_comment="big"), "optimizer.params._comment: JSON has no comments; remove it"),
    (
        content(scheduler={**WARMUP, "params": WARMUP["params"] | {"warmup_num_steps": 10}}),
        "scheduler is refused: the script sets the learning rate at each step; remove it and use lr_scheduler_type",
    ),
    (content(scheduler={**WARMUP, "x": 1}), "scheduler is refused"),
    (content(scheduler={"type": "WarmupLR", "params": {}}), "scheduler is refused"),
    (content(scheduler={"type": "WarmupLR"}), "scheduler is refused: the script sets the learning rate at each step"),
    (
        content(gradient_allreduce_op="sum"),
        "gradient_allreduce_op='sum' is refused: the loss is scaled for a mean over ran",
    ),
    (
        content(activation_checkpointing={}),
        "activation_checkpointing is refused: the script recomputes by itself; use gradient_checkp",
    ),
    (content(tensor_parallel={"autotp_size": 2}), "tensor_parallel is refused: DeepSpeed's AutoTP splits"),
    (
        content(expert_parallel={"enabled": True}),
        "expert_parallel is refused: DeepSpeed would need a model",
    ),
    (
        {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
        "zero_optimization.zero_hpz_partition_size=2 needs stage 3, not 2; remove it",
    ),
    (
        {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients=true needs stage 3, not 1; remove it",
    ),
    (content(data_efficiency={"enabled": True}), "data_efficiency is refused: the batch of each step is the script's"),
    (
        content(wandb={"enabled": True}),
        "wandb is refused: the run writes its own metrics; remove it and use",
    ),
    (content(optimizer={}), "optimizer.type is missing; write one of adam, adamw"),
    (
        content(optimizer={"type": "SGD"}),
        "optimizer.type=SGD is not one of DeepSpeed's own optimizers; write one of adam, adamw",
    ),
    (
        content(optimizer={"type": "OneBitAdam"}),
        "optimizer.type=OneBitAdam was removed in DeepSpeed 0.19; write one of adam",
    ),
    (content(optimizer={"kind": "Adam"}), "optimizer.kind: unknown DeepSpeed key kind"),
    (content(optimizer={"type": "Muon"}), "optimizer.type=Muon is not supported, as checkpoints were never run with"),
    (content(optimizer={"type": "adagrad"}), "optimizer.type=adagrad is not supported, as checkpoints were never run"),
    (content(optimizer={"type": "Lamb"}), "optimizer.type=Lamb is not supported, as checkpoints were never run with"),
    (adam(lr=1e-4), 'optimizer.params.lr=0.0001 is refused: learning_rate of the config decides; write "auto"'),
    (
        adam(betas=[0.9, 0.95]),
        'optimizer.params.betas=[0.9, 0.95] is refused: adam_beta1 and adam_beta2 of the config decide; write "auto"',
    ),
    (adam("Adam", eps=1e-8), 'optimizer.params.eps=1e-08 is refused: adam_epsilon of the config decides; write "auto"'),
    (
        adam(weight_decay=0),
        'optimizer.params.weight_decay=0 is refused: weight_decay of the config decides; write "auto"',
    ),
    (adam(weight_decay=True), "optimizer.params.weight_decay=true is refused: weight_decay of the config decides"),
    (adam(adam_w_mode=False), "optimizer.params.adam_w_mode=false is refused: Adam with L2 is another optimizer"),
    (adam("Adam", adam_w_mode=False), "optimizer.params.adam_w_mode=false is refused: Adam with L2 is another opt"),
    (adam(torch_adam="auto"), "optimizer.params.torch_adam='auto' is refused; write true or false"),
    (adam(nosuch=1), "optimizer.params.nosuch: unknown DeepSpeed key nosuch; remove the line"),
    (adam(weight_deay=0.1), "optimizer.params.weight_deay: unknown DeepSpeed key weight_deay; did you mean weight_d"),
    (adam(momentum="auto"), "optimizer.params.momentum: unknown DeepSpeed key momentum"),
    (adam("Lion", eps="auto"), "optimizer.params.eps: unknown DeepSpeed key eps"),
    (
        content(optimizer={"type": "Lion", "params": {"betas": [0.9]}}),
        "optimizer.params.betas=[0.9] is refused: it is not a pair",
    ),
    (
        content(optimizer={"type": "AdamW", "params": {"eps": "auto"}}),
        'optimizer.params.betas is missing, and DeepSpeed would use its own default; write "auto"',
    ),
]


@pytest.mark.parametrize(("values", "line"), WRONG, ids=[line[:60] for _, line in WRONG])
def test_a_wrong_json_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(values)
    assert len(caught.value.mistakes) == 1, caught.value.lines
    assert str(caught.value).startswith(f"DeepSpeed JSON: {line}")


MAY_BE_OFF = (
    *("amp", "torch_autocast", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("hybrid_engine", "autotuning", "data_efficiency"),
)
RIGHT: dict[str, dict[str, Any]] = {
    "small": content(),
    "as written by many": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": AUTO},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
    "adam": adam("Adam", torch_adam=True, adam_w_mode=True),
    "nothing scheduled": content(scheduler={}),
    "scheduled by the script": content(scheduler=WARMUP),
    "comments at the top": content(_comment="ZeRO 2", _scheduler={"type": "WarmupLR"}),
    "not scaled": content(prescale_gradients=False, gradient_predivide_factor=1.0),
    "off": content(
        **{name: {"enabled": False, "more": 1} for name in MAY_BE_OFF},
        comms_logger={"enabled": False, "verbose": False},
    ),
    "nvme": content(zero={"stage": 3, "offload_param": CPU, "offload_optimizer": NVME}, aio={"block_size": 1}),
    "another optimizer": content(optimizer={"type": "Lion", "params": {"betas": [0.9, 0.99]}}),
    "quantised": content(zero={"stage": 3, "zero_quantized_weights": True}, communication_data_type="bf16"),
}


@pytest.mark.parametrize("values", RIGHT.values(), ids=RIGHT)
def test_a_right_json_has_no_mistakes(values: dict[str, Any]) -> None:
    """The negative control of all cases above."""
    parse_json(values)


def test_what_asks_for_nothing_does_not_reach_deepspeed() -> None:
    """DeepSpeed 0.19 stops at `amp` even when it is off, and at a scheduler of "auto"s."""
    settings = {**RIGHT["off"], **RIGHT["scheduled by the script"], "_comment": "x", "aio": None}
    drop_without_effect(settings)
    assert settings == content(comms_logger={"enabled": False, "verbose": False}, _comment="x")


def test_what_leaves_parity_is_named() -> None:
    assert leaves_parity(RIGHT["quantised"]) == ["zero_quantized_weights=true", "communication_data_type=bf16"]
    assert leaves_parity(RIGHT["another optimizer"]) == ["DeepSpeed's optimizer Lion"]
    assert leaves_parity(RIGHT["as written by many"]) == leaves_parity(RIGHT["small"]) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is not plain JSON"),
        ("// words\n{}", "is not plain JSON"),
        ('{"a": 1, "a": 2}', "is not plain JSON: duplicate key 'a'; write one object"),
        ('{"a": {"b": 1, "b": 2}}', "is not plain JSON: duplicate key 'b'"),
        ('{"steps_per_print": Infinity}', "is not plain JSON: Infinity is not a number in JSON"),
        ("[1]", "holds a list; write one object"),
        ("[" * 100_000, "is not plain JSON"),
        ("{" + " " * MAX_BYTES + "}", "is larger than 1000000 bytes"),
    ],
    ids=["empty", "comment", "twice", "twice inside", "infinite", "list", "deep", "large"],
)
def test_a_file_that_is_no_plain_json_is_refused(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_json(str(path))
    assert str(caught.value).startswith(f"deepspeed_config_file={path} {line}")


@pytest.mark.timeout(20)  # each key compared with each other one took minutes
def test_a_file_of_many_keys_is_answered_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    keys = [f'"k{number}":1' for number in range(80_000)]
    path.write_text("{" + ",".join(keys) + "}")
    assert len(read_json(str(path))) == len(keys)
    path.write_text("{" + ",".join([*keys, '"k0":2']) + "}")
    with pytest.raises(ConfigError, match="duplicate key 'k0'"):
        read_json(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    line = r"cannot read deepspeed_config_file=.*none.json: No such file or directory; a relative path counts"
    with pytest.raises(ConfigError, match=line):
        read_json(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="is not a regular file; name a DeepSpeed JSON"):
        read_json(str(tmp_path))


def strategy_file(folder: Path, values: dict[str, Any], **others: Any) -> str:
    """A YAML in the folder, and beside it the JSON that it names by its bare name."""
    (folder / "ds.json").write_text(json.dumps(values))
    inline = {"deepspeed_config_file": "ds.json", **others.pop("inline", {})}
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": inline, **others}
    (folder / "mine.yaml").write_text(yaml.safe_dump(document))
    return str(folder / "mine.yaml")


def test_a_strategy_with_a_json_keeps_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = RIGHT["as written by many"]
    monkeypatch.chdir(tmp_path)
    strategy = resolve(load_strategy(strategy_file(tmp_path, values, inline={"zero3_init_flag": False})), 4, "bf16")
    assert (strategy.zero_stage, strategy.offload, strategy.sharded) == (3, "cpu", True)
    assert strategy.deepspeed_json == values
    assert "mixed_precision" not in strategy.values  # Accelerate refuses it there
    (tmp_path / "run").mkdir()
    copy = tmp_path / "run" / "accelerate.yaml"
    copy.write_text(strategy.dump())
    monkeypatch.chdir("/")
    again = load_strategy(str(copy))
    assert (again.values, again.deepspeed_json) == (strategy.values, values)
    assert again.deepspeed["deepspeed_config_file"] == str(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("values", "others", "line"),
    [
        (
            content(),
            {"inline": {"zero_stage": 2}},
            "deepspeed_config.zero_stage beside deepspeed_config_file is refused by",
        ),
        (
            content(),
            {"inline": {"gradient_clipping": "auto"}},
            "deepspeed_config.gradient_clipping beside deepspeed_con",
        ),
        (
            content(),
            {"mixed_precision": "bf16"},
            "mixed_precision=bf16 beside deepspeed_config_file is refused by Accele",
        ),
        (content(zero={"stage": 3}), {}, "deepspeed_config.zero3_init_flag is missing, and Accelerate would use true"),
        (content(scheduler={"type": "WarmupLR"}), {}, "DeepSpeed JSON: scheduler is refused"),
        (
            content(zero={"stage": 3, "zero_hpz_partition_size": 2}),
            {"num_processes": 3, "inline": {"zero3_init_flag": False}},
            "zero_hpz_partition_size=2 does not divide num_processes=3; write how many",
        ),
        (
            content(zero={"stage": 3, "zero_hpz_partition_size": 2}),
            {
                "num_processes": 8,
                "inline": {"zero3_init_flag": False},
                "parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": 2},
            },
            "zero_hpz_partition_size: DeepSpeed takes its groups from all ranks, and not",
        ),
        (
            content(zero={"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}),
            {"inline": {"zero3_init_flag": False}},
            "DeepSpeed JSON: zero_optimization.zero_hpz_partition_size: a second copy of",
        ),
    ],
)
def test_yaml_and_json_that_do_not_fit_are_refused(
    values: dict[str, Any], others: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_strategy(strategy_file(tmp_path, values, **others))
    assert str(caught.value).startswith(f"mine.yaml: {line}")
    assert len(caught.value.lines) == 1


def test_quantised_collectives_are_allowed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = RIGHT["quantised"]
    strategy = load_strategy(strategy_file(tmp_path, values, inline={"zero3_init_flag": False}))
    assert strategy.outside_parity() == ["zero_quantized_weights=true", "communication_data_type=bf16"]
    assert cannot_run(strategy, "full", has_gpu=True) is None
    reason = str(cannot_run(strategy, "full", has_gpu=False))
    assert reason.startswith("zero_quantized_weights of ZeRO++ needs DeepSpeed's CUDA kernels, but there is no GPU")


DEEPSPEEDS = """
import json
from deepspeed.monitor.config import get_monitor_config
from deepspeed.runtime import config, precision_config
from deepspeed.runtime.zero import config as zero, leaf_module_config as leaf, offload_config as offload
from deepspeed.ops import adam, lion
from inspect import signature
from torch.optim import AdamW
def shared(*kinds):
    return sorted(set.intersection(*(set(signature(kind.__init__).parameters) for kind in kinds)) - {"self"})
models = {
    "zero": zero.DeepSpeedZeroConfig,
    "offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
    "offload_param": offload.DeepSpeedZeroOffloadParamConfig,
    "leaf_module": leaf.DeepSpeedZeroLeafModuleConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
}
keys = {name: sorted(f.alias or key for key, f in model.model_fields.items()) for name, model in models.items()}
removed = sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
keys["adam"] = [key for key in shared(adam.FusedAdam, adam.DeepSpeedCPUAdam, AdamW) if key != "amsgrad"]
values = [-1, 0, 1, 2, 0.5, 1e9, float("inf"), True, "text", [], {}]
def refuses(model, key, value):
    try:
        model(**{key: value})
    except Exception:
        return True
    return False
refused = [[name, key, value] for name in ("zero", "offload_optimizer", "offload_param", "leaf_module")
           for key in keys[name] for value in values if refuses(models[name], key, value)]
kinds = lion.FusedLion, lion.DeepSpeedCPULion
keys["lion"] = shared(*kinds)
names = "lr", "betas", "weight_decay"
keys["lion_defaults"] = [[signature(kind).parameters[name].default for name in names] for kind in kinds]
print("KEYS" + json.dumps({**keys, "optimizers": config.DEEPSPEED_OPTIMIZERS, "removed": removed, "refused": refused}))
"""


@pytest.fixture(scope="module")
def deepspeeds() -> dict[str, Any]:
    """What the DeepSpeed that is installed takes, asked in a process of its own."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEEDS], capture_output=True, text=True, check=True, env=environment
    )
    keys: dict[str, Any] = json.loads(done.stdout.partition("KEYS")[2])
    return keys


MODELS: dict[str, type[Section]] = {
    "zero": ZeroOptimization,
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
    "leaf_module": LeafModule,
    "fp16": Fp16,
    "bf16": Bf16,
    "lion": OPTIMIZERS["lion"],
}


def test_a_value_that_deepspeed_refuses_is_refused_before_the_launch(deepspeeds: dict[str, Any]) -> None:
    assert len(deepspeeds["refused"]) > 100
    for name, key, value in deepspeeds["refused"]:
        with pytest.raises(ConfigError):
            parse(MODELS[name], {key: value})


def test_an_import_takes_lions_defaults(deepspeeds: dict[str, Any]) -> None:
    content = {"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 2}}
    options = import_deepspeed(content, 2).options
    taken = [options["learning_rate"], [options["lion_beta1"], options["lion_beta2"]], options["weight_decay"]]
    assert deepspeeds["lion_defaults"] == [taken, taken]


def test_the_keys_are_deepspeeds_own(deepspeeds: dict[str, Any]) -> None:
    """Fails when a new DeepSpeed reads another key, or no longer reads one of these."""
    keys = deepspeeds
    assert {name: sorted(model.model_fields) for name, model in MODELS.items()} == {name: keys[name] for name in MODELS}
    assert {*OPTIMIZERS["adam"].model_fields} - {"torch_adam", "adam_w_mode"} == set(keys["adam"])
    needing_mup = {"muadam", "muadamw", "musgd"}
    assert {*OPTIMIZERS, *UNTRIED} == set(keys["optimizers"]) - needing_mup
    accepted = {name for name, field in DeepSpeedJson.model_fields.items() if field.annotation is not Any}
    assert "zero_optimization" in accepted
    assert not accepted & set(keys["removed"])
