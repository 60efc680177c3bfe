"""Parts of the Train page: a component for every option, and the preview beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gradio as gr

from app.hardware import cpu_count
from app.launch.foreground import where
from app.launch.job import TrainJob
from app.runs.detail import checkpoints
from app.schedulers.slurm_options import SlurmOptions
from app.services.choices import GpuChoice, StrategyChoice
from app.services.data import open_data
from app.services.fields import COMMON
from app.services.form import DefaultGpus, Numbers, Preview
from app.services.learning_rates import learning_rates
from app.services.memory_check import known_verdict
from app.services.preset_families import PresetChoice, preset_families
from app.services.resume_form import ResumeForm
from app.services.rpc_client import WorkerDied
from trainers.config.byte_text import byte_text
from trainers.config.fields import TITLES, OptionField, choice_labels, fields
from trainers.config.labels import CHOICES
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import OWN_OPTIONS
from trainers.config.options import TrainConfig, optimizer_lines, precision_lines
from trainers.run import host_memory
from ui.pages.data_parts import rows_panel
from ui.parts import (
    Html,
    alert_list,
    element,
    join,
    key_values,
    link,
    note,
    number_text,
    run_link,
    sentence,
    unbroken,
)

STEP_FIELDS = {
    "model": ("model_name_or_path",),
    "data": ("dataset_name", "mix", "eval_dataset_name", "eval_share"),
    "method": ("method", "lora_r", "lora_alpha"),
}
"""Options shown in their own steps, above the common ones."""
HINTS = {
    "model_name_or_path": "Hub id or local folder",
    "dataset_name": "file, folder, glob or Hub id",
    "mix": "none, or a YAML file",
    "columns": "prompt=question",
}
PLAIN = gr.InputHTMLAttributes(autocomplete="off", autocorrect="off", autocapitalize="off", spellcheck=False)
_STEP_OPTIONS = {"objective", *OWN_OPTIONS, *(name for options in STEP_FIELDS.values() for name in options)}


def common_fields() -> list[OptionField]:
    """The options that are always visible."""
    return by_name([name for name in COMMON if name not in _STEP_OPTIONS])


def other_fields() -> dict[str, list[OptionField]]:
    """All other options, by the title of their section."""
    grouped: dict[str, list[OptionField]] = {}
    for option in fields():
        if option.name not in COMMON:
            grouped.setdefault(TITLES.get(option.section, option.section), []).append(option)
    return grouped


def by_name(names: Sequence[str]) -> list[OptionField]:
    """The fields of these options, in this order."""
    known = {option.name: option for option in fields()}
    return [known[name] for name in names]


def component_value(option: OptionField, text: str) -> str | bool:
    """The value to show in an option's component: a bool for a check box, blank for `none` in a text box."""
    if option.kind == "bool":
        return text == "true"
    return "" if option.optional and text == "none" and option.kind != "choice" else text


def component(option: OptionField, text: str) -> gr.components.Component:
    """The component of an option, with its help text."""
    limits = f" ({option.limits})" if option.limits and option.kind in ("int", "float") else ""
    settings: dict[str, Any] = {
        "label": option.label, "info": f"{option.help.removesuffix('.')}{limits}.",
        "value": component_value(option, text), "elem_id": f"opt-{option.name}", "elem_classes": ["ts-field"],
        "min_width": 190, "interactive": True,
    }  # fmt: skip
    if option.kind == "bool":
        return gr.Checkbox(**settings)
    if option.name == "method":
        return gr.Radio(choice_labels(option), **settings)
    if option.kind == "choice":
        return gr.Dropdown(choice_labels(option), filterable=False, **settings)
    hint = HINTS.get(option.name, "none" if option.optional else option.default or "")
    return gr.Textbox(max_lines=1, placeholder=hint, html_attributes=PLAIN, **settings)


def draft_js(names: Sequence[str], job_names: Sequence[str], ignored: Mapping[str, str]) -> str:
    """The script that saves the draft of the Train page whenever a field changes; see `ui/static/draft.js`.

    Args:
        names: the options, in the order of their components, which follow preset, strategy and devices.
        job_names: the names of `DevicesPart.inputs`, which follow the options.
        ignored: values set by the server, not by the user.
    """
    return (
        f"(preset, strategy, devices, ...values) => {{ const names = {json.dumps(names)}; "
        "const texts = values.slice(names.length); "
        f"const job = Object.fromEntries({json.dumps(job_names)}.map((name, index) => [name, texts[index]])); "
        f"tunesmithDraft.keep({{preset, strategy, devices, job}}, names, values, {json.dumps(ignored)}); }}"
    )


