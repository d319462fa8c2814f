"""The contract of an eviction policy. It orders; the index decides what may go."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class Evictable(Protocol):
    """What a policy may know of a segment."""

    last_use: int
    start: int

    @property
    def stop(self) -> int:
        """Number of the block after its last one: how deep its tail lies."""
        ...

    @property
    def is_evictable(self) -> bool:
        """Say whether its last block is a leaf that nobody protects."""
        ...

    @property
    def is_live(self) -> bool:
        """Say whether it still is in the index."""
        ...


S = TypeVar("S", bound=Evictable)


class Policy(Protocol[S]):
    """Eviction order over the segments of one index.

    The policy owns its bookkeeping and hears of every change. It never walks the tree.

    Threads: none; the index's caller serialises.
    """

    def fresh(self) -> Self:
        """Return another policy of this kind that knows no segment yet."""
        ...

    def insert(self, segment: S) -> None:
        """Hear of a new leaf; from one that was asked for later, of what there is by then."""
        ...

    def touch(self, segment: S) -> None:
        """Hear that a request used ``segment`` to its end, or that it grew."""
        ...

    def split(self, upper: S, lower: S) -> None:
        """Hear that ``upper`` was cut off the front of ``lower``; ``upper`` is no leaf."""
        ...

    def release(self, segment: S) -> None:
        """Hear that ``segment`` became evictable: a child died, a pin went, or its tail did."""
        ...

    def remove(self, segment: S) -> None:
        """Hear that ``segment`` left the index."""
        ...

    def victim(self) -> S | None:
        """Return the evictable segment whose tail should go next, or None if there is none."""
        ...
