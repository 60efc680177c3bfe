"""Reads the calls of tools out of the text that a model writes between its markers. Nothing is ever executed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils.chat_parsing.content_parsers import parse_content

from trainers.config.json_schema import parsed_json

Call = dict[str, Any]
"""`{"type": "function", "function": {"name": str, "arguments": dict}}`"""

# No text may take long: white space is not given back (`*+`), and the tags of tags are looked for where they end.
_FUNCTION_END = "</function>"
_FUNCTION = re.compile(rf"<function=([^>\n]{{1,128}})>(.*?)(?:{_FUNCTION_END}|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<]*+)</arg_key>\s*+<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(
    r"(?:to=functions\.|call:|functions\.)?([\w.-]{1,128})(?:\[CALL_ID\][^\[]{0,100})?(?:\[ARGS\])?\s*+"
    r"(?:<\|channel\|>commentary)?\s*+(?:<\|constrain\|>)?(?:json)?(?:<\|message\|>)?\s*+(?=\{)"
)
_FENCE = "```"
_MOST_CHARACTERS = 100_000


def deepseek_token(name: str) -> str:
    """A token of DeepSeek's tokenizers, whose bars and underlines are not those of ASCII."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_SEPARATOR = deepseek_token("tool_sep")
_SEPARATED = re.compile(rf"(?:function)?{_SEPARATOR}([^\n<]+)\n?")


def read_calls(body: str, tools: Mapping[str, Any] | None = None, is_cut: bool = False) -> list[Call] | None:
    """The calls in a text between two markers; None if it is not one, or not finished.

    Known are JSON with `name` and `arguments` or `parameters`, alone or in a list; a name before JSON, as Mistral,
    DeepSeek and Gemma write it; tags for each argument, as Qwen 3.5 and GLM write them; and calls in Python's syntax.

    Args:
        body: the text, without the markers.
        tools: parameters of each tool by its name; say whether an argument between tags is text or JSON.
        is_cut: whether the answer ended before the second marker. Arguments between tags may be missing then, and
            such a call is another one; the other notations show by themselves whether they are complete.
    """
    text = body.strip()
    if not text or len(text) > _MOST_CHARACTERS:
        return None
    in_tags = (_in_function_tags, _in_argument_tags) if not is_cut or text.endswith(_FUNCTION_END) else ()
    for read in (_as_json, _after_name, *in_tags, _as_python):
        try:
            calls = list(read(text, tools or {}))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if calls:
            return calls
    return None


def as_call(value: Any) -> Call:
    """A call from a parsed object.

    Raises:
        ValueError: if it is none.
    """
    inner = value.get("function", value) if isinstance(value, dict) else None
    if isinstance(inner, str):  # {"function": NAME, "arguments": …}
        inner = {**value, "name": inner}
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"].strip():
        raise ValueError("no name")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed_json(arguments)
    return _call(inner["name"], arguments if arguments is not None else {})


def _call(name: str, arguments: Any) -> Call:
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()  # neither infinite nor half of a surrogate pair
    return {"type": "function", "function": {"name": name.strip(), "arguments": arguments}}


def _as_json(text: str, tools: Mapping[str, Any]) -> Iterator[Call]:
    values = parsed_json(text)
    yield from map(as_call, values if isinstance(values, list) else [values])


def _after_name(text: str, tools: Mapping[str, Any]) -> Iterator[Call]:
    """`name{…}`, with what some models put before, between and around them."""
    match = _SEPARATED.match(text) or _NAME.match(text)
    if match is None and (separated := text.split(_SEPARATOR, 1))[1:]:  # name, separator, arguments
        name, arguments = separated
    elif match is not None:
        name, arguments = match[1], text[match.end() :]
    else:
        return
    arguments = arguments.strip()
    if arguments.startswith(_FENCE) and arguments.endswith(_FENCE):
        arguments = arguments.strip("`").removeprefix("json")
    yield _call(name, _lenient_json(arguments))


def _lenient_json(text: str) -> Any:
    """JSON, or Gemma's dialect: bare keys, and strings between marks of its own."""
    try:
        return parsed_json(text)
    except ValueError:
        return parse_content(text, "json", {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]})


def _in_function_tags(text: str, tools: Mapping[str, Any]) -> Iterator[Call]:
    for name, inner in _FUNCTION.findall(text):
        schema = tools.get(name.strip())
        yield _call(name, {key.strip(): _typed(value, schema, key.strip()) for key, value in _tags(_PARAMETER, inner)})


def _in_argument_tags(text: str, tools: Mapping[str, Any]) -> Iterator[Call]:
    name = text.partition("<arg_key>")[0].strip()
    if "<arg_key>" in text and name:
        schema = tools.get(name)
        yield _call(name, {key.strip(): _typed(value, schema, key.strip()) for key, value in _tags(_ARGUMENT, text)})


def _tags(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Keys and values. What follows the last closing tag is left out: each opening one would be read to the end."""
    closing = pattern.pattern.rpartition("</")[2]
    return pattern.findall(text[: text.rfind(f"</{closing}") + len(closing) + 2])


def _as_python(text: str, tools: Mapping[str, Any]) -> Iterator[Call]:
    """`[name(argument='value')]`, as LFM writes them: parsed, not evaluated."""
    tree = ast.parse(text, mode="eval").body
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("no call with named arguments")
        values = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        yield _call(node.func.id, values)


def _typed(value: str, parameters: Any, name: str) -> Any:
    """An argument between tags: text where the tool says so, otherwise what it is as JSON, otherwise text."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(name) if isinstance(properties, dict) else None
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return parsed_json(value)
    except (ValueError, RecursionError):
        return value
