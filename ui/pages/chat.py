"""The Chat page: streams a run's model and its base side by side, and shows the process that holds them.

Conversations are sent by the browser as the values of the Chatbots. They are untrusted input, and bypass
`Chatbot.preprocess`, which would build any component named in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape, unescape
from typing import Any

import gradio as gr

from app.hardware import find_gpus
from app.services.chat import SIDES, Chats
from app.services.chat_messages import MAX_CHARACTERS, SAMPLING
from app.services.rpc_client import WorkerDied
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from ui.context import ServerContext
from ui.parts import Html, alert_list, byte_text, duration_text, element, join, number_text, title

_UPDATE_SECONDS = 0.1
"""Seconds between two updates of an answer; each sends the full text so far."""
_LEAD = "Ask a run's model and its base model the same question. Answers are shown as plain text."
_DIED = "the model's process has ended; free memory, or choose a smaller model or another device"
Turns = list[dict[str, Any]]


def build(context: ServerContext) -> None:
    """Lays out the page."""
    Page(Chats(context.runs_dir, context.roots, context.remote_code)).lay_out()


class Page:
    """The components of the page and their event handlers.

    Args:
        chats: the one model process of this server.
    """

    def __init__(self, chats: Chats):
        self.chats = chats

    def lay_out(self) -> None:
        """Lays out the components and connects their events."""
        gr.HTML(title("Chat", _LEAD), padding=False, apply_default_css=False)
        with gr.Row(equal_height=False):
            self.run = gr.Dropdown(
                label="Run or base model", allow_custom_value=True, scale=3, min_width=240,
                info="A run, or a base model alone: embedded, a Hub id, or a local folder.", elem_id="chat-run",
            )  # fmt: skip
            self.weights = gr.Dropdown(
                label="Checkpoint", scale=2, min_width=180, allow_custom_value=True, elem_id="chat-checkpoint",
                info="The run's export (model), or one of its checkpoints.",
            )  # fmt: skip
            self.device = gr.Dropdown(
                _devices(), value="auto", label="Device", scale=1, min_width=150, elem_id="chat-device",
                info="Reserved while loaded.",
            )  # fmt: skip
        with gr.Row():
            self.load_button = gr.Button("Load", size="md", min_width=110, scale=0)
            self.free_button = gr.Button("Free memory", size="md", min_width=130, scale=0, elem_id="chat-free")
        self.status = gr.HTML(
            _status(self.chats.state()), padding=False, apply_default_css=False, elem_id="chat-status"
        )
        self.alerts = gr.HTML("", padding=False, apply_default_css=False, elem_id="chat-alerts")
        with gr.Row(equal_height=True):
            self.tuned, self.base = _chatbot("Tuned", "chat-tuned"), _chatbot("Base", "chat-base")
        self.message = gr.Textbox(
            label="Message", lines=2, max_lines=8, max_length=MAX_CHARACTERS, elem_id="chat-message",
            placeholder="Enter sends, Shift+Enter starts a new line", submit_btn=False,
        )  # fmt: skip
        with gr.Row():
            self.send_button = gr.Button("Send", variant="primary", size="md", min_width=110, scale=0)
            self.clear_button = gr.Button("Clear", size="md", min_width=100, scale=0, elem_id="chat-clear")
            self.stop_button = gr.Button("Stop", size="md", min_width=100, scale=0, elem_id="chat-stop")
        self._lay_out_options()
        self._connect()

    def _lay_out_options(self) -> None:
        with gr.Accordion("Instructions and randomness", open=False, elem_id="chat-options"):
            self.system = gr.Textbox(
                label="Instructions (system prompt)", lines=2, max_lines=8, max_length=MAX_CHARACTERS
            )
            self.side = gr.Radio(
                [("Both", "both"), ("Tuned", "tuned"), ("Base", "base")], value="both", label="Who answers"
            )
            self.plain = gr.Checkbox(label="Complete plain text, without the chat template", value=False)
            with gr.Row():
                self.sampling = [
                    gr.Number(
                        option.default, label=name, minimum=option.low, maximum=option.high, info=option.help,
                        step=1 if option.integer else 0.05, min_width=220,
                    )
                    for name, option in SAMPLING.items()
                ]  # fmt: skip

    def _connect(self) -> None:
        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        target, status = [self.run, self.weights, self.device], [self.status, self.alerts]
        gr.on(None, self.prefill, None, [self.run, self.weights], queue=False, **hidden)
        self.run.input(self.list_weights, self.run, self.weights, queue=False, preprocess=False, **hidden)
        # Handlers get raw values, which `app.services.chat_messages` checks.
        self.load_button.click(self.load, target, status, preprocess=False, **hidden)
        self.free_button.click(self.free, None, status, queue=False, **hidden)
        self.stop_button.click(self.stop, None, status, queue=False, **hidden)
        self.clear_button.click(lambda: ([], [], ""), None, [self.tuned, self.base, self.alerts], queue=False, **hidden)
        options = [self.side, self.plain, self.system, *self.sampling]
        gr.on(
            [self.send_button.click, self.message.submit],
            self.send,
            [*target, self.message, self.tuned, self.base, *options],
            [self.message, self.tuned, self.base, *status],
            preprocess=False,
            concurrency_limit=1,
            concurrency_id="chat",
            trigger_mode="once",
            **hidden,
        )
        gr.Timer(2.0).tick(lambda: _status(self.chats.state()), None, self.status, queue=False, **hidden)
        gr.api(self.chat, api_name="chat", concurrency_limit=1, concurrency_id="chat")

    # -- events ------------------------------------------------------------------------------------------------------

    def prefill(self, request: gr.Request) -> tuple[Any, Any]:
        """The runs to choose from; selects the one in the URL, or the loaded one, or the newest."""
        choices, query, state = self.chats.choices(), dict(request.query_params), self.chats.state()
        names = [str(row["name"]) for row in choices]
        name = query.get("run") or state["name"] or next(iter(names), EMBEDDED)
        known: list[str] = next((row["weights"] for row in choices if row["name"] == name), [])
        if name not in names:
            known = self._weights(name)
        selected = query.get("checkpoint") if query.get("run") else state["weights"]
        first = selected if selected in known else next(iter(known), None)
        return gr.update(choices=[*names, EMBEDDED], value=name), gr.update(choices=known, value=first)

    def list_weights(self, name: Any) -> Any:
        """The checkpoints of the chosen run."""
        known = self._weights(name)
        return gr.update(choices=known, value=next(iter(known), None))

    def _weights(self, name: Any) -> list[str]:
        try:
            return self.chats.weights(name)
        except ConfigError:
            return []

    def load(self, name: Any, weights: Any, device: Any) -> Iterator[tuple[Html, Html]]:
        """Loads the selected model."""
        try:
            for _ in self.chats.open(self.chats.target(name, weights, device)):
                yield _status(self.chats.state()), Html("")
            yield _status(self.chats.state()), Html("")
        except (ConfigError, WorkerDied) as error:
            yield _status(self.chats.state()), alert_list(_lines(error))

    def free(self) -> tuple[Html, Html]:
        """Ends the process."""
        self.chats.free()
        return _status(self.chats.state()), Html("")

    def stop(self) -> tuple[Html, Html]:
        """Stops the current answer."""
        self.chats.stop()
        return _status(self.chats.state()), Html("")

    def send(
        self, name: Any, weights: Any, device: Any, message: Any, tuned: Any, base: Any, side: Any, plain: Any,
        system: Any, *sampling: Any,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """Sends the message to each side's conversation; loads the selected model first if necessary."""
        options = {"sampling": dict(zip(SAMPLING, sampling, strict=True)), "system": system, "plain": plain}
        turns = {"tuned": _turns(tuned), "base": _turns(base)}
        conversations: dict[str, Any] = {"tuned": gr.skip(), "base": gr.skip()}
        message_box, alerts = gr.skip(), Html("")
        try:
            for _ in self.chats.open(self.chats.target(name, weights, device)):
                yield message_box, *conversations.values(), _status(self.chats.state()), alerts
            loaded = self.chats.state().get("sides", [])
            for name in [name for name in SIDES if name in loaded and side in ("both", name)] or [side]:
                messages = [*turns.get(str(name), []), {"role": "user", "content": message}]
                for answer in self._answer(messages, name, options):
                    conversations[name] = _values([*messages, {"role": "assistant", "content": answer}])
                    yield "", *conversations.values(), _status(self.chats.state()), alerts
        except (ConfigError, WorkerDied) as error:
            alerts = alert_list(_lines(error))
        yield message_box, *conversations.values(), _status(self.chats.state()), alerts

    def _answer(self, messages: Turns, side: str, options: dict[str, Any]) -> Iterator[str]:
        """Yields the answer so far at most every `_UPDATE_SECONDS`, and finally the full answer."""
        text, updated_at = "", 0.0
        for document in self.chats.ask(messages, side, **options):
            text = document.get("answer", text + document.get("text", ""))
            if time.monotonic() - updated_at >= _UPDATE_SECONDS:
                updated_at = time.monotonic()
                yield text
        yield text

    def chat(
        self, run: str, messages: list[dict[str, Any]], checkpoint: str = "", sampling: dict[str, Any] | None = None,
        side: str = "both", system: str = "", device: str = "auto",
    ) -> dict[str, Any]:  # fmt: skip
        """One answer from each side, for scripts.

        Args:
            run: a run's id, or a base model: `embedded`, a Hub id or a local folder.
            messages: the conversation, mappings with `role` (system, user, assistant) and `content`.
            checkpoint: of the run; empty for its export, otherwise its newest checkpoint.
            sampling: values by name: temperature, top_p, top_k, max_new_tokens, repetition_penalty, seed.
            side: base, tuned or both.
            system: the system prompt.
            device: auto, cpu or a GPU's index.

        Returns:
            `base` and `tuned`: the text of each, or None.
        """
        texts: dict[str, Any] = {"base": None, "tuned": None}
        try:
            for _ in self.chats.open(self.chats.target(run, checkpoint, device)):
                pass
            for document in self.chats.ask(messages, side, sampling, system):
                if "answer" in document:
                    texts[document["side"]] = document["answer"]
        except (ConfigError, WorkerDied) as error:
            raise gr.Error("\n".join(_lines(error)), print_exception=False) from None
        return texts


