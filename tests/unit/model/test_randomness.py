"""Training draws no random number of the model's own: none that it says in its config, none that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.model import small_model
from trainers.model.load import load_base
from trainers.model.probe import probe_rows
from trainers.model.randomness import drop_randomness, refuse_randomness, route_as_in_inference


def small(family: str, **changes: Any) -> Any:
    config = small_model.small_config(AutoConfig.for_model(family, **changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trained_twice(model: Any) -> list[torch.Tensor]:
    """Logits of the same rows in training mode, with two seeds."""
    ids, logits = probe_rows(64, torch.device("cpu")), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        logits.append(model.train()(input_ids=ids, use_cache=False).logits)
    return logits


@pytest.mark.parametrize(
    ("family", "dropped"),
    [
        ("gpt2", ["resid_pdrop", "embd_pdrop", "attn_pdrop"]),
        ("mixtral", ["router_jitter_noise"]),
        ("phimoe", ["input_jitter_noise"]),
        ("bart", ["dropout", "decoder_layerdrop"]),
        ("llama", []),
    ],
)
def test_what_a_config_says_is_dropped_with_a_line(family: str, dropped: list[str]) -> None:
    noisy = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1, "decoder_layerdrop": 0.1}
    config = AutoConfig.for_model(family, **{name: value for name, value in noisy.items() if family != "gpt2"})
    values = {name: getattr(config, name) for name in dropped}
    lines = drop_randomness(config)
    assert [f"the model's own {name}={value} is set to 0 for training" in lines for name, value in values.items()] == [
        True for _ in dropped
    ]
    assert all(getattr(config, name) == 0 for name in dropped)
    assert family != "phimoe" or config.router_jitter_noise == 0.1, "inference uses it as a threshold"


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "phimoe"])
def test_noise_is_seen_and_refused(family: str) -> None:
    """PhiMoE draws its experts, whatever its config says; without that it trains like the others."""
    changes = {"mixtral": {"router_jitter_noise": 0.1}, "phimoe": {"input_jitter_noise": 0.1}}.get(family, {})
    model = small(family, **changes)
    assert not torch.equal(*trained_twice(model)), "the control: it is there"
    with pytest.raises(ConfigError, match=f"{family} models draw random numbers in training, .*; use another model"):
        refuse_randomness(model)
    assert not model.training


def test_routers_that_draw_choose_as_in_inference() -> None:
    model = small("phimoe")
    assert not torch.equal(*trained_twice(model))
    route_as_in_inference(model)
    first, second = trained_twice(model)
    assert torch.equal(first, second)
    assert torch.equal(first, model.eval()(input_ids=probe_rows(64, torch.device("cpu")), use_cache=False).logits)
    assert model.train().model.layers[0].training, "all else is in training"


def test_a_model_is_loaded_without_its_dropout(tmp_path: Path) -> None:
    loaded = load_base(config_for(save_small(tmp_path, "gpt2"))).config
    assert (loaded.resid_pdrop, loaded.embd_pdrop, loaded.attn_pdrop) == (0, 0, 0)


def test_it_is_asked_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_for(save_small(tmp_path, "phimoe"))
    model = load_base(config)
    model.set_attn_implementation("eager")  # ours needs the documents
    assert torch.equal(*trained_twice(model))
    monkeypatch.setattr("trainers.model.randomness.route_as_in_inference", lambda model: None)
    with pytest.raises(ConfigError, match="phimoe models draw random numbers in training"):
        load_base(config)
