"""Distillation keeps the promises: against plain PyTorch, over strategies, after a resume.

The teacher is of another family, size and vocabulary size than the student, and has dropout, which must stay off.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import config, curve, mostly_long, options, run
from tests.parity.test_objectives import plain_curve
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import load_strategy

STRATEGIES = [
    "ddp",
    "fsdp1",
    "fsdp2",
    "hsdp",
    "zero1",
    "zero2",
    "zero3",
    "sp",
    "cp",
    "tp",
    "fsdp2_tp",
    "hsdp_tp",
    "zero2_tp",
]
LOSS_TYPES = ["forward_kl", "reverse_kl", "jsd"]


def save_teacher(folder: Path, seed: int) -> None:
    """A random Qwen3 with sharp predictions, 6 rows of padding in its tied embeddings, and dropout."""
    model_config = Qwen3Config(
        vocab_size=1030, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=1024, tie_word_embeddings=True,
        attention_dropout=0.3, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (BASE_DIR / file).exists():
            shutil.copy(BASE_DIR / file, folder)


def teacher(seed: int = 0) -> Path:
    return once(f"distill-teacher-{seed}", lambda folder: save_teacher(folder, seed))


def distill_options(**changes: Any) -> dict[str, Any]:
    return {"objective": "distill", "teacher": str(teacher()), "max_train_samples": 61, "max_length": 96,
            "global_batch_size": 4, "per_device_train_batch_size": 1, **changes}  # fmt: skip


def divergence(student: torch.Tensor, other: torch.Tensor, settings: TrainConfig) -> torch.Tensor:
    """Summed over the tokens, of logits over the tokens that both models have."""
    size, temperature, beta = min(student.shape[1], other.shape[1]), settings.distill_temperature, settings.jsd_beta
    q, p = ((logits[:, :size] / temperature).log_softmax(-1) for logits in (student, other))

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(second, first, reduction="sum", log_target=True)

    if settings.loss_type == "jsd":
        mixed = (beta * p.exp() + (1 - beta) * q.exp()).log()
        return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)
    return kl(q, p) if settings.loss_type == "reverse_kl" else kl(p, q)


def plain_distill(settings: TrainConfig, dropout: bool = False) -> plain.Curve:
    """Distillation in a page: each document alone, the stock teacher beside the trained model.

    Args:
        settings: options of the run.
        dropout: control: the teacher is in training mode.
    """
    other = AutoModelForCausalLM.from_pretrained(settings.teacher, dtype=torch.float32, attn_implementation="eager")
    other.train(dropout)

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for member in members:
            tokens, mask = plan.rows.documents.document(int(member))
            ids, trained = torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(np.array(mask))[1:]
            with torch.no_grad():
                expected = other(input_ids=ids).logits[0, :-1][trained]
            logits = model(input_ids=ids).logits[0, :-1][trained]
            total = total + divergence(logits, expected, settings)
            if weight := settings.nll_weight or 0:
                labels = ids[0, 1:][trained]
                total = total + weight * functional.cross_entropy(logits[:, :1024], labels, reduction="sum")
            count += int(trained.sum())
        return total / count

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted(method: str = "full", packing: bool = True, **changes: Any) -> plain.Curve:
    """The curve of the plain page."""
    settings = config(method, packing, **distill_options(**changes))

    def train(folder: Path) -> None:
        (folder / "curve.json").write_text(json.dumps(asdict(plain_distill(settings))))

    folder = once(f"plain-distill-{method}-{packing}-{sorted(changes.items())}".replace("/", "_"), train)
    return plain.Curve(**json.loads((folder / "curve.json").read_text()))


def distill(name: str, method: str = "full", packing: bool = True, again: int = 0, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    processes = load_strategy(name).num_processes
    return run(processes, method, packing, name, again, **distill_options(**changes))


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["single", "tp"], ["single"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    finished = distill(name)
    assert curve(finished).agrees(wanted())
    assert finished.series("eval_kl")[-1] == pytest.approx(finished.series("eval_loss")[-1], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "tp", "fsdp2_tp"])
@pytest.mark.parametrize("loss_type", ["reverse_kl", "jsd"])
def test_p2_of_the_other_losses(loss_type: str, name: str) -> None:
    """At another temperature, with a share of the supervised loss."""
    changes = {"loss_type": loss_type, "distill_temperature": 2.0, "nll_weight": 0.5, "jsd_beta": 0.3}
    assert curve(distill(name, **changes)).agrees(wanted(**changes))
    assert not wanted(**changes).agrees(wanted(**{**changes, "distill_temperature": 1.0}))


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero3", "tp"])
def test_p2_with_adapters_and_without_packing(name: str) -> None:
    assert curve(distill(name, "lora", False)).agrees(wanted("lora", False))


@pytest.mark.parametrize("wrong", mostly_long(["teacher", "reverse_kl", "temperature", "dropout"], ["dropout"]))
def test_what_is_wrong_does_not_agree(wrong: str) -> None:
    changes: dict[str, Any] = {
        "teacher": {"teacher": str(teacher(1))}, "reverse_kl": {"loss_type": "reverse_kl"},
        "temperature": {"distill_temperature": 2.0}, "dropout": {},
    }[wrong]  # fmt: skip
    settings = config("full", True, **distill_options(**changes))
    assert not plain_distill(settings, dropout=wrong == "dropout").agrees(wanted())


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_change_nothing(size: int) -> None:
    assert curve(distill("single", per_device_train_batch_size=size)).agrees(wanted())


@pytest.mark.long
def test_p0_rerun_is_the_same_bit_for_bit() -> None:
    assert same_bits(distill("ddp"), distill("ddp", again=1))


def test_a_resumed_run_ends_as_if_never_interrupted(tmp_path: Path) -> None:
    """Bit for bit, and with the teacher in another folder; checkpoints hold nothing of it."""
    undisturbed = distill("single")
    moved = shutil.copytree(teacher(), tmp_path / "moved")
    resumed = {**options("full", True, **distill_options()), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 1, {**resumed, "teacher": str(moved)}, strategy="single")
    assert equal_after_resume(undisturbed, again)
    trained = {name for file in undisturbed.checkpoints[0].glob("*.safetensors") for name in load_file(file)}
    assert not [name for name in trained if "teacher" in name]
    assert len(load_file(undisturbed.run.model / "model.safetensors")) == len(load_file(BASE_DIR / "model.safetensors"))


def test_a_resume_with_a_changed_teacher_is_refused(tmp_path: Path) -> None:
    changed = shutil.copytree(teacher(), tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    resumed = {"resume_from_checkpoint": distill("single").checkpoints[0], "teacher": str(changed)}
    settings = {**options("full", True, **distill_options()), **resumed}
    refused = launch(tmp_path / "other", 1, settings, strategy="single")
    assert refused.status != 0
    assert "the teacher is" in refused.output


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "zero2", "fsdp1_grad_op", "zero3_offload", "tp", "fsdp2_tp"])
def test_a_teacher_in_bf16_beside_weights_in_fp32(name: str) -> None:
    """Strategies that shard weights keep both dtypes apart; the losses agree within the band of bf16."""
    changes = {"mixed_precision": "bf16", "max_steps": 6}
    losses = zip(distill(name, **changes).series("loss"), distill("single", **changes).series("loss"), strict=True)
    assert max(abs(one / other - 1) for one, other in losses) < 2e-3


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_student_in_4_bits(name: str) -> None:
    changes = {"mixed_precision": "bf16", "max_steps": 6}
    several, single = (distill(strategy, "qlora", **changes).series("loss") for strategy in (name, "single"))
    assert max(abs(one / other - 1) for one, other in zip(several, single, strict=True)) < 2e-3
