"""The loss of a distillation against its formulas in fp64, autograd, and TRL; chunks, heads and vocabularies."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from trl.experimental.gkd import GKDTrainer

from trainers.data.layout import TopTokens
from trainers.objectives import distillation
from trainers.objectives.distillation import Divergence, Head, attach, compare_heads
from trainers.objectives.log_probs import VocabularyShard
from trainers.objectives.output_head import HeadRule

TOKENS, WIDTH, OTHER_WIDTH, VOCABULARY = 70, 5, 7, 11
LOSS_TYPES = ("forward_kl", "reverse_kl", "jsd")
PLAIN = {"jsd_beta": 0.3, "distill_temperature": 1.0, "nll_weight": 0.0}


def formula(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, loss_type: str, **options: Any) -> Any:
    """The summed loss of logits `[tokens, vocabulary]`, from its definition."""
    beta, temperature = options["jsd_beta"], options["distill_temperature"]
    q, p = torch.softmax(student / temperature, -1), torch.softmax(teacher / temperature, -1)
    m = beta * p + (1 - beta) * q
    loss = {
        "forward_kl": (p * (p / q).log()).sum(),
        "reverse_kl": (q * (q / p).log()).sum(),
        "jsd": beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum(),
    }[loss_type]
    return loss + options["nll_weight"] * functional.cross_entropy(student, labels, reduction="sum")


class Case:
    """Heads of a student and a teacher with random weights, in fp64."""

    def __init__(self, own_rows: int = VOCABULARY, other_rows: int = VOCABULARY, bias: bool = False):
        torch.manual_seed(0)
        self.rule, self.other_rule = HeadRule(0.7, 2.0), HeadRule(1.3, None)
        self.layer = nn.Linear(WIDTH, own_rows, bias=bias, dtype=torch.float64)
        self.other = nn.Linear(OTHER_WIDTH, other_rows, bias=bias, dtype=torch.float64)
        self.hidden = (3 * torch.randn(TOKENS, WIDTH, dtype=torch.float64)).requires_grad_()
        self.other_hidden = 3 * torch.randn(TOKENS, OTHER_WIDTH, dtype=torch.float64)
        self.labels = torch.randint(0, VOCABULARY, (TOKENS,))

    def ours(self, loss_type: str, **options: Any) -> tuple[torch.Tensor, ...]:
        """Loss and gradients of the chunked code."""
        student = Head(self.hidden, self.layer, self.rule)
        teacher = Head(self.other_hidden, self.other, self.other_rule)
        divergence = Divergence(loss_type, **options)
        loss, _, gradients = compare_heads(student, teacher, self.labels, divergence, want_gradients=True)
        return self._with_gradients(attach(loss, student, gradients))

    def wanted(self, loss_type: str, rows: int = VOCABULARY, **options: Any) -> tuple[torch.Tensor, ...]:
        """Loss and gradients of the formula, by autograd."""
        student = self.rule(self.layer(self.hidden))[:, :rows]
        teacher = self.other_rule(self.other(self.other_hidden))[:, :rows].detach()
        return self._with_gradients(formula(student, teacher, self.labels, loss_type, **options))

    def _with_gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [self.hidden, *self.layer.parameters()]
        return (loss.detach(), *torch.autograd.grad(3.0 * loss, weights))


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("loss_type", "temperature"), list(product(LOSS_TYPES, (1.0, 2.5))))
def test_loss_and_gradients_are_those_of_the_formula(loss_type: str, temperature: float) -> None:
    """With a scale and a softcap, a bias, and a share of the supervised loss."""
    case = Case(bias=True)
    options = {"jsd_beta": 0.3, "distill_temperature": temperature, "nll_weight": 0.4}
    assert same(case.ours(loss_type, **options), case.wanted(loss_type, **options))
    for control in ({"jsd_beta": 0.7}, {"distill_temperature": 1.7}, {"nll_weight": 0.0}):
        changed = case.wanted(loss_type, **{**options, **control})
        assert same(case.ours(loss_type, **options), changed) == ("jsd_beta" in control and loss_type != "jsd")


def test_the_losses_differ() -> None:
    case = Case()
    losses = [case.ours(loss_type, **PLAIN) for loss_type in LOSS_TYPES]
    assert not any(same(first, second) for first, second in pairwise(losses))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_chunks_change_nothing(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    at_once = case.ours(loss_type, **PLAIN)
    monkeypatch.setattr(distillation, "LOGITS_PER_CHUNK", 1)  # 64 tokens, and 6
    assert same(case.ours(loss_type, **PLAIN), at_once)


@pytest.mark.parametrize(("own_rows", "other_rows"), [(VOCABULARY + 5, VOCABULARY), (VOCABULARY, VOCABULARY + 5)])
def test_rows_that_pad_the_larger_head_are_cut_off(own_rows: int, other_rows: int) -> None:
    case = Case(own_rows, other_rows)
    assert same(case.ours("jsd", **PLAIN), case.wanted("jsd", **PLAIN))


def test_a_head_that_the_model_applies_itself_gets_the_gradient_of_its_logits() -> None:
    case = Case()
    logits = case.rule(case.layer(case.hidden))
    teacher = Head(case.other_rule(case.other(case.other_hidden)), None, HeadRule())
    student = Head(logits, None, HeadRule())
    loss, _, gradients = compare_heads(student, teacher, case.labels, Divergence("jsd", **PLAIN), True)
    assert same(case._with_gradients(attach(loss, student, gradients)), case.wanted("jsd", **PLAIN))


@pytest.mark.parametrize(("loss_type", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
def test_the_loss_is_that_of_trl(loss_type: str, beta: float) -> None:
    student, teacher = torch.randn(2, TOKENS, VOCABULARY, dtype=torch.float64).mul(3).unbind()
    options = {"jsd_beta": 0.3, "distill_temperature": 1.7, "nll_weight": 0.0}
    ours, _ = Divergence(loss_type, **options).of_logits(
        student, teacher, torch.zeros(TOKENS).long(), VocabularyShard(0, VOCABULARY), False
    )
    theirs = {
        value: GKDTrainer.generalized_jsd_loss(student[None], teacher[None], None, value, 1.7, "sum")
        for value in (beta, 0.5)
    }
    assert ours.item() == pytest.approx(theirs[beta].item(), rel=1e-12)
    assert ours.item() != pytest.approx(theirs[0.5].item(), rel=1e-3)


@pytest.mark.parametrize(("loss_type", "temperature"), list(product(LOSS_TYPES, (1.0, 2.5))))
def test_recorded_tokens_and_all_others_are_classes(loss_type: str, temperature: float) -> None:
    """The formula of their probabilities, and of all tokens as a control."""
    case, options = Case(bias=True), {"jsd_beta": 0.3, "distill_temperature": temperature, "nll_weight": 0.4}

    def classes(logits: torch.Tensor) -> torch.Tensor:
        likely = torch.softmax(logits / temperature, -1).gather(1, ids)
        return torch.cat([likely, 1 - likely.sum(-1, keepdim=True)], -1)

    expected = case.other_rule(case.other(case.other_hidden)).detach()
    ids = expected.topk(3, -1).indices
    top = TopTokens(ids, classes(expected).log(), VOCABULARY)
    student, divergence = Head(case.hidden, case.layer, case.rule), Divergence(loss_type, **options)
    loss, metrics, gradients = compare_heads(student, top, case.labels, divergence, want_gradients=True)
    logits = case.rule(case.layer(case.hidden))
    # At temperature 1, logarithms of probabilities are logits.
    compared = {**options, "distill_temperature": 1.0, "nll_weight": 0.0}
    zeros = torch.zeros_like(case.labels)
    of_classes = formula(classes(logits).log(), top.log_probs, zeros, loss_type, **compared)
    nll = 0.4 * functional.cross_entropy(logits, case.labels, reduction="sum")
    ours = case._with_gradients(attach(loss, student, gradients))
    assert same(ours, case._with_gradients(of_classes + nll))
    assert not same(ours, case.wanted(loss_type, **options))
    _, metrics, _ = compare_heads(student, top, case.labels, divergence, want_gradients=False)
    kl = formula(classes(logits).log(), top.log_probs, zeros, "forward_kl", **compared)
    assert metrics[0].item() == pytest.approx(kl.item())
    assert metrics[1].item() == (logits.argmax(-1) == case.labels).sum()


def test_metrics_are_counted_without_gradients() -> None:
    case = Case()
    student, teacher = Head(case.hidden, case.layer, case.rule), Head(case.other_hidden, case.other, case.other_rule)
    loss, metrics, gradients = compare_heads(student, teacher, case.labels, Divergence("jsd", **PLAIN), False)
    predicted = case.rule(case.layer(case.hidden)).argmax(-1)
    assert metrics[0].item() == pytest.approx(case.wanted("forward_kl", **PLAIN)[0].item())
    assert metrics[1].item() == (predicted == case.labels).sum()
    assert loss.item() == pytest.approx(case.wanted("jsd", **PLAIN)[0].item())
    assert set(gradients) == {None}


def test_logits_of_all_tokens_never_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor is a chunk of logits, not one of all tokens."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(part))
            return result

    monkeypatch.setattr(distillation, "LOGITS_PER_CHUNK", 2**20)
    vocabulary, tokens = 5000, 600
    layer = nn.Linear(8, vocabulary, bias=False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    head = Head(hidden, layer, HeadRule())
    with Sizes():
        compare_heads(head, head, torch.zeros(tokens).long(), Divergence("jsd", **PLAIN), True)
    assert max(sizes) <= distillation.LOGITS_PER_CHUNK // 2 < tokens * vocabulary / 5
