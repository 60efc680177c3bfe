"""The answers to the same prompts while a model trains: greedy, every `eval_generate_steps` and at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers.config.options import TrainConfig
from trainers.data.cache import TokenSet
from trainers.data.prepare import load_tokenizer
from trainers.data.rollouts import prompt_of, prompts_to_answer
from trainers.generation import Generation, generate, stop_ids
from trainers.model.rope_scaling import position_limit
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.run.answers_file import PromptLine, add_answers, begin_answers
from trainers.run.folder import RunFolder
from trainers.strategy.mesh import Mesh


class FixedPrompts:
    """Answers a few prompts of the evaluation data, and appends the answers to the run's `answers.jsonl`.

    Args:
        config: the run's config.
        documents: its evaluation data.
        backend: the wrapped model.
        mesh: this rank's position in the mesh.
        ranks: all ranks.
        run: the run folder.
        base: the transformers model, for the tokens that end its answers and its positions.

    Raises:
        ConfigError: on every rank, if no prompt can be answered.
    """

    def __init__(
        self, config: TrainConfig, documents: TokenSet, backend: Backend, mesh: Mesh, ranks: Ranks, run: RunFolder,
        base: Any,
    ):  # fmt: skip
        self.backend = backend
        self.mesh = mesh
        self.ranks = ranks
        self.path = run.answers
        self.tokenizer = load_tokenizer(config)
        numbers = prompts_to_answer(config, documents, position_limit(base.config.get_text_config()))
        prompts = [prompt_of(documents, number) for number in numbers]
        self.tokens = [prompt.tokens for prompt in prompts]
        stops = stop_ids(config, self.tokenizer, base)
        self.settings = Generation(config.per_device_eval_batch_size, config.eval_answer_tokens, stops)
        begun = None
        if ranks.is_main:
            decode = self.tokenizer.decode
            lines = [PromptLine(documents.where(number), decode(prompt.tokens), prompt.expected(decode))
                     for number, prompt in zip(numbers, prompts, strict=True)]  # fmt: skip
            begun = begin_answers(self.path, lines)
            when = f"every {config.eval_generate_steps:,} steps and at the end"
            print(f"{self.path.name}: answers to {len(numbers)} prompts, {when}", flush=True)
        self.labels, self.answered_at, self.answered = ranks.broadcast(begun)

    def answer(self, step: int, beat: Callable[..., None]) -> None:
        """Answers the prompts at a step, unless the file has its answers. Collective.

        Args:
            step: steps that are trained.
            beat: called with the section while it works.
        """
        done = self.answered if step == self.answered_at else []
        missing = [index for index, label in enumerate(self.labels) if label not in done]
        if not missing:
            return
        tokens = [self.tokens[index] for index in missing]
        answers = generate(self.backend, self.mesh, self.ranks, tokens, self.settings, beat)
        self.answered_at, self.answered = step, self.labels
        if self.ranks.is_main:
            texts = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers.tokens]
            labels = [self.labels[index] for index in missing]
            add_answers(self.path, step, zip(labels, texts, answers.ended, strict=True))
