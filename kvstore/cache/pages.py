"""Device pages as a cache: which prefixes are in them, who uses them, what goes when they are full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.block import KEY_BYTES, BlockKey
from kvstore.cache.context import Context
from kvstore.cache.match import Hold, Prefix
from kvstore.index import NEVER, PrefixIndex, Segment
from kvstore.policy.lru import Lru

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

Fetch = Callable[[Prefix, int, int, Callable[[int, memoryview], None]], int]
"""Read blocks ``[start, stop)`` of a prefix, verified, handing each to a taker; return where that
ended."""


class DevicePages:
    """The prefixes in one device tier.

    Invariants:
        Every indexed block has one page; a page is free or holds one indexed block.

    Threads: any; copies run without the lock, into pages that nobody else can see yet.
    """

    def __init__(self, context: Context, tier: DeviceTier) -> None:
        self.tier = tier
        self.index = PrefixIndex(Lru[Segment]())
        self._context = context
        self._page_of: dict[BlockKey, int] = {}

    def load(self, prefix: Prefix, hit: int, fetch: Fetch) -> tuple[list[int], Hold]:
        """Bring the first ``hit`` blocks into pages; return the pages that could be filled.

        What is in pages already is shared; the rest is fetched into fresh pages. The returned hold
        pins them all.
        """
        hold = Hold(expires=NEVER)
        with self._context.lock:
            position = self.index.match(prefix.path[: hit * KEY_BYTES])
            have = position.depth
            if have:
                segment = self.index.settle(position)
                self.index.pin(segment)
                hold.segments.append((self.index, segment))
            fresh = self._take_pages(hit - have)
        stop = have
        if fresh:
            take = lambda i, frame: self.tier.write(fresh[i], frame)  # noqa: E731
            stop = fetch(prefix, have, have + len(fresh), take)
        with self._context.lock:
            self.tier.free(fresh[stop - have :])
            self._adopt(prefix, have, fresh[: stop - have], hold)
            return [self._page_of[prefix.key(number)] for number in range(stop)], hold

    def _take_pages(self, count: int) -> list[int]:
        """Allocate up to ``count`` pages, evicting what nobody pins."""
        short = count - self.tier.free_pages
        if short > 0:
            self._evict(short)
        return self.tier.allocate(min(count, self.tier.free_pages))

    def _evict(self, blocks: int) -> None:
        keys = self.index.evict(blocks)
        self._context.metrics.evicted_blocks["device"] += len(keys)
        self.tier.free([self._page_of.pop(key) for key in keys])

    def _adopt(self, prefix: Prefix, first: int, pages: list[int], hold: Hold) -> None:
        """Publish filled pages; where another thread was faster, its pages stay."""
        stop = first + len(pages)
        present = self.index.match(prefix.path[: stop * KEY_BYTES])
        known = max(first, present.depth)
        self.tier.free(pages[: known - first])
        segment = self.index.settle(present)
        if known < stop:
            keys = [prefix.key(number) for number in range(known, stop)]
            self._page_of.update(zip(keys, pages[known - first :], strict=True))
            tick = self._context.next_sequence()
            segment = self.index.insert(segment, b"".join(keys), now=tick, namespace_id=0)
        if stop:
            self.index.pin(segment)
            hold.segments.append((self.index, segment))

    def read(
        self, prefix: Prefix, first: int, stop: int, entries: Mapping[str, NDArray[np.uint8]]
    ) -> int:
        """Copy blocks ``[first, stop)`` to host entries; return where that ended."""
        for number in range(first, stop):
            page = self._page_of.get(prefix.key(number))
            if page is None:
                return number
            self.tier.read(page, entries, number)
        return stop

    def clear(self) -> None:
        """Forget every page that nobody pins."""
        self._evict(self.index.blocks)