def resume_banner(form: ResumeForm) -> Html:
    """Says which run the form resumes, and from which step."""
    saved = checkpoints(form.run)
    start = f"from step {saved[0]['step']}" if saved else "from the start, as no checkpoint was saved"
    parts = ["Resuming ", run_link(form.run.id), f" {start}. Values changed here replace the run's settings."]
    return element("p", join(parts), class_="ts-alert ts-alert-info", role="status")


def start_banner(run_id: str) -> Html:
    """Says which run's result the form starts from."""
    parts = ["Starts from the result of ", run_link(run_id), ", in place of the base model below. "
             "Choose what to train for next, and the data for it."]  # fmt: skip
    return element("p", join(parts), class_="ts-alert ts-alert-info", role="status")


# -- the preview -----------------------------------------------------------------------------------------------------


def panel(preview: Preview, progress: str = "") -> Html:
    """Whether the run can start, its mistakes, and the derived numbers.

    Args:
        preview: the preview.
        progress: what is happening now; replaces whether the run can start.
    """
    mistakes = [_field_link(name, line) for name, lines in preview.error_lines().items() for line in lines]
    head: list[Html] = []
    if progress:
        head = [alert_list([progress], "info")]
    elif mistakes:
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "1 mistake"
        head = [element("p", f"{count} to fix before it can start", class_="ts-verdict ts-verdict-bad")]
    elif preview.job:
        head = [_verdict(preview.job, preview.slurm)]
    parts = [*head, alert_list(mistakes), alert_list(preview.warnings, "warning"), alert_list(preview.notes, "info")]
    if preview.numbers and preview.job:
        parts.append(key_values(numbers(preview.numbers, preview.job)))
    return element("div", join(parts), id="train-preview", data_errors=json.dumps(preview.error_lines()))


def _verdict(job: TrainJob, slurm: SlurmOptions | None) -> Html:
    """Whether the run can start; green only if it is known to fit. A model not counted yet is counted at launch."""
    if slurm is not None:
        nodes = f"{slurm.nodes} node{'s' * (slurm.nodes > 1)} of SLURM"
        gpus = f", {slurm.gpus_per_node} GPU{'s' * (slurm.gpus_per_node > 1)} each" if slurm.gpus_per_node else ""
        return element(
            "p", f"No mistakes: {job.strategy.name} on {nodes}{gpus}; memory is not checked", class_="ts-verdict"
        )
    launch, known = f"{job.strategy.name} on {where(job)}", known_verdict(job)
    if known is None or known.fits is None:
        memory = "memory is checked at launch" if known is None else "memory use cannot be estimated"
        return element("p", f"No mistakes: {launch}; {memory}", class_="ts-verdict")
    if known.fits:
        return element("p", f"Ready to start: {launch}", class_="ts-verdict ts-verdict-good")
    return element("p", known.line, class_="ts-verdict ts-verdict-bad")


def _field_link(name: str, line: str) -> Html:
    """A mistake as a button that jumps to its field."""
    if not name:
        return element("span", sentence(line))
    section = next((TITLES.get(option.section) for option in fields() if option.name == name), None)
    return element("button", line, type="button", class_="ts-jump", data_field=name, data_section=section)


def numbers(derived: Numbers, job: TrainJob) -> list[tuple[str, Any]]:
    """The derived numbers as labels and texts."""
    ranks, turns = derived.data_parallel_size, derived.accumulation_steps
    sharers = "process" if ranks == derived.world_size else "group"
    batch = f"{derived.global_batch_size:,} = {ranks} {sharers}{('es' if sharers == 'process' else 's') * (ranks > 1)}"
    batch += f" x {derived.micro_batch} at once" + (f" x {turns} times" if turns > 1 else "")
    packed = "" if job.config.packing else ", fewer where rows are shorter"
    rows: list[tuple[str, Any]] = [
        ("Strategy", _field_link("strategy", _strategy_title(job))),
        ("Rows per step", batch),
        ("Tokens per step", f"at most {derived.tokens_per_step:,}{packed}"),
        ("Length", _length(derived)),
    ]
    if derived.learning_rate != job.config.learning_rate:
        rows.append(("Learning rate", f"{number_text(derived.learning_rate)} after scaling"))
    rows += [("Precision", line) for line in precision_lines(job.config)]
    rows += [("Optimizer", line) for line in optimizer_lines(job.config)]
    return [*rows, ("Evaluation", _evaluation(job)), ("Run folder in", str(job.run.path.parent))]


