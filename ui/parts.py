"""HTML fragments shared by several pages. Every function escapes its arguments unless they are `Html`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Literal
from urllib.parse import urlencode

from app.console import clean
from trainers.config.byte_text import byte_text
from trainers.config.fields import fields
from trainers.strategy.strategy import strategy_names

Kind = Literal["error", "warning", "info", "good"]

PAGES = {
    "train": "Train", "data": "Data", "runs": "Runs", "compare": "Compare", "evaluate": "Evaluate", "chat": "Chat",
    "system": "System",
}  # fmt: skip
"""Pages in the order of the navigation; `train` is at `/`."""

_STATES = ("queued", "starting", "running", "stopping", "done", "stopped", "failed")
_NONE = "-"
_NAMES = frozenset({"tunesmith", *strategy_names(), *(option.name for option in fields())})
"""Words that keep their small letter at the start of a sentence."""


class Html(str):
    """Text that is already HTML and is inserted into other fragments unchanged."""


def text(value: Any) -> Html:
    """Any value as HTML: escaped, without control characters; a dash for None."""
    if isinstance(value, Html):
        return value
    return Html(_NONE if value is None else escape(clean(str(value)), quote=True))


def with_code(line: Any) -> Html:
    """A sentence as HTML, in which `a command in backticks` is set as code."""
    if isinstance(line, Html):
        return line
    parts = clean(str(line)).split("`")
    if len(parts) % 2 == 0:
        return text(line)
    return join(element("code", part) if index % 2 else part for index, part in enumerate(parts))


def unbroken(line: str) -> Html:
    """A command as HTML that breaks between its words, not at their hyphens, and is copied as it is."""
    return join((element("span", word, class_="ts-word") for word in line.split(" ")), " ")


def join(fragments: Iterable[Any], between: str = "") -> Html:
    """The fragments one after another, each escaped unless it is `Html`."""
    return Html(between.join(text(fragment) for fragment in fragments))


def element(tag: str, content: Any = "", **attributes: Any) -> Html:
    """`<tag name="value">content</tag>`, without attributes that are None or False.

    Args:
        tag: e.g. `div`.
        content: content of the element; escaped unless `Html`.
        **attributes: attributes by name; `class_` stands for `class`, and other underscores become hyphens. True writes
            only the name.
    """
    named_attributes = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    attribute_texts = [
        f" {name}" if value is True else f' {name}="{text(value)}"'
        for name, value in named_attributes.items()
        if value is not None and value is not False
    ]
    return Html(f"<{tag}{''.join(attribute_texts)}>{text(content)}</{tag}>")


# -- formatting values -----------------------------------------------------------------------------------------------


def duration_text(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `4 d 03 h`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    rounded = round(seconds)
    for unit, inner_unit, size, inner in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if rounded >= size:
            return f"{rounded // size} {unit} {rounded % size // inner:02} {inner_unit}"
    return f"{rounded} s"


def number_text(value: Any, digits: int = 4) -> str:
    """Formats a number: integers with thousands separators, others with `digits` significant digits.

    Very large and very small values are written as `3e-05`; a dash for what is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return _NONE
    if math.isinf(value) or isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits}g}"
    integer_digits = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - integer_digits)}f}" if abs(value) >= 1 else f"{value:.{digits}g}"


def byte_count(count: float | None) -> Html:
    """`byte_text` that sorts by the number."""
    return text(None) if count is None else element("data", byte_text(count), value=count)


