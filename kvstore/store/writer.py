"""The SSD tier as its owner sees it: index, queue, commits and eviction, kept in step.

The index is what lookups believe. A block enters it after its commit and leaves it before its
delete, so at no time does it name a block that is not there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kvstore.errors import StoreError
from kvstore.frame.format import Frames, Header, head_sum
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.identity.chain import Chain
from kvstore.index import plan
from kvstore.index.prefix_tree import NEVER, Position, PrefixIndex, Segment
from kvstore.store.context import Context
from kvstore.store.namespaces import Line, Namespaces
from kvstore.store.rebuild import rebuild
from kvstore.tier.ssd.capacity import usage_in
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, passes
from kvstore.tier.ssd.records import PLAUSIBLE_SEQUENCE, Record, Records
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import Put
from kvstore.transfer.commit_queue import CommitQueue, QueuedBlock

logger = logging.getLogger(__name__)

RETRY_EVICTION_BLOCKS = 16
"""Blocks freed before a commit that found no room is tried once more. docs/decisions/0009."""
FULL_RETRIES = 3
"""Pages freed in a transaction come back two later, so one eviction is not enough on a full disk."""
QUOTA_SLACK = 0.04
"""Share of a quota that is freed beyond what must go: as far as the tier's watermarks lie apart."""
WRITE_ERRORS_TO_READ_ONLY = 3
"""Failed writes in a row after which writing stops. docs/decisions/0009."""
RETRY_SECONDS = 30.0
"""How long it stops, unless the file is damaged: then until the store is reopened. A disk that fails
for good then costs the framing of one commit in that time; as long as a lease."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One ``store`` call on its way: what its blocks have in common."""

    prefix: Chain
    namespace_id: int
    tick: int
    """Logical time of the request."""
    expires: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a ``store``, in blocks."""

    end: int
    """Leading blocks that are now stored or queued."""
    present: int
    """Blocks offered that were there already."""
    dropped: int
    """Blocks not taken: the queue was full, the parent was missing, or the request was too long."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one ``store`` call inside one commit."""

    ticket: Ticket
    blocks: list[QueuedBlock[Ticket]]

    @property
    def first(self) -> int:
        return self.blocks[0].number


@dataclass(frozen=True, slots=True)
class _Limit:
    """Most bytes that may be in use, of everything or of some namespaces."""

    used: Callable[[], int]
    high: int
    low: int
    """What is left when ``high`` would be crossed."""
    among: Line | None
    """Whose blocks go; None for all."""
    reason: str
    """Why blocks are dropped for which no room can be made."""


@dataclass(slots=True)
class _Wish:
    """A ``store`` of blocks that are queued already, to be granted when they are committed."""

    prefix: Chain
    blocks: int
    expires: float
    is_pinned: bool


