"""Quarantine of a broken store, as a directory ``<name>.bad-<time>``."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from kvstore.tier.ssd import files

_SUFFIX = re.compile(r"\.bad-\d{8}T\d{6}")


def set_aside(path: Path) -> Path:
    """Rename a broken store to ``<name>.bad-<time>``, remove older ones, and return the new path.

    Both directories keep the secret: a broken database does not change it. If the directory cannot be renamed, such
    as a mount point, its files are moved to a subdirectory.
    """
    for folder in (path.parent, path):
        with suppress(OSError):
            for older in [item for item in folder.iterdir() if is_set_aside(path, item.name)]:
                shutil.rmtree(older, ignore_errors=True)
    name = f"{path.name}.bad-{time.strftime('%Y%m%dT%H%M%S')}"
    target = path.with_name(name)
    try:
        path.rename(target)
    except OSError:
        target = path / name
        target.mkdir(mode=0o700)
        for item in (files.DATA_FILE, files.MAP_LOCK_FILE, files.VERSION_FILE):
            if (path / item).exists():
                (path / item).rename(target / item)
        _copy_secret(path, target)
        return target
    path.mkdir(mode=0o700)
    _copy_secret(target, path)
    return target


def _copy_secret(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        files.write_file(target, files.SECRET_FILE, (source / files.SECRET_FILE).read_bytes())


def is_set_aside(path: Path, name: str) -> bool:
    """Return whether ``name`` is a quarantine directory of the store at ``path``."""
    start, rest = name[: len(path.name)], name[len(path.name) :]
    return start == path.name and _SUFFIX.fullmatch(rest) is not None
