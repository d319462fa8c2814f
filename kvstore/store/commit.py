"""Group commits: a batch of queued blocks is written in one transaction, then added to the index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvstore.frame.format import Frames
from kvstore.frame.header import head_sum
from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.store.context import Context
from kvstore.store.eviction import Eviction, Limit, Removal
from kvstore.store.failures import WriteFailures
from kvstore.store.namespaces import Namespaces
from kvstore.store.pending import PendingBlocks, Queued, StoreRequest
from kvstore.store.quota import quota_limit
from kvstore.store.retention import Amendment, Retention, stored_expiry
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import Put

RETRY_EVICTION_BLOCKS = 16  # before a commit without room is retried. docs/decisions/0009.
FULL_RETRIES = 3  # freed pages are reusable two transactions later

# ---- decisions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one ``store`` call in one commit."""

    request: StoreRequest
    blocks: list[Queued]

    @property
    def first(self) -> int:
        """Number of the first block."""
        return self.blocks[0].number

    @property
    def parent_chain(self) -> bytes:
        """Concatenated keys of all blocks before the run."""
        return self.request.prefix.chain[: self.first * KEY_BYTES]


def split(batch: Sequence[Queued], index: PrefixIndex) -> tuple[list[Run], int, int]:
    """Return a batch as runs to write, and the numbers of stored blocks and of blocks without a parent."""
    runs: list[Run] = []
    present = orphans = 0
    staged: set[BlockKey] = set()
    for _, group in groupby(batch, key=lambda block: id(block.request)):
        blocks = list(group)
        request = blocks[0].request
        depth = index.match(request.prefix.chain[: (blocks[-1].number + 1) * KEY_BYTES]).depth
        fresh = [block for block in blocks if block.number >= depth]
        present += len(blocks) - len(fresh)
        if fresh and fresh[0].number > depth and fresh[0].parent not in staged:
            orphans += len(fresh)
        elif fresh:
            staged.update(block.key for block in fresh)
            runs.append(Run(request, fresh))
    return runs, present, orphans


def cut(runs: Iterable[Run], room: int, size: Callable[[bytearray], int]) -> int:
    """Remove the blocks, in order, that do not fit into ``room`` bytes; return their number."""
    dropped = 0
    for run in runs:
        fitting = 0
        for block in run.blocks:
            room -= size(block.frame)
            if room < 0:
                break
            fitting += 1
        dropped += len(run.blocks) - fitting
        del run.blocks[fitting:]
    return dropped


def as_put(frames: Frames, block: Queued, tick: int) -> Put:
    """Return a block with its record, as written by the tier."""
    request, form = block.request, frames.form_of(block.frame)
    record = Record(
        parent=block.parent,
        number=block.number,
        namespace_id=request.namespace_id,
        sequence=tick,
        expires=stored_expiry(request.expires),
        frame_bytes=len(block.frame),
        is_pinned=request.is_pinned,
        is_packed=form.is_packed,
        is_compressed=form.is_compressed,
        error=form.error_of(block.frame),
        head_sum=head_sum(block.frame),
    )
    return Put(block.key, record, block.frame)


