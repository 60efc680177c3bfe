"""The evaluation data row by row: what a model loses on each, and its answer. `--eval_only true` does nothing else.

Rows are told apart by file and line, so that models with other tokenizers and templates can be compared on them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count as count_from
from typing import Any

import numpy as np
import torch

from trainers.config.objectives import OBJECTIVES
from trainers.config.options import TrainConfig
from trainers.data.batches import evaluation_batches
from trainers.data.cache import TokenSet
from trainers.data.joined import JoinedSet
from trainers.data.mix import MixedSet
from trainers.data.prepare import load_tokenizer
from trainers.data.rollouts import Prompt, is_answerable, prompt_of, refuse_cut_rows
from trainers.data.rows import Rows
from trainers.generation import Generation, generate, stop_ids
from trainers.model.rope_scaling import position_limit
from trainers.monitor.stop_requests import Requests
from trainers.objectives.sampling import Sampled
from trainers.run.ending import Ending
from trainers.run.folder import write_atomic
from trainers.step import TrainContext

_BY_DOCUMENT = replace(OBJECTIVES["sft"], loss_of="documents", divisor="examples")
"""Supervised fine-tuning whose losses are told apart by document."""
Documents = TokenSet | JoinedSet


class _Stopped(Exception):
    """A stop was requested; raised on every rank before the same batch."""


def evaluate_rows(context: TrainContext, documents: Documents, base: Any) -> Ending:
    """Writes the evaluation of each row into the run folder. Collective.

    A request to stop ends it before the next batch, without a file: some of the rows would pass for all of them.

    Args:
        context: the run.
        documents: its evaluation data.
        base: the transformers model, for the tokens that end its answers and its positions.

    Returns:
        How the run ends.

    Raises:
        ConfigError: if answers are to be generated and rows were cut.
    """
    requests = Requests(context.run, context.ranks.is_main, context.launcher)
    context.report(state="running", step=0)
    try:
        _evaluate_rows(context, documents, base, partial(_beat_or_stop, context, requests))
    except _Stopped:
        if (source := requests.stopped_by(context.ranks)) is None:
            return Ending("failed", "the launcher was killed; no row was written", retry="again")
        return Ending("stopped", f"stopped by {source} before all rows were evaluated; no row was written")
    return Ending("done", None)


def _beat_or_stop(context: TrainContext, requests: Requests, section: str, **details: Any) -> None:
    """The heartbeat before each batch. Collective, as every rank has as many batches.

    Raises:
        _Stopped: on every rank, if any of them is to stop.
    """
    context.heartbeat.at(section, step=0, **details)
    stop, _, _ = requests.poll()
    if context.ranks.sum(torch.tensor(float(stop), device=context.ranks.device)).item():
        raise _Stopped


def _evaluate_rows(context: TrainContext, documents: Documents, base: Any, beat: Callable[..., None]) -> None:
    tokenizer = load_tokenizer(context.config)
    prompts = [prompt_of(documents, index) for index in range(len(documents))]
    undesirable = sum(not prompt.desirable for prompt in prompts)
    if undesirable and context.ranks.is_main:
        print(f"{undesirable:,} rows whose answer is labelled as undesirable are left out", flush=True)
    refuse_cut_rows(context.config, documents)
    to_answer = _prompts_to_answer(context.config, prompts, base)
    losses = _losses(context, documents, beat)
    answers: dict[int, tuple[np.ndarray, bool]] = {}
    if to_answer:
        sampled = _answers(context, [prompts[index].tokens for index in to_answer], tokenizer, base, beat)
        answers = dict(zip(to_answer, zip(sampled.tokens, sampled.ended, strict=True), strict=True))
    if not context.ranks.is_main:
        return
    lines = []
    for index, prompt in enumerate(prompts):
        if not prompt.desirable:
            continue
        loss, trained = losses[index]
        tokens, ended = answers.get(index, (None, False))
        row = {
            "row": documents.where(index), "source": _source(documents, index),
            "loss": loss if math.isfinite(loss) else None, "tokens": trained,
            "characters": _trained_characters(documents, index, tokenizer),
            "prompt": tokenizer.decode(prompt.tokens),
            "expected": prompt.expected(tokenizer.decode),
            "answer": None if tokens is None else tokenizer.decode(tokens, skip_special_tokens=True),
            "ended": ended,
        }  # fmt: skip
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomic(context.run.evaluation, "".join(lines))


def _prompts_to_answer(config: TrainConfig, prompts: list[Prompt], base: Any) -> list[int]:
    """Numbers of the documents to answer: those with a prompt that leaves room, and with an answer worth giving.

    Prompts of similar length stand side by side, as a batch is as wide as its longest.
    """
    limit, most = position_limit(base.config.get_text_config()), config.eval_answer_tokens
    numbers = [
        index
        for index, prompt in enumerate(prompts)
        if most and prompt.desirable and is_answerable(prompt, limit, most)
    ]
    return sorted(numbers, key=lambda index: len(prompts[index].tokens))


def _trained_characters(documents: Documents, index: int, tokenizer: Any) -> int:
    """Characters of all that is trained of a document."""
    tokens, mask = documents.document(index)
    return len(tokenizer.decode(tokens[mask], skip_special_tokens=True))


def _losses(context: TrainContext, documents: Documents, beat: Callable[..., None]) -> list[tuple[float, int]]:
    """For each document its loss, summed over its trained tokens in nats, and their number."""
    config, mesh = context.config, context.mesh
    fixed = config.torch_compile and config.packing
    rows = Rows(documents, config.row_tokens, config.packing, fixed, objective=_BY_DOCUMENT)
    micro_batches = evaluation_batches(rows, config.per_device_eval_batch_size, mesh.data_rank, mesh.sizes.data)
    context.backend.model.eval()
    own: list[tuple[int, tuple[float, int]]] = []

    def count(_: str) -> None:
        beat("evaluation", rows=(min(len(own) * mesh.sizes.data, len(documents)), len(documents)))

    for numbers, of_documents in context.backend.label_log_probs(micro_batches, count):
        for number, values in zip(numbers, of_documents, strict=True):
            own.append((int(number), (-float(values.sum(dtype=np.float64)), len(values))))
    context.backend.model.train()
    by_number = dict(entry for entries in context.ranks.gather(own) for entry in entries)
    return [by_number[number] for number in range(len(documents))]


def _answers(
    context: TrainContext, prompts: list[np.ndarray], tokenizer: Any, base: Any, beat: Callable[..., None]
) -> Sampled:
    """The most likely answers to prompts."""
    config = context.config
    stops = stop_ids(config, tokenizer, base)
    settings = Generation(config.per_device_eval_batch_size, config.eval_answer_tokens, stops)
    begun = count_from(0, settings.batch_size * context.mesh.sizes.data)  # prompts before each batch

    def count(section: str, **details: Any) -> None:
        beat(section, rows=(next(begun), len(prompts)), **details)

    return generate(context.backend, context.mesh, context.ranks, prompts, settings, count)


def _source(documents: Documents, index: int) -> str | None:
    """The source of a document in a mix."""
    if not isinstance(documents, MixedSet):
        return None
    return documents.mix.names[int(np.searchsorted(documents.bounds, index, side="right")) - 1]
