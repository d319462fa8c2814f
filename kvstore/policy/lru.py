"""Leaf-first LRU, and LRU after expiry."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Lru(Policy[S], Generic[S]):
    """Evict the least recently used segment."""

    def __init__(self) -> None:
        self._leaves: Leaves[S] = Leaves(self._rank)

    @staticmethod
    def _rank(segment: S) -> Any:
        return segment.last_use, -segment.stop  # the deeper tail first among equals

    @override
    def insert(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def resize(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def release(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        return self._leaves.first()


class Ttl(Lru[S], Generic[S]):
    """Evict the segment that expires first, the least recently used among equals."""

    @staticmethod
    @override
    def _rank(segment: S) -> Any:
        return segment.expires, segment.last_use, -segment.stop
