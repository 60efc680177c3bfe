"""Encodes documents as tokens with a mask of the trained ones: chat template, spans, tokenizer. Imports no torch.

What is trained is found as spans of characters in the rendered text, from the template's own generation markers or by
rendering the conversation turn by turn, and mapped to tokens by the tokenizer's offsets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config.data_options import FIXED_DATE
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.formats import Document, Message, RowError
from trainers.data.render_budget import RenderBudget, TooLong, cpu_time_limit
from trainers.data.reply_spans import ReplySpans, name_message, tail, token_span
from trainers.data.shards import ROW_BYTES, BadRow
from trainers.data.template_probe import Span, TemplateProbe, missing
from trainers.data.tokenizer import chosen_template, load_tokenizer, tokenizer_folder
from trainers.data.training_template import MARKERS, stop_token_ids
from trainers.run.process_limits import RENDER_BYTES, encoding_bytes, encoding_seconds, memory_limit, time_limit

_OTHER_TEMPLATE = "give --chat_template FILE that writes it"
_LOST = {"thought": "the thought of ", "tag": "the text around `</think>` of ", "tool call": "a tool call of "}
RENDER_SECONDS = 20.0
# With these, templates also write the thoughts of earlier replies, which they leave out by default.
_THOUGHTS_OF_EARLIER_TURNS = {"preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False}


@dataclass(frozen=True)
class Encoded:
    """Tokens of one document, the mask of trained ones (never the first: nothing predicts it), and unused fields.

    A document that is `unanswered` has no trained token: the model samples its answer.
    """

    input_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    unused: tuple[str, ...] = ()
    unanswered: bool = False

    @cached_property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class EncoderOptions:
    """All that encoding needs besides the tokenizer; plain values, so that they can be sent to another process.

    Attributes:
        chat_template: Jinja source, or None.
        special_tokens: Names and texts that the template may use, such as `eos_token`.
        turn_ends: Texts of the tokens that may end a turn.
        prefix: Ids that the tokenizer prepends to plain text.
        suffix: Ids appended to plain text: the tokenizer's own, or else the end-of-sequence token.
        assistant_only: Whether only the assistant's (or completion's) tokens are trained.
        origin: Where the template comes from, in a few words.
        thoughts: `keep`, `drop` or `train_empty`, as the option of that name.
        date: The date (`2024-07-26`) that the template gets as today's.
        stops: Texts of the tokens at which the model stops generating.
    """

    chat_template: str | None
    special_tokens: dict[str, Any]
    turn_ends: list[str]
    prefix: list[int]
    suffix: list[int]
    assistant_only: bool
    origin: str = "the model's own"
    thoughts: str = "keep"
    date: str = FIXED_DATE
    stops: list[str] = field(default_factory=list)


class Encoder:
    """Tokenises documents; created from a transformers tokenizer, or from what `save` wrote.

    Attributes:
        may_die: Whether a tokenizer or template that exceeds its limits may end this process.
    """

    def __init__(self, backend: Any, options: EncoderOptions):
        self.options = options
        self.markers = bool(MARKERS.search(options.chat_template or ""))
        self.rendered_chat = self.may_die = False
        self._budget = RenderBudget()
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def of(cls, tokenizer: Any, assistant_only: bool, today: str = FIXED_DATE) -> Encoder:
        """The encoder of a fast transformers tokenizer.

        Args:
            tokenizer: With the chat template to render with.
            assistant_only: Whether only the assistant's (or completion's) tokens are trained.
            today: The date that the template gets as today's.

        Raises:
            ConfigError: if the tokenizer has no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{tokenizer.name_or_path}: its tokenizer has no eos_token; add one to its config")
        # Compare with and without special tokens to find out what the tokenizer adds around plain text.
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
            date=today,
            stops=[tokenizer.eos_token],
        )
        return cls(tokenizer.backend_tokenizer, options)

    def save(self, folder: Path) -> None:
        """Writes what `load` needs."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")  # `save` raises no OSError
        (folder / "encoder.json").write_text(json.dumps(asdict(self.options)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """The encoder that `save` wrote; skips the transformers tokenizer, so that a process starts faster."""
        from tokenizers import Tokenizer

        options = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), EncoderOptions(**options))

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRow]:
        """Tokens of each document, or why it cannot be used; in order.

        Raises:
            ConfigError: if there are conversations but no chat template, or the template does not terminate.
        """
        messages = sum(len(document.messages) for document in documents)
        with self._time_limit(sum(document.size for document in documents), messages), memory_limit(RENDER_BYTES):
            rendered = [self._render(document) for document in documents]
        texts = [item.text for item in rendered if isinstance(item, _Rendered)]
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        with self._time_limit(size), memory_limit(encoding_bytes(size)) if self.may_die else nullcontext():
            encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        return [self._masked(item, next(encodings)) if isinstance(item, _Rendered) else item for item in rendered]

    def _time_limit(self, size: int, messages: int = 0) -> AbstractContextManager[None]:
        return time_limit(encoding_seconds(size, messages)) if self.may_die else nullcontext()

    def _render(self, document: Document) -> _Rendered | BadRow:
        if not document.messages:
            if document.unanswered:
                return _Rendered(document.prompt, [], document.unused, plain=True, unanswered=True)
            start = len(document.prompt) if self.options.assistant_only else 0
            text = document.prompt + document.completion
            return _Rendered(text, [(start, len(text))], document.unused, plain=True)
        if self.options.chat_template is None:
            raise ConfigError(
                "the data holds conversations, but the model's tokenizer has no chat template; give one with "
                "--chat_template FILE, or pick the model's chat variant"
            )
        began = time.thread_time()
        try:
            return self._render_prompt(document) if document.unanswered else self._render_chat(document)
        except RowError as error:
            return error.bad
        finally:
            self._budget.charge(document, time.thread_time() - began)

    # -- conversations

    def render(self, messages: list[Message], prompt: bool = False, variables: Mapping[str, Any] | None = None) -> str:
        """Renders a conversation as text, within limits of time and memory; `variables`: what else the template gets.

        Raises:
            RowError: if the template refuses these messages.
            ConfigError: if it does not terminate, or takes too much memory.
        """
        with memory_limit(RENDER_BYTES):
            return self._apply(messages, prompt, variables=variables)[0]

    @cached_property
    def probe(self) -> TemplateProbe:
        """What the chat template does with short conversations."""
        return TemplateProbe(self._apply, self.options.chat_template or "", self.options.turn_ends, self.options.stops)

    @cached_property
    def _template(self) -> Any:
        """The compiled chat template."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self.options.chat_template)

    @cached_property
    def _variables(self) -> dict[str, Any]:
        """What the template gets for every conversation: jinja's own names, the special tokens and the date."""
        today = date.fromisoformat(self.options.date)
        dates = {"date_string": today.strftime("%d %b %Y"), "strftime_now": today.strftime}
        return {**self._template.environment.globals, **dates, **self.options.special_tokens}

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template only accepts contents as lists of parts, as those of vision models do."""
        question = [{"role": "user", "content": "Qquestionq"}]
        # `_apply` reads this property, so set the cached value for each trial: plain text first, then parts.
        self.__dict__["_takes_parts"] = False
        try:
            if "Qquestionq" in self._apply(question)[0]:
                return False
        except RowError:
            pass
        self.__dict__["_takes_parts"] = True
        try:
            return "Qquestionq" in self._apply(question)[0]
        except RowError:
            return False

    @cached_property
    def _takes_json_arguments(self) -> bool:
        """Whether the template only writes a call if its arguments are JSON text."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "Aargumenta"}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        written = {}
        for as_text in (False, True):
            self.__dict__["_takes_json_arguments"] = as_text  # `_apply` reads this property, as above
            try:
                text = self._apply([{"role": "user", "content": "Qquestionq"}, reply])[0]
                written[as_text] = "Aargumenta" in text and "'Aargumenta'" not in text  # not as Python writes them
            except RowError:
                written[as_text] = False
        return written[True] and not written[False]

    def _in_form(self, message: Message) -> Message:
        """The message in the form that the template takes."""
        if "reasoning_content" in message:  # GPT-OSS's name for it, which transformers before 5.23 does not fill
            message = {"thinking": message["reasoning_content"], **message}
        if self._takes_parts:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("tool_calls") and self._takes_json_arguments:
            calls = [
                {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
                for call in message["tool_calls"]
                if (function := call["function"])
            ]
            message = {**message, "tool_calls": calls}
        return message

    @cached_property
    def proof(self) -> list[str]:
        """Lines that show what is trained in a short conversation; empty if all tokens are trained."""
        if not self.options.assistant_only:
            return []
        messages = ({"role": "user", "content": "A question"}, {"role": "assistant", "content": "A reply"})
        lines = [f"chat template: {self.options.origin}"]
        try:
            rendered = self._render_chat(Document(messages))
        except RowError as error:
            return [*lines, f"  it cannot be shown: {error.bad.detail}"]
        text, spans = rendered.text, rendered.spans
        trained = "".join(text[start:end] for start, end in spans)
        lines += [f"  text:    {tail(text)}", f"  trained: {tail(trained)}"]
        stop = next((token for token in self.probe.stop_tokens if trained.rstrip().endswith(token)), None)
        if stop is None and not self.probe.stops(text, spans[-1][1]):
            lines.append(
                "warning: no stop token is trained, so the model will not learn to end its reply: the template writes "
                "none after a last reply; give --chat_template FILE that does"
            )
        return lines

    def _render_chat(self, document: Document) -> _Rendered:
        self.rendered_chat = True
        messages, trained, variables = self._placed(document)
        self._refuse_unwritten(document)
        # Train on all tokens.
        if not self.options.assistant_only:
            text = self._apply(messages, variables=variables)[0]
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            self._refuse_lost(messages, replies, text, variables)
            return _Rendered(text, [(0, len(text))], self._unused(document, messages, variables))
        # Train on replies only: find their spans in the rendered text.
        _refuse_empty(messages, trained)
        text, marked = self._apply(messages, marked=self.markers, variables=variables)
        self._refuse_lost(messages, trained, text, variables)
        finder = ReplySpans(self.probe, self.options.turn_ends, self.options.thoughts == "train_empty", variables)
        spans = finder.marked(text, marked, messages) if self.markers else finder.by_turns(text, messages, trained)
        trained_spans = [span for index in trained for span in finder.generated(text, spans[index], messages, index)]
        return _Rendered(text, trained_spans, self._unused(document, messages, variables))

    def _render_prompt(self, document: Document) -> _Rendered:
        """What stands before an answer: up to that of the stand-in, or the generation prompt where none can follow."""
        try:
            rendered = self._render_chat(document)
            return replace(rendered, text=rendered.text[: rendered.spans[-1][0]], spans=[], unanswered=True)
        except RowError:
            if not self.probe.prompt_opens_thought:  # which the stand-in does not go on with, but the model does
                raise
        messages, trained, variables = self._placed(document)
        before, replies = messages[:-1], trained[:-1]
        text = self._apply(before, prompt=True, variables=variables)[0]
        self._refuse_lost(before, replies, text, variables)
        return _Rendered(text, [], self._unused(document, before, variables), unanswered=True)

    def _placed(self, document: Document) -> tuple[list[Message], list[int], dict[str, Any]]:
        """Messages with roles and thoughts as the template writes them, those that are trained, and its variables."""
        known = map(self.probe.place_role, document.messages)
        messages = [self.probe.place_thought(message, self.options.thoughts) for message in known]
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [index for index in replies if index >= document.untrained and index not in document.left_out]
        variables = dict(document.variables)
        if any(messages[index].get("reasoning_content") for index in trained):
            variables = {**_THOUGHTS_OF_EARLIER_TURNS, **variables}
        return messages, trained, variables

    def _unused(self, document: Document, messages: list[Message], variables: Mapping[str, Any]) -> tuple[str, ...]:
        """Paths of the fields of a row that nothing uses, those that the chat template gets included."""
        unused = [*document.unused]
        if document.optional:
            keys = self.probe.left_out(messages, variables).keys
            unused += [path for path, key in document.optional.items() if key in keys]
        if "tools" in document.variables:
            unused += self.probe.unread_in_tools(document.variables["tools"])
        options = [name for name in document.variables if name != "tools" and name not in self.probe.variables]
        return (*unused, *(f"chat_template_kwargs.{name}" for name in options))

    def _refuse_unwritten(self, document: Document) -> None:
        """Refuses a row whose tools the template ignores, or whose untrained messages the options would train.

        Raises:
            RowError: naming the field.
        """
        calls = any(message.get("tool_calls") for message in document.messages)
        for name, present in (("tools", "tools" in document.variables), ("tool_calls", calls)):
            if present and not self.probe.mentions(name):
                raise RowError(
                    "chat template", f"it does not render {name}; give --chat_template FILE that writes them"
                )
        if document.left_out and not self.options.assistant_only:
            raise RowError(
                "wrong type",
                f"messages[{min(document.left_out)}] is marked as not trained; set assistant_only_loss=true",
            )

    def _refuse_lost(
        self, messages: list[Message], trained: Collection[int], text: str, variables: Mapping[str, Any]
    ) -> None:
        """Refuses a row if the template leaves out a part of it.

        Raises:
            RowError: if a content or a tool call, or a thought that should be trained, is not in the text.
        """
        lost = [
            (index, element)
            for index, element in self.probe.left_out(messages, variables).elements
            if element != "thought" or index in trained
        ]
        lost += [(index, "content") for index in missing(messages, trained, text)]
        for index, element in lost:
            if element == "tool":
                raise RowError("chat template", f"it leaves out tools[{index}]; {_OTHER_TEMPLATE}")
            content = messages[index]["content"] if element == "content" else ""
            tagged = "</think>" in content and self.options.thoughts != "drop"
            thought = element == "thought" or (tagged and self.probe.thought_in(content) is not None)
            description = _LOST.get("thought" if thought else "tag" if tagged else element, "")
            # Where the prompt opens a thought, a reply without one is refused as well.
            droppable = thought and (self.markers or not self.probe.prompt_opens_thought)
            remedy = "set thoughts=drop to train without it, or " if droppable else ""
            detail = f"it leaves out {description}{name_message(messages, index)}; {remedy}{_OTHER_TEMPLATE}"
            raise RowError("chat template", detail)

    def _apply(
        self,
        messages: list[Message],
        prompt: bool = False,
        marked: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The rendered text, and the spans that its generation markers enclose.

        Raises:
            RowError: if the template refuses these messages.
            ConfigError: if it cannot be compiled, does not terminate, or takes too much memory.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        conversation, values = list(map(self._in_form, messages)), dict(variables or {})
        tools = values.pop("tools", None)
        try:
            with cpu_time_limit(RENDER_SECONDS):
                # Compiled templates are cached by their source, so this sets the variables of the one rendered here.
                self._template.globals = self._variables
                # `render_jinja_template` without its copies of values that are plain JSON, half of its time.
                text, spans = _render_with_assistant_indices(
                    self._template, conversation, tools, documents=None, add_generation_prompt=prompt, **values
                )
        except TooLong:
            raise ConfigError(
                f"the chat template still runs after {RENDER_SECONDS:.0f} s on one conversation; give another with "
                "--chat_template FILE"
            ) from None
        except MemoryError:
            raise ConfigError(
                f"the chat template takes over {RENDER_BYTES >> 20:,} MiB of memory for one conversation; give another "
                "with --chat_template FILE"
            ) from None
        except TemplateSyntaxError as error:  # of no use for any row
            where = f"{self.options.origin}, line {error.lineno}): {str(error.message)[:150].rstrip('.')}"
            raise ConfigError(f"the chat template cannot be compiled ({where}; repair it") from None
        except Exception as error:  # a template can fail in any way
            raise RowError("chat template", f"it refuses these messages: {str(error)[:150]}") from None
        if len(text) > 4 * ROW_BYTES:
            raise RowError("row too large", f"{len(text):,} characters once rendered")
        return text, spans if marked else []

    def _masked(self, item: _Rendered, encoding: Any) -> Encoded | BadRow:
        ids = encoding.ids
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in item.spans:
            if (start, end) == (0, len(item.text)):
                mask[:] = True
            else:
                first, last = token_span(encoding, start, end, len(item.text))
                mask[first:last] = True
        if item.plain:
            # Add the tokenizer's prefix, unless the text already starts with it, and its suffix, which is trained.
            before, after = self.options.prefix, [] if item.unanswered else self.options.suffix
            before = [] if before and ids[: len(before)] == before else before
            ids = [*before, *ids, *after]
            mask = np.concatenate([np.zeros(len(before), np.bool_), mask, np.ones(len(after), np.bool_)])
        mask[:1] = False
        if not (mask.any() or item.unanswered):
            return BadRow("no trained token", "it has no trained token")
        return Encoded(np.asarray(ids, dtype=np.int32), mask, item.unused, item.unanswered)


@dataclass
class _Rendered:
    text: str
    spans: list[Span]
    unused: tuple[str, ...]
    plain: bool = False
    unanswered: bool = False


def _refuse_empty(messages: Sequence[Message], trained: Sequence[int]) -> None:
    """Refuses a row with an empty trained reply: only its end-of-turn token would be trained.

    Raises:
        RowError: with the number of the message.
    """
    for index in trained:
        message = messages[index]
        if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
            detail = f"{name_message(messages, index)} is empty; give it text, or leave it out"
            raise RowError("no trained token", detail)


def training_encoder(config: TrainConfig, tokenizer: Any | None = None) -> Encoder:
    """The encoder of a run, with its training chat template and the options that determine the mask.

    Args:
        config: The model, `chat_template`, `assistant_only_loss`, `thoughts` and `template_date` are used.
        tokenizer: The result of `load_tokenizer`, if it is already loaded.

    Raises:
        ConfigError: if the tokenizer cannot be loaded, or has no end-of-sequence token.
    """
    tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
    encoder = Encoder.of(tokenizer, config.assistant_only_loss)
    template = chosen_template(config, encoder.options.chat_template)
    ids = stop_token_ids(tokenizer_folder(config))
    stops = [tokenizer.eos_token, *tokenizer.convert_ids_to_tokens([id_ for id_ in ids if id_ < len(tokenizer)])]
    options = replace(
        encoder.options,
        chat_template=template.source,
        origin=template.origin,
        thoughts=config.thoughts,
        date=config.template_date,
        stops=list(dict.fromkeys(stops)),
    )
    return Encoder(tokenizer.backend_tokenizer, options)
