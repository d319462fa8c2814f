"""Evictable segments in the order of a rank.

A heap whose entries are never updated in place: one that has become stale is dropped, or put back
where it belongs, when it surfaces. So a use costs nothing and an eviction O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Generic

from kvstore.policy.protocol import S

FEW = 64
"""Entries below which the heap is not worth cleaning."""


class Leaves(Generic[S]):
    """Segments by rank, the lowest first and the deeper tail first among equals.

    ``rank`` returns None of a segment that belongs elsewhere now. It may grow at any time; where it
    falls, or a segment becomes evictable, or comes from elsewhere, the segment is pushed again.
    """

    __slots__ = ("_allowed", "_heap", "_order", "_rank")

    def __init__(self, rank: Callable[[S], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, S]] = []
        self._order = count()  # breaks ties, so that segments themselves are never compared
        self._allowed = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, segment: S) -> None:
        """Add a segment, or the rank that it has now."""
        heap = self._heap
        entry = (self._rank(segment), -segment.stop, next(self._order), segment)
        heapq.heappush(heap, entry)
        if len(heap) > self._allowed:
            self._clean()

    def _clean(self) -> None:
        """Keep one entry of each segment that may go, with its rank of now."""
        segments = {id(entry[3]): entry[3] for entry in self._heap}.values()
        self._heap = [
            (rank, -segment.stop, next(self._order), segment)
            for segment in segments
            if segment.is_evictable and (rank := self._rank(segment)) is not None
        ]
        heapq.heapify(self._heap)
        self._allowed = FEW + 4 * len(self._heap)

    def first(self) -> S | None:
        """Return the segment with the lowest rank that may go, None if there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            segment = entry[3]
            if segment.is_evictable and (rank := self._rank(segment)) is not None:
                depth = -segment.stop
                if rank == entry[0] and depth == entry[1]:
                    return segment
                heapq.heapreplace(heap, (rank, depth, next(self._order), segment))
            else:
                heapq.heappop(heap)
        return None
