"""Models other than the embedded Llama under each cut of layers and rows: QK-norm, sliding windows, untied heads."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.families import save_small
from tests.launching import Finished
from tests.parity.runs import STEPS, curve, long, mostly_long, run
from tests.shared import once
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import load_strategy

SMALL = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
# 3 words are left over where the vocabulary is cut in two or four.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 1027, "tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
                     "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "output_router_logits": False},
}  # fmt: skip
"""Linear attention, and attention sinks."""
WRAPPED = [("fsdp2", "qwen3_5_text"), ("fsdp2", "gpt_oss"), ("ddp", "qwen3_5_text"), ("fsdp1", "qwen3_5_text"),
           ("zero2", "qwen3_5_text"), ("zero3", "gpt_oss")]  # fmt: skip
CUTS = ["tp", "sp", "cp", "pp", "fsdp2_tp", "pp_interleaved", "pp_fsdp2", "3d"]
SHORT = [("tp", "qwen3"), ("cp", "gemma3_text"), ("pp", "qwen3")]
ALL = [(cut, family) for cut in CUTS for family in FAMILIES]


@functools.cache
def model(family: str) -> str:
    """A folder with a small model's config and the embedded tokenizer; its weights are the seed's."""

    def write(folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (BASE_DIR / name).exists():
                shutil.copy(BASE_DIR / name, folder)
        AutoConfig.for_model(family, **SMALL | (FAMILIES | EXPERTS | HYBRIDS)[family]).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["model_type"] == family

    return str(once(f"family-{family}", write))


def trained(processes: int, family: str, strategy: str | None = None, **more: Any) -> Finished:
    """Packed rows; the weights are large at first, so that a fault in attention shows at once."""
    return run(processes, "full", True, strategy, model_name_or_path=model(family), random_init=True,
               learning_rate=1e-3, eval_dataset_name="none", max_eval_samples=None, **more)  # fmt: skip


@pytest.mark.parametrize(("cut", "family"), mostly_long(ALL, SHORT))
def test_another_family_trains_as_on_one_process(cut: str, family: str) -> None:
    cut_up = trained(load_strategy(cut).num_processes, family, cut)
    assert len(cut_up.series("loss")) == STEPS
    assert curve(cut_up).agrees(curve(trained(1, family)))


def write_image_model(folder: Path) -> None:
    save_small(folder, "mistral3")


@long
@pytest.mark.parametrize("cut", ["tp", "sp", "cp", "pp", "fsdp2_tp"])
def test_a_model_of_images_and_text_trains_as_on_one_process(cut: str) -> None:
    """Its vision tower, which no text reaches, is left as it is."""
    folder = once("family-mistral3", write_image_model)
    options: dict[str, Any] = {"model_name_or_path": str(folder), "learning_rate": 1e-3, "eval_dataset_name": "none",
                               "max_eval_samples": None}  # fmt: skip
    cut_up, single = (
        run(count, "full", True, strategy, **options)
        for count, strategy in ((load_strategy(cut).num_processes, cut), (1, None))
    )
    assert len(cut_up.series("loss")) == STEPS
    assert curve(cut_up).agrees(curve(single))
    before, after = (load_file(path / "model.safetensors") for path in (folder, cut_up.run.path / "model"))
    towers = [name for name in before if "vision_tower" in name]
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)
    assert not all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("strategy", "family"), mostly_long(WRAPPED, WRAPPED[1:2]))
def test_packed_documents_stay_apart_in_every_layer(strategy: str, family: str) -> None:
    """Of models that mix tokens without attention, or whose softmax has a sink, as on one process."""
    sharded = trained(2, family, strategy)
    assert len(sharded.series("loss")) == STEPS
    assert curve(sharded).agrees(curve(trained(1, family)))


def test_packed_rows_of_a_hybrid_are_refused_under_zero_3() -> None:
    """Its ranks would wait for each other: each has groups of documents of its own."""
    with pytest.raises(AssertionError, match=r"packing=true with qwen3_5_text under ZeRO 3.*use packing=false, or"):
        trained(2, "qwen3_5_text", "zero3")


def test_the_families_differ_and_a_fault_on_purpose_is_seen() -> None:
    """Controls: the curves are not alike because nothing is trained, and the classic fault leaves the tolerance."""
    qwen, gemma = curve(trained(1, "qwen3")), curve(trained(1, "gemma3_text"))
    assert not qwen.agrees(gemma)
    assert qwen.losses[-1] < qwen.losses[0] - 0.05
    assert not curve(trained(2, "qwen3", "tp", control="mean-of-means")).agrees(qwen)
