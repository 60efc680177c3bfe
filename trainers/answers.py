"""The answers to the same prompts while a model trains: greedy, every `eval_generate_steps` and at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.config.options import TrainConfig
from trainers.data.cache import TokenSet
from trainers.data.prepare import load_tokenizer
from trainers.data.rollouts import prompt_of, prompts_to_answer
from trainers.generation import Generation, generate, stop_ids
from trainers.model.rope_scaling import position_limit
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.run.folder import RunFolder, write_atomic
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
        resumed_at: step of the checkpoint that the run goes on from; None from the beginning. What the file holds of
            later steps is removed, as they are trained again.

    Raises:
        ConfigError: on every rank, if no prompt can be answered.
    """

    def __init__(
        self, config: TrainConfig, documents: TokenSet, backend: Backend, mesh: Mesh, ranks: Ranks, run: RunFolder,
        base: Any, resumed_at: int | None,
    ):  # fmt: skip
        self.documents, self.backend, self.mesh, self.ranks, self.path = documents, backend, mesh, ranks, run.answers
        self.tokenizer = load_tokenizer(config)
        self.numbers = prompts_to_answer(config, documents, position_limit(base.config.get_text_config()))
        stops = stop_ids(config, self.tokenizer, base)
        self.settings = Generation(config.per_device_eval_batch_size, config.eval_answer_tokens, stops)
        self.answered_at = ranks.broadcast(_forget_later(self.path, resumed_at) if ranks.is_main else -1)
        if ranks.is_main:
            when = f"every {config.eval_generate_steps:,} steps and at the end"
            print(f"{self.path.name}: answers to {len(self.numbers)} prompts, {when}", flush=True)

    def answer(self, step: int, beat: Callable[..., None]) -> None:
        """Answers the prompts at a step, unless the file has its answers. Collective.

        Args:
            step: steps that are trained.
            beat: called with the section while it works.
        """
        if step == self.answered_at:
            return
        prompts = [prompt_of(self.documents, number) for number in self.numbers]
        tokens = [prompt.tokens for prompt in prompts]
        answers = generate(self.backend, self.mesh, self.ranks, tokens, self.settings, beat)
        self.answered_at = step
        if not self.ranks.is_main:
            return
        decode = self.tokenizer.decode
        rows = [
            {"step": step, "row": self.documents.where(number), "prompt": decode(prompt.tokens),
             "expected": prompt.expected(decode), "answer": decode(answer, skip_special_tokens=True), "ended": ended}
            for number, prompt, answer, ended in zip(self.numbers, prompts, answers.tokens, answers.ended, strict=True)
        ]  # fmt: skip
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _forget_later(path: Path, step: int | None) -> int:
    """Removes the rows of a file after a step, all of them without one; returns the last step of the others, or -1."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    last = -1 if step is None else step
    rows = [(of_line, line) for line in lines if (of_line := _step_of(line)) is not None and of_line <= last]
    if len(rows) < len(lines):
        write_atomic(path, b"".join(line for _, line in rows).decode())
    return max((of_line for of_line, _ in rows), default=-1)


def _step_of(line: bytes) -> int | None:
    """The step of a row; None if a kill has cut it."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else {}
        return int(row["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
