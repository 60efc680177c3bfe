"""The Chat page: a run's model beside its base, or beside another model, and the processes that hold them.

The browser keeps the conversations, in two fields that are not shown, and sends them with each event. They are
untrusted input, as is everything that a model writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.hardware import find_gpus
from app.services.chat_messages import MAX_CHARACTERS, SAMPLING, check_tools
from app.services.chat_pair import PANES, ChatPair
from app.services.rpc_client import WorkerDied
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from ui.context import ServerContext
from ui.pages.chat_parts import (
    conversation,
    read_messages,
    saved_rows,
    undone,
    write_messages,
)
from ui.pages.chat_turn import BASE, EMPTY_HEADING, NOTHING, Turn, heading
from ui.parts import Html, alert_list, duration_text, element, join, number_text, title

_LEAD = "Ask a run's model and its base model, or two models, the same question."
_DIED = "the model's process has ended; free memory, or choose a smaller model or another device"
_EMPTY = {"first": "Write a message below: the model answers here.", "second": "The other model answers here."}
_CLEAR = "(first, second, sure) => [first, second, Chat.isSure(first, second)]"


def build(context: ServerContext) -> None:
    """Lays out the page."""
    Page(ChatPair(context.runs_dir, context.roots, context.remote_code)).lay_out()


class Page:
    """The components of the page and their event handlers.

    Args:
        pair: the model processes of this server.
    """

    def __init__(self, pair: ChatPair):
        self.pair = pair

    def lay_out(self) -> None:
        """Lays out the components and connects their events."""
        gr.HTML(title("Chat", _LEAD), padding=False, apply_default_css=False)
        self._lay_out_models()
        self.alerts = gr.HTML("", padding=False, apply_default_css=False, elem_id="chat-alerts")
        with gr.Row(equal_height=True, elem_id="chat-panes"):
            self.views = {pane: _view(pane) for pane in PANES}
        self.data = {pane: gr.Textbox(visible=False, elem_id=f"chat-data-{pane}") for pane in PANES}
        self.sure = gr.Checkbox(visible=False)
        self.message = gr.Textbox(
            label="Message", lines=1, max_lines=8, max_length=MAX_CHARACTERS, elem_id="chat-message",
            placeholder="Enter sends, Shift+Enter starts a new line", submit_btn=False,
        )  # fmt: skip
        with gr.Row():
            self.send_button = gr.Button("Send", variant="primary", size="md", min_width=110, scale=0)
            self.stop_button = gr.Button("Stop", size="md", min_width=100, scale=0, elem_id="chat-stop")
            self.undo_button = gr.Button("Undo", size="md", min_width=100, scale=0, elem_id="chat-undo")
            self.clear_button = gr.Button("Clear", size="md", min_width=100, scale=0, elem_id="chat-clear")
            self.save_button = gr.Button("Save as JSONL", size="md", min_width=140, scale=0, elem_id="chat-save")
            self.raw = gr.Checkbox(
                label="Plain text as generated", value=False, container=False, min_width=220, elem_id="chat-raw"
            )
        self.rows = gr.Textbox(visible=False)
        self._lay_out_options()
        self._connect()

    def _lay_out_models(self) -> None:
        with gr.Row(equal_height=False, elem_id="chat-models"):
            self.run = gr.Dropdown(
                label="Run or base model", allow_custom_value=True, scale=3, min_width=240,
                info="A run, embedded, a Hub id or a local folder.", elem_id="chat-run",
            )  # fmt: skip
            self.weights = gr.Dropdown(
                label="Checkpoint", scale=2, min_width=180, allow_custom_value=True, elem_id="chat-checkpoint",
                info="Its export (model), or a checkpoint.",
            )  # fmt: skip
            self.other = gr.Dropdown(
                [BASE, NOTHING], value=BASE[1], label="Compare with", allow_custom_value=True, scale=3,
                min_width=240, info="Another model takes memory of its own.", elem_id="chat-other",
            )  # fmt: skip
            self.other_weights = gr.Dropdown(
                label="Its checkpoint", scale=2, min_width=180, allow_custom_value=True, visible=False,
                elem_id="chat-other-checkpoint", info="Its export, or a checkpoint.",
            )  # fmt: skip
            self.device = gr.Dropdown(
                _devices(), value="auto", label="Device", scale=1, min_width=150, elem_id="chat-device",
                info="Held while loaded.",
            )  # fmt: skip
        with gr.Row(elem_id="chat-load"):
            self.load_button = gr.Button("Load", size="md", min_width=110, scale=0)
            self.status = gr.HTML(_status(self.pair), padding=False, apply_default_css=False, elem_id="chat-status")
            self.free_button = gr.Button("Free memory", size="md", min_width=130, scale=0, elem_id="chat-free")

    def _lay_out_options(self) -> None:
        with gr.Accordion("Instructions and randomness", open=False, elem_id="chat-options"):
            self.system = gr.Textbox(
                label="Instructions (system prompt)", lines=2, max_lines=8, max_length=MAX_CHARACTERS
            )
            self.side = gr.Radio(
                [("Both", "both"), ("The first", "first"), ("The second", "second")], value="both",
                label="Who answers",
            )  # fmt: skip
            self.plain = gr.Checkbox(label="Complete plain text, without the chat template", value=False)
            with gr.Row():
                self.sampling = [
                    gr.Number(
                        option.default, label=name, minimum=option.low, maximum=option.high, info=option.help,
                        step=1 if option.integer else 0.05, min_width=220,
                    )
                    for name, option in SAMPLING.items()
                ]  # fmt: skip
        with gr.Accordion("Tools", open=False, elem_id="chat-tools"):
            self.tools = gr.Textbox(
                label="Tools (JSON)", lines=4, max_lines=16, max_length=MAX_CHARACTERS, elem_id="chat-tools-json",
                info="A list of functions with name, description and parameters (a JSON schema). Calls are shown and "
                "never executed; you enter the results.",
                placeholder='[{"name": "get_weather", "description": "The weather of a city", "parameters": '
                '{"type": "object", "properties": {"city": {"type": "string"}}}}]',
            )  # fmt: skip

    def _connect(self) -> None:
        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        target = [self.run, self.weights, self.device, self.other, self.other_weights]
        status, views, data = [self.status, self.alerts], [*self.views.values()], [*self.data.values()]
        gr.on(None, self.prefill, None, [self.run, self.weights, self.other, *views], queue=False, **hidden)
        for run, weights in ((self.run, self.weights), (self.other, self.other_weights)):
            run.input(self.list_weights, run, weights, queue=False, preprocess=False, **hidden)
        # Handlers get raw values, which `app.services.chat_messages` checks.
        self.load_button.click(self.load, target, status, preprocess=False, **hidden)
        self.free_button.click(self.free, None, status, queue=False, **hidden)
        self.stop_button.click(self.stop, None, status, queue=False, **hidden)
        self.raw.input(None, self.raw, None, js="(on) => Chat.showRaw(on)", **hidden)
        changed = [self.message, *views, *data, *status, self.sampling[-1]]
        quick: dict[str, Any] = {"preprocess": False, "queue": False, **hidden}
        self.clear_button.click(self.clear, [*data, self.sure], changed, js=_CLEAR, **quick)
        self.undo_button.click(self.undo, [*target, *data], changed, **quick)
        saved = self.save_button.click(self.save, [*data, self.system, self.tools], [self.rows, self.alerts], **quick)
        saved.then(None, self.rows, None, js="(rows) => Chat.save(rows)", **hidden)
        options = [self.side, self.plain, self.system, self.tools, *self.sampling]
        answering: dict[str, Any] = {
            "inputs": [*target, self.message, *data, *options], "outputs": changed, "preprocess": False,
            "concurrency_limit": 1, "concurrency_id": "chat", "trigger_mode": "once", **hidden,
        }  # fmt: skip
        gr.on([self.send_button.click, self.message.submit], self.send, **answering)
        for pane, view in self.views.items():
            view.act(self._act_in(pane), **answering)
        gr.Timer(2.0).tick(lambda: _status(self.pair), None, self.status, queue=False, **hidden)
        gr.api(self.chat, api_name="chat", concurrency_limit=1, concurrency_id="chat")

    # -- events: models ----------------------------------------------------------------------------------------------

    def prefill(self, request: gr.Request) -> tuple[Any, ...]:
        """The runs to choose from; selects the one in the URL, or the loaded one, or the newest."""
        choices, query, state = self.pair.first.choices(), dict(request.query_params), self.pair.first.state()
        names = [str(row["name"]) for row in choices]
        name = query.get("run") or state["name"] or next(iter(names), EMBEDDED)
        known: list[str] = next((row["weights"] for row in choices if row["name"] == name), [])
        if name not in names:
            known = self._weights(name)
        selected = query.get("checkpoint") if query.get("run") else state["weights"]
        first = selected if selected in known else next(iter(known), None)
        views = [conversation(pane, heading(pane, name, first, "=base"), [], empty=_EMPTY[pane]) for pane in PANES]
        if not known:  # a base model alone
            views[1] = Html("")
        return (
            gr.update(choices=[*names, EMBEDDED], value=name),
            gr.update(choices=known, value=first, visible=bool(known)),
            gr.update(choices=[BASE, NOTHING, *names, EMBEDDED]), *views,
        )  # fmt: skip

    def list_weights(self, name: Any) -> Any:
        """The checkpoints of the chosen run; a base model has none to choose from."""
        known = self._weights(name)
        return gr.update(choices=known, value=next(iter(known), None), visible=bool(known))

    def _weights(self, name: Any) -> list[str]:
        try:
            return self.pair.first.weights(name)
        except ConfigError:
            return []

    def _targets(self, name: Any, weights: Any, device: Any, other: Any, other_weights: Any) -> tuple[Any, Any]:
        return self.pair.first.target(name, weights, device), self.pair.other(other, other_weights, device)

    def load(self, *target: Any) -> Iterator[tuple[Html, Html]]:
        """Loads the selected models."""
        try:
            for _ in self.pair.open(*self._targets(*target)):
                yield _status(self.pair), Html("")
            yield _status(self.pair), Html("")
        except (ConfigError, WorkerDied) as error:
            yield _status(self.pair), alert_list(_lines(error))

    def free(self) -> tuple[Html, Html]:
        """Ends the processes."""
        self.pair.free()
        return _status(self.pair), Html("")

    def stop(self) -> tuple[Html, Html]:
        """Stops the current answers."""
        self.pair.stop()
        return _status(self.pair), Html("")

    # -- events: conversations ---------------------------------------------------------------------------------------

    def send(self, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Sends the message to each pane's conversation; loads the selected models first if necessary."""
        turn = Turn(self.pair, values)
        yield from self._answered(turn, lambda: turn.sent())

    def _act_in(self, pane: str) -> Any:
        """The handler of the buttons in the conversation of a pane."""

        def act(event: gr.EventData, *values: Any) -> Iterator[tuple[Any, ...]]:
            turn = Turn(self.pair, values)
            yield from self._answered(turn, lambda: turn.changed(pane, event._data))

        return act

    def _answered(self, turn: Turn, ask: Any) -> Iterator[tuple[Any, ...]]:
        """Streams the answers to what `ask` returns: the messages of each pane that is to answer."""
        message: Any = gr.skip()
        alerts = Html("")
        asked_seed = turn.seed
        try:
            messages = ask()
            for _ in self.pair.open(*self._targets(*turn.target)):
                yield message, *turn.views(), *turn.data(), _status(self.pair), alerts, gr.skip()
            turn.start(messages, self.pair.sources(self._targets(*turn.target)[1]))
            message = turn.message_box
            for _ in turn.answers():
                yield message, *turn.views(), gr.skip(), gr.skip(), _status(self.pair), alerts, gr.skip()
        except (ConfigError, WorkerDied) as error:
            alerts = alert_list(_lines(error))
            message = turn.message_box if turn.has_answers else gr.skip()
        seed = turn.seed if turn.seed != asked_seed else gr.skip()
        turn.is_over = True
        yield message, *turn.views(), *turn.data(), _status(self.pair), alerts, seed

    def clear(self, first: Any, second: Any, sure: Any) -> tuple[Any, ...]:
        """Empties both conversations."""
        if sure is not True:
            return (gr.skip(),) * 8
        has_messages = {pane: data not in (None, "", "[]") for pane, data in zip(PANES, (first, second), strict=True)}
        views = [
            conversation(pane, EMPTY_HEADING[pane], [], empty=_EMPTY[pane]) if has_messages[pane] else gr.skip()
            for pane in PANES
        ]
        return gr.skip(), *views, "", "", gr.skip(), Html(""), gr.skip()

    def undo(self, *values: Any) -> tuple[Any, ...]:
        """Takes back the last message of both conversations, and puts it into the field."""
        *target, first, second = values
        try:
            before = {pane: read_messages(data) for pane, data in zip(PANES, (first, second), strict=True)}
        except ConfigError as error:
            return *(gr.skip(),) * 6, alert_list(_lines(error)), gr.skip()
        text, views, data = "", [], []
        for pane, messages in before.items():
            if not messages:  # nothing to take back; the pane may not even have a model
                views.append(gr.skip())
                data.append(gr.skip())
                continue
            left, message = undone(messages)
            text = text or message
            title = heading(pane, target[0], target[1], target[3], target[4])
            views.append(conversation(pane, title, left, empty=_EMPTY[pane]))
            data.append(write_messages(left))
        return text or gr.skip(), *views, *data, gr.skip(), Html(""), gr.skip()

    def save(self, first: Any, second: Any, system: Any, tools: Any) -> tuple[Any, Any]:
        """The conversations as rows that can be trained on; the browser saves them."""
        try:
            rows = saved_rows([read_messages(first), read_messages(second)], str(system or ""), check_tools(tools))
            if not rows:
                raise ConfigError("there is no conversation to save; send a message")
        except ConfigError as error:
            return "", alert_list(_lines(error))
        return rows, Html("")

    def chat(
        self, run: str, messages: list[dict[str, Any]], checkpoint: str = "", sampling: dict[str, Any] | None = None,
        side: str = "both", system: str = "", device: str = "auto",
    ) -> dict[str, Any]:  # fmt: skip
        """One answer from each side, for scripts.

        Args:
            run: a run's id, or a base model: `embedded`, a Hub id or a local folder.
            messages: the conversation, mappings with `role` (system, user, assistant, tool) and `content`.
            checkpoint: of the run; empty for its export, otherwise its newest checkpoint.
            sampling: values by name: temperature, top_p, top_k, max_new_tokens, repetition_penalty, seed.
            side: base, tuned or both.
            system: the system prompt.
            device: auto, cpu or a GPU's index.

        Returns:
            `base` and `tuned`: the text of each, or None.
        """
        texts: dict[str, Any] = {"base": None, "tuned": None}
        chats = self.pair.first
        try:
            for _ in self.pair.open_first(chats.target(run, checkpoint, device)):
                pass
            for document in chats.ask(messages, side, sampling, system):
                if "answer" in document:
                    texts[document["side"]] = document["answer"]
        except (ConfigError, WorkerDied) as error:
            raise gr.Error("\n".join(_lines(error)), print_exception=False) from None
        return texts


