"""Thoughts and calls of tools are told apart from the answer, however the text is cut into chunks."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainers.data.template import Encoder, EncoderOptions
from trainers.embedded import BASE_DIR
from trainers.tools.answer_format import AnswerFormat, AnswerParser
from trainers.tools.tool_calls import read_calls

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Where"}, "days": {
            "type": "integer", "description": "How long"}}, "required": ["city"]}}}]  # fmt: skip
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}}
ANSWER, THOUGHT = "It is **warm**.", "Let me think."
OWN = {
    "start_anchor": "ASSISTANT:",
    "fields": {
        "thinking": {"open": "<<", "close": ">>"},
        "content": {},
        "tool_calls": {
            "open_pattern": "CALL (?P<name>[a-z]+)", "close": ";", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip


@cache
def encoder(name: str) -> Encoder:
    """An encoder with a template of TRL's."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    backend = Tokenizer.from_file(str(BASE_DIR / "tokenizer.json"))
    options = EncoderOptions(source, {"bos_token": "<s>", "eos_token": "</s>"}, [], [], [], False)
    return Encoder(backend, options)


@cache
def format_of(name: str) -> AnswerFormat:
    """The format that is found in a template of TRL's; `own` for a tokenizer's response template."""
    if name == "own":
        return AnswerFormat(None, None, OWN)
    return AnswerFormat(encoder(name).probe, encoder(name).options.chat_template)


