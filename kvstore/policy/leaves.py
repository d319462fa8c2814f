"""Evictable segments in the order of a rank.

A heap whose entries are never updated in place: one that has become stale is dropped, or put back
where it belongs, when it surfaces. So a use costs nothing and an eviction O(log n).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic

from kvstore.policy.protocol import S

FEW = 64
"""Entries below which the heap is not worth cleaning."""


class Leaves(Generic[S]):
    """Segments by rank, the lowest first, and what was pushed first among equals.

    ``rank`` returns None of a segment that belongs elsewhere now. It may grow at any time; where it
    falls, or a segment becomes evictable, or comes from elsewhere, the segment is pushed again.
    """

    __slots__ = ("_allowed", "_heap", "_next", "_rank")

    def __init__(self, rank: Callable[[S], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, S]] = []
        self._next = count().__next__  # breaks ties, so that segments themselves are never compared
        self._allowed = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, segment: S) -> None:
        """Add a segment, or the rank that it has now."""
        heap = self._heap
        heappush(heap, (self._rank(segment), self._next(), segment))
        if len(heap) > self._allowed:
            self._clean()

    def _clean(self) -> None:
        """Keep one entry of each segment that may go, with its rank of now."""
        segments = {id(entry[2]): entry[2] for entry in self._heap}.values()
        self._heap = [
            (rank, self._next(), segment)
            for segment in segments
            if segment.is_evictable and (rank := self._rank(segment)) is not None
        ]
        heapify(self._heap)
        self._allowed = FEW + 4 * len(self._heap)

    def first(self) -> S | None:
        """Return the segment with the lowest rank that may go, None if there is none."""
        heap = self._heap
        while heap:
            known, _, segment = heap[0]
            if segment.is_evictable:
                rank = self._rank(segment)
                if rank == known:
                    return segment
                if rank is not None:
                    heapreplace(heap, (rank, self._next(), segment))
                    continue
            heappop(heap)
        return None
