"""The distribution: its name and version, and an installation without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvstore import ConfigError, distribution

ROOT = Path(__file__).parent.parent
WITHOUT_TORCH = """
import runpy, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")

sys.meta_path.insert(0, NoTorch())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_torch_a_store_is_used_and_what_needs_torch_names_the_extra() -> None:
    done = run_python(WITHOUT_TORCH + "runpy.run_path('tests/smoke.py')")
    assert done.returncode == 0, done.stderr


def test_without_torch_an_opening_says_once_that_there_is_no_device_tier(tmp_path: Path) -> None:
    code = f"""
import logging
from pathlib import Path
from tests.stores import DENSE, open_cache
logging.basicConfig(level=logging.INFO)
for _ in range(3):
    first = open_cache(Path({str(tmp_path / "s")!r}), DENSE, device_bytes=None)
first.close()
open_cache(Path({str(tmp_path / "none")!r}), DENSE, device_bytes=0).close()
"""
    done = run_python(WITHOUT_TORCH + code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no device tier") == 1
    assert "pip install '.[torch]' (in a checkout of kvstore-llm)" in done.stderr


def test_a_torch_that_fails_to_import_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a library is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    assert distribution.has_torch()
    with pytest.raises(ConfigError, match=r"a library is missing.*\[torch\]"):
        distribution.require_torch()


def test_the_project_file_and_the_package_agree_on_the_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution.NAME
    extras = project["optional-dependencies"]
    assert set(extras) == {
        *("torch", "transformers", "vllm", "sglang", "lmcache", "conformance", "dev")
    }
    assert not any("torch" in requirement for requirement in project["dependencies"])


def test_every_folder_with_modules_is_a_package_that_the_wheel_takes() -> None:
    folders = {path.parent for path in (ROOT / "kvstore").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
