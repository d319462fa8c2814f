"""Opening the SSD tier of a store directory, as its owner or as a reader."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import lmdb

from kvstore.errors import ConfigError, StoreBusy, StoreError
from kvstore.tier.ssd import files
from kvstore.tier.ssd.capacity import MINIMUM_BLOCKS, PAGE_BYTES, minimum_capacity, pages_of
from kvstore.tier.ssd.database import cut_off, environment, require_room, try_open
from kvstore.tier.ssd.directory import prepare, refuse_links, require_store
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, remedy
from kvstore.tier.ssd.owner_lock import busy, try_lock
from kvstore.tier.ssd.quarantine import set_aside
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions
from kvstore.tier.ssd.version_file import claim_format

logger = logging.getLogger(__name__)

BIRTH_SECONDS = 5.0
"""Time that ``role="auto"`` waits for a store that another process is creating."""


def open_ssd(
    path: Path, options: SsdOptions, tier_class: type[SsdTier] = SsdTier
) -> tuple[SsdTier, Path | None]:
    """Open the store at ``path``; create it if it does not exist.

    Returns the tier, and the path to which a broken store was moved, None if there was none.

    Raises:
        ConfigError: for a path or a cap that cannot work.
        LayoutMismatch: if the store has another layout; the store is not changed.
        StoreBusy: if ``role="owner"`` and another process owns it.
        StoreError: if ``path`` is not a store, or a reader finds it broken.
    """
    least = minimum_capacity(options.frame_bytes)
    if options.capacity_bytes < least:
        raise ConfigError(
            f"ssd_bytes is {options.capacity_bytes}, expected at least {least}: room for "
            f"{MINIMUM_BLOCKS} blocks of {pages_of(options.frame_bytes) * PAGE_BYTES} bytes and "
            "the largest commits"
        )
    try:
        return _open(path, options, tier_class)
    except lmdb.LockError as error:
        raise _same_number(path) from error
    except MEDIUM_ERRORS as error:
        msg = f"the store at {path} cannot be opened: {error}; {_advice(error, options)}"
        raise StoreError(msg) from error


def _same_number(path: Path) -> StoreBusy:
    """Return the error for a process number that two reading processes share.

    It is the only LMDB lock that can be held at an opening: each reader locks the byte of its process number in the
    lock file. Source: ``mdb_reader_pid`` of LMDB 0.9.
    """
    return StoreBusy(
        f"{path} is open in another reader with this process's number, {os.getpid()}, which happens in containers; "
        "LMDB identifies processes by their numbers: let the containers share their process numbers (Kubernetes: "
        "shareProcessNamespace, Docker: --pid), restart this process under another number, or give each "
        "container its own store"
    )


def _advice(error: Exception, options: SsdOptions) -> str:
    """Return the remedy for an error that prevented a store from being opened."""
    if isinstance(error, PermissionError):
        return "give this user write permission there, which readers need too, or use another path"
    if "Cannot allocate memory" in str(error):
        return f"ssd_bytes is {options.capacity_bytes}, more than can be mapped here: choose less"
    return "free disk space, memory or descriptors, or use another path"


def _open(
    path: Path, options: SsdOptions, tier_class: type[SsdTier]
) -> tuple[SsdTier, Path | None]:
    if options.role == "reader":
        return _open_reader(path, options, tier_class), None
    prepare(path)
    deadline = time.monotonic() + BIRTH_SECONDS
    while True:
        lock = try_lock(path)
        try:
            if lock is not None:
                return _open_owner(path, options, lock, tier_class)
            if options.role == "owner":
                raise busy(path)
            return _open_reader(path, options, tier_class), None
        except (StoreBusy, StoreError):
            # Another process may be creating the store, or moving it.
            if options.role == "owner" or lock is not None or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _open_reader(path: Path, options: SsdOptions, tier_class: type[SsdTier]) -> SsdTier:
    require_store(path)
    refuse_links(path)
    claim_format(path, options.format_text)
    env = None
    try:
        while env is None:
            before = (path / files.DATA_FILE).stat().st_ino
            env = environment(path, options, is_owner=False)
            if (path / files.DATA_FILE).stat().st_ino != before:  # compacted meanwhile
                env.close()
                env = None
        problem = cut_off(path, env)
        if not problem:
            return tier_class(path, options, env, None)
    except lmdb.LockError as error:
        raise _same_number(path) from error
    except MEDIUM_ERRORS as error:
        if env is not None:
            env.close()
        raise StoreError(f"the store at {path} cannot be read: {error}; {remedy(error)}") from error
    env.close()
    msg = f"the store at {path} cannot be read: {problem}; its owner repairs it at its next open"
    raise StoreError(msg)


def _open_owner(
    path: Path, options: SsdOptions, lock: int | None, tier_class: type[SsdTier]
) -> tuple[SsdTier, Path | None]:
    aside: Path | None = None
    try:
        files.sweep(path)
        require_room(path, options)
        while lock is not None:
            claim_format(path, options.format_text)
            tier, problem = try_open(path, options, lock, tier_class)
            if tier is not None:
                return tier, aside
            if aside is not None:
                raise StoreError(f"no store can be made at {path}: {problem}")
            aside = set_aside(path)
            logger.warning("the store at %s was broken (%s): moved to %s", path, problem, aside)
            broken, lock = lock, None
            os.close(broken)
            lock = try_lock(path)
        raise busy(path)
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
