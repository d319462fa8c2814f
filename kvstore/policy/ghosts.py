"""Ghosts: records of evicted blocks, kept by policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from kvstore.policy.protocol import Evictable


class Ghosts:
    """Recent evictions: the key of the first block of each, where a chain that returns resumes, and the block count."""

    __slots__ = ("_cuts", "blocks")

    def __init__(self) -> None:
        # Not a plain dict, whose first item is found in O(removed items).
        self._cuts: OrderedDict[Hashable, int] = OrderedDict()
        self.blocks = 0  # number of blocks recorded

    def add(self, segment: Evictable, blocks: int) -> None:
        """Record the eviction of the last ``blocks`` blocks of a segment, before it happens."""
        key = segment.key(segment.stop - blocks)
        self.blocks += blocks - self._cuts.pop(key, 0)
        self._cuts[key] = blocks

    def shrink(self, limit: float) -> None:
        """Remove the oldest records until at most ``limit`` blocks are left."""
        while self.blocks > limit and self._cuts:
            self.blocks -= self._cuts.popitem(last=False)[1]

    def take(self, segment: Evictable) -> bool:
        """Return whether a new segment resumes a recorded eviction, and remove the record."""
        if not self._cuts:
            return False
        blocks = self._cuts.pop(segment.key(segment.start), 0)
        self.blocks -= blocks
        return blocks > 0
