"""What a strategy cannot split is refused by `--check`, in the sentence in which a rank would refuse it later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.families import config_for, save_small
from tests.parity.runs import mostly_long
from trainers import build
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh
from trainers.strategy.mesh_options import with_sizes
from trainers.strategy.strategy import Strategy, load_strategy, resolve
from trainers.tools.preflight import check

CPU = torch.device("cpu")


def config_of(folder: Path, family: str, shape: dict[str, Any], options: dict[str, Any]) -> TrainConfig:
    """Steps of 8 rows for a small model of a family, its config changed."""
    sizes = {"max_train_samples": 300, "max_length": 128, "global_batch_size": 8, "per_device_train_batch_size": 1}
    model = save_small(folder / "model", family, **shape)
    return config_for(model, cache_dir=str(folder / "cache"), **sizes, **options)


def strategy_of(name: str, processes: int, **changes: Any) -> Strategy:
    """A strategy of `processes`; changes of `fsdp_config` and `parallelism_config`, or `pp_schedule` and `ep_size`."""
    file = with_sizes(load_strategy(name), {"ep": changes["ep_size"]} if "ep_size" in changes else {})
    for key in changes.keys() - {"pp_schedule", "ep_size"}:
        file.values["fsdp_config" if key.startswith("fsdp") else "parallelism_config"][key] = changes[key]
    return resolve(file, processes, "no", pp_schedule=changes.get("pp_schedule"))


@contextmanager
def first_rank_of(processes: int) -> Iterator[None]:
    """A process group whose other ranks are not there; what rank 0 sends goes nowhere."""
    distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def start_rank(config: TrainConfig, strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of rank 0 up to the model that its strategy wraps, with the real weights."""
    loss, ranks, accelerator = build.module(config, main_rank=True), Ranks(CPU), SimpleNamespace()
    if strategy.distributed_type == "FSDP":
        for key, value in strategy.fsdp.items():  # as `accelerate launch` hands them on
            name = key.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
            monkeypatch.setenv(name, str(value))
        plugin = FullyShardedDataParallelPlugin()
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), is_fsdp2=plugin.fsdp_version == 2)
    with first_rank_of(strategy.num_processes):
        mesh = Mesh(strategy.sizes, 0, "cpu" if strategy.has_mesh else None)
        build.backend(config, strategy, accelerator, ranks, mesh, loss)  # type: ignore[arg-type]


LORA = {"method": "lora"}
WORDS = {"method": "lora", "lora_target_modules": ["embed_tokens", "q_proj"]}
HEAD = {"method": "lora", "lora_target_modules": ["lm_head"]}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
FOUR = {"num_hidden_layers": 4, "tie_word_embeddings": False}
TIED = {**FOUR, "tie_word_embeddings": True}
NAMED = "fsdp_transformer_layer_cls_to_wrap"

