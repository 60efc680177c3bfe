"""Losses and gradients against liger's `chunked_loss`: the same hidden states, weights of the output head and labels.

Both get them in fp64. liger takes its softmax in fp32, that of a distillation excepted, and its mean over the batch;
ours is a sum, which training divides by the examples or tokens of the global batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from torch import nn

from tests.unit.objectives.test_pairs import config, loss_of
from trainers.data.layout import Scales, ScoredDocuments
from trainers.objectives.distillation import Divergence, Head, attach, compare_heads
from trainers.objectives.log_probs import VocabularyShard, scored_log_probs
from trainers.objectives.output_head import HeadRule

DOCUMENTS, LENGTH, HIDDEN, VOCABULARY = 8, 9, 12, 40
IGNORED = -100
DESIRABLE = torch.tensor([True, False, True, True, False, True, False, False])
FP32, FP64 = 1e-5, 1e-6
"""Difference allowed, relative to the largest: of a softmax in fp32, and of one in fp64 that liger sums in fp32."""


class Rows(NamedTuple):
    """Rows of documents: hidden states, targets, and weights of the head; the same of a frozen model."""

    hidden: torch.Tensor
    targets: torch.Tensor
    weight: nn.Parameter
    other_hidden: torch.Tensor
    other_weight: torch.Tensor

    @property
    def is_label(self) -> torch.Tensor:
        return self.targets != IGNORED

    @property
    def of_label(self) -> torch.Tensor:
        return self.is_label.nonzero()[:, 0]

    @property
    def tokens(self) -> torch.Tensor:
        return self.is_label.sum(1).double()


Outcome = tuple[torch.Tensor, ...]
"""Loss, and its gradients with respect to hidden states and weights."""


def rows(seed: int = 0) -> Rows:
    """Documents of different lengths; what is before an answer and after it has no label."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    targets = torch.randint(VOCABULARY, (DOCUMENTS, LENGTH), generator=generator)
    for row, length in enumerate(torch.randint(2, LENGTH, (DOCUMENTS,), generator=generator).tolist()):
        start = row % (LENGTH - length)
        targets[row, :start], targets[row, start + length :] = IGNORED, IGNORED
    weight = nn.Parameter(0.5 * normal(VOCABULARY, HIDDEN))
    hidden, states = normal(DOCUMENTS, LENGTH, HIDDEN).requires_grad_(), normal(DOCUMENTS, LENGTH, HIDDEN)
    return Rows(hidden, targets, weight, states, 0.5 * normal(VOCABULARY, HIDDEN))


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, data: Rows, temperature: float = 1.0) -> torch.Tensor:
    """`[documents, length]` log-probabilities of the targets by one softmax; 0 where there is none."""
    of_all = (hidden @ weight.t() / temperature).log_softmax(-1)
    of_targets = of_all.gather(-1, data.targets.clamp(min=0)[..., None])[..., 0]
    return of_targets.detach() * data.is_label


def outcome(loss: torch.Tensor, data: Rows) -> Outcome:
    return loss.detach(), *torch.autograd.grad(loss, [data.hidden, data.weight])


def agree(ours: Outcome, theirs: Outcome, tolerance: float = FP32) -> bool:
    """Whether loss and gradients are the same; none of them is 0."""
    assert all(part.abs().max() > 1e-4 for part in theirs)
    return all(
        float((own - other).abs().max()) <= tolerance * float(other.abs().max())
        for own, other in zip(ours, theirs, strict=True)
    )


