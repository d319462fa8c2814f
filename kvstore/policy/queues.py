"""Policies of two queues, one for what was used once: S3-FIFO, 2Q and ARC."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import S
from kvstore.policy.tracking import Ghosts, Life, Tracking

NEW, KEPT = 0, 1
"""The queue of what came lately, and the one of what has shown to be used."""


class _TwoQueues(Tracking[S], Generic[S]):
    """A queue of new segments and one of kept ones, each with an order of its own."""

    QUEUES = 2

    def __init__(self) -> None:
        super().__init__()
        self._leaves: tuple[Leaves[S], Leaves[S]] = (
            Leaves(self._rank_new),
            Leaves(self._rank_kept),
        )

    def _rank_new(self, segment: S) -> Any:
        life = self._lives[segment]
        return life.since if life.queue == NEW else None

    def _rank_kept(self, segment: S) -> Any:
        life = self._lives[segment]
        return segment.last_use if life.queue == KEPT else None

    def is_remembered(self, segment: S) -> bool:
        """Say whether a new segment resumes what was evicted lately."""
        raise NotImplementedError

    @override
    def enter(self, segment: S, life: Life) -> None:
        made = self.siblings(segment)
        is_kept = self.is_remembered(segment) if made is None else made.queue == KEPT
        life.queue = KEPT if is_kept else NEW
        life.since = self.tick()
        self.push(segment, life)

    @override
    def push(self, segment: S, life: Life) -> None:
        self._leaves[life.queue].push(segment)

    def choose(self, limit: float) -> S | None:
        """Return the first of the new ones if they are over ``limit`` blocks, else of the kept."""
        new, kept = self._leaves
        if self._blocks[NEW] > limit:
            return new.first() or kept.first()
        return kept.first() or new.first()


class _Probation(_TwoQueues[S], Generic[S]):
    """Segments evicted from the new ones are remembered, and kept when they come back."""

    NEW_SHARE: float
    """Share of all blocks that the new may hold."""
    GHOST_SHARE: float
    """Blocks that are remembered, as a share of those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = Ghosts()

    def next(self) -> S | None:
        """Return the segment whose turn it is."""
        return self.choose(self.NEW_SHARE * sum(self._blocks))

    @override
    def is_remembered(self, segment: S) -> bool:
        return self._ghosts.take(segment.key(segment.start))

    @override
    def evict(self, segment: S, blocks: int) -> None:
        if self._lives[segment].queue == NEW:
            limit = self.GHOST_SHARE * sum(self._blocks)
            self._ghosts.add(segment.key(segment.stop - blocks), blocks, limit)


class TwoQ(_Probation[S], Generic[S]):
    """Evict new segments first in first out; what comes back after that is kept by last use."""

    NEW_SHARE, GHOST_SHARE = 0.25, 0.5
    """Johnson and Shasha's own: a quarter for the new, ghosts for half of the blocks."""

    @override
    def victim(self) -> S | None:
        return self.next()


class S3Fifo(_Probation[S], Generic[S]):
    """Evict from a small queue of new segments; what was used twice moves to the main one."""

    MOST_MARKS = 3
    NEW_SHARE, GHOST_SHARE, MOVING = 0.1, 0.9, 2
    """Yang et al.'s: a tenth for the new, as many ghosts as main blocks, two uses to move."""

    @override
    def _rank_kept(self, segment: S) -> Any:
        life = self._lives[segment]
        return life.since if life.queue == KEPT else None

    @override
    def victim(self) -> S | None:
        while (segment := self.next()) is not None:
            life = self._lives[segment]
            if life.queue == NEW:
                if life.marks < self.MOVING:
                    return segment
                self.move(life, KEPT)
                life.marks, life.since = 0, self.tick()
                self.push(segment, life)
            elif life.marks:
                life.marks, life.since = life.marks - 1, self.tick()
            else:
                return segment
        return None


class Arc(_TwoQueues[S], Generic[S]):
    """Evict by last use from what was used once or from what was used again, as ghosts advise.

    What was evicted from each side is remembered. When it comes back, that side gets more room.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = (Ghosts(), Ghosts())
        self._target = 0.0
        """Blocks that new segments may hold."""
        self._most = 0
        """Blocks held at most so far: what the tier can hold."""

    @override
    def _rank_new(self, segment: S) -> Any:
        return segment.last_use if self._lives[segment].queue == NEW else None

    @override
    def is_remembered(self, segment: S) -> bool:
        key, blocks = segment.key(segment.start), segment.stop - segment.start
        new, kept = self._ghosts
        sizes = max(1, new.blocks), max(1, kept.blocks)
        if new.take(key):
            step = blocks * max(1.0, sizes[KEPT] / sizes[NEW])
            self._target = min(float(self._most), self._target + step)
            return True
        if kept.take(key):
            step = blocks * max(1.0, sizes[NEW] / sizes[KEPT])
            self._target = max(0.0, self._target - step)
            return True
        return False

    @override
    def used(self, segment: S, life: Life) -> None:
        if life.queue == NEW:
            self.move(life, KEPT)
            if segment.is_evictable:
                self.push(segment, life)

    @override
    def insert(self, segment: S) -> None:
        super().insert(segment)
        self._most = max(self._most, sum(self._blocks))

    @override
    def victim(self) -> S | None:
        return self.choose(self._target)

    @override
    def evict(self, segment: S, blocks: int) -> None:
        queue = self._lives[segment].queue
        new, kept = self._ghosts
        self._ghosts[queue].add(segment.key(segment.stop - blocks), blocks, self._most)
        new.shrink(self._most - min(self._most, self._blocks[NEW]))
        kept.shrink(2 * self._most - sum(self._blocks) - new.blocks)
