"""Evictable segments by rank: a heap with stale entries, removed at the top. A use costs O(1), an eviction O(log n)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.protocol import Policy, S

FEW = 64  # fewest entries at which the heap is cleaned


class Leaves(Generic[S]):
    """Segments by rank, lowest first; among equals, the first pushed.

    ``rank`` returns None for a segment that was moved to other leaves. A rank may increase at any time. Push a segment
    again if its rank decreases, it becomes evictable, or it is moved here.
    """

    __slots__ = ("_allowed", "_heap", "_next", "_rank")

    def __init__(self, rank: Callable[[S], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, S]] = []
        self._next = count().__next__  # breaks ties: segments cannot be compared
        self._allowed = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, segment: S) -> None:
        """Add a segment with its current rank."""
        heap = self._heap
        heappush(heap, (self._rank(segment), self._next(), segment))
        if len(heap) > self._allowed:
            self._clean()

    def _clean(self) -> None:
        """Keep one entry per evictable segment, with its current rank."""
        segments = {id(entry[2]): entry[2] for entry in self._heap}.values()
        self._heap = [
            (rank, self._next(), segment)
            for segment in segments
            if segment.is_evictable and (rank := self._rank(segment)) is not None
        ]
        heapify(self._heap)
        self._allowed = FEW + 4 * len(self._heap)

    def first(self) -> S | None:
        """Return the evictable segment of the lowest rank, None if there is none."""
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


class Ranked(Policy[S], Generic[S]):
    """A policy that evicts the leaf of the lowest rank."""

    def __init__(self, rank: Callable[[S], Any]) -> None:
        self._leaves = Leaves(rank)

    @override
    def insert(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def release(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        return self._leaves.first()
