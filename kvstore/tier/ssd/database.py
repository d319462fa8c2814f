"""The LMDB database of a store: opening, verification before use, and disk space."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import lmdb

from kvstore.errors import StoreError
from kvstore.tier.ssd import btree
from kvstore.tier.ssd.capacity import PAGE_BYTES
from kvstore.tier.ssd.faults import DAMAGE, NO_ROOM
from kvstore.tier.ssd.files import DATA_FILE, sync_folder
from kvstore.tier.ssd.values import SsdOptions

logger = logging.getLogger(__name__)

HEADS_SECONDS = 60.0
"""Most time for checking the values of a store that was not closed. The opening then continues, because every
read verifies its frames. docs/decisions/0020."""
_READERS = 512
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
"""Error codes of file systems without preallocation. Source: posix_fallocate(3)."""


class _OpenTier(Protocol):
    """A tier over an open database, as far as its opening uses it."""

    @property
    def file_bytes(self) -> int: ...
    def fact(self, name: str) -> bytes | None: ...
    def set_fact(self, name: str, value: bytes) -> None: ...
    def keep_lock(self) -> None: ...
    def give_up(self) -> None: ...


T = TypeVar("T", bound=_OpenTier)


def try_open(
    path: Path,
    options: SsdOptions,
    lock: int,
    tier_class: Callable[[Path, SsdOptions, lmdb.Environment, int], T],
    *,
    heads_seconds: float | None = HEADS_SECONDS,
) -> tuple[T | None, str]:
    """Verify and open the database as its owner. Return the tier, or None and the damage found."""
    env: lmdb.Environment | None = None
    tier: T | None = None
    is_good = False
    try:
        file = path / DATA_FILE  # verified before LMDB opens it, which can abort the process
        is_new = not file.exists() or not file.stat().st_size
        trees = btree.NO_TREES if is_new else btree.check(file)
        if trees.problem:
            return None, trees.problem
        env = environment(path, options, is_owner=True)
        problem = cut_off(path, env) or _problem_of_heads(path, env, trees, heads_seconds)
        if problem:
            return None, problem
        sync_folder(path)  # syncing a file does not make its name durable
        sync_folder(path.parent)
        tier = tier_class(path, options, env, lock)
        stored = tier.fact("format")
        if stored is None:
            tier.set_fact("format", options.format_text.encode())
        elif stored.decode(errors="replace") != options.format_text:
            return None, "its database and its VERSION file name different layouts"
        tier.set_fact("clean", b"0")
        if tier.fact("capacity") != str(options.capacity_bytes).encode():
            tier.set_fact("capacity", str(options.capacity_bytes).encode())
        if options.preallocate:
            _preallocate(path, options, tier.file_bytes)
        is_good = True
    except DAMAGE as error:
        return None, str(error)
    finally:
        if not is_good:
            if tier is not None:
                tier.keep_lock()
                tier.give_up()
            elif env is not None:
                env.close()
    return tier, ""


def environment(path: Path, options: SsdOptions, *, is_owner: bool) -> lmdb.Environment:
    """Open LMDB 0.9 with its defaults: each commit is synced, and no writemap. docs/decisions/0009."""
    env = lmdb.open(
        str(path),
        # A reader uses the map size that the owner wrote into the file, so the two never differ.
        map_size=options.capacity_bytes // PAGE_BYTES * PAGE_BYTES if is_owner else 0,
        readonly=not is_owner,
        create=is_owner,
        max_dbs=8,
        max_readers=_READERS,
        lib_version=0,
        metasync=False,
        readahead=False,
        mode=0o600,
        max_spare_txns=0,  # a spare transaction would lose its slot when a forked child reopens
    )
    env.reader_check()  # frees the slots of killed readers, of ``_READERS`` in all
    return env


def _problem_of_heads(
    path: Path, env: lmdb.Environment, trees: btree.Trees, seconds: float | None
) -> str:
    """Return the damage in the values of a store that was not closed, empty for none.

    LMDB trusts the header of a value when it frees its pages. A store with a corrupt header is never marked clean.
    """
    if not env.stat()["entries"] or _is_clean(env):
        return ""
    try:
        return btree.problem_of_heads(path / DATA_FILE, trees.values, seconds)
    except TimeoutError:
        message = "%s was not closed, and the check of its values takes more than %.0f s: opened unchecked"
        logger.warning(message, path, seconds)
        return ""


def cut_off(path: Path, env: lmdb.Environment) -> str:
    """Return the problem of a truncated file, empty for none: reading it through the map would raise SIGBUS."""
    needed = (int(env.info()["last_pgno"]) + 1) * PAGE_BYTES
    size = (path / DATA_FILE).stat().st_size  # after `needed`: an owner may extend it
    if size >= needed or not env.stat()["entries"]:
        return ""
    return f"{DATA_FILE} has {size} bytes, expected at least {needed}"


def _is_clean(env: lmdb.Environment) -> bool:
    db = env.open_db(b"sys", create=False)
    with env.begin() as txn:
        return bool(txn.get(b"clean", db=db) == b"1")


def require_room(path: Path, options: SsdOptions) -> None:
    """Raise ``StoreError`` if the disk has less free space than ``preallocate`` needs."""
    if not options.preallocate:
        return
    taken = 0
    with suppress(FileNotFoundError):
        taken = (path / DATA_FILE).stat().st_blocks * 512  # the unit of stat(2)
    facts = os.statvfs(path)
    wanted, free = options.capacity_bytes - taken, facts.f_bavail * facts.f_frsize
    if wanted > free:
        raise StoreError(_too_large(path, options, f"{wanted} bytes more, found {free} free"))


def _too_large(path: Path, options: SsdOptions, found: str) -> str:
    return (
        f"preallocate: {path / DATA_FILE} needs the {options.capacity_bytes} bytes of ssd_bytes, {found}; "
        "nothing was allocated: free as much, use a smaller ssd_bytes, or open it without preallocate"
    )


def _preallocate(path: Path, options: SsdOptions, used: int) -> None:
    """Allocate the disk space of the cap, all or nothing, so that a full disk is detected at start-up.

    ``used`` bytes of the file are pages. Skipped if the file system cannot allocate ahead.

    Raises:
        StoreError: if a quota or a limit that free space does not show prevents it.
        OSError: if the medium fails.
    """
    file = path / DATA_FILE
    try:
        allocate(file, used, max(1, options.capacity_bytes - used))
        allocate(file, 0, options.capacity_bytes)  # the holes between pages too
    except OSError as error:
        os.truncate(file, used)
        if error.errno in _NO_ALLOCATION:
            logger.warning("preallocate: space for %s cannot be allocated now: %s", file, error)
        elif error.errno in NO_ROOM:
            raise StoreError(
                _too_large(path, options, f"which the system refused: {error.strerror}")
            ) from error
        else:
            raise


def allocate(file: Path, first: int, size: int) -> None:
    """Allocate bytes ``[first, first + size)`` of a file on disk, or raise ``OSError`` (with a part allocated)."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # not enforced below the file's length
    if most != resource.RLIM_INFINITY and first + size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, first, size)
    finally:
        os.close(fd)
