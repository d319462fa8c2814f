"""What all scopes of one open store share: tiers, index, pool, leases, counters, and one lock.

The lock guards memory only; no disk, device or hook is waited for while it is held.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore import plan
from kvstore.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.cache.match import Entries, Hold, Match, Pages, Prefix, Stored
from kvstore.errors import StoreBusy, StoreError
from kvstore.frame import FrameFormat, Header, head_sum
from kvstore.index import NEVER, Position, PrefixIndex, Segment
from kvstore.metrics import Metrics
from kvstore.policy.lru import Lru
from kvstore.replay import WindowSnapshot
from kvstore.tier.ssd import MEDIUM_ERRORS, Put, Record, SsdTier, is_full
from kvstore.transfer import QueuedBlock, Ticket, Writer
from kvstore.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""How long a lookup protects what it found. Mooncake's lease is 5 to 10 s; engines keep requests
queued for longer, and an expired lease costs a shorter hit, never an error."""
RETRY_EVICTION_BLOCKS = 16
"""Blocks freed before a commit that found the map full is tried once more. spec/lmdb 2."""
WRITE_ERRORS_TO_READ_ONLY = 3
"""Failed commits in a row after which writing stops. spec/lmdb 2."""
UNMEASURED_READ_BYTES_PER_SECOND = 0.3e9
"""Assumed until something was read: a cold read of 57 KB blocks by hint. spec/lmdb 1.4."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one ``store`` call inside one commit."""

    ticket: StoreTicket
    blocks: list[QueuedBlock]

    @property
    def first(self) -> int:
        return self.blocks[0].number


@dataclass(slots=True)
class StoreTicket(Ticket):
    """A ticket that knows the prefix its blocks belong to."""

    prefix: Prefix


