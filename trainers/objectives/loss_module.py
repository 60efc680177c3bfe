"""The model and its loss as one module, which the strategy wraps.

The loss is computed inside the wrapped module, where FSDP or ZeRO have gathered the weights of the output head. It is
summed over the micro-batch in fp32; the caller divides by the tokens or examples of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainers.data.layout import AttentionMetadata, DocumentLayout, MetadataRoute, ScoredDocuments, TopTokens
from trainers.data.micro_batch import LabelSources
from trainers.data.noise import TokenNoise
from trainers.objectives.distillation import Head, attach, compare_heads
from trainers.objectives.load_balancing import LoadBalancing, weighted_probabilities
from trainers.objectives.log_probs import Score, VocabularyShard, scored_log_probs
from trainers.objectives.objective import DocumentLoss, TokenLoss
from trainers.objectives.output_head import HeadRule, decoder_of, find_head_rule, head_weights, scalar_head
from trainers.objectives.sampling import SampleRequest, sample
from trainers.objectives.sft import linear_cross_entropy


def inner_model(model: Any) -> Any:
    """The transformers model, unwrapped from peft if necessary."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Lets a peft model compute as its base; peft's own way also freezes the adapters, which wrappers must not see."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class LossModule(nn.Module):
    """The model and its loss as one module, which the strategy wraps.

    Args:
        model: a transformers or peft causal language model, or one with a scalar head, which provides all parameters.
        compute: dtype of matrix products. For every strategy it is applied only here, by autocast: parameters, norms,
            softmax, logits, loss and gradient reduction stay fp32.
        offloads: keep the activations saved for the backward pass in CPU memory.
        objective: the loss of documents; None for a loss that is a sum over tokens.

    `teacher`, if set, is the `Frozen` model that the loss compares with (`trainers/objectives/teacher.py`): the teacher
    of a distillation, or the initial model. The strategy wraps it too. It is no part of `model`, and so not of
    checkpoints, exports and counts of weights.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype = torch.float32,
        offloads: bool = False,
        objective: DocumentLoss | TokenLoss | None = None,
    ):
        super().__init__()
        self.model, self.compute, self.offloads = model, compute, offloads
        self.objective = objective
        self.temperature = objective.temperature if isinstance(objective, TokenLoss) else 1.0  # of scored labels
        self.penalizes_kl = isinstance(objective, TokenLoss) and objective.beta > 0
        self.teacher: Any = None
        self.divergence: Any = None  # the `Divergence` from a teacher whose predictions were recorded
        self.over_ranks: Any = None  # set if rows are sharded: see trainers/parallel/sequence.py
        self.sum_over_shards: Callable[[torch.Tensor], torch.Tensor] | None = None  # the same
        self.counts_documents = True  # False if another rank with a shard of the same rows counts their loss
        self.stored: dict[str, Any] = {}  # where weights on the meta device are: see trainers/model/stored.py
        self.scores_ends = scalar_head(self.base) is not None  # see `ObjectiveSpec.scalar_head`
        rule = None if self.scores_ends else find_head_rule(self.base)
        self.chunked = rule is not None or self.scores_ends
        self.rule = rule or HeadRule()
        self.route = MetadataRoute(self.base, decoder_of(self.base) if self.chunked else self.base)
        self.noise: TokenNoise | None = None  # of the current forward pass
        self.needs_positions = any(getattr(module, "needs_positions", False) for module in self.base.modules())
        self.mixers = [layer for layer in self.base.modules() if getattr(layer, "sees_documents", False)]
        if self.mixers:  # see trainers/model/mixers.py; they do not get the arguments of attention layers
            self.route.by_argument = False
        self.balancing = LoadBalancing.of(self.base.config.get_text_config())  # the language part, if multimodal
        adapted: list[Any] = [layer for layer in self.model.modules() if hasattr(layer, "cast_input_dtype_enabled")]
        for layer in adapted if compute != torch.float32 else ():
            layer.cast_input_dtype_enabled = False  # peft would copy each input to fp32, and autocast cast it back
        # Tensor parallelism replaces these (`trainers.parallel.tensor.split_model`); expert parallelism only the first.
        self.tensor: Any = None
        self.vocabulary = VocabularyShard(0, self.vocab_size)
        self.cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = linear_cross_entropy

    @property
    def base(self) -> Any:
        """The transformers model."""
        return inner_model(self.model)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return int(self.base.config.get_text_config().vocab_size)

    def accept_noise(self) -> None:
        """Prepares the embedding for the `noise` of forward passes."""
        self.base.get_input_embeddings().register_forward_hook(self._add_noise)

    def _add_noise(self, embedding: nn.Module, ids: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        return None if self.noise is None else self.noise.added_to(embedded)

    def tie_weights(self) -> None:
        """Ties embedding and head again; Accelerate calls this after replacing weights for FSDP 2."""
        self.base.tie_weights()
        if self.teacher is not None:
            self.teacher.tie_weights()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: DocumentLayout | None,
        positions: torch.Tensor, labels: torch.Tensor, own_forward: bool = False,
        real_tokens: torch.Tensor | None = None, expert_weights: torch.Tensor | None = None,
        scored: ScoredDocuments | None = None, only_log_probs: bool = False, taught: bool | TopTokens = False,
        of_teacher: bool = False, per_label: bool = False, request: SampleRequest | None = None,
        sources: LabelSources | None = None, noise: TokenNoise | None = None,
    ) -> Any:  # fmt: skip
        """Summed loss over the trained tokens, or over the examples that `scored` holds.

        A model with a scalar head has a score for each of `positions` in place of the log-probability of its label.
        Without `scored`, their sum takes the place of the loss.

        Args:
            input_ids, position_ids: `[batch, sequence]`; positions restart at each document.
            documents: boundaries of the documents in packed rows; None for one document per row.
            positions: `[trained]` index into the flattened batch of the token before each trained one.
            labels: `[trained]` the trained tokens.
            own_forward: call the model with the token ids only, as the reference of the probe.
            real_tokens: `[batch, sequence]`, False for padding; given if the load of experts is balanced.
            expert_weights: `[experts]` from `trainers.objectives.load_balancing`; None to count the routing.
            scored: the documents that the objective compares; None for the supervised loss.
            only_log_probs: return this rank's part of the documents' log-probabilities in place of the loss.
            taught: compute the loss of a distillation, not the supervised one; what a recorded teacher predicts.
            of_teacher: compute the supervised loss of the teacher, for the probe.
            per_label: return the log-probability `[labels]` of each label in place of the loss.
            request: prompts to answer; then nothing else is computed, and the answers are returned.
            sources: which source of a mix each label is from.
            noise: what to add to the embeddings of the tokens.

        Returns:
            The summed loss (fp32 scalar), and the number of correctly predicted tokens (int64 scalar; the chunked loss
            counts 0 with gradients), the loss of each of the `sources`, or the metrics `[metrics]` of the objective.
            Gradients include those of the load-balancing loss, the loss does not. With `real_tokens` but no
            `expert_weights`: routing counts (`LoadBalancing.count`) in place of the loss.
        """
        self.noise = noise
        if of_teacher:
            return self.teacher(input_ids, position_ids, documents, positions, labels, own_forward)
        batch = (input_ids, position_ids, documents, positions, labels)
        score = _each if per_label else self._objective_of(scored, only_log_probs, batch)
        # Autocast's cache would keep a half-precision copy of every weight until the end of the pass, sharded or not.
        with torch.autocast(input_ids.device.type, self.compute, self.compute != torch.float32, cache_enabled=False):
            if request is not None:
                return sample(self.base, request, input_ids.device)
            if own_forward and (self.tensor is None or self.tensor.by_expert):
                plain = {"output_router_logits": False} if self.balancing is not None else {}
                return self._own_forward({"input_ids": input_ids, "use_cache": False, **plain}, positions, labels)
            with self.route.hand_over(AttentionMetadata(documents, self.over_ranks)) as more:
                inputs = self.inputs(input_ids, position_ids, documents, more, routes=real_tokens is not None)
                if self.balancing is not None and real_tokens is not None and expert_weights is None:
                    routed = decoder_of(self.base)(**inputs).router_logits  # counting needs no head
                    return self.balancing.count(routed, real_tokens), labels.new_zeros(())
                if not self.chunked and taught is False:
                    return self._own_forward(inputs, positions, labels, real_tokens, expert_weights, score, sources)
                output = self.output(inputs)
            picked = self.picked(output, positions)
        if self.scores_ends:
            with torch.autocast(input_ids.device.type, enabled=False):
                loss, metrics = _summed(self._end_scores(picked), labels, score)
            return _with_balance(loss, output, real_tokens, expert_weights), metrics
        head = head_weights(self.base.get_output_embeddings())
        with torch.autocast(input_ids.device.type, enabled=False):  # with fp16, Accelerate wraps all of this in one
            if taught is not False:
                loss, metrics = self._taught(batch, picked, taught)
            elif score is None:
                loss, metrics = self.cross_entropy(picked, head.weight, head.bias, labels, *self.rule, sources)
            else:
                loss, metrics = scored_log_probs(
                    picked, head.weight, head.bias, labels, self.rule, self.vocabulary, score, self.temperature
                )
        return _with_balance(loss, output, real_tokens, expert_weights), metrics

    def inputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: DocumentLayout | None,
        more: dict[str, Any], routes: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of a model call.

        Args:
            input_ids: `[batch, sequence]`.
            position_ids: `[batch, sequence]`.
            documents: boundaries of the documents.
            more: other arguments, from the `MetadataRoute`.
            routes: whether the model returns the logits of its routers, if it balances the load of experts.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
        # Otherwise let the model number the positions of its row itself: RoBERTa's do not start at 0.
        if documents is not None or self.over_ranks is not None or self.needs_positions:
            inputs["position_ids"] = position_ids
        if self.balancing is not None:
            inputs["output_router_logits"] = routes
        return inputs

    def output(self, inputs: dict[str, Any]) -> Any:
        """What the decoder returns; the model, if the loss does not apply its head."""
        with self._resting(inputs["input_ids"].device):
            return decoder_of(self.base)(**inputs) if self.chunked else self.model(**inputs)

    def picked(self, output: Any, positions: torch.Tensor) -> torch.Tensor:
        """`[positions, hidden size]` input of the head in the compute dtype, or the logits, if it was applied."""
        states: torch.Tensor = output.last_hidden_state if self.chunked else output.logits
        picked = states.flatten(0, 1).index_select(0, positions)
        return picked.to(self.compute) if self.chunked and not self.scores_ends else picked

    def head(self, picked: torch.Tensor) -> Head:
        """The output head, with what `picked` returned."""
        part = self.vocabulary if self.vocabulary.group is not None else None
        return Head(picked, self.base.get_output_embeddings() if self.chunked else None, self.rule, part)

    def _taught(
        self, batch: tuple[Any, ...], picked: torch.Tensor, taught: bool | TopTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics `[2]` of a distillation.

        Args:
            batch: the first five arguments of `forward`, which the teacher gets too.
            picked: input of the student's head.
            taught: what a recorded teacher predicts; True to ask one that is loaded.
        """
        student, want = self.head(picked), torch.is_grad_enabled()
        if isinstance(taught, TopTokens):
            loss, metrics, gradients = compare_heads(student, taught, batch[-1], self.divergence, want)
            return attach(loss, student, gradients) if want else loss, metrics
        with torch.no_grad():  # else wrappers would gather the teacher's weights for a backward pass too
            metadata = MetadataRoute.current  # layers of the student may be recomputed in the backward pass
            loss, metrics, gradients = self.teacher(*batch, student=student, want_gradients=want)
            MetadataRoute.current = metadata
        return attach(loss, student, gradients) if want else loss, metrics

    def _objective_of(
        self, scored: ScoredDocuments | None, only_log_probs: bool, batch: tuple[Any, ...]
    ) -> Score | None:
        """What makes loss and metrics of the log-probabilities of labels; None for the supervised loss.

        Args:
            scored: the documents.
            only_log_probs: see `forward`.
            batch: the first five arguments of `forward`, for the initial model, which comes before the trained one.
        """
        if scored is None:
            return None
        if self.penalizes_kl:
            scored = replace(scored, initial=self._initial(*batch))
        return partial(self._score, scored, only_log_probs)

    def _initial(self, *batch: Any) -> torch.Tensor:
        """`[labels]` log-probability of each label under the initial model.

        Args:
            batch: the first five arguments of `forward`.
        """
        with torch.no_grad():
            if self.teacher is not None:
                log_probs, _ = self.teacher(*batch, per_label=True)
            else:
                forward: Any = self.forward  # within that of the wrapper, whose hooks must not run again
                with without_adapters(self.model):
                    log_probs, _ = forward(*batch, per_label=True)
        return log_probs

    def _score(
        self, scored: ScoredDocuments, only_log_probs: bool, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics of the objective, or the documents' log-probabilities and no metrics.

        Args:
            scored: the documents.
            only_log_probs: which of the two.
            log_probs: `[labels]` of the labels on this rank.
        """

        def on_this_rank(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(len(scored.tokens)).index_add(0, scored.of_label, values)

        def of_documents(values: torch.Tensor) -> torch.Tensor:
            summed = on_this_rank(values)
            return summed if self.sum_over_shards is None else self.sum_over_shards(summed)

        if only_log_probs:
            return on_this_rank(log_probs), log_probs.new_zeros(0)
        assert self.objective is not None
        objective: Any = self.objective
        if getattr(objective, "of_tokens", False):
            loss, metrics = objective(log_probs, scored, of_documents)
        else:
            loss, metrics = objective(of_documents(log_probs), scored)
        if self.counts_documents:
            return loss, metrics
        return loss - loss.detach(), torch.zeros_like(metrics)

    def _end_scores(self, picked: torch.Tensor) -> torch.Tensor:
        """`[labels]` fp32 score of hidden states `[labels, hidden size]`, computed in the dtype of the head."""
        head = scalar_head(self.base)
        weight = list(head.parameters())[-1]  # peft's trained copy comes after the frozen one
        scores: torch.Tensor = head(picked.to(weight.dtype))[:, 0]
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def _own_end_scores(self, inputs: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
        """The same by the model's own forward pass, which scores every token before it picks the last of each row."""
        seen = list[torch.Tensor]()
        handle = scalar_head(self.base).register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            self.model(**inputs)
        finally:
            handle.remove()
        return seen[0].flatten(0, 1).index_select(0, positions)[:, 0].float()

    def _resting(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context manager that keeps saved activations in CPU memory if `offloads` is set."""
        pinned = device.type == "cuda"
        return torch.autograd.graph.save_on_cpu(pin_memory=pinned) if self.offloads else nullcontext()

    def _own_forward(
        self,
        inputs: dict[str, Any],
        positions: torch.Tensor,
        labels: torch.Tensor,
        real: torch.Tensor | None = None,
        expert_weights: torch.Tensor | None = None,
        score: Score | None = None,
        sources: LabelSources | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scores_ends:
            return _summed(self._own_end_scores(inputs, positions), labels, score)
        with self._resting(positions.device):
            output = self.model(**inputs)
        picked = output.logits.flatten(0, 1).index_select(0, positions).float()
        if score is not None:
            picked = picked / self.temperature if self.temperature != 1.0 else picked
            loss, metrics = score(-functional.cross_entropy(picked, labels, reduction="none"))
        elif sources is not None:
            losses = functional.cross_entropy(picked, labels, reduction="none")
            loss, metrics = losses.sum(), sources.sums(losses.detach())
        else:
            metrics = (picked.detach().argmax(-1) == labels).sum()
            loss = functional.cross_entropy(picked, labels, reduction="sum")
        return _with_balance(loss, output, real, expert_weights), metrics


def _each(log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of labels as they are, in place of a loss, and no metrics."""
    return log_probs, log_probs.new_zeros(0)


def _summed(
    scores: torch.Tensor,
    labels: torch.Tensor,
    score: Score | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and metrics of the objective from the scores of tokens `[labels]`, or the sum of these and no metrics."""
    return (scores.sum(), labels.new_zeros(())) if score is None else score(scores)


def _with_balance(
    loss: torch.Tensor, output: Any, real: torch.Tensor | None, expert_weights: torch.Tensor | None
) -> torch.Tensor:
    """Adds the gradient of the load-balancing loss, if any, but not its value, which is not part of the logged loss."""
    if real is None or expert_weights is None:
        return loss
    balance = weighted_probabilities(output.router_logits, real, expert_weights)
    return loss + (balance - balance.detach())