Case = tuple[str, dict[str, Any], dict[str, Any], str, int, dict[str, Any], str]
"""Family, changes of its config, options, strategy, processes, changes of it, and the sentence."""
CASES: dict[str, Case] = {
    "a family without stages": ("gpt2", {}, {}, "pp", 2, {}, "gpt2 models cannot be split into pipeline stages"),
    "too few layers": (
        "llama", {}, {}, "pp", 2, {"pp_schedule": "interleaved"}, "pp_size=2 .*4 stages for 2 layers; use at most 2",
    ),
    "an adapter on the head of a pipeline": ("llama", {}, HEAD, "pp", 2, {}, "leave lm_head out of lora_target"),
    "a tied weight twice on a rank": (
        "llama", TIED, {}, "pp_fsdp2", 4, {"pp_schedule": "zbv"}, "pp_schedule=zbv puts embedding and head on one rank",
    ),
    "a class that is not there": (
        "llama", {}, {}, "fsdp2", 2, {NAMED: "LamaDecoderLayer"},
        f"{NAMED}=LamaDecoderLayer is not a layer class of llama; its layer classes are LlamaDecoderLayer",
    ),
    "a class after a space": ("llama", {}, {}, "fsdp2", 2, {NAMED: "LlamaMLP, LlamaAttention"}, f"{NAMED}= LlamaAtt"),
    "no class to wrap": ("openai-gpt", {}, {"packing": False}, "fsdp2", 2, {}, "openai-gpt names no layer class"),
    "an adapter that FSDP 1 cannot flatten": (
        "llama", {}, {**WORDS, "mixed_precision": "bf16"}, "fsdp1", 2, {}, "fsdp1 cannot shard the adapter at .*embed",
    ),
    "layers with state": ("qwen3_5_text", {}, {"packing": False}, "cp", 2, {}, "cp 2: .* linear_attention layers"),
    "no attention": ("mamba", {}, {"packing": False}, "cp", 2, {}, "cp 2: mamba has no attention heads"),
    "attention of its own": ("falcon", {}, {"packing": False}, "cp", 2, {}, "cp 2: falcon models .*without sp and cp"),
    "frequencies by length": ("llama", DYNAMIC, {}, "sp", 2, {}, "sp 2: llama chooses its rotary frequencies"),
    "heads that do not divide": (
        "llama", {}, {}, "sp", 3, {"parallelism_config_sp_size": 3}, "sp=3 does not divide the 4 attention heads of",
    ),
    "no plan for its matrices": ("stablelm", {}, {}, "tp", 2, {}, "tp_size=2: .* no tensor-parallel plan for stablelm"),
    "a plan with a gap": (
        "cohere", {"use_qk_norm": True}, {}, "tp", 2, {}, "tp_size=2: cohere has weights at .*q_norm which its plan",
    ),
    "an adapter on cut words": ("llama", {}, WORDS, "tp", 2, {}, "tp_size=2: .*an adapter on its embedding"),
    "no experts to divide": ("llama", {}, {}, "ep", 2, {}, "ep_size=2: ep divides experts, and llama has none"),
    "no experts in this one": ("gemma4_text", {}, {}, "ep", 2, {}, "ep divides experts, and this gemma4_text has none"),
    "experts that do not divide": (
        "mixtral", {}, {}, "ep", 8, {"ep_size": 8}, "ep_size=8 does not divide the 4 experts of mixtral; use 2 or 4",
    ),
    "no blocks to compile": ("gpt2", {}, {"torch_compile": True}, "single", 1, {}, "torch_compile=true: gpt2 has no"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_check_refuses_what_a_rank_would(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, shape, options, file, processes, changes, sentence = CASES[name]
    config = config_of(tmp_path, family, shape, options)
    strategy = strategy_of(file, processes, **changes)
    with pytest.raises(ConfigError, match=sentence) as early:
        check(config, strategy, has_gpu=False)
    with pytest.raises(ConfigError) as late:
        start_rank(config, strategy, monkeypatch)
    assert early.value.lines == late.value.lines


FITTING: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, int, dict[str, Any]]] = {
    "stages": ("llama", {}, {}, "pp", 2, {}),
    "as many layers as stages": ("llama", FOUR, {}, "pp", 2, {"pp_schedule": "interleaved"}),
    "adapters in stages": ("llama", {}, LORA, "pp", 2, {}),
    "two weights on one rank": ("llama", FOUR, {}, "pp_fsdp2", 4, {"pp_schedule": "zbv"}),
    "a tied weight on two ranks": ("llama", TIED, {}, "pp_fsdp2", 4, {"pp_schedule": "zero_bubble"}),
    "a frozen tied weight": ("llama", TIED, LORA, "pp_fsdp2", 4, {"pp_schedule": "zbv"}),
    "classes by name": ("llama", {}, {}, "fsdp2", 2, {NAMED: "LlamaAttention,LlamaMLP"}),
    "classes by family": ("gpt2", {}, {}, "fsdp2", 2, {}),
    "classes by size": (
        "llama", {}, {}, "fsdp2", 2, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10},
    ),
    "one unit of all": ("openai-gpt", {}, {"packing": False}, "fsdp2", 2, {"fsdp_auto_wrap_policy": "NO_WRAP"}),
    "adapters in one dtype": ("llama", {}, WORDS, "fsdp1", 2, {}),
    "parts of rows": ("qwen3", {}, {}, "cp", 2, {}),
    "parts of heads": ("llama", {}, {"packing": False}, "sp", 4, {}),
    "parts of matrices": ("cohere", {"use_qk_norm": False}, LORA, "tp", 2, {}),
    "experts": ("mixtral", {}, LORA, "ep", 4, {}),
    "all at once": ("llama", {}, LORA, "3d", 8, {}),
    "blocks to compile": ("llama", {}, {"torch_compile": True}, "single", 1, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mostly_long(FITTING, ["adapters in stages", "a frozen tied weight", "experts", "all at once"])
)
def test_what_can_be_split_passes(name: str, tmp_path: Path) -> None:
    """Control; of a tied weight that is frozen, both stages may hold a copy."""
    family, shape, options, file, processes, changes = FITTING[name]
    config = config_of(tmp_path, family, shape, options)
    assert check(config, strategy_of(file, processes, **changes), has_gpu=False)


def test_another_strategy_is_another_question(tmp_path: Path) -> None:
    """What the check remembers of a model that fits one strategy says nothing of the next."""
    config = config_of(tmp_path, "gpt2", {}, {})
    for _ in range(2):
        assert check(config, strategy_of("ddp", 2), has_gpu=False)
        with pytest.raises(ConfigError, match="cannot be split into pipeline stages"):
            check(config, strategy_of("pp", 2), has_gpu=False)
