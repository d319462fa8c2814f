"""The contract of an eviction policy: it orders segments; the index decides which are evictable."""

# ruff: noqa: ARG002 - a notification has no effect by default

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, Self, TypeVar


class Evictable(Protocol):
    """A segment, as seen by a policy."""

    last_use: int
    start: int
    expires: float

    @property
    def parent(self) -> Any:
        """The segment of which it is a child; still set after its removal."""
        ...

    @property
    def stop(self) -> int:
        """Number of the block after its last one, counted from the root."""
        ...

    @property
    def is_evictable(self) -> bool:
        """Whether it is an unpinned leaf of the tree."""
        ...

    def key(self, number: int) -> Hashable:
        """Return the unique key of its block ``number``, the same after an eviction."""
        ...


S = TypeVar("S", bound=Evictable)


class Policy(Protocol[S]):
    """Eviction order of the segments of one index.

    The index notifies the policy of every change; by default a notification has no effect.

    ``touch`` names only the deepest segment of a chain. It is a use of all its ancestors too, so a parent inherits the
    uses of a removed child. Source: docs/decisions/0030.

    Threads: the caller of the index serialises every call.
    """

    def fresh(self) -> Self:
        """Return a new policy of this kind without segments."""
        return type(self)()

    def insert(self, segment: S) -> None:
        """Add a new leaf; its parent has the same ``last_use`` if one request created both.

        A policy created later receives every present segment, by last use.
        """

    def resize(self, segment: S) -> None:
        """``segment`` lost blocks at its end, or the request that created it added some."""
        return

    def touch(self, segment: S) -> None:
        """A request used all blocks of ``segment``."""
        return

    def split(self, upper: S, lower: S) -> None:
        """``upper`` is a new segment of the first blocks of ``lower``; it is not a leaf."""
        return

    def release(self, segment: S) -> None:
        """``segment`` became evictable: its last child or its last pin was removed."""

    def remove(self, segment: S) -> None:
        """``segment`` was removed from the index."""
        return

    def victim(self, blocks: int) -> S | None:
        """Return the evictable segment to evict from next, or None if there is none.

        Its last ``blocks`` blocks, or all if fewer, are removed next: ``resize`` or ``remove`` follows.
        """
        ...