class OwnedSsd:
    """Blocks on SSD in the one process that writes them.

    Invariants:
        Index and medium hold the same blocks whenever the writer rests and no delete has failed.
        Queued blocks are queued after their parents.

    Threads: any; commits run in the writer's own thread.
    """

    def __init__(
        self,
        context: Context,
        ssd: SsdTier,
        frame_format: Frames,
        index: PrefixIndex,
        give_up_leases: Callable[[], None],
        *,
        request_share: float = 1.0,
    ) -> None:
        """Take over an open tier and an empty index, and fill the index from its records.

        ``give_up_leases`` is called before anything is evicted. ``request_share`` is the part of the
        tier that the blocks of one request may take.
        """
        self.ssd = ssd
        self.index = index
        self._context = context
        self._format = frame_format
        self._give_up_leases = give_up_leases
        self.request_blocks = plan.request_blocks(ssd.high_bytes // ssd.block_bytes, request_share)
        self._pending: dict[BlockKey, BlockKey] = {}
        """Keys in the queue with their parents': they count as stored for parents and duplicates."""
        self._uses: dict[BlockKey, int] = {}
        """Newest logical time of blocks that were used, to be written with the next commit."""
        self._sticky: set[Segment] = set()
        """Segments that a lasting pin protects."""
        self._undeleted: list[BlockKey] = []
        """Keys that left the index but not yet the medium, because a delete failed."""
        self._changing = threading.RLock()
        """Held from admission to publication of a batch, and from the index to the medium of a
        removal: between the two, neither may see the other half done. Taken before the lock."""
        self._wishes: dict[BlockKey, _Wish] = {}
        """What was asked for blocks that still waited for their commit, by the last of them."""
        self._failures = 0
        self._is_crowded = False
        """Whether the last commit found no room though blocks were evicted for it: a reader that is
        stuck keeps their pages, or others fill the disk, and evicting more would only empty the store."""
        self._resumes = -math.inf
        """When writing is tried again after failures, by the context's clock; infinity for never."""
        records = ssd.records()
        ssd.usage = usage_in(records, ssd.options.frame_bytes)
        self.namespaces = Namespaces(context, ssd)
        self._rebuild(records)
        self._sweep()
        self._writer: CommitQueue[Ticket] = CommitQueue(
            self._commit, commit_blocks=ssd.commit_blocks, queue_blocks=ssd.queue_blocks
        )

    def _rebuild(self, records: Records) -> None:
        """Fill the index from the records; delete and count what hangs on nothing."""
        orphans = rebuild(self.index, records, self._stick)
        sequence = records.sequence
        plausible = sequence < np.uint64(PLAUSIBLE_SEQUENCE)
        newest = int(sequence.max(initial=0, where=plausible))
        self._context.sequence = max(self._context.sequence, newest)
        if orphans:
            logger.warning("%d blocks in %s had no parent: deleted", len(orphans), self.ssd.path)
            self._context.metrics.dropped_blocks["orphan"] += len(orphans)
            self._delete(orphans)

    # ---- what lookups need; the caller holds the lock ------------------------------------------

    @property
    def queued_blocks(self) -> int:
        """Blocks that wait for their commit."""
        return self._writer.queued_blocks

    def known_blocks(self, prefix: Chain) -> int:
        """Return how many leading blocks are stored or queued."""
        known = self.index.match(prefix.path).depth
        while known < len(prefix.path) // KEY_BYTES and prefix.key(known) in self._pending:
            known += 1
        return known

    def note_use(self, key: BlockKey, tick: int) -> None:
        """Remember that a request used everything up to ``key``, for the next commit."""
        self._uses[key] = tick

    def queued_parent(self, key: BlockKey) -> BlockKey | None:
        """Return the key of a queued block's parent, None if the block is not queued."""
        return self._pending.get(key)

    def discard(self, path: bytes, *, force: bool = True) -> int:
        """Remove the block that ends a path and all that hangs on it; return how many blocks went.

        Without ``force`` nothing goes where a pin protects any of them.
        """
        with self._changing:
            with self._context.lock:
                number = len(path) // KEY_BYTES - 1
                position = self.index.match(path)
                if position.depth <= number:
                    return 0
                segment = self.index.settle(position)
                if not force and self.index.is_pinned(segment):
                    return 0
                keys = self.index.remove_from(Position(segment, segment.blocks - 1, number))
                self._sticky = {segment for segment in self._sticky if segment.is_live}
            self._delete(keys)
        return len(keys)

    # ---- storing (callers' threads) ------------------------------------------------------------

    def store(
        self,
        prefix: Chain,
        namespace: Mapping[str, Any],
        encode: Callable[[Header], bytearray],
        first: int,
        *,
        wait: float,
        ttl: float | None,
        is_pinned: bool,
    ) -> Taken:
        """Queue the blocks of ``prefix`` from block ``first`` on that are not known yet.

        ``encode`` returns the frame of the block that a header names.
        """
        stop = len(prefix.path) // KEY_BYTES
        expires = NEVER if ttl is None else self._context.wall_clock() + ttl
        with self._context.lock:
            known = self.known_blocks(prefix)
            decided = plan.stores(first, stop, known, self.request_blocks)
            self._context.metrics.present_blocks += decided.present
            amends = self._renew(prefix, min(known, stop), expires, is_pinned=is_pinned)
            self._wish(prefix, min(known, stop), expires, is_pinned=is_pinned)
        for keys, fields in amends:
            self._amend(keys, **fields)
        self._context.count_drop("no_parent", decided.orphans)
        self._context.count_drop("request_share", decided.excess)
        if decided.store is None:
            return Taken(min(known, stop), decided.present, decided.orphans + decided.excess)
        with self._context.lock:
            space = self.namespaces.hold(prefix.root, namespace)
            tick = self._context.next_sequence()
        ticket = Ticket(prefix, space, tick, expires, is_pinned)
        try:
            end, reason = self._queue(
                ticket, decided.store, encode, deadline=time.monotonic() + wait
            )
        finally:
            with self._context.lock:
                self._release(space)
        self._context.count_drop(reason, decided.store.stop - end)
        return Taken(end, decided.present, stop - end)

    def _queue(
        self,
        ticket: Ticket,
        wanted: plan.Store,
        encode: Callable[[Header], bytearray],
        *,
        deadline: float,
    ) -> tuple[int, str]:
        """Queue blocks in their order; return where that ended, and why if that is too early."""
        for number in range(wanted.start, wanted.stop):
            if self.is_read_only:
                return number, "write_error"
            if not self._writer.wait_for_room(deadline - time.monotonic()):
                return number, "closed" if self._writer.is_closing else "queue_full"
            if not self._submit(ticket, number, encode):
                return number, "closed"
        return wanted.stop, ""

    def _release(self, space: int) -> None:
        """Let go of a number that a call or a block was under way for. The caller holds the lock."""
        if self.namespaces.release(space):
            self.index.forget_namespace(space)

    def _renew(
        self, prefix: Chain, blocks: int, expires: float, *, is_pinned: bool
    ) -> list[tuple[list[BlockKey], dict[str, Any]]]:
        """Make a prefix that is stored again recent, longer-lived, and pinned if asked.

        Returns the records to amend, for when the lock is free.
        """
        index = self.index
        position = index.match(prefix.path[: blocks * KEY_BYTES])
        if not position.depth:
            return []
        segment = index.settle(position)
        tick = self._context.next_sequence()
        index.touch(segment, tick)
        key = prefix.key(position.depth - 1)
        self.note_use(key, tick)
        amends: list[tuple[list[BlockKey], dict[str, Any]]] = []
        renewed = index.renew(segment, expires) if index.expiring else []
        if renewed:
            keys = [key for changed in renewed for key in changed.block_keys()]
            amends.append((keys, {"expires": _stored_expiry(expires)}))
        if is_pinned and segment not in self._sticky:
            self._stick(segment)
            amends.append(([key], {"is_pinned": True}))
        return amends

    def _wish(self, prefix: Chain, blocks: int, expires: float, *, is_pinned: bool) -> None:
        """Note what is asked for a prefix whose end is still queued, for when it is committed."""
        if not blocks or prefix.key(blocks - 1) not in self._pending:
            return
        wish = _Wish(prefix, blocks, expires, is_pinned)
        earlier = self._wishes.setdefault(prefix.key(blocks - 1), wish)
        earlier.expires = max(earlier.expires, expires)
        earlier.is_pinned |= is_pinned

    def _stick(self, segment: Segment) -> None:
        self.index.pin(segment)
        self._sticky.add(segment)

    def unstick(self, prefix: Chain) -> None:
        """Take back every lasting pin on the path of ``prefix``."""
        keys: list[BlockKey] = []
        with self._context.lock:
            position = self.index.match(prefix.path)
            is_whole = position.inside == position.segment.blocks
            node = position.segment if is_whole else position.segment.parent
            while node is not None:
                if node in self._sticky:
                    self._sticky.discard(node)
                    self.index.unpin(node)
                keys += node.block_keys()  # a split leaves marks of the pin in the upper part too
                node = node.parent
        self._amend(keys, is_pinned=False)

    def _amend(self, keys: Sequence[BlockKey], **fields: Any) -> None:
        try:
            self.ssd.amend(keys, **fields)
        except MEDIUM_ERRORS as error:
            self._note_write_error(error)

    def _submit(self, ticket: Ticket, number: int, encode: Callable[[Header], bytearray]) -> bool:
        """Frame one block outside the lock, then queue it unless another thread was faster.

        Returns False if the store is being closed.
        """
        prefix = ticket.prefix
        header = Header(
            block_tokens=self._format.block_tokens,
            number=number,
            namespace_id=ticket.namespace_id,
            payload_bytes=self._format.payload_bytes,
            block_hash=prefix.hash_of(number),
            parent_hash=prefix.parent_hash(number),
            sequence=ticket.tick,
            has_images=prefix.has_images(number),
        )
        frame = encode(header)
        parent = BlockKey(header.parent_hash[:KEY_BYTES])
        queued = QueuedBlock(prefix.key(number), parent, number, frame, ticket)
        with self._context.lock:
            if queued.key in self._pending:
                self._context.metrics.present_blocks += 1
                return True
            # Held before it is queued: an interrupt between the two costs a name that stays until the
            # store is closed, the other way round a block whose namespace is gone.
            self.namespaces.hold_again(ticket.namespace_id)
            if not self._writer.submit(queued):
                self._release(ticket.namespace_id)
                return False
            self._pending[queued.key] = parent
            return True

    # ---- committing (writer thread) ------------------------------------------------------------

    def _commit(self, batch: list[QueuedBlock[Ticket]]) -> None:
        """Write a batch, then see to what was asked for its blocks while they waited."""
        lock = self._context.lock
        try:
            with self._changing:
                self._write(batch)
        finally:
            with lock:
                for block in batch:
                    self._pending.pop(block.key, None)
                    self._release(block.ticket.namespace_id)
        with lock:
            amends = []
            for key in [key for key in self._wishes if key not in self._pending]:
                wish = self._wishes.pop(key)
                amends += self._renew(
                    wish.prefix, wish.blocks, wish.expires, is_pinned=wish.is_pinned
                )
        for keys, fields in amends:
            self._amend(keys, **fields)
        with self._changing:
            self._sweep()

    def _write(self, batch: list[QueuedBlock[Ticket]]) -> None:
        """Make room, write one transaction, then publish it in the index."""
        with self._context.lock:
            runs = self._admit(batch)
            parents = self._pin_parents(runs)
            uses, self._uses = self._uses, {}
        try:
            self._make_room(runs)
            if self._put(runs, uses):
                self._publish(runs)
        except (
            MEDIUM_ERRORS
        ) as error:  # of asking how full it is; all else is handled where it fails
            self._note_write_error(error)
            self._context.count_drop("write_error", sum(len(run.blocks) for run in runs))
        finally:
            with self._context.lock:
                for segment in parents:
                    self.index.unpin(segment)

    def _admit(self, batch: Sequence[QueuedBlock[Ticket]]) -> list[_Run]:
        """Split a batch into runs, leaving out what is present and what lost its parent."""
        metrics = self._context.metrics
        runs: list[_Run] = []
        staged: set[BlockKey] = set()
        for _, members in groupby(batch, key=lambda block: id(block.ticket)):
            blocks = list(members)
            ticket = blocks[0].ticket
            depth = self.index.match(
                ticket.prefix.path[: (blocks[-1].number + 1) * KEY_BYTES]
            ).depth
            fresh = [block for block in blocks if block.number >= depth]
            metrics.present_blocks += len(blocks) - len(fresh)
            if fresh and fresh[0].number > depth and fresh[0].parent not in staged:
                metrics.dropped_blocks["no_parent"] += len(fresh)
            elif fresh:
                staged.update(block.key for block in fresh)
                runs.append(_Run(ticket, fresh))
        return runs

    def _pin_parents(self, runs: Iterable[_Run]) -> list[Segment]:
        """Pin what a batch hangs on, so that making room never takes it away."""
        pinned = []
        for run in runs:
            position = self.index.match(run.ticket.prefix.path[: run.first * KEY_BYTES])
            if position.depth:
                segment = self.index.settle(position)
                self.index.pin(segment)
                pinned.append(segment)
        return pinned

    def _make_room(self, runs: list[_Run]) -> None:
        """Evict where the batch would cross a limit, and cut what is over: quotas, then the cap."""
        for line in self.namespaces.lines(run.ticket.namespace_id for run in runs):
            if line.quota is not None:
                theirs = [run for run in runs if run.ticket.namespace_id in line.numbers]
                self._fit(theirs, self._quota(line, line.quota))
        self._fit(runs, self._cap(self.ssd.high_bytes, self.ssd.low_bytes))
        runs[:] = [run for run in runs if run.blocks]

    def _cap(self, high: int, low: int) -> _Limit:
        """Return the watermarks of the tier as a limit."""
        return _Limit(lambda: self.ssd.live_bytes, high, low, None, "no_room")

    def _quota(self, line: Line, quota: int) -> _Limit:
        """Return what a namespace may hold as a limit."""
        usage, low = self.ssd.usage, quota - int(QUOTA_SLACK * quota)
        return _Limit(lambda: sum(usage[n] for n in line.numbers), quota, low, line, "quota")

    def _fit(self, runs: Iterable[_Run], limit: _Limit) -> None:
        """Make room for runs below a limit, and cut off what finds none."""
        size = self.ssd.stored_bytes
        self._free(limit, sum(size(block.frame) for run in runs for block in run.blocks))
        room = limit.high - limit.used()
        for run in runs:
            fitting = 0
            for block in run.blocks:
                room -= size(block.frame)
                if room < 0:
                    break
                fitting += 1
            self._context.count_drop(limit.reason, len(run.blocks) - fitting)
            del run.blocks[fitting:]

    def _free(self, limit: _Limit, incoming: int = 0) -> int:
        """Evict to the low mark if ``incoming`` bytes would cross the high one; return the blocks gone."""
        gone = 0
        # Blocks may be smaller than the largest: one round may free too little, never too much.
        while need := plan.room(limit.used(), incoming, limit.high, limit.low):
            evicted = self._evict(-(-need.bytes // self.ssd.block_bytes), limit.among)
            gone += evicted
            if not evicted or self._undeleted:  # nothing may leave, or deleting fails
                break
        return gone

    def _evict(self, blocks: int, among: Line | None = None) -> int:
        """Remove blocks by the policy from index and medium; return how many went.

        With ``among`` only those of one line of namespaces, which is done for its quota.
        """
        with self._context.lock:
            self._give_up_leases()
            numbers = None if among is None else frozenset(among.numbers)
            keys = self.index.evict(blocks, self._context.wall_clock(), numbers)
            self._context.metrics.evicted_blocks["ssd"] += len(keys)
            self._context.metrics.quota_evicted_blocks += 0 if among is None else len(keys)
        self._delete(keys)
        return len(keys)

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks that left the index; what fails is tried again with the next delete."""
        with self._context.lock:
            due, self._undeleted = [*self._undeleted, *keys], []
        try:
            self.ssd.delete(due)
        except BaseException as error:  # Ctrl-C in the caller's thread too
            with self._context.lock:
                self._undeleted = due + self._undeleted
            if not isinstance(error, MEDIUM_ERRORS):
                raise
            self._note_write_error(error)
        self._sweep()

    def _sweep(self) -> None:
        """Remove namespaces whose last block is gone; a name that stays is tried again with the next."""
        with self._context.lock:
            for number in self.namespaces.leave():
                self.index.forget_namespace(number)
        try:
            self.namespaces.erase()
        except MEDIUM_ERRORS as error:
            self._note_write_error(error)

    def _put(self, runs: list[_Run], uses: Mapping[BlockKey, int]) -> bool:
        """Write the runs in one transaction; where there is no room, free a little and try again."""
        blocks = [block for run in runs for block in run.blocks]
        with self._context.lock:
            sequences = [self._context.next_sequence() for _ in blocks]
        puts = [self._as_put(*each) for each in zip(blocks, sequences, strict=True)]
        if not puts and not uses:
            return True
        spaces = {put.record.namespace_id for put in puts}
        names = self.namespaces.names(spaces)
        for attempt in range(1 + FULL_RETRIES):
            try:
                self.ssd.put(puts, uses, names)
            except MEDIUM_ERRORS as error:
                may_help = attempt < FULL_RETRIES and not self._is_crowded
                if may_help and self.ssd.lacks_room(error, len(puts)):
                    self._evict(max(RETRY_EVICTION_BLOCKS, len(puts) if attempt else 0))
                    continue
                self._is_crowded = self.ssd.lacks_room(error, len(puts))
                self._note_write_error(error)
                self._context.count_drop("write_error", len(puts))
                return False
            break
        self._failures, self._is_crowded = 0, False
        if self._resumes > -math.inf:
            self._resumes = -math.inf
            logger.warning("writes to %s work again: blocks are stored", self.ssd.path)
        self.namespaces.note_named(spaces)
        written = {put.key for put in puts}
        with self._context.lock:  # not before: a block whose put fails is still to be deleted
            self._undeleted = [key for key in self._undeleted if key not in written]
            for put in puts:
                self._context.metrics.note_form(
                    put.record.error,
                    is_packed=put.record.is_packed,
                    is_compressed=put.record.is_compressed,
                )
        return True

    def _as_put(self, block: QueuedBlock[Ticket], sequence: int) -> Put:
        ticket = block.ticket
        form = self._format.form_of(block.frame)
        record = Record(
            parent=block.parent,
            number=block.number,
            namespace_id=ticket.namespace_id,
            sequence=sequence,
            expires=_stored_expiry(ticket.expires),
            frame_bytes=len(block.frame),
            is_pinned=ticket.is_pinned,
            is_packed=form.is_packed,
            is_compressed=form.is_compressed,
            error=form.error_of(block.frame),
            head_sum=head_sum(block.frame),
        )
        return Put(block.key, record, block.frame)

    def _publish(self, runs: Iterable[_Run]) -> None:
        """Let lookups see what was committed; take back what lost its parent meanwhile."""
        orphans: list[BlockKey] = []
        renewed: list[tuple[list[BlockKey], float]] = []
        with self._context.lock:
            for run in runs:
                ticket, keys = run.ticket, [block.key for block in run.blocks]
                position = self.index.match(ticket.prefix.path[: run.first * KEY_BYTES])
                if position.depth < run.first:
                    orphans += reversed(keys)
                    continue
                segment = self.index.extend(
                    self.index.settle(position),
                    b"".join(keys),
                    now=ticket.tick,
                    namespace_id=ticket.namespace_id,
                    expires=ticket.expires,
                )
                if ticket.is_pinned and segment not in self._sticky:
                    self._stick(segment)
                if self.index.expiring:  # a parent lives as long as what hangs on it
                    changed = self.index.renew(segment, ticket.expires)
                    renewed += [(part.block_keys(), ticket.expires) for part in changed]
                self._context.metrics.stored_blocks += len(keys)
        for keys, expires in renewed:
            self._amend(keys, expires=_stored_expiry(expires))
        if orphans:
            self._context.count_drop("no_parent", len(orphans))
            self._delete(orphans)

    def _note_write_error(self, error: BaseException) -> None:
        metrics, path, now = self._context.metrics, self.ssd.path, self._context.clock()
        # The doing of others: of a reader, of who fills the disk, of who has all slots or descriptors.
        is_of_others = passes(error) or self.ssd.lacks_room(error, 1)
        with self._context.lock:
            metrics.write_errors += 1
            self._failures += not is_of_others
            metrics.say_once("write", "a write to %s failed: %s", path, error)
            if is_of_others or self._failures < WRITE_ERRORS_TO_READ_ONLY or now < self._resumes:
                return
            was_stopped = self._resumes > -math.inf
            self._resumes = now + RETRY_SECONDS if self.ssd.may_recover(error) else math.inf
            if not was_stopped:
                message = "%d writes to %s failed in a row (%s): nothing is stored until %s"
                logger.error(message, self._failures, path, error, self._until)

    @property
    def is_read_only(self) -> bool:
        """Whether writing has stopped, after failures of the medium."""
        return self._context.clock() < self._resumes

    @property
    def _until(self) -> str:
        if self._resumes == math.inf:
            return "it is reopened"
        return f"it is tried again, every {RETRY_SECONDS:.0f} s"

    # ---- maintenance ---------------------------------------------------------------------------

    def evict_to(self, live_bytes: int) -> int:
        """Evict by the policy until at most ``live_bytes`` are in use; return how many blocks went.

        More stay in use where pins keep what would have to go, or a delete fails. An empty tier
        has some pages too.

        Raises:
            StoreError: if the tier cannot be asked how full it is.
        """
        try:
            with self._changing:
                return self._free(self._cap(live_bytes, live_bytes))
        except MEDIUM_ERRORS as error:
            msg = f"the store at {self.ssd.path} cannot be read: {error}"
            raise StoreError(msg) from error

    def set_quota(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> None:
        """Let a namespace hold ``quota`` bytes, through all its generations; evict what is over now.

        It is in force until another is set, also after a restart.

        Raises:
            StoreError: if it cannot be recorded, and then the old one stays in force; or if the
                blocks that are over cannot be deleted now.
        """
        with self._context.lock:
            number = self.namespaces.hold(root, namespace)
        try:
            with self._changing:
                self.namespaces.set_quota(number, quota)
                self._free(self._quota(self.namespaces.line(number), quota))
        except MEDIUM_ERRORS as error:
            self._note_write_error(error)
            msg = f"the quota of {quota} bytes cannot be recorded in {self.ssd.path}: {error}"
            raise StoreError(msg) from error
        finally:
            with self._context.lock:
                self._release(number)

    def clear(self, root: BlockHash) -> int:
        """Remove every block of one namespace; return how many went."""
        if self.namespaces.find(root) is None:
            return 0
        self.flush()
        with self._changing:
            with self._context.lock:
                number = self.namespaces.find(root)
                if number is None:  # its last blocks are gone by now
                    return 0
                keys = self.index.remove_namespace(number)
                self._sticky = {segment for segment in self._sticky if segment.is_live}
            self._delete(keys)
        return len(keys)

    def flush(self) -> None:
        """Return when every block accepted before survives power loss.

        Raises:
            StoreError: if the writer failed or the medium cannot be synced.
        """
        self._writer.drain()
        failure, self._writer.failure = self._writer.failure, None
        if failure is not None:
            msg = f"the writer of {self.ssd.path} failed: {failure!r}"
            raise StoreError(msg) from failure
        with self._context.lock:
            uses, self._uses = self._uses, {}
        try:
            if uses:
                self._write_uses(uses)
            self.ssd.sync()
        except MEDIUM_ERRORS as error:
            self._note_write_error(error)
            msg = f"{self.ssd.path} cannot be synced: {error}; blocks stored lately may be lost"
            raise StoreError(msg) from error

    def _write_uses(self, uses: Mapping[BlockKey, int]) -> None:
        """Write recency down, or with a later commit where there is no room: no block depends on it."""
        try:
            self.ssd.put([], uses)
        except MEDIUM_ERRORS as error:
            if not self.ssd.lacks_room(error, 1):
                raise
            with self._context.lock:
                self._uses = {**uses, **self._uses}

    def close(self) -> None:
        """Commit what waits and stop the writer."""
        try:
            self.flush()
        finally:
            self._writer.close()

    def namespace_counts(self) -> list[dict[str, Any]]:
        """Return the namespaces with what each holds, and may hold."""
        return self.namespaces.table(self.index.namespace_blocks(), self.ssd.usage)

    @property
    def alarms(self) -> list[str]:
        """Sentences about what an operator should look at."""
        found = []
        if self.is_read_only:
            found.append(f"writes to {self.ssd.path} failed: nothing is stored until {self._until}")
        if self._writer.failure is not None:
            found.append(f"the writer failed: {self._writer.failure!r}")
        return found


def _stored_expiry(expires: float) -> float:
    """Return an expiry as records hold it: 0 for never."""
    return 0.0 if expires == NEVER else expires