# -- values and fragments --------------------------------------------------------------------------------------------


def _chatbot(label: str, name: str) -> gr.Chatbot:
    """A chatbot that shows plain text only: no Markdown, formulas or links, and fetches nothing."""
    return gr.Chatbot(
        label=label, elem_id=name, height="max(240px, 40vh)", min_width=300, render_markdown=False, sanitize_html=True,
        latex_delimiters=[], buttons=[], feedback_options=None, allow_file_downloads=False, allow_tags=False,
        reasoning_tags=[], placeholder="", layout="bubble",
    )  # fmt: skip


def _devices() -> list[tuple[str, str]]:
    gpus = [(f"GPU {gpu.index}: {gpu.name}", str(gpu.index)) for gpu in find_gpus()]
    return [("A free GPU" if gpus else "CPU", "auto"), *gpus, *([("CPU", "cpu")] if gpus else [])]


def _values(turns: Turns) -> Turns:
    """Messages as a Chatbot value. A Chatbot renders HTML, and would strip the indentation of plain strings."""
    return [
        {"role": turn["role"], "content": [{"type": "text", "text": escape(str(turn["content"]))}]} for turn in turns
    ]


def _turns(value: Any) -> Turns:
    """A Chatbot value as messages; content that is not text becomes a message that `check_messages` refuses."""
    return [_turn(entry) for entry in value or []] if isinstance(value, list) else []


