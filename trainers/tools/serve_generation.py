"""Generates the answers of `tunesmith serve`: several at a time, each with random numbers of its own.

`model.generate` draws from the one generator of the process, so that answers which are drawn side by side would depend
on each other. Here each answer has its own; alone, it is what `generate` draws after `torch.manual_seed(seed)`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, TopPLogitsWarper

from trainers.config.mistakes import ConfigError
from trainers.data.formats import RowError
from trainers.data.reply_spans import name_message
from trainers.data.template_probe import missing
from trainers.tools.answer_format import InTime, PlainParser
from trainers.tools.chat_models import ContextFull, Models
from trainers.tools.partial_text import PartialText
from trainers.tools.serve_requests import ApiError, Sampling

_GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is taken: the logits divided by less may be infinite."""
_STATEFUL_ROPE = ("dynamic", "longrope")
"""Scalings that transformers computes for the longest row so far and keeps in the model, for every row in it."""


@dataclass(frozen=True)
class Finished:
    """The end of an answer.

    Args:
        reason: `stop` at the model's own end or a stop text, `length` at the limit.
        tokens: tokens that were generated, the one that ends the answer included.
    """

    reason: str
    tokens: int


Event = str | Finished | BaseException
"""Text that follows, the end, or the error that ended the generation; one of the last two comes last, and once."""


