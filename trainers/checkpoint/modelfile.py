"""The `Modelfile` with which Ollama serves a GGUF file: chat template, stop tokens, sampling parameters.

Ollama's templates are Go's. Where the model's chat template writes only what depends on the roles of a message and of
the one before it, around contents that it leaves as they are, the same is written in Go. That is tried on
conversations; no template is written for one that does more. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.data.formats import RowError

MODELFILE = "Modelfile"
_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"
_MARKS = {_SYSTEM: "Ssystems", _USER: "Qquestionq", _ASSISTANT: "Rreplyr"}
_AFTER = {"": (_SYSTEM, _USER), _SYSTEM: (_USER,), _USER: (_ASSISTANT,), _ASSISTANT: (_USER,)}
"""The roles that may follow a role, or begin a conversation."""
_CONTENTS = (
    "Hi",
    "Two\n\nlines",
    "{{ .System }} {% x %}",
    'quotes " and \\ and """',
    "日本語 🙂",
    "a\tb",
    "<b>&amp;</b>",
)
_SPACED = "  spaces around \n"
_PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
               "repetition_penalty": "repeat_penalty"}  # fmt: skip
"""Names of sampling parameters in a generation config, and Ollama's."""

Conversation = Sequence[Mapping[str, str]]
Render = Callable[[list[dict[str, str]]], str]
"""Renders a conversation with a chat template, up to where the reply begins."""


@dataclass(frozen=True)
class Turns:
    """A chat template as the texts between messages.

    Args:
        before: By the role of the message before (empty for the first message) and that of the message, the text
            between them.
        prompt: The text after the last message, a user's.
        strips: Whether it removes space around contents, which Ollama's template cannot.
    """

    before: Mapping[tuple[str, str], str]
    prompt: str
    strips: bool = False

    @property
    def takes_system(self) -> bool:
        """Whether there may be a system message."""
        return ("", _SYSTEM) in self.before

    def render(self, messages: Conversation) -> str:
        """The text of a conversation that ends with a user's message."""
        text, role = "", ""
        for message in messages:
            text += self.before[role, message["role"]]
            text += message["content"].strip() if self.strips else message["content"]
            role = message["role"]
        return text + self.prompt

    def go(self, begin: str) -> str:
        """The template in Go. A last reply is left open, so that Ollama continues it.

        Args:
            begin: What stands before everything and is left out, because llama.cpp adds it.
        """

        def text(role: str, following: str) -> str:
            return _go_text(self.before[role, following].removeprefix(begin if role == "" else ""))

        lines = ['{{- $role := "" }}', "{{- range .Messages }}"]
        if self.takes_system:
            lines += [f'{{{{- if eq .Role "{_SYSTEM}" }}}}{text("", _SYSTEM)}{{{{ .Content }}}}', "{{- end }}"]
        lines += [f'{{{{- if eq .Role "{_USER}" }}}}']
        branch = "if"
        for role in (_SYSTEM, _ASSISTANT) if self.takes_system else (_ASSISTANT,):
            lines += [f'{{{{- {branch} eq $role "{role}" }}}}{text(role, _USER)}']
            branch = "else if"
        lines += [f"{{{{- else }}}}{text('', _USER)}", "{{- end }}{{ .Content }}", "{{- end }}"]
        lines += [f'{{{{- if eq .Role "{_ASSISTANT}" }}}}{text(_USER, _ASSISTANT)}{{{{ .Content }}}}', "{{- end }}"]
        return "\n".join([*lines, "{{- $role = .Role }}", "{{- end }}",
                          f'{{{{- if eq $role "{_USER}" }}}}{_go_text(self.prompt)}{{{{ end -}}}}'])  # fmt: skip


