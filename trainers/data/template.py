"""Documents as tokens and a mask of the trained ones: chat template, spans, tokenizer. Imports no torch.

What is trained is found as stretches of characters in the rendered text, from the template's own generation markers or
by rendering the conversation turn by turn, and carried over to tokens by the tokenizer's offsets.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config import ConfigError
from trainers.data.formats import Document, Message, RowError
from trainers.data.shards import ROW_BYTES, Bad

RENDER_SECONDS = 20.0
_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates write today's date into the system turn; a fixed one keeps a rerun equal to the first run.
_FIXED = {"date_string": "26 Jul 2024"}
_WAY_OUT = "give --chat_template FILE with {% generation %} markers, or set assistant_only_loss=false"

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """Tokens of one document, and which of them are trained (never the first: nothing precedes it)."""

    input_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EncoderOptions:
    """All that encoding needs beside the tokenizer itself; plain values, so that another process can have them.

    Attributes:
        chat_template: Jinja source, or None.
        special_tokens: Names and texts that the template may use, such as `eos_token`.
        turn_ends: Texts of the tokens that may end a turn.
        prefix: Ids that the tokenizer puts before plain text.
        suffix: Ids put after plain text: those of the tokenizer, else the end-of-sequence token.
        assistant_only: Whether only the assistant's (or completion's) tokens are trained.
    """

    chat_template: str | None
    special_tokens: dict[str, Any]
    turn_ends: list[str]
    prefix: list[int]
    suffix: list[int]
    assistant_only: bool


class Encoder:
    """Turns documents into tokens; made from a transformers tokenizer, or from what `save` wrote."""

    def __init__(self, backend: Any, options: EncoderOptions):
        self.options = options
        self.markers = bool(_MARKERS.search(options.chat_template or ""))
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def of(cls, tokenizer: Any, assistant_only: bool) -> Encoder:
        """The encoder of a fast transformers tokenizer.

        Raises:
            ConfigError: when the tokenizer has no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{tokenizer.name_or_path}: its tokenizer has no eos_token; add one to its config")
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
        options = EncoderOptions(
            template,
            dict(tokenizer.special_tokens_map),
            sorted({*added, *tokenizer.all_special_tokens}),
            full[:at],
            full[at + len(bare) :] or [tokenizer.eos_token_id],
            assistant_only,
        )
        return cls(tokenizer.backend_tokenizer, options)

    def save(self, folder: Path) -> None:
        """Writes what `load` needs."""
        self._backend.save(str(folder / "tokenizer.json"))
        (folder / "encoder.json").write_text(json.dumps(asdict(self.options)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """The encoder that `save` wrote; needs no transformers tokenizer, so that a process is ready sooner."""
        from tokenizers import Tokenizer

        options = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), EncoderOptions(**options))

    def encode(self, documents: Sequence[Document]) -> list[Encoded | Bad]:
        """Tokens of each document, or why it has none; in order.

        Raises:
            ConfigError: when there are conversations but no chat template, or the template does not end.
        """
        rendered = [self._render(document) for document in documents]
        good = [item for item in rendered if isinstance(item, _Rendered)]
        encodings = iter(self._backend.encode_batch([item.text for item in good], add_special_tokens=False))
        return [self._masked(item, next(encodings)) if isinstance(item, _Rendered) else item for item in rendered]

    def _render(self, document: Document) -> _Rendered | Bad:
        if not document.messages:
            start = len(document.prompt) if self.options.assistant_only else 0
            text = document.prompt + document.completion
            return _Rendered(text, [(start, len(text))], plain=True)
        if self.options.chat_template is None:
            raise ConfigError(
                "the data holds conversations, but the model's tokenizer has no chat template; give one with "
                "--chat_template FILE, or pick the model's chat variant"
            )
        try:
            return self._render_chat(document)
        except RowError as error:
            return error.bad

    def _render_chat(self, document: Document) -> _Rendered:
        messages = list(document.messages)
        if not self.options.assistant_only:
            text = self._apply(messages)[0]
            return _Rendered(text, [(0, len(text))])
        text, marked = self._apply(messages, marked=self.markers)
        spans = self._marked_spans(text, marked, messages) if self.markers else self._turns(text, messages)
        context = sum(message["role"] == "assistant" for message in messages[: document.untrained])
        return _Rendered(text, spans[context:])

    def _apply(self, messages: list[Message], prompt: bool = False, marked: bool = False) -> tuple[str, list[Span]]:
        """The rendered text, and what the generation markers enclose.

        Raises:
            RowError: when the template refuses these messages.
            ConfigError: when it does not end.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _time_limit(RENDER_SECONDS):
                texts, spans = render_jinja_template(
                    conversations=[messages],
                    chat_template=self.options.chat_template,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **{**_FIXED, **self.options.special_tokens},
                )
        except _TooLong:
            raise ConfigError(
                f"the chat template still runs after {RENDER_SECONDS:.0f} s on one conversation; give another with "
                "--chat_template FILE"
            ) from None
        except Exception as error:  # a template can fail in any way
            raise RowError("chat template", f"it refuses this row: {str(error)[:150]}") from None
        if len(texts[0]) > 4 * ROW_BYTES:
            raise RowError("row too large", f"{len(texts[0]):,} characters once rendered")
        return texts[0], spans[0] if marked else []

    def _marked_spans(self, text: str, spans: list[Span], messages: list[Message]) -> list[Span]:
        """The markers' spans, checked: one per reply, and each holding the end of its reply."""
        replies = [message["content"].strip()[-20:] for message in messages if message["role"] == "assistant"]
        held = len(spans) == len(replies) and all(
            reply in text[start:end] for reply, (start, end) in zip(replies, spans, strict=True)
        )
        if not held:
            raise RowError("chat template", "its generation markers do not enclose each reply; repair --chat_template")
        return spans

    def _turns(self, text: str, messages: list[Message]) -> list[Span]:
        """Each reply's span, end-of-turn token included, by rendering the conversation up to it."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                head = self._apply(messages[:index], prompt=True)[0] if index else ""
                end = self._turn_end(text, head, messages, index)
                if not text.startswith(head) or end is None:
                    raise RowError("chat template", f"it writes earlier turns differently later on; {_WAY_OUT}")
                spans.append((len(head), end))
        return spans

    def _turn_end(self, text: str, head: str, messages: list[Message], index: int) -> int | None:
        """Where the reply ends in the text, or None when it cannot be told."""
        last = index == len(messages) - 1
        up_to = text if last else self._apply(messages[: index + 1])[0]
        if text.startswith(up_to) and len(up_to) > len(head):
            trimmed = up_to.rstrip()
            return len(trimmed) if trimmed.endswith(tuple(self.options.turn_ends)) else len(up_to)
        # A last turn may be written differently from an earlier one (thoughts kept, a closing token): go by the reply.
        start = len(head) + len(text[len(head) :]) - len(text[len(head) :].lstrip())
        reply = messages[index]["content"].strip()
        if not text.startswith(reply, start):
            return None
        after = text[start + len(reply) :]
        gap = len(after) - len(after.lstrip())
        ends_at = [gap + len(token) for token in self.options.turn_ends if after.startswith(token, gap)]
        return start + len(reply) + max(ends_at) if ends_at else None

    def _masked(self, item: _Rendered, encoding: Any) -> Encoded | Bad:
        ids = encoding.ids
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in item.spans:
            if (start, end) == (0, len(item.text)):
                mask[:] = True
            else:
                first, last = _token_span(encoding, start, end, len(item.text))
                mask[first:last] = True
        if item.plain:
            before, after = self.options.prefix, self.options.suffix
            before = [] if before and ids[: len(before)] == before else before
            ids = [*before, *ids, *after]
            mask = np.concatenate([np.zeros(len(before), np.bool_), mask, np.ones(len(after), np.bool_)])
        mask[:1] = False
        if not mask.any():
            return Bad("no trained token", "nothing of it would be trained")
        return Encoded(np.asarray(ids, dtype=np.int32), mask)


@dataclass
class _Rendered:
    text: str
    spans: list[Span]
    plain: bool = False


def _token_span(encoding: Any, start: int, end: int, length: int) -> Span:
    """The tokens that hold characters `start` to `end`; characters without a token (dropped spaces) are passed over."""
    first = next((token for char in range(start, end) if (token := encoding.char_to_token(char)) is not None), None)
    if first is None:
        return 0, 0
    # The end is where the next character's first token stands: a character may be made of several tokens.
    following = next((t for char in range(end, length) if (t := encoding.char_to_token(char)) is not None), None)
    if following is None:
        return first, len(encoding.ids)
    last = next(t for char in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(char)) is not None)
    return first, max(following, last + 1)


class _TooLong(BaseException):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends the block after so much processor time; in a main thread only, no other can be stopped so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
