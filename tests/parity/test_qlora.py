"""Promises P0, P2, P4 and bit-exact resume for `method=qlora`: four bits change the model, the strategy does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from peft.utils import loftq_utils
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, reference, resumed, same_bits, stock_loss
from tests.parity.runs import HALF, config, curve, long, mostly_long, options, run
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR
from trainers.model.quantization import four_bit_layers
from trainers.strategy.strategy import load_strategy

FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


def stock(settings: TrainConfig) -> Any:
    """Stock transformers, bitsandbytes and peft, nothing of ours."""
    model = AutoModelForCausalLM.from_pretrained(
        BASE_DIR, dtype=torch.float32, attn_implementation="eager", quantization_config=FOUR_BITS
    )
    set_seed(settings.seed)
    adapters = LoraConfig(r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules="all-linear")
    return get_peft_model(model, adapters).train()  # in evaluation bitsandbytes may compute in bf16


def four_bit_reference(packing: bool) -> plain.Curve:
    return reference("qlora", packing, stock)


def sharded(strategy: str, again: int = 0) -> Finished:
    processes = load_strategy(strategy).num_processes
    return run(processes, "qlora", True, strategy, again, per_device_train_batch_size=4 // processes)


def with_error(settings: TrainConfig) -> Any:
    """peft's LoftQ, which names CUDA as the device of its one difference."""
    model = stock(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loftq_utils, "_loftq_init_new", _begin_on_the_cpu)
        loftq_utils.replace_lora_weights_loftq(model, str(BASE_DIR))
    return model


def _begin_on_the_cpu(packed: Any, weight: torch.Tensor, num_bits: int, reduced_rank: int) -> tuple[Any, Any]:
    error = weight.float() - dequantize_4bit(packed.data, packed.quant_state)
    parts = loftq_utils._low_rank_decomposition(error, reduced_rank)
    return parts["R"], parts["L"]


LOFTQ = {"init_lora_weights": "loftq", "lora_r": 16, "lora_alpha": 16}


@pytest.mark.parametrize("strategy", mostly_long(["single", "fsdp2", "zero2"], ["fsdp2"]))
def test_adapters_that_begin_as_the_rounding_error_are_those_of_peft(strategy: str, tmp_path: Path) -> None:
    settings = config("qlora", True, **LOFTQ)
    finished = run(1 if strategy == "single" else 2, "qlora", True, strategy, **LOFTQ)
    assert curve(finished).agrees(plain.train(settings, build=with_error))
    assert not curve(finished).agrees(plain.train(settings, build=stock)), "control: adapters that begin at nothing"
    again = launch_well(
        tmp_path / "again", 1 if strategy == "single" else 2,
        options("qlora", True, **LOFTQ) | {"resume_from_checkpoint": finished.checkpoints[0]}, strategy=strategy,
    )  # fmt: skip
    assert equal_after_resume(finished, again)


EACH = [(processes, packing) for processes in (1, 2) for packing in (True, False)]


@pytest.mark.parametrize(("processes", "packing"), mostly_long(EACH, [(1, True)]))
def test_p2_equals_a_plain_page_of_pytorch(processes: int, packing: bool) -> None:
    finished = run(processes, "qlora", packing)
    assert curve(finished).agrees(four_bit_reference(packing))
    assert "4-bit layers     28" in finished.output


@pytest.mark.parametrize("packing", mostly_long([True, False], [True]))
def test_p2_single_equals_ddp(packing: bool) -> None:
    assert curve(run(2, "qlora", packing)).agrees(curve(run(1, "qlora", packing)))


