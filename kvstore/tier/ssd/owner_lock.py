"""The locks of a store directory: the owner lock, and the lock on LMDB's database file."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from kvstore.errors import StoreBusy
from kvstore.tier.ssd.files import LOCK_FILE, LOOK, MAP_LOCK_FILE

_LOCK_ATTEMPTS, _LOCK_PAUSE_SECONDS = 3, 0.01  # ``owner_pid`` holds a shared lock briefly


def try_lock(path: Path) -> int | None:
    """Become the owner. Return the descriptor that holds the lock, None if another process holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path / LOCK_FILE, flags, 0o600)
    try:
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_ATTEMPTS - 1:
                    os.close(fd)
                    return None
                time.sleep(_LOCK_PAUSE_SECONDS)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def owner_pid(path: Path) -> int | None:
    """Return the process id of the store's owner, None if no process owns it."""
    try:
        fd = os.open(path / LOCK_FILE, LOOK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
    return None


def busy(path: Path) -> StoreBusy:
    """Return the error with the process id of the owner."""
    pid = owner_pid(path) or "unknown"
    msg = f"{path} is owned by process {pid}; stop that process, or use the store as a reader"
    return StoreBusy(msg)


def open_map_lock(path: Path) -> int:
    """Return a descriptor of LMDB's lock file, for ``try_alone``.

    Closing it drops every lock of this process on that file, LMDB's included: keep it open as long as the database.
    """
    return os.open(path / MAP_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def try_alone(path: Path, map_lock: int) -> None:
    """Prevent other processes from opening the database until ``let_in``.

    Each process with an open database holds a shared lock on the first byte of the lock file, taken before it
    reads. Source: ``mdb_env_setup_locks`` of LMDB 0.9. Raises ``StoreBusy`` if another process has the database open.
    """
    try:
        fcntl.lockf(map_lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except (BlockingIOError, PermissionError) as error:
        msg = f"{path} is open in another process that reads it; close it there first"
        raise StoreBusy(msg) from error


def let_in(map_lock: int, *, is_open: bool) -> None:
    """Allow other processes to open the database again; ``is_open`` keeps this process's own shared lock."""
    fcntl.lockf(map_lock, fcntl.LOCK_SH if is_open else fcntl.LOCK_UN, 1, 0)
