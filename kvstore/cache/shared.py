"""What all scopes of one open store share: tiers, window pool, leases and counters."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.cache.device_pages import DevicePages
from kvstore.cache.entries import Entries, Stored
from kvstore.cache.jobs import Jobs
from kvstore.cache.match import Hold, Match, PinnedPages
from kvstore.cache.reading import Limits, Reads, Take
from kvstore.errors import ConfigError, StoreError
from kvstore.frame.format import Frames, Header, Wave
from kvstore.identity.block import KEY_BYTES, BlockHash
from kvstore.identity.chain import Prefix
from kvstore.index import plan
from kvstore.index.prefix_tree import GONE, NEVER, Position, PrefixIndex, Segment
from kvstore.layout.replay import WindowSnapshot
from kvstore.policy.guarded import Guarded
from kvstore.policy.lru import Lru
from kvstore.policy.protocol import Policy
from kvstore.store import generations
from kvstore.store.namespaces import namespace_facts
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import BUSY
from kvstore.tier.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""How long a lookup protects what it found. Mooncake's lease is 5 to 10 s; engines keep requests
queued for longer, and an expired lease costs a shorter hit, never an error."""
UNMEASURED_READ_BYTES_PER_SECOND = 0.3e9
"""Assumed until something was read: a cold read of 57 KB blocks by hint. docs/decisions/0009."""

RequestKey = tuple[BlockHash, str]
"""A request id with the root of the namespace that used it: tenants number requests alike."""