@pytest.mark.parametrize("strategy", mostly_long(["fsdp2", "hsdp", "zero1", "zero2"], ["fsdp2"]))
def test_p2_sharded_four_bit_weights_are_the_same_model(strategy: str) -> None:
    finished = sharded(strategy)
    assert curve(finished).agrees(four_bit_reference(True))
    assert "4-bit layers     28" in finished.output
    assert ("4-bit share      1/2" in finished.output) is ("dp" in strategy), "ZeRO-1 and 2 cut no weights"
    assert finished.series("eval_loss")[-1] == pytest.approx(run(1, "qlora", True).series("eval_loss")[-1], abs=1e-5)


@long
def test_p0_and_p3_of_sharded_four_bit_weights(tmp_path: Path) -> None:
    assert same_bits(sharded("fsdp2"), sharded("fsdp2", again=1))
    moved = resumed(tmp_path / "moved", 2, "qlora", run(2, "qlora", True).checkpoints[0], "fsdp2")
    before = curve(run(2, "qlora", True))
    joined = plain.Curve(before.losses[:HALF] + moved.series("loss"), before.norms[:HALF] + moved.series("grad_norm"))
    assert joined.agrees(four_bit_reference(True))


@long
def test_gradient_checkpointing_changes_nothing() -> None:
    assert curve(run(2, "qlora", True, gradient_checkpointing=True)).agrees(four_bit_reference(True))


def test_without_quantisation_it_would_be_another_curve() -> None:
    """Control: the base in four bits is not the base."""
    lora, qlora = reference("lora", True), curve(run(1, "qlora", True))
    assert not qlora.agrees(lora)
    assert abs(lora.losses[0] - qlora.losses[0]) > 3 * plain.LOSS_TOLERANCE, "before any update"


@long
@pytest.mark.parametrize("processes", [1, 2])
def test_p0_rerun_is_the_same_bit_for_bit(processes: int) -> None:
    assert same_bits(run(processes, "qlora", True), run(processes, "qlora", True, again=1))


@long
def test_resume_is_bit_exact(tmp_path: Path) -> None:
    """The base is not in the checkpoint: it is quantised anew, to the same bits."""
    undisturbed = run(2, "qlora", True)
    again = resumed(tmp_path / "again", 2, "qlora", undisturbed.checkpoints[0])
    assert equal_after_resume(undisturbed, again)


def test_checkpoints_hold_the_adapters_alone() -> None:
    for file in run(2, "qlora", True).checkpoints[-1].glob("*.safetensors"):
        names = [name for name in load_file(file) if not name.startswith("rng.")]
        assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("strategy", mostly_long(["single", "ddp", "fsdp2"], ["fsdp2"]))
def test_p4_plain_peft_loads_the_adapter_and_gives_the_trainers_loss(strategy: str) -> None:
    finished = sharded("fsdp2") if strategy == "fsdp2" else run(1 if strategy == "single" else 2, "qlora", False)
    card = (finished.run.model / "README.md").read_text()
    assert 'bnb_4bit_quant_type="nf4"' in card
    assert "bnb_4bit_use_double_quant=True" in card
    model = AutoPeftModelForCausalLM.from_pretrained(
        finished.run.model, dtype=torch.float32, attn_implementation="eager", quantization_config=FOUR_BITS
    ).train()
    assert len(four_bit_layers(model)) == 28
    trained = finished.series("eval_loss")[-1]
    assert stock_loss(model, "qlora") == pytest.approx(trained, abs=1e-5)
    # Control: on the base that was not quantised, the adapter is another model.
    whole = AutoPeftModelForCausalLM.from_pretrained(finished.run.model, attn_implementation="eager").eval()
    assert abs(stock_loss(whole, "qlora") - trained) > 1e-4


@long
def test_p4_plain_transformers_loads_the_merged_model_and_gives_the_trainers_loss() -> None:
    finished = run(1, "qlora", False, merge_adapter=True)
    assert not list(finished.run.model.glob("adapter*"))
    model = AutoModelForCausalLM.from_pretrained(finished.run.model, attn_implementation="eager").eval()
    assert stock_loss(model, "qlora") == pytest.approx(finished.series("eval_loss")[-1], abs=1e-5)
