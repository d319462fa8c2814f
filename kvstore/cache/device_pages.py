"""Device pages as a cache: which prefixes are in them, who uses them, what goes when they are full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.match import Hold
from kvstore.errors import CapacityError
from kvstore.frame.geometry import Wave
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.identity.chain import Prefix
from kvstore.index.prefix_tree import GONE, NEVER, PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.context import Context

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

Fetch = Callable[[Prefix, int, int, Callable[[int, memoryview], str | None]], int]
"""Read blocks ``[start, stop)`` of a prefix, verified, handing each with its number to a taker, in any
order; return where that ended."""
Expiry = Callable[[Prefix, int], float]
"""Say until when the medium keeps the first blocks of a prefix."""


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

    def load(
        self, prefix: Prefix, hit: int, fetch: Fetch, expiry: Expiry
    ) -> tuple[list[int], Hold]:
        """Bring the first ``hit`` blocks into pages; return the pages that could be filled.

        What is in pages already is shared; the rest is fetched into fresh pages. The returned hold
        pins them all.
        """
        hold = Hold(expires=NEVER)
        fresh: list[int] = []
        stop = have = 0
        try:
            with self._context.lock:
                have = self._hold(prefix, hit, hold)
                fresh = self._take_pages(hit - have)
            stop = have
            if fresh:
                take = lambda n, frame: self.tier.write(fresh[n - have], frame)  # noqa: E731
                stop = fetch(prefix, have, have + len(fresh), take)
        except BaseException:
            with self._context.lock:
                self.tier.free(fresh)
                self._release(hold)
            raise
        expires = expiry(prefix, stop) if stop > have else GONE
        with self._context.lock:
            self.tier.free(fresh[stop - have :])
            self._adopt(prefix, have, fresh[: stop - have], expires)
            self._hold(prefix, stop, hold)
            return [self._page_of[prefix.key(number)] for number in range(stop)], hold

    def _hold(self, prefix: Prefix, blocks: int, hold: Hold) -> int:
        """Pin what is in pages of the first ``blocks`` blocks; return how many that are."""
        position = self.index.match(prefix.path[: blocks * KEY_BYTES])
        if position.depth:
            segment = self.index.settle(position)
            self.index.pin(segment)
            hold.segments.append((self.index, segment))
        return position.depth

    @staticmethod
    def _release(hold: Hold) -> None:
        for index, segment in hold.segments:
            index.unpin(segment)

    def _take_pages(self, count: int) -> list[int]:
        """Allocate up to ``count`` pages, evicting what nobody pins."""
        short = count - self.tier.free_pages
        if short > 0:
            keys = self.index.evict(short, self._context.wall_clock())
            self._context.metrics.evicted_blocks["device"] += len(keys)
            self._free(keys)
        return self.tier.allocate(min(count, self.tier.free_pages))

    def _free(self, keys: list[BlockKey]) -> None:
        self.tier.free([self._page_of.pop(key) for key in keys])

    def _adopt(self, prefix: Prefix, first: int, pages: list[int], expires: float) -> None:
        """Publish filled pages; where another thread was faster, its pages stay."""
        stop = first + len(pages)
        present = self.index.match(prefix.path[: stop * KEY_BYTES])
        known = max(first, present.depth)
        self.tier.free(pages[: known - first])
        segment = self.index.settle(present)
        if known < stop:
            keys = [prefix.key(number) for number in range(known, stop)]
            self._page_of.update(zip(keys, pages[known - first :], strict=True))
            segment = self.index.insert(
                segment,
                b"".join(keys),
                now=self._context.next_sequence(),
                namespace_id=_number(prefix.root),
                expires=expires,
            )
        if pages and self.index.expiring:  # a parent lives as long as what hangs on it
            self.index.renew(segment, expires)

    def allocate(self, count: int) -> Hold:
        """Take pages that nobody else knows of. Raises ``CapacityError`` if too few can be had."""
        with self._context.lock:
            pages = self._take_pages(count)
            if len(pages) < count:
                self.tier.free(pages)
                msg = (
                    f"{count} device pages asked for, {len(pages)} of {self.tier.page_count} are free or "
                    "unpinned; release pages or raise device_bytes"
                )
                raise CapacityError(msg)
            return Hold(expires=NEVER, private_pages=pages)

    def publish(self, prefix: Prefix, first: int, pages: list[int], hold: Hold) -> int:
        """Let others find private pages that now hold blocks ``[first, ...)`` of ``prefix``.

        Pages of blocks that are in the tier already stay private. Returns the block up to which the
        tier now holds the prefix; 0 if what lies before ``first`` is not in it.
        """
        with self._context.lock:
            if hold.is_released:
                msg = "these pages were released; allocate new ones"
                raise ValueError(msg)
            stop = first + len(pages)
            present = self.index.match(prefix.path[: stop * KEY_BYTES]).depth
            if present < first:
                return 0
            shared = [page for page in pages[present - first :] if page in hold.private_pages]
            if len(shared) < len(pages) - (present - first):
                msg = "some of these pages are published already, and hold other blocks"
                raise ValueError(msg)
            hold.private_pages = [page for page in hold.private_pages if page not in shared]
            self._adopt(prefix, stop - len(shared), shared, NEVER)
            self._hold(prefix, stop, hold)
            return stop

    def read(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        offset: int,
        wave: Wave | None = None,
    ) -> int:
        """Copy blocks ``[first, stop)`` to host entries that start at block ``offset``.

        Returns where that ended.
        """
        hold = Hold(expires=NEVER)
        with self._context.lock:  # a match that was never entered, or was left, holds nothing
            have = self._hold(prefix, stop, hold)
            pages = [self._page_of[prefix.key(number)] for number in range(first, have)]
        try:
            for number, page in enumerate(pages, first):
                self.tier.read(page, entries, number - offset, wave)
        finally:
            with self._context.lock:
                self._release(hold)
        return max(first, have)

    def clear(self, root: BlockHash) -> None:
        """Forget the pages of one namespace; those that are pinned stay, for their pins only."""
        self.index.expire_namespace(_number(root))
        self._free(self.index.evict(0, self._context.wall_clock()))


def _number(root: BlockHash) -> int:
    """Return a number that stands for a namespace in this index, without a list of all there were."""
    return int.from_bytes(root[:8], "big")
