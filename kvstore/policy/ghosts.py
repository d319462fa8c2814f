"""What policies remember of blocks that were evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from kvstore.policy.protocol import Evictable


class Ghosts:
    """What was evicted lately: where paths were cut, and how many blocks went there.

    A path that comes back resumes exactly where it was cut, so the first block of what went is all
    that has to be remembered of it.
    """

    __slots__ = ("_cuts", "blocks")

    def __init__(self) -> None:
        # A plain dict would walk over all that it forgot to find its oldest.
        self._cuts: OrderedDict[Hashable, int] = OrderedDict()
        self.blocks = 0
        """How many blocks are remembered."""

    def add(self, segment: Evictable, blocks: int) -> None:
        """Remember the last ``blocks`` blocks of a segment, which are about to go."""
        key = segment.key(segment.stop - blocks)
        self.blocks += blocks - self._cuts.pop(key, 0)
        self._cuts[key] = blocks

    def shrink(self, limit: float) -> None:
        """Forget the oldest beyond ``limit`` blocks."""
        while self.blocks > limit and self._cuts:
            self.blocks -= self._cuts.popitem(last=False)[1]

    def take(self, segment: Evictable) -> bool:
        """Say whether a new segment resumes what is remembered, and forget that."""
        if not self._cuts:
            return False
        blocks = self._cuts.pop(segment.key(segment.start), 0)
        self.blocks -= blocks
        return blocks > 0
