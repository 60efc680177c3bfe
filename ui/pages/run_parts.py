"""Fragments of the Run page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from app.diagnosis.advice import Change, Diagnosis, Evidence
from app.runs.profiles import SHARES
from trainers.config.byte_text import byte_text
from trainers.config.objectives import WATCHED
from ui.pages.run_machines import machines
from ui.parts import (
    Html,
    ago,
    alert_list,
    badge,
    byte_count,
    data_table,
    duration_text,
    element,
    join,
    link,
    meter,
    note,
    number_text,
    percent_text,
    section,
    sentence,
    text,
    title,
    unbroken,
    with_code,
)  # fmt: skip

_KINDS = {"failed": "error", "stopped": "warning", "done": "good"}
_PHASES = {
    "data": "waiting for data", "forward": "", "backward": "", "all-reduce": "", "step": "", "start": "",
    "export": "writing the model",
}  # fmt: skip
"""What a live run does, where that is more than its state says."""


def unknown_run(mistakes: list[str]) -> Html:
    """The content of the page if there is no such run."""
    all_runs = element("p", join(["See ", link("runs", "all runs"), "."]))
    return join([title("No such run"), alert_list(mistakes), element("div", all_runs, class_="ts-note")])


def headline(view: dict[str, Any], comparison: dict[str, str] | None = None, diagnosed: bool = False) -> Html:
    """Name, state, progress and current numbers.

    Args:
        view: from `app.runs.detail.run_view`.
        comparison: query of the Compare page for the run's sweep; None without one.
        diagnosed: whether cards below say the cause of a failure.
    """
    name = element("h1", join([view["id"], " ", badge(view["state"])]), class_="ts-run-name")
    step, total = view["step"], view["total_steps"]
    steps = f"{number_text(step)} of {number_text(total)} steps" if total else f"step {number_text(step)}"
    phase = _PHASES.get(view["phase"], view["phase"])
    steps = "not started yet" if not step and view["state"] == "queued" else f"{steps}, {phase}" if phase else steps
    bar = meter(view["progress"], "steps done", steps)
    parts = [name, _origin(view, comparison), bar, _facts(view), _cause_and_next(view, diagnosed), machines(view)]
    return join(parts)


def _origin(view: dict[str, Any], comparison: dict[str, str] | None) -> Html:
    """What the run trains with, and since when."""
    devices = f"GPU {', '.join(map(str, view['gpus']))}" if view["gpus"] else _cpus(view["world_size"])
    began = "queued" if view["state"] == "queued" else "started"
    parts = [
        f"{view['strategy']} on {devices}" if view["strategy"] else devices,
        view["machines"],
        f"attempt {view['attempt'] + 1}" if view["attempt"] else "",
        join([began, " ", ago(view["started_at"])]) if view["started_at"] else "",
        _membership(view["sweep"], comparison) if view["sweep"] else "",
        f"starts from {view['from_run']}" if view["from_run"] else "",
    ]
    return note(join(filter(None, parts), ", "))


def _membership(member: dict[str, Any], comparison: dict[str, str] | None) -> Html:
    """Which trial of which sweep the run is, with a link that compares it with the best of them."""
    if comparison is None:
        return join([f"trial {member['trial']} of {member['sweep']}, which is gone"])
    return join([f"trial {member['trial']} of ", link("compare", member["sweep"], **comparison)])


def _facts(view: dict[str, Any]) -> Html:
    measure = next((name for name in WATCHED if view[name] is not None), WATCHED[-1])
    facts = [
        ("Time left", duration_text(view["eta_s"])),
        (measure.capitalize(), number_text(view[measure])),
        (f"Evaluation {measure}", number_text(view[f"eval_{measure}"])),
        ("Tokens per second", number_text(view["tokens_per_second"])),
        ("Peak speed used (MFU)", percent_text(view["mfu"], 1)),
        ("Most memory", _most_memory(view["ranks"])),
        ("Tokens", number_text(view["tokens"])),
        ("Time trained", duration_text(view["elapsed_s"])),
    ]
    cells = [element("div", join([element("dt", name), element("dd", value)])) for name, value in facts if value != "-"]
    return element("dl", join(cells), class_="ts-facts") if cells else Html("")


def _most_memory(ranks: Sequence[dict[str, Any]]) -> str:
    """The most memory of a rank, and which one that is; a dash where none is known."""
    known = [(rank["memory_gib"], rank["rank"]) for rank in ranks if rank["memory_gib"] is not None]
    if not known:
        return "-"
    most, number = max(known)
    return f"{byte_text(most * 2**30)}, rank {number}" if len(ranks) > 1 else byte_text(most * 2**30)


def _cpus(processes: int | None) -> str:
    return "unknown devices" if processes is None else f"{processes} CPU process{'es' * (processes != 1)}"


def _cause_and_next(view: dict[str, Any], diagnosed: bool) -> Html:
    """The cause of the state, and what to do next."""
    has_cards = diagnosed and view["state"] == "failed"
    lines: list[Any] = [] if has_cards or not view["cause"] else [view["cause"]]
    if view["export_dir"]:
        chat = link("chat", "open it in Chat", run=view["id"])
        lines.append(join([f"The model is in {view['export_dir']}: ", chat]))
    elif view["state"] == "done" and view["checkpoints"]:
        chat = link("chat", "Chat with the model", run=view["id"])
        lines.append(join([chat, ", or export it with the button below."]))
    if view["next"] and view["state"] != "done":
        lines.append(_with_command(view["next"]))
    if view["bad_checkpoints"]:
        lines.append(f"Damaged checkpoints were set aside: {', '.join(view['bad_checkpoints'][:5])}")
    if has_cards:
        return join(map(note, lines))
    return alert_list(lines, _KINDS.get(view["state"], "info"))  # type: ignore[arg-type]


def _with_command(line: str) -> Html:
    """A sentence that may end in a command, which is set as code."""
    before, colon, command = line.partition(": tunesmith ")
    return join([before, ": ", element("code", unbroken(f"tunesmith {command}"))]) if colon else text(line)


def diagnosis_cards(diagnoses: Sequence[Diagnosis], state: str, cause: str = "") -> Html:
    """A card per cause: the sentence, what shows it, what may help.

    Args:
        diagnoses: the causes.
        state: the run's state; a remedy of a run that is `done` takes a new one.
        cause: the recorded cause, which shows why a run failed; of another run it stands above the cards.
    """
    cards, failed = [], state == "failed"
    earlier = [] if failed else [cause]
    for diagnosis in diagnoses:
        heading = diagnosis.cause if diagnosis.rule or not failed else cause or diagnosis.cause
        earlier.append(heading)
        recorded = [cause] if failed and diagnosis is diagnoses[0] else []
        lines = _untold([*recorded, *map(_evidence_text, diagnosis.evidence)], earlier)
        evidence = join(element("li", element("code", line)) for line in lines)
        changes = join(
            element("li", join([with_code(sentence(change.text)), " ", element("code", unbroken(change.flags))]),
                    value=change.number)
            for change in diagnosis.remedies
        )  # fmt: skip
        parts = [
            element("h3", sentence(heading)),
            element("ul", evidence, class_="ts-evidence", aria_label="What shows it") if lines else "",
            element("p", "This may help, in a new run:" if state == "done" else "This may help:") if changes else "",
            element("ol", changes) if changes else "",
            note(diagnosis.help) if diagnosis.help else "",
        ]
        cards.append(element("article", join(parts), class_="ts-diagnosis"))
    name = "Why it failed" if failed else "Diagnosis"
    body = element("div", join(cards), role="alert" if failed else None, class_="ts-failure" if failed else None)
    return section(name, body) if cards else Html("")


def _untold(lines: Iterable[str], earlier: list[str]) -> list[str]:
    """The lines that say more than what is told before them; they are told then too."""
    untold = []
    for line in lines:
        if line and not any(_message(line) in _message(other) for other in earlier):
            untold.append(line)
            earlier.append(line)
    return untold


def _message(line: str) -> str:
    """A line without its writer and the full stops of a sentence, or of a text that was shortened."""
    return re.sub(r"^rank \d+: ", "", line).rstrip(".")


def remedy_label(change: Change, state: str) -> str:
    """What the button of a remedy says: what it does, without what that leads to."""
    verb = "Train again" if state == "done" else "Resume"
    return f"{verb}: {re.split('[;:,] ', change.text)[0]}"


def _evidence_text(evidence: Evidence) -> str:
    writer = "" if evidence.rank is None else f"rank {evidence.rank}: "
    return evidence.text if evidence.text.startswith(writer) else f"{writer}{evidence.text}"


def remedies_of(diagnoses: Sequence[Diagnosis]) -> list[Change]:
    """The remedies of all causes, in the order of their numbers."""
    return [change for diagnosis in diagnoses for change in diagnosis.remedies]


def details(view: dict[str, Any], files: dict[str, str]) -> Html:
    """Checkpoints and settings.

    Args:
        view: from `app.runs.detail.run_view`.
        files: from `app.runs.detail.run_files`.
    """
    rows = [
        [row["step"], join([row["name"], element("strong", " best") if row["best"] else ""]),
         link("chat", "Chat", run=view["id"], checkpoint=row["name"]), byte_count(row["bytes"]), ago(row["saved_at"])]
        for row in view["checkpoints"]
    ]  # fmt: skip
    table = data_table(["Step", "Name", "Use", "Size", "Saved"], rows, "Checkpoints", numeric=(0, 3),
                       empty=_no_checkpoint(view["actions"]), sort=True)  # fmt: skip
    names = {"config": "config.yaml: every option", "accelerate": "accelerate.yaml: the strategy",
             "command": "command.txt: runs the same config again, from a terminal"}  # fmt: skip
    texts = [
        element("details", join([
            element("summary", names[name]),
            element("pre", content, class_="ts-file", tabindex=0, role="region", aria_label=name),
        ]))
        for name, content in files.items() if content
    ]  # fmt: skip
    folder = element("p", join(["Folder: ", element("code", view["run_dir"])]), class_="ts-note")
    return join([section("Checkpoints", table), _profile(view["profiles"]),
                 section("Settings", join([folder, *texts]))])  # fmt: skip


def _no_checkpoint(actions: Sequence[str]) -> str:
    if "save" in actions:
        return "None yet. Save now, above, writes one after the current step."
    if "resume" in actions:
        return "None was saved, so Resume starts from the first step."
    return "None yet."


def _profile(profiles: list[dict[str, Any]]) -> Html:
    """Where the time of the profiled steps went, by rank, and the operators that took most of it on the first one."""
    if not profiles:
        return Html("")
    first = profiles[0]
    steps = f"Steps {first['first_step']} to {first['first_step'] + first['steps'] - 1}"
    rows = [[profile["rank"], *(percent_text(profile["shares"][name]) for name in SHARES)] for profile in profiles]
    shares = data_table(["Rank", *(label.capitalize() for label in SHARES.values())], rows,
                        "Shares of the time", numeric=range(len(SHARES) + 1), sort=True)  # fmt: skip
    operators = [[each["name"], f"{each['calls']:,}", f"{each['seconds']:.3f} s", percent_text(each["share"])]
                 for each in first["operators"]]  # fmt: skip
    table = data_table(["Operator", "Calls", "Time", "Share"], operators, "Operators", numeric=(1, 2, 3), sort=True)
    opened = element("details", join([element("summary", f"Operators that took most, on rank {first['rank']}"), table]))
    trace = note(join(["Every operator: open ", element("code", first["trace"]), " in https://ui.perfetto.dev"]))
    return section("Profile", join([note(f"{steps}: where the time went."), shares, opened, trace]))
