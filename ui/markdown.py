"""Markdown of a model as HTML that can do nothing: its author is not trusted.

Raw HTML is shown as text, links lead only to web pages and mail, and nothing is loaded: an image becomes a link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from app.console import clean
from ui.parts import Html, element, join

MAX_CHARACTERS = 20_000
"""A longer text stays plain: the time to parse some texts grows with the square of their length."""
_MAX_CELLS = 10_000
"""Lines of a text, times the cells of its longest row. Each row of a table gets as many as its head."""
_MAX_LANGUAGE = 30
_SAFE_LINK = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x1f\\]", re.IGNORECASE)
_HEADING_BELOW = 2
"""Levels of headings that the page has itself."""


def render(text: str) -> Html:
    """Markdown as HTML without raw HTML, scripts, styles and anything that is loaded."""
    cleaned = clean(text)
    if len(cleaned) > MAX_CHARACTERS:
        note = element("p", f"Long text, shown without formatting ({len(cleaned):,} characters).", class_="ts-note")
        return join([note, plain(cleaned)])
    return _rendered(cleaned)


def plain(text: str) -> Html:
    """Text as it is, with its line breaks and spaces."""
    return element("div", text, class_="ts-plain")


@lru_cache(maxsize=512)
def _rendered(text: str) -> Html:
    lines = text.split("\n")
    tables = len(lines) * max(line.count("|") for line in lines) <= _MAX_CELLS
    parser = _with_tables if tables else _without_tables
    return Html(parser.render(text))


class _Renderer(RendererHTML):
    """Writes links, code, tables and headings in the page's own way."""

    def link_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """A link that tells its target nothing, and opens apart."""
        address = str(tokens[index].attrs.get("href", ""))
        opened = element("a", "", href=address, rel="noopener noreferrer nofollow", target="_blank", title=address)
        return opened.removesuffix("</a>")

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """A block of code, with its language and a button that copies it."""
        return _code(tokens[index].content, tokens[index].info.strip().split(" ")[0])

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """A block of indented code."""
        return _code(tokens[index].content, "")

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """A table that scrolls by itself."""
        return '<div class="ts-scroll" tabindex="0" role="group" aria-label="Table"><table>'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """Its end."""
        return "</table></div>"

    def heading_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """A heading below those of the page."""
        level = min(6, int(tokens[index].tag[1:]) + _HEADING_BELOW)
        return f'<div class="ts-heading" role="heading" aria-level="{level}">'

    def heading_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """Its end."""
        return "</div>"


def _code(content: str, language: str) -> Html:
    copy = element("button", "Copy code", type="button", class_="ts-button", data_act="copy-code")
    head = element("div", join([element("span", language[:_MAX_LANGUAGE] or "code"), copy]), class_="ts-code-head")
    label = f"Code: {language[:_MAX_LANGUAGE]}" if language else "Code"
    body = element("pre", element("code", content), tabindex=0, role="group", aria_label=label)
    return element("div", join([head, body]), class_="ts-code")


def _parser(tables: bool) -> MarkdownIt:
    options = {"html": False, "linkify": False, "typographer": False, "breaks": True, "maxNesting": 20}
    parser = MarkdownIt("commonmark", options, renderer_cls=_Renderer)
    parser.enable(["strikethrough", *(["table"] if tables else [])]).disable(["image", "html_block", "html_inline"])
    parser.validateLink = lambda url: bool(_SAFE_LINK.match(url))  # type: ignore[method-assign]
    return parser


_with_tables, _without_tables = _parser(tables=True), _parser(tables=False)
