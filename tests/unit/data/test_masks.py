"""Tokens and masks: what is trained, decoded back to text, for each format and kind of template."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.data.test_support import MARKED, PLAIN, chat, configure, save_tokenizer, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data.formats import Document, canonical
from trainers.data.prepare import prepare
from trainers.data.shards import BadRow
from trainers.data.template import Encoded, Encoder

SYSTEM = {"messages": [{"role": "system", "content": "be brief"}, *chat("2+2?", "four", "3+3?", "six 🎈")["messages"]]}


def load(folder, template, **options):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_tokenizer(folder, template, **options))


def trained(tokenizer, row, assistant_only=True, format_name="auto"):
    """The stretches of trained text of a row, and all of its text."""
    encoder = Encoder.of(tokenizer, assistant_only)
    chat_template = encoder.options.chat_template is not None
    done = encoder.encode([canonical(row, format_name, {}, chat_template)])[0]
    assert isinstance(done, Encoded), done
    stretches, inside = [], False
    for token, on in zip(done.input_ids.tolist(), done.mask.tolist(), strict=True):
        if on and not inside:
            stretches.append([])
        if on:
            stretches[-1].append(token)
        inside = on
    assert not done.mask[0]
    return [tokenizer.decode(ids) for ids in stretches], tokenizer.decode(done.input_ids)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_replies_with_their_end_of_turn_are_trained(tmp_path, template):
    tokenizer = load(tmp_path, template)
    assert trained(tokenizer, chat("hello", "hi there"))[0] == ["hi there<|im_end|>"]
    stretches, text = trained(tokenizer, SYSTEM)
    assert stretches == ["four<|im_end|>", "six 🎈<|im_end|>"]
    assert text == tokenizer.apply_chat_template(SYSTEM["messages"], tokenize=False)


def test_markers_and_prefixes_agree_with_transformers(tmp_path):
    tokenizer = load(tmp_path, MARKED)
    row = chat("ä ö", "one", "two", "three")
    done = Encoder.of(tokenizer, True).encode([canonical(row, "chat", {}, True)])[0]
    theirs = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert done.input_ids.tolist() == theirs["input_ids"]
    assert done.mask.astype(int).tolist() == theirs["assistant_masks"]


def test_all_tokens_but_the_first_when_asked(tmp_path):
    stretches, text = trained(load(tmp_path, MARKED), SYSTEM, assistant_only=False)
    assert "".join(["<|im_start|>", *stretches]) == text


def test_a_template_that_writes_the_bos_gets_no_second_one(tmp_path):
    tokenizer = load(tmp_path, "{{ bos_token }}" + PLAIN)
    assert trained(tokenizer, chat("a", "b"))[1].count("<s>") == 1


@pytest.mark.parametrize("bos", [True, False])
def test_plain_text_gets_bos_if_the_tokenizer_adds_one_and_eos(tmp_path, bos):
    tokenizer = load(tmp_path, None, bos=bos)
    stretches, text = trained(tokenizer, {"text": "words"})
    assert text == ("<s>" if bos else "") + "words</s>"
    assert stretches == ["words</s>" if bos else "ords</s>"]
    assert trained(tokenizer, {"text": "<s>words"})[1] == "<s>words</s>"


def test_prompt_and_completion_are_joined_as_they_are(tmp_path):
    tokenizer = load(tmp_path, PLAIN)
    row = {"prompt": "Q: 1+1\nA:", "completion": " 2"}
    assert trained(tokenizer, row) == ([" 2</s>"], "<s>Q: 1+1\nA: 2</s>")
    assert trained(tokenizer, row, assistant_only=False)[0] == ["Q: 1+1\nA: 2</s>"]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_only_the_completion_of_a_conversation_is_trained(tmp_path, template):
    turns = chat("a", "first", "b", "second")["messages"]
    row = {"prompt": turns[:3], "completion": turns[3:]}
    assert trained(load(tmp_path, template), row)[0] == ["second<|im_end|>"]


def test_alpaca_with_and_without_a_template(tmp_path):
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert trained(load(tmp_path / "a", PLAIN), row)[0] == ["3<|im_end|>"]
    stretches, text = trained(load(tmp_path / "b", None), row)
    assert stretches == ["3</s>"]
    assert text == "<s>### Task\nAdd\n\n### Input\n1 2\n\n### Answer\n3</s>"


def test_sharegpt(tmp_path):
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}
    stretches, text = trained(load(tmp_path, PLAIN), row)
    assert stretches == ["b<|im_end|>"]
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n")


def test_replies_that_touch_are_told_apart(tmp_path):
    whole = (
        "{% generation %}<|im_start|>{% endgeneration %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    )
    touching = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}" + whole + "{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}"
    )
    turns = [*chat("a", "first")["messages"], {"role": "assistant", "content": "second", "weight": 0}]
    tokenizer = load(tmp_path, touching)
    assert trained(tokenizer, {"messages": turns})[0] == ["<|im_start|>first<|im_end|>"]
    del turns[2]["weight"]
    assert trained(tokenizer, {"messages": turns})[0] == ["<|im_start|>first<|im_end|><|im_start|>second<|im_end|>"]


def test_a_template_that_writes_the_last_turn_differently(tmp_path):
    """As Qwen3's does: an empty thought in the last reply only. The reply itself tells where it ends."""
    template = PLAIN.replace(
        "{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'assistant' %}{% if loop.last %}(thinks) {% endif %}"
    )
    assert trained(load(tmp_path, template), SYSTEM)[0] == ["four<|im_end|>", "(thinks) six 🎈<|im_end|>"]


