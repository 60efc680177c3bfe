"""Creates the embedded base from scratch: tokenizer, chat template, weights, model card.

`python -m benchmarks.embedded.pretrain --output DIR` repeats the shipped recipe; the same versions on the same
processor with the same number of threads give the same bytes (compare `weights_sha256` in `recipe.json`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.embedded.documents import documents
from benchmarks.embedded.texts import CHAT_TEMPLATE, MODEL_CARD
from trainers.embedded import BASE_DIR

END, PAD = "<|end|>", "<|pad|>"
OPTIMIZER, SCHEDULE = "Muon (matrices) and AdamW (the rest)", "linear warm-up, then a cosine to zero"
# Names, single digits and newlines never merge with the text around them: a name has the same tokens in every format,
# and a prompt ends on a token boundary whatever the answer starts with.
_PIECES = r"\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights. Rates are per step, sizes in tokens unless named otherwise."""

    seed: int = 1
    tokens: int = 8_000_000
    rows_per_step: int = 12
    row_length: int = 256
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    weight_decay: float = 0.05
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    vocab_size: int = 1024
    tokenizer_documents: int = 20_000
    held_out_rows: int = 96
    held_out_seed: int = 1_000_003

    @property
    def steps(self) -> int:
        """Number of optimizer steps for `tokens` tokens."""
        return max(1, self.tokens // (self.rows_per_step * self.row_length))


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the start of the document stream.

    Returns:
        A fast tokenizer with the chat template; `<|end|>` ends documents and turns, `<|pad|>` only pads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = itertools.islice(documents(recipe.seed), recipe.tokenizer_documents)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The base with random fp32 weights (0.9M parameters)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def token_rows(tokenizer: PreTrainedTokenizerFast, seed: int, length: int) -> Iterator[list[int]]:
    """The document stream as rows of `length` tokens, each document followed by `<|end|>`."""
    end = tokenizer.convert_tokens_to_ids(END)
    stream = documents(seed)
    waiting: list[int] = []
    while True:
        texts = list(itertools.islice(stream, 500))
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            waiting += [*ids, end]
        complete = len(waiting) // length
        for row in range(complete):
            yield waiting[row * length : (row + 1) * length]
        waiting = waiting[complete * length :]


def row_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats; `rows` are `[batch, length]`."""
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), rows[:, 1:].reshape(-1))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> float:
    """Mean loss (nats per token) on documents from a seed that training never uses."""
    stream = token_rows(tokenizer, recipe.held_out_seed, recipe.row_length)
    rows = torch.tensor(list(itertools.islice(stream, recipe.held_out_rows)))
    model.eval()
    losses = [row_loss(model, part).item() for part in rows.split(32)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then cosine decay to zero; `step` counts from 0."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (learns to copy in fewer tokens than AdamW), AdamW for the other weights."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [embedding, *(p for p in model.parameters() if p.ndim == 1)]
    decay, rate = recipe.weight_decay, recipe.learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, recipe.beta2)),
    ]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> list[dict[str, float]]:
    """Trains `model` in place.

    Returns:
        One entry per 100 steps: `step`, `tokens`, `loss` (nats, mean since the last entry), `held_out_loss`,
        `seconds` since the start.
    """
    optimizers = _optimizers(model, recipe)
    stream = token_rows(tokenizer, recipe.seed, recipe.row_length)
    history: list[dict[str, float]] = []
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(recipe.steps):
        rows = torch.tensor(list(itertools.islice(stream, recipe.rows_per_step)))
        loss = row_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, recipe)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            entry = {
                "step": step + 1,
                "tokens": (step + 1) * recipe.rows_per_step * recipe.row_length,
                "loss": round(sum(losses) / len(losses), 4),
                "held_out_loss": round(held_out_loss(model, tokenizer, recipe), 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            print(json.dumps(entry), file=sys.stderr, flush=True)
            history.append(entry)
            losses = []
    return history


def describe(recipe: Recipe, model: LlamaForCausalLM, history: list[dict[str, float]]) -> dict[str, Any]:
    """The contents of `recipe.json`: the recipe, its cost, its losses, the versions."""
    return {
        "recipe": asdict(recipe) | {"steps": recipe.steps, "schedule": SCHEDULE, "optimizer": OPTIMIZER},
        "parameters": model.num_parameters(),
        "seconds": history[-1]["seconds"],
        "tokens": history[-1]["tokens"],
        "loss": history[-1]["loss"],
        "held_out_loss": history[-1]["held_out_loss"],
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "history": history,
    }


def write_base(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, facts: dict[str, Any]
) -> None:
    """Writes weights, tokenizer, generation config, `recipe.json` and the model card into `folder`."""
    model.eval()
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = (folder / "model.safetensors").read_bytes()
    facts = facts | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    (folder / "recipe.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    derived = {"minutes": facts["seconds"] / 60, "million": facts["tokens"] / 1e6}
    card = MODEL_CARD.format(**facts["recipe"] | facts | derived)
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pre-train the embedded base from scratch.")
    parser.add_argument("--output", type=Path, default=BASE_DIR)
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="tokens to train on")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    arguments = parser.parse_args()
    recipe = Recipe(seed=arguments.seed, tokens=arguments.tokens)
    tokenizer = train_tokenizer(recipe)
    model = build_model(tokenizer, recipe.seed)
    history = train(model, tokenizer, recipe)
    write_base(arguments.output, model, tokenizer, describe(recipe, model, history))


if __name__ == "__main__":
    main()
