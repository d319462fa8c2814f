"""Atomic replacement of files: all bytes or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvstore.errors import StoreError

PRIVATE, PUBLIC = 0o600, 0o666
"""Modes of a new file, before the umask: for its owner alone, or for everyone."""


@contextmanager
def written(file: Path, mode: int = PRIVATE) -> Iterator[IO[bytes]]:
    """Yield a stream whose bytes replace ``file``, synced, when the block ends without an error.

    Until then they are in ``<name>.partial`` beside it. The target of a link is replaced, and the link
    stays. Pipes and devices are written directly. Raises ``StoreError`` if ``file`` cannot be written.
    """
    target = file.resolve()
    if target.exists() and not target.is_file():
        try:
            with target.open("wb") as stream:
                yield stream
        except OSError as error:
            raise _unwritable(file, error) from error
        return
    partial = target.with_name(target.name + ".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, mode), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise _unwritable(file, error) from error
        raise


def _unwritable(file: Path, error: OSError) -> StoreError:
    return StoreError(f"{file} cannot be written: {error.strerror or error}")