def test_a_newline_that_ends_the_turn_is_trained(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert trained(load(tmp_path, template), chat("a", "b", "c", "d"))[0] == ["b\n", "d\n"]


ESCAPED = MARKED.replace("{{ m['content'] }}<|im_end|>{% end", "{{ m['content']|tojson }}<|im_end|>{% end")
HALVED = MARKED.replace(
    "{% generation %}{{ m['content'] }}", "{{ m['content'][:-25] }}{% generation %}{{ m['content'][-25:] }}"
)


def test_markers_enclose_the_text_of_a_reply_and_not_its_end_alone(tmp_path):
    row = chat("hello", "the first half of a long reply, and its second half")
    assert ESCAPED != MARKED != HALVED
    escaped = chat("hello", 'she said "yes"')
    assert trained(load(tmp_path / "escaped", ESCAPED), escaped)[0] == [r'"she said \"yes\""<|im_end|>']
    for template, refused in ((MARKED, False), (HALVED, True)):
        encoder = Encoder.of(load(tmp_path / str(refused), template), True)
        done = encoder.encode([canonical(row, "chat", {}, True)])[0]
        assert (isinstance(done, BadRow) and "do not enclose each reply" in done.detail) == refused


def test_a_conversation_that_would_be_rendered_for_minutes_is_refused(tmp_path, monkeypatch):
    """The template is rendered up to each reply that is trained; with markers once."""
    turns = [f"turn {number}" for number in range(40)]  # replies at 1, 3, ... 39
    row, last = chat(*turns), {"prompt": chat(*turns)["messages"][:-1], "completion": chat(*turns)["messages"][-1:]}
    expected = trained(load(tmp_path / "long", PLAIN), row)[0]
    assert expected == [f"turn {number}<|im_end|>" for number in range(1, 40, 2)]
    for most, refused in ((400, False), (399, True)):
        monkeypatch.setattr("trainers.data.reply_spans._MOST_RENDERED", most)
        encoder = Encoder.of(load(tmp_path / str(most), PLAIN), True)
        done = encoder.encode([canonical(row, "chat", {}, True)])[0]
        said = "20 replies in 40 messages, and the chat template is rendered up to each; split it into several rows, or"
        assert (isinstance(done, BadRow) and done.kind == "row too large" and done.detail.startswith(said)) == refused
    assert trained(load(tmp_path / "last", PLAIN), last)[0] == ["turn 39<|im_end|>"]
    assert trained(load(tmp_path / "marked", MARKED), row)[0] == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "earlier turns differently"),
        (
            MARKED.replace(
                "{{ m['content'] }}<|im_end|>{% endgeneration %}", "{% endgeneration %}{{ m['content'] }}<|im_end|>"
            ),
            "do not enclose each reply",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
    ],
    ids=["unstable", "empty markers", "raises", "hostile"],
)
def test_a_template_that_cannot_be_masked_refuses_the_row(tmp_path, template, said):
    encoder = Encoder.of(load(tmp_path, template), True)
    done = encoder.encode([canonical(SYSTEM, "chat", {}, True), Document(completion="fine")])
    assert isinstance(done[0], BadRow)
    assert done[0].kind == "chat template"
    assert said in f"{done[0].kind} {done[0].detail}"
    assert isinstance(done[1], Encoded)


