"""Loss and exact match of models on the embedded chat data, or their accuracy on the embedded preferences.

`python -m trainers.tools.score --model DIR [--model DIR2 ...] [--preferences | --reward]` prints one JSON document, a
list with one entry per model. A DIR is a full model or a peft adapter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainers.checkpoint.export_check import BASE
from trainers.config.options import EMBEDDED
from trainers.config.validation import build
from trainers.embedded import BASE_DIR, DATA_DIR, PREFERENCES_DIR
from trainers.model.load import load_base
from trainers.model.probe import default_attention

Row = dict[str, Any]
MAX_NEW_TOKENS = 96  # the longest expected answer has 63


def load_rows(split: str, limit: int | None = None, folder: Path = DATA_DIR) -> list[Row]:
    """The first `limit` rows of a shipped split (`train`, `eval` or `test`), of the chats or of the preferences."""
    lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def load_model(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model in fp32 with its tokenizer, from a full model folder or an adapter folder.

    Args:
        path: if it contains an `adapter_config.json`, the adapter is loaded on the base that this names. The
            tokenizer comes from `path` if it has one, otherwise from the base.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the adapter does not fit its base.
    """
    base, adapter = str(path), None
    if (path / "adapter_config.json").exists():
        from trainers.model.adapter import Adapter

        adapter = Adapter.read(path)
        base = str(adapter.settings.base_model_name_or_path)
    scaled = path / BASE
    more = {"config": AutoConfig.from_pretrained(scaled)} if adapter is not None and scaled.is_dir() else {}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **more)
    if adapter is not None:
        model = adapter.attach(model)
    tokenizer = AutoTokenizer.from_pretrained(path if (path / "tokenizer.json").exists() else base)
    return model.eval(), tokenizer


def _padded(rows: list[list[int]], value: int, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)])


def _encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: bool) -> Any:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


@torch.inference_mode()
def _chat_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: list[list[dict[str, str]]], batch_size: int = 50
) -> tuple[torch.Tensor, int]:
    """`[chats]` loss of the assistant's tokens of each, in nats, and the number of those tokens."""
    totals, count = [], 0
    for start in range(0, len(chats), batch_size):
        encoded = [
            _encode(tokenizer, chat, return_assistant_tokens_mask=True) for chat in chats[start : start + batch_size]
        ]
        ids = _padded([e["input_ids"] for e in encoded], tokenizer.pad_token_id).to(model.device)
        trained = _padded([e["assistant_masks"] for e in encoded], 0).to(model.device)[:, 1:].bool()
        seen = _padded([[1] * len(e["input_ids"]) for e in encoded], 0).to(model.device)
        logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        losses = functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        totals.append((losses * trained).sum(1))
        count += int(trained.sum())
    return torch.cat(totals), count


def chat_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> float:
    """Mean loss per assistant token over all rows, in nats."""
    losses, count = _chat_losses(model, tokenizer, [row["messages"] for row in rows])
    return losses.sum().item() / count


def preference_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> float:
    """Share of pairs whose chosen answer is more probable than the rejected one.

    Needs no initial model, unlike the `reward_accuracy` of DPO, so that it can be taken before training too.
    """
    chosen, rejected = (
        _chat_losses(model, tokenizer, [row["prompt"] + row[side] for row in rows])[0]
        for side in ("chosen", "rejected")
    )
    return (chosen < rejected).float().mean().item()


