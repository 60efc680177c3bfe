"""Thoughts of replies: kept, dropped, or empty ones trained; where they stand, and templates that lose them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers.utils import chat_template_utils

from tests.unit.data.test_masks import load, refused
from tests.unit.data.test_support import PLAIN, chat
from trainers.data.formats import canonical
from trainers.data.shards import BadRow
from trainers.data.template import Encoder

# As Qwen3's: a thought, empty when there is none, in the last reply; earlier ones are stripped.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% set c = m['content'] %}{% set t = m['reasoning_content'] %}"
    "{% if '</think>' in c and not t %}{% set t = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
    "{% if m['role'] == 'assistant' and (loop.last or ALL) %}<think>\n{{ t or '' }}\n</think>\n\n{% endif %}"
    "{{ c }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Knows thoughts by their own field alone.
WRITING = PLAIN.replace(
    "{{ m['content'] }}", "{% if m['reasoning_content'] %}({{ m['reasoning_content'] }}){% endif %}{{ m['content'] }}"
)
EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nhmm\n</think>\n\n"


def thinking_encoder(folder, thoughts="keep", template=THINKING):
    encoder = Encoder.of(load(folder, template.replace("ALL", "false")), True)
    return Encoder(encoder._backend, replace(encoder.options, thoughts=thoughts))


def trained_text(encoder, row):
    done = encoder.encode([canonical(row, "chat", {}, True)])[0]
    return (
        done.detail if isinstance(done, BadRow) else encoder._backend.decode(done.input_ids[done.mask].tolist(), False)
    )


@pytest.mark.parametrize(
    ("thoughts", "plain", "thought"),
    [
        ("keep", "yes<|im_end|>", THOUGHT + "yes<|im_end|>"),
        ("drop", "yes<|im_end|>", "yes<|im_end|>"),
        ("train_empty", EMPTY + "yes<|im_end|>", THOUGHT + "yes<|im_end|>"),
    ],
)
def test_thoughts_of_the_data_are_trained_and_empty_ones_only_when_asked(tmp_path, thoughts, plain, thought):
    encoder = thinking_encoder(tmp_path, thoughts)
    assert trained_text(encoder, chat("a", "yes")) == plain
    for key in ("reasoning_content", "thinking", "reasoning"):
        row = chat("a", "yes")
        row["messages"][1][key] = "hmm"
        assert trained_text(encoder, row) == thought, key


@pytest.mark.parametrize(("reply", "trained_reply"), [("  yes", "  yes"), ("\n\nyes", "\n\nyes")])
def test_only_what_the_template_writes_after_an_empty_thought_is_left_out(tmp_path, reply, trained_reply):
    assert trained_text(thinking_encoder(tmp_path), chat("a", reply)) == f"{trained_reply}<|im_end|>"


def test_a_reply_is_trained_from_where_the_prompt_without_thinking_ends(tmp_path):
    """As GLM's: the newline after the thought is not in the prompt, so the model generates it."""
    off = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}"
    template = THINKING.removesuffix("{% endif %}") + off
    assert trained_text(thinking_encoder(tmp_path, template=template), chat("a", "yes")) == "\n\nyes<|im_end|>"


@pytest.mark.parametrize("thoughts", ["keep", "drop", "train_empty"])
def test_a_reply_without_the_empty_thought_of_the_last_one_is_refused_unless_asked(tmp_path, thoughts):
    """Trained, it teaches a model that may think to answer at once; one of weight 0 is no matter."""
    encoder = thinking_encoder(tmp_path / "a", thoughts)
    row = chat("a", "yes", "b", "no")
    done = trained_text(encoder, row)
    if thoughts == "train_empty":
        assert done == f"yes<|im_end|>{EMPTY}no<|im_end|>"
    else:
        assert "not before message 2 (assistant), which would teach the model not to think" in done
        row["messages"][1]["weight"] = 0
        assert trained_text(encoder, row) == "no<|im_end|>"
    every = thinking_encoder(tmp_path / "b", thoughts, THINKING.replace("ALL", "true"))
    assert trained_text(every, chat("a", "yes", "b", "no")).replace(EMPTY, "") == "yes<|im_end|>no<|im_end|>"


def test_a_thought_in_the_content_is_not_doubled(tmp_path):
    encoder = thinking_encoder(tmp_path)
    inside = chat("a", "<think>\nhmm\n</think>\n\nyes")
    assert trained_text(encoder, inside) == THOUGHT + "yes<|im_end|>"
    inside["messages"][1]["reasoning_content"] = "hmm"
    assert trained_text(encoder, inside) == THOUGHT + "yes<|im_end|>"
    inside["messages"][1]["reasoning_content"] = "another"
    assert "keep one" in trained_text(encoder, inside)


def test_tags_that_a_reply_speaks_of_are_no_thought(tmp_path):
    reply = "wrap it as <think>so</think> please"
    assert trained_text(thinking_encoder(tmp_path / "a", template=WRITING), chat("a", reply)) == f"{reply}<|im_end|>"
    about = chat("a", "<think>the tag <think> is meant</think>yes")
    assert trained_text(thinking_encoder(tmp_path / "b", template=WRITING), about) == (
        "(the tag <think> is meant)yes<|im_end|>"
    )


