"""Leaf-first LRU: the least recently used evictable segment goes, from its tail.

A heap orders segments by last use, the deeper tail first among equals. Entries are never updated in
place: a use pushes a new one, and stale ones are dropped when they surface, so every event costs
O(log n). The heap is rebuilt when stale entries outnumber live ones.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Self

from typing_extensions import override

from kvstore.policy.protocol import Policy, S


class Lru(Policy[S], Generic[S]):
    """Evict what was used least recently."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, S]] = []
        self._order = count()  # breaks ties, so that segments themselves are never compared
        self._live = 0

    @override
    def fresh(self) -> Self:
        return type(self)()

    def _push(self, segment: S) -> None:
        heapq.heappush(self._heap, (segment.last_use, -segment.stop, next(self._order), segment))
        if len(self._heap) > 64 + 4 * self._live:
            fresh = {id(entry[3]): entry for entry in self._heap if self._is_current(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)

    @staticmethod
    def _is_current(entry: tuple[int, int, int, S]) -> bool:
        last_use, depth, _, segment = entry
        is_same = segment.last_use == last_use and segment.stop == -depth
        return is_same and segment.is_live and segment.is_evictable

    @override
    def insert(self, segment: S) -> None:
        self._live += 1
        self._push(segment)

    @override
    def touch(self, segment: S) -> None:
        if segment.is_evictable:
            self._push(segment)

    @override
    def split(self, upper: S, lower: S) -> None:
        self._live += 1

    @override
    def release(self, segment: S) -> None:
        self._push(segment)

    @override
    def remove(self, segment: S) -> None:
        self._live -= 1

    @override
    def victim(self) -> S | None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None
