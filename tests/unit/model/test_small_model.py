"""Small copies of families whose sizes depend on each other, or whose layers share keys, values or weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.config.mistakes import ConfigError
from trainers.model.small_model import choose_attention, small_config

FAMILIES = ["bailing_hybrid", "gemma3n_text", "longcat_flash", "zamba", "zamba2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_copy_computes(family: str) -> None:
    """Else the family would be refused, as one that fails on its own, or be tried only once its weights are loaded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model(family))).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4, 5, 6]])).logits
    assert logits.shape == (1, 6, model.config.vocab_size)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_layers_that_share_keys_and_values_follow_those_that_compute_them() -> None:
    full = AutoConfig.for_model("gemma3n_text")
    small = small_config(full)
    first = small.num_hidden_layers - small.num_kv_shared_layers
    assert set(small.layer_types[:first]) == set(small.layer_types[first:]) == set(full.layer_types)
    assert small.num_hidden_layers < full.num_hidden_layers


def test_a_model_that_reads_the_mask_itself_is_refused_for_that() -> None:
    """Not with the words of the exception that a missing mask ends in. Control: another failure keeps its own."""
    with pytest.raises(ConfigError, match="packing=true: mpt models compute with the mask of each row in code of"):
        choose_attention(AutoConfig.for_model("mpt"), True)
    with pytest.raises(ConfigError, match="packing=true: doge models fail in a training step: this model builds its"):
        choose_attention(AutoConfig.for_model("doge"), True)