@torch.inference_mode()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], batch_size: int = 200
) -> list[str]:
    """Greedy answers to the rows' prompts (all messages but the last), up to the end-of-turn token."""
    texts: list[str] = []
    for start in range(0, len(rows), batch_size):
        chats = [row["messages"][:-1] for row in rows[start : start + batch_size]]
        prompts = [_encode(tokenizer, chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        ids = _padded(prompts, tokenizer.pad_token_id, left=True).to(model.device)
        seen = _padded([[1] * len(p) for p in prompts], 0, left=True).to(model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        for answer in out[:, ids.size(1) :].tolist():
            end = answer.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in answer else len(answer)
            texts.append(tokenizer.decode(answer[:end], skip_special_tokens=False))
    return texts


def exact_match(expected: list[str], got: list[str]) -> float:
    """Fraction of answers that equal the expected ones, character for character."""
    if len(expected) != len(got):
        raise ValueError(f"{len(expected)} expected answers, {len(got)} answers")
    return sum(e == g for e, g in zip(expected, got, strict=True)) / max(1, len(expected))


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "test",
    limit: int | None = None,
    samples: int = 3,
    preferences: bool = False,
) -> dict[str, Any]:
    """Scores a loaded model; see `score_model`."""
    started = time.monotonic()
    was_training = model.training
    model.eval()
    rows = load_rows(split, limit)
    expected = [row["messages"][-1]["content"] for row in rows]
    got = answers(model, tokenizer, rows)
    loss = chat_loss(model, tokenizer, load_rows("eval"))
    pairs = load_rows(split, folder=PREFERENCES_DIR) if preferences else []
    preferred = {"preference_accuracy": preference_accuracy(model, tokenizer, pairs)} if preferences else {}
    model.train(was_training)
    examples = [
        {"prompt": row["messages"][0]["content"], "expected": e, "answer": g}
        for row, e, g in zip(rows[:samples], expected, got, strict=False)
    ]
    return {
        "eval_loss": loss,
        "exact_match": exact_match(expected, got),
        **preferred,
        "seconds": round(time.monotonic() - started, 2),
        "samples": examples,
    }


def score_model(
    path: str | Path, split: str = "test", limit: int | None = None, samples: int = 3, preferences: bool = False
) -> dict[str, Any]:
    """Loads and scores one model.

    Args:
        path: a model folder or a peft adapter folder.
        split: split whose prompts are answered for `exact_match`; `eval_loss` always covers the full eval split.
        limit: answer only the first `limit` prompts.
        samples: number of prompts to return with their answers.
        preferences: also score the preferences of the split.

    Returns:
        `model`, `eval_loss` (nats per assistant token), `exact_match` (0 to 1), `seconds` (without loading),
        `samples` (each with `prompt`, `expected` and `answer`), and with `preferences` also `preference_accuracy`
        (0 to 1).
    """
    model, tokenizer = load_model(Path(path))
    return {"model": str(path)} | score(model, tokenizer, split, limit, samples, preferences)


def load_reward_model(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Loads a reward model in fp32 with its tokenizer; a language model gets the head that a run would begin with.

    Args:
        path: a full model folder, or an adapter folder as `tunesmith` exports it.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the model cannot have a scalar head, or the adapter does not fit its base.
    """
    base, adapter = str(path), None
    if (path / "adapter_config.json").exists():
        from trainers.model.adapter import Adapter

        adapter = Adapter.read(path)
        base = str(adapter.settings.base_model_name_or_path)
    settings = {"model_name_or_path": base, "dataset_name": EMBEDDED, "objective": "reward", "packing": False}
    model: Any = load_base(build(settings | {"method": "full" if adapter is None else "lora"}))
    model.set_attn_implementation(default_attention(model))
    model = model if adapter is None else adapter.attach(model)
    tokenizer = AutoTokenizer.from_pretrained(path if (path / "tokenizer.json").exists() else base)
    return model.eval(), tokenizer


@torch.inference_mode()
def _reward_scores(
    model: Any, tokenizer: PreTrainedTokenizerBase, chats: list[list[dict[str, str]]], batch_size: int = 50
) -> torch.Tensor:
    """`[chats]` score of each."""
    scores = []
    for start in range(0, len(chats), batch_size):
        rows = [_encode(tokenizer, chat)["input_ids"] for chat in chats[start : start + batch_size]]
        seen = _padded([[1] * len(row) for row in rows], 0)
        scores.append(model(input_ids=_padded(rows, tokenizer.pad_token_id), attention_mask=seen).logits[:, 0])
    return torch.cat(scores)


def score_reward_model(path: str | Path, split: str = "test") -> dict[str, Any]:
    """Loads a reward model and scores the preferences of a split.

    Returns:
        `model`, `eval_loss` (mean over the eval split's pairs, without margins), `reward_accuracy` (share of the
        split's pairs whose chosen answer has the higher score), `seconds` (without loading) and no `samples`.
    """
    model, tokenizer = load_reward_model(Path(path))
    started, differences = time.monotonic(), dict[str, torch.Tensor]()
    for name in dict.fromkeys(("eval", split)):
        rows = load_rows(name, folder=PREFERENCES_DIR)
        chosen, rejected = (
            _reward_scores(model, tokenizer, [row["prompt"] + row[side] for row in rows])
            for side in ("chosen", "rejected")
        )
        differences[name] = chosen - rejected
    return {
        "model": str(path),
        "eval_loss": -functional.logsigmoid(differences["eval"]).mean().item(),
        "reward_accuracy": (differences[split] > 0).float().mean().item(),
        "seconds": round(time.monotonic() - started, 2),
        "samples": [],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Score models on the embedded chat data; prints JSON.")
    parser.add_argument("--model", action="append", help="model or adapter folder, repeatable; default: the base")
    parser.add_argument("--split", choices=("train", "eval", "test"), default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--preferences", action="store_true", help="also score the embedded preferences")
    parser.add_argument("--reward", action="store_true", help="score the embedded preferences by reward models")
    arguments = parser.parse_args()
    paths = arguments.model or [str(BASE_DIR)]
    options = (arguments.split, arguments.limit, arguments.samples, arguments.preferences)
    try:
        if arguments.reward:
            with redirect_stdout(sys.stderr):  # loading says which head a model has
                scores = [score_reward_model(path, arguments.split) for path in paths]
        else:
            scores = [score_model(path, *options) for path in paths]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