def ours(objective: str, data: Rows, scored: ScoredDocuments, temperature: float = 1.0, **options: Any) -> torch.Tensor:
    """Our loss, a mean over its examples: pairs, answers."""
    loss: Any = loss_of(objective, **options)

    def of_documents(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(DOCUMENTS).index_add(0, data.of_label, values)

    def score(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if getattr(loss, "of_tokens", False):
            result: tuple[torch.Tensor, torch.Tensor] = loss(values, scored, of_documents)
        else:
            result = loss(of_documents(values), scored)
        return result

    labels, part = data.targets[data.is_label], VocabularyShard(0, VOCABULARY)
    hidden = data.hidden[data.is_label]
    summed, _ = scored_log_probs(hidden, data.weight, None, labels, HeadRule(), part, score, temperature)
    examples = DOCUMENTS if objective in ("kto", "grpo") else DOCUMENTS // 2
    return summed / examples


def pairs_apart(values: torch.Tensor) -> torch.Tensor:
    """liger wants all chosen answers first; ours are chosen and rejected in turn."""
    return torch.cat([values[0::2], values[1::2]])


def documents(data: Rows, **more: Any) -> ScoredDocuments:
    reference = log_probs(data.other_hidden, data.other_weight, data).sum(1)
    # A supervised loss is a mean over the tokens of the chosen answers, of all pairs together.
    scales = Scales(DOCUMENTS / 2 / float(data.tokens[0::2].sum()))
    return ScoredDocuments(data.of_label, data.tokens, reference, scales, np.arange(DOCUMENTS), **more)


PAIRED = {
    "dpo": (LigerFusedLinearDPOLoss, {"beta": 0.3}, {}),
    "dpo hinge": (LigerFusedLinearDPOLoss, {"beta": 0.3, "loss_type": "hinge"}, {}),
    "dpo robust": (LigerFusedLinearDPOLoss, {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1}, {}),
    # On means per token, which liger has as an option of the log-probabilities.
    "dpo sigmoid_norm": (LigerFusedLinearDPOLoss, {"beta": 2.0}, {"average_log_prob": True, "loss_type": "sigmoid"}),
    "dpo with the supervised loss": (LigerFusedLinearDPOLoss, {"beta": 0.3, "nll_weight": 0.7}, {}),
    "simpo": (LigerFusedLinearSimPOLoss, {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1}, {}),
    "cpo": (LigerFusedLinearCPOLoss, {"beta": 0.3, "label_smoothing": 0.1, "nll_weight": 0.7}, {}),
    "orpo": (LigerFusedLinearORPOLoss, {"beta": 0.3}, {}),
}  # liger computes the supervised loss of `orpo` on the answer, as ours, unless it gets labels of its own for it


def of_pairs(case: str, data: Rows) -> Outcome:
    """liger's loss; `alpha` weights the supervised one, but for `orpo`, where it is 1 as in ours."""
    build, options, theirs = PAIRED[case]
    names = {"simpo_gamma": "gamma", "nll_weight": "alpha"}
    options = {names.get(name, name): value for name, value in options.items()}
    supervised = "alpha" in options or case == "orpo"
    loss = build(compiled=False, compute_nll_loss=supervised, **{**options, **theirs})
    inputs = [data.weight, pairs_apart(data.hidden), pairs_apart(data.targets)]
    if case.startswith("dpo"):
        inputs += [None, pairs_apart(data.other_hidden), data.other_weight]
    return outcome(loss(*inputs)[0], data)


@pytest.mark.parametrize("case", PAIRED)
def test_losses_of_pairs_equal_those_of_liger(case: str) -> None:
    data = rows()
    objective, _, loss_type = case.partition(" ")
    options = dict(PAIRED[case][1]) | ({"loss_type": loss_type} if loss_type == "sigmoid_norm" else {})
    theirs = of_pairs(case, data)
    assert agree(outcome(ours(objective, data, documents(data), **options), data), theirs)
    # Controls: another beta, labels of the position before.
    other = ours(objective, data, documents(data), **{**options, "beta": 1.1 * options["beta"]})
    assert not agree(outcome(other, data), theirs)
    shifted = data._replace(targets=data.targets.roll(1, 1))
    assert not agree(outcome(ours(objective, shifted, documents(shifted), **options), shifted), theirs)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_equals_that_of_liger(loss_type: str) -> None:
    data, kl = rows(), torch.tensor(0.7)
    scored = documents(data, desirable=DESIRABLE, kl=kl)
    liger = LigerFusedLinearKTOLoss(beta=0.3, compiled=False, use_ref_model=True)
    frozen = (data.other_hidden, data.other_weight, None, kl if loss_type == "kto" else None)
    theirs = outcome(liger(data.hidden, data.weight, data.targets, None, DESIRABLE, *frozen)[0], data)
    assert agree(outcome(ours("kto", data, scored, beta=0.3, loss_type=loss_type), data), theirs)
    # Controls: another beta, the other labels.
    assert not agree(outcome(ours("kto", data, scored, beta=0.33, loss_type=loss_type), data), theirs)
    wrong = documents(data, desirable=~DESIRABLE, kl=kl)
    assert not agree(outcome(ours("kto", data, wrong, beta=0.3, loss_type=loss_type), data), theirs)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_grpo_equals_that_of_liger(loss_type: str, beta: float) -> None:
    """Answers of earlier weights, which a sampler of other precision sampled: ratios, clipping, weights of tokens."""
    data, temperature, cap = rows(), 0.8, 1.05
    generator = torch.Generator().manual_seed(5)

    def near(values: torch.Tensor, by: float) -> torch.Tensor:
        noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        return (values + by * noise) * data.is_label

    now = log_probs(data.hidden.detach(), data.weight.detach(), data, temperature)
    old, initial = near(now, 0.3), near(now, 0.3)
    sampled = near(old, 0.05)
    advantages = torch.randn(DOCUMENTS, generator=generator, dtype=torch.float64)
    # `dapo` divides by the tokens of all answers.
    scales = Scales(DOCUMENTS / float(data.tokens.sum()))
    parts = {"sampled": sampled[data.is_label], "old": old[data.is_label], "advantages": advantages}
    parts |= {"initial": initial[data.is_label]} if beta else {}
    scored = ScoredDocuments(data.of_label, data.tokens, None, scales, np.arange(DOCUMENTS), is_fresh=False, **parts)
    options: dict[str, Any] = {"loss_type": loss_type, "max_completion_length": LENGTH, "temperature": temperature,
                               "importance_sampling_cap": cap, "epsilon": 0.2, "epsilon_high": 0.25, "beta": beta,
                               "reward_funcs": "exact_match"}  # fmt: skip
    own = outcome(ours("grpo", data, scored, **options), data)

    gaps, by_answer = old - sampled, loss_type == "gspo"  # which liger has as the level of `grpo`
    if by_answer:
        gaps = gaps.sum(1) / data.tokens
    liger = LigerFusedLinearGRPOLoss(
        beta, compiled=False, use_ref_model=beta > 0, epsilon_low=0.2, epsilon_high=0.25,
        loss_type="grpo" if by_answer else loss_type, max_completion_length=LENGTH, temperature=temperature,
        importance_sampling_level="sequence" if by_answer else "token",
    )  # fmt: skip
    loss, metrics = liger(
        data.hidden, data.weight, data.targets.clamp(min=0), data.is_label.double(), advantages,
        ref_per_token_logps=initial if beta else None, old_per_token_logps=old,
        vllm_is_ratio=gaps.exp().clamp(max=cap),
    )  # fmt: skip
    theirs = outcome(loss, data)
    assert by_answer or metrics[-1] > 0, "nothing was clipped"
    assert agree(own, theirs)
    # Controls: another bound of the weights of a sampler, another temperature.
    for other in ({"importance_sampling_cap": 1.0}, {"temperature": 0.9}):
        assert not agree(outcome(ours("grpo", data, scored, **{**options, **other}), data), theirs)


def distilled(data: Rows, **options: Any) -> torch.Tensor:
    """Our mean over the trained tokens."""
    used = config("distill", teacher="embedded", **options).objective_options()
    student, teacher = (nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64) for _ in range(2))
    student.weight, teacher.weight = data.weight, nn.Parameter(data.other_weight)
    head = Head(data.hidden[data.is_label], student, HeadRule())
    other = Head(data.other_hidden[data.is_label], teacher, HeadRule())
    loss, _, gradients = compare_heads(head, other, data.targets[data.is_label], Divergence.of(used), True)
    return attach(loss, head, gradients) / data.tokens.sum()


@pytest.mark.parametrize("nll_weight", [0.0, 0.4])
@pytest.mark.parametrize(
    ("loss_type", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)], ids=["forward", "reverse", "jsd"]
)
def test_distillation_equals_that_of_liger(loss_type: str, beta: float, nll_weight: float) -> None:
    """liger's `beta` is the share of the teacher too, and its ends are the two divergences without a mixture."""
    data, options = rows(), {"loss_type": loss_type, "distill_temperature": 1.7, "nll_weight": nll_weight}
    options |= {"jsd_beta": beta} if loss_type == "jsd" else {}
    liger = LigerFusedLinearJSDLoss(nll_weight, 1.0, beta, temperature=1.7, compiled=False, chunk_size=16)
    flat = [values.flatten(0, 1) for values in (data.hidden, data.other_hidden, data.targets)]
    theirs = outcome(liger(flat[0], data.weight, flat[1], data.other_weight, flat[2]), data)
    tolerance = FP32 if nll_weight else FP64
    own = outcome(distilled(data, **options), data)
    assert agree(own, theirs, tolerance)
    if not nll_weight:  # all but the sum
        assert agree(own[1:], theirs[1:], 1e-12)
    # Controls: another temperature, labels of the position before.
    assert not agree(outcome(distilled(data, **{**options, "distill_temperature": 1.8}), data), theirs, tolerance)
    shifted = data._replace(targets=data.targets.roll(1, 1))
    assert not agree(outcome(distilled(shifted, **options), shifted), theirs, tolerance)
