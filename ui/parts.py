"""Fragments of HTML that several pages show. Every function escapes what it is given, unless that is `Html` already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Literal
from urllib.parse import urlencode

from app.console import clean

Kind = Literal["error", "warning", "info", "good"]

PAGES = {"train": "Train", "data": "Data", "runs": "Runs", "compare": "Compare", "chat": "Chat", "system": "System"}
"""Pages of the navigation, in its order; `train` is at `/`."""

_STATES = ("queued", "starting", "running", "stopping", "done", "stopped", "failed")
_NONE = "-"


class Html(str):
    """A text that is HTML already: it is put into other fragments as it is."""


def text(value: Any) -> Html:
    """Any value as HTML: escaped, without control characters; a dash for None."""
    if isinstance(value, Html):
        return value
    return Html(_NONE if value is None else escape(clean(str(value)), quote=True))


def join(fragments: Iterable[Any], between: str = "") -> Html:
    """The fragments one after another, each escaped unless it is `Html`."""
    return Html(between.join(text(fragment) for fragment in fragments))


def element(tag: str, content: Any = "", **attributes: Any) -> Html:
    """`<tag name="value">content</tag>`; attributes that are None or False are left out.

    Args:
        tag: e.g. `div`.
        content: escaped unless `Html`.
        **attributes: `class_` means `class`; an underscore means a hyphen; True writes the name alone.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    words = [
        f" {name}" if value is True else f' {name}="{text(value)}"'
        for name, value in given.items()
        if value is not None and value is not False
    ]
    return Html(f"<{tag}{''.join(words)}>{text(content)}</{tag}>")


# -- values as words -------------------------------------------------------------------------------------------------


