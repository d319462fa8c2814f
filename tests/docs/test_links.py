"""Links of the README and the documentation: every local target and every anchor exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(`{3,})(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without code blocks and inline code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, spelled as GitHub spells them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return frozenset(found)


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_known = target.is_file() and (
            not anchor or (target.suffix == ".md" and anchor in anchors(target))
        )
        if not is_known:
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](page.md#two) [c](none.md)\n```\n[d](no.md)\n```\n")
    assert list(broken(page)) == ["page.md#two", "none.md"]


def test_every_page_is_in_the_navigation() -> None:
    named: set[Path] = set()
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        for body in TOCTREE.findall(page.read_text(encoding="utf-8")):
            for entry in body.splitlines():
                if entry and not entry.startswith(":"):
                    named.update(page.parent.glob(f"{entry}.md"))
    assert sorted(set(docs.rglob("*.md")) - named) == [docs / "index.md"]


def test_every_decision_is_listed_with_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "index.md").read_text(encoding="utf-8")
    for page in folder.glob("0*.md"):
        number, _, title = page.read_text(encoding="utf-8").partition("\n")[0][2:].partition(" ")
        assert page.name.startswith(number)
        assert f"| [{number}]({page.name}) | {title} |" in listed


def test_the_first_page_links_every_page_of_its_navigation() -> None:
    page = ROOT / "docs" / "index.md"
    text = page.read_text(encoding="utf-8")
    entries = [e for body in TOCTREE.findall(text) for e in body.split() if not e.startswith(":")]
    linked = LINK.findall(text)
    captions = set(re.findall(r"^:caption: (\w+)$", text, re.MULTILINE))
    assert [e for e in entries if e not in captions and f"{e}.md" not in linked] == []
