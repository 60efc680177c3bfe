"""Fields of rows: each is used, refused by name, or listed with its count; tools, calls, weights, kwargs, history."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.test_support import PLAIN, chat, configure, save_tokenizer, write_jsonl
from tests.unit.data.test_training_templates import SPECIAL, TRL
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import FORMAT_COLUMNS, MEDIA
from trainers.data.formats import OPTIONAL, Document, RowError, canonical
from trainers.data.messages import THOUGHT_KEYS
from trainers.data.preferences import example
from trainers.data.prepare import prepare
from trainers.data.shards import BadRow
from trainers.data.template import training_encoder
from trainers.data.tokenizer import load_tokenizer
from trainers.tools.data_preview import Preview

CALLING = (
    "{% if shout %}!{% endif %}"
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.name }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def trained_texts(tmp_path, row, template=CALLING, **options):
    """What is trained of a row, and the whole of it as it is rendered."""
    if not (tmp_path / "model").exists():
        save_tokenizer(tmp_path / "model", template)
    config = configure(tmp_path, write_jsonl(tmp_path / "data.jsonl", [row]), **options)
    tokens = prepare(config, "train")
    ids, mask = tokens.document(0)
    tokenizer = load_tokenizer(config)
    starts = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
    ends = [next((i for i in range(start, len(ids)) if not mask[i]), len(ids)) for start in starts]
    spans = [tokenizer.decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    return spans, tokenizer.decode(ids), tokens.report


KEYS = st.text("abcdefg_", min_size=1, max_size=6) | st.sampled_from(
    ["id", "tools", "name", "weight", "train", "tool_call_id", "tool_calls", "images", "video", "history", "system"]
)
VALUES = st.sampled_from([1, "x", "[]", "{}", [], {}, [["q", "a"]], True, 0.5, [CALL], {"a": 1}])
EXTRA = st.dictionaries(KEYS, VALUES, max_size=4)
USED_IN_MESSAGES = {
    "tool_calls",
    "tool_call_id",
    "name",
    "weight",
    "train",
    "loss",
    "training",
    "loss_mask",
    "function_call",
    *THOUGHT_KEYS,
}


def _document_or_reason(row, format_name):
    try:
        return example(row, format_name, {}, True, (format_name,), rewards={} if format_name == "prompt" else None)[0]
    except RowError as error:
        return error.bad.detail


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format_name=st.sampled_from(list(FORMAT_COLUMNS)),
    row_keys=EXTRA,
    message_keys=EXTRA,
    part_keys=EXTRA,
    call_keys=EXTRA,
)
def test_every_field_is_used_refused_or_listed(format_name, row_keys, message_keys, part_keys, call_keys):
    """Used and refused and listed are all keys, at every depth."""
    keys = {"chat": ("role", "content"), "sharegpt": ("from", "value")}.get(format_name, ("role", "content"))
    part = {**part_keys, "type": "text", "text": "a"}
    call = {**call_keys, "type": "function", "function": {**call_keys, "name": "f", "arguments": {}}}
    first = {keys[0]: "user", keys[1]: [part]}
    last = {**message_keys, "tool_calls": [call], keys[0]: "assistant", keys[1]: "b"}
    contents = {
        "chat": {"messages": [first, last]},
        "sharegpt": {"conversations": [first, last]},
        "prompt_completion": {"prompt": [first], "completion": [last]},
        "alpaca": {"instruction": "a", "output": "b"},
        "text": {"text": [part]},
        "preference": {"prompt": [first], "chosen": [last], "rejected": [{**last, keys[1]: "c"}]},
        "labelled": {"messages": [first, last], "label": True},
        "prompt": {"prompt": [first, last, first]},
    }[format_name]
    row = {**row_keys, **contents}
    document = _document_or_reason(row, format_name)
    if isinstance(document, str):
        named = {*row_keys, *message_keys, *call_keys, *part_keys, "chat_template_kwargs"}
        assert any(name in document for name in named), document
        return
    roles = {*FORMAT_COLUMNS[format_name], *OPTIONAL[format_name]}
    expected = set(row) - roles
    assert not (set(row) - set(document.unused) - roles)
    assert not expected.intersection(MEDIA) or not any(row[name] for name in expected.intersection(MEDIA))
    if document.messages:
        listed = {*document.unused, *document.optional}
        path = {"chat": "messages", "sharegpt": "conversations", "prompt_completion": "completion",
                "preference": "chosen", "labelled": "messages", "prompt": "prompt"}.get(format_name)  # fmt: skip
        if path:
            others = set(message_keys) - USED_IN_MESSAGES - set(keys)
            assert others <= {name.removeprefix(f"{path}[].") for name in listed}
            calls = {f"{path}[].tool_calls[].{key}" for key in call_keys if key not in ("type", "function")}
            assert calls <= listed
            parts = {
                f"{path.replace('completion', 'prompt').replace('chosen', 'prompt')}[].{keys[1]}[].{key}"
                for key in part_keys
            }
            assert parts - {name for name in parts if name.endswith(("].type", "].text"))} <= listed


def test_what_nobody_reads_is_counted_in_report_log_page_and_json(tmp_path):
    rows = [{**chat("a", "b"), "id": number} for number in range(40)]
    rows[3]["messages"][0]["likes"] = 3
    rows[4]["more"] = None
    config = configure(tmp_path, write_jsonl(tmp_path / "data.jsonl", rows), global_batch_size=4)
    report = prepare(config, "train").report
    assert report.unused == {"id": 40, "messages[].likes": 1}
    said = "unused fields: `id`, 40 rows; `messages[].likes`, 1 row"
    assert any(line.endswith(said) for line in report.lines())
    preview = Preview(config)
    assert preview.statistics()["notes"] == [said]
    assert preview.statistics()["unused"] == report.unused
    assert preview.rows(3, 1)["rows"][0]["unused"] == ["id", "messages[].likes"]


def test_columns_that_are_not_read_are_listed_too(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "id": [1, 2], "input": ["x", None]}), path, row_group_size=1)
    assert prepare(configure(tmp_path, path), "train").report.unused == {"id": 2, "input": 1}


def test_what_stands_beside_a_list_of_rows_is_listed(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"version": 3, "rows": [{"text": "a"}] * 3}))
    assert prepare(configure(tmp_path, path), "train").report.unused == {"version (beside the list of rows)": 1}


@pytest.mark.parametrize("name", MEDIA)
@pytest.mark.parametrize("inside", [False, True])
def test_images_and_sound_are_refused_by_name(tmp_path, name, inside):
    row = chat("a", "b")
    (row["messages"][0] if inside else row)[name] = ["x.png"]
    with pytest.raises(ConfigError, match=rf"data.jsonl:1: not text: .*{name} holds"):
        prepare(configure(tmp_path, write_jsonl(tmp_path / "data.jsonl", [row])), "train")


def test_a_part_that_is_no_text_is_refused_by_its_type():
    row = chat([{"type": "text", "text": "a"}, {"type": "image", "url": "x"}], "b")
    with pytest.raises(RowError, match=r"messages\[0\].content\[1\] is a part of type 'image'"):
        canonical(row, "chat", {}, True)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_reach_the_template(tmp_path, as_text):
    text = json.dumps if as_text else (lambda value: value)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": text({"a": 1})}}
    row = {
        "tools": text([TOOL]),
        "messages": [
            {"role": "user", "content": "1+0"},
            {"role": "assistant", "content": None, "tool_calls": text([call])},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"},
            {"role": "assistant", "content": "one"},
        ],
    }
    spans, text, report = trained_texts(tmp_path, row)
    assert spans == ['[add {"a": 1}]<|im_end|>', "one<|im_end|>"]
    assert text.startswith(f"<|im_start|>tools {json.dumps([TOOL])}<|im_end|>")
    assert "1(add)<|im_end|>" in text
    assert report.unused == {"messages[].tool_calls[].id": 1, "messages[].tool_call_id": 1}  # this template has neither


def encoder_of(tmp_path, template):
    save_tokenizer(tmp_path / "model", template, special=sorted(set(SPECIAL.findall(template)) - {"</s>"}))
    return training_encoder(configure(tmp_path, "unread", model_name_or_path=str(tmp_path / "model")))


def outcome(encoder, row):
    """Tokens and mask of a row, or why it is bad; and the fields that are listed as not used."""
    try:
        done = encoder.encode([canonical(row, "auto", {}, True)])[0]
    except RowError as error:
        done = error.bad
    return (done, ()) if isinstance(done, BadRow) else ((done.input_ids.tolist(), done.mask.tolist()), done.unused)


def paths_in(value, path=()):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths_in(item, (*path, key))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": "first", "comment": "none"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]
OPENAI = {
    "tools": TOOLS,
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"name": "x", "content_type": 1},
    "messages": [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": "1+2?", "name": "bob"},
        {"role": "assistant", "tool_calls": [{**CALL, "id": "c1", "index": 0}], "refusal": "no"},
        {"role": "tool", "content": "three", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 3", "name": "helper"},
    ],
}
IMPLIED = ("type", "role")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "gptoss", "gemma4_v5", "llama3_1", "nemotron_3_nano", "glm4moe"])
def test_a_key_without_which_a_stock_template_writes_the_same_is_listed(tmp_path, name):
    encoder = encoder_of(tmp_path, (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    whole, unused = outcome(encoder, OPENAI)
    assert not isinstance(whole, BadRow), whole
    assert {"parallel_tool_calls", "messages[].refusal", "messages[].tool_calls[].index"} <= {*unused}
    assert {"chat_template_kwargs.name", "chat_template_kwargs.content_type", "messages[].name"} <= {*unused}
    for path in paths_in(OPENAI):
        row = copy.deepcopy(OPENAI)
        parent = functools.reduce(lambda value, key: value[key], path[:-1], row)
        del parent[path[-1]]
        field = "".join("[]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".").replace("s.a.", "s.*.")
        listed = any(f"{field}.".startswith(f"{other}.") for other in unused)
        if path[-1] not in IMPLIED and field != "chat_template_kwargs" and not listed:
            assert outcome(encoder, row)[0] != whole, f"{field} is neither used nor listed: {unused}"


def test_a_key_that_a_template_writes_for_one_role_is_listed_for_the_others(tmp_path):
    """The control is a template that writes it for every role."""
    row = {**OPENAI, "messages": [{**message, "name": "x"} for message in OPENAI["messages"]]}
    for name, template in (("a", CALLING), ("b", CALLING.replace("if m.role == 'tool'", "if m.name"))):
        encoder = encoder_of(tmp_path / name, template)
        assert ("messages[].name" in outcome(encoder, row)[1]) is (name == "a")


def test_keys_of_a_prompt_and_of_its_completion_are_listed_apart(tmp_path):
    turns = [{"role": "user", "content": "a", "name": "bob"}, {"role": "assistant", "content": "b", "name": "ann"}]
    unused = outcome(encoder_of(tmp_path, PLAIN), {"prompt": turns[:1], "completion": turns[1:]})[1]
    assert unused == ("prompt[].name", "completion[].name")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{{ tools[:1] | tojson }}", r"it leaves out tools\[1\]"),
        ("{% if false %}{{ tools | tojson }}{% endif %}", r"it leaves out tools\[0\]"),
        ("{{ tools | tojson }}", None),
    ],
)
def test_a_tool_that_the_template_leaves_out_is_refused(tmp_path, written, reason):
    encoder = encoder_of(tmp_path, CALLING.replace("{{ tools | tojson }}", written))
    bad = outcome(encoder, {**chat("1+0", "one"), "tools": [TOOL, TOOL]})[0]
    assert re.match(reason, bad.detail) if reason else not isinstance(bad, BadRow)


def test_a_call_whose_arguments_the_template_leaves_out_is_refused(tmp_path):
    row = {"messages": [*chat("1+0")["messages"], {"role": "assistant", "tool_calls": [CALL]}]}
    bad = outcome(encoder_of(tmp_path, CALLING.replace("{{ call.function.arguments | tojson }}", "")), row)[0]
    assert "it leaves out a tool call of message 2 (assistant)" in bad.detail


@pytest.mark.parametrize("arguments", ["'' + call.function.arguments", "call.function.arguments"])
def test_a_template_that_writes_arguments_as_text_gets_json_and_not_python(tmp_path, arguments):
    joined = CALLING.replace("{{ call.function.arguments | tojson }}", f"{{{{ {arguments} }}}}")
    row = {"messages": [*chat("1+0")["messages"], {"role": "assistant", "tool_calls": [CALL]}]}
    assert trained_texts(tmp_path, row, joined)[0] == ['[add {"a": 1}]<|im_end|>']


def test_a_template_that_cannot_be_compiled_refuses_a_row_of_tools(tmp_path):
    bad = outcome(encoder_of(tmp_path, "{% if %}"), {**chat("1+0", "one"), "tools": [TOOL]})[0]
    assert bad.kind == "chat template"


@pytest.mark.parametrize("content", [None, [], ""])
def test_a_turn_of_calls_needs_no_text(tmp_path, content):
    row = {"messages": [*chat("1+0")["messages"], {"role": "assistant", "content": content, "tool_calls": [CALL]}]}
    assert trained_texts(tmp_path, row)[0] == ['[add {"a": 1}]<|im_end|>']
    del row["messages"][1]["tool_calls"]
    with pytest.raises(RowError):
        canonical(row, "chat", {}, True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], r"messages\[0\].content is an empty list, not text"),
        (["a", "b"], r"messages\[0\].content\[0\] is a bare string; make it \{\"type\": \"text\""),
        ([{"type": "text", "text": "a"}, "b"], r"messages\[0\].content\[1\] is a bare string"),
        ([7], r"content\[0\] is a part of type 'int'"),
    ],
)
def test_a_content_that_no_template_would_write_is_refused(content, said):
    with pytest.raises(RowError, match=said):
        canonical({"messages": [{"role": "user", "content": content}, *chat("a", "b")["messages"]]}, "chat", {}, True)


def test_calls_in_older_forms_are_calls(tmp_path):
    answer = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "add", "content": "1"}
    old = canonical(
        {"messages": [*chat("1+0")["messages"], answer, result], "functions": [TOOL["function"]]}, "chat", {}, True
    )
    turns = [("human", "1+0"), ("function_call", json.dumps(CALL["function"])), ("observation", "1")]
    share = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL])}
    assert old.messages[1] == canonical(share, "sharegpt", {}, True).messages[1]
    assert old.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert old.variables == canonical(share, "sharegpt", {}, True).variables == {"tools": [TOOL]}
    assert old.messages[2] == {"role": "tool", "content": "1", "name": "add"}


def test_a_turn_with_calls_in_two_forms_is_refused():
    answer = {"role": "assistant", "content": "", "function_call": CALL["function"], "tool_calls": [CALL]}
    for role, turn in (("assistant", answer), ("function_call", {**answer, "content": json.dumps(CALL["function"])})):
        with pytest.raises(RowError, match="has a call in function_call and others in tool_calls"):
            canonical({"messages": [*chat("1+0")["messages"], {**turn, "role": role}]}, "chat", {}, True)
    answer["tool_calls"] = None
    assert canonical({"messages": [*chat("1+0")["messages"], answer]}, "chat", {}, True).messages[1]["tool_calls"] == [
        CALL
    ]


@pytest.mark.parametrize("bare", [TOOL["function"], {"type": "function", **TOOL["function"]}])
def test_a_tool_that_is_a_bare_function_is_a_tool(bare):
    row = {**chat("1+0", "one"), "tools": [bare]}
    assert canonical(row, "chat", {}, True).variables == {"tools": [TOOL]}


def test_messages_may_be_json_text():
    row = chat("1+0", "one")
    assert canonical({"messages": json.dumps(row["messages"])}, "chat", {}, True) == canonical(row, "chat", {}, True)
    with pytest.raises(RowError, match="messages is text but not valid JSON"):
        canonical({"messages": "1+0"}, "chat", {}, True)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("nonsense", "tool_calls is text but not valid JSON"),
        (7, "tool_calls is int"),
        ([{"name": "f", "arguments": "{"}], r"tool_calls\[0\].arguments is text but not valid JSON"),
        ([{"name": "f", "arguments": '{"a": 1, "a": 2}'}], "arguments: the key 'a' appears twice in one object"),
        ([{"name": "f", "arguments": [1]}], "arguments is list"),
        ([{"function": {}}], "names no function"),
        ([{"type": "custom", "name": "f"}], "of type 'custom'"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused(calls, said):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]}
    with pytest.raises(RowError, match=said):
        canonical(row, "chat", {}, True)


def test_a_template_without_a_place_for_tools_refuses_them(tmp_path):
    with pytest.raises(ConfigError, match="it does not render tools"):
        trained_texts(
            tmp_path, {**chat("a", "b"), "tools": [TOOL]}, "{% for m in messages %}{{ m.content }}{% endfor %}"
        )


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "loss_mask"])
def test_a_message_of_weight_zero_is_context(tmp_path, key):
    row = {"system": "s", **chat("a", "first", "b", "second", "c", "third")}
    row["messages"][1][key], row["messages"][3][key], row["messages"][0][key] = 0, True, 0
    spans, text, report = trained_texts(tmp_path, row)
    assert (spans, report.unused) == (["second<|im_end|>", "third<|im_end|>"], {})
    assert "first<|im_end|>" in text
    with pytest.raises(ConfigError, match=r"messages\[2\] is marked as not trained"):
        trained_texts(tmp_path, row, assistant_only_loss=False)


def test_a_loss_that_was_measured_is_no_weight(tmp_path):
    row = chat("a", "b")
    row["messages"][1]["loss"] = 0.53
    spans, _, report = trained_texts(tmp_path, row)
    assert (spans, report.unused) == (["b<|im_end|>"], {"messages[].loss": 1})


@pytest.mark.parametrize("function", [None, "add", {"parameters": {}}])
def test_a_tool_without_a_name_ends_nothing(tmp_path, function):
    row = {**chat("a", "b"), "tools": [{"type": "web_search", "function": function}]}
    assert trained_texts(tmp_path, row, CALLING)[0] == ["b<|im_end|>"]


@pytest.mark.parametrize("role", ["function", "tool_response", "function_response", "observation"])
def test_results_of_tools_have_several_names(role):
    calling = {"role": "tool_call", "content": json.dumps(CALL["function"])}
    messages = [{"role": "user", "content": "a"}, calling, {"role": role, "content": "3"}, *chat("b", "c")["messages"]]
    document = canonical({"messages": messages}, "chat", {}, True)
    assert [message["role"] for message in document.messages[:3]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("value", [0.5, "0", [1, 0], -1])
def test_a_weight_between_is_refused(value):
    row = chat("a", "b")
    row["messages"][1]["weight"] = value
    with pytest.raises(RowError, match=r"messages\[1\].weight is .*trained \(1\) or not \(0\)"):
        canonical(row, "chat", {}, True)


def test_a_row_of_which_nothing_is_to_be_trained_says_so():
    row = chat("a", "b")
    row["messages"][1]["weight"] = 0
    with pytest.raises(RowError, match="marked as not trained"):
        canonical(row, "chat", {}, True)


def test_a_user_who_asks_to_be_trained_is_listed():
    row = chat("a", "b")
    row["messages"][0]["train"] = True
    assert canonical(row, "chat", {}, True).unused == ("messages[].train",)


DEAF = CALLING.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")


@pytest.mark.parametrize(
    ("template", "role"), [(CALLING, "system"), (CALLING + "{# developer #}", "developer"), (DEAF, "system")]
)
def test_a_developer_is_the_system_where_the_template_knows_none(tmp_path, template, role):
    row = {"messages": [{"role": "developer", "content": "be brief"}, *chat("a", "b")["messages"]]}
    assert f"<|im_start|>{role}\nbe brief<|im_end|>" in trained_texts(tmp_path, row, template)[1]


def test_a_rows_own_variables_reach_the_template(tmp_path):
    row = {**chat("a", "b"), "chat_template_kwargs": {"shout": True, "whisper": True}}
    _, text, report = trained_texts(tmp_path, row)
    assert text.startswith("!")
    assert report.unused == {"chat_template_kwargs.whisper": 1}
    row["chat_template_kwargs"] = json.dumps({"messages": []})
    with pytest.raises(RowError, match=r"chat_template_kwargs.messages cannot be set by a row"):
        canonical(row, "chat", {}, True)


def test_alpacas_history_is_earlier_turns(tmp_path):
    row = {"instruction": "c", "input": "", "output": "third", "history": [["a", "first"], ["b", "second"]]}
    spans, _, report = trained_texts(tmp_path, row)
    assert (spans, report.unused) == ([f"{word}<|im_end|>" for word in ("first", "second", "third")], {})
    with pytest.raises(RowError, match="history needs a chat template"):
        canonical(row, "alpaca", {}, False)
    with pytest.raises(RowError, match=r"history\[0\] is not a pair"):
        canonical({**row, "history": [["a"]]}, "alpaca", {}, True)


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_part_of_an_alpaca_question_leaves_no_blank_lines(empty):
    for row in ({"instruction": empty, "input": "add 1"}, {"instruction": "add 1", "input": empty}):
        assert canonical({**row, "output": "2"}, "alpaca", {}, True).messages[0]["content"] == "add 1"


def test_text_beside_messages_is_refused():
    messages = chat("a", "b")["messages"]
    for prompt, completion in (("a", messages[1:]), (messages[:1], "b")):
        with pytest.raises(RowError, match="one of prompt and completion is text, the other a list"):
            canonical({"prompt": prompt, "completion": completion}, "auto", {}, True)
    parts = {"prompt": "a", "completion": [{"type": "text", "text": "b"}]}
    assert canonical(parts, "auto", {}, True) == Document(prompt="a", completion="b")


def test_nulls_of_a_table_are_no_arguments(tmp_path):
    path = tmp_path / "data.parquet"
    calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ({"a": 1}, {"b": "x"})]
    rows = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": c}] for c in calls]
    pq.write_table(pa.table({"messages": rows}), path)
    save_tokenizer(tmp_path / "model", CALLING)
    config = configure(tmp_path, path)
    tokens, tokenizer = prepare(config, "train"), load_tokenizer(config)
    texts = [tokenizer.decode(ids[mask]) for ids, mask in (tokens.document(0), tokens.document(1))]
    assert texts == ['[f {"a": 1}]<|im_end|>', '[f {"b": "x"}]<|im_end|>']


@pytest.mark.parametrize(
    ("value", "problem"),
    [(datetime.datetime(2026, 1, 1), "is of type datetime"), (b"x", "is of type bytes"), (float("nan"), "is nan")],
)
@pytest.mark.parametrize("field", ["arguments", "tools", "chat_template_kwargs"])
def test_a_value_of_a_table_that_json_lacks_is_refused(field, value, problem, tmp_path):
    """transformers would write `<datetime>` in its place, which would be trained."""

    def row(given):
        call = {"function": {"name": "f", "arguments": {"a": given if field == "arguments" else 1}}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        tools = [{"name": "f", "parameters": {"default": given if field == "tools" else 1}}]
        options = {"day": given if field == "chat_template_kwargs" else 1}
        return {"messages": messages, "tools": tools, "chat_template_kwargs": options}

    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([row(value)]), path)
    (read_row,) = pq.read_table(path).to_pylist()
    with pytest.raises(RowError, match=f"{field}.*{problem}, which JSON does not have"):
        canonical(read_row, "auto", {}, True)
    assert canonical(row(2), "auto", {}, True).messages


def test_a_mapped_column_may_have_any_name():
    row = {"video": "what is said in it", "answer": "b"}
    document = canonical(row, "auto", {"prompt": "video", "completion": "answer"}, True)
    assert document == Document(prompt="what is said in it", completion="b")
