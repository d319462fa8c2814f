"""The library of preload.c: compiled when needed, and called from its own process."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
WRITE, SYNC, READ = range(3)
"""Operations on ``data.mdb`` that can be made to fail."""
FOR_EVER = 1 << 60


def is_loaded() -> bool:
    """Return whether the library is loaded in this process."""
    return hasattr(ctypes.CDLL(None), "torture_begin")


def build(folder: Path) -> Path:
    """Compile the library. Raises ``RuntimeError`` with the compiler's output."""
    library = folder / "preload.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [os.environ.get("CC", "cc"), *flags, "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return library


def restart_with_it(module: str, arguments: Sequence[str], folder: Path) -> None:
    """Start this process again with the library loaded."""
    environment = {**os.environ, "LD_PRELOAD": str(build(folder)), "TORTURE_FOLDER": str(folder)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def begin(folder: Path, journal: Path | None = None) -> None:
    """Watch the files below ``folder``, and record their operations in ``journal``."""
    to = b"" if journal is None else os.fsencode(journal)
    ctypes.CDLL(None).torture_begin(os.fsencode(folder), to)


def mark(text: str) -> None:
    """Append a text to the journal, after all earlier operations."""
    data = text.encode()
    ctypes.CDLL(None).torture_mark(data, ctypes.c_size_t(len(data)))


def fail(operation: int, error: int = errno.EIO, *, skip: int = 0, count: int = 1) -> None:
    """After ``skip`` more calls, make ``count`` calls of an operation fail with ``error``."""
    ctypes.CDLL(None).torture_fault(operation, ctypes.c_long(skip), ctypes.c_long(count), error)


def kill(operation: int, *, skip: int) -> None:
    """After ``skip`` more calls of an operation, kill this process instead of the next."""
    fail(operation, -1, skip=skip)


def heal() -> None:
    """Make every operation succeed again."""
    for operation in (WRITE, SYNC, READ):
        fail(operation, count=0)


def pending(operation: int) -> int:
    """Return how many failures of an operation are still to come."""
    call = ctypes.CDLL(None).torture_pending
    call.restype = ctypes.c_long
    return int(call(operation))
