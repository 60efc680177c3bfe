"""Which options an optimizer reads, where it is refused, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.runs import config
from trainers.config.mistakes import ConfigError
from trainers.config.options import average_lines, optimizer_lines
from trainers.config.validation import ignored_choices
from trainers.run.compatibility import refusals
from trainers.run.disk import Tensor, bytes_needed
from trainers.strategy.strategy import load_strategy, refusal


def ignored(**changes: Any) -> list[str]:
    return [str(line) for line in ignored_choices(config("full", True, **changes))]


def test_settings_of_another_optimizer_are_named_as_ignored() -> None:
    assert ignored(optim="lion", adam_epsilon=1e-6, adam_beta1=0.8, lion_beta1=0.8) == [
        "adam_beta1 is ignored: optim=lion does not read it",
        "adam_epsilon is ignored: optim=lion does not read it",
    ]
    assert ignored(lion_beta2=0.95) == ["lion_beta2 is ignored: optim=adamw does not read it"]
    assert ignored(optim="adamw_8bit", adam_beta1=0.8) == []
    assert ignored(optim="adafactor", adam_beta1=0.8) == ["adam_beta1 is ignored: optim=adafactor does not read it"]
    assert ignored(optim="muon", adam_beta1=0.8, muon_momentum=0.9, lion_beta1=0.8) == [
        "lion_beta1 is ignored: optim=muon does not read it"
    ]


def test_what_an_optimizer_reads_is_shown_and_what_is_exact_is_within_the_promise() -> None:
    lion = config("full", True, optim="lion", lion_beta1=0.95)
    (line,) = optimizer_lines(lion)
    assert line.startswith("optim=lion: lion_beta1=0.95, lion_beta2=0.99; a learning rate for AdamW is 3 to 10 times")
    assert optimizer_lines(config("full", True)) == []
    (line,) = optimizer_lines(config("full", True, optim="muon"))
    assert line.startswith("optim=muon: muon_momentum=0.95, adam_beta1=0.9, ")
    assert line.endswith("; Muon for the matrices of the layers, in fp32, AdamW for all else")
    assert lion.outside_parity() == config("full", True, optim="muon").outside_parity() == []
    assert config("full", True, optim="adamw_8bit").outside_parity() == ["optim=adamw_8bit"]


def test_bf16_weights_are_for_adamw_alone() -> None:
    half = {"mixed_precision": "bf16", "master_weights": False}
    config("full", True, **half)
    for optim in ("lion", "muon", "adafactor"):
        with pytest.raises(ConfigError, match=f"master_weights=false with optim={optim}: AdamW alone"):
            config("full", True, optim=optim, **half)


@pytest.mark.parametrize("optim", ["lion", "muon", "adafactor"])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero1", "zero3", "tp", "pp"])
def test_they_are_refused_nowhere_but_where_deepspeed_updates(name: str, optim: str) -> None:
    strategy, asked = load_strategy(name), config("full", True, optim=optim)
    assert refusal(strategy, asked, has_gpu=False) is None
    own = replace(strategy, deepspeed_json={**strategy.deepspeed_json, "optimizer": {"type": "AdamW"}})
    assert (refusal(own, asked, has_gpu=False) is None) == (not name.startswith("zero"))


def test_offload_is_refused_where_another_optimizer_would_update() -> None:
    reasons = {
        (name, optim): refusal(load_strategy(name), config("full", True, optim=optim), has_gpu=True)
        for name in ("zero3_offload", "fsdp2_offload")
        for optim in ("adamw", "lion", "muon", "adafactor")
    }
    refused = {run for run, reason in reasons.items() if reason is not None}
    assert refused == {
        ("zero3_offload", "lion"), ("zero3_offload", "muon"), ("zero3_offload", "adafactor"),
        ("fsdp2_offload", "muon"), ("fsdp2_offload", "adafactor"),
    }  # fmt: skip
    assert "optim=lion: DeepSpeed's offload updates by its own Adam" in str(reasons["zero3_offload", "lion"])
    assert "optim=muon: its matrices are not offloaded" in str(reasons["fsdp2_offload", "muon"])


def test_a_checkpoint_has_one_momentum() -> None:
    tensors = [Tensor("model.layers.0.mlp.up_proj.weight", (1000, 1000), "F32")]
    tensors.append(Tensor("model.embed_tokens.weight", (500, 1000), "F32"))
    sizes = {optim: bytes_needed(config("full", True, optim=optim), tensors, 1) for optim in ("adamw", "lion", "muon")}
    assert sizes["adamw"] - sizes["lion"] == 6_000_000
    assert sizes["adamw"] - sizes["muon"] == 4_000_000  # the embedding has Adam's two states
    assert bytes_needed(config("full", True, optim="adamw_8bit"), tensors, 1) == sizes["adamw"]  # saved in fp32


def test_a_moving_average_is_counted_refused_on_disk_and_neither_begun_nor_lost_in_a_resume() -> None:
    tensors = [Tensor("model.layers.0.mlp.up_proj.weight", (1000, 1000), "F32")]
    plain, averaged = config("full", True), config("full", True, ema_decay=0.99)
    assert bytes_needed(averaged, tensors, 1) - bytes_needed(plain, tensors, 1) == 4_000_000
    (line,) = average_lines(averaged)
    assert line.startswith("ema_decay=0.99: `tunesmith export RUN --ema`")
    assert average_lines(plain) == []
    assert averaged.outside_parity() == []
    strategy = load_strategy("zero3_offload")
    optimizer_on_disk, weights_on_disk = (
        replace(strategy, deepspeed_json={"zero_optimization": {"stage": 3, **devices}})
        for devices in (
            {"offload_optimizer": {"device": "nvme"}},
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}},
        )
    )
    reasons = [refusal(each, averaged, has_gpu=True) for each in (strategy, weights_on_disk, optimizer_on_disk)]
    assert [reason and reason.partition(";")[0] for reason in reasons] == [
        None, None, "ema_decay=0.99: the moving average is not offloaded to a disk",
    ]  # fmt: skip
    for then, now in ((plain, averaged), (averaged, plain)):
        manifest = {"config": then.model_dump(), "versions": {}, "step": 5}
        (refused,) = refusals(manifest, now.model_dump(), {}, force=True)
        assert str(refused).startswith("ema_decay=")
        assert "start a new run" in str(refused)
    older = {name: value for name, value in plain.model_dump().items() if name != "ema_decay"}
    assert refusals({"config": older, "versions": {}, "step": 5}, averaged.model_dump(), {}, force=True)
    assert refusals({"config": older, "versions": {}, "step": 5}, plain.model_dump(), {}) == []
    other = config("full", True, ema_decay=0.999).model_dump()
    manifest = {"config": averaged.model_dump(), "versions": {}, "step": 5}
    assert refusals(manifest, other, {}, force=True) == []
    assert refusals(manifest, other, {}) != []


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, float("nan")])
def test_a_decay_is_between_0_and_1(value: float) -> None:
    with pytest.raises(ConfigError, match="ema_decay="):
        config("full", True, ema_decay=value)


def test_schedule_free_adamw_names_what_does_not_fit() -> None:
    free = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    fits = config("full", True, **free, warmup_steps=5)
    (line,) = optimizer_lines(fits)
    assert line.startswith("optim=schedule_free_adamw: adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-08; the log's")
    assert fits.outside_parity() == []
    for option, value in (
        ("lr_scheduler_type", "cosine"), ("warmup_ratio", 0.1), ("adam_beta1", 0.01), ("ema_decay", 0.9),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{option}={value} with optim=schedule_free_adamw"):
            config("full", True, **{**free, option: value})
    assert config("full", True, **free, warmup_ratio=0.1, warmup_steps=3)  # which is ignored
    refused = {
        name: refusal(load_strategy(name), fits, has_gpu=True)
        for name in ("single", "ddp", "fsdp1", "fsdp2", "fsdp2_offload", "zero1", "zero3", "zero3_offload", "tp", "pp")
    }
    assert {name for name, reason in refused.items() if reason} == {"fsdp1", "zero1", "zero3", "zero3_offload"}
    assert "other weights than it trains, of which FSDP 1 keeps copies; use --strategy fsdp2" in str(refused["fsdp1"])


def test_states_of_another_optimizer_do_not_fit_even_by_force() -> None:
    then, now = (config("full", True, optim=optim).model_dump() for optim in ("adamw", "lion"))
    (refused,) = refusals({"config": then, "versions": {}, "step": 5}, now, {}, force=True)
    assert str(refused).startswith("optim=lion, and adamw when the checkpoint of step 5 was saved")
    assert "start a new run" in str(refused)
    eight_bit = config("full", True, optim="adamw_8bit").model_dump()
    assert refusals({"config": then, "versions": {}, "step": 5}, eight_bit, {}, force=True) == []
    assert refusals({"config": then, "versions": {}, "step": 5}, eight_bit, {}) != []
    free = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    before, after = (config("full", True, **free, adam_beta1=beta).model_dump() for beta in (0.9, 0.8))
    (refused,) = refusals({"config": before, "versions": {}, "step": 5}, after, {}, force=True)
    assert str(refused).startswith("adam_beta1=0.8"), "the average is computed from it"
