"""Files that others read: all of their bytes or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvstore.errors import StoreError

PRIVATE, PUBLIC = 0o600, 0o666
"""Modes of a new file: for its owner alone, or as the user's umask has it."""


@contextmanager
def written(file: Path, mode: int = PRIVATE) -> Iterator[IO[bytes]]:
    """Give a stream whose bytes become ``file``, durably, when the block ends without an error.

    Until then they are in ``<name>.partial`` beside it, and a file that was there stays as it was. What a
    link names is replaced, and the link stays. A pipe or a device takes bytes as they come.

    Raises:
        StoreError: if it cannot be written.
    """
    place = file.resolve()
    if place.exists() and not place.is_file():
        try:
            with place.open("wb") as stream:
                yield stream
        except OSError as error:
            raise _unwritable(file, error) from error
        return
    partial = place.with_name(place.name + ".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, mode), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(place)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise _unwritable(file, error) from error
        raise


def _unwritable(file: Path, error: OSError) -> StoreError:
    return StoreError(f"{file} cannot be written: {error.strerror or error}")
