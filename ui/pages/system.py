"""The System page: live use of GPUs, cores, memory and disk, who holds them, versions, and a check of it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from app.services.doctor import Doctor
from app.services.system import machine
from trainers.config.byte_text import byte_text
from ui.context import ServerContext
from ui.parts import (
    Html,
    alert_list,
    data_table,
    element,
    join,
    key_values,
    loading,
    meter,
    note,
    percent_text,
    run_link,
    section,
    text,
    title,
)

_POLL_SECONDS = 2.0
"""Seconds between two refreshes."""
_RESULTS = {True: "ok", False: "fault", None: "not checked here"}


def build(context: ServerContext) -> None:
    """Lays out the page."""

    def refresh() -> str:
        return render(machine(context.runs_dir))

    gr.HTML(title("System", "This machine's hardware, how much of it is in use, and by which run."))
    html = gr.HTML(loading(), apply_default_css=False)
    gr.on(None, refresh, None, html, show_progress="hidden", queue=False, api_visibility="private")
    gr.Timer(_POLL_SECONDS).tick(refresh, None, html, show_progress="hidden", queue=False, api_visibility="private")
    _lay_out_check(Doctor(context.runs_dir))


def _lay_out_check(doctor: Doctor) -> None:
    """The button that checks the machine, and its findings; every tab shows the same examination."""
    gr.HTML("<h2>Check</h2>", padding=False, apply_default_css=False)
    with gr.Row():
        button = gr.Button("Check this machine", elem_id="doctor-start", size="md", min_width=200, scale=0)
    findings = gr.HTML(render_check(doctor.state()), elem_id="doctor", padding=False, apply_default_css=False)
    timer = gr.Timer(_POLL_SECONDS, active=False)

    def show() -> list[Any]:
        state = doctor.state()
        running = state["running"]
        return [gr.update(interactive=not running), render_check(state), gr.Timer(active=running)]

    def start() -> list[Any]:
        doctor.start()  # a second tab, or a second click, joins the examination that is running
        return show()

    outputs = [button, findings, timer]
    gr.on(None, show, None, outputs, show_progress="hidden", queue=False, api_visibility="private")
    button.click(start, None, outputs, show_progress="hidden", queue=False, api_visibility="private")
    timer.tick(show, None, outputs, show_progress="hidden", queue=False, api_visibility="private")


def render_check(state: dict[str, Any]) -> Html:
    """The state of `app.services.doctor.Doctor` as HTML: faults with their remedies first."""
    if state["running"]:
        return element("p", "Checking versions, GPUs, disk and the network between ranks; this takes about a minute. "
                       "Runs go on meanwhile.", class_="ts-note", role="status")  # fmt: skip
    if state["error"]:
        return alert_list([state["error"]])
    if not state["checks"]:
        looks = "Looks at versions, GPUs, driver and disk, and lets processes exchange data as training does: "
        return note(looks + "does every number arrive right, how fast, is a GPU or a link slow? Takes about a minute.")
    order = {False: 0, True: 1, None: 2}
    checks = sorted(state["checks"], key=lambda check: order[check["passed"]])
    faults = [f"{check['name']}: {check['value']}; {check['remedy']}" for check in checks if check["passed"] is False]
    rows = [[_RESULTS[check["passed"]], check["name"], check["value"]] for check in checks]
    verdict = alert_list(faults) if faults else alert_list(["No fault found."], "good")
    table = data_table(["Result", "Check", "Found"], rows, "Checks", sort=True)
    return join([verdict, element("div", table, class_="ts-checks")])


def render(state: dict[str, Any]) -> Html:
    """The document of `app.services.system.machine` as HTML."""
    columns = [
        section("CPU", _cpu(state)),
        section("Memory and disk", _memory(state)),
        section("Versions", _versions(state["versions"])),
    ]
    locks = alert_list([state["lock_error"]] if state["lock_error"] else [], "warning")
    return join([locks, section("GPUs", _gpus(state["gpus"])), element("div", join(columns), class_="ts-columns")])


def _gpus(gpus: list[dict[str, Any]]) -> Html:
    if not gpus:
        return note("No NVIDIA GPU is visible here. Runs train on the CPU, each process on a core of its own.")
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
    return data_table(headers, rows, "GPUs", numeric=(4, 5), sort=True)


def _cpu(state: dict[str, Any]) -> Html:
    cpu, slots = state["cpu"], state["cpu_slots"]
    cores = [
        meter(share / 100, f"Use of core {number}", f"core {number}: {percent_text(share / 100)}")
        for number, share in enumerate(cpu["per_core"])
    ]
    held_slots = [slot for slot in slots if slot["held_by"]]
    names = join(dict.fromkeys(_holder(slot) for slot in held_slots), ", ")
    values = {
        "Processor": cpu["name"],
        "All cores": meter(cpu["percent"] / 100, "Use of all cores"),
        "Busy processes": "{:.1f} in 1 min, {:.1f} in 5, {:.1f} in 15".format(*cpu["load"]),
        "Cores for runs": f"{len(held_slots)} of {len(slots)} taken",
        **({"Held by": names} if held_slots else {}),
    }
    return join([key_values(values), element("div", join(cores), class_="ts-grid")])


def _memory(state: dict[str, Any]) -> Html:
    memory, disk = state["memory"], state["disk"]
    return key_values(
        {
            "Memory": _amount(memory["used"], memory["total"], "Memory"),
            "Disk of the runs": _amount(disk["used"], disk["total"], "Disk"),
            "Runs folder": str(Path(disk["path"])),
        }
    )


def _versions(versions: dict[str, str | None]) -> Html:
    rows = [(name, version or "none") for name, version in versions.items()]
    return element("div", data_table(["Name", "Version"], rows, "Versions", sort=True), class_="ts-versions")


def _share(used: float | None, total: float | None) -> float | None:
    return used / total if used is not None and total else None


def _amount(used: int | None, total: int | None, label: str) -> Html:
    return meter(_share(used, total), label, f"{byte_text(used)} of {byte_text(total)}")


def _power(gpu: dict[str, Any]) -> str | None:
    if gpu["power"] is None:
        return None
    return f"{gpu['power']:.0f} W" + (f" of {gpu['power_limit']:.0f} W" if gpu["power_limit"] else "")


def _holder(slot: dict[str, Any]) -> Html:
    """The holder of a slot: a link if it is a run."""
    name = slot["held_by"]
    if not name:
        return Html("free")
    return run_link(str(name)) if slot["run_dir"] else text(name)
