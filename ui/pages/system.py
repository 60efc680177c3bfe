"""The System page: the machine's GPUs, cores, memory and disk, live, who holds what, and the versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from app.services.system import machine
from ui.context import Here
from ui.parts import (
    Html,
    alert_list,
    byte_text,
    data_table,
    element,
    join,
    key_values,
    meter,
    note,
    percent_text,
    run_link,
    section,
    text,
    title,
)

_EVERY = 2.0
"""Seconds between two looks."""


def build(here: Here) -> None:
    """Lays out the page."""

    def look() -> str:
        return picture(machine(here.runs_dir))

    gr.HTML(title("System", "What this machine has, what is in use, and who holds it."))
    shown = gr.HTML(element("p", "Looking…", class_="ts-note"), apply_default_css=False)
    gr.on(None, look, None, shown, show_progress="hidden", queue=False, api_visibility="private")
    gr.Timer(_EVERY).tick(look, None, shown, show_progress="hidden", queue=False, api_visibility="private")


def picture(found: dict[str, Any]) -> Html:
    """What `app.services.system.machine` returns, as HTML."""
    columns = [
        section("CPU", _cpu(found)),
        section("Memory and disk", _memory(found)),
        section("Versions", key_values((name, version or "none") for name, version in found["versions"].items())),
    ]
    locks = alert_list([found["lock_error"]] if found["lock_error"] else [], "warning")
    return join([locks, section("GPUs", _gpus(found["gpus"])), element("div", join(columns), class_="ts-columns")])


def _gpus(gpus: list[dict[str, Any]]) -> Html:
    if not gpus:
        return note("No NVIDIA GPU is visible here. Runs train on the CPU, each process in a CPU slot.")
    headers = ["GPU", "Name", "In use", "Memory", "Temperature", "Power", "Held by", "UUID"]
    rows = [
        [
            gpu["index"],
            gpu["name"],
            meter(_share(gpu["percent"], 100), f"Use of GPU {gpu['index']}"),
            _amount(gpu["memory_used"], gpu["memory_total"], f"Memory of GPU {gpu['index']}"),
            None if gpu["temperature"] is None else f"{gpu['temperature']} °C",
            _power(gpu),
            _holder(gpu),
            element("span", gpu["uuid"][:12], title=gpu["uuid"]),
        ]
        for gpu in gpus
    ]
    return data_table(headers, rows, "GPUs", numeric=(4, 5))


def _cpu(found: dict[str, Any]) -> Html:
    cpu, slots = found["cpu"], found["cpu_slots"]
    cores = [
        meter(share / 100, f"Use of core {number}", f"{number}: {percent_text(share / 100)}")
        for number, share in enumerate(cpu["per_core"])
    ]
    held = [slot for slot in slots if slot["held_by"]]
    names = join(dict.fromkeys(_holder(slot) for slot in held), ", ")
    values = {
        "Processor": cpu["name"],
        "All cores": meter(cpu["percent"] / 100, "Use of all cores"),
        "Load": ", ".join(f"{load:.2f}" for load in cpu["load"]),
        "CPU slots": f"{len(held)} of {len(slots)} held",
        **({"Held by": names} if held else {}),
    }
    return join([key_values(values), element("div", join(cores), class_="ts-grid")])


def _memory(found: dict[str, Any]) -> Html:
    memory, disk = found["memory"], found["disk"]
    return key_values(
        {
            "Memory": _amount(memory["used"], memory["total"], "Memory"),
            "Disk of the runs": _amount(disk["used"], disk["total"], "Disk"),
            "Runs folder": str(Path(disk["path"])),
        }
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _amount(used: int | None, total: int | None, label: str) -> Html:
    return meter(_share(used, total), label, f"{byte_text(used)} of {byte_text(total)}")


def _power(gpu: dict[str, Any]) -> str | None:
    if gpu["power"] is None:
        return None
    return f"{gpu['power']:.0f} W" + (f" of {gpu['power_limit']:.0f} W" if gpu["power_limit"] else "")


def _holder(slot: dict[str, Any]) -> Html:
    """Who holds it: a link where that is a run."""
    name = slot["held_by"]
    if not name:
        return Html("free")
    return run_link(str(name)) if slot["run_dir"] else text(name)
