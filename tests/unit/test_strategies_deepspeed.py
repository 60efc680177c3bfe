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

from trainers.config import ConfigError
from trainers.deepspeed_json import (
    JSON,
    MAX_JSON_BYTES,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    OPTIMIZERS,
    ZERO,
    json_mistakes,
    leaves_parity,
    read_json,
)
from trainers.strategies import load_strategy, resolve

ZERO2: dict[str, Any] = {"stage": 2}


def content(*, zero: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {**ZERO2, **(zero or {})}, **keys}


def adam(**params: Any) -> dict[str, Any]:
    return content(optimizer={"type": "AdamW", "params": params})


NVME = {"device": "nvme", "nvme_path": "/nvme"}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "zero_optimization.stage is missing; write 1, 2 or 3"),
    ({"zero_optimization": {}}, "zero_optimization.stage is missing"),
    (
        content(zero={"stage": 0}),
        "zero_optimization.stage=0 is refused: ZeRO has the stages 1, 2 and 3; stage 0 is the ddp",
    ),
    (content(zero={"stage": "auto"}), "zero_optimization.stage='auto' is a str; write a int"),
    (
        content(zero_optimisation={}),
        "zero_optimisation: unknown DeepSpeed key zero_optimisation; did you mean zero_optimizat",
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
        "zero_optimization.cpu_offload is refused: DeepSpeed has renamed it; write offload",
    ),
    (content(zero={"zenflow": {}}), "zero_optimization.zenflow is refused: it steps with gradients that are late"),
    (content(zero={"overlap_comm": "yes"}), "zero_optimization.overlap_comm='yes' is a str; write a bool"),
    (
        content(zero={"reduce_bucket_size": "big"}),
        "zero_optimization.reduce_bucket_size='big' is a str; write a int or flo",
    ),
    (content(zero={"reduce_bucket_size": -1}), "zero_optimization.reduce_bucket_size=-1 must be at least 0"),
    (
        content(zero={"compute_grad_norm": False}),
        "zero_optimization.compute_grad_norm=False is refused: the gradient norm",
    ),
    (
        content(zero={"offload_param": {"device": "cpu"}}),
        "zero_optimization.offload_param needs stage 3, not 2; remove it",
    ),
    (
        content(zero={"offload_optimizer": {"device": "gpu"}}),
        "zero_optimization.offload_optimizer.device='gpu' is not one o",
    ),
    (
        content(zero={"offload_optimizer": {"device": "nvme"}, "stage": 3}),
        "zero_optimization.offload_optimizer.device=nvme n",
    ),
    (
        content(zero={"offload_optimizer": NVME}),
        "zero_optimization.offload_optimizer.device=nvme is taken for cpu under stag",
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
        "gradient_clipping=1.0 is refused: max_grad_norm of the config says where to clip",
    ),
    (content(bf16={"enabled": True}), "bf16.enabled=True is refused: it would leave the compute rule"),
    (content(fp16={"enabled": True}), "fp16.enabled=True is refused: it would leave the compute rule"),
    (content(bf16={"enable": "auto"}), "bf16.enable: unknown DeepSpeed key enable; did you mean enabled?"),
    (content(amp={"enabled": True}), "amp is refused: it would leave the compute rule"),
    (content(torch_autocast={"enabled": True}), "torch_autocast is refused: it would leave the compute rule"),
    (
        content(data_types={"grad_accum_dtype": "bf16"}),
        "data_types.grad_accum_dtype='bf16' is refused: gradients are summed",
    ),
    (content(scheduler={"type": "WarmupLR"}), "scheduler is refused: the script sets the learning rate at each step"),
    (
        content(gradient_allreduce_op="sum"),
        "gradient_allreduce_op='sum' is refused: the loss is scaled for a mean over ran",
    ),
    (
        content(activation_checkpointing={}),
        "activation_checkpointing is refused: use gradient_checkpointing: true in the con",
    ),
    (content(tensor_parallel={"autotp_size": 2}), "tensor_parallel is refused: this parallelism is not supported yet"),
    (content(wandb={"enabled": True}), "wandb is refused: use report_to in the config"),
    (content(optimizer={}), "optimizer.type is missing; write one of adam, adamw"),
    (
        content(optimizer={"type": "SGD"}),
        "optimizer.type=SGD is no optimizer of DeepSpeed's own; use one of adam, adamw",
    ),
    (
        content(optimizer={"type": "OneBitAdam"}),
        "optimizer.type=OneBitAdam is gone from DeepSpeed 0.19; use one of adam",
    ),
    (content(optimizer={"kind": "Adam"}), "optimizer.kind: unknown DeepSpeed key kind"),
    (adam(eps="small"), "optimizer.params.eps='small' is a str; write a number, true, false or \"auto\""),
    (adam(betas=[0.9, "b"]), "optimizer.params.betas=[0.9, 'b'] is a list; write a number"),
    (adam(momentum="auto"), 'optimizer.params.momentum="auto" has no value in the config; write a number'),
    (adam(lr=1e-4), 'optimizer.params.lr=0.0001 is not used, learning_rate of the config is; write "auto"'),
]


