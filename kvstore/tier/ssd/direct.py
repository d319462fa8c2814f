"""Reading the data file past the kernel's cache: what the disk holds, not what was read before."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

PAGE_BYTES = 4096
"""What offset, length and memory of a direct read are multiples of: LMDB's page, and as much as any
disk asks for."""


class DirectFile:
    """A file opened for direct reads.

    The cache of the kernel is neither asked nor filled, so a walk over a whole store leaves what is
    hot where it is. Threads: one.
    """

    def __init__(self, path: Path, largest: int) -> None:
        """Open ``path`` for reads of up to ``largest`` bytes, those before them on a page included.

        Raises:
            OSError: where the file system has no direct reads.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        self._memory = mmap.mmap(-1, (-(-largest // PAGE_BYTES) + 1) * PAGE_BYTES)
        self._fd = os.open(path, flags)

    def read(self, page: int, skip: int, size: int) -> memoryview | None:
        """Return ``size`` bytes from ``skip`` bytes into a page on, None if they cannot be had.

        What is returned is good until the next read.
        """
        length = -(-(skip + size) // PAGE_BYTES) * PAGE_BYTES
        if length > len(self._memory):
            return None
        view = memoryview(self._memory)
        try:
            count = os.preadv(self._fd, [view[:length]], page * PAGE_BYTES)
        except (OSError, OverflowError):
            return None
        return view[skip : skip + size].toreadonly() if count >= skip + size else None

    def forget(self, page: int, size: int) -> None:
        """Let the kernel drop what it keeps of a place, so that another read asks the disk."""
        os.posix_fadvise(self._fd, page * PAGE_BYTES, size + PAGE_BYTES, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        # The memory goes with the last view of it.