class ServedModel:
    """A loaded model that answers conversations.

    Args:
        models: with the model to serve: the tuned one if there is one, otherwise the base.
        ceiling: most tokens of an answer.
    """

    def __init__(self, models: Models, ceiling: int):
        self.models = models
        self.model: Any = models.tuned if models.tuned is not None else models.base
        self.ceiling = ceiling

    @property
    def most_concurrent(self) -> int | None:
        """Answers that can be generated at a time; None for any number."""
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        rope = getattr(inner.config.get_text_config(), "rope_parameters", None) or {}
        kinds = {settings.get("rope_type") for settings in (rope, *rope.values()) if isinstance(settings, dict)}
        return 1 if kinds & {*_STATEFUL_ROPE} else None

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation. To be called in the main thread, where a template's time can be limited.

        Args:
            messages: as chat templates read them.
            tools: as chat templates read them.

        Raises:
            ApiError: if the chat template does not take them, or leaves out a part of them.
        """
        probe = self.models.encoder.probe
        calls = any(message.get("tool_calls") for message in messages)
        for name, present in (("tools", bool(tools)), ("tool_calls", calls)):
            if present and not (self._has_template and probe.mentions(name)):
                problem = f"the chat template of this model does not support {name}; leave it out"
                raise ApiError(400, problem, name if name == "tools" else "messages")
        variables = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            known = [probe.place_role(self._with_thought(message)) for message in messages]
            text = self.models.text(known, not self._has_template, variables)
            self._refuse_lost(known, text, variables)
        except (ConfigError, RowError) as error:
            raise ApiError(400, str(error), "messages") from None
        return text

    def _with_thought(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with its thought, if it has one, where the chat template looks for it."""
        return self.models.for_template(message) if "reasoning_content" in message else dict(message)

    def parser(self, text: str, tools: Sequence[Mapping[str, Any]]) -> InTime | PlainParser:
        """What takes an answer apart. To be used in the main thread, where its time can be limited.

        Args:
            text: the text of the conversation.
            tools: as for `text`; without any, the text of a call is text.
        """
        if not self._has_template:
            return PlainParser()
        return InTime(self.models.format.parser(text, tools, with_calls=bool(tools)))

    @property
    def _has_template(self) -> bool:
        return self.models.encoder.options.chat_template is not None

    def _refuse_lost(self, messages: list[dict[str, Any]], text: str, variables: Mapping[str, Any]) -> None:
        """Raises ApiError if the template left out a part of a conversation, thoughts of earlier replies aside."""
        if not self._has_template:  # the contents are the text
            _refuse_unread(messages, {"name", "tool_call_id"})
            return
        losses = self.models.encoder.probe.left_out(messages, variables)
        _refuse_unread(messages, losses.keys)
        elements = [entry for entry in losses.elements if entry[1] != "thought"]
        lost = [*elements, *((index, "content") for index in missing(messages, (), text))]
        for index, element in lost:
            where = f"tools[{index}]" if element == "tool" else f"the {element} of {name_message(messages, index)}"
            problem = f"the chat template of this model leaves out {where}; leave it out, or send it in another message"
            raise ApiError(400, problem, "tools" if element == "tool" else "messages")

    def tokens(self, text: str) -> list[int]:
        """Token ids of the text of a conversation.

        Raises:
            ApiError: if they do not fit the context.
        """
        try:
            return self.models.tokens(text, not self._has_template)
        except ConfigError as error:
            code = "context_length_exceeded" if isinstance(error, ContextFull) else None
            raise ApiError(400, str(error), "messages", code) from None

    def tokens_for(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Most tokens of an answer.

        Raises:
            ApiError: if more are asked for than the context holds.
        """
        context = self.models.context
        room = self.ceiling if context is None else min(self.ceiling, context - len(prompt))
        if sampling.max_tokens is None:
            return room
        if sampling.max_tokens > room:
            problem = f"the context holds {context:,} tokens: {len(prompt):,} of the messages leave {room:,}"
            raise ApiError(400, f"{problem}; ask for fewer", "max_tokens", "context_length_exceeded")
        return sampling.max_tokens

    def start(self, prompt: Sequence[int], sampling: Sampling, on_event: Callable[[Event], None]) -> Generation:
        """Starts to generate in a thread of its own.

        Args:
            prompt: token ids.
            sampling: how to draw.
            on_event: called in that thread with each event.

        Raises:
            ApiError: if more is asked for than the context holds.
        """
        generation = Generation(self.models, self.model, prompt, sampling, self.tokens_for(prompt, sampling), on_event)
        generation.start()
        return generation


def _refuse_unread(messages: Sequence[Mapping[str, Any]], unread: Collection[str]) -> None:
    """Raises ApiError for a name that is not read, and for ids that are not, unless the order says as much."""
    if "name" in unread and any("name" in message for message in messages):
        raise ApiError(400, "the chat template of this model does not support name; leave it out", "messages")
    open_calls: list[Any] = []
    for message in messages if "tool_call_id" in unread else ():
        open_calls = [call["id"] for call in message.get("tool_calls", ())] or open_calls
        if message["role"] == "tool" and (not open_calls or open_calls.pop(0) != message["tool_call_id"]):
            problem = "the chat template of this model does not support tool_call_id"
            raise ApiError(400, f"{problem}; give the results of tools in the order of their calls", "messages")


class Generation(threading.Thread):
    """One answer while it is generated.

    Args:
        models: device, tokenizer and end tokens.
        model: the model.
        prompt: token ids.
        sampling: how to draw.
        max_tokens: most tokens of the answer.
        on_event: called with each event.
    """

    def __init__(
        self, models: Models, model: Any, prompt: Sequence[int], sampling: Sampling, max_tokens: int,
        on_event: Callable[[Event], None],
    ):  # fmt: skip
        super().__init__(daemon=True)
        self._model = model
        self._prompt = torch.tensor([list(prompt)], device=models.device)
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._on_event = on_event
        self._streamer = _Streamer(models.decode, models.ends, sampling.stops, on_event)

    def stop(self) -> None:
        """Ends the generation after its next token."""
        self._streamer.stopped.set()

    def run(self) -> None:
        """Generates; called by `start`."""
        last: Event = RuntimeError("the generation has no end")
        try:
            last = self._generate()
        except torch.OutOfMemoryError:
            last = ApiError(503, "the conversation and its answer do not fit in GPU memory; shorten it")
            torch.cuda.empty_cache()
        except BaseException as error:  # whatever a model does, `SystemExit` included, its client gets to know
            last = error
        finally:
            self._on_event(last)

    def _generate(self) -> Finished:
        drawing = []
        if self._sampling.temperature >= _GREEDY_BELOW:
            drawing.append(_Draw(self._sampling, self._prompt.device))
        self._model.generate(
            input_ids=self._prompt, attention_mask=torch.ones_like(self._prompt), do_sample=False, use_cache=True,
            max_new_tokens=self._max_tokens, logits_processor=LogitsProcessorList(drawing),
            streamer=self._streamer, stopping_criteria=[_Stopped(self._streamer.stopped)],
        )  # fmt: skip
        return self._streamer.finished()


class _Draw(LogitsProcessor):
    """Leaves one token, drawn with the temperature and top_p of an answer from a generator of its own."""

    def __init__(self, sampling: Sampling, device: torch.device):
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator(device).manual_seed(seed)
        self._temperature = sampling.temperature
        self._top_p = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores / self._temperature
        if self._top_p is not None:
            scores = self._top_p(input_ids, scores)
        chances = scores.softmax(-1)
        if not chances.isfinite().all():
            raise ApiError(500, "the model's logits are not finite: its weights, or their precision, are to blame")
        token = torch.multinomial(chances, 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


class _Stopped(StoppingCriteria):
    """Ends the generation once the event is set."""

    def __init__(self, stopped: threading.Event):
        self._stopped = stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self._stopped.is_set(), device=input_ids.device, dtype=torch.bool)


class _Streamer:
    """Turns tokens into text and events, as `generate` hands them over.

    Args:
        decode: the text of tokens.
        ends: token ids that end an answer.
        stops: texts before which it ends.
        on_event: called with each event.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], ends: set[int], stops: Sequence[str],
        on_event: Callable[[Event], None],
    ):  # fmt: skip
        self.stopped = threading.Event()
        self._text = PartialText(decode)
        self._stops = StopTexts(stops)
        self._ends = ends
        self._on_event = on_event
        self._is_prompt = True
        self._tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, and then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        token = int(value.reshape(-1)[-1])
        self._tokens.append(token)
        if token not in self._ends:  # not all tokenizers count it among the special ones, which are left out
            self._send(self._stops.add(self._text.add(token)))

    def end(self) -> None:
        """Sends what is left of the text."""
        if not self._stops.is_met:
            self._send(self._stops.add(self._text.end()))
        if not self._stops.is_met:
            self._send(self._stops.end())

    def finished(self) -> Finished:
        """The end of the answer."""
        ended = self._stops.is_met or (bool(self._tokens) and self._tokens[-1] in self._ends)
        return Finished("stop" if ended else "length", len(self._tokens))

    def _send(self, text: str) -> None:
        if text:
            self._on_event(text)
        if self._stops.is_met:
            self.stopped.set()


class StopTexts:
    """Cuts a text before the first of some texts, and holds back what could be the beginning of one.

    Args:
        stops: the texts, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._pending = ""
        self.is_met = False

    def add(self, text: str) -> str:
        """The text that can be sent now."""
        self._pending += text
        first = min((at for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=-1)
        if first >= 0:
            self.is_met = True
            return self._pending[:first]
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if self._pending.endswith(stop[:size]))
        held = max(lengths, default=0)
        cut = len(self._pending) - held
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        return ready

    def end(self) -> str:
        """The text that was held back."""
        return self._pending
