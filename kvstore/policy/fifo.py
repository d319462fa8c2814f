"""Policies of one queue in the order of storing: FIFO, CLOCK and SIEVE."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import S
from kvstore.policy.tracking import Life, Tracking


class Fifo(Tracking[S], Generic[S]):
    """Evict what was stored first."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves: Leaves[S] = Leaves(self._rank)

    def _rank(self, segment: S) -> Any:
        return self._lives[segment].since

    @override
    def enter(self, segment: S, life: Life) -> None:
        life.since = self.tick()
        self.push(segment, life)

    @override
    def push(self, segment: S, life: Life) -> None:
        self._leaves.push(segment)

    @override
    def victim(self) -> S | None:
        return self._leaves.first()


class Clock(Fifo[S], Generic[S]):
    """Evict what was stored first, but what was used goes round once more."""

    @override
    def victim(self) -> S | None:
        while (segment := self._leaves.first()) is not None:
            life = self._lives[segment]
            if not life.marks:
                return segment
            life.marks = 0
            life.since = self.tick()
        return None


class Sieve(Fifo[S], Generic[S]):
    """Evict what the hand meets unused; it spares what was used, which keeps its place.

    The queue is never reordered: a hand walks from the oldest to the newest and begins again. Laps
    say which side of the hand a segment is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hand = (0, 0)

    @override
    def _rank(self, segment: S) -> Any:
        life = self._lives[segment]
        return life.lap, life.since

    @override
    def enter(self, segment: S, life: Life) -> None:
        life.lap = self._hand[0]
        super().enter(segment, life)

    @override
    def push(self, segment: S, life: Life) -> None:
        if (life.lap, life.since) < self._hand:  # the hand went by while it could not go
            life.lap = self._hand[0] + 1
        super().push(segment, life)

    @override
    def victim(self) -> S | None:
        while (segment := self._leaves.first()) is not None:
            life = self._lives[segment]
            self._hand = life.lap, life.since
            if not life.marks:
                return segment
            life.marks = 0
            life.lap += 1
        return None
