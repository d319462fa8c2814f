"""What policies share that remember more of a segment than its last use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic

from typing_extensions import override

from kvstore.policy.protocol import Policy, S


class Life:
    """What a policy remembers of one segment while it lives."""

    __slots__ = ("base", "blocks", "lap", "marks", "queue", "since", "uses")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.uses = 0
        """Uses after the request that stored it, of its end and of what has hung on it."""
        self.marks = 0
        """Uses that still speak for it: a scan takes them away."""
        self.since = 0
        """Place in its queue."""
        self.queue = 0
        self.lap = 0
        """Round of the hand that will look at it."""
        self.base = 0.0
        """Age of the cache at its last use."""

    def upper(self, blocks: int) -> Life:
        """Return the life of a piece cut off its front: as old, its uses yet to be inherited."""
        other = Life(blocks)
        other.since, other.queue, other.lap, other.base = (
            self.since,
            self.queue,
            self.lap,
            self.base,
        )
        return other


class Tracking(Policy[S], Generic[S]):
    """A policy that keeps a ``Life`` of each segment, and the blocks of each of its queues.

    Subclasses say what a new segment and a use mean, and which segment goes.
    """

    QUEUES = 1
    MOST_MARKS = 1
    """Uses more than this do not speak for a segment any louder."""

    def __init__(self) -> None:
        self._lives: dict[S, Life] = {}
        self._clock = 0
        self._blocks = [0] * self.QUEUES

    def enter(self, segment: S, life: Life) -> None:
        """Choose a new segment's queue and place, and make it a leaf."""
        raise NotImplementedError

    def push(self, segment: S, life: Life) -> None:
        """Make a segment a leaf of its queue."""
        raise NotImplementedError

    def used(self, segment: S, life: Life) -> None:
        """Hear of a use of a segment, or of a parent through a child that died."""

    def tick(self) -> int:
        """Return the next place at the end of a queue."""
        self._clock += 1
        return self._clock

    def siblings(self, segment: S) -> Life | None:
        """Return the life of the parent if the same request made it, so that both fare alike."""
        parent = segment.parent
        if parent is None or parent.last_use != segment.last_use:
            return None
        return self._lives.get(parent)

    def move(self, life: Life, queue: int) -> None:
        """Account a segment to another queue."""
        self._blocks[life.queue] -= life.blocks
        self._blocks[queue] += life.blocks
        life.queue = queue

    @override
    def insert(self, segment: S) -> None:
        life = self._lives[segment] = Life(segment.stop - segment.start)
        self.enter(segment, life)
        self._blocks[life.queue] += life.blocks

    @override
    def resize(self, segment: S) -> None:
        life = self._lives[segment]
        more = segment.stop - segment.start - life.blocks
        self._blocks[life.queue] += more
        life.blocks += more
        if more > 0:  # deeper, so before its equals
            self.push(segment, life)

    @override
    def touch(self, segment: S) -> None:
        life = self._lives[segment]
        life.uses += 1
        if life.marks < self.MOST_MARKS:
            life.marks += 1
        self.used(segment, life)

    @override
    def split(self, upper: S, lower: S) -> None:
        life = self._lives[lower]
        self._lives[upper] = life.upper(upper.stop - upper.start)
        life.blocks = lower.stop - lower.start

    @override
    def release(self, segment: S) -> None:
        self.push(segment, self._lives[segment])

    @override
    def evict(self, segment: S, blocks: int) -> None:
        pass

    @override
    def remove(self, segment: S) -> None:
        life = self._lives.pop(segment)
        self._blocks[life.queue] -= life.blocks
        parent = self._lives.get(segment.parent)
        if parent is not None and life.uses:
            parent.uses += life.uses
            parent.marks = min(self.MOST_MARKS, parent.marks + life.uses)
            parent.base = max(parent.base, life.base)
            self.used(segment.parent, parent)


class Ghosts:
    """What was evicted lately: where paths were cut, and how many blocks went there.

    A path that comes back resumes exactly where it was cut, so the first block of what went is all
    that has to be remembered of it.
    """

    __slots__ = ("_blocks", "blocks")

    def __init__(self) -> None:
        self._blocks: dict[Hashable, int] = {}
        self.blocks = 0
        """How many blocks are remembered."""

    def add(self, key: Hashable, blocks: int, limit: float) -> None:
        """Remember blocks that begin with ``key``, and forget the oldest beyond ``limit`` blocks."""
        self.take(key)
        self._blocks[key] = blocks
        self.blocks += blocks
        self.shrink(limit)

    def shrink(self, limit: float) -> None:
        """Forget the oldest beyond ``limit`` blocks."""
        while self.blocks > limit and self._blocks:
            self.blocks -= self._blocks.pop(next(iter(self._blocks)))

    def take(self, key: Hashable) -> bool:
        """Say whether ``key`` is remembered, and forget it."""
        blocks = self._blocks.pop(key, None)
        if blocks is None:
            return False
        self.blocks -= blocks
        return True
