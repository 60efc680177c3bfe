"""Which prompts an attempt answers at a step that the file has already. What models answer: `tests/parity`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import GPT2Config

import trainers.answers
from tests.made_runs import made_run
from trainers.answers import FixedPrompts
from trainers.config.validation import build
from trainers.data.prepare import prepare


def test_only_prompts_without_an_answer_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, counts = made_run(tmp_path, "answered"), []

    def generate(_backend: Any, _mesh: Any, _ranks: Any, prompts: list[np.ndarray], *_more: Any) -> Any:
        counts.append(len(prompts))
        return SimpleNamespace(tokens=[np.array([5])] * len(prompts), ended=[True] * len(prompts))

    monkeypatch.setattr(trainers.answers, "generate", generate)
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "eval_dataset_name": "embedded",
                    "max_steps": 1, "eval_generate_steps": 1, "eval_answer_tokens": 8, "max_train_samples": 24,
                    "cache_dir": str(tmp_path)})  # fmt: skip
    documents, base = prepare(config, "train"), SimpleNamespace(config=GPT2Config(), generation_config=None)
    ranks = SimpleNamespace(is_main=True, broadcast=lambda value: value)

    def attempt(prompts: int, step: int) -> None:
        of_attempt = config.model_copy(update={"eval_generate_prompts": prompts})
        FixedPrompts(of_attempt, documents, *cast(Any, (None, None, ranks, run, base))).answer(step, lambda *_: None)

    attempt(3, 4)
    attempt(3, 4)
    assert counts == [3]
    attempt(5, 4)
    attempt(2, 4)
    assert counts == [3, 2], "the two new ones"
    attempt(2, 8)
    assert counts == [3, 2, 2], "control: another step"
    assert len(run.answers.read_text().splitlines()) == 5 + 7
