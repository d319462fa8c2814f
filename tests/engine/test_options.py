"""The option that identifies the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import ConfigError, weights_digest
from kvstore.engine.options import check_weights


@pytest.mark.parametrize("given", [{}, {"weights": ""}, {"weights": " "}])
def test_weights_that_nobody_names_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="config: 'weights' is missing") as caught:
        check_weights("config", "weights", given)
    for word in ("weights_digest", "revision", "'unchecked'"):
        assert word in str(caught.value)


@pytest.mark.parametrize("value", ["unchecked", "revision 7", "0" * 64])
def test_weights_that_are_named_are_taken(value: str) -> None:
    check_weights("config", "weights", {"weights": value})


def test_the_command_that_the_message_gives_prints_the_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError) as caught:
        check_weights("config", "weights", {})
    code = str(caught.value).split("python -c '")[1].split("')")[0].replace("FOLDER", str(tmp_path))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == weights_digest(tmp_path)
