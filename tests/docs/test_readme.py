"""The code of the README and the quickstarts runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """Run code in a new process in ``folder`` and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)},
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
    assert printed == ["896 of 1000 tokens restored\n"] * 2
    assert printed[0].strip() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short_enough_to_be_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert len(text.encode()) <= 8_500
