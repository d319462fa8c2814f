"""Policies of several queues, one for what was used once: S3-FIFO, 2Q, ARC and SLRU."""

from __future__ import annotations

from itertools import count
from typing import Generic

from typing_extensions import override

from kvstore.policy.ghosts import Ghosts
from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Queue(Leaves[S], Generic[S]):
    """Segments by their place, and how many blocks they have."""

    __slots__ = ("blocks", "places")

    def __init__(self) -> None:
        self.places: dict[S, int] = {}
        self.blocks = 0
        super().__init__(self.places.get)


class _Queues(Policy[S], Generic[S]):
    """A policy that keeps each segment in one of its queues.

    Subclasses say where a new segment enters, what a use does, and which queue a victim is from.
    """

    def __init__(self, queues: int) -> None:
        self._queues = tuple(Queue[S]() for _ in range(queues))
        self._queue: dict[S, Queue[S]] = {}
        """The queue that each segment is in."""
        self._sizes: dict[S, int] = {}
        self._blocks = 0
        """Blocks in all queues."""
        self._end = count().__next__
        """Returns the next place at the end of a queue that is no LRU."""

    def enter(self, segment: S, queue: Queue[S], place: int) -> None:
        """Put a new segment into a queue, as a leaf."""
        size = segment.stop - segment.start
        self._sizes[segment] = size
        self._blocks += size
        queue.blocks += size
        queue.places[segment] = place
        self._queue[segment] = queue
        queue.push(segment)

    def move(self, segment: S, queue: Queue[S], place: int) -> None:
        """Put a segment into another queue, as a leaf if it is one."""
        old, size = self._queue[segment], self._sizes[segment]
        del old.places[segment]
        old.blocks -= size
        queue.blocks += size
        queue.places[segment] = place
        self._queue[segment] = queue
        if segment.is_evictable:
            queue.push(segment)

    def made_with(self, segment: S) -> Queue[S] | None:
        """Return the queue of the parent if the same request made it, so that both fare alike."""
        parent = segment.parent
        if parent is None or parent.last_use != segment.last_use:
            return None
        return self._queue.get(parent)

    @override
    def resize(self, segment: S) -> None:
        size = segment.stop - segment.start
        more = size - self._sizes[segment]
        self._sizes[segment] = size
        self._queue[segment].blocks += more
        self._blocks += more

    @override
    def touch(self, segment: S) -> None:
        pass

    @override
    def split(self, upper: S, lower: S) -> None:
        queue = self._queue[upper] = self._queue[lower]
        queue.places[upper] = queue.places[lower]
        self._sizes[upper] = upper.stop - upper.start
        self._sizes[lower] = lower.stop - lower.start

    @override
    def release(self, segment: S) -> None:
        self._queue[segment].push(segment)

    @override
    def remove(self, segment: S) -> None:
        queue, size = self._queue.pop(segment), self._sizes.pop(segment)
        del queue.places[segment]
        queue.blocks -= size
        self._blocks -= size


class _TwoQueues(_Queues[S], Generic[S]):
    """A queue of what came lately, and one of what has shown to be used."""

    def __init__(self) -> None:
        super().__init__(2)
        self._new, self._kept = self._queues

    def choose(self, *, is_new: bool) -> S | None:
        """Return the first of the new ones, or else of the kept ones, of the others if there is none."""
        new, kept = self._new, self._kept
        if is_new:
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

    def place(self, segment: S) -> int:
        """Return where a segment that enters a queue now stands in it."""
        raise NotImplementedError

    @override
    def insert(self, segment: S) -> None:
        queue = self.made_with(segment)
        if queue is None:
            is_kept = self._ghosts.take(segment)
            queue = self._kept if is_kept else self._new
        self.enter(segment, queue, self.place(segment))
        # Not when room was made: a segment is looked up before that, and may be what was forgotten.
        self._ghosts.shrink(self.GHOST_SHARE * self._blocks)


