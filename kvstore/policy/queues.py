"""Policies with several queues, one for segments used once: S3-FIFO, 2Q, ARC and SLRU."""

from __future__ import annotations

from itertools import count
from typing import Generic

from typing_extensions import override

from kvstore.policy.ghosts import Ghosts
from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Queue(Leaves[S], Generic[S]):
    """Segments by their position in one queue, and their number of blocks."""

    __slots__ = ("blocks", "places")

    def __init__(self) -> None:
        self.places: dict[S, int] = {}
        self.blocks = 0
        super().__init__(self.places.get)


class _Queues(Policy[S], Generic[S]):
    """A policy that keeps each segment in one queue; subclasses choose it, and the effect of a use."""

    def __init__(self, queues: int) -> None:
        self._queues = tuple(Queue[S]() for _ in range(queues))
        self._queue: dict[S, Queue[S]] = {}  # the queue of each segment
        self._sizes: dict[S, int] = {}
        self._blocks = 0  # blocks in all queues
        self._end = count().__next__  # returns the next position in a queue without LRU

    def enter(self, segment: S, queue: Queue[S], place: int) -> None:
        """Add a new segment, a leaf, to a queue."""
        size = segment.stop - segment.start
        self._sizes[segment] = size
        self._blocks += size
        queue.blocks += size
        queue.places[segment] = place
        self._queue[segment] = queue
        queue.push(segment)

    def move(self, segment: S, queue: Queue[S], place: int) -> None:
        """Move a segment to another queue, as a leaf if it is one."""
        old, size = self._queue[segment], self._sizes[segment]
        del old.places[segment]
        old.blocks -= size
        queue.blocks += size
        queue.places[segment] = place
        self._queue[segment] = queue
        if segment.is_evictable:
            queue.push(segment)

    def made_with(self, segment: S) -> Queue[S] | None:
        """Return the queue of the parent if the same request created both, else None."""
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
    """A queue of new segments, and one of segments kept for their uses."""

    def __init__(self) -> None:
        super().__init__(2)
        self._new, self._kept = self._queues

    def choose(self, *, is_new: bool) -> S | None:
        """Return the first new or kept segment; the first of the other queue if there is none."""
        new, kept = self._new, self._kept
        if is_new:
            return new.first() or kept.first()
        return kept.first() or new.first()


class _Probation(_TwoQueues[S], Generic[S]):
    """Evicted new segments are kept when they return."""

    NEW_SHARE: float  # largest share of all blocks in the queue of new segments
    GHOST_SHARE: float  # most blocks recorded as ghosts, as a share of all blocks

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = Ghosts()

    def place(self, segment: S) -> int:
        """Return the position of a segment that enters a queue now."""
        raise NotImplementedError

    @override
    def insert(self, segment: S) -> None:
        queue = self.made_with(segment)
        if queue is None:
            is_kept = self._ghosts.take(segment)
            queue = self._kept if is_kept else self._new
        self.enter(segment, queue, self.place(segment))
        # Here, not on eviction: a returning segment is stored after the eviction that makes room for it.
        self._ghosts.shrink(self.GHOST_SHARE * self._blocks)


class TwoQ(_Probation[S], Generic[S]):
    """Evict new segments in order of arrival; segments that return later are kept by last use."""

    NEW_SHARE, GHOST_SHARE = 0.25, 0.5  # of all blocks, as Johnson and Shasha

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
    """Evict from a small queue of new segments; segments used twice move to the main queue."""

    NEW_SHARE, GHOST_SHARE, MOVING, MOST = 0.1, 0.9, 2, 3
    """As Yang et al.: a tenth for new segments, as many ghosts as main blocks, two uses to move, three counted."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[S, int] = {}  # uses of a segment since it was last spared, if any

    @override
    def place(self, segment: S) -> int:
        return self._end()

    def mark(self, segment: S, uses: int) -> None:
        """Add uses to a segment."""
        self._marks[segment] = min(self.MOST, self._marks.get(segment, 0) + uses)

    def spend(self, segment: S, uses: int) -> None:
        """Move uses of a segment to its parent, which was used too."""
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
    """Evict by last use from segments used once or again; an evicted one that returns enlarges its side."""

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = (Ghosts(), Ghosts())
        self._used: set[S] = set()  # kept segments with a use, or a removed descendant's
        self._target = 0.0  # most blocks of new segments
        self._most = 0  # most blocks so far: the capacity of the tier

    def _has_returned(self, segment: S) -> bool:
        """Return whether a new segment resumes a recent eviction, and adapt the target."""
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
            queue = self._kept if self._has_returned(segment) else self._new
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
    """Evict from the lowest of four LRU queues. A hit promotes by one; a queue above its quarter demotes its oldest."""

    QUEUES = 4  # Huang et al.'s S4LRU

    def __init__(self) -> None:
        super().__init__(self.QUEUES)

    def level(self, segment: S) -> int:
        """Return the number of a segment's queue, from the lowest."""
        return self._queues.index(self._queue[segment])

    def limit(self) -> float:
        """Return the most blocks of a queue above the lowest."""
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
