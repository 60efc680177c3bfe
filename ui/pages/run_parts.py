"""Fragments of the Run page."""

from __future__ import annotations

from typing import Any

from ui.parts import (
    Html,
    ago,
    alert_list,
    badge,
    byte_text,
    data_table,
    duration_text,
    element,
    join,
    link,
    meter,
    number_text,
    percent_text,
    section,
    title,
)  # fmt: skip

_KINDS = {"failed": "error", "stopped": "warning", "done": "good"}
_DOING = {
    "data": "waiting for data", "forward": "training", "backward": "training", "all-reduce": "training",
    "step": "training", "start": "starting", "export": "writing the model",
}  # fmt: skip


def unknown(mistakes: list[str]) -> Html:
    """In place of a run that is not there."""
    way = element("p", join(["See ", link("runs", "all runs"), "."]))
    return join([title("No such run"), alert_list(mistakes), element("div", way, class_="ts-note")])


def headline(seen: dict[str, Any]) -> Html:
    """Name, state, progress and the numbers of now.

    Args:
        seen: from `app.runs.detail.run_view`.
    """
    name = element("h1", join([seen["id"], " ", badge(seen["state"])]), class_="ts-run-name")
    step, total = seen["step"], seen["total_steps"]
    steps = f"{number_text(step)} of {number_text(total)} steps" if total else f"step {number_text(step)}"
    bar = meter(seen["progress"], "steps done", steps)
    return join([name, bar, _facts(seen), _ended(seen)])


def _facts(seen: dict[str, Any]) -> Html:
    devices = f"GPU {', '.join(map(str, seen['gpus']))}" if seen["gpus"] else _cpus(seen["world_size"])
    phase = _DOING.get(seen["phase"], seen["phase"])
    facts = [
        ("Phase", phase or seen["state"]),
        ("Time left", duration_text(seen["eta_s"]) if seen["eta_s"] is not None else None),
        ("Loss", number_text(seen["loss"])),
        ("Evaluation loss", number_text(seen["eval_loss"]) if seen["eval_loss"] is not None else None),
        ("Tokens per second", number_text(seen["tokens_per_second"])),
        ("MFU", percent_text(seen["mfu"], 1) if seen["mfu"] is not None else None),
        ("Tokens", number_text(seen["tokens"])),
        ("Time trained", duration_text(seen["elapsed_s"])),
        ("Strategy", f"{seen['strategy'] or '-'}, {devices}"),
        ("Queue", f"number {seen['queue_place']}" if seen["queue_place"] else None),
        ("Attempt", str(seen["attempt"] + 1) if seen["attempt"] else None),
        ("Started", ago(seen["started_at"])),
    ]
    cells = [element("div", join([element("dt", name), element("dd", value)])) for name, value in facts if value]
    return join([element("dl", join(cells), class_="ts-facts"), _ranks(seen["ranks"])])


def _cpus(processes: int | None) -> str:
    return "devices unknown" if processes is None else f"{processes} CPU process{'es' * (processes != 1)}"


def _ranks(ranks: list[dict[str, Any]]) -> Html:
    """Memory of each rank; of many the first ones."""
    known = [rank for rank in ranks if rank["memory_gib"] is not None]
    if not known:
        return Html("")
    words = [f"rank {rank['rank']}: {rank['memory_gib']:.2f} GiB" for rank in known[:16]]
    more = [f"and {len(known) - 16} more, at most {max(rank['memory_gib'] for rank in known):.2f} GiB"]
    shown = words + (more if len(known) > 16 else [])
    return element("p", join(["Memory: ", " · ".join(shown)]), class_="ts-note")


def _ended(seen: dict[str, Any]) -> Html:
    """Why it is as it is, and the next thing to do."""
    lines = [line for line in (seen["cause"], seen["next"]) if line]
    if seen["export_dir"]:
        chat = link("chat", "open it in Chat", run=seen["id"])
        lines = [line for line in lines if line != seen["next"] or seen["state"] != "done"]
        lines.append(join([f"The model is in {seen['export_dir']}: ", chat]))
    if seen["bad_checkpoints"]:
        lines.append(f"damaged checkpoints were set aside: {', '.join(seen['bad_checkpoints'][:5])}")
    return alert_list(lines, _KINDS.get(seen["state"], "info"))  # type: ignore[arg-type]


def details(seen: dict[str, Any], files: dict[str, str]) -> Html:
    """Checkpoints and settings.

    Args:
        seen: from `app.runs.detail.run_view`.
        files: from `app.runs.detail.run_files`.
    """
    rows = [
        [one["step"], join([one["name"], element("strong", " best") if one["best"] else ""]), byte_text(one["bytes"]),
         ago(one["saved_at"]), link("chat", "Chat", run=seen["id"], checkpoint=one["name"])]
        for one in seen["checkpoints"]
    ]  # fmt: skip
    table = data_table(["Step", "Name", "Size", "Saved", "Use"], rows, "Checkpoints", numeric=(0, 2),
                       empty="No checkpoint is saved yet.")  # fmt: skip
    names = {"config": "config.yaml: every option", "accelerate": "accelerate.yaml: the strategy",
             "command": "command.txt: the same run again, from a terminal"}  # fmt: skip
    texts = [
        element("details", join([
            element("summary", names[name]),
            element("pre", content, class_="ts-file", tabindex=0, role="region", aria_label=name),
        ]))
        for name, content in files.items() if content
    ]  # fmt: skip
    where = element("p", join(["Folder: ", element("code", seen["run_dir"])]), class_="ts-note")
    return join([section("Checkpoints", table), section("Settings", join([where, *texts]))])