# ---- writing -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Committer:
    """Writes batches of queued blocks in the writer thread, then adds them to the index. ``sync`` may run in any."""

    context: Context
    ssd: SsdTier
    frames: Frames
    index: PrefixIndex
    namespaces: Namespaces
    pending: PendingBlocks
    retention: Retention
    removal: Removal
    eviction: Eviction
    failures: WriteFailures
    changing: threading.RLock  # the writer's lock of changes
    _is_crowded: bool = False
    """Whether the last commit found no room despite evictions: a stalled reader keeps the pages, or other files fill
    the disk. More evictions would only empty the store."""

    def commit(self, batch: Sequence[Queued]) -> None:
        """Write a batch, then apply the renewals that waited for its blocks."""
        try:
            with self.changing:
                self._write(batch)
        finally:
            with self.context.lock:
                self.pending.remove(batch)
        self.retention.renew_deferred(self.pending)
        with self.changing:
            self.removal.sweep()

    def _write(self, batch: Sequence[Queued]) -> None:
        """Make room, write one transaction, then add the blocks to the index."""
        with self.context.lock:
            runs, present, orphans = split(batch, self.index)
            self.context.metrics.present_blocks += present
            if orphans:
                self.context.metrics.dropped_blocks["no_parent"] += orphans
            parents = self._pin_parents(runs)
            uses = self.retention.take_uses()
        try:
            self._make_room(runs)
            if self._put(runs, uses):
                self._publish(runs)
        except MEDIUM_ERRORS as error:  # from the tier's sizes; others are handled where they occur
            self.failures.note(error)
            self.context.count_drop("write_error", sum(len(run.blocks) for run in runs))
        finally:
            with self.context.lock:
                for segment in parents:
                    self.index.unpin(segment)

    def _pin_parents(self, runs: Iterable[Run]) -> list[Segment]:
        """Pin the parents of a batch, so that making room does not evict them."""
        pinned = []
        for run in runs:
            position = self.index.match(run.parent_chain)
            if position.depth:
                segment = self.index.split_at(position)
                self.index.pin(segment)
                pinned.append(segment)
        return pinned

    def _make_room(self, runs: list[Run]) -> None:
        """Evict if a batch would cross a limit, quotas before the cap; drop the blocks that do not fit."""
        for lineage in self.namespaces.lineages(run.request.namespace_id for run in runs):
            limit = quota_limit(lineage, self.ssd.usage)
            if limit is not None:
                own = [run for run in runs if run.request.namespace_id in lineage.numbers]
                self._fit(own, limit)
        self._fit(runs, self.eviction.cap(self.ssd.high_bytes, self.ssd.low_bytes))
        runs[:] = [run for run in runs if run.blocks]

    def _fit(self, runs: Sequence[Run], limit: Limit) -> None:
        """Make room for runs below a limit, and drop the blocks that do not fit."""
        size = self.ssd.stored_bytes
        self.eviction.free(limit, sum(size(block.frame) for run in runs for block in run.blocks))
        self.context.count_drop(limit.reason, cut(runs, limit.high - limit.used(), size))

    def _put(self, runs: Sequence[Run], uses: Mapping[BlockKey, int]) -> bool:
        """Write runs and uses in one transaction; return whether they are stored."""
        blocks = [block for run in runs for block in run.blocks]
        with self.context.lock:
            ticks = [self.context.next_tick() for _ in blocks]
        puts = [as_put(self.frames, *each) for each in zip(blocks, ticks, strict=True)]
        if not puts and not uses:
            return True
        numbers = {put.record.namespace_id for put in puts}
        if not self._put_with_retries(puts, uses, self.namespaces.names(numbers)):
            return False
        self._is_crowded = False
        self.failures.note_success()
        self.namespaces.note_named(numbers)
        with self.context.lock:  # only now: if the put fails, the block must still be deleted
            self.removal.note_written({put.key for put in puts})
            for put in puts:
                self.context.metrics.note_form(put.record)
        return True

    def _put_with_retries(
        self, puts: Sequence[Put], uses: Mapping[BlockKey, int], names: Mapping[str, bytes]
    ) -> bool:
        """Write one transaction; for lack of room, evict a few blocks and retry."""
        for attempt in range(1 + FULL_RETRIES):
            try:
                self.ssd.put(puts, uses, names)
            except MEDIUM_ERRORS as error:
                is_full = self.ssd.lacks_room(error, len(puts))
                if is_full and not self._is_crowded and attempt < FULL_RETRIES:
                    self.eviction.evict(max(RETRY_EVICTION_BLOCKS, len(puts) if attempt else 0))
                    continue
                self._is_crowded = is_full
                self.failures.note(error)
                self.context.count_drop("write_error", len(puts))
                return False
            break
        return True

    def _publish(self, runs: Iterable[Run]) -> None:
        """Add committed runs to the index; delete runs whose parent was removed meanwhile."""
        orphans: list[BlockKey] = []
        amendments: list[Amendment] = []
        with self.context.lock:
            for run in runs:
                request, keys = run.request, [block.key for block in run.blocks]
                position = self.index.match(run.parent_chain)
                if position.depth < run.first:
                    orphans += reversed(keys)
                    continue
                segment = self.index.extend(
                    self.index.split_at(position),
                    b"".join(keys),
                    now=request.tick,
                    namespace_id=request.namespace_id,
                    expires=request.expires,
                )
                if request.is_pinned:
                    self.retention.pin(segment)
                amendments += self.retention.extend_life(segment, request.expires)
                self.context.metrics.stored_blocks += len(keys)
        self.retention.amend(amendments)
        if orphans:
            self.context.count_drop("no_parent", len(orphans))
            self.removal.delete(orphans)

    def sync(self) -> None:
        """Write recorded uses and make all commits durable. Raises one of ``MEDIUM_ERRORS``."""
        with self.context.lock:
            uses = self.retention.take_uses()
        try:
            if uses:
                self.ssd.put([], uses)
        except MEDIUM_ERRORS as error:
            if not self.ssd.lacks_room(error, 1):
                raise
            with self.context.lock:  # written by a later commit: no block depends on recency
                self.retention.uses = uses | self.retention.uses
        self.ssd.sync()
