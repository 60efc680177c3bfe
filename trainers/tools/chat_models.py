"""The models of a chat, and what they read and write: prompts, and the text of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.formats import RowError
from trainers.data.template import Encoder
from trainers.data.tokenizer import load_tokenizer
from trainers.model.attention import avoid_cudnn
from trainers.model.rope_scaling import position_limit
from trainers.tools.answer_format import AnswerFormat

MOST_BYTES_OF_A_TOKEN = 64
"""A text with more bytes for each token that the context holds is refused before it is tokenised."""


class ContextFull(ConfigError):
    """A conversation that the model's context cannot hold."""


class Models:
    """A base model and optionally a tuned one on one device; an adapter shares the weights of its base.

    Args:
        config: config of the run, or of the base model alone.
        base: the base model; None if `tuned` is an adapter on it.
        tuned: the fine-tuned model; None for the base alone.
    """

    def __init__(self, config: TrainConfig, base: Any | None, tuned: Any | None):
        avoid_cudnn()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(config)
        self.encoder = Encoder.of(self.tokenizer, assistant_only=False, today=date.today().isoformat())
        self.base = base
        self.tuned = tuned
        self.ends: set[int] = set()
        for model in (base, tuned):
            if model is not None:
                self._ready(model)
        text = (base if base is not None else tuned).config.get_text_config()  # type: ignore[union-attr]
        self.context: int | None = position_limit(text)

    def _ready(self, model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Only transformers' own kernels support a KV cache, and its fused kernel neither softcap nor models like Mamba.
        capped = getattr(inner.config.get_text_config(), "attn_logit_softcapping", None) is not None
        fused = not capped and getattr(inner, "_supports_sdpa", False)
        inner.set_attn_implementation("sdpa" if fused else "eager")
        inner.config.use_cache = True
        ends = inner.generation_config.eos_token_id if inner.generation_config is not None else None
        self.ends |= {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # Ignore the other settings of the files (beams, penalties): they were not requested.
        inner.generation_config = GenerationConfig(
            eos_token_id=sorted(self.ends), pad_token_id=self.tokenizer.pad_token_id
        )
        model.eval()
        model.to(self.device)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self.encoder.options.chat_template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template reads tools."""
        return self.has_template and self.encoder.probe.mentions("tools")

    @cached_property
    def format(self) -> AnswerFormat:
        """How the models mark thoughts and calls of tools."""
        special = {
            token: added.content for token, added in self.tokenizer.added_tokens_decoder.items() if added.special
        }
        probe = self.encoder.probe if self.has_template else None
        return AnswerFormat(
            probe, self.encoder.options.chat_template, getattr(self.tokenizer, "response_template", None), special
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens, except for those that mark thoughts and calls."""
        kept_back = self.format.dropped
        return str(self.tokenizer.decode([token for token in tokens if token not in kept_back]))

    def sides(self) -> list[str]:
        """The models that can answer: `base`, `tuned` or both."""
        return ["base", "tuned"] if self.tuned is not None else ["base"]

    def side(self, name: str) -> tuple[Any, AbstractContextManager[Any]]:
        """The model of a side, and the context manager to enter while it generates."""
        if name == "base" and self.base is None:
            assert self.tuned is not None
            return self.tuned, self.tuned.disable_adapter()
        return (self.base if name == "base" else self.tuned), nullcontext()

    def prompt(
        self, messages: list[dict[str, Any]], plain: bool, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of a conversation, ready for generation.

        Args:
            messages: as `app.services.chat.check_messages` returns them.
            plain: join the messages as plain text; always the case if the tokenizer has no chat template.
            variables: what the chat template gets besides, such as `tools`.

        Raises:
            ConfigError: if the chat template refuses them or does not terminate.
            ContextFull: if they do not fit the context.
        """
        plain = plain or not self.has_template
        return self.tokens(self.text(messages, plain, variables), plain)

    def text(self, messages: list[dict[str, Any]], plain: bool, variables: Mapping[str, Any] | None = None) -> str:
        """The first half of `prompt`: the rendered text. `plain` has to be set if there is no chat template."""
        return "\n".join(message["content"] for message in messages) if plain else self._rendered(messages, variables)

    def for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the chat template reads it, with the thoughts of a reply where it looks for them."""
        read = {key: value for key, value in message.items() if key != "raw"}
        if message["role"] != "assistant":
            return read
        if any("invalid" in call for call in message.get("tool_calls", ())):  # as it was written
            return {"role": "assistant", "content": message.get("raw") or read["content"]}
        probe = self.encoder.probe
        if message.get("reasoning_content") and not (probe.writes_thoughts or probe.thinks_in_content):
            # It knows no thoughts: what was generated is what such a reply looks like.
            return {**read, "content": message.get("raw") or read["content"]}
        return probe.place_thought(read, "keep")

    def tokens(self, text: str, plain: bool) -> list[int]:
        """The second half of `prompt`: the tokens of a rendered text."""
        if self.context is not None and len(text.encode(errors="surrogatepass")) > self.context * MOST_BYTES_OF_A_TOKEN:
            raise ContextFull(
                f"the conversation has {len(text):,} characters and the model's context holds {self.context:,} tokens; "
                "clear it, or write less"
            )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if plain:
            ids = [*self.encoder.options.prefix, *ids]
        if self.context is not None and len(ids) >= self.context:
            raise ContextFull(
                f"the conversation has {len(ids):,} tokens and the model's context holds {self.context:,}; "
                "clear it, or write less"
            )
        if not ids:
            raise ConfigError("there is nothing to answer; write a message")
        return ids

    def _rendered(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None) -> str:
        try:
            return self.encoder.render(messages, prompt=True, variables=variables)
        except RowError as error:
            raise ConfigError(f"chat template: {error}; leave out the system prompt, or complete plain text") from None
