"""A DeepSpeed JSON becomes a strategy: every key is used, kept or named, and the result passes the strict checks."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli import run_verb
from app.services.deepspeed_import import (
    FILE,
    JSON,
    OMITTED,
    OPTION,
    ImportedStrategy,
    import_deepspeed,
)
from app.services.json_leaves import leaves
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.strategy.deepspeed_rules import parse_json
from trainers.strategy.deepspeed_schema import GONE, DeepSpeedJson, ZeroOptimization
from trainers.strategy.strategy import load_strategy, strategy_names

AUTO_PARAMS = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
FILES: dict[str, dict[str, Any]] = {
    "transformers": {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": AUTO_PARAMS},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                     "warmup_num_steps": "auto"}},
    },
    "native": {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 100,
                                                          "total_num_steps": 5000, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "wall_clock_breakdown": True, "bf16": {"enabled": True},
    },
    "old": {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "_comment": {"who": "me"},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}},
        "sparse_attention": {"mode": "fixed"}, "progressive_layer_drop": {"enabled": True, "theta": 0.5},
        "curriculum_learning": {"enabled": False}, "typo": [1, 2],
    },
    "offload": {
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local", "pin_memory": True},
            "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 1e4, "bogus": 1,
        },
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "wandb": {"enabled": True, "project": "x"}, "tensorboard": {"enabled": False}, "gradient_clipping": 1,
    },
    "zero 0": {"zero_optimization": {"stage": 0}, "flops_profiler": {"enabled": True}, "aio": {}},
    "none": {"train_batch_size": 8},
    "first": {"zero_optimization": True, "gradient_accumulation_steps": 1},
    "tensor": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 1},
    "lion offloaded": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                       "optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99]}}},
    "lion": {"zero_optimization": {"stage": 1},
             "optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99], "weight_decay": "auto"}}},
}  # fmt: skip


def imported(content: dict[str, Any], processes: int | None = 4) -> ImportedStrategy:
    before = copy.deepcopy(content)
    result = import_deepspeed(content, processes)
    assert content == before
    return result


def lost(content: dict[str, Any], result: ImportedStrategy) -> Counter[str]:
    """Keys of the file that the result names less or more than once."""
    named = Counter(moved.key for moved in result.keys if not moved.key.endswith(" (absent)"))
    named.subtract(path for path, _ in leaves(content))
    return Counter({path: count for path, count in named.items() if count})


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_named_once_and_the_result_is_valid(name: str, tmp_path: Path) -> None:
    content = FILES[name]
    result = imported(content)
    assert not lost(content, result)
    assert {moved.target for moved in result.keys} <= {OPTION, FILE, JSON, OMITTED}
    assert all(moved.note for moved in result.keys)
    values = dict(result.accelerate)
    if result.deepspeed:
        (tmp_path / "ds.json").write_text(json.dumps(result.deepspeed))
        values["deepspeed_config"] = {**values["deepspeed_config"], "deepspeed_config_file": str(tmp_path / "ds.json")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    strategy = load_strategy(str(tmp_path / "mine.yaml"))
    assert not strategy.cautions(TrainConfig(model_name_or_path="x", dataset_name="y"))


def test_a_lost_key_would_be_seen() -> None:
    result = imported(FILES["native"])
    result.keys.pop(3)
    assert lost(FILES["native"], result)


def test_a_native_file_becomes_options() -> None:
    result = imported(FILES["native"], None)
    assert result.options == {
        "global_batch_size": 64, "per_device_train_batch_size": 4, "logging_steps": 10, "max_grad_norm": 0.5,
        "optim": "adamw", "learning_rate": 2e-4, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-7,
        "weight_decay": 3e-7, "lr_scheduler_type": "linear", "warmup_steps": 100, "max_steps": 5000,
        "mixed_precision": "bf16",
    }  # fmt: skip
    assert result.accelerate["num_processes"] == 2, "the steps follow from the processes"
    assert result.deepspeed == {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    }  # fmt: skip


def test_what_deepspeed_does_without_a_key_is_an_option_too() -> None:
    result = imported({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}})
    defaults = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 0.0}
    assert defaults.items() <= result.options.items()
    # transformers fills in "auto", so nothing is a default there
    assert imported(FILES["transformers"]).options == {"optim": "adamw", "lr_scheduler_type": "constant"}


def test_the_batch_follows_from_the_processes() -> None:
    assert imported(FILES["old"], 8).options["global_batch_size"] == 2 * 4 * 8
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu=2 x 4 .* add --num_processes"):
        imported(FILES["old"], None)
    with pytest.raises(ConfigError, match="train_batch_size=64 is not 4 rows x 3 micro-batches x 4 processes"):
        imported({**FILES["native"], "gradient_accumulation_steps": 3})
    micro = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    assert imported({**micro, "train_batch_size": "auto"}, 8).options["global_batch_size"] == 128
    derived = imported({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8).options
    assert (derived["global_batch_size"], derived["per_device_train_batch_size"]) == (64, 2)
    assert imported({**micro, "train_batch_size": 64}, None).accelerate["num_processes"] == 4
    [steps] = imported({"gradient_accumulation_steps": 8, "train_batch_size": "auto"}).keys[:1]
    assert (steps.target, "global_batch_size" in steps.note) == (OMITTED, True)
    with pytest.raises(ConfigError, match="num_processes=3 is no multiple of the 2 processes"):
        imported(FILES["tensor"], 3)


def test_only_what_a_json_must_say_stays_in_one() -> None:
    assert not imported(FILES["transformers"]).deepspeed
    assert imported(FILES["transformers"]).accelerate["deepspeed_config"]["zero_stage"] == 3
    assert imported(FILES["first"]).accelerate["deepspeed_config"]["zero_stage"] == 1
    assert imported(FILES["zero 0"]).accelerate["distributed_type"] == "MULTI_GPU"
    offload = imported(FILES["offload"]).deepspeed["zero_optimization"]
    assert offload["offload_param"] == {"pin_memory": True, "device": "cpu"}
    assert imported(FILES["old"]).accelerate["deepspeed_config"]["offload_optimizer_device"] == "cpu"
    assert not imported(FILES["lion"]).deepspeed
    assert imported(FILES["lion offloaded"]).deepspeed["optimizer"]["type"] == "Lion"


def test_lion_becomes_an_option_unless_deepspeed_offloads_it() -> None:
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 3e-5, "weight_decay": 0.1, "betas": [0.8, 0.95]}}}
    own = {"optim": "lion", "learning_rate": 3e-5, "weight_decay": 0.1, "lion_beta1": 0.8, "lion_beta2": 0.95}
    for zero in ({}, {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2, "cpu_offload": False}}):
        assert own.items() <= imported({**lion, **zero}).options.items()
    for section in ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}):
        result = imported({**lion, "zero_optimization": {"stage": 2, **section}})
        assert {"learning_rate": 3e-5, "weight_decay": 0.1}.items() <= result.options.items()
        assert not {"optim", "lion_beta1"} & result.options.keys()
        assert result.deepspeed["optimizer"] == {"type": "Lion", "params": {"betas": [0.8, 0.95]}}
    with pytest.raises(ConfigError, match=r"optimizer.params.betas='x' is not a pair"):
        imported({"optimizer": {"type": "Lion", "params": {"betas": "x"}}})
    with pytest.raises(ConfigError, match=r"optimizer\.type=Lamb"):
        imported({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 2}})


def test_a_decay_ends_where_deepspeed_ends_it() -> None:
    params = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-4, "total_num_steps": 100, "warmup_num_steps": 5}
    options = imported({"scheduler": {"type": "WarmupDecayLR", "params": params}}).options
    assert options["min_lr_ratio"] == pytest.approx(0.1)


def test_sizes_of_the_mesh_move_into_the_accelerate_file() -> None:
    sizes = imported(FILES["tensor"], 8).accelerate["parallelism_config"]
    assert sizes == {"parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": 2}


def test_what_deepspeed_removed_is_named_with_what_replaces_it() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    zero = {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | zero <= set(GONE)
    notes = {moved.key: moved.note for moved in imported(FILES["old"]).keys}
    assert "--strategy cp or sp" in notes["sparse_attention.mode"]
    assert "removed from DeepSpeed" in notes["progressive_layer_drop.theta"]
    assert notes["curriculum_learning.enabled"] == "it is off"
    assert "--ddp_comm_hook bf16" in notes["optimizer.type"]
    assert "unknown DeepSpeed key typo" in notes["typo"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage"),
        ({"zero_optimization": 3}, "zero_optimization=3 is not a section"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer='cpu' is not a section"),
        ({"fp16": True}, "fp16=True is not a section"),
        ({"optimizer": "adam"}, "optimizer='adam' is not a section"),
        ({"train_batch_size": 0}, "train_batch_size=0 is not a whole number"),
        ({"train_batch_size": True}, "train_batch_size=True is not"),
        ({"train_batch_size": 1e30}, "train_batch_size=1e.30 is not"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "learning_rate=-1"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "Adam with L2"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "betas=0.9 is not a pair"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "many"}}}, "warmup_steps="),
    ],
)
def test_nonsense_is_refused_by_name(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(content)


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**10), st.floats(), st.text(max_size=5), st.just("auto"), st.just({}),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip
_KEYS = sorted([*DeepSpeedJson.model_fields, *(f"zero_optimization.{name}" for name in ZeroOptimization.model_fields)])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.sampled_from([*_KEYS, *GONE, "other"]), _VALUES)
def test_any_value_of_any_key_is_used_or_refused(name: str, path: str, value: Any) -> None:
    content = copy.deepcopy(FILES[name])
    *sections, key = path.split(".")
    section = content
    for each in sections:
        if not isinstance(section.get(each), dict):
            section[each] = {}
        section = section[each]
    section[key] = value
    try:
        result = imported(content)
    except ConfigError:
        return
    assert not lost(content, result)
    if result.deepspeed:
        parse_json(result.deepspeed)


def test_the_verb_writes_the_files_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "ds_config.json"
    source.write_text(json.dumps(FILES["native"]))
    assert run_verb(["strategies", "import", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"files", "options", "keys", "command"} == set(document)
    assert "--config ds_config-options.yaml --strategy ds_config.yaml" in document["command"]
    strategy = load_strategy("ds_config.yaml")
    assert (strategy.zero_stage, strategy.deepspeed_json["zero_optimization"]["overlap_comm"]) == (2, True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run_verb(["strategies", "import", str(source)]) == 2
    assert "exists; use --output" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stage": 9}}')
    for words in (["--output", "fsdp2.yaml"], ["--output", "x.json"], ["--output", "no/where.yaml"]):
        assert run_verb(["strategies", "import", str(source), *words]) == 2
    assert run_verb(["strategies", "import", "bad.json"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "bad.json"} == before


def test_a_json_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="nested too deeply"):
        import_deepspeed(deep)


def test_a_file_is_described_with_the_line_that_starts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2}))
    assert run_verb(["strategies", str(file)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"--strategy {file}")


def test_the_verb_refuses_what_it_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["import"], ["nowhere"], ["ddp", "x"], ["ddp", "--num_processes", "2"], ["import", "/no/x.json"]):
        assert run_verb(["strategies", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("name", strategy_names())
def test_each_strategy_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["strategies", name, "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert any(line.startswith("Use it when") for line in about["about"])
    assert any("Communication" in line for line in about["about"])
    # The picture, cell by cell, and the formulas are the same account.
    for line, row in zip(about["picture"][1:], about["memory"], strict=True):
        use, *ranks = line.split()
        held = {rank.count("█") / len(rank) for rank in ranks}
        each = {"weights": 4, "gradients": 4, "optimizer": 8}[use] + 4 * (use == "optimizer" and "zero" in name)
        share = row["gb"] / 7 / each
        if name == "ep":  # one of five cells is not divided; of the weights, 7 %
            assert share == pytest.approx(0.07 + 0.93 / 2)
            share = 3 / 5
        assert held == {share}
        assert {cell for rank in ranks for cell in range(len(rank)) if rank[cell] == "█"} == set(range(len(ranks[0])))
    assert (about["traffic"] == []) == (name == "single")