def byte_text(count: float | None) -> str:
    """`0 B`, `999 B`, `1.5 KiB`, `23.4 GiB`; a dash for None."""
    if count is None or not math.isfinite(count):
        return _NONE
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def duration_text(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `4 d 03 h`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for unit, part, size, inner in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // inner:02} {part}"
    return f"{whole} s"


def number_text(value: Any, digits: int = 4) -> str:
    """A number for people: whole ones with thousands' commas, others with `digits` significant digits.

    Very large and very small ones are written as `3e-05`; a dash for what is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return _NONE
    if math.isinf(value) or isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits}g}"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}" if abs(value) >= 1 else f"{value:.{digits}g}"


def percent_text(share: float | None, digits: int = 0) -> str:
    """A share of 1 as `42%`; a dash for None."""
    return _NONE if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f}%"


def seconds_since(iso: str | None, now: datetime | None = None) -> float | None:
    """Seconds from an ISO time (UTC where it names no zone) to `now` (default: the clock); None for no time."""
    try:
        then = datetime.fromisoformat(str(iso))
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds()


def ago_text(iso: str | None, now: datetime | None = None) -> str:
    """An ISO time as `just now`, `4 min ago`, `3 h ago`, `2 d ago`; a dash for no time."""
    seconds = seconds_since(iso, now)
    if seconds is None:
        return _NONE
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def ago(iso: str | None, now: datetime | None = None) -> Html:
    """`ago_text` with the exact time as a tooltip."""
    return element("time", ago_text(iso, now), title=iso, datetime=iso) if iso else Html(_NONE)


# -- fragments -------------------------------------------------------------------------------------------------------


def badge(state: Any) -> Html:
    """A run's state as a coloured word; an unknown one is grey."""
    known = state if state in _STATES else "unknown"
    return element("span", state or "unknown", class_=f"ts-badge ts-{known}")


def alert_list(lines: Sequence[Any], kind: Kind = "error") -> Html:
    """A box with a line for each mistake, warning or note; empty for no lines.

    An error is announced at once by a screen reader, others when it is idle.
    """
    if not lines:
        return Html("")
    role = "alert" if kind == "error" else "status"
    items = join(element("li", line) for line in lines)
    return element("div", element("ul", items), class_=f"ts-alert ts-alert-{kind}", role=role)


def note(line: Any) -> Html:
    """A muted sentence, e.g. what an empty page is for."""
    return element("p", line, class_="ts-note")


def key_values(pairs: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Html:
    """Names and values in two columns."""
    entries = pairs.items() if isinstance(pairs, Mapping) else pairs
    rows = [Html(element("dt", name) + element("dd", value)) for name, value in entries]
    return element("dl", join(rows), class_="ts-values")


def data_table(
    headers: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    caption: str | None = None,
    numeric: Sequence[int] = (),
    empty: str = "nothing yet",
) -> Html:
    """A table that scrolls within itself where the page is too narrow.

    Args:
        headers: the head of each column.
        rows: a cell per column; escaped unless `Html`.
        caption: what it is, for screen readers; shown to them alone.
        numeric: indices of the columns that are set to the right.
        empty: said in place of rows where there are none.
    """
    right = dict.fromkeys(numeric, "ts-number")
    head = join(element("th", cell, scope="col", class_=right.get(index)) for index, cell in enumerate(headers))
    lines = [
        element("tr", join(element("td", cell, class_=right.get(index)) for index, cell in enumerate(row)))
        for row in rows
    ]
    if not lines:
        lines = [element("tr", element("td", empty, colspan=len(headers), class_="ts-note"))]
    title = element("caption", caption, class_="ts-unseen") if caption else ""
    table = element("table", join([title, element("thead", element("tr", head)), element("tbody", join(lines))]))
    return element("div", table, class_="ts-table", tabindex=0, role="region", aria_label=caption or "Table")


def meter(share: float | None, label: str, shown: str | None = None) -> Html:
    """A bar that is full at 1, with its value in words beside it.

    Args:
        share: 0 to 1; None draws an empty bar.
        label: what is measured, for screen readers.
        shown: the value in words; default: per cent.
    """
    full = 0.0 if share is None or not math.isfinite(share) else min(1.0, max(0.0, share))
    words = percent_text(share) if shown is None else shown
    fill = element("span", class_="ts-meter-fill", style=f"width:{100 * full:.1f}%")
    bar = element(
        "span", fill, class_="ts-meter", role="meter", aria_label=label, aria_valuemin=0, aria_valuemax=100,
        aria_valuenow=round(100 * full), aria_valuetext=words,
    )  # fmt: skip
    return element("span", join([bar, element("span", words, class_="ts-meter-words")]), class_="ts-metered")


def link(path: str, words: Any, **query: Any) -> Html:
    """A link to a page of ours.

    Args:
        path: e.g. `/compare`.
        words: what is shown.
        **query: parameters of the address; those that are None are left out.
    """
    given = {name: value for name, value in query.items() if value is not None}
    return element("a", words, href=f"{path}?{urlencode(given)}" if given else path)


def run_link(run_id: str, words: Any = None) -> Html:
    """A link to a run's page; shows the id by default."""
    return link("/run", run_id if words is None else words, run=run_id)


def title(words: str, lead: Any = None) -> Html:
    """The one `<h1>` of a page, and a muted sentence under it."""
    return join([element("h1", words), note(lead) if lead else ""])


def section(words: str, content: Any) -> Html:
    """An `<h2>` and what stands under it."""
    return element("section", join([element("h2", words), content]), class_="ts-section")


def navigation(active: str) -> Html:
    """The links to all pages, with the shown one marked.

    Args:
        active: name of the shown page, such as `runs`.
    """
    links = [
        element(
            "a", words, href="/" if name == "train" else f"/{name}", aria_current="page" if name == active else None
        )
        for name, words in PAGES.items()
    ]
    brand = element("a", "Tunesmith", href="/", class_="ts-brand", tabindex=-1, aria_hidden="true")
    return element(
        "nav", join([brand, element("div", join(links), class_="ts-links")]), class_="ts-nav", aria_label="Pages"
    )
