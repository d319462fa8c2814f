"""Policies that count uses: LFU, GDSF, and GDSF by what recomputing costs."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Leaves
from kvstore.policy.protocol import Policy, S


class Lfu(Policy[S], Generic[S]):
    """Evict what was used least often, and least recently among equals."""

    def __init__(self) -> None:
        self._uses: dict[S, int] = {}
        """Uses after the request that stored a segment, of its end and of what has hung on it."""
        self._leaves: Leaves[S] = Leaves(self._rank)

    def _rank(self, segment: S) -> Any:
        return self._uses[segment], segment.last_use

    @override
    def insert(self, segment: S) -> None:
        self._uses[segment] = 0
        self._leaves.push(segment)

    @override
    def resize(self, segment: S) -> None:
        pass

    @override
    def touch(self, segment: S) -> None:
        self._uses[segment] += 1

    @override
    def split(self, upper: S, lower: S) -> None:
        self._uses[upper] = 0

    @override
    def release(self, segment: S) -> None:
        self._leaves.push(segment)

    @override
    def remove(self, segment: S) -> None:
        uses = self._uses.pop(segment)
        if uses and segment.parent in self._uses:
            self._uses[segment.parent] += uses

    @override
    def victim(self, blocks: int) -> S | None:
        return self._leaves.first()


class Gdsf(Lfu[S], Generic[S]):
    """Evict by uses times worth, counted from the age of the cache at the last use.

    The age is the rank of what was evicted last, so what is not used any more grows old in
    comparison. Blocks are all of one size; worth is what a hit saves for its bytes.
    """

    _deeper = 0.0
    """What a block is worth more for each block above it. One without any is worth 1."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._bases: dict[S, float] = {}
        """Age of the cache at the last use of each segment."""

    @override
    def _rank(self, segment: S) -> Any:
        worth = 1.0 + self._deeper * segment.stop
        return self._bases[segment] + (1 + self._uses[segment]) * worth, segment.last_use

    @override
    def insert(self, segment: S) -> None:
        self._bases[segment] = self._age
        super().insert(segment)

    @override
    def touch(self, segment: S) -> None:
        self._bases[segment] = self._age
        self._uses[segment] += 1

    @override
    def split(self, upper: S, lower: S) -> None:
        super().split(upper, lower)
        self._bases[upper] = self._bases[lower]

    @override
    def remove(self, segment: S) -> None:
        base, parent = self._bases.pop(segment), segment.parent
        if self._uses[segment] and parent in self._bases:
            self._bases[parent] = max(base, self._bases[parent])
        super().remove(segment)

    @override
    def victim(self, blocks: int) -> S | None:
        segment = self._leaves.first()
        if segment is not None:
            self._age = max(self._age, self._rank(segment)[0])
        return segment


class Cost(Gdsf[S], Generic[S]):
    """GDSF with the worth of a block growing with its depth, as the time to compute it does."""

    DOUBLING_BLOCKS = 256
    """Depth at which a block costs twice as much to compute as the first. A dense 8B model (32 layers of
    4,096) spends as much on attention as on everything else from about 30,000 tokens on: 2 * 8e9 FLOPs
    a token against 4 * 32 * 4,096 a token of depth. That is 256 blocks of 128 tokens."""
    _deeper = 1 / DOUBLING_BLOCKS

    @override
    def resize(self, segment: S) -> None:
        self._leaves.push(segment)  # a shorter path is worth less