class SharedTiers(OpenStore):
    """The state behind every scope of one store directory."""

    def __init__(
        self,
        *,
        frame_format: Frames,
        ssd: SsdTier,
        window: WindowPool,
        open_device: Callable[[], DeviceTier],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        secret: bytes | None = None,
        scrub_bytes_per_second: int = 0,
        request_share: float = 1.0,
        read_threads: int = 1,
        policy: Policy[Segment] | None = None,
    ) -> None:
        """Take over an open tier. ``policy`` orders its eviction; None is LRU."""
        self.layout = frame_format.layout
        self.block_tokens = frame_format.block_tokens
        self.secret = secret
        """What roots are hashed under, if the store has one."""
        self.window = window
        self.pages: DevicePages | None = None
        self._generations: dict[str, int] = {}
        """Newest generation of each line of weights that has begun a second one and is used here."""
        self._why_lru = ""
        """Why another policy than the given one orders eviction, if one does."""
        self._open_device = open_device
        self._making_pages = threading.Lock()
        self._leases: deque[Hold] = deque()
        self._by_request: dict[RequestKey, Match] = {}
        super().__init__(
            frame_format=frame_format,
            ssd=ssd,
            index=PrefixIndex(
                Lru[Segment]() if policy is None else Guarded(policy, self._policy_failed)
            ),
            clock=clock,
            wall_clock=wall_clock,
            scrub_bytes_per_second=scrub_bytes_per_second,
            request_share=request_share,
        )
        if window.capacity_bytes and window.is_too_small:
            logger.warning("%s", self._window_alarm())
        self._reads = Reads(self.context, frame_format, ssd, self._discard, read_threads)
        self.jobs = Jobs(self)

    def _policy_failed(self, error: Exception) -> None:
        """Take note that the policy was replaced. The caller holds the lock, as for every change."""
        self.metrics.policy_errors += 1
        self._why_lru = (
            f"the eviction policy of {self.ssd.path} failed: {error!r}; what was used least recently "
            "goes until it is reopened"
        )
        self.metrics.say_once("policy", "%s", self._why_lru)

    @override
    def _alarms(self, ssd: Mapping[str, Any]) -> list[str]:
        found = super()._alarms(ssd)
        if self._why_lru:
            found.append(self._why_lru)
        window = self.window  # a pool of 0 bytes is a choice, until a window is offered to it
        if window.is_too_small and (window.capacity_bytes or window.refused):
            found.append(self._window_alarm())
        return found

    def _window_alarm(self) -> str:
        least = self.window.snapshot_bytes
        return (
            f"the window pool of {self.ssd.path} has {self.window.capacity_bytes} bytes, less than the "
            f"{least} of one snapshot of {self.layout.model}: no window is kept, and a lookup that "
            f"needs one finds nothing; give window_bytes of at least {least} for each sequence that "
            "is to be found"
        )

    # ---- identity ------------------------------------------------------------------------------

    def generation(self, line: str, given: int) -> int:
        """Return the generation of a line of weights: the newer of the given and the recorded.

        Raises:
            StoreError: if what is recorded cannot be read; a guess could bring old weights back.
        """
        with self.context.lock:
            known = self._generations.get(line)
        if known is None or not self.is_owner:  # a reader's owner may have begun a newer one
            try:
                known = generations.recorded(self.ssd, line)
            except MEDIUM_ERRORS as error:
                msg = f"the generation recorded in {self.ssd.path} cannot be read: {error}"
                raise StoreError(msg) from error
        with self.context.lock:
            known = max(known, self._generations.get(line, 0))
            if known:  # most lines never begin another one, and there is a line for every salt
                self._generations[line] = known
        return max(given, known)

    def is_current(self, line: str, generation: int) -> bool:
        """Say whether no newer generation of a line of weights was begun in this process."""
        return self._generations.get(line, 0) <= generation

    def set_generation(self, line: str, generation: int) -> None:
        """Record a generation, so that a restart does not go back to old weights.

        Raises:
            ConfigError: if it is too large to be.
            StoreError: if it cannot be recorded; then the old one stays in force.
        """
        ssd = self.owner("bumps the generation").ssd
        if generation > generations.LAST_GENERATION:
            msg = (
                f"the namespace's generation is {generation - 1}, and no later one is recorded than "
                f"{generations.LAST_GENERATION}: name the new weights in its weights field"
            )
            raise ConfigError(msg)
        try:
            generations.record(ssd, {line: generation})
        except MEDIUM_ERRORS as error:
            msg = f"the generation {generation} cannot be recorded in {ssd.path}: {error}"
            raise StoreError(msg) from error
        with self.context.lock:
            self._generations[line] = max(generation, self._generations.get(line, 0))

    def set_quota(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> None:
        """Cap what a namespace holds on SSD, in bytes; nothing in a reader, which stores nothing.

        Raises:
            ConfigError: if no block fits in it. With 0 the namespace stores nothing.
            StoreError: if it cannot be recorded.
        """
        if 0 < quota < self.ssd.block_bytes:
            msg = (
                f"ssd_quota is {quota}, expected at least the {self.ssd.block_bytes} bytes of one block, "
                "or 0 for a namespace that stores nothing"
            )
            raise ConfigError(msg)
        if self.owned is not None:
            self.owned.set_quota(root, namespace, quota)

    # ---- looking up ----------------------------------------------------------------------------

    def lookup(
        self, prefix: Prefix, *, request_id: str | None, need_window: bool, is_probe: bool
    ) -> Match:
        """Find the longest hit of ``prefix``, with a lease unless it is a probe."""
        limit = plan.hit_limit(len(prefix.tokens), self.block_tokens) // self.block_tokens
        path = prefix.path[: limit * KEY_BYTES]
        stored = None if self.is_owner else self._reader_run(path)
        with self.context.lock:
            self._give_up_leases()
            request = None if request_id is None or is_probe else (prefix.root, request_id)
            if request is not None and (known := self._same_request(request, prefix)) is not None:
                return known
            resident = {name: where.depth for name, (_, where) in self._positions(path).items()}
            if stored is not None:
                resident["ssd"] = stored
            hit = max(resident.values(), default=0)
            if need_window and self.layout.window_tokens:
                hit = self._longest_with_window(prefix, hit)
            if is_probe:
                snapshot = self.window.peek(prefix.hashes[hit - 1]) if hit else None
                hold = None
            else:
                hold = self._take_hold(prefix, hit)
                snapshot = hold.snapshot
                hold.expires, hold.request = self.context.clock() + LEASE_SECONDS, request
                if hold.segments or snapshot is not None or request is not None:
                    self._leases.append(hold)
            hit_tokens = hit * self.block_tokens
            match = Match(
                *(self, prefix, resident, hit_tokens, snapshot, hold, request_id),
                needs_window=need_window and self.layout.window_tokens > 0,
            )
            if not is_probe:
                self._count_lookup(match, has_block=limit > 0)
                if request is not None:
                    self._by_request[request] = match
            return match

    def _same_request(self, request: RequestKey, prefix: Prefix) -> Match | None:
        """Return what a request id was given before; forget it if it was for other tokens."""
        known = self._by_request.get(request)
        if known is None:
            return None
        if known.prefix.path == prefix.path and np.array_equal(known.tokens, prefix.tokens):
            return known
        self.forget_request(request)
        return None

    def _reader_run(self, path: bytes) -> int:
        try:
            return self.ssd.leading_run(path, self.context.wall_clock())
        except MEDIUM_ERRORS as error:
            self.note_failed_look(error)
            return 0

    def _longest_with_window(self, prefix: Prefix, hit: int) -> int:
        return next((n for n in range(hit, 0, -1) if self.window.peek(prefix.hashes[n - 1])), 0)

    def _positions(self, path: bytes) -> dict[str, tuple[PrefixIndex, Position]]:
        """Match a path in every index, nearest tier first."""
        parts = {"device": self.pages, "ssd": self.owned}
        now = self.context.wall_clock()
        return {
            name: (part.index, part.index.match(path, now))
            for name, part in parts.items()
            if part is not None
        }

    def _count_lookup(self, match: Match, *, has_block: bool) -> None:
        metrics = self.metrics
        metrics.lookups += 1
        metrics.query_tokens += len(match.tokens)
        for step in plan.loads(match.hit_tokens // self.block_tokens, match.resident_blocks):
            metrics.hit_tokens[step.tier] += (step.stop - step.start) * self.block_tokens
        if has_block:
            metrics.window_hits += match.window_hit
            metrics.block_lookups_without_hit += not match.hit_tokens
        metrics.check_alarms()

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

    def observe_prefill(self, tokens: float, seconds: float) -> None:
        """Take in a measurement of the engine's own speed."""
        with self.context.lock:
            self.metrics.prefill_tokens += tokens
            self.metrics.prefill_seconds += seconds

    # ---- leases and pins -----------------------------------------------------------------------

    def _take_hold(self, prefix: Prefix, blocks: int) -> Hold:
        """Pin the first ``blocks`` blocks in every tier, and their window; make them recent."""
        hold = Hold()
        tick = self.context.next_sequence()
        for index, position in self._positions(prefix.path[: blocks * KEY_BYTES]).values():
            if position.depth:
                segment = index.settle(position)
                index.pin(segment)
                index.touch(segment, tick)
                hold.segments.append((index, segment))
                if self.owned is not None and index is self.owned.index:
                    self.owned.note_use(prefix.key(position.depth - 1), tick)
        if blocks:
            hold.snapshot = self.window.pin(prefix.hashes[blocks - 1])
        return hold

    def enter(self, match: Match) -> None:
        """Turn a match's lease into a pin; an expired one is taken anew, perhaps shorter."""
        self.guard()
        blocks = match.hit_tokens // self.block_tokens
        with self.context.lock:
            match.entered += 1
            if match.hold is not None and not match.hold.is_released:
                match.hold.expires = NEVER
                return
            match.hold = self._take_hold(match.prefix, blocks)
            match.hold.expires = NEVER
            match.snapshot = match.hold.snapshot
            left = self._positions(match.prefix.path[: blocks * KEY_BYTES])
            hit = blocks
            if self.is_owner:
                hit = max((position.depth for _, position in left.values()), default=0)
            if match.needs_window:
                hit = self._longest_with_window(match.prefix, hit)
            match.shrink(hit * self.block_tokens)

    def leave(self, match: Match) -> None:
        """Drop a match's pin, if it is left as often as it was entered."""
        match.entered = max(0, match.entered - 1)
        if match.hold is not None and not match.entered:
            self.release(match.hold)
            if match.hold.request is not None:
                self._forget(match.hold.request, match.hold)

    def _forget(self, request: RequestKey, hold: Hold) -> None:
        """Drop what a request id stands for, unless by now that is something else."""
        with self.context.lock:
            known = self._by_request.get(request)
            if known is not None and known.hold is hold:
                del self._by_request[request]

    def forget_request(self, request: RequestKey) -> None:
        """Drop what a request id stands for. Unknown ids are ignored."""
        with self.context.lock:
            match = self._by_request.pop(request, None)
            if match is not None and match.hold is not None and match.hold.expires != NEVER:
                self.release(match.hold)

    def release(self, hold: Hold) -> None:
        """Give back every pin of a hold. Idempotent."""
        with self.context.lock:
            if hold.is_released:
                return
            hold.is_released = True
            for index, segment in hold.segments:
                index.unpin(segment)
            if hold.snapshot is not None:
                self.window.unpin(hold.snapshot)
            if hold.private_pages:
                self._device_pages().tier.free(hold.private_pages)

    @override
    def _give_up_leases(self) -> None:
        """Give up leases whose time is over; one that became a pin is its match's to release."""
        now = self.context.clock()
        while self._leases:
            hold = self._leases[0]
            if not hold.is_released and now < hold.expires != NEVER:
                return
            self._leases.popleft()
            if not hold.is_released and hold.expires != NEVER:
                self.metrics.expired_leases += bool(hold.segments or hold.snapshot)
                self.release(hold)
                if hold.request is not None:
                    self._forget(hold.request, hold)

    # ---- storing and reading -------------------------------------------------------------------

    def store(
        self,
        prefix: Prefix,
        namespace: Mapping[str, Any],
        entries: Mapping[str, NDArray[np.uint8]],
        start: int,
        *,
        wait: float,
        ttl: float | None,
        is_pinned: bool,
    ) -> Stored:
        """Queue the blocks of ``[start, ...)`` that are not known yet; a counted no-op in a reader."""
        if self.owned is None:
            count = len(prefix.hashes) - start // self.block_tokens
            self.context.count_drop("reader", count)
            return Stored(start, 0, count)
        first = start // self.block_tokens
        source = cache(lambda: self.format.entries_source(entries))  # not for blocks that are known

        def encode(header: Header) -> bytearray:
            ids = prefix.block_ids(header.number)
            return self.format.encode(header, ids, source(), header.number - first)

        taken = self.owned.store(
            prefix, namespace, encode, first, wait=wait, ttl=ttl, is_pinned=is_pinned
        )
        return Stored(taken.end * self.block_tokens, taken.present, taken.dropped)

    def known_blocks(self, prefix: Prefix) -> int:
        """Return how many leading blocks are stored or queued; none in a reader, which stores none."""
        if self.owned is None:
            return 0
        with self.context.lock:
            return self.owned.known_blocks(prefix)

    def read(self, match: Match, timeout: float | None = None) -> Entries:
        """Copy a match's entries to host arrays, verified; a bad block shortens the result."""
        hit = match.hit_tokens // self.block_tokens
        entries = self.format.empty(hit)
        limits = Limits.within(timeout)
        begun = self.begin_read(match.prefix, match.resident_blocks, 0, hit, entries, limits=limits)
        done = begun()
        if done < hit:
            match.shrink(done * self.block_tokens)
            done = min(done, match.hit_tokens // self.block_tokens)  # less if a window is needed
            for name, array in entries.items():
                entries[name] = array[:, : done * self.format.entries[name]]
        return Entries(entries, done * self.block_tokens)

    def begin_read(
        self,
        prefix: Prefix,
        resident: Mapping[str, int],
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        *,
        wave: Wave | None = None,
        limits: Limits | None = None,
    ) -> Callable[[], int]:
        """Begin to copy verified blocks ``[first, stop)`` to host entries that start at ``first``.

        Returns what waits for its end and returns the block where that was. With a ``wave`` the
        entries are those of its layers.
        """
        nearest = {"ssd": resident.get("ssd", 0)}  # to the host, not to the device
        steps = [step for step in plan.loads(stop, nearest | dict(resident)) if step.stop > first]
        target = self.format.entries_target(entries, wave)

        def begin(step: plan.Load) -> Callable[[], int]:
            if step.tier == "device":
                assert self.pages is not None
                start = max(step.start, first)
                return partial(self.pages.read, prefix, start, step.stop, entries, first, wave)
            # The SSD comes first, so what it has of these blocks begins where they do.
            reading = self._reads.into(prefix, first, step.stop, target, wave=wave, limits=limits)
            return partial(self._reads.finish, reading)

        begun = [begin(step) for step in steps[:1]]  # nearly always all there is

        def finish() -> int:
            done = first
            for number, step in enumerate(steps):
                wait = begun[0] if number == 0 else begin(step)
                done = wait()
                if done < step.stop:
                    break
            return done

        return finish

    def _discard(self, prefix: Prefix, number: int, fault: str) -> None:
        """Count a bad block and, as the owner, remove it and all that hangs on it."""
        if fault == BUSY:
            self.context.count_passing(self.ssd.path)
            return
        with self.context.lock:
            self.metrics.corrupt_blocks[fault] += 1
            message = (
                "block %d of a prefix in %s is unusable (%s): recomputed and counted from here on"
            )
            self.metrics.say_once(f"corrupt {fault}", message, number, self.ssd.path, fault)
        if self.owned is not None:
            self.owned.discard(prefix.path[: (number + 1) * KEY_BYTES])

    @property
    def device(self) -> DeviceTier:
        """The device tier, made on first use: it costs its whole capacity and imports torch."""
        return self._device_pages().tier

    def _device_pages(self) -> DevicePages:
        if self.pages is None:
            with self._making_pages:  # not the lock: importing torch takes seconds
                if self.pages is None:
                    tier = self._open_device()
                    if tier.capacity_bytes and not tier.page_count:
                        self.metrics.say_once(
                            "device",
                            "device_bytes is %d, less than the %d of one page: nothing can be loaded",
                            *(tier.capacity_bytes, tier.page_bytes),
                        )
                    self.pages = DevicePages(self.context, tier)
        return self.pages

    def hold_blocks(self, match: Match) -> Hold:
        """Pin what a match found, apart from its own lease or pin."""
        with self.context.lock:
            hold = self._take_hold(match.prefix, match.hit_tokens // self.block_tokens)
            hold.expires = NEVER
            return hold

    def allocate(self, count: int) -> PinnedPages:
        """Take private device pages."""
        pages = self._device_pages()
        hold = pages.allocate(count)
        return PinnedPages(
            self,
            hold,
            page_ids=pages.tier.page_table(hold.private_pages),
            tokens=count * self.block_tokens,
            tensors=pages.tier.tensors,
        )

    def publish(self, prefix: Prefix, start: int, pages: PinnedPages) -> int:
        """Share private pages that hold tokens ``[start, ...)``; return up to which token."""
        count = len(prefix.hashes) - start // self.block_tokens
        ids: list[int] = pages.page_ids[:count].tolist()
        end = self._device_pages().publish(prefix, start // self.block_tokens, ids, pages.hold)
        return end * self.block_tokens

    def load(self, match: Match, timeout: float | None = None) -> PinnedPages:
        """Promote a match into device pages; what does not fit or is bad shortens the result."""
        pages = self._device_pages()
        hit = match.hit_tokens // self.block_tokens
        limits = Limits.within(timeout, may_leave=False)  # pages are another's soon

        def fetch(prefix: Prefix, first: int, stop: int, take: Take) -> int:
            return self._reads.finish(self._reads.each(prefix, first, stop, take, limits=limits))

        table, hold = pages.load(match.prefix, hit, fetch, self._expiry)
        match.shrink(len(table) * self.block_tokens)
        tokens = min(len(table) * self.block_tokens, match.hit_tokens)  # less if a window is needed
        table = table[: tokens // self.block_tokens]
        match.pages = PinnedPages(
            self,
            hold,
            page_ids=pages.tier.page_table(table),
            tokens=tokens,
            tensors=pages.tier.tensors,
        )
        return match.pages

    def _expiry(self, prefix: Prefix, blocks: int) -> float:
        """Return until when the medium keeps a prefix that was just read; the past if it is gone."""
        if self.owned is not None:
            position = self.owned.index.match(prefix.path[: blocks * KEY_BYTES])
            return position.segment.expires if position.depth == blocks else GONE
        try:
            record = self.ssd.record(prefix.key(blocks - 1))
        except MEDIUM_ERRORS:
            record = None
        return GONE if record is None else record.expires or NEVER

    # ---- windows -------------------------------------------------------------------------------

    def put_window(self, prefix: Prefix, snapshot: WindowSnapshot, *, is_replayed: bool) -> bool:
        """Keep a window in the pool; a replayed one never replaces one that is there."""
        with self.context.lock:
            key = prefix.hash_at(snapshot.stop)
            return self.window.put(key, snapshot, owner=prefix.root, is_replayed=is_replayed)

    def pooled_windows(self) -> frozenset[BlockHash]:
        """Return the hash of every prefix whose window the pool holds."""
        with self.context.lock:
            return self.window.keys()

    def count_replay(self, tokens: int) -> None:
        """Count a hit whose window an engine rebuilds."""
        with self.context.lock:
            self.metrics.replay_requests += 1
            self.metrics.replayed_tokens += tokens

    def window_at(self, match: Match) -> WindowSnapshot | None:
        """Return the pooled window of a match whose hit became shorter, pinned like the old one."""
        with self.context.lock:
            hold = match.hold
            if hold is None or hold.is_released:
                return None
            if hold.snapshot is not None:
                self.window.unpin(hold.snapshot)
                hold.snapshot = None
            if match.needs_window:
                hit = match.hit_tokens // self.block_tokens
                match.hit_tokens = self._longest_with_window(match.prefix, hit) * self.block_tokens
            if match.hit_tokens:
                hold.snapshot = self.window.pin(match.prefix.hash_at(match.hit_tokens))
            return hold.snapshot

    # ---- maintenance ---------------------------------------------------------------------------

    def clear(self, root: BlockHash) -> int:
        """Remove every block and window of one namespace; return how many blocks went."""
        count = self.owner("clears").clear(root)
        with self.context.lock:
            self.window.clear(root)
            if self.pages is not None:
                self.pages.clear(root)
        return count

    @override
    def _finish_background(self, *, is_last: bool) -> None:
        """Return when saves begun before have offered their blocks; for good if ``is_last``."""
        if is_last:
            self.jobs.close()
            self._reads.close()
        else:
            self.jobs.drain()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        with self.context.lock:
            self._give_up_leases()
        try:
            tiers = {"ssd": self._ssd_stats()}
            named = namespace_facts(self.ssd) if self.owned is None else {}
        except MEDIUM_ERRORS as error:
            msg = f"the store at {self.ssd.path} cannot be read: {error}"
            raise StoreError(msg) from error
        with self.context.lock:
            if self.pages is not None:
                tiers["device"] = self._page_stats(self.pages)
            return {
                "path": str(self.ssd.path),
                "role": "owner" if self.is_owner else "reader",
                "layout": self.layout.model,
                "block_tokens": self.block_tokens,
                "bytes_per_token": float(self.layout.bytes_per_token),
                "tiers": tiers,
                "window": self.window.stats(),
                "scrub": self._scrub_stats(),
                "index": {"segments": self.owned.index.segments if self.owned is not None else 0},
                "namespaces": [
                    {"id": number, "quota": None, **entry}
                    for number, entry in sorted(named.items())
                ]
                if self.owned is None
                else self.owned.namespace_counts(),
                "counters": self.metrics.as_dict(),
                "alarms": [*self.metrics.alarms, *self._alarms(tiers["ssd"])],
            }

    def _ssd_stats(self) -> dict[str, Any]:
        sizes = self._ssd_sizes()
        tokens, live = sizes["blocks"] * self.block_tokens, sizes["live_bytes"]
        return {**sizes, "tokens": tokens, "bytes_per_token": live / tokens if tokens else None}

    def _page_stats(self, pages: DevicePages) -> dict[str, Any]:
        used = pages.tier.page_count - pages.tier.free_pages
        return {
            "blocks": used,
            "tokens": used * self.block_tokens,
            "live_bytes": used * pages.tier.page_bytes,
            "capacity_bytes": pages.tier.page_count * pages.tier.page_bytes,
        }