@pytest.mark.parametrize(("values", "line"), WRONG, ids=[line[:60] for _, line in WRONG])
def test_a_wrong_json_is_refused(values: dict[str, Any], line: str) -> None:
    found = json_mistakes(values)
    assert len(found) == 1, found
    assert found[0].startswith(f"DeepSpeed JSON: {line}")


RIGHT: dict[str, dict[str, Any]] = {
    "small": content(),
    "as written by many": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}},
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
    "nvme": content(zero={"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}, aio={"block_size": 1}),
    "another optimizer": content(optimizer={"type": "Lion", "params": {"betas": [0.9, 0.99]}}),
    "quantised": content(zero={"stage": 3, "zero_quantized_weights": True}, communication_data_type="bf16"),
}


@pytest.mark.parametrize("values", RIGHT.values(), ids=RIGHT)
def test_a_right_json_has_no_mistakes(values: dict[str, Any]) -> None:
    """The negative control of all cases above."""
    assert json_mistakes(values) == []


def test_what_leaves_parity_is_named() -> None:
    assert leaves_parity(RIGHT["quantised"]) == ["zero_quantized_weights=true", "communication_data_type=bf16"]
    assert leaves_parity(RIGHT["another optimizer"]) == ["DeepSpeed's optimizer Lion"]
    assert leaves_parity(RIGHT["as written by many"]) == leaves_parity(RIGHT["small"]) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is no plain JSON"),
        ("// words\n{}", "is no plain JSON"),
        ('{"a": 1, "a": 2}', "is no plain JSON: key 'a' stands twice; write one object"),
        ('{"a": {"b": 1, "b": 2}}', "is no plain JSON: key 'b' stands twice"),
        ('{"steps_per_print": Infinity}', "is no plain JSON: Infinity is no number in JSON"),
        ("[1]", "holds a list; write one object"),
        ("[" * 100_000, "is no plain JSON"),
        ("{" + " " * MAX_JSON_BYTES + "}", "is larger than 1000000 bytes"),
    ],
    ids=["empty", "comment", "twice", "twice inside", "infinite", "list", "deep", "large"],
)
def test_a_file_that_is_no_plain_json_is_refused(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_json(str(path))
    assert str(caught.value).startswith(f"deepspeed_config_file={path} {line}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none.json cannot be read: No such file or directory; a relative path counts"
    ):
        read_json(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="is no regular file; name a DeepSpeed JSON"):
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
        (content(zero={"stage": 3}), {}, "deepspeed_config.zero3_init_flag is missing, and Accelerate would take true"),
        (content(scheduler={}), {}, "DeepSpeed JSON: scheduler is refused"),
    ],
)
def test_yaml_and_json_that_do_not_fit_are_refused(
    values: dict[str, Any], others: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_strategy(strategy_file(tmp_path, values, **others))
    assert str(caught.value).startswith(f"mine.yaml: {line}")
    assert len(caught.value.mistakes) == 1


def test_quantised_collectives_are_allowed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = RIGHT["quantised"]
    strategy = load_strategy(strategy_file(tmp_path, values, inline={"zero3_init_flag": False}))
    assert strategy.outside_parity() == ["zero_quantized_weights=true", "communication_data_type=bf16"]


DEEPSPEEDS = """
import json
from deepspeed.monitor.config import get_monitor_config
from deepspeed.runtime import config, precision_config
from deepspeed.runtime.zero import config as zero, leaf_module_config as leaf, offload_config as offload
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
print("KEYS" + json.dumps({**keys, "optimizers": config.DEEPSPEED_OPTIMIZERS, "removed": removed}))
"""


def test_the_keys_are_deepspeeds_own() -> None:
    """Fails when a new DeepSpeed reads another key, or no longer reads one of these."""
    pytest.importorskip("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEEDS], capture_output=True, text=True, check=True, env=environment
    )
    keys = json.loads(done.stdout.partition("KEYS")[2])
    assert sorted(ZERO) == keys["zero"]
    assert sorted(OFFLOAD_OPTIMIZER) == keys["offload_optimizer"]
    assert sorted(OFFLOAD_PARAM) == keys["offload_param"]
    for name, known in (("fp16", JSON["fp16"]), ("bf16", JSON["bf16"]), ("leaf_module", ZERO["leaf_module"])):
        assert sorted(known.inside or {}) == keys[name]
    needing_mup = {"muadam", "muadamw", "musgd"}
    assert set(OPTIMIZERS) == set(keys["optimizers"]) - needing_mup
    accepted = {key for key, known in JSON.items() if known.types}
    assert not accepted & set(keys["removed"])
