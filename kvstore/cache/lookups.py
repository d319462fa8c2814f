"""Lookups of one open store: matches of request prefixes, and the life cycle of their pins."""

from __future__ import annotations

import numpy as np

from kvstore.cache.leases import Leases
from kvstore.cache.match import Match, PinSet, RequestKey
from kvstore.frame.format import Frames
from kvstore.identity.chain import Prefix
from kvstore.index import plan
from kvstore.index.prefix_tree import NEVER
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.window import WindowPool

UNMEASURED_READ_BYTES_PER_SECOND = 0.3e9
"""Read speed assumed before the first read: cold blocks of 57 KB, hinted. docs/decisions/0009."""


class Lookups:
    """Finds matches, keeps them by request id, and turns leases into pins. Threads: any, under the store's lock."""

    def __init__(
        self, store: OpenStore, frame_format: Frames, leases: Leases, window: WindowPool
    ) -> None:
        self._store = store
        self._context = store.context
        self._leases = leases
        self._window = window
        self._frame_bytes = frame_format.frame_bytes
        self._block_tokens = frame_format.block_tokens
        self.window_tokens = frame_format.layout.window_tokens
        self._by_request: dict[RequestKey, Match] = {}

    def find(
        self, prefix: Prefix, *, request_id: str | None, need_window: bool, is_probe: bool
    ) -> Match:
        """Return the longest hit of ``prefix``, leased unless it is a probe."""
        size = self._block_tokens
        limit = plan.hit_limit(len(prefix.tokens), size) // size
        chain = prefix.head(limit)
        in_reader = None if self._store.is_owner else self._stored_blocks(chain)
        needs_window = need_window and self.window_tokens > 0
        with self._context.lock:
            self.expire()
            request = None if request_id is None or is_probe else (prefix.root, request_id)
            if request is not None and (known := self._known(request, prefix)) is not None:
                return known
            resident = {tier: at.depth for tier, (_, at) in self._leases.positions(chain).items()}
            if in_reader is not None:
                resident["ssd"] = in_reader
            stored = max(resident.values(), default=0)
            hit_tokens = self._hit_tokens(prefix, stored, needs_window=needs_window)
            hit = hit_tokens // size
            pins = None if is_probe else self._leases.lend(prefix, hit, request)
            if pins is not None:
                snapshot = pins.snapshot
            else:
                snapshot = self._window.peek(prefix.hashes[hit - 1]) if hit else None
            match = Match(
                *(self, prefix, resident, hit_tokens, snapshot, pins, request_id),
                needs_window=needs_window,
            )
            if not is_probe:
                self._count(match, has_block=limit > 0)
            if request is not None:
                self._by_request[request] = match
            return match

    def _stored_blocks(self, chain: bytes) -> int:
        """Return the number of leading blocks on the medium, for a process without an index."""
        try:
            return self._store.ssd.leading_run(chain, self._context.wall_clock())
        except MEDIUM_ERRORS as error:
            self._store.count_failed_lookup(error)
            return 0

    def _hit_tokens(self, prefix: Prefix, blocks: int, *, needs_window: bool) -> int:
        """Return the hit in tokens if ``blocks`` leading blocks are stored."""
        if needs_window:
            blocks = self._window.longest(prefix.hashes, blocks)
        return blocks * self._block_tokens

    def _known(self, request: RequestKey, prefix: Prefix) -> Match | None:
        """Return the match of a request id; remove it if it was of other tokens."""
        known = self._by_request.get(request)
        if known is None:
            return None
        if known.prefix.chain == prefix.chain and np.array_equal(known.tokens, prefix.tokens):
            return known
        self.forget(request)
        return None

    def _count(self, match: Match, *, has_block: bool) -> None:
        metrics = self._context.metrics
        metrics.lookups += 1
        metrics.query_tokens += len(match.tokens)
        for step in plan.loads(match.hit_tokens // self._block_tokens, match.resident_blocks):
            metrics.hit_tokens[step.tier] += (step.stop - step.start) * self._block_tokens
        if has_block:
            metrics.window_hits += match.window_hit
            metrics.block_lookups_without_hit += not match.hit_tokens
        metrics.check_alarms()

    # ---- life cycle of a match ---------------------------------------------------------------------

    def enter(self, match: Match) -> None:
        """Turn a match's lease into a pin. An expired lease is renewed, perhaps for fewer blocks."""
        self._store.check_open()
        blocks = match.hit_tokens // self._block_tokens
        with self._context.lock:
            match.entered += 1
            if match.pins is not None and not match.pins.is_released:
                match.pins.expires = NEVER
                return
            match.pins = self._leases.pin(match.prefix, blocks)
            match.snapshot = match.pins.snapshot
            if self._store.is_owner:  # a reader has no index of the SSD tier
                left = self._leases.positions(match.prefix.head(blocks)).values()
                blocks = max((at.depth for _, at in left), default=0)
            match.shrink(self._hit_tokens(match.prefix, blocks, needs_window=match.needs_window))

    def leave(self, match: Match) -> None:
        """Drop a match's pin at its last exit."""
        match.entered = max(0, match.entered - 1)
        if match.pins is not None and not match.entered:
            self._leases.release(match.pins)
            self._forget_pins(match.pins)

    def shrink(self, match: Match, hit_tokens: int) -> None:
        """Shorten a hit, and pin the pooled window of the shorter hit instead."""
        with self._context.lock:
            match.hit_tokens, match.snapshot, pins = hit_tokens, None, match.pins
            if pins is None or pins.is_released:
                return
            if pins.snapshot is not None:
                self._window.unpin(pins.snapshot)
                pins.snapshot = None
            match.hit_tokens = self._hit_tokens(
                match.prefix, hit_tokens // self._block_tokens, needs_window=match.needs_window
            )
            if match.hit_tokens:
                pins.snapshot = self._window.pin(match.prefix.hash_at(match.hit_tokens))
            match.snapshot = pins.snapshot

    def expire(self) -> None:
        """Release expired leases and remove their request ids."""
        for pins in self._leases.expire():
            self._forget_pins(pins)

    def _forget_pins(self, pins: PinSet) -> None:
        """Remove the request id of a pin set, unless it identifies another match by now."""
        if pins.request is None:
            return
        with self._context.lock:
            known = self._by_request.get(pins.request)
            if known is not None and known.pins is pins:
                del self._by_request[pins.request]

    def forget(self, request: RequestKey) -> None:
        """Remove a request id and release its lease. Unknown ids are ignored."""
        with self._context.lock:
            match = self._by_request.pop(request, None)
            if match is not None and match.pins is not None and match.pins.expires != NEVER:
                self._leases.release(match.pins)

    # ---- load or compute -----------------------------------------------------------------------

    def is_worth_loading(self, match: Match) -> bool:
        """Compare the time to load a match with the time to compute it, by measured speeds."""
        metrics = self._context.metrics
        speed = UNMEASURED_READ_BYTES_PER_SECOND
        if metrics.read_seconds:
            speed = metrics.read_bytes / metrics.read_seconds
        per_token = 0.0
        if metrics.prefill_tokens:
            per_token = metrics.prefill_seconds / metrics.prefill_tokens
        size = match.hit_tokens // self._block_tokens * self._frame_bytes
        return plan.worth_loading(
            *(match.hit_tokens, match.floors, self.window_tokens, size / speed, per_token)
        )

    def observe_prefill(self, tokens: float, seconds: float) -> None:
        """Add a measurement of the engine's prefill speed."""
        with self._context.lock:
            self._context.metrics.prefill_tokens += tokens
            self._context.metrics.prefill_seconds += seconds