def turns_of(render: Render) -> Turns | None:
    """The texts between messages of a chat template; None if it is not made of them.

    Args:
        render: Raises RowError for a conversation that the template refuses.
    """
    try:
        before, prompt = _between(render, (_USER, _ASSISTANT, _USER))
    except (RowError, ValueError):
        return None
    with contextlib.suppress(RowError, ValueError):  # such as Gemma's, which refuses system messages
        before = before | _between(render, (_SYSTEM, _USER, _ASSISTANT, _USER))[0]
    plain = Turns(before, prompt)
    for turns in (plain, Turns(before, prompt, strips=True)):
        if all(_agrees(render, turns, conversation) for conversation in conversations(plain.takes_system)):
            return turns
    return None


def conversations(system: bool) -> list[list[dict[str, str]]]:
    """Conversations that tell templates apart, all of which end with a user's message.

    Args:
        system: Whether some begin with a system message.
    """
    texts, result = [*_CONTENTS, _SPACED], []
    for opening in ([], [_SYSTEM]) if system else ([],):
        for turns in range(3):
            roles = [*opening, *([_USER, _ASSISTANT] * turns), _USER]
            for start in range(len(texts)):
                contents = [texts[(start + 3 * index) % len(texts)] for index in range(len(roles))]
                result.append([{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)])
    return result


def modelfile(
    file: str, others: Sequence[str], turns: Turns | None, begin: str, stops: Sequence[str], sampling: Mapping[str, Any]
) -> str:
    """The text of a `Modelfile`.

    Args:
        file: Name of the GGUF file.
        others: Names of the other ones.
        turns: The chat template; None if it cannot be written in Go, or there is none.
        begin: Text that llama.cpp puts before every prompt; empty if it puts none.
        stops: Texts of the tokens that end a reply.
        sampling: The model's generation config.
    """
    lines = [f"# `ollama create NAME -f {MODELFILE}`, then `ollama run NAME`.", f"FROM ./{file}"]
    lines += [f"# or: FROM ./{name}" for name in others]
    if turns is None:
        lines += ["# No TEMPLATE: the model's chat template could not be written in Go and shown to be the same.",
                  "# llama.cpp (`llama-server --jinja`) reads the original, which is in the GGUF file."]  # fmt: skip
    else:
        lines += ["# For system, user and assistant messages, which give the same text as the model's own template."]
        lines += (
            [] if turns.takes_system else ["# System messages are left out; the model's own template refuses them."]
        )
        lines += ["# That one also removes space around contents."] if turns.strips else []
        lines += [f'TEMPLATE """{turns.go(begin)}"""']
    # Ollama's parser drops what cannot be printed, and knows no escapes in parameters.
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop.isprintable() and stop.strip()]
    values = {theirs: sampling.get(name) for name, theirs in _PARAMETERS.items()}
    if sampling.get("do_sample") is False:
        values = {"temperature": 0}
    lines += [f"PARAMETER {name} {value}" for name, value in values.items() if type(value) in (int, float)]
    return "\n".join(lines) + "\n"


def _between(render: Render, roles: Sequence[str]) -> tuple[dict[tuple[str, str], str], str]:
    """The texts before the messages of a conversation, and after the last one.

    Raises:
        ValueError: If a content is not in the text once, in order.
        RowError: If the template refuses the conversation.
    """
    marks = [f"{_MARKS[role]}{index}" for index, role in enumerate(roles)]
    text = render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
    before, previous = dict[tuple[str, str], str](), ""
    for role, mark in zip(roles, marks, strict=True):
        between, separator, text = text.partition(mark)
        if not separator or mark in text:
            raise ValueError(f"{mark} is not written once")
        before[previous, role] = between
        previous = role
    return before, text


def _agrees(render: Render, turns: Turns, conversation: list[dict[str, str]]) -> bool:
    try:
        return render(conversation) == turns.render(conversation)
    except RowError:
        return False


def _go_text(text: str) -> str:
    """An action that writes a text. All of it is in the string, since Ollama strips and drops what cannot be seen."""
    if not text:
        return ""
    escaped = json.dumps(text, ensure_ascii=False)
    return '{{ "' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped[1:-1]) + '" }}'
