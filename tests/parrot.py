"""A real model that answers what a test wants: each token has one that follows it, for certain."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """{%- for tool in tools or [] %}<tool> {{ tool | tojson }} {% endfor -%}
{%- for message in messages %} <{{ message.role }}>
{%- if message.reasoning_content and loop.last %} <think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %} <tool_call> {{ call.function | tojson }} </tool_call>{% endfor %}
{{ message.content }}{% endfor -%}"""
"""A prompt ends with the last message, so that its last word decides on the answer."""
_EOS, _UNKNOWN = "</s>", "<unk>"


def make_parrot(folder: Path, answers: Mapping[str, str], template: str = TEMPLATE) -> Path:
    """Saves a model and its tokenizer.

    Args:
        folder: where.
        answers: the answer to a message, by its last word; the one of "*" is the answer to all others.
        template: the chat template.
    """
    vocabulary = {_UNKNOWN: 0, _EOS: 1}
    for word in answers:
        vocabulary.setdefault(word, len(vocabulary))
    chains = [
        [vocabulary[_UNKNOWN if word == "*" else word], *_pieces(text, vocabulary), vocabulary[_EOS]]
        for word, text in answers.items()
    ]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, unk_token=_UNKNOWN)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    _model(len(vocabulary), chains).save_pretrained(folder)
    return folder


def _pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """The text as new tokens of two characters or more; a token can have one successor only."""
    pieces, start = [], 0
    for end in range(2, len(text) + 1):
        if end - start >= 2 and text[start:end] not in vocabulary and text[start:end] not in pieces:
            pieces.append(text[start:end])
            start = end
    pieces[-1] += text[start:]
    for piece in pieces:
        vocabulary[piece] = len(vocabulary)
    return [vocabulary[piece] for piece in pieces]


def _model(size: int, chains: list[list[int]]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=size, hidden_size=size + size % 2, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=16384, eos_token_id=1, bos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in (*model.model.layers.parameters(), model.lm_head.weight):
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        for chain in chains:
            for token, following in pairwise(chain):
                model.lm_head.weight[following, token] = 1.0
    model.generation_config.eos_token_id = 1
    return model
