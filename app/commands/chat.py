"""The verb `chat`: a single answer, or a conversation in the terminal, from a run's model, its base, or both."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.console import clean, report_json, say
from app.launch.foreground import interruptible
from app.services.chat import Chats, Target
from app.services.chat_messages import check_messages, check_sampling
from app.services.rpc_client import WorkerDied
from trainers.config.mistakes import ConfigError

_NUMBERS = ("finish", "prompt_tokens", "tokens", "seconds", "tokens_per_second")


def chat_verb(
    name: str,
    runs_dir: Path,
    checkpoint: str | None = None,
    base: bool = False,
    prompt: str | None = None,
    system: str = "",
    plain: bool = False,
    device: str = "auto",
    revision: str | None = None,
    remote_code: bool = False,
    sampling: Mapping[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """`tunesmith chat`.

    Args:
        name: a run, a base model, or the folder of an adapter.
        runs_dir: folder of run folders.
        checkpoint: of the run; default: its export, otherwise its newest checkpoint.
        base: also let the base model answer.
        prompt: a single prompt to answer; None for a conversation.
        system: the system prompt.
        plain: complete plain text, without a chat template.
        device: `auto`, `cpu` or a GPU's index.
        revision: of a base model on the Hub.
        remote_code: run model code that comes with the weights.
        sampling: values by the names of `app.services.chat_messages.SAMPLING`; None keeps the default.
        as_json: print one JSON document; needs a prompt.

    Returns:
        The exit status: 0, or 1 if the model's process has died.

    Raises:
        ConfigError: for an invalid request.
    """
    if as_json and prompt is None:
        raise ConfigError("--json needs a prompt; add --prompt TEXT")
    options = check_sampling(sampling)
    if prompt is not None:
        check_messages([{"role": "user", "content": prompt}], system)
    chats = Chats(runs_dir, remote_code=remote_code)
    target = chats.target(name, checkpoint, device, revision)
    ending = contextlib.ExitStack()
    if prompt is not None:  # in a conversation, an interrupt stops an answer, and SIGTERM ends this process
        ending.enter_context(interruptible())
    try:
        for stage in chats.open(target):
            say(f"{stage} ...")
        side = "base" if target.run is None and not target.is_adapter else "both" if base else "tuned"
        request = {"side": side, "sampling": options, "system": system, "plain": plain}
        if prompt is not None:
            return _once(chats, target, prompt, request, as_json)
        return _converse(chats, target, request)
    except WorkerDied as error:
        say(clean(str(error)))
        say("the model's process has ended; free memory, or choose a smaller model or another --device")
        return 1
    finally:
        chats.free()
        ending.close()


def _once(chats: Chats, target: Target, prompt: str, request: dict[str, Any], as_json: bool) -> int:
    """Answers a single prompt."""
    answers: dict[str, Any] = {"base": None, "tuned": None}
    for document in _print_pieces(
        chats.ask([{"role": "user", "content": prompt}], **request), as_json, request["side"] == "both"
    ):
        if "answer" in document:
            numbers = {name: document[name] for name in _NUMBERS}
            answers[document["side"]] = {"text": document["answer"], **numbers}
    if as_json:
        run_dir = str(target.run.path) if target.run else None
        head = {"run_dir": run_dir, "checkpoint": target.weights, "model": None if target.run else target.name}
        report_json({**head, "prompt": prompt, **answers})
    return 0


def _print_pieces(
    documents: Iterator[dict[str, Any]], quiet: bool = False, label: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields the documents of an answer, printing its text as it streams.

    Args:
        documents: of `Chats.ask`.
        quiet: print nothing.
        label: print the side's name before its answer.
    """
    side = None
    for document in documents:
        if not quiet:
            if label and document["side"] != side:
                sys.stdout.write(f"{document['side']}: ")
            sys.stdout.write(clean(document.get("text", "")) + "\n" * ("finish" in document))
            sys.stdout.flush()
        side = document["side"]
        yield document


def _converse(chats: Chats, target: Target, request: dict[str, Any]) -> int:
    """Answers each line of standard input until its end; each side continues its own conversation."""
    terminal = sys.stdin.isatty()
    turns: dict[str, list[dict[str, Any]]] = {}
    sides = ["tuned", "base"] if request["side"] == "both" else [request["side"]]
    if terminal:
        loaded = f"{target.name} {target.weights or ''}".strip()
        say(f"{loaded}: write a message; Ctrl-C stops an answer, Ctrl-D ends")
    while (line := _line(terminal)) is not None:
        for side in sides if line.strip() else []:
            history = turns.setdefault(side, [])
            history.append({"role": "user", "content": line})
            _turn(chats, history, {**request, "side": side}, label=terminal or len(sides) > 1)
    return 0


def _line(terminal: bool) -> str | None:
    try:
        return input("you: " if terminal else "")
    except EOFError:
        if terminal:
            say("")
        return None


def _turn(chats: Chats, history: list[dict[str, Any]], request: dict[str, Any], label: bool) -> None:
    """Adds the answer to the history; if it is stopped or refused, removes its question instead."""
    answer = None
    try:
        for document in _print_pieces(chats.ask(history, **request), label=label):
            if "message" in document:
                answer = {**document["message"], "raw": document["answer"]}
    except KeyboardInterrupt:
        say("\nstopped")
    except ConfigError as error:
        for mistake in error.lines:
            say(f"error: {clean(mistake)}")
    if answer is None:
        history.pop()
    else:
        history.append(answer)
