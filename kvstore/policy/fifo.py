"""Policies of one queue in the order of storing: FIFO, CLOCK and SIEVE."""

from __future__ import annotations

from itertools import count
from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Fifo(Policy[S], Generic[S]):
    """Evict what was stored first."""

    def __init__(self) -> None:
        self._places: dict[S, Any] = {}
        """Where each segment stands in the queue; both parts of one that was split stand there."""
        self._leaves: Leaves[S] = Leaves(self._places.get)
        self._end = count().__next__
        """Returns the next place at the end of the queue."""

    @override
    def insert(self, segment: S) -> None:
        self._places[segment] = self._end()
        self._leaves.push(segment)

    @override
    def resize(self, segment: S) -> None:
        pass

    @override
    def touch(self, segment: S) -> None:
        pass

    @override
    def split(self, upper: S, lower: S) -> None:
        self._places[upper] = self._places[lower]

    @override
    def release(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def remove(self, segment: S) -> None:
        del self._places[segment]

    @override
    def victim(self, blocks: int) -> S | None:
        return self._leaves.first()


class Clock(Fifo[S], Generic[S]):
    """Evict what was stored first, but what was used goes round once more."""

    def __init__(self) -> None:
        super().__init__()
        self._used: set[S] = set()
        """Segments with a use that still speaks for them: it spares them once."""

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
        """Take the use of a segment away. It was one of its parent too, which was not asked yet."""
        self._used.remove(segment)
        if segment.parent in self._places:
            self._used.add(segment.parent)


class Sieve(Clock[S], Generic[S]):
    """Evict what the hand meets unused; it spares what was used, which keeps its place.

    The queue is never reordered: a hand walks from the oldest to the newest and begins again. A place
    is a lap and a number: the lap in which the hand will look at the segment, and when it came.
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
            self._hand = lap + 1, -1  # before what comes next, which would be out of its way

    @override
    def release(self, segment: S) -> None:
        place = self._places[segment]
        if place < self._hand:  # the hand went by while it could not go
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