def percent_text(share: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 as `42%`; a dash for None."""
    return _NONE if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f}%"


def seconds_since(iso: str | None, now: datetime | None = None) -> float | None:
    """Seconds from an ISO time (UTC if it has no zone) to `now` (default: current time); None if it is not a time."""
    try:
        then = datetime.fromisoformat(str(iso))
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds()


def ago_text(iso: str | None, now: datetime | None = None) -> str:
    """An ISO time as `just now`, `4 min ago`, `3 h ago`, `2 d ago`; a dash if it is not a time."""
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
    """A run's state as a coloured badge; an unknown one is grey."""
    known = state if state in _STATES else "unknown"
    return element("span", state or "unknown", class_=f"ts-badge ts-{known}")


def alert_list(lines: Sequence[Any], kind: Kind = "error") -> Html:
    """A box with a line per mistake, warning or note; empty for no lines.

    Screen readers announce errors at once, others when idle.
    """
    if not lines:
        return Html("")
    role = "alert" if kind == "error" else "status"
    items = join(element("li", with_code(sentence(line))) for line in lines)
    return element("div", element("ul", items), class_=f"ts-alert ts-alert-{kind}", role=role)


def sentence(line: Any) -> Any:
    """A line with a capital letter, unless it is `Html` or starts with the name of an option, a strategy or a file."""
    first = "" if isinstance(line, Html) else str(line).partition(" ")[0].rstrip(",:;")
    return f"{line[0].upper()}{line[1:]}" if first.replace("-", "").isalpha() and first not in _NAMES else line


def note(line: Any) -> Html:
    """A muted sentence, e.g. on an empty page."""
    return element("p", with_code(line), class_="ts-note")


def loading() -> Html:
    """What stands where the first answer of the server will be; the page is shown once it has come."""
    return element("p", "Loading…", class_="ts-note ts-wait")


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
    empty: str = "Nothing yet.",
    sort: bool = False,
    cards: bool = False,
) -> Html:
    """A table that scrolls horizontally on a narrow page, or is a card for each row there.

    Args:
        headers: the column headers.
        rows: a cell per column; escaped unless `Html`.
        caption: caption for screen readers only.
        numeric: indices of right-aligned columns.
        empty: text shown in its place when there are no rows.
        sort: whether readers may sort it and, when it is long, filter it; the caption has to be unique on the page.
        cards: whether its rows are cards on a narrow page.
    """
    right = dict.fromkeys(numeric, "ts-number")
    head = join(
        element("th", cell, scope="col", class_=right.get(index)) if cell else element("td")
        for index, cell in enumerate(headers)
    )
    lines = [
        element(
            "tr",
            join(
                element("td", cell, class_=right.get(index), data_name=headers[index] if cards else None)
                for index, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    if not lines:
        return note(empty)
    title = element("caption", caption, class_="ts-unseen") if caption else ""
    table = element("table", join([title, element("thead", element("tr", head)), element("tbody", join(lines))]))
    kind = "ts-table ts-cards" if cards else "ts-table"
    return element("div", table, class_=kind, tabindex=0, role="region", aria_label=caption or "Table", data_sort=sort)


def meter(share: float | None, label: str, value_text: str | None = None) -> Html:
    """A bar that is full at 1, with its value as text beside it.

    Args:
        share: 0 to 1; None draws an empty bar.
        label: what is measured, for screen readers.
        value_text: the value as text; default: percent.
    """
    filled = 0.0 if share is None or not math.isfinite(share) else min(1.0, max(0.0, share))
    value_label = percent_text(share) if value_text is None else value_text
    fill = element("span", class_="ts-meter-fill", style=f"width:{100 * filled:.1f}%")
    bar = element(
        "span", fill, class_="ts-meter", role="meter", aria_label=label, aria_valuemin=0, aria_valuemax=100,
        aria_valuenow=round(100 * filled), aria_valuetext=value_label,
    )  # fmt: skip
    return element("span", join([bar, element("span", value_label, class_="ts-meter-words")]), class_="ts-metered")


def link(path: str, label: Any, **query: Any) -> Html:
    """A link to one of the pages.

    Args:
        path: e.g. `/compare`.
        label: text of the link.
        **query: query parameters; None values are omitted.
    """
    parameters = {name: value for name, value in query.items() if value is not None}
    return element("a", label, href=f"{path}?{urlencode(parameters)}" if parameters else path)


def run_link(run_id: str, label: Any = None) -> Html:
    """A link to the page of a run, labelled with its id by default."""
    return link("/run", run_id if label is None else label, run=run_id)


def title(heading: str, lead: Any = None) -> Html:
    """The `<h1>` of a page, and a muted sentence below it."""
    return join([element("h1", heading), note(lead) if lead else ""])


def section(heading: str, content: Any) -> Html:
    """An `<h2>` and its content."""
    return element("section", join([element("h2", heading), content]), class_="ts-section")


def navigation(active: str) -> Html:
    """The header: a link past it, links to all pages with the current one marked, the choice of a theme, and notices.

    Args:
        active: name of the current page, such as `runs`.
    """
    links = [
        element(
            "a", label, href="/" if name == "train" else f"/{name}", aria_current="page" if name == active else None
        )
        for name, label in PAGES.items()
    ]
    brand = element("a", "Tunesmith", href="/", class_="ts-brand", tabindex=-1, aria_hidden="true")
    pages = element("nav", join(links), class_="ts-links", aria_label="Pages")
    label = element("label", "Theme", for_="ts-theme", class_="ts-unseen")
    theme = element("div", join([label, element("select", id="ts-theme")]), class_="ts-theme")
    skip = element("a", "Skip to the content", href="#content", class_="ts-skip")
    header = element("div", join([skip, brand, pages, theme]), class_="ts-nav")
    notices = element("div", class_="ts-notices", role="status", aria_label="Runs that ended")
    return join([header, notices, element("div", id="content", tabindex=-1)])
