"""docs/identity.md and the contract of identity say the same: a row or an adapter more is a line more."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.identity_contract import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "identity.md"
TEST = "tested by"
"""The row of the page that names each adapter's contract class, or has a dash for none."""
FIXED = 3
"""Columns before those of adapters: the row, what it is, where it enters."""


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The page's first table: the heads of its columns, and its rows by their first cell."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    lines = [line for line in page.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    head, rule, *rows = cells
    assert all(set(cell) <= set("-|") for cell in rule)
    return head, {row[0].strip("` "): row for row in rows}


def contract_classes() -> set[str]:
    """Every test class of the contract, found in the files: engines' cannot be imported here."""
    return {
        f"{path.relative_to(ROOT / 'tests')}:{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("IdentityContract") for base in node.bases)
    }


def test_rows_are_those_of_the_contract() -> None:
    head, rows = table()
    assert list(rows) == [*ROWS, TEST]
    for name, row in rows.items():
        assert len(row) == len(head), name
        assert all(row), name
    for name, described in ROWS.items():
        assert rows[name][1] == described


def test_columns_are_the_adapters_that_join_the_contract() -> None:
    head, rows = table()
    adapters, cells = head[FIXED:], rows[TEST][FIXED:]
    named = [found for cell in cells for found in re.findall(r"`([^`]+)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) == contract_classes()
    assert len(adapters) == len(set(adapters))
    for adapter, cell in zip(adapters, cells, strict=True):
        assert cell == "-" or cell.count("`") == 2, f"{adapter}: expected one class, or -"
