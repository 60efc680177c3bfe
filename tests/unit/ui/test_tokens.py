"""One set of colours, one scale of type and one of space: `ui/static/tokens.css`; everything else only names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_house import ROOT
from ui.theme import STATIC, Tunesmith, head

TOKENS = STATIC / "tokens.css"
STYLES = sorted(path for path in STATIC.glob("*.css") if path.name not in ("tokens.css", "uPlot.min.css"))
SCRIPTS = sorted(path for path in STATIC.glob("*.js") if not path.name.startswith("uPlot"))
PAGES = sorted((ROOT / "ui").rglob("*.py"))
_COLOUR = (
    r"#[0-9a-fA-F]{3,8}\b|\b(?:rgb|hsl|oklch)a?\("
    r"|\b(?:color|background|fill|stroke)(?:-color)?:\s*(?:white|black|red)\b"
)
_TYPE = r"\bfont(?:-size)?:\s*(?:\d+\s+)?[\d.]+(?:px|r?em|pt|%)"
_SPACE = r"(?<![\w-])(?:padding|margin|gap)(?:-\w+)?:[^;}]*?(?<![\w.-])(?!0px)\d+px"


def raw_values(text: str, *patterns: str) -> list[str]:
    """What stands there in figures that a token should say."""
    return [found.group() for pattern in patterns for found in re.finditer(pattern, text)]


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_styles_name_tokens(path) -> None:  # type: ignore[no-untyped-def]
    assert raw_values(path.read_text(), _COLOUR, _TYPE, _SPACE) == []


@pytest.mark.parametrize("path", [*SCRIPTS, *PAGES], ids=lambda path: path.name)
def test_scripts_and_inline_styles_name_tokens(path) -> None:  # type: ignore[no-untyped-def]
    text = path.read_text()
    inline = "\n".join(re.findall(r"style(?:=|:\s*)f?[\"'`]([^\"'`]*)", text))
    assert raw_values(text, r"[\"'`]#[0-9a-fA-F]{3,8}\b") + raw_values(inline, _COLOUR, _TYPE, _SPACE) == []


@pytest.mark.parametrize(
    "text", ["a { color: #fff; }", "a { color: rgb(0 0 0); }", "a { background: white; }", "a { font-size: .9rem; }",
             "a { font: 600 12px/1.5 mono; }", "a { padding: 0 7px; }", "a { margin-top: 3px; }"]
)  # fmt: skip
def test_a_raw_value_is_seen(text: str) -> None:
    assert raw_values(text, _COLOUR, _TYPE, _SPACE)


def test_every_named_token_exists_and_every_token_is_named() -> None:
    defined = set(re.findall(r"(--ts-[\w-]+):", "".join(path.read_text() for path in [TOKENS, *STYLES])))
    texts = [path.read_text() for path in [*STYLES, *SCRIPTS]]
    variables = {value for value in vars(Tunesmith()).values() if isinstance(value, str)}
    named = set(re.findall(r"var\((--ts-[\w-]+)\)", "".join([*texts, *variables])))
    named |= set(re.findall(r'getPropertyValue\("(--ts-[\w-]+)"\)', "".join(texts)))
    curves = {f"--ts-curve-{number}" for number in range(1, 9)}
    assert named - defined == set()
    assert defined - named - curves == set()


@pytest.mark.parametrize("theme", ["light", "dark", "contrast", "contrast-dark"])
def test_text_can_be_read(theme: str) -> None:
    """WCAG: 4.5 : 1, in high contrast 7 : 1, for every pair of a text and what it stands on; curves 3 : 1."""
    tokens = tokens_of(theme)
    least = 7.0 if theme.startswith("contrast") else 4.5
    soft = [(name, f"{name}-soft") for name in ("blue", "green", "red", "amber", "grey")]
    on_page = [(name, ground) for name in ("body", "muted", "accent") for ground in ("page", "panel", "inset", "input")]
    buttons = [("on-primary", "primary"), ("body", "button"), ("danger", "panel"), ("on-danger", "danger")]
    for text, ground in [*soft, *on_page, *buttons, ("on-accent-soft", "accent-soft"), ("red", "panel")]:
        assert contrast(tokens[text], tokens[ground]) >= least, (text, ground)
    for number in range(1, 9):
        assert contrast(tokens[f"curve-{number}"], tokens["page"]) >= max(3.0, least - 1.5), number
    assert contrast(tokens["input-line"], tokens["input"]) >= 3.0


def tokens_of(theme: str) -> dict[str, str]:
    """The colours of a theme by name: those of light, then its own."""
    blocks = re.findall(r":root(?:\[data-theme=\"([\w-]+)\"\])? \{(.*?)\n\}", TOKENS.read_text(), re.DOTALL)
    return {
        name: colour
        for block, lines in blocks
        if block in ("", theme)
        for name, colour in re.findall(r"--ts-([\w-]+): (#\w{6});", lines)
    }


def contrast(one: str, two: str) -> float:
    """The contrast of two colours as WCAG 2 counts it."""
    high, low = sorted(map(luminance, (one, two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_contrast_is_counted_as_wcag_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_tokens_come_first() -> None:
    text = head()
    assert text.index("--ts-page") < text.index("<script>") < text.index("Theme = ") < text.index("Live = ")


_SHARED = {"ts-bar", "ts-chip", "ts-table"}
"""Classes that two files style, each a part."""


def _classes(style: Path) -> set[str]:
    """The classes that a file styles wherever they stand, as in `.ts-row {`."""
    text = re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.DOTALL)
    selectors = re.findall(r"(?:^|[},])\s*(?:\.gradio-container )?\.(ts-[\w-]+)\s*(?=[,{])", text)
    return set(selectors)


def test_no_class_means_two_things() -> None:
    """All files apply to all pages, so a class of one page must not be that of another."""
    seen: dict[str, str] = {}
    for style in STYLES:
        for name in _classes(style) - _SHARED:
            assert name not in seen, f".{name} stands in {seen[name]} and in {style.name}"
            seen[name] = style.name
    assert {"ts-log", "ts-said", "ts-message"} <= seen.keys(), "the control: they are found"
