"""Ollama's `Modelfile`: which chat templates are written in Go, and that a template that does more is not.

Whether Go writes the same text is seen in tests/integrations/test_gguf.py.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trainers.checkpoint.modelfile import Render, conversations, modelfile, turns_of
from trainers.data.formats import RowError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def renders(source: str) -> Render:
    """Renders with a chat template, as an Encoder does."""

    def render(messages: list[dict[str, str]]) -> str:
        values: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
        try:
            texts, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **values)
        except TemplateError as error:
            raise RowError("chat template", str(error)) from None
        return str(texts[0])

    return render


def published(name: str) -> str:
    """A published chat template, as TRL ships it."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "takes_system", "strips"),
    [
        ("qwen2_5", True, False),
        ("qwen3", True, False),
        ("llama3_2", True, True),
        ("phi3", True, False),
        ("deepseekv3", True, False),
        ("gemma", False, True),
    ],
)
def test_published_templates_are_written_in_go(name: str, takes_system: bool, strips: bool) -> None:
    turns = turns_of(renders(published(name)))
    assert turns is not None
    assert (turns.takes_system, turns.strips) == (takes_system, strips)


@pytest.mark.parametrize(
    "source",
    [
        CHATML.replace("m.content", "(m.content if loop.last else m.content[:5])"),
        CHATML.replace("m.content", "m.content | upper"),
        CHATML.replace("m.role +", "m.role + loop.index | string +"),
        "{{ messages | length }}",
        "{{ messages[-1].content + messages[-1].content }}",
        "{{ raise_exception('no') }}",
        "",
    ],
)
def test_a_template_that_does_more_is_not(source: str) -> None:
    assert turns_of(renders(CHATML)) is not None
    assert turns_of(renders(source)) is None


def test_the_conversations_tell_templates_apart() -> None:
    roles = {tuple(message["role"] for message in conversation) for conversation in conversations(True)}
    assert ("system", "user", "assistant", "user") in roles
    assert all(conversation[-1]["role"] == "user" for conversation in conversations(True))


def test_the_go_template_holds_its_text_in_quotes() -> None:
    """Ollama's parser drops what cannot be printed, and the quotes of a Modelfile must not end early."""
    source = CHATML.replace("<|im_end|>", '\u200b"""{{ "{{" }}<|im_end|>')
    turns = turns_of(renders(source))
    assert turns is not None
    text = modelfile("model-F16.gguf", [], turns, "", ["<|im_end|>"], {})
    go = text.partition('TEMPLATE """')[2].partition('"""\nPARAMETER')[0]
    assert all(character.isprintable() or character == "\n" for character in go)
    assert '"""' not in go
    assert "\\U0000200b" in go


def test_what_llama_cpp_puts_first_is_left_out() -> None:
    turns = turns_of(renders("{{ bos_token }}" + CHATML))
    assert turns is not None
    assert '{{ "<s><|im_start|>user' in turns.go("")
    assert "<s>" not in turns.go("<s>")


def test_stops_parameters_and_files() -> None:
    sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "top_p": None, "eos_token_id": [1, 2]}
    text = modelfile("model-Q4_K_M.gguf", ["model-F16.gguf"], None, "", ["<|im_end|>", "\n", " "], sampling)
    assert "FROM ./model-Q4_K_M.gguf\n# or: FROM ./model-F16.gguf\n" in text
    assert re.findall("PARAMETER (.*)", text) == [
        'stop "<|im_end|>"', "temperature 0.6", "top_k 20", "repeat_penalty 1.05",
    ]  # fmt: skip
    assert "TEMPLATE " not in text.replace("No TEMPLATE", "")
    assert "PARAMETER temperature 0\n" in modelfile("m.gguf", [], None, "", [], {"do_sample": False, "temperature": 1})