def _strategy_title(job: TrainJob) -> str:
    """The strategy in words, of which a shipped one's file tells the first; its name for a file of one's own."""
    title, colon, _ = job.strategy.summary.partition(": ")
    return title if colon else job.strategy.name


def _evaluation(job: TrainJob) -> str:
    config = job.config
    if not config.has_evaluation():
        return "none"
    data = config.eval_dataset_name or f"{config.eval_share:g} of the training rows"
    return f"{data}, {f'every {config.eval_steps} steps' if config.eval_steps else 'at the end'}"


def _length(derived: Numbers) -> Any:
    if derived.epochs is None:
        return f"{derived.total_steps:,} steps"
    epochs = f"{derived.epochs:g} pass{'es' * (derived.epochs != 1)} over the data"
    if derived.total_steps:
        return f"{epochs}: {derived.total_steps:,} steps"
    return join([f"{epochs} (", link("data", "count its steps"), ")"])


def copied_text(name: str, text: str, file: str | None = None) -> Html:
    """A text block with a Copy button, and a Save button if `file` is given."""
    if not text:
        return note(f"{name}: shown once the mistakes are fixed.")
    buttons = [element("button", "Copy", type="button", class_="ts-small", data_copy=True, aria_label=f"Copy: {name}")]
    if file:
        buttons.append(element("button", "Save", type="button", class_="ts-small", data_save=file))
    head = element("div", join([element("h2", name), *buttons]), class_="ts-box-head")
    content = element(
        "pre",
        text if "\n" in text else unbroken(text),
        class_="ts-box-text",
        tabindex=0,
        role="region",
        aria_label=name,
    )
    return element("div", join([head, content]), class_="ts-box")


def batch_script(text: str) -> list[Html]:
    """The script that is submitted to SLURM; nothing for a run on this machine."""
    return [copied_text("Batch script", text, "slurm.sh")] if text else []


def strategy_note(choices: Sequence[StrategyChoice], name: str, current: Preview) -> Html:
    """Why the chosen strategy cannot run, or that it is a file; empty where its card says all.

    Args:
        choices: all shipped strategies.
        name: the chosen one; empty for the default.
        current: the preview of the form.
    """
    if not name:
        return Html("")
    chosen = next((choice for choice in choices if choice.name == name), None)
    if chosen is None:
        return note("An Accelerate YAML of your own.")
    mistakes = current.errors.get("strategy", [])
    reason = chosen.reason or next((str(replace(mistake, source="")) for mistake in mistakes), "")
    if not reason:
        return Html("")
    return element("p", join([element("strong", "Cannot run here: "), reason, "."]), class_="ts-note ts-unable")


def gpu_selection(default: DefaultGpus) -> dict[str, Any]:
    """The GPUs that are ticked, and the reason if not all free ones are."""
    reason = f" Default: {default.note}." if default.note else ""
    rule = "With none ticked, as many free ones as divide the global batch are used."
    return {"value": [str(index) for index in default.ids], "info": rule + reason}


def gpu_labels(choices: Sequence[GpuChoice]) -> list[tuple[str, str]]:
    """Labels and values for a list of GPUs."""
    return [(_gpu_label(gpu), str(gpu.index)) for gpu in choices]


def _gpu_label(gpu: GpuChoice) -> str:
    """A tile of four lines: which GPU, its name, its memory and use, and who has it."""
    free = f"{byte_text(gpu.free)} free of " if gpu.free is not None else ""
    foreign = "in use by other programs" if gpu.foreign else "free"
    holder = f"held by {gpu.holder}" if gpu.holder else foreign
    return f"GPU {gpu.index}\n{gpu.name}\n{free}{byte_text(gpu.memory)}, {gpu.busy}% busy\n{holder}"


