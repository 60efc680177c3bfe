"""`DocumentLoss`: what an objective computes from the log-probabilities of documents; and the one of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from trainers.config.mistakes import ConfigError
from trainers.config.objective_file import split_objective
from trainers.config.objectives import ObjectiveSpec
from trainers.config.options import TrainConfig
from trainers.data.layout import ScoredDocuments
from trainers.objectives.cpo import Cpo
from trainers.objectives.dpo import Dpo
from trainers.objectives.grpo import Grpo
from trainers.objectives.kto import Kto
from trainers.objectives.orpo import Orpo
from trainers.objectives.reward import Reward
from trainers.objectives.simpo import Simpo

DocumentLoss = Callable[[torch.Tensor, ScoredDocuments], tuple[torch.Tensor, torch.Tensor]]
"""Summed loss (a scalar) and summed metrics `[metrics]` of the log-probabilities or scores `[documents]` of a
micro-batch."""
TokenLoss = Grpo
"""The same of the log-probabilities `[labels]`, which it can sum over documents."""
_LOSSES: dict[str, Callable[..., DocumentLoss | TokenLoss]] = {
    "dpo": Dpo, "simpo": Simpo, "cpo": Cpo, "orpo": Orpo, "kto": Kto, "reward": Reward, "grpo": Grpo,
}  # fmt: skip


def document_loss(config: TrainConfig) -> DocumentLoss | TokenLoss | None:
    """The loss of the config's objective; None if it is a sum over tokens, which is no loss of documents."""
    if config.objective_spec.loss_of != "documents":
        return None
    if config.objective in _LOSSES:
        return _LOSSES[config.objective](**config.objective_options())
    return OwnLoss(_class_in_file(config.objective)(**config.objective_options()), config.objective_spec)


class OwnLoss:
    """A loss from a file of one's own, which must return what its `spec` says.

    Args:
        loss: the object of the class.
        spec: what the class needs and reports.
    """

    def __init__(self, loss: DocumentLoss, spec: ObjectiveSpec):
        self.loss, self.spec = loss, spec

    def __call__(self, log_probs: torch.Tensor, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DocumentLoss`.

        Raises:
            ConfigError: if the loss is no scalar or has no gradient, or there are more or fewer metrics than names.
        """
        result: Any = self.loss(log_probs, documents)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(v, torch.Tensor) for v in result)):
            problem = f"returns {type(result).__name__}, not a tuple of two tensors, the loss and the metrics"
            remedy = "return loss, torch.stack([...]); without metrics, loss.new_zeros(0)"
            raise ConfigError.about("objective", type(self.loss).__name__, problem, remedy)
        loss, metrics = result
        if self.spec.mismatched and documents.desirable is None:  # the divergence of mismatched documents, no loss
            return loss, metrics
        names, shape = self.spec.metrics, list(metrics.shape)
        if shape != [len(names)]:
            returned = f"{shape[0]} metrics" if len(shape) == 1 else f"metrics of shape {shape}"
            problem = f"returns {returned}, and its spec has {len(names)}: {', '.join(names)}"
            raise ConfigError.about("objective", type(self.loss).__name__, problem, "return as many, in this order")
        if loss.dim() > 0:
            problem = f"returns a loss of shape {list(loss.shape)}, not a sum"
            raise ConfigError.about("objective", type(self.loss).__name__, problem, "sum it over the documents")
        if torch.is_grad_enabled() and log_probs.requires_grad and not loss.requires_grad:
            problem = "returns a loss without a gradient"
            raise ConfigError.about(
                "objective", type(self.loss).__name__, problem, "compute it outside torch.no_grad()"
            )
        return loss, metrics


def _class_in_file(objective: str) -> Callable[..., DocumentLoss]:
    """Imports the class of the objective `path.py:Name`, which runs the file.

    Raises:
        ConfigError: if the file fails, or its class is no `DocumentLoss`.
    """
    parts = split_objective(objective)
    assert parts is not None
    spec = importlib.util.spec_from_file_location("tunesmith_objective", parts[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does
        problem = f"fails when it is imported: {type(error).__name__}: {error}"
        raise ConfigError.about("objective", objective, problem, "correct the file") from error
    chosen = getattr(module, parts[1], None)
    if not isinstance(chosen, type) or not hasattr(chosen, "spec") or getattr(chosen, "__abstractmethods__", None):
        remedy = "derive it from PairLoss of trainers.objectives.pairs, or give it __init__(**options) and __call__"
        raise ConfigError.about("objective", objective, "is no class of losses, or lacks a method", remedy)
    return chosen
