"""What a request for a chat completion may say, and the errors of the OpenAI interface. Imports no torch.

A field that would change the answer and has no effect with this server is refused by name, unless it has the value that
changes nothing. Fields that say who asks (`user`, `metadata`) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainers.config.json_schema import parsed_json

MAX_MESSAGES = 2000
MAX_PARTS = 1000
MAX_CALLS = 100
MAX_ANSWERS = 128
"""As many as OpenAI takes; a server may take fewer."""
MAX_STOPS = 4
"""As many as OpenAI takes."""
_MAX_KEYS = 32
"""Keys that are looked at in a part of a request, all of which has fewer."""
_MAX_PATH = 100
"""Characters of a field's name in an error."""
_IGNORED = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0,
    "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "store": False,
}  # fmt: skip
"""Fields that are not supported, with the only value that is taken."""
_UNSUPPORTED = frozenset({
    "audio", "function_call", "functions", "prediction", "reasoning_effort", "verbosity", "web_search_options",
    "best_of", "echo", "prompt", "suffix",
})  # fmt: skip


class ApiError(Exception):
    """A request that is refused, as the OpenAI interface reports it.

    Args:
        status: HTTP status.
        message: what is wrong, and the way out.
        param: the field.
        code: a short name of the error.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """The body of the response."""
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
            self.status, "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn.

    Args:
        max_tokens: tokens at most; None for as many as the server allows and the context holds.
        temperature: 0 for the most likely tokens.
        top_p: probability of the likeliest tokens that are drawn from.
        seed: the same one gives the same answer; None for another answer each time.
        stops: texts before which the answer ends.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]


class _Part(BaseModel):
    """Types are as in JSON: no number is read from a text, and `true` is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > _MAX_KEYS:  # each unknown one would be an error of its own
            raise ValueError(f"has more than {_MAX_KEYS} fields")
        return values


class _Text(_Part):
    type: Literal["text"]
    text: str


class _CalledFunction(_Part):
    name: str
    arguments: str


class _ToolCall(_Part):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it, with its arguments as an object."""
        try:
            arguments = _strictly_parsed(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(400, f"the arguments of tool call {self.id[:80]!r} are not a JSON object", "messages")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Text], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> _Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant have tool_calls")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("only messages of the assistant have reasoning_content")
        if self.content is None and not self.tool_calls:
            raise ValueError("has no content")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role tool has a tool_call_id, and no other has")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        parts = self.content if isinstance(self.content, list) else None
        text = self.content or "" if parts is None else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        message |= {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return message | {key: value for key, value in optional.items() if value is not None}


class _Function(_Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class _Tool(_Part):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(_Part):
    """The body of a request for a chat completion, with the defaults of OpenAI."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    tools: Annotated[list[_Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, ceiling: int, index: int = 0) -> Sampling:
        """How an answer is drawn.

        Args:
            ceiling: most tokens that the server generates.
            index: its number; of several with a seed, each next one has the next seed.

        Raises:
            ApiError: for more tokens, and for two limits that differ.
        """
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_tokens")
        tokens = next(iter(limits), None)
        if tokens is not None and tokens > ceiling:
            name = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
            problem = f"{name}={tokens}: this server generates {ceiling:,} tokens at most; ask for fewer"
            raise ApiError(400, problem, name, "integer_above_max_value")
        seed = None if self.seed is None else self.seed + index
        return Sampling(tokens, self.temperature, self.top_p, seed, self.stops)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        return [message.for_template() for message in self.messages]

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them; none with `tool_choice: none`."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]


def parse_request(body: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        ApiError: with status 400 and the field that is wrong.
    """
    try:
        values = _strictly_parsed(body)
    except UnicodeError:
        raise ApiError(400, "the body is not valid UTF-8, or half of a surrogate pair is in it") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON, or has a key twice, an infinite number, or is nested too "
                       "deeply") from None  # fmt: skip
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    # OpenAI takes null for a field that is left out, and so do clients that send an assistant's message back.
    values = _without_null(values)
    if isinstance(values.get("messages"), list):
        values["messages"] = [_without_null(entry) for entry in values["messages"]]
    for name in sorted(values.keys() - ChatRequest.model_fields.keys()):
        _refuse_field(name, values.pop(name))
    try:
        request = ChatRequest.model_validate(values)
    except ValidationError as error:
        raise _first_error(error) from None
    if not all(0 < len(stop) <= 1000 for stop in request.stops):
        raise ApiError(400, f"stop is not one text, or a list of up to {MAX_STOPS}, of 1 to 1000 characters", "stop")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    return request


def _strictly_parsed(text: str | bytes) -> Any:
    """The value of a text that is JSON.

    Raises:
        UnicodeError: for half of a surrogate pair, which no tokenizer takes.
        ValueError: for other texts, and for numbers that are infinite (`1e999`).
        RecursionError: if it is nested too deeply.
    """
    values = parsed_json(text)
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    return values


def _without_null(values: Any) -> Any:
    return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values


def _refuse_field(name: str, value: Any) -> None:
    """Raises ApiError for a field that is not read, unless it changes nothing."""
    if name in _IGNORED:
        return
    if name in _NEUTRAL:
        neutral = _NEUTRAL[name]
        if isinstance(value, bool) == isinstance(neutral, bool) and value == neutral:
            return
        remedy = f"leave it out, or write {json.dumps(neutral)}"
        raise ApiError(400, f"{name} is not supported by this server; {remedy}", name, "unsupported_parameter")
    if name in _UNSUPPORTED:
        problem = f"{name} is not supported by this server; leave it out"
        raise ApiError(400, problem, name, "unsupported_parameter")
    raise ApiError(400, f"Unrecognized request argument supplied: {name[:100]!r}", name[:100], "unknown_parameter")


def _first_error(error: ValidationError) -> ApiError:
    """The error that pydantic reports for the field that is deepest in the body."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the types that a field may have, one that is too long is the one that was meant.
    detail = max(details, key=lambda entry: (len(entry["loc"]), entry["type"] == "too_long"))
    path = _path(detail["loc"])
    return ApiError(400, f"{path or 'the request'}: {detail['msg']}", path or None, "invalid_value")


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content` of a location, without the types that pydantic tried."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "float", "bool"):
            text += f".{step}" if text else step
    return text[:_MAX_PATH]
