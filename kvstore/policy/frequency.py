"""Policies that count uses: LFU, GDSF, and GDSF by what recomputing costs."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.fifo import Fifo
from kvstore.policy.protocol import S
from kvstore.policy.tracking import Life

DOUBLING_BLOCKS = 256
"""Depth at which a block costs twice as much to compute as the first. A dense 8B model (32 layers of
4,096) spends as much on attention as on everything else from about 30,000 tokens on: 2 * 8e9 FLOPs a
token against 4 * 32 * 4,096 a token of depth. That is 256 blocks of 128 tokens."""


class Lfu(Fifo[S], Generic[S]):
    """Evict what was used least often, and least recently among equals."""

    @override
    def _rank(self, segment: S) -> Any:
        return self._lives[segment].uses, segment.last_use


class Gdsf(Fifo[S], Generic[S]):
    """Evict by uses times worth, counted from the age of the cache at the last use.

    The age is the rank of what was evicted last, so what is not used any more grows old in
    comparison. Blocks are all of one size; ``worth`` of one is what a hit saves for its bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def worth(self, depth: int) -> float:  # noqa: ARG002 - of this policy, the same at any depth
        """Return what a hit of a block saves, for its bytes. ``depth`` counts it and those above."""
        return 1.0

    def _value(self, segment: S) -> float:
        life = self._lives[segment]
        return life.base + (1 + life.uses) * self.worth(segment.stop)

    @override
    def _rank(self, segment: S) -> Any:
        return self._value(segment), segment.last_use

    @override
    def enter(self, segment: S, life: Life) -> None:
        life.base = self._age
        super().enter(segment, life)

    @override
    def touch(self, segment: S) -> None:
        self._lives[segment].base = self._age
        super().touch(segment)

    @override
    def evict(self, segment: S, blocks: int) -> None:
        self._age = max(self._age, self._value(segment))


class Cost(Gdsf[S], Generic[S]):
    """GDSF with the worth of a block growing with its depth, as the time to compute it does."""

    @override
    def worth(self, depth: int) -> float:
        return 1.0 + depth / DOUBLING_BLOCKS

    @override
    def resize(self, segment: S) -> None:
        super().resize(segment)
        self._leaves.push(segment)  # a shorter path is worth less
