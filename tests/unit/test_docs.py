"""README and docs: short enough to read, every link leads somewhere, and the site is built from them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub and Sphinx give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to a file or heading that is not there; absolute ones must be https."""
    broken = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        path, _, fragment = link.partition("#")
        if "://" in link:
            broken += [] if link.startswith("https://") else [link]
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    """Control."""
    (tmp_path / "other.md").write_text("# One heading: it\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](gone.md) [b](other.md#no-heading) [c](#nor-here) [d](http://plain.example)\n"
        "[e](other.md#one-heading-it) [f](#own)\n# Own\n```\n[g](in-code.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#no-heading", "#nor-here", "http://plain.example"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_merge_was_left_undecided(page: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_is_a_door() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []
    linked = {link.partition("#")[0] for link in _LINK.findall("\n".join(lines))}
    assert {f"docs/{page.name}" for page in PAGES[1:] if page.stem != "index"} <= linked


def test_the_site_has_every_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "docs", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in PAGES[1:]:
        assert (tmp_path / f"{page.stem}.html").is_file()
    assert "Train on your own file" in (tmp_path / "index.html").read_text(encoding="utf-8")
