"""Markdown of a model becomes HTML that can do nothing."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ui.markdown import MAX_CHARACTERS, render

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick=alert(1)>b</b>",
    "<!-- x --><svg/onload=alert(1)>",
    "<style>*{display:none}</style>",
    "<iframe src=http://evil.invalid>",
    "<details open ontoggle=alert(1)>",
    "![i](http://evil.invalid/i.png)",
    "![i][r]\n\n[r]: http://evil.invalid/i.png",
    "![i](data:image/svg+xml,<svg/onload=alert(1)>)",
    "[x](javascript:alert(1))",
    "[x](JaVa\tScRiPt:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "<javascript:alert(1)>",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)",
    "[x](file:///etc/passwd)",
    "[x](/gradio_api/run)",
    "[x](//evil.invalid)",
    "[x](\\\\evil.invalid)",
    '[x](http://e.invalid "a" onmouseover=alert(1))',
    '[x](http://e.invalid/"onmouseover="alert(1))',
    '```html" onload="alert(1)\n<script>\n```',
    "```<script>\nx\n```",
    "`<script>`",
    "    <script>alert(1)</script>",
    "|<img src=x onerror=alert(1)>|\n|-|\n|<script>|",
    "# <script>alert(1)</script>",
    "$$\\href{javascript:alert(1)}{x}$$",
    '```mermaid\ngraph TD; A-->B; click A "javascript:alert(1)"\n```',
    "${alert(1)} {{constructor.constructor('alert(1)')()}}",
    "[x]: javascript:alert(1)\n[x]",
    "<a href=javascript:alert(1)>x</a>",
    "*[x](http://ok.invalid)*{style=position:fixed onclick=alert(1)}",
    "\x00<scr\x00ipt>alert(1)</script>",
    "\u202e<script>",
]
_TAGS = {
    "p",
    "br",
    "strong",
    "em",
    "s",
    "code",
    "pre",
    "a",
    "ul",
    "ol",
    "li",
    "blockquote",
    "hr",
    "div",
    "span",
    "button",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
_ATTRIBUTES = {
    "class",
    "href",
    "rel",
    "target",
    "title",
    "tabindex",
    "role",
    "aria-label",
    "aria-level",
    "type",
    "data-act",
    "style",
    "start",
}


class Found(HTMLParser):
    """Tags and attributes of HTML."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def harm_in(html: str) -> list[str]:
    """What HTML could do: tags and attributes that it should not have."""
    parsed = Found(html)
    harm = [f"<{tag}>" for tag in parsed.tags - _TAGS]
    for name, value in parsed.attributes:
        is_alignment = name == "style" and re.fullmatch(r"text-align:(left|right|center)", value)
        is_link = name == "href" and re.match(r"(https?://|mailto:)", value, re.IGNORECASE)
        if name not in _ATTRIBUTES or (name == "style" and not is_alignment) or (name == "href" and not is_link):
            harm.append(f"{name}={value}")
    return harm


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_does_nothing(attack: str) -> None:
    assert harm_in(render(attack)) == []


def test_without_the_rules_the_attacks_would_do_something() -> None:
    plain = MarkdownIt("commonmark", {"html": True})
    plain.validateLink = lambda url: True  # type: ignore[method-assign]
    assert sum(bool(harm_in(plain.render(attack))) for attack in ATTACKS) >= 20


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*ATTACKS, *"<>[]()!`*_|\\\"'&#- \n", "http://x.invalid", "```", "javascript:", "word"]),
        max_size=30,
    )
)
def test_no_mixture_of_attacks_does_anything(parts: list[str]) -> None:
    assert harm_in(render("".join(parts))) == []


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="ab <>&\"'`é語\n", max_size=80))
def test_no_text_is_lost(text: str) -> None:
    """Letters, that is: marks become form."""
    letters = re.sub(r"[^abé語]", "", text)
    assert re.sub(r"[^abé語]", "", Found(render(text)).text.replace("Copy code", "").replace("code", "")) == letters


@pytest.mark.parametrize(
    "text",
    [character * MAX_CHARACTERS for character in "[>*_`<&\n|~"]
    + [
        "![" * 9000,
        "[a](" * 5000,
        "|" + "a|" * 99 + "\n|" + "-|" * 99 + "\n" + "|\n" * 8000,
        "*a **a " * 2800,
        "|" + "a|" * 3000 + "\n|" + "-|" * 3000 + "\n" + "|\n" * 3000,
        "- " * 9000,
        "\n".join(" " * n + "- x" for n in range(190)),
        "x" * 5_000_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    html = render(text)
    assert time.process_time() - began < 10
    assert len(html) < 100 * MAX_CHARACTERS + len(text) * 6


def test_what_it_is_for() -> None:
    html = render(
        "# Title\n\n**bold** `x < y` [link](https://example.com/?a=1&b=2)\n\n```python\nif a < b:\n    pass\n```\n"
    )
    assert '<div class="ts-heading" role="heading" aria-level="3">Title</div>' in html
    assert "<strong>bold</strong> <code>x &lt; y</code>" in html
    assert 'href="https://example.com/?a=1&amp;b=2" rel="noopener noreferrer nofollow" target="_blank"' in html
    assert "<code>if a &lt; b:\n    pass\n</code>" in html
    assert "<span>python</span>" in html
