"""Prompts of a data set, and the answers that were sampled for them as documents in memory. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import ANSWER
from trainers.config.options import TrainConfig
from trainers.config.reward_file import columns_of_rewards
from trainers.data.cache import TokenSet

_ORDER = 4_801
"""Begins the seed of the order in which prompts are taken."""
_SPLITS = ("training", "evaluation")


@dataclass(frozen=True)
class Prompt:
    """What a model is to answer.

    Args:
        tokens: token ids before the last answer of a document.
        answer: token ids of that answer in the data, to which rewards may compare; none if the document ends with its
            prompt.
        json: the columns that rewards read as a JSON object, or nothing.
        desirable: the label of that answer; True without labels.
    """

    tokens: np.ndarray
    answer: np.ndarray
    json: bytes = b""
    desirable: bool = True

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Values of the columns that rewards read, with the text of an answer that has a column of its own."""
        return dict(json.loads(self.json)) if self.json else {}

    def expected(self, decode: Callable[..., str]) -> str:
        """The answer in the data, as text; empty without, and if it is undesirable.

        Args:
            decode: the `decode` of the tokenizer.
        """
        if not self.desirable:
            return ""
        return str(self.columns.get(ANSWER) or decode(self.answer, skip_special_tokens=True))

    def has(self, column: str) -> bool:
        """Whether rewards can get a column of it."""
        return column in self.columns or (column == ANSWER and len(self.answer) > 0)


def prompt_of(documents: TokenSet, index: int) -> Prompt:
    """The prompt of a document: all that stands before its last answer, or all of it."""
    tokens, mask = documents.document(index)
    end = len(mask) - int(np.argmax(mask[::-1]))
    before = np.flatnonzero(~mask[:end])
    start = int(before[-1]) + 1 if len(before) else 0
    return Prompt(tokens[:start], tokens[start:end], documents.columns(index), bool(documents.desirable[index]))


def is_answerable(prompt: Prompt, positions: int | None, most_tokens: int) -> bool:
    """Whether a prompt can be answered: text has none, and the first token alone has nothing to be predicted from.

    Args:
        prompt: the prompt.
        positions: positions of the model; None for no limit.
        most_tokens: tokens of an answer, at most.
    """
    length = len(prompt.tokens)
    return length > 1 and (positions is None or length + most_tokens <= positions)