def test_a_template_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.data.template.RENDER_SECONDS", 0.2)
    template = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    encoder = Encoder.of(load(tmp_path, template + "{% endfor %}"), True)
    with pytest.raises(ConfigError, match="still runs after"):
        encoder.encode([canonical(SYSTEM, "chat", {}, True)])


def test_a_template_with_a_syntax_error_is_refused_once_and_not_for_plain_text(tmp_path):
    encoder = Encoder.of(load(tmp_path, "{% for m in messages %}\n{{ m.content"), True)
    with pytest.raises(ConfigError, match=r"cannot be compiled \(.+, line 2\): unexpected end of template, .+; repair"):
        encoder.encode([canonical(SYSTEM, "chat", {}, True)] * 3)
    assert isinstance(encoder.encode([Document(completion="fine")])[0], Encoded)


def test_conversations_without_a_template_are_refused(tmp_path):
    encoder = Encoder.of(load(tmp_path, None), True)
    with pytest.raises(ConfigError, match="--chat_template"):
        encoder.encode([canonical(SYSTEM, "chat", {}, False)])


def test_an_encoder_that_was_saved_does_the_same(tmp_path):
    encoder = Encoder.of(load(tmp_path, MARKED), True)
    encoder.save(tmp_path)
    documents = [canonical(SYSTEM, "chat", {}, True), Document(prompt="a", completion="b")]
    for one, two in zip(encoder.encode(documents), Encoder.load(tmp_path).encode(documents), strict=True):
        assert one.input_ids.tolist() == two.input_ids.tolist()
        assert one.mask.tolist() == two.mask.tolist()


# -- the stop token


@pytest.mark.parametrize("between", ["", "\n", "[/REPLY]\n"], ids=["at once", "after a newline", "after a tag"])
def test_markers_that_leave_the_stop_token_out_are_repaired(tmp_path, between):
    template = MARKED.replace("<|im_end|>{% endgeneration %}", f"{{% endgeneration %}}{{{{ {between!r} }}}}<|im_end|>")
    assert template != MARKED
    tokenizer = load(tmp_path, template)
    ends = between + "<|im_end|>"
    assert trained(tokenizer, SYSTEM)[0] == [f"four{ends}", f"six 🎈{ends}"]
    assert Encoder.of(tokenizer, True).proof[2] == f"  trained: {'A reply' + ends!r}"


def test_the_proof_shows_what_is_trained_of_a_short_conversation(tmp_path):
    proof = Encoder.of(load(tmp_path, MARKED), True).proof
    assert proof == [
        "chat template: the model's own",
        r"  text:    '<|im_start|>user\nA question<|im_end|>\n<|im_start|>assistant\nA reply<|im_end|>'",
        "  trained: 'A reply<|im_end|>'",
    ]
    assert Encoder.of(load(tmp_path, MARKED), False).proof == []


def test_a_template_without_a_stop_token_is_warned_of(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert "no stop token is trained" in Encoder.of(load(tmp_path, template), True).proof[-1]


def test_a_reply_that_alone_lacks_its_stop_token_is_refused(tmp_path):
    template = MARKED.replace("<|im_end|>{% endgen", "{% if m['content'] != 'six 🎈' %}<|im_end|>{% endif %}{% endgen")
    refused(load(tmp_path, template), SYSTEM, "ends a reply without a stop token")


# -- nothing is left out


def refused(tokenizer, row, reason, kind="chat template"):
    done = Encoder.of(tokenizer, True).encode([canonical(row, "chat", {}, True)])[0]
    assert isinstance(done, BadRow), done
    assert done.kind == kind
    assert reason in done.detail


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
@pytest.mark.parametrize("role", ["tool", "system"])
def test_a_template_that_ignores_a_role_names_the_message(tmp_path, template, role):
    deaf = template.replace("{% for m in messages %}", "{% for m in messages if loop.first or m['role'] != 'ROLE' %}")
    deaf = deaf.replace("if loop.first or m['role'] != 'ROLE'", f"if m['role'] != '{role}'")
    turns = [
        *chat("add 1 and 3", "wait")["messages"],
        {"role": role, "content": "4"},
        *chat("?", "it is 4")["messages"],
    ]
    refused(load(tmp_path / "deaf", deaf), {"messages": turns}, f"it leaves out message 3 ({role})")
    stretches, text = trained(load(tmp_path / "whole", template), {"messages": turns})
    assert stretches == ["wait<|im_end|>", "it is 4<|im_end|>"]
    assert f"{role}\n4<|im_end|>" in text


def test_a_part_of_a_message_that_is_left_out_names_the_message(tmp_path):
    shortened = PLAIN.replace("m['content']", "m['content'][:12]")
    refused(load(tmp_path, shortened), chat("a question of some length", "b"), "it leaves out message 1 (user)")


def test_contents_that_are_trimmed_or_written_as_json_are_no_loss(tmp_path):
    template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] | trim | tojson }}")
    assert trained(load(tmp_path, template), chat(' a "b"\n', "x\ny "))[0] == ['"x\\ny"<|im_end|>']


