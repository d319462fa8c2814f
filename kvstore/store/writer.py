"""The writer: the part of an open store that changes it, in the process that owns the store.

Lookups read the index: a block enters it after its commit and is removed before its delete, so the index never
names a missing block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvstore.errors import StoreError
from kvstore.frame.format import Frames
from kvstore.identity.block import KEY_BYTES, BlockHash
from kvstore.index import plan
from kvstore.index.prefix_tree import Position, PrefixIndex
from kvstore.store.admission import Admission
from kvstore.store.commit import Committer
from kvstore.store.context import Context
from kvstore.store.eviction import Eviction, Removal
from kvstore.store.failures import WriteFailures
from kvstore.store.namespaces import Namespaces
from kvstore.store.pending import PendingBlocks, StoreRequest
from kvstore.store.quota import quota_limit
from kvstore.store.rebuild import rebuild
from kvstore.store.retention import Retention
from kvstore.tier.ssd.capacity import usage_in
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.records import PLAUSIBLE_SEQUENCE, Records
from kvstore.tier.ssd.tier import SsdTier
from kvstore.transfer.commit_queue import CommitQueue

logger = logging.getLogger(__name__)


class StoreWriter:
    """The index of a store and all changes to it.

    Invariants:
        Index and medium contain the same blocks when no change is in progress and no delete failed.

    Threads: any; commits run in the writer thread. Lock order: ``changing``, then the context's lock.
    """

    def __init__(
        self,
        context: Context,
        ssd: SsdTier,
        frames: Frames,
        index: PrefixIndex,
        release_leases: Callable[[], None],
        *,
        request_share: float = 1.0,
    ) -> None:
        """Take over an open tier and an empty index, and fill the index from the tier's records.

        ``release_leases`` releases expired leases before an eviction. ``request_share`` is the share of the tier that
        the blocks of one request may use.
        """
        self.ssd = ssd
        self.index = index
        self._context = context
        self.request_blocks = plan.request_blocks(ssd.high_bytes // ssd.block_bytes, request_share)
        self.changing = changing = threading.RLock()
        """Held from the split of a batch to its publication, and from the removal of blocks from the index to their
        deletion, so that neither is seen half done."""
        records = ssd.records()
        ssd.usage = usage_in(records, ssd.options.frame_bytes)
        self.namespaces = spaces = Namespaces(context, ssd, index.forget_namespace)
        self.failures = failures = WriteFailures(context, ssd)
        self.retention = retention = Retention(context, ssd, index, failures)
        self.removal = removal = Removal(context, ssd, spaces, failures)
        self.eviction = eviction = Eviction(context, ssd, index, removal, release_leases)
        self._rebuild(records)
        removal.sweep()
        self.pending = pending = PendingBlocks(index, spaces)
        self._committer = Committer(
            *(context, ssd, frames, index, spaces, pending),
            *(retention, removal, eviction, failures, changing),
        )
        self.queue: CommitQueue[StoreRequest] = CommitQueue(
            self._committer.commit, commit_blocks=ssd.commit_blocks, queue_blocks=ssd.queue_blocks
        )
        admission = Admission(
            *(context, frames, spaces, pending, self.queue, retention, failures),
            request_blocks=self.request_blocks,
        )
        # Methods of the parts. The caller of the first three holds the context's lock.
        self.known_blocks = pending.known_blocks
        self.queued_parent = pending.get
        self.note_use = retention.note_use
        self.store = admission.store
        self.unpin = retention.unpin

    def _rebuild(self, records: Records) -> None:
        """Rebuild the index from the records. Blocks without a parent are deleted and counted."""
        orphans = rebuild(self.index, records, self.retention.pin)
        sequence = records.sequence
        plausible = sequence < np.uint64(PLAUSIBLE_SEQUENCE)
        newest = int(sequence.max(initial=0, where=plausible))
        self._context.tick = max(self._context.tick, newest)
        if orphans:
            logger.warning("%d blocks in %s had no parent: deleted", len(orphans), self.ssd.path)
            self._context.metrics.dropped_blocks["orphan"] += len(orphans)
            self.removal.delete(orphans)

    def discard(self, chain: bytes, *, force: bool = True) -> int:
        """Remove the last block of a chain and its descendants, return the number; none if pinned without ``force``."""
        with self.changing:
            with self._context.lock:
                number = len(chain) // KEY_BYTES - 1
                position = self.index.match(chain)
                if position.depth <= number:
                    return 0
                segment = self.index.split_at(position)
                if not force and self.index.is_pinned(segment):
                    return 0
                keys = self.index.remove_from(Position(segment, segment.blocks - 1, number))
                self.retention.drop_removed()
            self.removal.delete(keys)
        return len(keys)

    def clear(self, root: BlockHash) -> int:
        """Remove every block of one namespace; return the number removed."""
        if self.namespaces.find(root) is None:
            return 0
        self.flush()
        with self.changing:
            with self._context.lock:
                number = self.namespaces.find(root)
                if number is None:  # its last blocks were removed meanwhile
                    return 0
                keys = self.index.remove_namespace(number)
                self.retention.drop_removed()
            self.removal.delete(keys)
        return len(keys)

    def evict_to(self, live_bytes: int) -> int:
        """Evict by the policy until at most ``live_bytes`` are in use; return the block count.

        More remain in use if pins protect the rest or a delete fails. An empty tier uses some pages too.
        Raises ``StoreError`` if the size of the tier cannot be read.
        """
        try:
            with self.changing:
                return self.eviction.free(self.eviction.cap(live_bytes, live_bytes))
        except MEDIUM_ERRORS as error:
            raise StoreError(f"the store at {self.ssd.path} cannot be read: {error}") from error

    def set_quota(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> None:
        """Set the byte limit of all generations of a namespace; evict the excess.

        A quota stays in force until another is set, also across restarts. Raises ``StoreError`` if it cannot be
        recorded (the old quota stays in force), or the excess cannot be deleted.
        """
        with self._context.lock:
            number = self.namespaces.acquire(root, namespace)
        try:
            with self.changing:
                self.namespaces.set_quota(number, quota)
                limit = quota_limit(self.namespaces.lineage(number), self.ssd.usage)
                if limit is not None:
                    self.eviction.free(limit)
        except MEDIUM_ERRORS as error:
            self.failures.note(error)
            msg = f"the quota of {quota} bytes cannot be recorded in {self.ssd.path}: {error}"
            raise StoreError(msg) from error
        finally:
            with self._context.lock:
                self.namespaces.release(number)

    def flush(self) -> None:
        """Wait until every block accepted before is durable. Raises ``StoreError`` if a write or the sync failed."""
        self.queue.drain()
        failure, self.queue.failure = self.queue.failure, None
        if failure is not None:
            raise StoreError(f"the writer of {self.ssd.path} failed: {failure!r}") from failure
        try:
            self._committer.sync()
        except MEDIUM_ERRORS as error:
            self.failures.note(error)
            msg = f"{self.ssd.path} cannot be synced: {error}; recently stored blocks may be lost"
            raise StoreError(msg) from error

    def close(self) -> None:
        """Commit queued blocks and stop the writer thread."""
        try:
            self.flush()
        finally:
            self.queue.close()

    @property
    def is_read_only(self) -> bool:
        """Whether writing is stopped after failures of the medium."""
        return self.failures.is_stopped

    def namespace_counts(self) -> list[dict[str, Any]]:
        """Return the namespaces with their blocks, bytes and quotas."""
        return self.namespaces.table(self.index.namespace_blocks(), self.ssd.usage)

    @property
    def alarms(self) -> list[str]:
        """Conditions that need an operator, as sentences."""
        failure = self.queue.failure
        return self.failures.alarms + [f"the writer failed: {failure!r}"] * (failure is not None)
