"""The directory of a store: its permissions, and the test of whether it is a store. The database is not opened."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.errors import ConfigError, StoreError
from kvstore.tier.ssd import files
from kvstore.tier.ssd.file_system import check_file_system
from kvstore.tier.ssd.files import DATA_FILE, FILES, VERSION_FILE
from kvstore.tier.ssd.quarantine import is_set_aside

logger = logging.getLogger(__name__)


def prepare(path: Path) -> None:
    """Make ``path`` a private directory that is a store or may become one.

    Raises:
        ConfigError: if it is a file, belongs to another user, is writable by others, is on a network file system
            or FUSE, or one of its files is a link.
        StoreError: if it has files but is not a store. Nothing is changed then.
    """
    if path.exists() and not path.is_dir():
        msg = f"{path} is a file, expected a directory for the store; choose another path"
        raise ConfigError(msg)
    check_file_system(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in made:
            files.sync_folder(folder.parent)
    except OSError as error:
        msg = f"{path} cannot be created: {error.strerror}; choose a path you can write to"
        raise ConfigError(msg) from error
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user id {owner}, expected {os.geteuid()}, the user of this process; "
            f"run chown -R {os.geteuid()} on it, or use a directory of your own, in it if you may write there"
        )
    refuse_links(path)
    require_store_or_empty(path)
    tighten(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path} is writable by others (mode {mode:04o}), expected a directory of the store's own; "
            "run chmod 700 on it, or use another path"
        )
    _refuse_foreign_files(path)


def tighten(path: Path) -> None:
    """Make a store of this user private again, for example after Kubernetes gave a group access to it.

    ``fsGroup`` makes everything in a volume readable and writable for a group, at each mount. A directory that is
    writable for all users is changed only if it is a store: otherwise it may belong to others.
    """
    with suppress(FileNotFoundError):
        facts = path.stat()
        shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_own = facts.st_uid == os.geteuid() and not facts.st_mode & stat.S_ISVTX
        may_change = not facts.st_mode & stat.S_IWOTH or (path / VERSION_FILE).exists()
        if not (shared and is_own and may_change):
            return
        path.chmod(stat.S_IMODE(facts.st_mode) & ~0o077)
        for name in FILES:
            with suppress(FileNotFoundError):
                found = (path / name).lstat()
                if stat.S_ISREG(found.st_mode) and found.st_uid == facts.st_uid:
                    (path / name).chmod(0o600)
        message = "%s was writable by others (mode %04o): it is private again, its files too"
        logger.warning(message, path, stat.S_IMODE(facts.st_mode))


def _refuse_foreign_files(path: Path) -> None:
    """Raise ``ConfigError`` if a file of the store belongs to another user, who could change it."""
    for name in FILES:
        with suppress(FileNotFoundError):
            owner = (path / name).lstat().st_uid
            if owner != os.geteuid():
                raise ConfigError(
                    f"{path / name} belongs to user id {owner}, expected {os.geteuid()}, the owner of the "
                    f"directory; run chown {os.geteuid()} on it if you know its origin, or use another path"
                )


def refuse_links(path: Path) -> None:
    """Raise ``ConfigError`` if a file of a store is not a regular file."""
    for name in FILES:
        with suppress(FileNotFoundError):
            mode = (path / name).lstat().st_mode
            if not stat.S_ISREG(mode):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise ConfigError(
                    f"{path / name} is {what}, expected a file of the store's own; link the directory "
                    "instead, or choose another path"
                )


def require_store_or_empty(path: Path) -> None:
    """Raise ``StoreError`` if ``path`` has files but is not a store."""
    if not (path / VERSION_FILE).exists():
        known = {files.LOCK_FILE, files.SECRET_FILE, *files.PARTIAL_FILES}
        names = (item.name for item in path.iterdir())
        strangers = sorted(n for n in names if n not in known and not is_set_aside(path, n))
        # Checked again: another process may have become the owner and created the store meanwhile.
        if strangers and not (path / VERSION_FILE).exists():
            msg = f"{path} is not a kvstore store: it has no {VERSION_FILE} file but holds {strangers[0]!r}; choose a new or empty directory"
            raise StoreError(msg)


def require_store(path: Path) -> None:
    """Raise ``StoreError`` unless ``path`` is a store."""
    if not path.exists():
        raise StoreError(f"no store at {path}: there is no such directory")
    if not path.is_dir():
        raise StoreError(f"{path} is a file, expected a store's directory")
    if not (path / VERSION_FILE).exists() or not (path / DATA_FILE).exists():
        msg = f"{path} is not a kvstore store: it has no {VERSION_FILE} and {DATA_FILE}"
        below = sorted(item.parent.name for item in path.glob(f"*/{VERSION_FILE}"))
        if below:
            msg += f"; there are stores in it: {', '.join(below)}"
        raise StoreError(msg)