def _turn(entry: Any) -> dict[str, Any]:
    content = entry.get("content") if isinstance(entry, dict) else None
    entries = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in entries]
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in texts):
        return {"role": None, "content": None}
    return {"role": entry.get("role"), "content": unescape("".join(map(str, texts)))}


def _lines(error: ConfigError | WorkerDied) -> list[str]:
    if isinstance(error, ConfigError):
        return error.lines
    return [str(error).partition("\n")[0], *error.lines[-1:], _DIED]


def _status(state: dict[str, Any]) -> Html:
    """What is loaded, on which device."""
    if state["loading"]:
        return _line("starting", "loading", f"{state['loading']} …", state)
    if not state["loaded"]:
        line = "No model is loaded, and no GPU is in use. Send or Load loads the one chosen above."
        return element("p", element("strong", line), role="status", class_="ts-unloaded")
    model = " ".join(filter(None, [state["name"], state["weights"]]))
    kind = ("running", "answering") if state["busy"] else ("done", "loaded")
    return _line(*kind, model, state)


def _line(colour: str, label: str, model: str, state: dict[str, Any]) -> Html:
    context, memory = state.get("context"), state.get("gpu_bytes") or state.get("memory_bytes")
    facts = [
        state.get("device"),
        state.get("dtype"),
        f"context {number_text(context)} tokens" if context else None,
        None if state.get("chat_template", True) else "no chat template: plain text",
        f"{byte_text(memory)} of {'GPU memory' if state.get('gpu_bytes') else 'memory'}" if memory else None,
        f"process {state['pid']}" if state.get("pid") else None,
        f"idle for {duration_text(state['idle_seconds'])}" if state.get("loaded") and not state["busy"] else None,
    ]
    details = " · ".join(str(fact) for fact in facts if fact)
    parts = [element("span", label, class_=f"ts-badge ts-{colour}"), Html(" "), element("strong", model)]
    return element("p", join([*parts, Html(" "), element("span", details, class_="ts-note")]), role="status")
