"""The pages of options and commands name every option and command, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("kind", [kvstore.PrefixCache, kvstore.BlockStore])
def test_every_option_is_listed(kind: Any) -> None:
    options = [name for name in inspect.signature(kind.open).parameters if name != "cls"]
    cells = re.findall(r"^\| (`[^|]+`) \|", section("options.md", f"`{kind.__name__}.open`"), re.M)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(options)


def test_every_command_is_listed() -> None:
    commands = set()
    for name in app:
        if not name.startswith("-"):
            inner = [each for each in app[name] if not each.startswith("-")]
            commands |= {f"{name} {each}" for each in inner} or {name}
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `kvstore ((?:trace )?[\w-]+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(commands)


def test_every_public_name_has_its_page() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", (DOCS / "api" / "index.md").read_text(), re.MULTILINE)
    listed = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(kvstore.__all__)
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in set(listed) - set(dir(kvstore.errors)):
        assert re.search(rf":: kvstore\.{name}$", pages, re.MULTILINE), name