MENTION = "Close it with `</think>` and go on."


def test_a_closing_tag_alone_is_no_thought_unless_it_has_its_own_line_or_the_prompt_opened_one(tmp_path):
    """The control is the same template with the tag where its model writes it."""
    prompted = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for name, template, written in (("a", THINKING, THOUGHT), ("b", prompted, THOUGHT.removeprefix("<think>\n"))):
        encoder = thinking_encoder(tmp_path / name, template=template)
        assert trained_text(encoder, chat("a", "hmm\n</think>\n\nyes")) == f"{written}yes<|im_end|>", name
        meant = trained_text(encoder, chat("a", "hmm</think>yes"))
        assert (meant == f"{written}yes<|im_end|>") is (name == "b"), meant
        lost = "leaves out the text around `</think>` of message 2 (assistant)"  # it splits at the tag itself
        assert lost in trained_text(encoder, chat("a", MENTION)), name
        assert lost in trained_text(thinking_encoder(tmp_path / name, "train_empty", template), chat("a", MENTION))


def test_a_closing_tag_that_is_spoken_of_is_trained_where_an_empty_field_keeps_the_template_from_it(tmp_path):
    asks = THINKING.replace("and not t %}", "and t is not string %}")  # as Qwen3's
    encoder = thinking_encoder(tmp_path / "a", template=asks)
    assert trained_text(encoder, chat("a", MENTION)) == f"{MENTION}<|im_end|>"
    assert trained_text(encoder, chat("a", "<think>\nhmm\n</think>\n\nyes")) == THOUGHT + "yes<|im_end|>"
    for name, thoughts in (("b", "keep"), ("c", "drop")):
        encoder = thinking_encoder(tmp_path / name, thoughts, PLAIN)
        assert trained_text(encoder, chat("a", MENTION)) == f"{MENTION}<|im_end|>"


def test_whether_a_thought_is_written_goes_by_each_rows_own_variables(tmp_path):
    template = WRITING.replace("if m['reasoning_content']", "if m['reasoning_content'] and mute is not true")
    encoder = thinking_encoder(tmp_path, template=template)
    row = chat("a", "yes")
    row["messages"][1]["reasoning_content"] = "hmm"
    for _ in range(2):
        assert trained_text(encoder, {**row, "chat_template_kwargs": {"mute": False}}) == "(hmm)yes<|im_end|>"
        assert "the thought of" in trained_text(encoder, {**row, "chat_template_kwargs": {"mute": True}})


def test_a_thought_that_the_template_does_not_write_names_the_message(tmp_path):
    row = chat("a", "yes", "b", "no")
    row["messages"][1]["reasoning_content"] = "hmm"
    assert "leaves out the thought of message 2 (assistant)" in trained_text(thinking_encoder(tmp_path / "a"), row)
    assert "set thoughts=drop" in trained_text(thinking_encoder(tmp_path / "b", template=PLAIN), row)
    assert trained_text(thinking_encoder(tmp_path / "c", "drop", PLAIN), row) == "yes<|im_end|>no<|im_end|>"
    every = thinking_encoder(tmp_path / "d", template=THINKING.replace("ALL", "preserve_thinking"))
    assert trained_text(every, row) == THOUGHT + "yes<|im_end|>no<|im_end|>"


def test_a_refusal_says_that_the_generation_prompt_opens_a_thought(tmp_path):
    opens = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    refused(load(tmp_path / "a", opens), chat("a", "b", "c", "d"), "its generation prompt opens a thought")
    empty = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
    reason = "its generation prompt has an empty thought, but message 2 (assistant) does not"
    refused(load(tmp_path / "b", empty), chat("a", "b"), reason)


STRIPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("options", [{}, {"thoughts": "drop"}])
def test_a_template_whose_prompt_opens_a_thought_that_it_strips_is_refused_without_a_way_that_is_refused_next(
    tmp_path, options
):
    """As DeepSeek's distilled models have it: a reply without its thought does not go on from the prompt."""
    encoder = Encoder.of(load(tmp_path, STRIPS_THOUGHTS), True)
    encoder.options = replace(encoder.options, **options)
    done = encoder.encode([canonical(chat("2+2?", "<think>\nadd\n</think>\n\nfour"), "chat", {}, True)])[0]
    assert isinstance(done, BadRow)
    assert "thoughts=drop" not in done.detail
    expected = "opens a thought that it does not write" if options else "leaves out the thought of message 2"
    assert expected in done.detail


def test_a_template_that_reads_thinking_gets_the_thought_whatever_transformers_does(tmp_path, monkeypatch):
    """GPT-OSS's; transformers fills that field since 5.23."""
    template = WRITING.replace("reasoning_content", "thinking")
    row = chat("a", "yes")
    row["messages"][1]["reasoning_content"] = "hmm"
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", lambda messages: messages, raising=False)
    encoder = thinking_encoder(tmp_path / "thinking", template=template)
    assert encoder.probe.writes_thoughts
    assert trained_text(encoder, row) == "(hmm)yes<|im_end|>"
    other = thinking_encoder(tmp_path / "other", template=WRITING.replace("reasoning_content", "pondering"))
    assert not other.probe.writes_thoughts
    assert "leaves out the thought" in trained_text(other, row)