def prompts_to_answer(config: TrainConfig, documents: TokenSet, positions: int | None) -> list[int]:
    """Numbers of the documents whose prompts are answered during training (`eval_generate_steps`).

    They are the first that can be answered in an order by seed and number of rows, so that more prompts of the same
    data contain fewer. Documents that are as long as `max_length` may have been cut, and their prompts and answers with
    them; of a pair, the first counts.

    Args:
        config: the run's config.
        documents: its evaluation data.
        positions: positions of the model; None for no limit.

    Raises:
        ConfigError: if there are none, or rows were split, whose parts nothing tells from rows.
    """
    if documents.report.split_rows:
        problem = f"with {documents.report.split_rows:,} rows of {documents.report.dataset} that overlong=split divides"
        remedy = "a part of a row is no prompt: raise max_length, or use overlong=truncate or drop"
        raise ConfigError.about("eval_generate_steps", config.eval_generate_steps, problem, remedy)
    numbers: list[int] = []
    parts = config.objective_spec.documents
    order = np.random.Generator(np.random.PCG64([_ORDER, config.seed])).permutation(len(documents) // parts) * parts
    for number in order.tolist():
        is_uncut = documents.lengths[number] < config.max_length
        if is_uncut and is_answerable(prompt_of(documents, number), positions, config.eval_answer_tokens):
            numbers.append(number)
        if len(numbers) == config.eval_generate_prompts:
            break
    if not numbers:
        raise ConfigError.about(
            "eval_generate_steps", config.eval_generate_steps,
            f"has nothing to answer: no row of {documents.report.dataset} has a prompt, is shorter than max_length="
            f"{config.max_length}, and leaves room for eval_answer_tokens={config.eval_answer_tokens}",
            "use evaluation data with prompts, raise max_length, or use eval_generate_steps=0",
        )  # fmt: skip
    return numbers


def check_prompts(config: TrainConfig, documents: TokenSet) -> None:
    """Checks that each prompt leaves room for an answer.

    Args:
        config: the run's config, whose objective samples.
        documents: training or evaluation data.

    Raises:
        ConfigError: if a row was cut, has no prompt, or has one that is too long.
    """
    room, option = config.max_length - config.max_completion_length, config.max_completion_length
    if documents.report.truncated:
        raise ConfigError(
            f"{documents.report.dataset}: {documents.report.truncated:,} rows are longer than "
            f"max_length={config.max_length}, and rewards would compare with half an answer; raise max_length, or "
            "set overlong=drop"
        )
    for index in range(len(documents)):
        length = len(prompt_of(documents, index).tokens)
        if length == 0:
            raise ConfigError(f"{documents.where(index)}: has no prompt to answer")
        if length > room:
            raise ConfigError(
                f"{documents.where(index)}: has a prompt of {length:,} tokens, and max_completion_length={option} "
                f"leaves {room:,} of max_length={config.max_length}; raise max_length"
            )


def refuse_cut_rows(config: TrainConfig, documents: TokenSet) -> None:
    """Raises ConfigError if answers are to be generated to rows whose prompt or expected answer may have been cut."""
    cut = documents.report.truncated + documents.report.split_rows
    if config.eval_answer_tokens and cut:
        raise ConfigError(
            f"{documents.report.dataset}: {cut:,} rows are longer than max_length="
            f"{config.max_length}, so that prompts or expected answers are cut; raise max_length, set overlong=drop, "
            "or generate no answers (eval_answer_tokens=0; `tunesmith eval --answer_tokens 0`)"
        )


def refuse_missing_columns(config: TrainConfig, documents: TokenSet) -> None:
    """Refuses data of which only some rows have a column that rewards can do without, or an answer.

    Raises:
        ConfigError: with the first row that lacks it.
    """
    optional = [column for column, may_lack in (columns_of_rewards(config) or {}).items() if may_lack]
    prompts = (prompt_of(documents, index) for index in range(len(documents))) if optional else ()
    having = np.array([[prompt.has(column) for column in optional] for prompt in prompts], dtype=np.bool_)
    for column, has_it in zip(optional, having.T, strict=False):
        if has_it.any() and not has_it.all():
            name = config.columns.get(column, column)
            raise ConfigError(
                f"{documents.where(int(has_it.argmin()))}: {name!r} is missing, and other rows have one "
                f"({int((~has_it).sum()):,} of {len(documents):,} lack it); give it to all rows, or leave it out"
            )


def refuse_other_columns(
    config: TrainConfig, train: TokenSet, evaluation: TokenSet | None, names: tuple[str, str] = _SPLITS
) -> None:
    """Refuses evaluation data whose rewards would be computed from other columns than those of the training data.

    Args:
        config: the run's config, whose objective samples.
        train: training data, each row of which has the same columns.
        evaluation: the same of the evaluation data, or of a further window of a stream.
        names: what messages call the two.

    Raises:
        ConfigError: with the first such column.
    """
    if evaluation is None or not len(train) or not len(evaluation):
        return
    first, other = prompt_of(train, 0), prompt_of(evaluation, 0)
    for column in columns_of_rewards(config) or ():
        if first.has(column) != other.has(column):
            having, lacking = names[:: 1 if first.has(column) else -1]
            name = config.columns.get(column, column)
            raise ConfigError(
                f"the {having} data have {name!r}, and the {lacking} data do not: a reward would be another function "
                "of them; give it to both, or to neither"
            )


def prompts_digest(prompts: Sequence[np.ndarray]) -> str:
    """sha256 of the tokens of prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.int64(len(prompt)).tobytes() + prompt.astype(np.int32).tobytes())
    return digest.hexdigest()


class TokenValues:
    """A number for each token of the answers of a step, and 0 for those of their prompts.

    Args:
        prompts: token ids of the prompt of each answer.
        values: the numbers of the tokens of each answer.
    """

    def __init__(self, prompts: Sequence[np.ndarray], values: Sequence[Sequence[float]]):
        self._of_documents = [np.concatenate([np.zeros(len(prompt)), numbers]).astype(np.float32)
                              for prompt, numbers in zip(prompts, values, strict=True)]  # fmt: skip

    def of(self, indices: np.ndarray) -> np.ndarray:
        """The fp32 numbers of the tokens of several documents, concatenated."""
        return np.concatenate([self._of_documents[index] for index in indices.tolist()])


class Rollouts:
    """The answers of a step as documents, each after its prompt.

    Args:
        prompts: token ids of the prompt of each answer.
        answers: token ids of each answer.
        sampled: log-probability of each token of each answer, as the sampler computed it.
        old: the same, as training computes it with the weights that sampled; None if it was not computed.
        advantages: `[answers]` how much better than the others of its prompt each answer is.
        counts: `[answers]` bool, whether each answer is trained; the others only count in the divisor.
        is_fresh: whether the weights that sampled them are those that are trained now.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        answers: Sequence[np.ndarray],
        sampled: Sequence[Sequence[float]],
        old: Sequence[Sequence[float]] | None,
        advantages: np.ndarray,
        counts: np.ndarray,
        is_fresh: bool,
    ):
        self.advantages, self.is_fresh = advantages.astype(np.float32), is_fresh
        self._tokens = [np.concatenate(pair).astype(np.int32) for pair in zip(prompts, answers, strict=True)]
        trained = [len(answer) * count for answer, count in zip(answers, counts.tolist(), strict=True)]
        self._masks = [np.arange(len(tokens)) >= len(tokens) - count
                       for tokens, count in zip(self._tokens, trained, strict=True)]  # fmt: skip
        self.sampled = TokenValues(prompts, sampled)
        self.old = None if old is None else TokenValues(prompts, old)
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        self.trained = np.array(trained, dtype=np.int64)
        self.fingerprint = hashlib.sha256(np.concatenate(self._tokens).tobytes()).hexdigest()

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of trained tokens of one document."""
        return self._tokens[index], self._masks[index]

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for several documents, concatenated."""
        chosen = indices.tolist()
        tokens = np.concatenate([self._tokens[index] for index in chosen])
        return tokens, np.concatenate([self._masks[index] for index in chosen])

    def where(self, index: int) -> str:
        """What to call an answer."""
        return f"answer {index}"


