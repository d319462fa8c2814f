"""The stores opened by this process: each directory once, shared by all its openings.

A forked child drops inherited stores. A normal exit commits the accepted blocks.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from kvstore.errors import KVStoreError, LayoutMismatch, StoreBusy
from kvstore.store.agreement import check_agreement
from kvstore.store.open_store import OpenStore
from kvstore.store.opening import take_over
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions
from kvstore.transfer.interrupts import uninterrupted

T = TypeVar("T", bound=OpenStore)
logger = logging.getLogger(__name__)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Share(Generic[T]):
    """The share of one opening in an open store, until it is released or no longer referenced."""

    shared: T


class Sharing:
    """A context manager over one share of an open store."""

    _share: Share[Any] | None

    def close(self) -> None:
        """Flush, and close the store with its last opening. Idempotent."""
        if self._share is not None:
            unshare(self._share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._share is None:
            return super().__repr__()
        store = self._share.shared
        state = "closed" if store.is_closed else "owner" if store.is_owner else "reader"
        return f"<{type(self).__name__} of {store.ssd.path}, {state}>"


@dataclass(slots=True)
class _SharedStore:
    """An open store and its shares."""

    shared: OpenStore
    options: Any  # options in force: those of the first opening
    shares: weakref.WeakSet[Share[Any]] = field(default_factory=weakref.WeakSet)
    """A weak set, not a counter: a share that an interrupted caller never received is removed automatically."""

    @property
    def is_held(self) -> bool:
        """Whether a share is alive. After an interrupt the set may contain a dead one."""
        return any(True for _ in self.shares)


_open_stores: dict[tuple[int, int], _SharedStore] = {}  # by inode: LMDB must not open one twice
_inherited: dict[tuple[int, int], OpenStore] = {}  # of the parent, until a forked child reopens
_opening = threading.RLock()
_forking = threading.local()  # the tiers that a thread stopped for its fork


def share(
    path: Path,
    role: Literal["auto", "owner", "reader"],
    kind: type[T],
    options: Any,
    given: Collection[str],
    opening: Callable[[], tuple[SsdOptions, Callable[[SsdTier], T]]],
) -> Share[T]:
    """Return a share of the store at ``path``, which is opened if this process does not have it open.

    ``options`` has every option of the caller as an attribute; ``given`` names those that were passed. ``opening``
    returns the options of the tier and the function that builds the store.

    Raises:
        ConfigError: if the store is open in this process with other options; each difference is named.
        LayoutMismatch: if the store has another format; it is left untouched.
        StoreBusy: if ``role="owner"`` and it is open as a reader, or owned by another process.
        StoreError: if ``path`` is not a store, or a reader finds it broken.
    """

    def open_share() -> Share[T]:
        with _opening:
            known = _identity(path)
            if known is not None and known in _open_stores:
                entry = _open_stores[known]
                if not isinstance(entry.shared, kind):
                    msg = f"{path} is open in this process for blocks of another kind, and was left untouched; use another path"
                    raise LayoutMismatch(msg)
                check_agreement(path, options, entry.options, given)
                if role == "owner" and not entry.shared.is_owner:
                    raise StoreBusy(
                        f"{path} is open as a reader in this process already; close that before "
                        "opening it with role='owner'"
                    )
                entry.shared.metrics.shared_opens += 1
                return _new_share(entry)
            if known is not None and known in _inherited:
                _inherited.pop(known).ssd.forget()
            ssd_options, build = opening()
            store = take_over(path, ssd_options, build)
            if role == "auto" and not store.is_owner:
                message = "%s is owned by another process: this one reads it and stores nothing"
                logger.warning(message, path)
            made = _identity(path)
            assert made is not None
            _open_stores[made] = _SharedStore(store, options)
            return _new_share(_open_stores[made])

    return uninterrupted(open_share, unshare)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def is_open_here(path: Path) -> bool:
    """Return whether this process has the store at ``path`` open, as owner or reader."""
    with _opening:
        return _identity(path) in _open_stores


def unshare(holding: Share[Any]) -> None:
    """Release a share; the last one closes the store. Idempotent."""
    uninterrupted(lambda: _unshare(holding))


def _unshare(holding: Share[Any]) -> None:
    with _opening:
        for key, entry in list(_open_stores.items()):
            if holding in entry.shares:
                entry.shares.discard(holding)
                _close_unheld(key, entry)


def _close_unheld(key: tuple[int, int], entry: _SharedStore) -> None:
    """Close a store that has no share. The caller holds the lock."""
    if not entry.is_held:
        del _open_stores[key]
        entry.shared.close()


def _new_share(entry: _SharedStore) -> Share[Any]:
    holding = Share(entry.shared)
    entry.shares.add(holding)
    ended = weakref.finalize(holding, _on_dropped, entry.shared)
    ended.atexit = False  # at exit ``_close_all`` closes the stores
    return holding


def _on_dropped(shared: OpenStore) -> None:
    """Start a thread that closes a store without shares, as after an interrupt. Takes no lock and does not wait."""
    entries = list(_open_stores.values())
    if shared.is_closed or any(entry.is_held for entry in entries if entry.shared is shared):
        return
    with suppress(RuntimeError):  # during interpreter shutdown
        _thread.start_new_thread(_close_dropped, (shared,))


def _close_dropped(shared: OpenStore) -> None:
    with _opening, suppress(KVStoreError):
        for key, entry in list(_open_stores.items()):
            if entry.shared is shared:
                _close_unheld(key, entry)


def _before_fork() -> None:
    _forking.tiers = [entry.shared.ssd for entry in list(_open_stores.values())]
    for tier in _forking.tiers:
        tier.before_fork()


def _after_fork_in_parent() -> None:
    for tier in _forking.tiers:
        tier.after_fork()


def _after_fork_in_child() -> None:
    """Drop every inherited store, so that the child can open its own."""
    global _opening  # noqa: PLW0603 - a thread that does not exist in the child may hold the lock
    _opening = threading.RLock()
    for key, entry in _open_stores.items():
        entry.shared.abandon()
        _inherited[key] = entry.shared
    _open_stores.clear()


def _close_all() -> None:
    """Commit the accepted blocks of every open store at a normal exit."""
    for entry in list(_open_stores.values()):
        with suppress(KVStoreError):
            entry.shared.close()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
atexit.register(_close_all)
