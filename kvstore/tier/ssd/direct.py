"""Direct reads (``O_DIRECT``) of the data file, past the kernel's page cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

PAGE_BYTES = 4096  # alignment of offset, length and memory of direct reads on any disk


class DirectFile:
    """A file opened for direct reads, which bypass the page cache, so that no hot page is evicted. Threads: one."""

    def __init__(self, path: Path, largest: int) -> None:
        """Open ``path`` for reads of up to ``largest`` bytes from a page. Raises ``OSError`` if unsupported."""
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        self._memory = mmap.mmap(-1, (-(-largest // PAGE_BYTES) + 1) * PAGE_BYTES)
        self._fd = os.open(path, flags)

    def read(self, page: int, skip: int, size: int) -> memoryview | None:
        """Return ``size`` bytes from offset ``skip`` of a page, None on a failure. Valid until the next read."""
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
        """Drop a frame from the page cache, so that the next read accesses the disk."""
        os.posix_fadvise(self._fd, page * PAGE_BYTES, size + PAGE_BYTES, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        # The memory is freed with its last view.
