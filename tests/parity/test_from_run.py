"""The second stage of a training, preferences after answers, begins with the weights of the first everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch, launch_well
from tests.parity.checks import weights
from tests.parity.runs import STEPS, config, mostly_long, options, run
from tests.parity.test_objectives import log_prob
from trainers.data.prepare import prepare
from trainers.embedded import BASE_DIR

PAIRS = {
    "objective": "dpo",
    "eval_dataset_name": "none",
    "learning_rate": 2e-4,
    "max_train_samples": 9,
    "max_length": 96,
    "global_batch_size": 2,
    "per_device_train_batch_size": 1,
    "max_steps": 2,
    "save_steps": 1,
}


def first() -> Finished:
    """Supervised fine-tuning of an adapter."""
    return run(1, "lora", True)


def second(name: str, processes: int) -> Finished:
    """DPO from its result."""
    return run(processes, "lora", True, name, from_run=str(first().run.path), **PAIRS)


def reference(finished: Finished) -> torch.Tensor:
    """Log-probabilities of the data under the initial model, as a checkpoint holds them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in finished.checkpoints[-1].glob("*.safetensors"):
        tensors |= {name: tensor for name, tensor in load_file(file).items() if "reference." in name}
    (values,) = tensors.values()
    return values


@torch.no_grad()
def stock(model: Any) -> torch.Tensor:
    documents = prepare(config("lora", True, **PAIRS), "train")
    return torch.stack([log_prob(model.eval(), *documents.document(index)) for index in range(len(documents))])


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp2", "zero3", "tp"], ["fsdp2"]))
def test_the_reference_of_dpo_is_the_base_with_the_adapter_of_the_first_stage(name: str) -> None:
    """So each rank begins with the first run's weights: its reference is computed by the wrapped model at step 0."""
    finished = second(name, 1 if name == "single" else 2)
    tuned = AutoPeftModelForCausalLM.from_pretrained(first().run.model)
    values = reference(finished).float()
    assert torch.allclose(values, stock(tuned), rtol=1e-5, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(BASE_DIR)
    assert not torch.allclose(values, stock(base), rtol=1e-2)  # control
    assert finished.series("loss")[0] == pytest.approx(0.6931472, abs=1e-5)
    card = (finished.run.model / "README.md").read_text()
    assert f"1. {first().run.id} (sft on embedded, method=lora, step {STEPS})" in card
    assert "2. run (dpo on embedded, method=lora, step 2)" in card


def test_a_resumed_second_stage_needs_no_weights_of_the_first(tmp_path: Path) -> None:
    """Its checkpoint has them; what the folder of the first stage still gives is the tokenizer."""
    source = Path(shutil.copytree(first().run.path, tmp_path / "sft"))
    settings = {**options("lora", True, **PAIRS), "from_run": str(source)}
    stopped = launch(tmp_path / "dpo", 1, {**settings, "stop_at_step": 1}, strategy="single")
    assert stopped.state["state"] == "stopped", stopped.output[-2000:]
    adapter = source / "model" / "adapter_model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(adapter).items()}, adapter)
    resumed = {**settings, "resume_from_checkpoint": "auto"}
    again = launch_well(tmp_path / "dpo", 1, resumed, strategy="single")
    resumed_weights, undisturbed = weights(again), weights(second("single", 1))
    assert resumed_weights.keys() == undisturbed.keys()
    assert all(torch.equal(resumed_weights[name], undisturbed[name]) for name in resumed_weights)

    anew = {"output_dir": tmp_path / "new", "resume_from_checkpoint": None}
    other = launch_well(tmp_path / "new", 1, {k: v for k, v in {**settings, **anew}.items() if v}, strategy="single")
    assert not all(torch.equal(weights(other)[name], resumed_weights[name]) for name in resumed_weights)  # control

    shutil.rmtree(source)
    refused = launch(tmp_path / "dpo", 1, {**resumed, "max_steps": 3}, strategy="single")
    assert refused.status == 1
    assert f"from_run={source} does not exist" in refused.output