@dataclass(frozen=True)
class RecordedStep:
    """The answers of one step as the run folder holds them.

    Args:
        prompts: number of the document that each answer belongs to.
        answers: token ids of each answer.
        log_probs: log-probability of each of those tokens.
        ended: whether each answer came to its end.
        rewards: weighted sum of the rewards of each answer.
        by_function: rewards of each function.
        texts: prompt, answer, and the answer in the data, as text, for readers.
        fingerprint: sha256 of the tokens of the prompts.
        temperature: the option it was sampled with.
        old_log_probs: log-probability of each token under the weights that sampled, as training computes it; None if
            the step trains with these weights, and so knows it.
        columns: the columns that rewards read of each document in `prompts`, by its number as text, for readers.
    """

    prompts: list[int]
    answers: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]
    rewards: list[float]
    by_function: dict[str, list[float]]
    texts: list[list[str]]
    fingerprint: str
    temperature: float
    old_log_probs: list[list[float]] | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self, **more: Any) -> str:
        """The step as JSON."""
        return json.dumps({**more, **self.__dict__}, ensure_ascii=False)

    def misfit(self, config: TrainConfig, numbers: Sequence[int], digest: str, vocab_size: int) -> str | None:
        """Why a run cannot train on these answers; None if it can.

        Args:
            config: the run's config.
            numbers: number of the document of each of its prompts.
            digest: sha256 of the tokens of those.
            vocab_size: tokens that its model has.
        """
        if self.prompts != numbers or self.fingerprint != digest:
            return "its answers are to other prompts: data, seed, batch and options must be the same"
        if self.temperature != config.temperature:
            return f"its answers were sampled at temperature={self.temperature}, and this run has {config.temperature}"
        if any(not 0 <= token < vocab_size for answer in self.answers for token in answer):
            return "it has tokens that the model does not have"
        if any(not 0 < len(answer) <= config.max_completion_length for answer in self.answers):
            return "it has an empty answer, or one longer than max_completion_length"
        return None

    @classmethod
    def from_json(cls, text: str) -> RecordedStep:
        """The step of a file.

        Raises:
            ValueError: if it is none.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it holds no sampled answers")
        if missing := cls.__dataclass_fields__.keys() - values.keys() - {"old_log_probs", "columns"}:
            raise ValueError(f"it holds no sampled answers, or those of another version: {min(missing)} is missing")
        fields: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        step = cls(**fields)
        of_tokens: list[list[list[float]]] = [step.log_probs]
        of_tokens += [] if step.old_log_probs is None else [step.old_log_probs]
        counts = {len(step.prompts), len(step.answers), len(step.ended), len(step.rewards), *map(len, of_tokens)}
        lengths = list(map(len, step.answers))
        if len(counts) != 1 or any(list(map(len, part)) != lengths for part in of_tokens):
            raise ValueError("its lists differ in length")
        numbers = [*step.rewards, *(value for part in of_tokens for values in part for value in values)]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ValueError("it holds what is not a finite number")
        return step
