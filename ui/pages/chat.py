"""The Chat page: a run's model and its base side by side, streamed, with the process that holds them in sight.

The conversations travel as the Chatbots' values, which a browser sends: they are taken as a stranger's, and never
through `Chatbot.preprocess`, which would build any component that they name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape, unescape
from typing import Any

import gradio as gr

from app.hardware import find_gpus
from app.services.chat import MOST_LETTERS, SAMPLING, SIDES, Chats
from app.services.rpc_client import WorkerDied
from trainers.config.options import EMBEDDED, ConfigError
from ui.context import Here
from ui.parts import Html, alert_list, byte_text, duration_text, element, join, number_text, title

_BEAT = 0.1
"""Least seconds between two updates of an answer: each carries it whole."""
_LEAD = "Ask a run's model and the base it was made of the same question. Answers are shown as plain text."
_GONE = "the model's process has ended; free memory, or choose a smaller model or another device"
Turns = list[dict[str, Any]]


def build(here: Here) -> None:
    """Lays out the page."""
    Page(Chats(here.runs_dir, here.roots, here.remote_code)).lay_out()


class Page:
    """Components and what they do.

    Args:
        chats: the one model process of this server.
    """

    def __init__(self, chats: Chats):
        self.chats = chats

    def lay_out(self) -> None:
        """Puts the components on the page and ties them to what they do."""
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
                info="Held while loaded.",
            )  # fmt: skip
        with gr.Row():
            self.load_button = gr.Button("Load", size="md", min_width=110, scale=0)
            self.free_button = gr.Button("Free", size="md", min_width=110, scale=0)
        self.status = gr.HTML(
            _status(self.chats.state()), padding=False, apply_default_css=False, elem_id="chat-status"
        )
        self.alerts = gr.HTML("", padding=False, apply_default_css=False, elem_id="chat-alerts")
        with gr.Row(equal_height=True):
            self.tuned, self.base = _chatbot("Tuned", "chat-tuned"), _chatbot("Base", "chat-base")
        self.message = gr.Textbox(
            label="Message", lines=2, max_lines=8, max_length=MOST_LETTERS, elem_id="chat-message",
            placeholder="Enter sends, Shift+Enter starts a new line", submit_btn=False,
        )  # fmt: skip
        with gr.Row():
            self.send_button = gr.Button("Send", variant="primary", size="md", min_width=160, scale=0)
            self.stop_button = gr.Button("Stop", size="md", min_width=110, scale=0)
            self.clear_button = gr.Button("Clear", size="md", min_width=110, scale=0, elem_id="chat-clear")
        self._lay_out_options()
        self._tie()

    def _lay_out_options(self) -> None:
        with gr.Accordion("System prompt and sampling", open=False, elem_id="chat-options"):
            self.system = gr.Textbox(label="System prompt", lines=2, max_lines=8, max_length=MOST_LETTERS)
            self.side = gr.Radio(
                [("Both", "both"), ("Tuned", "tuned"), ("Base", "base")], value="both", label="Who answers"
            )
            self.plain = gr.Checkbox(label="Complete plain text, without the chat template", value=False)
            with gr.Row():
                self.sampling = [
                    gr.Number(
                        option.default, label=name, minimum=option.low, maximum=option.high, info=option.help,
                        step=1 if option.whole else 0.05, min_width=220,
                    )
                    for name, option in SAMPLING.items()
                ]  # fmt: skip

    def _tie(self) -> None:
        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        chosen, seen = [self.run, self.weights, self.device], [self.status, self.alerts]
        gr.on(None, self.prefill, None, [self.run, self.weights], **hidden)
        self.run.input(self.pick, self.run, self.weights, queue=False, preprocess=False, **hidden)
        # Raw values everywhere: what they may be is checked in `app.services.chat`.
        self.load_button.click(self.load, chosen, seen, preprocess=False, **hidden)
        self.free_button.click(self.free, None, seen, queue=False, **hidden)
        self.stop_button.click(self.stop, None, seen, queue=False, **hidden)
        self.clear_button.click(lambda: ([], [], ""), None, [self.tuned, self.base, self.alerts], queue=False, **hidden)
        options = [self.side, self.plain, self.system, *self.sampling]
        gr.on(
            [self.send_button.click, self.message.submit],
            self.send,
            [*chosen, self.message, self.tuned, self.base, *options],
            [self.message, self.tuned, self.base, *seen],
            preprocess=False,
            concurrency_limit=1,
            concurrency_id="chat",
            trigger_mode="once",
            **hidden,
        )
        gr.Timer(2.0).tick(lambda: _status(self.chats.state()), None, self.status, queue=False, **hidden)
        gr.api(self.chat, api_name="chat", concurrency_limit=1, concurrency_id="chat")

    # -- what the components do --------------------------------------------------------------------------------------

    def prefill(self, request: gr.Request) -> tuple[Any, Any]:
        """The runs to choose from, and what the address names, else what is loaded, else the newest run."""
        choices, asked, state = self.chats.choices(), dict(request.query_params), self.chats.state()
        names = [str(row["name"]) for row in choices]
        name = asked.get("run") or state["name"] or next(iter(names), EMBEDDED)
        known: list[str] = next((row["weights"] for row in choices if row["name"] == name), [])
        if name not in names:
            known = self._weights(name)
        picked = asked.get("checkpoint") if asked.get("run") else state["weights"]
        first = picked if picked in known else next(iter(known), None)
        return gr.update(choices=[*names, EMBEDDED], value=name), gr.update(choices=known, value=first)

    def pick(self, name: Any) -> Any:
        """The checkpoints of the chosen run."""
        known = self._weights(name)
        return gr.update(choices=known, value=next(iter(known), None))

    def _weights(self, name: Any) -> list[str]:
        try:
            return self.chats.weights(name)
        except ConfigError:
            return []

    def load(self, name: Any, weights: Any, device: Any) -> Iterator[tuple[Html, Html]]:
        """Loads what is chosen."""
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
        """Ends the answer under way."""
        self.chats.stop()
        return _status(self.chats.state()), Html("")

    def send(
        self, name: Any, weights: Any, device: Any, message: Any, tuned: Any, base: Any, side: Any, plain: Any,
        system: Any, *sampling: Any,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """Asks each side in its own conversation; loads what is chosen where something else is loaded."""
        options = {"sampling": dict(zip(SAMPLING, sampling, strict=True)), "system": system, "plain": plain}
        turns = {"tuned": _turns(tuned), "base": _turns(base)}
        shown: dict[str, Any] = {"tuned": gr.skip(), "base": gr.skip()}
        left, alerts = gr.skip(), Html("")
        try:
            for _ in self.chats.open(self.chats.target(name, weights, device)):
                yield left, *shown.values(), _status(self.chats.state()), alerts
            loaded = self.chats.state().get("sides", [])
            for one in [one for one in SIDES if one in loaded and side in ("both", one)] or [side]:
                asked = [*turns.get(str(one), []), {"role": "user", "content": message}]
                for answer in self._answer(asked, one, options):
                    shown[one] = _values([*asked, {"role": "assistant", "content": answer}])
                    yield "", *shown.values(), _status(self.chats.state()), alerts
        except (ConfigError, WorkerDied) as error:
            alerts = alert_list(_lines(error))
        yield left, *shown.values(), _status(self.chats.state()), alerts

    def _answer(self, messages: Turns, side: str, options: dict[str, Any]) -> Iterator[str]:
        """The answer so far, again and again, and at last the whole of it."""
        text, told = "", 0.0
        for document in self.chats.ask(messages, side, **options):
            text = document.get("answer", text + document.get("text", ""))
            if time.monotonic() - told >= _BEAT:
                told = time.monotonic()
                yield text
        yield text

    def chat(
        self, run: str, messages: list[dict[str, Any]], checkpoint: str = "", sampling: dict[str, Any] | None = None,
        side: str = "both", system: str = "", device: str = "auto",
    ) -> dict[str, Any]:  # fmt: skip
        """One answer of each side, for scripts.

        Args:
            run: a run's id, or a base model: `embedded`, a Hub id or a local folder.
            messages: the conversation: mappings with `role` (system, user, assistant) and `content`.
            checkpoint: of the run; empty for its export, else its newest checkpoint.
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
    """A conversation shown as plain text: no Markdown, no formulas, no links, nothing fetched."""
    return gr.Chatbot(
        label=label, elem_id=name, height="max(240px, 40vh)", min_width=300, render_markdown=False, sanitize_html=True,
        latex_delimiters=[], buttons=[], feedback_options=None, allow_file_downloads=False, allow_tags=False,
        reasoning_tags=[], placeholder="", layout="bubble",
    )  # fmt: skip


