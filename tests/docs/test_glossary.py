"""docs/glossary.md: each term once, and no spelling of its table "do not use" anywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
TERMS, _, UNUSED = GLOSSARY.read_text(encoding="utf-8").partition("\n## Do not use\n")


def cells(text: str) -> list[str]:
    """The first cells of the rows of a text's tables, split at commas."""
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    heads = ("term", "do not use")
    return [cell.strip() for row in rows if row not in heads for cell in row.split(",")]


def pattern(spelling: str) -> re.Pattern[str]:
    """A spelling as a whole word; any case, unless it is in code font."""
    is_code = spelling.startswith("`")
    word = re.escape(spelling.strip("`")).replace(r"\ ", r"\s+")
    return re.compile(rf"(?<![A-Za-z]){word}(?![A-Za-z])", 0 if is_code else re.IGNORECASE)


def texts() -> dict[str, str]:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "kvstore").rglob("*.py")]
    read = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    return {**read, "docs/glossary.md": TERMS}


TEXTS = texts()


@pytest.mark.parametrize("spelling", cells(UNUSED))
def test_a_spelling_that_is_not_used_is_nowhere(spelling: str) -> None:
    search = pattern(spelling)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        for name, text in TEXTS.items()
        for match in search.finditer(text)
    ]
    assert found == []


def test_each_term_is_defined_once() -> None:
    terms = cells(TERMS)
    assert sorted(terms) == sorted(set(terms))
    assert len(terms) > 80