def parsed(parser: AnswerParser, chunks: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The text of each kind as it streams, and the message."""
    streamed = {"content": "", "reasoning": "", "tool_call": ""}
    pieces = [*parser.initial]
    for chunk in chunks:
        pieces += parser.feed(chunk)
    pieces += parser.finish()
    for piece in pieces:
        streamed[piece.kind] += ("|" if piece.kind == "tool_call" and piece.opens else "") + piece.text
    return streamed, parser.message()


def reply_in(name: str, reply: dict[str, Any]) -> tuple[str, str]:
    """What comes before a reply, and the reply, as a template writes them."""
    question = [{"role": "user", "content": "Weather?"}]
    variables = {"tools": TOOLS}
    prompt = encoder(name).render(question, prompt=True, variables=variables)
    full = encoder(name).render([*question, {"role": "assistant", "content": "", **reply}], variables=variables)
    while not full.startswith(prompt):  # the prompt may have an empty thought, or leave out one that is there
        prompt = prompt[:-1]
    return prompt, full[len(prompt) :]


THINKING = ["glm4moe", "gptoss", "gemma4_v5", "lfm2_2_5", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_8"]
CALLING = [*THINKING, "gemma4", "llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"]


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_are_found_as_each_template_writes_them(name: str) -> None:
    thought = {"reasoning_content": THOUGHT, "thinking": THOUGHT}
    prompt, text = reply_in(name, {**thought, "content": ANSWER})
    _, message = parsed(format_of(name).parser(prompt), [text[: text.index(ANSWER) + len(ANSWER)]])
    assert message == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}


@pytest.mark.parametrize("name", CALLING)
def test_calls_are_found_as_each_template_writes_them(name: str) -> None:
    prompt, text = reply_in(name, {"tool_calls": [{**CALL, "id": "call00001"}]})
    for end in ("<|eot_id|>", "<|im_end|>", "<turn|>", "<|tool_response>"):  # the end of a turn is not part of it
        text = text.partition(end)[0]
    _, message = parsed(format_of(name).parser(prompt, TOOLS), [text])
    assert message["tool_calls"] == [CALL]
    assert message["content"] == ""


RAW = {
    "qwen3": "<think>\nLet me\nsee </thin\n</think>\n\nOn it.\n<tool_call>\n" + json.dumps(CALL["function"])
    + "\n</tool_call>\n<tool_call>\n{broken\n</tool_call>\nDone <think> no thought",
    "gptoss": "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Köln"}<|call|>',
    "gemma4": "<|channel>thought\nHm.\n<channel|>Yes. <|tool_call>call:get_weather{city:<|\"|>Köln<|\"|>}<tool_call|>",
    "deepseekv3": "<think>a</think>b".replace("b", "\uff5c<"),
    "llama3_1": '{"name": "get_weather", "parameters": {"city": "Köln"}}',
    "qwen3_5_think": "Hm.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "</function>\n</tool_call>",
    "own": '<<Hm.>>Yes CALL add{"a": 1}; then CALL add{"a": ; and the rest',
    "cohere": " plain\n text ",
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RAW)), st.data())
def test_the_chunks_of_a_stream_change_nothing(name: str, data: st.DataObject) -> None:
    """Also for texts that are cut anywhere, and for mixtures of markers."""
    pieces = data.draw(
        st.lists(st.sampled_from([RAW[name], *"<|>{}[] \n", "</think>", "text", "<tool_call>"]), max_size=6)
    )
    text = "".join(pieces)[: data.draw(st.integers(0, 600))]
    prompt = "<think>\n" if name == "qwen3_5_think" else ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=40)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    format_ = format_of(name)
    assert parsed(format_.parser(prompt, TOOLS), chunks) == parsed(format_.parser(prompt, TOOLS), [text])


def test_what_is_read_from_each_raw_text() -> None:
    """The control of the test above, which would agree about nothing, too."""
    messages = {name: parsed(format_of(name).parser("<think>\n" * (name == "qwen3_5_think"), TOOLS), [text])[1]
                for name, text in RAW.items()}  # fmt: skip
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    assert messages["qwen3"]["reasoning_content"] == "Let me\nsee </thin"
    assert messages["qwen3"]["content"] == "On it.Done <think> no thought"
    assert messages["qwen3"]["tool_calls"] == [CALL, {"invalid": "{broken"}]
    assert messages["gptoss"] == {
        "role": "assistant", "content": "", "reasoning_content": "One.\n\nTwo.", "tool_calls": [call],
    }  # fmt: skip
    assert messages["gemma4"] == {
        "role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": [call],
    }  # fmt: skip
    assert messages["llama3_1"]["tool_calls"] == [call]
    assert messages["qwen3_5_think"] == {
        "role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call],
    }  # fmt: skip
    assert messages["own"]["reasoning_content"] == "Hm."
    assert messages["own"]["content"] == "Yes then and the rest"
    assert [call.get("function") for call in messages["own"]["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        None,
    ]
    assert messages["cohere"] == {"role": "assistant", "content": " plain\n text "}


def test_an_unfinished_thought_is_one() -> None:
    streamed, message = parsed(format_of("qwen3").parser(), ["<thi", "nk>so far"])
    assert streamed == {"content": "", "reasoning": "so far", "tool_call": ""}
    assert message["content"] == ""
    _, mentioned = parsed(format_of("qwen3").parser(), ["The tag <think> opens a thought."])
    assert mentioned == {"role": "assistant", "content": "The tag <think> opens a thought."}


def test_special_tokens_that_mark_nothing_are_left_out() -> None:
    special = {1: "<|im_end|>", 2: "<tool_call>", 3: "<think>", 4: "<|channel|>"}
    format_ = AnswerFormat(None, "<tool_call>", None, {number: special[number] for number in (1, 2, 3)})
    assert format_.dropped == {1}
    assert AnswerFormat(None, "", None, special).dropped == {1, 2, 3}, "GPT-OSS has no <think>"


@pytest.mark.parametrize("wrong", [None, 3, {}, {"fields": {}}, {"fields": {"x": {"open": "("}}, "start_anchor": "a"}])
def test_a_wrong_response_template_is_passed_over(wrong: Any) -> None:
    _, message = parsed(AnswerFormat(None, "", wrong).parser(), ["<think>a</think>b"])
    assert message == {"role": "assistant", "content": "b", "reasoning_content": "a"}


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', "f", {"a": 1}),
        ('[{"name": "f", "parameters": {}}]', "f", {}),
        ('{"function": "f", "arguments": "{\\"a\\": [1]}"}', "f", {"a": [1]}),
        ('{"type": "function", "function": {"name": "f", "arguments": {}}}', "f", {}),
        ('f[ARGS]{"a": 1}', "f", {"a": 1}),
        ('f[CALL_ID]123456789[ARGS]{"a": 1}', "f", {"a": 1}),
        ('function<\uff5ctool\u2581sep\uff5c>f\n```json\n{"a": 1}\n```', "f", {"a": 1}),
        ('f<\uff5ctool\u2581sep\uff5c>{"a": 1}', "f", {"a": 1}),
        ("f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "f", {"a": 1}),
        ("<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>", "get_weather", {"city": "12"}),
        ("[f(a='x', b=[1, 2])]", "f", {"a": "x", "b": [1, 2]}),
    ],
)
def test_calls_in_other_notations(body: str, name: str, arguments: dict[str, Any]) -> None:
    parameters = {"get_weather": TOOLS[0]["function"]["parameters"]}  # type: ignore[index]
    assert read_calls(body, parameters) == [{"type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize(
    "body",
    ["", "text", "{", '{"name": 3}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": NaN}',
     '{"name": " ", "arguments": {}}', "[" * 50_000, "f(" * 5_000, "__import__('os').system('touch /tmp/x')",
     "[f(__import__('os'))]", '{"name": "f", "arguments": {"a": "\\ud800"}}', "x" * 200_000],
)  # fmt: skip
def test_other_texts_are_no_calls(body: str) -> None:
    assert read_calls(body) is None


CUT = {
    "qwen3_5_think": "</think><tool_call>\n<function=f>\n<parameter=path>\n/tmp\n</parameter>\n<parameter=dry_run>\n"
    "true\n</parameter>\n</function>",
    "glm4moe": "</think><tool_call>f\n<arg_key>path</arg_key>\n<arg_value>/tmp</arg_value>\n"
    "<arg_key>dry_run</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "gptoss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"path": "/tmp", "dry_run": true}',
    "gemma4": '<|tool_call>call:f{path:<|"|>/tmp<|"|>,dry_run:true}',
    "llama3_1": '{"name": "f", "parameters": {"path": "/tmp", "dry_run": true}}',
    "lfm2_2_5": "<|tool_call_start|>[f(path='/tmp', dry_run=True)]",
    "tags of its own": "CALL f <path>/tmp</path><dry_run>true</dry_run>;",
}  # fmt: skip
"""Answers with one call. The second marker is left out where the call shows by itself that it is complete."""


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_is_none(name: str) -> None:
    """A call without some of its arguments is another call, and a client would do what it says."""
    tags = {"open_pattern": "CALL (?P<name>[a-z]+) ", "close": ";", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}  # fmt: skip
    own = AnswerFormat(None, None, {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": tags}})
    format_ = own if name == "tags of its own" else format_of(name)
    calls = [parsed(format_.parser("<think>\n" if "</think>" in CUT[name] else "", TOOLS), [CUT[name][:end]])[1]
             .get("tool_calls", []) for end in range(1, len(CUT[name]) + 1)]  # fmt: skip
    *cut, complete = [[call["function"] for call in each if "function" in call] for each in calls]
    assert [sorted(call["arguments"]) for call in complete] == [["dry_run", "path"]]
    assert [each for each in cut if each and each != complete] == []


SPACES = " " * 20_000


@pytest.mark.parametrize(
    "body",
    ["a" + SPACES + "x", "a json" + SPACES + "x", "f<\uff5ctool\u2581sep\uff5c>```" + SPACES + "x", "x" + SPACES + "<x",
     "<function=f>" + "<parameter=a>" * 7_000, "<function=" * 9_000, "f" + "<arg_key>a</arg_key>" * 4_900,
     "f" + "<arg_key>a</arg_key><arg_value>" * 3_200, "f(a=" + "-" * 90_000 + "1)", '{"a":' * 15_000],
)  # fmt: skip
def test_no_call_takes_long_to_read(body: str) -> None:
    """Patterns that give back white space, or look for a closing tag from each opening one, take minutes."""
    began = time.process_time()
    read_calls(body)
    assert time.process_time() - began < 2


def test_an_answer_may_lack_what_a_response_template_requires() -> None:
    required = {"start_anchor": "A:", "fields": {"content": {}, "thinking": {
        "open": "<<", "close": ">>", "optional": False}}}  # fmt: skip
    _, message = parsed(AnswerFormat(None, None, required).parser(), ["Yes"])
    assert message == {"role": "assistant", "content": "Yes"}
