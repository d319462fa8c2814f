"""Eviction until a limit is met, and deletion of removed blocks from the medium."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvstore.identity.block import BlockKey
from kvstore.index import plan
from kvstore.index.prefix_tree import PrefixIndex
from kvstore.store.context import Context
from kvstore.store.failures import WriteFailures
from kvstore.store.namespaces import Lineage, Namespaces
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier


@dataclass(eq=False)
class Removal:
    """Deletes blocks and names; retries failed deletes. One thread, under the writer's lock, not the context's."""

    context: Context
    ssd: SsdTier
    namespaces: Namespaces
    failures: WriteFailures
    undeleted: list[BlockKey] = field(default_factory=list)
    """Keys removed from the index but still stored, because a delete failed."""

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks removed from the index, and those of earlier failed deletes."""
        with self.context.lock:
            due, self.undeleted = [*self.undeleted, *keys], []
        try:
            self.ssd.delete(due)
        except BaseException as error:  # Ctrl-C in the caller's thread too
            with self.context.lock:
                self.undeleted = due + self.undeleted
            if not isinstance(error, MEDIUM_ERRORS):
                raise
            self.failures.note(error)
        self.sweep()

    def sweep(self) -> None:
        """Remove namespaces without blocks. A name that cannot be erased is retried by the next sweep."""
        with self.context.lock:
            self.namespaces.remove_empty()
        try:
            self.namespaces.erase()
        except MEDIUM_ERRORS as error:
            self.failures.note(error)

    def note_written(self, keys: Collection[BlockKey]) -> None:
        """Cancel the retried delete of blocks that were stored again. The caller holds the lock."""
        self.undeleted = [key for key in self.undeleted if key not in keys]


@dataclass(frozen=True, slots=True)
class Limit:
    """Most bytes in use, of the whole store or of one lineage of namespaces."""

    used: Callable[[], int]
    high: int
    low: int  # bytes left by an eviction, which starts when ``high`` would be exceeded
    lineage: Lineage | None  # namespaces whose blocks are evicted; None for all
    reason: str  # counter key of blocks dropped for lack of room


@dataclass(eq=False)
class Eviction:
    """Frees space in the policy's order. Threads: one, under the writer's lock of changes, not the context's."""

    context: Context
    ssd: SsdTier
    index: PrefixIndex
    removal: Removal
    release_leases: Callable[[], None]  # releases expired leases; called before each eviction

    def cap(self, high: int, low: int) -> Limit:
        """Return a limit on the bytes in use by the whole store."""
        return Limit(lambda: self.ssd.live_bytes, high, low, None, "no_room")

    def free(self, limit: Limit, incoming: int = 0) -> int:
        """Evict down to ``low`` if ``incoming`` bytes would exceed ``high``; return the block count."""
        count = 0
        # Blocks may be smaller than the largest one, so one round may free too little, never too much.
        while need := plan.room(limit.used(), incoming, limit.high, limit.low):
            evicted = self.evict(-(-need.bytes // self.ssd.block_bytes), limit.lineage)
            count += evicted
            if not evicted or self.removal.undeleted:  # all blocks are pinned, or deletes fail
                break
        return count

    def evict(self, blocks: int, lineage: Lineage | None = None) -> int:
        """Evict blocks from index and medium; return their number. ``lineage`` limits it to one quota's blocks."""
        with self.context.lock:
            self.release_leases()
            numbers = None if lineage is None else frozenset(lineage.numbers)
            keys = self.index.evict(blocks, self.context.wall_clock(), numbers)
            self.context.metrics.evicted_blocks["ssd"] += len(keys)
            self.context.metrics.quota_evicted_blocks += 0 if lineage is None else len(keys)
        self.removal.delete(keys)
        return len(keys)
