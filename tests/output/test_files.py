"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import StoreError
from kvstore.output.files import PRIVATE, PUBLIC, written


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(file: Path) -> None:
    with written(file) as stream:
        stream.write(b"half")
        raise KeyError


@pytest.mark.parametrize("mode", [PRIVATE, PUBLIC])
def test_a_file_is_there_when_it_is_whole(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"before")
    with written(file, mode) as stream:
        stream.write(b"af")
        assert file.read_bytes() == b"before"
        stream.write(b"ter")
    assert file.read_bytes() == b"after"
    assert names(tmp_path) == ["f"]
    assert not file.stat().st_mode & 0o777 & ~mode
    assert file.stat().st_mode & 0o600 == 0o600


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"before")
    with pytest.raises(KeyError):
        write_half(file)
    assert file.read_bytes() == b"before"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("target", ["missing/f", "folder"])
def test_a_place_that_takes_no_file_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(StoreError, match=rf"{target} cannot be written: "),
        written(tmp_path / target) as stream,
    ):
        stream.write(b"x")
    assert names(tmp_path) == ["folder"]
