"""The code of the README and the quickstarts runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTARTS = ("start-engine", "start-footprint", "start-simulate")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language; those that name none hold output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def run(code: str, folder: Path, *, shell: bool = False) -> str:
    """Run code in a new process in ``folder`` and return what it printed."""
    python = [sys.executable, "-W", "error", "-c", code]
    bash = ["bash", "-euc", f'kvstore() {{ "{sys.executable}" -m kvstore "$@"; }}\n{code}']
    done = subprocess.run(
        bash if shell else python,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("head", ["", WITHOUT_TORCH], ids=["with-torch", "without-torch"])
def test_the_quickstart_of_the_readme_runs_twice_as_printed(head: str, tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    printed = [run(head + code, tmp_path) for _ in range(2)]
    assert printed == ["0 of 1000 tokens restored\n", "896 of 1000 tokens restored\n"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{line.strip()}`" in text for line in printed)


def test_the_readme_is_short_enough_to_be_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert len(text.encode()) <= 8_500


@pytest.mark.parametrize("page", QUICKSTARTS)
def test_a_quickstart_runs_twice_as_printed(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    code = "".join(blocks(f"docs/{page}.md", "python"))
    printed = [run(code, tmp_path) for _ in range(2)]
    printed += [run(each, tmp_path, shell=True) for each in blocks(f"docs/{page}.md", "bash")]
    lines = {line.strip() for each in printed for line in each.splitlines()}
    for output in blocks(f"docs/{page}.md", ""):
        assert {line.strip() for line in output.splitlines()} <= lines
    said = re.findall(r"prints? `([^`]+)`|`(window from replay)` and `([^`]+)`", text)
    assert {part for parts in said for part in parts if part} <= lines


def test_the_tables_of_the_readme_are_what_the_command_prints(tmp_path: Path) -> None:
    (console, _) = blocks("README.md", "")
    command, *rows = (line for line in console.splitlines() if line != "...")
    printed = run(command.removeprefix("$ "), tmp_path, shell=True)
    assert rows
    assert set(rows) <= set(printed.splitlines())