class TwoQ(_Probation[S], Generic[S]):
    """Evict new segments first in first out; what comes back after that is kept by last use."""

    NEW_SHARE, GHOST_SHARE = 0.25, 0.5
    """Johnson and Shasha's own: a quarter for the new, ghosts for half of the blocks."""

    @override
    def place(self, segment: S) -> int:
        return segment.last_use

    @override
    def touch(self, segment: S) -> None:
        if segment in self._kept.places:
            self._kept.places[segment] = segment.last_use

    @override
    def release(self, segment: S) -> None:
        self.touch(segment)
        super().release(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        segment = self.choose(is_new=self._new.blocks > self.NEW_SHARE * self._blocks)
        if segment in self._new.places:
            assert segment is not None
            self._ghosts.add(segment, min(blocks, self._sizes[segment]))
        return segment


class S3Fifo(_Probation[S], Generic[S]):
    """Evict from a small queue of new segments; what was used twice moves to the main one."""

    NEW_SHARE, GHOST_SHARE, MOVING, MOST = 0.1, 0.9, 2, 3
    """Yang et al.'s: a tenth for the new, as many ghosts as main blocks, two uses to move, and three
    that count."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[S, int] = {}
        """Uses that still speak for a segment, where there are any."""

    @override
    def place(self, segment: S) -> int:
        return self._end()

    def mark(self, segment: S, uses: int) -> None:
        """Count uses of a segment."""
        self._marks[segment] = min(self.MOST, self._marks.get(segment, 0) + uses)

    def spend(self, segment: S, uses: int) -> None:
        """Take uses of a segment away. They were its parent's too, which was not asked yet."""
        left = self._marks.pop(segment) - uses
        if left:
            self._marks[segment] = left
        if segment.parent in self._queue:
            self.mark(segment.parent, uses)

    @override
    def touch(self, segment: S) -> None:
        self.mark(segment, 1)

    @override
    def remove(self, segment: S) -> None:
        super().remove(segment)
        if segment in self._marks:
            self.spend(segment, self._marks[segment])

    @override
    def victim(self, blocks: int) -> S | None:
        new, kept = self._new, self._kept
        is_new = new.blocks >= self.NEW_SHARE * self._blocks
        while (segment := self.choose(is_new=is_new)) is not None:
            uses = self._marks.get(segment, 0)
            if segment in kept.places:
                if not uses:
                    break
                self.spend(segment, 1)
                kept.places[segment] = self._end()
            elif uses < self.MOVING:
                self._ghosts.add(segment, min(blocks, self._sizes[segment]))
                break
            else:
                self.spend(segment, uses)
                self.move(segment, kept, self._end())
        return segment


class Arc(_TwoQueues[S], Generic[S]):
    """Evict by last use from what was used once or from what was used again, as ghosts advise.

    What was evicted from each side is remembered. When it comes back, that side gets more room.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = (Ghosts(), Ghosts())
        self._used: set[S] = set()
        """Kept segments that were used while they were there, or below which one was."""
        self._target = 0.0
        """Blocks that new segments may hold."""
        self._most = 0
        """Blocks held at most so far: what the tier can hold."""

    def _is_remembered(self, segment: S) -> bool:
        """Say whether a new segment resumes what was evicted lately, and learn from it."""
        new, kept = self._ghosts
        blocks = segment.stop - segment.start
        news, kepts = new.blocks, kept.blocks
        if new.take(segment):
            self._target = min(self._most, self._target + blocks * max(1.0, kepts / news))
        elif kept.take(segment):
            self._target = max(0.0, self._target - blocks * max(1.0, news / kepts))
        else:
            return False
        return True

    @override
    def insert(self, segment: S) -> None:
        queue = self.made_with(segment)
        if queue is None:
            queue = self._kept if self._is_remembered(segment) else self._new
        self.enter(segment, queue, segment.last_use)
        self._most = max(self._most, self._blocks)
        new, kept = self._ghosts
        new.shrink(self._most - self._new.blocks)
        kept.shrink(2 * self._most - self._blocks - new.blocks)

    @override
    def touch(self, segment: S) -> None:
        self._used.add(segment)
        if segment in self._new.places:
            self.move(segment, self._kept, segment.last_use)
        else:
            self._kept.places[segment] = segment.last_use

    @override
    def release(self, segment: S) -> None:
        self._queue[segment].places[segment] = segment.last_use
        super().release(segment)

    @override
    def remove(self, segment: S) -> None:
        super().remove(segment)
        if segment in self._used:
            self._used.remove(segment)
            if segment.parent in self._queue:
                self.touch(segment.parent)

    @override
    def victim(self, blocks: int) -> S | None:
        segment = self.choose(is_new=self._new.blocks > self._target)
        if segment is not None:
            ghosts = self._ghosts[segment in self._kept.places]
            ghosts.add(segment, min(blocks, self._sizes[segment]))
        return segment


class Slru(_Queues[S], Generic[S]):
    """Evict from the lowest of four LRU queues. A use lifts by one; what is over a quarter sinks."""

    QUEUES = 4
    """Huang et al.'s S4LRU."""

    def __init__(self) -> None:
        super().__init__(self.QUEUES)

    def level(self, segment: S) -> int:
        """Return the number of the queue that a segment is in, from the lowest."""
        return self._queues.index(self._queue[segment])

    def limit(self) -> float:
        """Return how many blocks a queue may have. The lowest has what is over."""
        return self._blocks / self.QUEUES

    @override
    def insert(self, segment: S) -> None:
        self.enter(segment, self._queues[0], self._end())

    @override
    def touch(self, segment: S) -> None:
        queues, limit = self._queues, self.limit()
        level = min(self.level(segment) + 1, self.QUEUES - 1)
        self.move(segment, queues[level], self._end())
        for upper, lower in zip(queues[level:0:-1], queues[level - 1 :: -1], strict=True):
            while upper.blocks > limit and (last := upper.first()) is not None:
                self.move(last, lower, self._end())

    @override
    def remove(self, segment: S) -> None:
        queue, level = self._queue[segment], self.level(segment)
        place = queue.places[segment]
        super().remove(segment)
        parent = segment.parent
        if parent in self._queue and self.level(parent) < level:
            self.move(parent, queue, place)

    @override
    def victim(self, blocks: int) -> S | None:
        for queue in self._queues:
            segment = queue.first()
            if segment is not None:
                return segment
        return None