# -- values and fragments --------------------------------------------------------------------------------------------


def _view(pane: str) -> gr.HTML:
    """A conversation, whose buttons trigger the event `act`."""
    return gr.HTML(
        conversation(pane, EMPTY_HEADING[pane], [], empty=_EMPTY[pane]), padding=False, apply_default_css=False,
        elem_id=f"chat-{pane}", min_width=300, js_on_load="Chat.bind(element, (data) => trigger('act', data))",
    )  # fmt: skip


def _devices() -> list[tuple[str, str]]:
    gpus = [(f"GPU {gpu.index}: {gpu.name}", str(gpu.index)) for gpu in find_gpus()]
    return [("A free GPU" if gpus else "CPU", "auto"), *gpus, *([("CPU", "cpu")] if gpus else [])]


def _lines(error: ConfigError | WorkerDied) -> list[str]:
    if isinstance(error, ConfigError):
        return error.lines
    return [str(error).partition("\n")[0], *error.lines[-1:], _DIED]


def _status(pair: ChatPair) -> Html:
    """What is loaded, on which devices."""
    return join(map(_state, pair.states()))


def _state(state: dict[str, Any]) -> Html:
    if state["loading"]:
        return _line("starting", "loading", f"{state['loading']} …", state)
    if not state["loaded"]:
        line = "No model is loaded, and no GPU is in use. Send or Load loads the one chosen above."
        return element("p", line, role="status", class_="ts-note ts-unloaded")
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
        None if state.get("takes_tools", True) else "its template takes no tools",
        f"{byte_text(memory)} of {'GPU memory' if state.get('gpu_bytes') else 'memory'}" if memory else None,
        f"process {state['pid']}" if state.get("pid") else None,
        f"idle for {duration_text(state['idle_seconds'])}" if state.get("loaded") and not state["busy"] else None,
    ]
    details = " · ".join(str(fact) for fact in facts if fact)
    parts = [element("span", label, class_=f"ts-badge ts-{colour}"), Html(" "), element("strong", model)]
    return element("p", join([*parts, Html(" "), element("span", details, class_="ts-note")]), role="status")
