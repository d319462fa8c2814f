"""Policies with one queue in order of arrival: FIFO, CLOCK and SIEVE."""

from __future__ import annotations

from itertools import count
from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Ranked
from kvstore.policy.protocol import S


class Fifo(Ranked[S], Generic[S]):
    """Evict the segment stored first."""

    def __init__(self) -> None:
        self._places: dict[S, Any] = {}  # position in the queue, the same for split halves
        super().__init__(self._places.get)
        self._end = count().__next__  # returns the next position at the end of the queue

    @override
    def insert(self, segment: S) -> None:
        self._places[segment] = self._end()
        super().insert(segment)

    @override
    def split(self, upper: S, lower: S) -> None:
        self._places[upper] = self._places[lower]

    @override
    def remove(self, segment: S) -> None:
        del self._places[segment]


class Clock(Fifo[S], Generic[S]):
    """Evict the segment stored first; a used segment moves to the end of the queue instead."""

    def __init__(self) -> None:
        super().__init__()
        self._used: set[S] = set()  # segments used since the last pass, which spares them once

    @override
    def touch(self, segment: S) -> None:
        self._used.add(segment)

    @override
    def remove(self, segment: S) -> None:
        super().remove(segment)
        if segment in self._used:
            self._spend(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        while (segment := self._leaves.first()) in self._used:
            assert segment is not None
            self._spend(segment)
            self._places[segment] = self._end()
        return segment

    def _spend(self, segment: S) -> None:
        """Move the use of a segment to its parent, which was used too."""
        self._used.remove(segment)
        if segment.parent in self._places:
            self._used.add(segment.parent)


class Sieve(Clock[S], Generic[S]):
    """Evict the first unused segment that a hand reaches; a used one keeps its position.

    The hand moves from the oldest segment to the newest and starts again. A position is a lap and a number: the lap in
    which the hand reaches the segment, and its order of arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hand = (0, -1)
        self._newest = -1

    @override
    def insert(self, segment: S) -> None:
        self._newest = self._end()
        self._places[segment] = self._hand[0], self._newest
        self._leaves.push(segment)

    @override
    def remove(self, segment: S) -> None:
        lap, since = place = self._places[segment]
        super().remove(segment)
        if since == self._newest and place == self._hand:
            self._hand = lap + 1, -1  # otherwise the next new segment would be behind the hand

    @override
    def release(self, segment: S) -> None:
        place = self._places[segment]
        if place < self._hand:  # the hand passed it while it was not evictable
            self._places[segment] = self._hand[0] + 1, place[1]
        self._leaves.push(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        while (segment := self._leaves.first()) is not None:
            self._hand = lap, since = self._places[segment]
            if segment not in self._used:
                break
            self._spend(segment)
            self._places[segment] = lap + 1, since
        return segment
