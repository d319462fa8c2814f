"""Leases and pins of one open store, which protect blocks and windows from eviction."""

from __future__ import annotations

from collections import deque

from kvstore.cache.device_cache import DeviceCache
from kvstore.cache.match import PinSet, RequestKey
from kvstore.identity.chain import Prefix
from kvstore.index.prefix_tree import NEVER, Position, PrefixIndex
from kvstore.store.context import Context
from kvstore.store.writer import StoreWriter
from kvstore.tier.window import WindowPool

LEASE_SECONDS = 30.0
"""Time for which a lookup protects its blocks. Mooncake's lease is 5 to 10 s; engines queue requests for longer, and
an expired lease costs a shorter hit, never an error."""


class Leases:
    """Pin sets in the indexes of all tiers and in the window pool.

    A lease is a pin set that expires after ``LEASE_SECONDS``; a pin never expires.

    Threads: any; the store's lock serialises every call.
    """

    def __init__(
        self, context: Context, writer: StoreWriter | None, device: DeviceCache, window: WindowPool
    ) -> None:
        self._context = context
        self._writer = writer
        self._device = device
        self._window = window
        self._lent: deque[PinSet] = deque()

    def positions(self, chain: bytes) -> dict[str, tuple[PrefixIndex, Position]]:
        """Match a chain in the index of every tier, nearest tier first."""
        indexes = {
            "device": self._device.index if self._device.is_open else None,
            "ssd": self._writer.index if self._writer is not None else None,
        }
        now = self._context.wall_clock()
        return {
            tier: (index, index.match(chain, now))
            for tier, index in indexes.items()
            if index is not None
        }

    def pin(self, prefix: Prefix, blocks: int) -> PinSet:
        """Pin the first ``blocks`` blocks in every tier, and their window; mark them as used."""
        pins = PinSet(expires=NEVER)
        with self._context.lock:
            tick = self._context.next_tick()
            for tier, (index, position) in self.positions(prefix.head(blocks)).items():
                if position.depth:
                    segment = index.split_at(position)
                    index.pin(segment)
                    index.touch(segment, tick)
                    pins.segments.append((index, segment))
                    if tier == "ssd" and self._writer is not None:
                        self._writer.note_use(prefix.key(position.depth - 1), tick)
            if blocks:
                pins.snapshot = self._window.pin(prefix.hashes[blocks - 1])
        return pins

    def lend(self, prefix: Prefix, blocks: int, request: RequestKey | None) -> PinSet:
        """Pin as ``pin`` does, until the lease expires. ``request`` identifies the match until then."""
        pins = self.pin(prefix, blocks)
        pins.expires, pins.request = self._context.clock() + LEASE_SECONDS, request
        if pins.segments or pins.snapshot is not None or request is not None:
            self._lent.append(pins)
        return pins

    def release(self, pins: PinSet) -> None:
        """Drop every pin of a set. Idempotent."""
        with self._context.lock:
            if pins.is_released:
                return
            pins.is_released = True
            for index, segment in pins.segments:
                index.unpin(segment)
            if pins.snapshot is not None:
                self._window.unpin(pins.snapshot)

    def expire(self) -> list[PinSet]:
        """Release and return the expired leases. A lease that became a pin is dropped from the queue."""
        expired, now = [], self._context.clock()
        while self._lent:
            pins = self._lent[0]
            if not pins.is_released and now < pins.expires != NEVER:
                break
            self._lent.popleft()
            if not pins.is_released and pins.expires != NEVER:
                self._context.metrics.expired_leases += bool(pins.segments or pins.snapshot)
                self.release(pins)
                expired.append(pins)
        return expired
