"""Tokens and masks: what is trained, decoded back to text, for each format and kind of template."""

from __future__ import annotations

import pytest

from tests.unit.test_data_support import MARKED, PLAIN, chat, save_tokenizer
from trainers.config import ConfigError
from trainers.data.formats import Document, canonical
from trainers.data.shards import Bad
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


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "earlier turns differently"),
        (MARKED.replace("{{ m['content'] }}<|im_end|>{% endgen", "{% endgen"), "do not enclose each reply"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
    ],
    ids=["unstable", "empty markers", "raises", "hostile"],
)
def test_a_template_that_cannot_be_masked_refuses_the_row(tmp_path, template, said):
    encoder = Encoder.of(load(tmp_path, template), True)
    done = encoder.encode([canonical(SYSTEM, "chat", {}, True), Document(completion="fine")])
    assert isinstance(done[0], Bad)
    assert done[0].kind == "chat template"
    assert said in f"{done[0].kind} {done[0].detail}"
    assert isinstance(done[1], Encoded)


def test_a_template_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.data.template.RENDER_SECONDS", 0.2)
    template = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    encoder = Encoder.of(load(tmp_path, template + "{% endfor %}"), True)
    with pytest.raises(ConfigError, match="still runs after"):
        encoder.encode([canonical(SYSTEM, "chat", {}, True)])


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
