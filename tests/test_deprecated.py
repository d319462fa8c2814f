"""Old module names: they import the new module and warn."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvstore.deprecated import MOVED

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_module_name_is_the_new_module_and_warns(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new};") as caught:
        found = import_module(old)
    assert found is import_module(new)
    assert found.__spec__ is not None
    assert found.__spec__.name == new
    assert len(caught) == 1


def test_the_warning_points_at_the_line_that_imports() -> None:
    code = "import kvstore\nfrom kvstore.assembly import PrefixCache\nassert PrefixCache is kvstore.PrefixCache"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr.startswith("<string>:2: DeprecationWarning: kvstore.assembly is now")


def test_the_page_of_upgrades_lists_every_old_name() -> None:
    page = (ROOT / "docs" / "upgrade.md").read_text()
    for old, new in MOVED.items():
        assert f"| `{old}` | `{new}` |" in page
