"""The contract of an eviction policy. It orders; the index decides what may go."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, Self, TypeVar


class Evictable(Protocol):
    """What a policy may know of a segment."""

    last_use: int
    start: int
    expires: float

    @property
    def parent(self) -> Any:
        """The segment above it, whose end it hangs on; still known when it was removed."""
        ...

    @property
    def stop(self) -> int:
        """Number of the block after its last one: how deep its tail lies."""
        ...

    @property
    def is_evictable(self) -> bool:
        """Say whether its last block is there, is a leaf, and nobody protects it."""
        ...

    def key(self, number: int) -> Hashable:
        """Return what tells its block ``number`` from all others, also after it has gone."""
        ...


S = TypeVar("S", bound=Evictable)


class Policy(Protocol[S]):
    """Eviction order over the segments of one index.

    The policy owns its bookkeeping and hears of every change. It never walks the tree.

    A use is told of the deepest segment of a path alone. It is one of everything above too, so a
    parent takes over the uses of a child that is removed. ``docs/decisions/0030`` has the reasons.

    Threads: none; the index's caller serialises.
    """

    def fresh(self) -> Self:
        """Return another policy of this kind that knows no segment yet."""
        return type(self)()

    def insert(self, segment: S) -> None:
        """Hear of a new leaf; from one that was asked for later, of what there is by then.

        Its parent has the same ``last_use`` if one request made both.
        """
        ...

    def resize(self, segment: S) -> None:
        """Hear that ``segment`` lost its tail, or that the request that made it added to its end."""
        ...

    def touch(self, segment: S) -> None:
        """Hear that a request used ``segment`` to its end."""
        ...

    def split(self, upper: S, lower: S) -> None:
        """Hear that ``upper`` was cut off the front of ``lower``; ``upper`` is no leaf."""
        ...

    def release(self, segment: S) -> None:
        """Hear that ``segment`` became evictable: its last child died, or a pin went."""
        ...

    def remove(self, segment: S) -> None:
        """Hear that ``segment`` left the index."""
        ...

    def victim(self, blocks: int) -> S | None:
        """Return the evictable segment whose tail goes next, or None if there is none.

        Its last ``blocks`` blocks, or all that it has, go at once: ``resize`` or ``remove`` follows.
        """
        ...
