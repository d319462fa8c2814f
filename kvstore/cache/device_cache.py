"""The device tier as a cache: an index of the prefixes in its pages, with pins and LRU eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.match import Match, PagePins, PinnedPages
from kvstore.cache.ssd_reads import Limits, SsdReads
from kvstore.errors import CapacityError, brief
from kvstore.frame.format import Frames
from kvstore.frame.geometry import PartBatch
from kvstore.identity.block import BlockHash, BlockKey
from kvstore.identity.chain import Prefix
from kvstore.index.prefix_tree import GONE, NEVER, PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.context import Context

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier


class DeviceCache:
    """The prefixes in one device tier, which is created on first use.

    Every indexed block has one page. A page is free, private, or contains one indexed block.

    Threads: any. Copies run without the lock, into pages that no lookup finds yet.
    """

    def __init__(
        self,
        context: Context,
        frame_format: Frames,
        reads: SsdReads,
        open_tier: Callable[[], DeviceTier],
    ) -> None:
        self.index = PrefixIndex(Lru[Segment]())
        self._context = context
        self._block_tokens = frame_format.block_tokens
        self._reads = reads
        self._open_tier = open_tier
        self._opening = threading.Lock()
        self._tier: DeviceTier | None = None
        self._page_of: dict[BlockKey, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether the tier was created."""
        return self._tier is not None

    @property
    def tier(self) -> DeviceTier:
        """The tier. The first use allocates its whole capacity and imports torch."""
        if self._tier is None:
            with self._opening:  # not the store's lock: importing torch takes seconds
                if self._tier is None:
                    tier = self._open_tier()
                    if tier.capacity_bytes and not tier.page_count:
                        self._context.metrics.warn_once(
                            "device",
                            "device_bytes is %d, less than the %d of one page: nothing can be loaded",
                            *(tier.capacity_bytes, tier.page_bytes),
                        )
                    self._tier = tier
        return self._tier

    def load(self, match: Match, timeout: float | None) -> PinnedPages:
        """Copy a match's blocks to pages; a lack of pages or a bad block shortens the result."""
        size = self._block_tokens
        limits = Limits.within(timeout, may_leave=False)  # the pages may soon be another prefix's
        pages, pins = self._fill(match.prefix, match.hit_tokens // size, limits)
        match.shrink(len(pages) * size)
        tokens = min(len(pages) * size, match.hit_tokens)  # less if a window is needed
        match.pages = self._pinned(pages[: tokens // size], pins, tokens)
        return match.pages

    def _pinned(self, pages: list[int], pins: PagePins, tokens: int) -> PinnedPages:
        ids, tensors = self.tier.page_table(pages), self.tier.tensors
        return PinnedPages(self, pins, page_ids=ids, tokens=tokens, tensors=tensors)

    def _fill(self, prefix: Prefix, hit: int, limits: Limits) -> tuple[list[int], PagePins]:
        """Pin the pages of the first ``hit`` blocks; read the missing ones into new pages."""
        tier, pins = self.tier, PagePins()
        fresh: list[int] = []
        stop = have = 0
        try:
            with self._context.lock:
                have = self._pin(prefix, hit, pins)
                fresh = self._take_pages(hit - have)
            stop = have
            if fresh:
                take = lambda n, frame: tier.write(fresh[n - have], frame)  # noqa: E731
                reading = self._reads.each(prefix, have, have + len(fresh), take, limits=limits)
                stop = self._reads.finish(reading)
        except BaseException:
            with self._context.lock:
                tier.free(fresh)
                self.release(pins)
            raise
        expires = self._reads.expiry(prefix, stop) if stop > have else GONE
        with self._context.lock:
            tier.free(fresh[stop - have :])
            self._adopt(prefix, have, fresh[: stop - have], expires)
            self._pin(prefix, stop, pins)
            return [self._page_of[prefix.key(number)] for number in range(stop)], pins

    def _pin(self, prefix: Prefix, blocks: int, pins: PagePins) -> int:
        """Pin the leading blocks of the first ``blocks`` that are in pages; return their number."""
        position = self.index.match(prefix.head(blocks))
        if position.depth:
            segment = self.index.split_at(position)
            self.index.pin(segment)
            pins.segments.append(segment)
        return position.depth

    def release(self, pins: PagePins) -> None:
        """Drop pins and free private pages. Idempotent."""
        with self._context.lock:
            if not pins.is_released:
                pins.is_released = True
                for segment in pins.segments:
                    self.index.unpin(segment)
                if pins.private:
                    self.tier.free(pins.private)

    def _take_pages(self, count: int) -> list[int]:
        """Allocate up to ``count`` pages, evicting unpinned blocks."""
        short = count - self.tier.free_pages
        if short > 0:
            keys = self.index.evict(short, self._context.wall_clock())
            self._context.metrics.evicted_blocks["device"] += len(keys)
            self._free(keys)
        return self.tier.allocate(min(count, self.tier.free_pages))

    def _free(self, keys: list[BlockKey]) -> None:
        self.tier.free([self._page_of.pop(key) for key in keys])

    def _adopt(self, prefix: Prefix, first: int, pages: list[int], expires: float) -> None:
        """Index filled pages; free those of blocks that another thread has indexed meanwhile."""
        stop = first + len(pages)
        present = self.index.match(prefix.head(stop))
        known = max(first, present.depth)
        self.tier.free(pages[: known - first])
        segment = self.index.split_at(present)
        if known < stop:
            keys = prefix.keys(known, stop)
            self._page_of.update(zip(keys, pages[known - first :], strict=True))
            segment = self.index.insert(
                segment,
                b"".join(keys),
                now=self._context.next_tick(),
                namespace_id=_number(prefix.root),
                expires=expires,
            )
        if pages and self.index.expiring:  # a parent lives as long as its children
            self.index.renew(segment, expires)

    def allocate(self, count: int) -> PinnedPages:
        """Allocate ``count`` private pages. Raises ``CapacityError`` if fewer are free or unpinned."""
        tier = self.tier
        with self._context.lock:
            pages = self._take_pages(count)
            if len(pages) < count:
                tier.free(pages)
                raise CapacityError(
                    f"{count} device pages were requested, {len(pages)} of {tier.page_count} are free or "
                    "unpinned; release pages or raise device_bytes"
                )
        return self._pinned(pages, PagePins(private=pages), count * self._block_tokens)

    def publish(self, prefix: Prefix, first: int, pages: PinnedPages) -> int:
        """Index private pages with blocks ``[first, ...)`` of ``prefix``.

        Pages of blocks that are already indexed remain private. Returns the block up to which the tier now contains the
        prefix; 0 if it lacks blocks before ``first``.
        """
        pins = pages.pins
        ids: list[int] = pages.page_ids[: len(prefix.hashes) - first].tolist()
        with self._context.lock:
            if pins.is_released:
                raise ValueError("these pages were released; allocate new ones")
            stop = first + len(ids)
            present = self.index.match(prefix.head(stop)).depth
            if present < first:
                return 0
            shared = [page for page in ids[present - first :] if page in pins.private]
            if len(shared) < len(ids) - (present - first):
                raise ValueError("some of these pages are already published with other blocks")
            pins.private = [page for page in pins.private if page not in shared]
            self._adopt(prefix, stop - len(shared), shared, NEVER)
            self._pin(prefix, stop, pins)
            return stop

    def read(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        offset: int,
        batch: PartBatch | None = None,
    ) -> int:
        """Copy blocks ``[first, stop)`` to host entries that start at block ``offset``; return the end."""
        pins = PagePins()
        with self._context.lock:  # a match that was not entered may have lost its pins
            have = self._pin(prefix, stop, pins)
            pages = [self._page_of[key] for key in prefix.keys(first, have)]
        try:
            for number, page in enumerate(pages, first):
                self.tier.read(page, entries, number - offset, batch)
        finally:
            self.release(pins)
        return max(first, have)

    def clear(self, root: BlockHash) -> None:
        """Evict the pages of one namespace. Pinned ones remain until released, but no lookup finds them."""
        if self.is_open:
            self.index.expire_namespace(_number(root))
            self._free(self.index.evict(0, self._context.wall_clock()))

    def check(self, pages: object) -> None:
        """Raise ``ValueError`` for anything but pages of this tier."""
        if not isinstance(pages, PinnedPages):
            raise ValueError(f"pages must come from load or device.allocate, found {brief(pages)}")
        if pages.device is not self:
            msg = f"the pages are of another store than {self._reads.path}; load the match from this one"
            raise ValueError(msg)

    def stats(self) -> dict[str, Any]:
        """Return sizes as plain JSON values. The caller holds the lock."""
        used = self.tier.page_count - self.tier.free_pages
        return {
            "blocks": used,
            "tokens": used * self._block_tokens,
            "live_bytes": used * self.tier.page_bytes,
            "capacity_bytes": self.tier.page_count * self.tier.page_bytes,
        }


def _number(root: BlockHash) -> int:
    """Return a namespace's number in this index, derived from its root, so that none is stored."""
    return int.from_bytes(root[:8], "big")