class SharedTiers:
    """The state behind every scope of one store directory.

    Threads: every public method may be called from any thread of the process that opened it.
    """

    def __init__(
        self,
        *,
        frame_format: FrameFormat,
        ssd: SsdTier,
        window: WindowPool,
        device_bytes: int,
        open_device: Callable[[], DeviceTier],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.format = frame_format
        self.layout = frame_format.layout
        self.block_tokens = frame_format.block_tokens
        self.ssd = ssd
        self.window = window
        self.metrics = Metrics()
        self.clock = clock
        self.wall_clock = wall_clock
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._device_bytes = device_bytes
        self._open_device = open_device
        self._device: DeviceTier | None = None
        self._device_index: PrefixIndex | None = None
        self._device_pages: dict[BlockKey, int] = {}
        self._index = PrefixIndex(Lru[Segment]()) if ssd.is_owner else None
        self._pending: set[BlockKey] = set()
        self._uses: dict[BlockKey, int] = {}
        self._sticky: set[Segment] = set()
        self._leases: deque[Hold] = deque()
        self._by_request: dict[str, Match] = {}
        self._sequence = 0
        self._undeleted: list[BlockKey] = []
        """Keys that left the index but not yet the medium, because a delete failed."""
        self._failed_commits = 0
        self._is_read_only = False
        self._is_closed = False
        self._namespaces = {
            int(number): json.loads(text) for number, text in ssd.facts("namespace:").items()
        }
        self._namespace_ids = {entry["root"]: n for n, entry in self._namespaces.items()}
        self._writer: Writer | None = None
        if self._index is not None:
            self._rebuild(self._index)
            self._writer = Writer(self._commit, commit_blocks=ssd.commit_blocks)

    # ---- identity ------------------------------------------------------------------------------

    @property
    def is_owner(self) -> bool:
        """Say whether this process writes."""
        return self._index is not None

    def guard(self) -> None:
        """Raise ``StoreError`` in a forked child or after ``close``."""
        if os.getpid() != self._pid:
            msg = f"the store at {self.ssd.path} was opened by process {self._pid}; open it again after a fork"
            raise StoreError(msg)
        if self._is_closed:
            msg = f"the store at {self.ssd.path} is closed"
            raise StoreError(msg)

    def namespace_id(self, root: BlockHash, description: Mapping[str, Any]) -> int:
        """Return the number of a namespace, giving it one when it first stores something."""
        name = root.hex()
        with self._lock:
            known = self._namespace_ids.get(name)
            if known is not None:
                return known
            number = max(self._namespaces, default=0) + 1
            entry = {"root": name, **description}
            self._namespaces[number] = entry
            self._namespace_ids[name] = number
        self.ssd.set_fact(f"namespace:{number}", json.dumps(entry).encode())
        return number

    def generation(self, line: str, given: int) -> int:
        """Return the generation of a line of weights: the newer of the given and the recorded."""
        recorded = self.ssd.fact(f"generation:{line}")
        return max(given, int(recorded) if recorded else 0)

    def set_generation(self, line: str, generation: int) -> None:
        """Record a generation, so that a restart does not go back to old weights."""
        if not self.is_owner:
            msg = f"the store at {self.ssd.path} is open as a reader; only its owner bumps the generation"
            raise StoreBusy(msg)
        self.ssd.set_fact(f"generation:{line}", str(generation).encode())

    # ---- looking up ----------------------------------------------------------------------------

    def lookup(
        self, prefix: Prefix, *, request_id: str | None, need_window: bool, is_probe: bool
    ) -> Match:
        """Find the longest hit of ``prefix``, with a lease unless it is a probe."""
        limit = plan.hit_limit(len(prefix.tokens), self.block_tokens) // self.block_tokens
        path = prefix.path[: limit * KEY_BYTES]
        stored = None if self.is_owner else self._reader_run(path)
        with self._lock:
            self._expire_leases()
            if not is_probe and request_id is not None and request_id in self._by_request:
                return self._by_request[request_id]
            positions = self._positions(path)
            resident = {name: position.depth for name, (_, position) in positions.items()}
            if stored is not None:
                resident["ssd"] = stored
            hit = max(resident.values(), default=0)
            snapshot = None
            if need_window and self.layout.window_tokens:
                hit = next(
                    (n for n in range(hit, 0, -1) if self.window.peek(prefix.hashes[n - 1])), 0
                )
            if hit:
                snapshot = self.window.peek(prefix.hashes[hit - 1])
            hold = None
            if not is_probe:
                hold = self._take_hold(path[: hit * KEY_BYTES], prefix, hit)
                hold.expires = self.clock() + LEASE_SECONDS
                if hold.segments or hold.snapshot is not None:
                    self._leases.append(hold)
                snapshot = hold.snapshot
            match = Match(
                *(self, prefix, resident, hit * self.block_tokens, snapshot, hold, request_id)
            )
            if not is_probe:
                self._count_lookup(match, limit)
                if request_id is not None:
                    self._by_request[request_id] = match
            return match

    def _reader_run(self, path: bytes) -> int:
        try:
            return self.ssd.leading_run(path)
        except MEDIUM_ERRORS:
            self.metrics.corrupt_blocks["io"] += 1
            return 0

    def _positions(self, path: bytes) -> dict[str, tuple[PrefixIndex, Position]]:
        """Match a path in every index, nearest tier first."""
        indexes = {"device": self._device_index, "ssd": self._index}
        now = self.wall_clock()
        return {
            name: (index, index.match(path, now))
            for name, index in indexes.items()
            if index is not None
        }

    def _take_hold(self, path: bytes, prefix: Prefix, blocks: int) -> Hold:
        """Pin everything of ``path`` in every tier, and its window; make it recent."""
        hold = Hold()
        tick = self._next_sequence()
        for index, position in self._positions(path).values():
            if position.depth:
                segment = index.settle(position)
                index.pin(segment)
                index.touch(segment, tick)
                hold.segments.append((index, segment))
                if index is self._index:
                    self._uses[prefix.key(position.depth - 1)] = tick
        if blocks:
            hold.snapshot = self.window.pin(prefix.hashes[blocks - 1])
        return hold

    def _count_lookup(self, match: Match, limit: int) -> None:
        metrics = self.metrics
        metrics.lookups += 1
        metrics.query_tokens += len(match.tokens)
        for step in plan.loads(match.hit_tokens // self.block_tokens, match.resident_blocks).steps:
            assert isinstance(step, plan.Load)
            metrics.hit_tokens[step.tier] += (step.stop - step.start) * self.block_tokens
        if limit:
            metrics.window_hits += match.window_hit
            metrics.block_lookups_without_hit += not match.hit_tokens
        metrics.check_alarms()

    def window_at(self, match: Match) -> WindowSnapshot | None:
        """Return the pooled window of a match whose hit became shorter, pinned like the old one."""
        with self._lock:
            hold = match.hold
            if hold is None or hold.is_released or not match.hit_tokens:
                return None
            if hold.snapshot is not None:
                self.window.unpin(hold.snapshot)
            hold.snapshot = self.window.pin(match.prefix.hash_at(match.hit_tokens))
            return hold.snapshot

    def is_worth_loading(self, match: Match) -> bool:
        """Weigh the load of a match against computing it, by the speeds measured so far."""
        metrics = self.metrics
        speed = UNMEASURED_READ_BYTES_PER_SECOND
        if metrics.read_seconds:
            speed = metrics.read_bytes / metrics.read_seconds
        per_token = 0.0
        if metrics.prefill_tokens:
            per_token = metrics.prefill_seconds / metrics.prefill_tokens
        size = match.hit_tokens // self.block_tokens * self.format.frame_bytes
        return plan.worth_loading(
            *(match.hit_tokens, match.floors, self.layout.window_tokens, size / speed, per_token)
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take in a measurement of the engine's own speed."""
        with self._lock:
            self.metrics.prefill_tokens += tokens
            self.metrics.prefill_seconds += seconds

    def put_window(self, prefix: Prefix, snapshot: WindowSnapshot, *, is_replayed: bool) -> bool:
        """Keep a window in the pool, and count it if it had to be rebuilt."""
        with self._lock:
            if is_replayed:
                self.metrics.replay_requests += 1
                self.metrics.replayed_tokens += snapshot.stop - snapshot.start
            key = prefix.hash_at(snapshot.stop)
            return self.window.put(key, snapshot, owner=prefix.root, is_replayed=is_replayed)

    # ---- leases and pins -----------------------------------------------------------------------

    def enter(self, match: Match) -> None:
        """Turn a match's lease into a pin; an expired one is taken anew, perhaps shorter."""
        self.guard()
        with self._lock:
            hold = match.hold
            if hold is not None and not hold.is_released:
                hold.expires = NEVER
                return
            blocks = match.hit_tokens // self.block_tokens
            match.hold = self._take_hold(
                match.prefix.path[: blocks * KEY_BYTES], match.prefix, blocks
            )
            match.hold.expires = NEVER
            match.snapshot = match.hold.snapshot
            depths = [
                position.depth
                for _, position in self._positions(match.prefix.path[: blocks * KEY_BYTES]).values()
            ]
        if self.is_owner:
            match.shrink(max(depths, default=0) * self.block_tokens)

    def leave(self, match: Match) -> None:
        """Drop a match's pin."""
        if match.hold is not None:
            self.release(match.hold)
        if match.request_id is not None:
            self.forget_request(match.request_id)

    def forget_request(self, request_id: str) -> None:
        """Drop what a request id stands for. Unknown ids are ignored."""
        with self._lock:
            match = self._by_request.pop(request_id, None)
            if match is not None and match.hold is not None and match.hold.expires != NEVER:
                self.release(match.hold)

    def release(self, hold: Hold) -> None:
        """Give back every pin of a hold. Idempotent."""
        with self._lock:
            if hold.is_released:
                return
            hold.is_released = True
            for index, segment in hold.segments:
                index.unpin(segment)
            if hold.snapshot is not None:
                self.window.unpin(hold.snapshot)

    def _expire_leases(self) -> None:
        """Give up leases whose time is over; one that became a pin is its match's to release."""
        now = self.clock()
        while self._leases:
            hold = self._leases[0]
            if not hold.is_released and now < hold.expires != NEVER:
                return
            self._leases.popleft()
            if not hold.is_released and hold.expires != NEVER:
                self.metrics.expired_leases += 1
                self.release(hold)

    # ---- storing -------------------------------------------------------------------------------

    def store(
        self,
        prefix: Prefix,
        namespace: Callable[[], int],
        entries: Mapping[str, NDArray[np.uint8]],
        start: int,
        *,
        wait: float,
        ttl: float | None,
        is_pinned: bool,
    ) -> Stored:
        """Queue the blocks of ``[start, ...)`` that are not known yet."""
        size = self.block_tokens
        first, stop = start // size, len(prefix.hashes)
        if self._index is None or self._writer is None:
            return self._drop(first, stop, first * size, "reader")
        expires = NEVER if ttl is None else self.wall_clock() + ttl
        with self._lock:
            known = self._known_blocks(prefix)
            decided = plan.stores(first, stop, known)
            self.metrics.present_blocks += decided.present
            amends = self._renew(prefix, min(known, stop), expires, is_pinned=is_pinned)
        for keys, fields in amends:
            self.ssd.amend(keys, **fields)
        if decided.store is None:
            if decided.orphans:
                return self._drop(first, stop, known * size, "no_parent")
            return Stored(min(known, stop) * size, decided.present, 0)
        ticket = StoreTicket(
            namespace_id=namespace(),
            tick=0,
            expires=expires,
            wall_expires=0.0 if expires == NEVER else expires,
            is_pinned=is_pinned,
            prefix=prefix,
        )
        with self._lock:
            ticket.tick = self._next_sequence()
        deadline = time.monotonic() + wait
        for number in range(decided.store.start, decided.store.stop):
            if self._is_read_only:
                return self._drop(number, stop, number * size, "write_error", decided.present)
            if not self._writer.wait_for_room(deadline - time.monotonic()):
                return self._drop(number, stop, number * size, "queue_full", decided.present)
            self._submit(self._writer, ticket, number, entries, number - first)
        return Stored(stop * size, decided.present, 0)

    def _known_blocks(self, prefix: Prefix) -> int:
        """Return how many leading blocks are stored or queued."""
        assert self._index is not None
        known = self._index.match(prefix.path).depth
        while known < len(prefix.hashes) and prefix.key(known) in self._pending:
            known += 1
        return known

    def _renew(
        self, prefix: Prefix, blocks: int, expires: float, *, is_pinned: bool
    ) -> list[tuple[list[BlockKey], dict[str, Any]]]:
        """Make a prefix that is stored again recent, longer-lived, and pinned if asked.

        Returns the records to amend, for when the lock is free.
        """
        index = self._index
        assert index is not None
        position = index.match(prefix.path[: blocks * KEY_BYTES])
        if not position.depth:
            return []
        segment = index.settle(position)
        tick = self._next_sequence()
        index.touch(segment, tick)
        key = prefix.key(position.depth - 1)
        self._uses[key] = tick
        amends: list[tuple[list[BlockKey], dict[str, Any]]] = []
        renewed = index.renew(segment, expires) if index.expiring else []
        if renewed:
            keys = [k for changed in renewed for k in _keys_of(changed)]
            amends.append((keys, {"expires": 0.0 if expires == NEVER else expires}))
        if is_pinned and segment not in self._sticky:
            self._stick(segment)
            amends.append(([key], {"is_pinned": True}))
        return amends

    def _stick(self, segment: Segment) -> None:
        assert self._index is not None
        self._index.pin(segment)
        self._sticky.add(segment)

    def unstick(self, prefix: Prefix) -> None:
        """Take back every lasting pin on the path of ``prefix``."""
        index = self._index
        if index is None:
            return
        with self._lock:
            node: Segment | None = index.match(prefix.path).segment
            keys = []
            while node is not None and node.parent is not None:
                if node in self._sticky:
                    self._sticky.discard(node)
                    index.unpin(node)
                    keys += _keys_of(node)
                node = node.parent
        if keys:
            self.ssd.amend(keys, is_pinned=False)

    def _submit(
        self,
        writer: Writer,
        ticket: StoreTicket,
        number: int,
        entries: Mapping[str, NDArray[np.uint8]],
        block: int,
    ) -> None:
        """Frame one block outside the lock, then queue it unless another thread was faster."""
        prefix = ticket.prefix
        key = prefix.key(number)
        header = Header(
            block_tokens=self.block_tokens,
            number=number,
            namespace_id=ticket.namespace_id,
            payload_bytes=self.format.payload_bytes,
            block_hash=prefix.hashes[number],
            parent_hash=prefix.parent_hash(number),
            sequence=ticket.tick,
            has_images=any(
                image.start < (number + 1) * self.block_tokens
                and image.stop > number * self.block_tokens
                for image in prefix.images
            ),
        )
        frame = self.format.encode(header, prefix.block_ids(number), entries, block)
        parent = BlockKey(prefix.parent_hash(number)[:KEY_BYTES])
        queued = QueuedBlock(key, prefix.hashes[number], parent, number, frame, ticket)
        with self._lock:
            if key in self._pending:
                self.metrics.present_blocks += 1
                return
            self._pending.add(key)
            writer.submit(queued)

    def _drop(self, first: int, stop: int, end: int, reason: str, present: int = 0) -> Stored:
        count = stop - first
        if count:
            self.metrics.dropped_blocks[reason] += count
            self.metrics.say_once(
                reason, "%d blocks were not stored (%s); counted from here on", count, reason
            )
        return Stored(end, present, count)

    # ---- committing (writer thread) ------------------------------------------------------------

    def _commit(self, batch: list[QueuedBlock]) -> None:
        """Write a batch: make room, one transaction, then publish in the index."""
        index = self._index
        assert index is not None
        try:
            with self._lock:
                runs = self._admit(index, batch)
                parents = self._pin_parents(index, runs)
                uses, self._uses = self._uses, {}
            try:
                self._make_room(index, runs)
                if self._put(index, runs, uses):
                    self._publish(index, runs)
            finally:
                with self._lock:
                    for segment in parents:
                        index.unpin(segment)
        finally:
            with self._lock:
                self._pending.difference_update(block.key for block in batch)

    def _admit(self, index: PrefixIndex, batch: Sequence[QueuedBlock]) -> list[_Run]:
        """Split a batch into runs, leaving out what is present and what lost its parent."""
        runs: list[_Run] = []
        staged: set[BlockKey] = set()
        for _, members in groupby(batch, key=lambda block: id(block.ticket)):
            blocks = list(members)
            ticket = blocks[0].ticket
            assert isinstance(ticket, StoreTicket)
            path = ticket.prefix.path[: (blocks[-1].number + 1) * KEY_BYTES]
            depth = index.match(path).depth
            fresh = [b for b in blocks if b.number >= depth and b.key not in staged]
            self.metrics.present_blocks += len(blocks) - len(fresh)
            if fresh and fresh[0].number > depth and fresh[0].parent not in staged:
                self.metrics.dropped_blocks["no_parent"] += len(fresh)
                continue
            if fresh:
                staged.update(block.key for block in fresh)
                runs.append(_Run(ticket, fresh))
        if self._undeleted:
            self._undeleted = [key for key in self._undeleted if key not in staged]
        return runs

    def _pin_parents(self, index: PrefixIndex, runs: Iterable[_Run]) -> list[Segment]:
        """Pin what a batch hangs on, so that making room never takes it away."""
        pinned = []
        for run in runs:
            position = index.match(run.ticket.prefix.path[: run.first * KEY_BYTES])
            if position.depth:
                segment = index.settle(position)
                index.pin(segment)
                pinned.append(segment)
        return pinned

    def _make_room(self, index: PrefixIndex, runs: list[_Run]) -> None:
        """Evict down to the low watermark if the batch would cross the high one; cut what is over."""
        ssd = self.ssd
        live = ssd.live_bytes
        incoming = sum(len(run.blocks) for run in runs) * ssd.block_bytes
        need = plan.room(live, incoming, ssd.high_bytes, ssd.low_bytes)
        if need:
            live -= self._evict(index, -(-need // ssd.block_bytes)) * ssd.block_bytes
        room = max(0, (ssd.high_bytes - live) // ssd.block_bytes)
        for run in runs:
            over = len(run.blocks) - room
            if over > 0:
                del run.blocks[room:]
                self._count_drop("no_room", over)
            room -= len(run.blocks)
        runs[:] = [run for run in runs if run.blocks]

    def _evict(self, index: PrefixIndex, blocks: int) -> int:
        """Remove blocks by the policy from index and medium; return how many went."""
        with self._lock:
            self._expire_leases()
            keys = index.evict(blocks, self.wall_clock()).keys
            self.metrics.evicted_blocks["ssd"] += len(keys)
        self._delete(keys)
        return len(keys)

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks that left the index; what fails is tried again with the next delete.

        A block that was stored anew in the meantime is in the index again and stays.
        """
        with self._lock:
            due, self._undeleted = [*self._undeleted, *keys], []
        try:
            self.ssd.delete(due)
        except MEDIUM_ERRORS as error:
            with self._lock:
                self._undeleted = due + self._undeleted
            self._note_write_error(error)

    def _put(self, index: PrefixIndex, runs: list[_Run], uses: Mapping[BlockKey, int]) -> bool:
        """Write the runs in one transaction; on a full map free a little and try once more."""
        puts = [self._as_put(run.ticket, block) for run in runs for block in run.blocks]
        if not puts and not uses:
            return True
        for attempt in (1, 2):
            try:
                self.ssd.put(puts, uses)
            except MEDIUM_ERRORS as error:
                if attempt == 1 and is_full(error):
                    self._evict(index, RETRY_EVICTION_BLOCKS)
                    continue
                self._note_write_error(error)
                self._count_drop("write_error", len(puts))
                return False
            self._failed_commits = 0
            return True
        return False

    def _as_put(self, ticket: Ticket, block: QueuedBlock) -> Put:
        with self._lock:
            sequence = self._next_sequence()
        record = Record(
            parent=block.parent,
            number=block.number,
            namespace_id=ticket.namespace_id,
            sequence=sequence,
            expires=ticket.wall_expires,
            frame_bytes=len(block.frame),
            is_pinned=ticket.is_pinned,
            head_sum=head_sum(block.frame),
        )
        return Put(block.key, record, block.frame)

    def _publish(self, index: PrefixIndex, runs: Iterable[_Run]) -> None:
        """Let lookups see what was committed; take back what lost its parent meanwhile."""
        orphans: list[BlockKey] = []
        with self._lock:
            for run in runs:
                keys = [block.key for block in run.blocks]
                position = index.match(run.ticket.prefix.path[: run.first * KEY_BYTES])
                if position.depth < run.first:
                    orphans += reversed(keys)
                    continue
                segment = index.extend(
                    index.settle(position),
                    b"".join(keys),
                    now=run.ticket.tick,
                    namespace_id=run.ticket.namespace_id,
                    expires=run.ticket.expires,
                )
                if run.ticket.is_pinned and segment not in self._sticky:
                    self._stick(segment)
                self.metrics.stored_blocks += len(keys)
        if orphans:
            self._count_drop("no_parent", len(orphans))
            self._delete(orphans)

    def _count_drop(self, reason: str, count: int) -> None:
        if count:
            with self._lock:
                self.metrics.dropped_blocks[reason] += count
                self.metrics.say_once(
                    reason, "%d blocks were not stored (%s); counted from here on", count, reason
                )

    def _note_write_error(self, error: BaseException) -> None:
        with self._lock:
            self.metrics.write_errors += 1
            self._failed_commits += 1
            self.metrics.say_once("write", "a write to %s failed: %s", self.ssd.path, error)
            if self._failed_commits >= WRITE_ERRORS_TO_READ_ONLY and not self._is_read_only:
                self._is_read_only = True
                logger.error(
                    "%d writes to %s failed in a row (%s): nothing is stored until it is reopened",
                    *(self._failed_commits, self.ssd.path, error),
                )

    # ---- reading -------------------------------------------------------------------------------

    def read(self, match: Match) -> Entries:
        """Copy a match's entries to host arrays, verified; a bad block shortens the result."""
        hit = match.hit_tokens // self.block_tokens
        entries = self.format.empty(hit)
        done = 0
        for step in plan.loads(
            hit, {"ssd": match.resident_blocks.get("ssd", 0), **match.resident_blocks}
        ).steps:
            assert isinstance(step, plan.Load)
            if step.tier == "ssd":
                done = self._read_ssd(match.prefix, step.start, step.stop, entries)
            else:
                done = self._read_device(match, step.start, step.stop, entries)
            if done < step.stop:
                break
        if done < hit:
            match.shrink(done * self.block_tokens)
            for name, array in entries.items():
                entries[name] = array[:, : done * self.format.entries[name]]
        return Entries(entries, done * self.block_tokens)

    def _read_ssd(
        self, prefix: Prefix, first: int, stop: int, entries: Mapping[str, NDArray[np.uint8]]
    ) -> int:
        scatter = self.format.scatter
        return self._fetch(prefix, first, stop, lambda i, frame: scatter(frame, entries, first + i))

    def _fetch(
        self, prefix: Prefix, first: int, stop: int, take: Callable[[int, memoryview], None]
    ) -> int:
        """Read and verify blocks ``[first, stop)`` in order; return the block where that ended."""

        def fault(i: int, frame: memoryview) -> str | None:
            number = first + i
            return self.format.fault(
                *(
                    frame,
                    prefix.hashes[number],
                    prefix.parent_hash(number),
                    prefix.block_ids(number),
                )
            )

        began = time.perf_counter()
        keys = [prefix.key(number) for number in range(first, stop)]
        result = self.ssd.read(keys, fault, take)
        with self._lock:
            self.metrics.read_bytes += result.count * self.format.frame_bytes
            self.metrics.read_seconds += time.perf_counter() - began
        if result.fault is not None:
            self._discard(prefix, first + result.count, result.fault)
        return first + result.count

    def _discard(self, prefix: Prefix, number: int, fault: str) -> None:
        """Count a bad block and, as the owner, remove it and all that hangs on it."""
        with self._lock:
            self.metrics.corrupt_blocks[fault] += 1
            self.metrics.say_once(
                f"corrupt {fault}",
                "block %d of a prefix in %s is unusable (%s): recomputed and counted from here on",
                *(number, self.ssd.path, fault),
            )
            if self._index is None:
                return
            position = self._index.match(prefix.path[: (number + 1) * KEY_BYTES])
            if position.depth <= number:
                return
            segment = self._index.settle(position)
            keys = self._index.remove_from(Position(segment, segment.blocks - 1, number)).keys
        self._delete(keys)

    # ---- device pages --------------------------------------------------------------------------

    @property
    def device(self) -> DeviceTier:
        """The device tier, made on first use: it costs its whole capacity and imports torch."""
        with self._lock:
            if self._device is None:
                self._device = self._open_device()
                self._device_index = PrefixIndex(Lru[Segment]())
            return self._device

    def load(self, match: Match) -> Pages:
        """Promote a match into device pages; what does not fit or is bad shortens the result."""
        device = self.device
        index = self._device_index
        assert index is not None
        hit = match.hit_tokens // self.block_tokens
        path = match.prefix.path[: hit * KEY_BYTES]
        with self._lock:
            position = index.match(path)
            have = position.depth
            hold = Hold(expires=NEVER)
            if have:
                segment = index.settle(position)
                index.pin(segment)
                hold.segments.append((index, segment))
            fresh = self._take_pages(device, index, hit - have)
        stop = (
            self._fetch(
                match.prefix,
                have,
                have + len(fresh),
                lambda i, frame: device.write(fresh[i], frame),
            )
            if fresh
            else have
        )
        with self._lock:
            device.free(fresh[stop - have :])
            self._adopt_pages(device, index, match.prefix, have, fresh[: stop - have], hold)
            table = [self._device_pages[match.prefix.key(n)] for n in range(stop)]
        if stop < hit:
            match.shrink(stop * self.block_tokens)
        pages = Pages(
            self, device.page_table(table), stop * self.block_tokens, hold, device.layout_tag
        )
        match.pages = pages
        return pages

    def _take_pages(self, device: DeviceTier, index: PrefixIndex, count: int) -> list[int]:
        """Allocate up to ``count`` pages, evicting what nobody pins."""
        short = count - device.free_pages
        if short > 0:
            keys = index.evict(short).keys
            self.metrics.evicted_blocks["device"] += len(keys)
            device.free([self._device_pages.pop(key) for key in keys])
        return device.allocate(min(count, device.free_pages))

    def _adopt_pages(
        self,
        device: DeviceTier,
        index: PrefixIndex,
        prefix: Prefix,
        first: int,
        pages: list[int],
        hold: Hold,
    ) -> None:
        """Publish filled pages; where another thread was faster, its pages stay."""
        stop = first + len(pages)
        present = index.match(prefix.path[: stop * KEY_BYTES])
        known = max(first, present.depth)
        device.free(pages[: known - first])
        segment = index.settle(present)
        if known < stop:
            keys = [prefix.key(number) for number in range(known, stop)]
            self._device_pages.update(zip(keys, pages[known - first :], strict=True))
            tick = self._next_sequence()
            segment = index.insert(segment, b"".join(keys), now=tick, namespace_id=0)
        if stop:
            index.pin(segment)
            hold.segments.append((index, segment))

    def _read_device(
        self, match: Match, first: int, stop: int, entries: Mapping[str, NDArray[np.uint8]]
    ) -> int:
        assert self._device is not None
        for number in range(first, stop):
            page = self._device_pages.get(match.prefix.key(number))
            if page is None:
                return number
            self._device.read(page, entries, number)
        return stop

    # ---- maintenance ---------------------------------------------------------------------------

    def clear(self, root: BlockHash) -> int:
        """Remove every block of one namespace; return how many went."""
        number = self._namespace_ids.get(root.hex())
        if number is None:
            return 0
        if self._index is None:
            msg = f"the store at {self.ssd.path} is open as a reader; only its owner clears"
            raise StoreBusy(msg)
        self.flush()
        with self._lock:
            keys = self._index.remove_namespace(number).keys
            self._sticky = {segment for segment in self._sticky if segment.is_live}
            self.window.clear(root)
            self._clear_device()
        self._delete(keys)
        return len(keys)

    def _clear_device(self) -> None:
        """Forget every device page that nobody pins."""
        if self._device is not None and self._device_index is not None:
            keys = self._device_index.evict(self._device_index.blocks).keys
            self._device.free([self._device_pages.pop(key) for key in keys])

    def flush(self) -> None:
        """Return when every block accepted before survives power loss."""
        if self._writer is None:
            return
        self._writer.drain()
        failure, self._writer.failure = self._writer.failure, None
        if failure is not None:
            msg = f"the writer of {self.ssd.path} failed: {failure!r}"
            raise StoreError(msg) from failure
        try:
            self._write_uses()
            self.ssd.sync()
        except MEDIUM_ERRORS as error:
            self._note_write_error(error)
            msg = f"{self.ssd.path} cannot be synced: {error}; blocks stored lately may be lost"
            raise StoreError(msg) from error

    def _write_uses(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
        if uses:
            self.ssd.put([], uses)

    def close(self) -> None:
        """Flush, stop the writer and let go of the files. Idempotent."""
        if self._is_closed:
            return
        try:
            if os.getpid() == self._pid:
                self.flush()
        finally:
            self._is_closed = True
            if self._writer is not None:
                self._writer.close()
            self.ssd.close()

    def abandon(self) -> None:
        """In a forked child: drop the inherited files so that the child can open its own."""
        self._is_closed = True
        self.ssd.abandon()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        ssd = self.ssd
        blocks = ssd.block_count
        tokens = blocks * self.block_tokens
        live = ssd.live_bytes
        with self._lock:
            self._expire_leases()
            counts = self._index.namespace_blocks() if self._index is not None else {}
            result: dict[str, Any] = {
                "path": str(ssd.path),
                "role": "owner" if self.is_owner else "reader",
                "layout": self.layout.model,
                "block_tokens": self.block_tokens,
                "bytes_per_token": float(self.layout.bytes_per_token),
                "tiers": {
                    "ssd": {
                        "blocks": blocks,
                        "tokens": tokens,
                        "live_bytes": live,
                        "file_bytes": ssd.file_bytes,
                        "capacity_bytes": ssd.capacity_bytes,
                        "bytes_per_token": live / tokens if tokens else None,
                        "queued_blocks": self._writer.queued_blocks if self._writer else 0,
                        "is_read_only": self._is_read_only or not self.is_owner,
                    }
                },
                "window": {
                    "snapshots": len(self.window),
                    "used_bytes": self.window.used_bytes,
                    "capacity_bytes": self.window.capacity_bytes,
                    "evicted": self.window.evicted,
                    "expired": self.window.expired,
                },
                "index": {"segments": self._index.segments if self._index is not None else 0},
                "namespaces": [
                    {"id": number, "blocks": counts.get(number, 0), **entry}
                    for number, entry in sorted(self._namespaces.items())
                ],
                "counters": self.metrics.as_dict(),
                "alarms": self.metrics.alarms,
            }
            if self._device is not None:
                used = self._device.page_count - self._device.free_pages
                result["tiers"]["device"] = {
                    "blocks": used,
                    "tokens": used * self.block_tokens,
                    "live_bytes": used * self._device.page_bytes,
                    "capacity_bytes": self._device_bytes,
                }
        if self._writer is not None and self._writer.failure is not None:
            result["alarms"] = [*result["alarms"], f"the writer failed: {self._writer.failure!r}"]
        return result

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _rebuild(self, index: PrefixIndex) -> None:
        """Fill the index from the records; delete and count what hangs on nothing."""
        records = dict(self.ssd.records())
        orphans = rebuild(index, records, self._stick)
        self._sequence = max((record.sequence for record in records.values()), default=0)
        if orphans:
            logger.warning(
                "%d blocks in %s had no parent and were deleted", len(orphans), self.ssd.path
            )
            self.metrics.dropped_blocks["orphan"] += len(orphans)
            self._delete(orphans)


def _keys_of(segment: Segment) -> list[BlockKey]:
    keys = segment.keys
    return [BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def rebuild(
    index: PrefixIndex, records: Mapping[BlockKey, Record], stick: Callable[[Segment], None]
) -> list[BlockKey]:
    """Fill an empty index from records; return orphans, deepest first.

    A persisted use stands at the deepest block of its hit only, so a block's recency is the newest
    in its subtree. A segment ends at a fork and wherever that recency or the expiry changes, which
    is where a request ended.

    Cost: about 3 µs a block.
    """
    by_depth = sorted(records, key=lambda key: records[key].number, reverse=True)
    recency = {key: record.sequence for key, record in records.items()}
    children: dict[BlockKey, list[BlockKey]] = {}
    heads: list[BlockKey] = []
    for key in by_depth:
        record = records[key]
        if record.number == 0:
            heads.append(key)
            continue
        parent = records.get(record.parent)
        if parent is not None and parent.number == record.number - 1:
            children.setdefault(record.parent, []).append(key)
            recency[record.parent] = max(recency[record.parent], recency[key])
    root = index.match(b"").segment
    reached = 0
    pending = [(root, key) for key in heads]
    while pending:
        above, key = pending.pop()
        first = records[key]
        run = [key]
        below = children.get(key, [])
        while len(below) == 1 and _continues(records, recency, run[-1], below[0]):
            run.append(below[0])
            below = children.get(below[0], [])
        segment = index.insert(
            above,
            b"".join(run),
            now=recency[key],
            namespace_id=first.namespace_id,
            expires=first.expires or NEVER,
        )
        if any(records[k].is_pinned for k in run):
            stick(segment)
        reached += len(run)
        pending.extend((segment, child) for child in below)
    if reached == len(records):
        return []
    present = {k for segment in index for k in _keys_of(segment)}
    return [key for key in by_depth if key not in present]


def _continues(
    records: Mapping[BlockKey, Record],
    recency: Mapping[BlockKey, int],
    upper: BlockKey,
    lower: BlockKey,
) -> bool:
    """Say whether a block belongs to the same segment as its parent."""
    return recency[upper] == recency[lower] and records[upper].expires == records[lower].expires
