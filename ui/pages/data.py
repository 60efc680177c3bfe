"""The Data page: shows what will be trained, without using a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from app.services.data import (
    AUTO_COUNT_BYTES,
    DEFAULT_THRESHOLD,
    FIELDS,
    LEAST_THRESHOLD,
    cancel_job,
    data_config,
    data_job,
    open_data,
    row_number,
    similarity,
    start_comparison,
    start_statistics,
)
from app.services.draft import read_draft, with_data, write_draft
from app.services.fields import as_texts
from app.services.form import Choices
from app.services.rpc_client import WorkerDied
from app.services.starting_values import starting_values
from app.services.uploads import EXTENSIONS, store_upload
from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.presets import find_preset, preset_names
from ui.context import ServerContext
from ui.pages.data_parts import comparison_panel, mistakes_panel, packed_panel, rows_panel, statistics_panel
from ui.pages.train_parts import PLAIN, by_name, component, component_value
from ui.parts import Html, alert_list, note, run_link, title

FIRST_PRESET = "tiny-lora"
PAGE_ROWS = 10
SAMPLED = 2000
"""Documents whose language is told."""
_AS_READ, _AS_PACKED = "rows as read", "rows of the batches"
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}
_FIELD_NAMES = json.dumps(FIELDS)
_WITH_DRAFT = "(draft, ...form) => [tunesmithDraft.all(), ...form]"
_KEEP_IF_SHARED = "(draft) => { if (!location.search) tunesmithDraft.replace(draft); }"
_GO_TO_TRAIN = "(draft) => { if (draft) { tunesmithDraft.replace(draft); location.assign('./'); } }"
_QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
_LISTENER: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private", "trigger_mode": "once"}


def build(context: ServerContext) -> None:
    """Lays out the page."""
    gr.HTML(title("Data", "See what will be trained: rows, trained tokens, lengths and bad rows. No GPU is used."))
    page = _Page(context)
    page.lay_out()
    page.connect()


class _Page:
    """The components of the page and their event handlers.

    Args:
        context: the folders of the server.
    """

    def __init__(self, context: ServerContext):
        self.context = context
        self.fields = by_name(FIELDS)

    def lay_out(self) -> None:
        """Lays out the form, the rows and the statistics."""
        first = starting_values(FIRST_PRESET)
        with gr.Row(elem_classes=["ts-fields"]):
            self.preset = gr.Dropdown(
                [("none", ""), *((name, name) for name in preset_names())], value=FIRST_PRESET, label="Preset",
                info="Sets the options not shown here.", elem_id="opt-preset",
                elem_classes=["ts-field"], min_width=190, num_choices_shown=1000,
            )  # fmt: skip
            self.options = [component(field, first[field.name]) for field in self.fields]
        self.run = gr.Textbox("", visible=False, label="run")
        self.key = gr.Textbox("", visible=False, label="count")
        self.auto_show = gr.Textbox("", visible=False, label="requested in the URL")
        self.draft = gr.Textbox("", visible=False, label="draft of this tab")
        self.source = gr.HTML("", elem_id="data-source", padding=False, apply_default_css=False)
        with gr.Row():
            self.show = gr.Button(
                "Show rows", variant="primary", elem_id="data-show", size="md", scale=0, min_width=160
            )
            self.upload = gr.UploadButton(
                "Upload data", file_types=list(EXTENSIONS), elem_id="upload-data", size="md", scale=0, min_width=160
            )
            self.train = gr.Button("Train on this", elem_id="data-train", size="md", scale=0, min_width=160)
        self.mistakes = gr.HTML(mistakes_panel([]), elem_id="data-mistakes", padding=False, apply_default_css=False)
        with gr.Row(elem_id="data-columns"):
            with gr.Column(scale=3, min_width=300):
                self._lay_out_rows()
            with gr.Column(scale=2, min_width=300):
                gr.HTML("<h2>Statistics</h2>", padding=False, apply_default_css=False)
                with gr.Row():
                    self.count = gr.Button("Count everything", elem_id="data-count", size="md", min_width=190, scale=0)
                    self.cancel = gr.Button(
                        "Stop counting", elem_id="data-cancel", size="md", min_width=150, scale=0, visible=False
                    )
                self.languages = gr.Checkbox(
                    False, label=f"Also tell the languages of {SAMPLED:,} documents; takes some seconds",
                    elem_id="data-languages", container=False,
                )  # fmt: skip
                self.statistics = gr.HTML(
                    statistics_panel(None), elem_id="data-statistics", padding=False, apply_default_css=False
                )
                self._lay_out_comparison()
        self.timer = gr.Timer(1.0, active=False)

    def _lay_out_comparison(self) -> None:
        gr.HTML("<h2>Near-duplicates</h2>", padding=False, apply_default_css=False)
        with gr.Row(elem_classes=["ts-fields"]):
            common: dict[str, Any] = {"max_lines": 1, "html_attributes": PLAIN, "elem_classes": ["ts-field"],
                                      "interactive": True, "min_width": 190}  # fmt: skip
            self.threshold = gr.Textbox(
                str(DEFAULT_THRESHOLD), label="Alike from", elem_id="opt-near_duplicates", **common,
                info=f"{LEAST_THRESHOLD} to 1: the share of runs of three words that both rows must have.",
            )  # fmt: skip
            self.against = gr.Textbox(
                "", label="Other data", elem_id="opt-against", placeholder="none", **common,
                info="A file or Hub id, such as a benchmark: which rows are in it?",
            )  # fmt: skip
        with gr.Row():
            self.compare = gr.Button("Find near-duplicates", elem_id="data-compare", size="md", min_width=190, scale=0)
            self.stop_comparing = gr.Button(
                "Stop comparing", elem_id="data-compare-cancel", size="md", min_width=150, scale=0, visible=False
            )
        self.comparison = gr.HTML(
            comparison_panel(None), elem_id="data-comparison", padding=False, apply_default_css=False
        )
        self.compared = gr.Textbox("", visible=False, label="comparison")
        self.compare_timer = gr.Timer(1.0, active=False)

    def _lay_out_rows(self) -> None:
        gr.HTML("<h2>Rows</h2>", padding=False, apply_default_css=False)
        self.view = gr.Radio(
            [_AS_READ, _AS_PACKED], value=_AS_READ, label="View", elem_id="data-view",
            info="A batch holds rows that are packed together, if packing is on; all data is counted to show them.",
        )  # fmt: skip
        with gr.Row(elem_id="data-pager", visible=False) as self.pager:
            self.row = gr.Textbox("0", label="First row", max_lines=1, elem_id="data-row", scale=0, min_width=160)
            self.previous = gr.Button("Previous", elem_id="data-previous", size="md", min_width=110, scale=0)
            self.next = gr.Button("Next", elem_id="data-next", size="md", min_width=110, scale=0)
        self.rows = gr.HTML(
            note("Choose data and press Show rows; the first time takes some seconds."), elem_id="data-rows",
            padding=False, apply_default_css=False,
        )  # fmt: skip

    def connect(self) -> None:
        """Connects the events of the page."""
        form = [self.run, self.preset, *self.options]
        paging = [self.view, self.row, *form]
        row_outputs = [self.mistakes, self.rows, self.row, self.pager]
        count_outputs = [self.mistakes, self.key, self.statistics, self.timer, self.cancel]
        form_outputs = [self.auto_show, self.run, self.preset, self.source, *self.options]
        count_event = {"fn": self.count_small, "inputs": form, "outputs": count_outputs, **_QUICK}
        gr.on([self.show.click, self.row.submit], self.show_page(0), paging, row_outputs, **_LISTENER).then(
            **count_event
        )
        self.view.input(self.show_page(None), paging, row_outputs, **_LISTENER)
        self.previous.click(self.show_page(-1), paging, row_outputs, **_LISTENER)
        self.next.click(self.show_page(1), paging, row_outputs, **_LISTENER)
        self.count.click(self.count_everything, [self.languages, *form], count_outputs, **_QUICK)
        self.cancel.click(cancel_job, self.key, None, **_QUICK)
        following = [self.comparison, self.compare_timer, self.stop_comparing]
        self.compare.click(self.start_comparing, [self.threshold, self.against, *form], [self.compared, *following],
                           **_QUICK)  # fmt: skip
        self.stop_comparing.click(cancel_job, self.compared, None, **_QUICK)
        self.compare_timer.tick(self.look_at_comparison, self.compared, following, **_QUICK)
        self.timer.tick(self.tick, self.key, [self.statistics, self.timer, self.cancel], **_QUICK)
        self.preset.input(self.switch_preset, self.preset, form_outputs, **_QUICK).then(
            self.update_draft, [self.draft, *form], self.draft, js=_WITH_DRAFT, **_QUICK
        ).then(None, self.draft, None, js=_KEEP_IF_SHARED, **_HIDDEN)
        self.train.click(self.update_draft, [self.draft, *form], self.draft, js=_WITH_DRAFT, **_QUICK).then(
            None, self.draft, None, js=_GO_TO_TRAIN, **_HIDDEN
        )
        keep = f"if (!location.search) tunesmithDraft.keep({{preset}}, {_FIELD_NAMES}, values);"
        keep = f"(preset, ...values) => {{ {keep} }}"
        gr.on([option.change for option in self.options], None, [self.preset, *self.options], None, js=keep, **_HIDDEN)
        self.upload.upload(self.take_upload, self.upload, self.options[FIELDS.index("dataset_name")], **_LISTENER)
        dataset, mix = (self.options[FIELDS.index(name)] for name in ("dataset_name", "mix"))
        mix.change(self.follow_mix, [self.preset, mix, dataset], dataset, **_QUICK)
        read = "() => [tunesmithDraft.read()]"
        loaded = Context.root_block.load(self.prefill, self.draft, form_outputs, js=read, **_QUICK)
        loaded.then(None, None, None, js="() => tunesmithDraft.ready()", **_HIDDEN)
        loaded.then(self.first_page, [self.auto_show, *paging], row_outputs, **_LISTENER).then(
            self.first_count, [self.auto_show, *form], count_outputs, **_QUICK
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def _config(self, run: str, preset: str, raw: Sequence[Any], more: Mapping[str, Any] | None = None) -> TrainConfig:
        values = {field.name: value for field, value in zip(self.fields, raw, strict=True)} | dict(more or {})
        base = None if run else preset or None
        return data_config(
            values, base, run or None, self.context.runs_dir, self.context.roots, self.context.remote_code
        )

    def show_page(self, step: int | None) -> Callable[..., list[Any]]:
        """A handler that moves by `step` pages and shows the rows there; None goes to the first row."""

        def show(view: str, row: object, run: str, preset: str, *raw: Any) -> list[Any]:
            try:
                data = open_data(self._config(run, preset, raw))
                packed = view == _AS_PACKED
                first = 0 if step is None else max(0, row_number(row) + step * (1 if packed else PAGE_ROWS))
                panel = packed_panel(data.packed(first)) if packed else rows_panel(data.rows(first, PAGE_ROWS))
            except (ConfigError, WorkerDied) as error:
                mend = note("Change what is marked above, then press Show rows.")
                return [mistakes_panel(_mistakes(error)), mend, gr.skip(), gr.update(visible=False)]
            return [mistakes_panel([]), panel, str(first), gr.update(visible=True)]

        return show

    def first_page(self, auto_show: str, *paging: Any) -> list[Any]:
        """Shows the rows requested in the URL; without a request, opening the page starts no process."""
        return self.show_page(None)(*paging) if auto_show else [gr.skip()] * 4

    def first_count(self, auto_show: str, *form: Any) -> list[Any]:
        """Starts the statistics for `first_page`."""
        return self.count_small(*form) if auto_show else [gr.skip()] * 5

    def count_small(self, run: str, preset: str, *raw: Any) -> list[Any]:
        """Starts the statistics of data that is small enough to be counted automatically."""
        try:
            size = open_data(self._config(run, preset, raw)).rows(0, 1)["bytes"]
        except (ConfigError, WorkerDied):
            return [gr.skip(), "", statistics_panel(None), *_counting(False)]
        if size > AUTO_COUNT_BYTES:
            large = note(f"The data set is large ({size:,} bytes): press Count everything. Training reuses the result.")
            return [gr.skip(), "", large, *_counting(False)]
        return self.start_count(run, preset, *raw)

    def count_everything(self, languages: bool, *form: Any) -> list[Any]:
        """Starts the statistics of data of any size, with its languages if they are wanted."""
        return self.start_count(*form, languages=SAMPLED if languages else 0)

    def start_count(self, run: str, preset: str, *raw: Any, languages: int = 0) -> list[Any]:
        """Starts the statistics, or joins a running count."""
        try:
            key = start_statistics(self._config(run, preset, raw), languages)
        except ConfigError as error:
            return [mistakes_panel(error.mistakes), "", statistics_panel(None), *_counting(False)]
        return [gr.skip(), key, statistics_panel(data_job(key)), *_counting(True)]

    def tick(self, key: str) -> list[Any]:
        """Updates the count; stops the timer when it is over."""
        job = data_job(key)
        return [statistics_panel(job), *_counting(job is not None and job.state in ("waiting", "running"))]

    def start_comparing(self, threshold: object, against: object, run: str, preset: str, *raw: Any) -> list[Any]:
        """Starts the search for near-duplicates, or joins a running one."""
        try:
            mistakes = Mistakes()
            value, other = similarity(threshold, mistakes), None
            mistakes.refuse()
            config, name = self._config(run, preset, raw), as_texts({"eval_dataset_name": against})["eval_dataset_name"]
            if name.strip():
                other = self._config(run, preset, raw, {"eval_dataset_name": name.strip(), "eval_share": "0"})
                other = other.model_copy(update={"max_eval_samples": None})
            key = start_comparison(config, value, other)
        except ConfigError as error:
            return ["", alert_list(error.lines), *_counting(False)]
        return [key, comparison_panel(data_job(key)), *_counting(True)]

    def look_at_comparison(self, key: str) -> list[Any]:
        """Updates the search; stops the timer when it is over."""
        job = data_job(key)
        return [comparison_panel(job), *_counting(job is not None and job.state in ("waiting", "running"))]

    def _fill(self, run: str, preset: str, source: Html, texts: dict[str, str], auto_show: bool = False) -> list[Any]:
        options = [gr.update(value=component_value(field, texts[field.name])) for field in self.fields]
        return ["yes" if auto_show else "", run, preset, source, *options]

    def switch_preset(self, preset: str) -> list[Any]:
        """Fills in the preset's values."""
        try:
            return self._fill("", preset, Html(""), starting_values(preset or None))
        except ConfigError as error:
            raise gr.Error("\n".join(error.lines)) from None

    def update_draft(self, draft: str, run: str, preset: str, *raw: Any) -> str:
        """The draft of this tab, updated with this page's data options; for a run's data, it keeps its preset."""
        form_values = {field.name: value for field, value in zip(self.fields, raw, strict=True)}
        before = read_draft(draft) or Choices(FIRST_PRESET)
        try:
            return write_draft(with_data(before, None if run else preset or None, form_values))
        except ConfigError as error:
            raise gr.Error("\n".join(error.lines)) from None

    def follow_mix(self, preset: Any, mix: Any, dataset: Any) -> Any:
        """The field of the training data: the preset's own is left out beside a mix, and comes back without one."""
        try:
            own = starting_values(preset if isinstance(preset, str) and preset else None)["dataset_name"]
        except ConfigError:
            own = ""
        if own in ("", "none"):
            return gr.skip()
        has_mix = isinstance(mix, str) and mix.strip() not in ("", "none")
        if has_mix and dataset == own:
            return ""
        return own if not has_mix and not dataset else gr.skip()

    def take_upload(self, path: str) -> str:
        """Stores an uploaded file in the uploads folder; returns its path."""
        try:
            return str(store_upload(Path(path), self.context.uploads))
        except ConfigError as error:
            raise gr.Error(str(error)) from None

    def prefill(self, draft: str, request: gr.Request) -> list[Any]:
        """Fills the form from `?run=ID` or `?preset=NAME` in the URL and shows their rows, or from the draft."""
        query = dict(request.query_params)
        try:
            if run := query.get("run"):
                config = data_config({}, None, run, self.context.runs_dir, self.context.roots, self.context.remote_code)
                source = note(Html(f"From the config of run {run_link(run)}."))
                return self._fill(run, "", source, {name: text_of(getattr(config, name)) for name in FIELDS}, True)
            if query.get("preset"):
                preset = find_preset(query["preset"]).name
                return self._fill("", preset, Html(""), starting_values(preset), True)
        except ConfigError as error:
            return ["", gr.skip(), gr.skip(), alert_list(error.lines), *[gr.skip()] * len(self.fields)]
        if saved := read_draft(draft):
            return self._fill("", saved.preset or "", Html(""), {**starting_values(saved.preset), **saved.values})
        return [gr.skip()] * (4 + len(self.fields))  # keep what was typed since the page was rendered


def _counting(active: bool) -> list[Any]:
    """The timer and the button that go with a count."""
    return [gr.Timer(active=active), gr.update(visible=active)]


def _mistakes(error: ConfigError | WorkerDied) -> list[Mistake]:
    return (error if isinstance(error, ConfigError) else ConfigError(str(error).splitlines())).mistakes
