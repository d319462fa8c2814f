"""The window pool: window KV in host memory by prefix hash, kept for minutes and never written to a disk."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codec.host import on_host
from kvstore.errors import brief
from kvstore.identity.block import BlockHash
from kvstore.layout import Layout
from kvstore.layout.replay import WindowSnapshot

POISON = 0xFF  # byte that fills freed rows in debug mode: NaN in every float format of rows


@dataclass(slots=True)
class _Pooled:
    snapshot: WindowSnapshot
    owner: BlockHash
    size: int
    expires: float
    pins: int = 0
    is_used: bool = False  # whether a hit has used it
    is_doomed: bool = False  # dropped while pinned; freed with the last pin


class WindowPool:
    """Window snapshots in host memory, with a cap in bytes, a time to live and LRU eviction.

    Invariants:
        ``used_bytes`` equals the sizes of all snapshots and never exceeds ``capacity_bytes``.
        A pinned snapshot stays readable until its last pin is dropped.

    Threads: the caller serialises every call.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        capacity_bytes: int,
        ttl_seconds: float,
        rows: int,
        clock: Callable[[], float],
        poison_on_free: bool = False,
    ) -> None:
        self.layout = layout
        self.capacity_bytes = capacity_bytes
        self.ttl_seconds = ttl_seconds
        self.rows = rows
        """Most rows kept of a snapshot, rounded up to whole entries; older rows are cut off."""
        self.used_bytes = 0
        self._cut = math.lcm(*(group.tokens_per_entry for group in layout.window_groups))
        self._clock = clock
        self._poison_on_free = poison_on_free
        self._held: OrderedDict[BlockHash, _Pooled] = OrderedDict()  # least recently used first
        self._pinned: dict[int, _Pooled] = {}  # by identity of the returned snapshot
        self.evicted = 0
        self.expired = 0
        self.refused = 0  # windows that did not fit next to pinned ones, or at all
        self.evicted_unused = 0  # windows evicted or expired before any hit used them

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one whole snapshot, the smallest usable capacity."""
        rows = -(-self.rows // self._cut) * self._cut
        return sum(
            len(group.layers) * (rows // group.tokens_per_entry) * group.entry_bytes
            for group in self.layout.window_groups
        )

    @property
    def is_too_small(self) -> bool:
        """Whether no whole snapshot fits, so that lookups that need a window find none."""
        return self.capacity_bytes < self.snapshot_bytes

    def __len__(self) -> int:
        """Number of snapshots."""
        return len(self._held)

    def put(
        self,
        key: BlockHash,
        snapshot: WindowSnapshot,
        *,
        owner: BlockHash,
        is_replayed: bool = False,
    ) -> bool:
        """Copy ``snapshot`` to the pool as the window that ends the prefix ``key`` of ``owner``.

        Returns False, without a change, for a replayed snapshot of a key already in the pool, and for a snapshot that
        does not fit next to pinned ones.
        """
        self.expire()
        present = self._held.get(key)
        if present is not None and is_replayed:
            return False
        older = max(0, snapshot.stop - self.rows - snapshot.start)
        first = snapshot.start + older // self._cut * self._cut
        rows = {}
        for group in self.layout.window_groups:
            skip = (first - snapshot.start) // group.tokens_per_entry
            source = _rows_on_host(group.name, snapshot.rows[group.name])
            rows[group.name] = np.array(source[:, skip:], np.uint8, order="C")
        size = sum(array.nbytes for array in rows.values())
        if size > self._obtainable_bytes():
            self.refused += 1
            return False
        if present is not None:
            self._drop(key, present)
        self._make_room(size)
        kept = WindowSnapshot(first, snapshot.stop, rows, "replay" if is_replayed else "pool")
        self._held[key] = _Pooled(kept, owner, size, self._clock() + self.ttl_seconds)
        self.used_bytes += size
        return True

    def peek(self, key: BlockHash) -> WindowSnapshot | None:
        """Return the snapshot that ends ``key``, without changing its recency."""
        held = self._held.get(key)
        if held is None or held.expires <= self._clock():
            return None
        return held.snapshot

    def longest(self, hashes: Sequence[BlockHash], blocks: int) -> int:
        """Return the most blocks, up to ``blocks``, of a prefix whose window is in the pool."""
        return next((n for n in range(blocks, 0, -1) if self.peek(hashes[n - 1])), 0)

    def pin(self, key: BlockHash) -> WindowSnapshot | None:
        """Return the snapshot that ends ``key``, as most recent, protected until ``unpin``."""
        if self.peek(key) is None:
            return None
        held = self._held[key]
        held.pins += 1
        held.is_used = True
        self._held.move_to_end(key)
        self._pinned.setdefault(id(held.snapshot), held)
        return held.snapshot

    def unpin(self, snapshot: WindowSnapshot) -> None:
        """Drop one pin of a snapshot returned by ``pin``."""
        held = self._pinned[id(snapshot)]
        held.pins -= 1
        if not held.pins:
            del self._pinned[id(snapshot)]
            if held.is_doomed:
                self._free(held)

    def expire(self) -> None:
        """Drop every expired snapshot."""
        now = self._clock()
        for key, held in [item for item in self._held.items() if item[1].expires <= now]:
            self._drop(key, held)
            self.expired += 1
            self.evicted_unused += not held.is_used

    def keys(self) -> frozenset[BlockHash]:
        """Return the hashes of the prefixes whose window is in the pool."""
        self.expire()
        return frozenset(self._held)

    def clear(self, owner: BlockHash) -> None:
        """Drop every snapshot of one namespace."""
        for key, held in [item for item in self._held.items() if item[1].owner == owner]:
            self._drop(key, held)

    def stats(self) -> dict[str, int]:
        """Return sizes and counts as plain JSON values."""
        return {
            "snapshots": len(self._held),
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "evicted": self.evicted,
            "expired": self.expired,
            "refused": self.refused,
            "evicted_unused": self.evicted_unused,
        }

    def _obtainable_bytes(self) -> int:
        """Bytes that are free or of unpinned snapshots."""
        unpinned = sum(held.size for held in self._held.values() if not held.pins)
        return self.capacity_bytes - self.used_bytes + unpinned

    def _make_room(self, size: int) -> None:
        for key, held in list(self._held.items()):
            if self.used_bytes + size <= self.capacity_bytes:
                break
            if not held.pins:
                self._drop(key, held)
                self.evicted += 1
                self.evicted_unused += not held.is_used

    def _drop(self, key: BlockHash, held: _Pooled) -> None:
        del self._held[key]
        if held.pins:
            held.is_doomed = True  # its bytes count until the last pin is dropped
        else:
            self._free(held)

    def _free(self, held: _Pooled) -> None:
        self.used_bytes -= held.size
        if self._poison_on_free:
            for array in held.snapshot.rows.values():
                array[...] = POISON


def check_snapshot(snapshot: WindowSnapshot, layout: Layout, block_tokens: int) -> None:
    """Raise ``ValueError`` unless ``snapshot`` could serve a hit of this layout."""
    given: object = snapshot
    rows: object = given.rows if isinstance(given, WindowSnapshot) else given
    if not isinstance(given, WindowSnapshot) or not isinstance(rows, Mapping):
        msg = f"expected a WindowSnapshot whose rows map groups to arrays, found {brief(rows)}"
        raise ValueError(msg)
    groups = {group.name: group for group in layout.window_groups}
    if set(snapshot.rows) != set(groups):
        msg = f"snapshot has groups {sorted(map(str, snapshot.rows))}, expected the WINDOW groups {sorted(groups)}"
        raise ValueError(msg)
    start, stop = snapshot.start, snapshot.stop
    if stop < 1 or stop % block_tokens:
        msg = f"snapshot.stop must be a block boundary (a multiple of {block_tokens}), found {stop}"
        raise ValueError(msg)
    latest = max(0, stop - (layout.window_tokens - 1))
    if not 0 <= start <= latest:
        msg = f"snapshot.start must be at most {latest} to serve a hit at {stop}, found {start}"
        raise ValueError(msg)
    for name, group in groups.items():
        array = _rows_on_host(name, snapshot.rows[name])
        expected = (len(group.layers), (stop - start) // group.tokens_per_entry, group.entry_bytes)
        if array.dtype != np.uint8 or array.shape != expected:
            raise ValueError(
                f"snapshot rows of group {name!r}: expected uint8 {list(expected)}, "
                f"found {array.dtype} {list(array.shape)}"
            )


def _rows_on_host(name: str, rows: Any) -> NDArray[Any]:
    """Return rows as a host array, copied from a device if necessary."""
    found = on_host(rows)
    if found is None:
        found_type = type(rows).__name__
        raise ValueError(
            f"snapshot rows of group {name!r}: expected a uint8 array, found {found_type}"
        )
    return found


def copy_of(snapshot: WindowSnapshot) -> WindowSnapshot:
    """Return ``snapshot`` with a copy of its rows, independent of the pool."""
    return replace(snapshot, rows={name: array.copy() for name, array in snapshot.rows.items()})