def cpu_tile() -> str:
    """What stands in place of GPUs on a machine without any."""
    cores, total = cpu_count(), byte_text(host_memory.total())
    return f"No GPU here: the CPU has {cores} core{'s' * (cores > 1)} and {total} of memory."


# -- presets ---------------------------------------------------------------------------------------------------------


def presets_panel(gpus: Sequence[GpuChoice]) -> Html:
    """All presets by family and size, folded; each is a button that the browser passes on."""
    rows: list[Html] = []
    for family, models in preset_families(gpus).items():
        rows.append(element("tr", element("th", family, colspan=5, scope="rowgroup", class_="ts-family")))
        for model in models:
            size = f"{model.parameters / 1e9:.1f}B" if model.parameters else "tiny"
            buttons = [(preset.method, _preset_button(model.title, preset)) for preset in model.presets]
            cells = [
                element("td", join(button for method, button in buttons if method == column))
                for column in CHOICES["method"]
            ]
            title = element("th", model.title, scope="row")
            rows.append(element("tr", join([title, element("td", size, class_="ts-number"), *cells])))
    heads = join(element("th", name, scope="col") for name in ("Model", "Weights", *CHOICES["method"].values()))
    table = element("table", join([element("thead", element("tr", heads)), element("tbody", join(rows))]))
    lead = note("Memory on each GPU as the planner estimates it; a click fills in the form.")
    region = element("div", table, class_="ts-table", tabindex=0, role="region", aria_label="Presets by family")
    summary = element("summary", "All presets by family, with size and memory")
    return element("details", join([summary, lead, region]), class_="ts-fold", id="preset-table")


def _preset_button(title: str, preset: PresetChoice) -> Html:
    fits = {True: " fits", False: " does not fit", None: ""}[preset.fits]
    mark = element("span", fits, class_=f"ts-fit-{str(preset.fits).lower()}") if fits else ""
    objective = f"{preset.objective}: " if preset.objective else ""
    label = f"{title}, {CHOICES['method'][preset.method]}: {objective}{preset.memory}{fits}"
    return element(
        "button", join([objective, preset.memory, mark]), type="button", class_="ts-preset", data_preset=preset.name,
        aria_label=label,
    )  # fmt: skip


# -- learning rate and rows ------------------------------------------------------------------------------------------


def rate_curve(preview: Preview | None) -> Html:
    """The learning rate over the steps, as training computes it; its place is kept without one."""
    config = preview.job.config if preview and preview.job else None
    total = preview.numbers.total_steps if preview and preview.numbers else None
    rates = learning_rates(config, total) if config else []
    if not rates or not max(rates):
        reason = "is drawn once the number of steps is known" if config else "is drawn once the mistakes are fixed"
        reason = "is 0 at every step" if rates else reason
        return element("div", note(f"The learning rate {reason}."), class_="ts-curve")
    peak = max(rates)
    points = " ".join(f"{400 * at / (len(rates) - 1):.1f},{60 - 58 * rate / peak:.2f}" for at, rate in enumerate(rates))
    last = f"step {total:,}" if total else "the end"
    label = f"Learning rate: from {rates[0]:.3g} over a peak of {peak:.3g} to {rates[-1]:.3g} at {last}"
    line = element("polyline", points=points)
    drawing = element("svg", line, viewBox="0 0 400 62", preserveAspectRatio="none", role="img", aria_label=label)
    axis = join([element("span", "step 1" if total else "start"), element("span", last.removeprefix("the "))])
    head = join([element("b", "Learning rate"), element("span", f"peak {peak:.3g}")])
    return element("div", join([element("p", head), drawing, element("p", axis)]), class_="ts-curve")


def first_rows(config: TrainConfig) -> Iterator[Html]:
    """The first rows of the data with the trained text marked, and the format that was found."""
    yield note("Reading the data; the first time takes some seconds ...")
    try:
        page = open_data(config).rows(0, 3)
    except (ConfigError, WorkerDied) as error:
        yield alert_list(error.lines if isinstance(error, ConfigError) else str(error).splitlines())
        return
    head = note(f"Format found: {' and '.join(page['formats'])}.")
    yield join([head, rows_panel(page), note(link("/data", "All rows, lengths and mistakes"))])