def _devices() -> list[tuple[str, str]]:
    gpus = [(f"GPU {gpu.index}: {gpu.name}", str(gpu.index)) for gpu in find_gpus()]
    return [("A free GPU" if gpus else "CPU", "auto"), *gpus, *([("CPU", "cpu")] if gpus else [])]


def _values(turns: Turns) -> Turns:
    """Messages for a Chatbot, which draws its texts as HTML; given as plain strings it would strip their indents."""
    return [
        {"role": turn["role"], "content": [{"type": "text", "text": escape(str(turn["content"]))}]} for turn in turns
    ]


def _turns(value: Any) -> Turns:
    """A Chatbot's value as messages; what is not text becomes nothing that `check_messages` would take."""
    return [_turn(entry) for entry in value or []] if isinstance(value, list) else []


def _turn(entry: Any) -> dict[str, Any]:
    content = entry.get("content") if isinstance(entry, dict) else None
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in texts):
        return {"role": None, "content": None}
    return {"role": entry.get("role"), "content": unescape("".join(map(str, texts)))}


def _lines(error: ConfigError | WorkerDied) -> list[str]:
    if isinstance(error, ConfigError):
        return error.mistakes
    return [str(error).partition("\n")[0], *error.lines[-1:], _GONE]


def _status(state: dict[str, Any]) -> Html:
    """Which process holds what."""
    if state["loading"]:
        return _line("starting", "loading", f"{state['loading']} …", state)
    if not state["loaded"]:
        return _line("queued", "free", "No model is loaded, and no GPU is held. Send or Load loads what is chosen.", {})
    what = " ".join(filter(None, [state["name"], state["weights"]]))
    kind = ("running", "answering") if state["busy"] else ("done", "loaded")
    return _line(*kind, what, state)


def _line(colour: str, word: str, what: str, state: dict[str, Any]) -> Html:
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
    shown = " · ".join(str(fact) for fact in facts if fact)
    parts = [element("span", word, class_=f"ts-badge ts-{colour}"), Html(" "), element("strong", what)]
    return element("p", join([*parts, Html(" "), element("span", shown, class_="ts-note")]), role="status")
