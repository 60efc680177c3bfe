"""Every training template of TRL: the trained text of conversations of each kind, against what was written down.

`training_templates.yaml` holds, for each template and kind of conversation, the trained stretches, or why the template
refuses it. What stands there is held against an oracle that shares no code with ours: the `{% generation %}` marks in
TRL's own templates, as transformers reads them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests.unit.data.test_support import MARKED, PLAIN, configure, save_tokenizer, write_jsonl
from trainers.data import training_template
from trainers.data.formats import canonical
from trainers.data.prepare import data_fingerprint
from trainers.data.shards import BadRow
from trainers.data.template import Encoder, training_encoder
from trainers.data.tokenizer import load_tokenizer, template_record
from trainers.run.folder import write_json

TRL = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
NAMES = sorted(path.name.removesuffix("_training.jinja") for path in TRL.glob("*_training.jinja"))
GOLDEN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("training_templates.yaml").read_text())
SPECIAL = re.compile(r"<[|\uff5c][^<>\s'\"]+?[|\uff5c]>|<\|?\w+\|>|<\|\w+>|<(?:start|end)_of_\w+>|</?think>|</s>")

SYSTEM = {"role": "system", "content": "Be brief"}
QUESTION, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
DOUBT, YES = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "42"}
THOUGHTS = [{**REPLY, "reasoning_content": "Hmm"}, {**YES, "reasoning_content": "Well"}]
KINDS: dict[str, list[Any]] = {
    "plain": [QUESTION, REPLY],
    "multi-turn": [QUESTION, REPLY, DOUBT, YES],
    "system": [SYSTEM, QUESTION, REPLY],
    "thinking": [QUESTION, {**THOUGHTS[0], "weight": 0}, DOUBT, THOUGHTS[1]],
    "thinking in each turn": [QUESTION, THOUGHTS[0], DOUBT, THOUGHTS[1]],
    "tool call": [QUESTION, CALL],
    "tool result": [QUESTION, CALL, RESULT, REPLY],
    "weight 0": [QUESTION, {**REPLY, "weight": 0}, DOUBT, YES],
}


def encoder_of(folder: Path, template: str) -> Encoder:
    """What a run would encode with on a model that ships this template."""
    save_tokenizer(folder / "model", template, special=sorted(set(SPECIAL.findall(template)) - {"</s>"}))
    return training_encoder(configure(folder, "unread", model_name_or_path=str(folder / "model")))


def trained(encoder: Encoder, messages: list[Any]) -> list[str] | str:
    """The trained stretches, decoded from the tokens; or why the row is refused."""
    encoded = encoder.encode([canonical({"messages": messages}, "chat", {}, True)])[0]
    if isinstance(encoded, BadRow):
        return encoded.detail
    stretches: list[list[int]] = []
    for index in encoded.mask.nonzero()[0].tolist():
        if not stretches or not encoded.mask[index - 1]:
            stretches.append([])
        stretches[-1].append(int(encoded.input_ids[index]))
    return [encoder._backend.decode(ids, skip_special_tokens=False) for ids in stretches]


def test_trl_still_ships_these() -> None:
    assert sorted(GOLDEN) == NAMES
    assert len(NAMES) >= 31


@pytest.mark.parametrize("name", NAMES)
def test_trained_text_is_what_was_written_down(tmp_path: Path, name: str) -> None:
    encoder = encoder_of(tmp_path, (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    assert encoder.options.chat_template == (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
    for kind, messages in KINDS.items():
        expected, result = GOLDEN[name][kind], trained(encoder, messages)
        if isinstance(expected, str):
            assert isinstance(result, str), f"{kind}: {result}"
            assert expected in result, f"{kind}: {result}"
        else:
            assert result == expected, kind


PARTS_ONLY = {"idefics3", "llava_next", "smolvlm"}  # their templates leave out a content that is a plain string
# Thoughts of earlier turns, which TRL's templates drop and a run keeps (`thoughts`).
KEPT_THOUGHTS = {("deepseek_r1_distill", "thinking")} | {
    (name, "thinking in each turn") for name in NAMES if name.startswith(("deepseek_r1", "nemotron_3"))
}


def marked_by_trl(folder: Path, name: str, messages: list[Any]) -> list[str]:
    """What transformers marks as the assistant's under TRL's template, decoded."""
    messages = copy.deepcopy(messages)
    for message in messages if name in PARTS_ONLY else ():
        message["content"] = [{"type": "text", "text": message["content"]}]
    tokenizer = load_tokenizer(configure(folder, "unread", model_name_or_path=str(folder / "model")))
    template = (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    stretches: list[list[int]] = []
    for index, (token, marked) in enumerate(zip(found["input_ids"], found["assistant_masks"], strict=True)):
        if marked:
            if index == 0 or not found["assistant_masks"][index - 1]:
                stretches.append([])
            stretches[-1].append(token)
    return [tokenizer.decode(ids) for ids in stretches]


def empty_thought(folder: Path, name: str) -> re.Pattern[str]:
    """An empty thought up to where a model that does not think begins to generate."""
    tokenizer = load_tokenizer(configure(folder, "unread", model_name_or_path=str(folder / "model")))
    template = (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
    messages = [{**QUESTION, "content": [{"type": "text", "text": "Why?"}]}] if name in PARTS_ONLY else [QUESTION]
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ends = re.search(r"</think>(\s*)$", prompt)
    return re.compile(rf"^\n?<think>\s*</think>{re.escape(ends[1]) if ends else ''}")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_down_is_what_trl_marks(tmp_path: Path, name: str) -> None:
    """But for what a run leaves out on purpose: a weight of 0, and empty thoughts that a template writes by itself."""
    encoder_of(tmp_path, (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    compared, thought = 0, empty_thought(tmp_path, name)
    for kind, messages in KINDS.items():
        expected = GOLDEN[name][kind]
        if isinstance(expected, str) or (name, kind) in KEPT_THOUGHTS:
            continue
        marked = [thought.sub("", text) for text in marked_by_trl(tmp_path, name, messages)]
        replies = [message for message in messages if message["role"] == "assistant"]
        assert len(marked) == len(replies)
        assert [text for text, one in zip(marked, replies, strict=True) if one.get("weight", 1)] == expected, kind
        compared += 1
    assert compared >= 3


LOST = {"thought of message 4": "Well", "thought of message 2": "Hmm", "tool": "two", "System": "Be brief"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_lost_in_trls_template_too(tmp_path: Path, name: str) -> None:
    encoder_of(tmp_path, (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(configure(tmp_path, "unread", model_name_or_path=str(tmp_path / "model")))
    template = (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
    for kind, reason in GOLDEN[name].items():
        if isinstance(reason, str):
            (lost,) = [text for part, text in LOST.items() if part in reason]
            try:
                text = tokenizer.apply_chat_template(KINDS[kind], chat_template=template, tokenize=False)
            except jinja2.TemplateError:
                continue
            assert lost not in text, kind


@pytest.mark.parametrize("later", ["gone", "upgraded"])
def test_a_run_goes_on_with_the_template_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    folder, run = tmp_path / "trl", tmp_path / "run"
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": KINDS["plain"]}])
    save_tokenizer(tmp_path / "model")
    for path in (folder, run):
        path.mkdir()
    (folder / "mine.jinja").write_text(PLAIN)
    (folder / "mine_training.jinja").write_text(MARKED)
    monkeypatch.setattr("trainers.data.training_template._trl_folder", lambda: folder)
    training_template._trl_names.cache_clear()
    config, elsewhere = configure(tmp_path, data, output_dir=str(run)), configure(tmp_path, data)
    began = data_fingerprint(config, "train")
    write_json(run / "chat_template.json", template_record(config))
    (folder / "mine_training.jinja").write_text(MARKED + "{# new #}")
    if later == "gone":
        monkeypatch.setattr("trainers.data.training_template._trl_folder", lambda: None)
        training_template._trl_names.cache_clear()
    assert data_fingerprint(config, "train") == began != data_fingerprint(elsewhere, "train")
    assert training_encoder(config).options.chat_template == MARKED != training_encoder(elsewhere).options.chat_template
    assert "'s training version (mine)" in training_encoder(config).options.origin
    assert template_record(config) == json.loads((run / "chat_template.json").read_text())
    assert load_tokenizer(config).chat_template == PLAIN  # what is exported
    for broken in ("{", "[]", '{"own_sha256": 3}', json.dumps({**template_record(config), "source": 7})):
        (run / "chat_template.json").write_text(broken)
        assert data_fingerprint(config, "train") == data_fingerprint(elsewhere, "train")
    write_json(run / "chat_template.json", {**template_record(config), "source": MARKED})
    save_tokenizer(tmp_path / "model", PLAIN + "{# another model's #}")
    assert "{# another" in training_encoder(config).options.chat_template
    training_template._trl_names.cache_clear()


def test_the_template_of_a_processor_is_used_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    """Older models of images and text have theirs in chat_template.json, which no tokenizer reads."""
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": KINDS["plain"]}])
    save_tokenizer(tmp_path / "model")
    config, processors = configure(tmp_path, data), tmp_path / "model" / "chat_template.json"
    write_json(processors, {"chat_template": MARKED})
    assert load_tokenizer(config).chat_template == PLAIN, "the control: its own"
    assert template_record(config)["source"] == PLAIN
    save_tokenizer(tmp_path / "model", None)
    assert load_tokenizer(config).chat_template == MARKED
    assert template_record(config)["source"] == MARKED == training_encoder(config).options.chat_template
    processors.unlink()
    assert load_tokenizer(config).chat_template is None
