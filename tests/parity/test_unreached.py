"""Weights without a gradient: those that no text reaches, and experts that got no token. The strategy changes neither.

The first are the attention to an encoder in BART's decoder; the second need code of a model's own, as those of
transformers keep their experts in one tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import save_small
from tests.launching import Finished, launch, launch_well
from trainers.model.reachability import OPTION

OPTIONS: dict[str, Any] = {
    "dataset_name": "embedded", "eval_dataset_name": "none", "method": "full", "max_train_samples": 20,
    "max_length": 192, "packing": False, "global_batch_size": 4, "per_device_train_batch_size": 1, "max_steps": 3,
    "learning_rate": 1e-2, "weight_decay": 0.5, "logging_steps": 1, "save_steps": 0,
}  # fmt: skip
STRATEGIES = ["ddp", "fsdp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp1", "zero2", "zero3"))]

MIXTURE = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM, LlamaMLP


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 32, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(32))

    def forward(self, hidden):
        share, choice = self.router(hidden).softmax(-1).max(-1)
        result = torch.zeros_like(hidden)
        for number in choice.unique().tolist():
            chosen = choice == number
            result[chosen] = (self.experts[number](hidden[chosen]) * share[chosen, None]).to(hidden.dtype)
        return result


class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[-1].mlp = Mixture(config)
        self.post_init()
"""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a saved model."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_course(finished: Finished, single: Finished) -> None:
    """Asserts that a run had the losses and gradient norms of another, and ended with its weights."""
    for key in ("loss", "grad_norm"):
        assert finished.series(key) == pytest.approx(single.series(key), rel=1e-4), key
    ours, theirs = weights_of(finished.run.model), weights_of(single.run.model)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-3, msg=name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("base"), "bart", is_encoder_decoder=False)


@pytest.fixture(scope="module")
def single(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    options = {**OPTIONS, "model_name_or_path": base, OPTION: True}
    return launch_well(tmp_path_factory.mktemp("single") / "run", 1, options)


def assert_left_alone(finished: Finished, base: Path) -> None:
    """Asserts that the export has the weights that no text reaches bit for bit, and that the others were trained."""
    before, after = weights_of(base), weights_of(finished.run.model)
    unreached = {name for name in before if ".encoder_attn" in name}
    assert len(unreached) == 20
    equal = {name for name in before if torch.equal(before[name], after[name])}
    assert equal == unreached
    manifest = json.loads((finished.checkpoints[-1] / "manifest.json").read_text())
    assert not [name for name in manifest["tensors"] if ".encoder_attn" in name]


def test_weights_that_no_text_reaches_are_left_as_they_are(base: Path, single: Finished) -> None:
    assert_left_alone(single, base)
    assert (
        "frozen, as no text reaches them: 20 weights (model.decoder.layers.0.encoder_attn."
        in single.run.log.read_text()
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_are_left_as_they_are_under_every_strategy(
    strategy: str, base: Path, single: Finished, tmp_path: Path
) -> None:
    """Weight decay is on, which reaches weights whose gradient is made of zeros."""
    options = {**OPTIONS, "model_name_or_path": base, OPTION: True}
    finished = launch_well(tmp_path / "run", 2, options, strategy=strategy)
    assert_left_alone(finished, base)
    same_course(finished, single)


def test_they_are_refused_by_name_before_the_first_step(base: Path, tmp_path: Path) -> None:
    finished = launch(tmp_path / "run", 2, {**OPTIONS, "model_name_or_path": base})
    assert finished.status != 0
    assert finished.state["state"] == "failed"
    assert f"{OPTION}=false: 20 weights get no gradient" in finished.state["cause"]
    assert not finished.run.metrics.exists() or not finished.rows()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose code is its own, with so many experts in a list that no batch has tokens for all of them."""
    folder = save_small(tmp_path_factory.mktemp("mixture"), intermediate_size=8)
    (folder / "own.py").write_text(MIXTURE)
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}})
    )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def single_mixture(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    options = {**OPTIONS, "model_name_or_path": mixture, "trust_remote_code": True}
    return launch_well(tmp_path_factory.mktemp("single") / "run", 1, options)


def test_some_experts_get_no_token_in_any_step(mixture: Path, single_mixture: Finished) -> None:
    """Control: the steps that the strategies are compared on have such experts, which decay alone has changed."""
    before, after = weights_of(mixture), weights_of(single_mixture.run.model)
    ratios = [after[name] / weight for name, weight in before.items() if ".experts." in name]
    decayed = sum(bool(ratio.max() - ratio.min() < 1e-5) and bool(ratio.max() < 1) for ratio in ratios)
    assert 0 < decayed < len(ratios)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("fsdp1", marks=pytest.mark.long)])
def test_experts_without_tokens_are_trained_alike(
    strategy: str, mixture: Path, single_mixture: Finished, tmp_path: Path
) -> None:
    """On one rank or on all of them; without a token in any step, an expert is decayed, as in a single tensor."""
    options = {**OPTIONS, "model_name_or_path": mixture, "trust_remote_code": True}
    finished = launch_well(tmp_path / "run", 2, options, strategy=strategy)
    same_course(finished, single_mixture)