def test_switches_that_a_template_obeys_and_leaves_out_are_no_loss(tmp_path):
    obeys = "m['content'].replace('/no_think', '').replace('/think', '')"
    tokenizer = load(tmp_path, PLAIN.replace("m['content']", obeys))
    for asked in ("be brief /no_think", "/think", "be /think brief"):
        turns = [{"role": "system", "content": asked}, *chat(f"why? {asked}", "b")["messages"]]
        assert trained(tokenizer, {"messages": turns})[0] == ["b<|im_end|>"]
    refused(tokenizer, chat("why?", "write /no_think"), "it leaves out message 2 (assistant)")


def test_only_the_reply_is_trained_of_a_conversation_that_starts_with_it(tmp_path):
    template = "<|im_start|>system\nYou are a reply of the template.<|im_end|>\n" + PLAIN
    row = {"messages": [{"role": "assistant", "content": "a reply"}, *chat("b", "c")["messages"]]}
    stretches, text = trained(load(tmp_path, template), row)
    assert stretches == ["a reply<|im_end|>", "c<|im_end|>"]
    assert text.startswith("<|im_start|>system\nYou are")


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_an_empty_reply_is_named_and_not_trained(tmp_path, template):
    tokenizer = load(tmp_path, template)
    refused(tokenizer, chat("a", " ", "b", "c"), "message 2 (assistant) is empty", "no trained token")
    turns = chat("a", "", "b", "c")["messages"]
    assert trained(tokenizer, {"prompt": turns[:3], "completion": turns[3:]})[0] == ["c<|im_end|>"]


# -- the date


@pytest.mark.parametrize(
    ("asks", "dates"),
    [
        ("strftime_now('%Y-%m-%d')", ["2024-07-26", "2025-01-02"]),
        ("date_string", ["26 Jul 2024", "02 Jan 2025"]),
    ],
)
def test_a_template_gets_the_same_date_on_any_day(tmp_path, asks, dates, monkeypatch):
    import datetime as clock

    class Tomorrow(clock.datetime):
        @classmethod
        def now(cls, tz=None):
            return clock.datetime(2031, 5, 17, tzinfo=tz)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    encoder = Encoder.of(load(tmp_path, f"{{{{ {asks} }}}} " + PLAIN), True)
    later = Encoder(encoder._backend, replace(encoder.options, date="2025-01-02"))
    document = [canonical(chat("a", "b"), "chat", {}, True)]
    texts = [item._backend.decode(item.encode(document)[0].input_ids.tolist()) for item in (encoder, later)]
    assert [text[: len(dates[0])] for text in texts] == dates, "neither is that of the clock"


def test_a_text_ends_with_its_trained_end_token_and_split_it_has_that_once(tmp_path):
    """Cut short by `truncate` it has none, as nothing ends there."""
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "x" * 70}, {"text": "short"}])
    end = 257  # </s>
    for overlong, ends in (("split", [0, 0, 1, 1]), ("truncate", [0, 1])):
        found = prepare(configure(tmp_path, data, max_length=32, overlong=overlong), "train")
        pieces = [found.document(number) for number in range(len(found))]
        assert [ids.tolist().count(end) for ids, _ in pieces] == ends
        assert all(mask[-1] and mask[1:].all() and not mask[0] for _, mask in pieces)
        assert [ids[-1] == end for ids, _ in pieces] == [bool(count) for count in ends]
