"""The Data page: what will be trained, before any GPU is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from app.services.data import (
    COUNTED_AT_ONCE,
    FIELDS,
    cancel_statistics,
    data_config,
    open_data,
    row_number,
    start_statistics,
    statistics_job,
)
from app.services.draft import read_draft, with_data, write_draft
from app.services.fields import text_of
from app.services.form import Choices
from app.services.rpc_client import WorkerDied
from app.services.starting_values import starting_values
from app.services.uploads import ENDINGS, take_sent
from trainers.config.options import ConfigError, TrainConfig
from trainers.config.parse import preset_names
from ui.context import Here
from ui.pages.data_parts import mistakes_panel, packed_panel, rows_panel, statistics_panel
from ui.pages.train_parts import by_name, component, shown_value
from ui.parts import Html, alert_list, note, run_link, title

FIRST_PRESET = "tiny-lora"
PAGE_ROWS = 10
_AS_READ, _AS_PACKED = "rows as read", "rows of the batches"
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}
_NAMES = json.dumps(FIELDS)
_WITH_DRAFT = "(draft, ...form) => [tunesmithDraft.all(), ...form]"
_KEEP_IF_SHARED = "(draft) => { if (!location.search) tunesmithDraft.replace(draft); }"
_TRAIN = "(draft) => { if (draft) { tunesmithDraft.replace(draft); location.assign('./'); } }"
_QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
_SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private", "trigger_mode": "once"}


def build(here: Here) -> None:
    """Lays out the page."""
    gr.HTML(title("Data", "See what will be trained: rows, trained tokens, lengths and bad rows. No GPU is taken."))
    page = _Page(here)
    page.lay_out()
    page.connect()


class _Page:
    """The components of the page, and what happens when they change.

    Args:
        here: what the server may touch.
    """

    def __init__(self, here: Here):
        self.here = here
        self.fields = by_name(FIELDS)

    def lay_out(self) -> None:
        """The form, the rows, the statistics."""
        first = starting_values(FIRST_PRESET)
        with gr.Row(elem_classes=["ts-fields"]):
            self.preset = gr.Dropdown(
                [("none", ""), *((name, name) for name in preset_names())], value=FIRST_PRESET, label="Preset",
                info="Where the options that are not shown here come from.", elem_id="opt-preset",
                elem_classes=["ts-field"], min_width=190,
            )  # fmt: skip
            self.options = [component(one, first[one.name]) for one in self.fields]
        self.run = gr.Textbox("", visible=False, label="run")
        self.key = gr.Textbox("", visible=False, label="count")
        self.asked = gr.Textbox("", visible=False, label="asked for by the address")
        self.draft = gr.Textbox("", visible=False, label="draft of this tab")
        self.source = gr.HTML("", elem_id="data-source", padding=False, apply_default_css=False)
        with gr.Row():
            self.show = gr.Button("Show", variant="primary", elem_id="data-show", size="md", scale=0, min_width=160)
            self.upload = gr.UploadButton(
                "Upload data", file_types=list(ENDINGS), elem_id="upload-data", size="md", scale=0, min_width=160
            )
            self.train = gr.Button("Train on this", elem_id="data-train", size="md", scale=0, min_width=160)
        self.mistakes = gr.HTML(mistakes_panel([]), elem_id="data-mistakes", padding=False, apply_default_css=False)
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                self._lay_out_rows()
            with gr.Column(scale=2, min_width=300):
                gr.HTML("<h2>Statistics</h2>", padding=False, apply_default_css=False)
                with gr.Row():
                    self.count = gr.Button("Count everything", elem_id="data-count", size="md", min_width=190, scale=0)
                    self.cancel = gr.Button("Cancel", elem_id="data-cancel", size="md", min_width=110, scale=0)
                self.statistics = gr.HTML(
                    statistics_panel(None), elem_id="data-statistics", padding=False, apply_default_css=False
                )
        self.timer = gr.Timer(1.0, active=False)

    def _lay_out_rows(self) -> None:
        gr.HTML("<h2>Rows</h2>", padding=False, apply_default_css=False)
        self.view = gr.Radio(
            [_AS_READ, _AS_PACKED], value=_AS_READ, label="View", elem_id="data-view",
            info="Rows of the batches are packed when packing is on; the whole data set is counted for them.",
        )  # fmt: skip
        with gr.Row(elem_id="data-pager"):
            self.row = gr.Textbox("0", label="First row", max_lines=1, elem_id="data-row", scale=0, min_width=160)
            self.previous = gr.Button("Previous", elem_id="data-previous", size="md", min_width=110, scale=0)
            self.next = gr.Button("Next", elem_id="data-next", size="md", min_width=110, scale=0)
        self.rows = gr.HTML(
            note("Choose data and press Show; the first look takes some seconds."), elem_id="data-rows", padding=False,
            apply_default_css=False,
        )  # fmt: skip

    def connect(self) -> None:
        """Every event of the page."""
        form = [self.run, self.preset, *self.options]
        paging = [self.view, self.row, *form]
        shown = [self.mistakes, self.rows, self.row]
        counted = [self.mistakes, self.key, self.statistics, self.timer]
        filled = [self.asked, self.run, self.preset, self.source, *self.options]
        small = {"fn": self.count_small, "inputs": form, "outputs": counted, **_QUICK}
        gr.on([self.show.click, self.row.submit], self.page(0), paging, shown, **_SHOWN).then(**small)
        self.view.input(self.page(None), paging, shown, **_SHOWN)
        self.previous.click(self.page(-1), paging, shown, **_SHOWN)
        self.next.click(self.page(1), paging, shown, **_SHOWN)
        self.count.click(self.start_count, form, counted, **_QUICK)
        self.cancel.click(cancel_statistics, self.key, None, **_QUICK)
        self.timer.tick(self.tick, self.key, [self.statistics, self.timer], **_QUICK)
        self.preset.input(self.switch_preset, self.preset, filled, **_QUICK).then(
            self.drafted, [self.draft, *form], self.draft, js=_WITH_DRAFT, **_QUICK
        ).then(None, self.draft, None, js=_KEEP_IF_SHARED, **_HIDDEN)
        self.train.click(self.drafted, [self.draft, *form], self.draft, js=_WITH_DRAFT, **_QUICK).then(
            None, self.draft, None, js=_TRAIN, **_HIDDEN
        )
        keep = f"(preset, ...values) => {{ if (!location.search) tunesmithDraft.keep({{preset}}, {_NAMES}, values); }}"
        gr.on([one.change for one in self.options], None, [self.preset, *self.options], None, js=keep, **_HIDDEN)
        self.upload.upload(self.take_upload, self.upload, self.options[FIELDS.index("dataset_name")], **_SHOWN)
        read = "() => [tunesmithDraft.read()]"
        loaded = Context.root_block.load(self.prefill, self.draft, filled, js=read, **_QUICK)
        loaded.then(None, None, None, js="() => tunesmithDraft.ready()", **_HIDDEN)
        loaded.then(self.first_page, [self.asked, *paging], shown, **_SHOWN).then(
            self.first_count, [self.asked, *form], counted, **_QUICK
        )

    # -- what happens ------------------------------------------------------------------------------------------------

    def _config(self, run: str, preset: str, raw: Sequence[Any]) -> TrainConfig:
        values = {one.name: value for one, value in zip(self.fields, raw, strict=True)}
        base = None if run else preset or None
        return data_config(values, base, run or None, self.here.runs_dir, self.here.roots, self.here.remote_code)

    def page(self, step: int | None) -> Callable[..., list[Any]]:
        """A handler that shows the rows so many pages on; None goes to the first row."""

        def show(view: str, row: object, run: str, preset: str, *raw: Any) -> list[Any]:
            try:
                look = open_data(self._config(run, preset, raw))
                packed = view == _AS_PACKED
                first = 0 if step is None else max(0, row_number(row) + step * (1 if packed else PAGE_ROWS))
                panel = packed_panel(look.packed(first)) if packed else rows_panel(look.rows(first, PAGE_ROWS))
            except (ConfigError, WorkerDied) as error:
                return [mistakes_panel(_lines(error)), note("Nothing can be shown."), gr.skip()]
            return [mistakes_panel([]), panel, str(first)]

        return show

    def first_page(self, asked: str, *paging: Any) -> list[Any]:
        """The rows that the address asks for; none without, so that merely looking in starts no process."""
        return self.page(None)(*paging) if asked else [gr.skip()] * 3

    def first_count(self, asked: str, *form: Any) -> list[Any]:
        """The statistics that go with them."""
        return self.count_small(*form) if asked else [gr.skip()] * 4

    def count_small(self, run: str, preset: str, *raw: Any) -> list[Any]:
        """Starts the statistics of data that is small enough to be counted unasked."""
        try:
            size = open_data(self._config(run, preset, raw)).rows(0, 1)["bytes"]
        except (ConfigError, WorkerDied):
            return [gr.skip(), "", statistics_panel(None), gr.Timer(active=False)]
        if size > COUNTED_AT_ONCE:
            large = note(f"{size:,} bytes are many; press Count everything. A later training profits from it.")
            return [gr.skip(), "", large, gr.Timer(active=False)]
        return self.start_count(run, preset, *raw)

    def start_count(self, run: str, preset: str, *raw: Any) -> list[Any]:
        """Starts the statistics, or joins those under way."""
        try:
            key = start_statistics(self._config(run, preset, raw))
        except ConfigError as error:
            return [mistakes_panel(error.mistakes), "", statistics_panel(None), gr.Timer(active=False)]
        return [gr.skip(), key, statistics_panel(statistics_job(key)), gr.Timer(active=True)]

    def tick(self, key: str) -> list[Any]:
        """Where the count stands; the timer rests when it is over."""
        job = statistics_job(key)
        return [statistics_panel(job), gr.Timer(active=job is not None and job.state in ("waiting", "running"))]

    def _filled(self, run: str, preset: str, source: Html, texts: dict[str, str], asked: bool = False) -> list[Any]:
        options = [gr.update(value=shown_value(one, texts[one.name])) for one in self.fields]
        return ["yes" if asked else "", run, preset, source, *options]

    def switch_preset(self, preset: str) -> list[Any]:
        """The preset's values."""
        try:
            return self._filled("", preset, Html(""), starting_values(preset or None))
        except ConfigError as error:
            raise gr.Error("\n".join(error.mistakes)) from None

    def drafted(self, draft: str, run: str, preset: str, *raw: Any) -> str:
        """The draft of this tab with the data that is shown; of a run's data, the preset stays the draft's."""
        shown = {one.name: value for one, value in zip(self.fields, raw, strict=True)}
        before = read_draft(draft) or Choices(FIRST_PRESET)
        try:
            return write_draft(with_data(before, None if run else preset or None, shown))
        except ConfigError as error:
            raise gr.Error("\n".join(error.mistakes)) from None

    def take_upload(self, path: str) -> str:
        """Puts an uploaded file where data may lie; returns its path."""
        try:
            return str(take_sent(Path(path), self.here.uploads))
        except ConfigError as error:
            raise gr.Error(str(error)) from None

    def prefill(self, draft: str, request: gr.Request) -> list[Any]:
        """Fills the form: `?run=ID` or `?preset=NAME` in the address, whose rows are shown at once; else the draft."""
        query = dict(request.query_params)
        try:
            if run := query.get("run"):
                config = data_config({}, None, run, self.here.runs_dir, self.here.roots, self.here.remote_code)
                source = note(Html(f"From the config of run {run_link(run)}."))
                return self._filled(run, "", source, {name: text_of(getattr(config, name)) for name in FIELDS}, True)
            if preset := query.get("preset"):
                return self._filled("", preset, Html(""), starting_values(preset), True)
        except ConfigError as error:
            return ["", gr.skip(), gr.skip(), alert_list(error.mistakes), *[gr.skip()] * len(self.fields)]
        if kept := read_draft(draft):
            return self._filled("", kept.preset or "", Html(""), {**starting_values(kept.preset), **kept.values})
        return [gr.skip()] * (4 + len(self.fields))  # what has been typed since the page was drawn stays


def _lines(error: ConfigError | WorkerDied) -> list[str]:
    return error.mistakes if isinstance(error, ConfigError) else str(error).splitlines()
