"""Leaf-first LRU, and LRU after expiry."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Ranked
from kvstore.policy.protocol import S


class Lru(Ranked[S], Generic[S]):
    """Evict the least recently used segment."""

    def __init__(self) -> None:
        super().__init__(self._rank)

    @staticmethod
    def _rank(segment: S) -> Any:
        return segment.last_use, -segment.stop  # the deeper tail first among equals

    @override
    def resize(self, segment: S) -> None:
        self._leaves.push(segment)


class Ttl(Lru[S], Generic[S]):
    """Evict the segment that expires first, the least recently used among equals."""

    @staticmethod
    @override
    def _rank(segment: S) -> Any:
        return segment.expires, segment.last_use, -segment.stop
