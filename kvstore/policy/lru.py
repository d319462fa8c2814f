"""Leaf-first LRU: the least recently used evictable segment goes, from its tail."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Lru(Policy[S], Generic[S]):
    """Evict what was used least recently."""

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
    def touch(self, segment: S) -> None:
        pass

    @override
    def split(self, upper: S, lower: S) -> None:
        pass

    @override
    def release(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def remove(self, segment: S) -> None:
        pass

    @override
    def victim(self, blocks: int) -> S | None:
        return self._leaves.first()


class Ttl(Lru[S], Generic[S]):
    """Evict what expires first, and what was used least recently among equals."""

    @staticmethod
    @override
    def _rank(segment: S) -> Any:
        return segment.expires, segment.last_use, -segment.stop
