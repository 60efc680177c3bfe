"""The part of the Run page for several machines: who has joined, and the line to paste on each of the others."""

from __future__ import annotations

from typing import Any

from ui.parts import Html, data_table, element, join, note, section, with_code

_STATUSES = {
    "there": "is there", "awaited": "awaited", "joined": "joined", "trains": "trains", "refused": "refused",
    "unreachable": "cut off", "left out": "left out", "lost": "lost",
}  # fmt: skip
_ABSENT = (
    "it does not see this folder under the same path: `ls` it there",
    "its line ended with an error, which it prints: other versions are named, and a number that another machine has",
    "a firewall: open the port of machine 0, and all ports between the machines",
)
"""Why a machine may stay away, beyond what it can report."""


def machines(view: dict[str, Any]) -> Html:
    """Who has joined, and the lines that join the others; empty for a single machine, and once the run is done.

    Args:
        view: from `app.runs.detail.run_view`.
    """
    if not view["join_lines"]:
        return Html("")
    rows = [
        [row["machine"], _STATUSES.get(row["status"], row["status"]), row["host"] or "-", row["address"] or "-",
         row["devices"] or "-", row["versions"] or "-", with_code(row["problem"])]
        for row in view["members"]
    ]  # fmt: skip
    table = data_table(["Machine", "Status", "Host", "Address", "Devices", "Versions", "What is wrong"], rows,
                       "Machines", numeric=(0,))  # fmt: skip
    lines = _lines(view)
    return section("Machines", join([table if rows else "", *lines])) if rows or lines else Html("")


def _lines(view: dict[str, Any]) -> list[Html]:
    """What to paste where, and what may be wrong with machines that are awaited."""
    absent = [row["machine"] for row in view["members"] if row["status"] in ("awaited", "lost", "left out")]
    ended = not view["members"]
    if ended and "resume" not in view["actions"]:
        return []
    pasted = range(1, len(view["join_lines"]) + 1) if ended else [number for number in absent if number]
    if not pasted:
        return []
    head = (
        "Resume starts machine 0 here. Then paste the line of each other machine in a terminal there:"
        if ended
        else f"Paste the line of each machine in a terminal there{view['join_by']}:"
    )
    lines = [_line(number, view["join_lines"][number - 1]) for number in pasted]
    awaited = any(row["status"] == "awaited" for row in view["members"])
    hints = [
        note("If one does not come:"),
        element("ul", join(element("li", with_code(hint)) for hint in _ABSENT), class_="ts-evidence"),
    ]
    return [element("p", head), *lines, *(hints if awaited else [])]


def _line(machine: int, line: str) -> Html:
    name = f"Machine {machine}"
    copy = element("button", "Copy", type="button", class_="ts-small", data_copy=True, aria_label=f"Copy: {name}")
    text = element("pre", line, class_="ts-box-text", tabindex=0, role="region", aria_label=f"The line of {name}")
    return element("div", join([element("div", join([element("h3", name), copy]), class_="ts-box-head"), text]),
                   class_="ts-box ts-join")  # fmt: skip
