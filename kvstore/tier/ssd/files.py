"""The files of a store directory: names, durable writes, and replacement of the data file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

DATA_FILE = "data.mdb"
LOCK_FILE = "owner.lock"
MAP_LOCK_FILE = "lock.mdb"
VERSION_FILE = "VERSION"
SECRET_FILE = "secret"  # noqa: S105 - the name of a file
_PARTIAL = ".partial"  # suffix of a file during its write; left behind by a killed process
PARTIAL_FILES = (VERSION_FILE + _PARTIAL, SECRET_FILE + _PARTIAL)
FILES = (DATA_FILE, MAP_LOCK_FILE, LOCK_FILE, VERSION_FILE, SECRET_FILE)
_COPY_FOLDER = "compacting"  # inside the store, because a rename must stay on one file system
LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file of unknown type: they neither block on a pipe nor follow a link."""


def write_file(path: Path, name: str, content: bytes) -> None:
    """Write a small file of a store, durably and atomically. Owner only."""
    partial = path / (name + _PARTIAL)
    _remove(partial)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / name)
    sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Sync a directory, unless this user may not read it or its file system does not support it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove a file or folder of the owner. Follows no link."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def new_copy_folder(path: Path) -> Path:
    """Return a new private folder in a store, for a compacted copy of its data file."""
    sweep(path)
    folder = path / _COPY_FOLDER
    folder.mkdir(mode=0o700)
    return folder


def sweep(path: Path) -> None:
    """Remove the unfinished copy of a process that was killed during a compaction. Owner only."""
    _remove(path / _COPY_FOLDER)


def exchange(path: Path, folder: Path) -> None:
    """Replace the data file atomically by the one in ``folder``, with private permissions: LMDB uses the umask."""
    (folder / DATA_FILE).chmod(0o600)
    (folder / DATA_FILE).replace(path / DATA_FILE)
    sync_folder(path)
