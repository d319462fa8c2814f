"""The files of a store directory: their names, durable writes, and the exchange of the data file."""

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
PARTIAL_SECRET = "secret.partial"  # noqa: S105
PARTIAL_VERSION = "VERSION.partial"
"""``VERSION`` while it is written. A process killed during the write leaves it behind."""
FILES = (DATA_FILE, MAP_LOCK_FILE, LOCK_FILE, VERSION_FILE, SECRET_FILE)
_COPY_FOLDER = "compacting"
"""Folder of a compacted copy: inside the store, because a rename must stay in one file system."""
LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file of unknown type: they neither wait for a pipe nor follow a link."""


def write_file(path: Path, name: str, partial_name: str, content: bytes) -> None:
    """Write a small file of a store, durably and atomically. For the owner alone."""
    partial = path / partial_name
    _remove(partial)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / name)
    sync_folder(path)


def sync_names(path: Path) -> None:
    """Sync the directory entries of a store and of its files, which no sync of a file does."""
    sync_folder(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a directory, unless this user may not read it or its file system has no such sync."""
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
    """Remove a file or folder that belongs to the owner alone. Follows no link."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def new_copy_folder(path: Path) -> Path:
    """Return a new private folder in a store for a compacted copy of its data file."""
    sweep(path)
    folder = path / _COPY_FOLDER
    folder.mkdir(mode=0o700)
    return folder


def sweep(path: Path) -> None:
    """Remove the compacted copy of a process that was killed while it compacted. For the owner."""
    _remove(path / _COPY_FOLDER)


def exchange(path: Path, folder: Path) -> None:
    """Replace the data file atomically by the one in ``folder``.

    LMDB gives a copy the permissions of the user's umask, so they are set here.
    """
    (folder / DATA_FILE).chmod(0o600)
    (folder / DATA_FILE).replace(path / DATA_FILE)
    sync_folder(path)
