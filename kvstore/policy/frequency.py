"""Policies that count uses: LFU, GDSF, and GDSF weighted by recomputation cost."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.leaves import Ranked
from kvstore.policy.protocol import S


class Lfu(Ranked[S], Generic[S]):
    """Evict the least often used segment, the least recently used among equals."""

    def __init__(self) -> None:
        self._uses: dict[S, int] = {}  # by segment, its removed descendants included
        super().__init__(self._rank)

    def _rank(self, segment: S) -> Any:
        return self._uses[segment], segment.last_use

    @override
    def insert(self, segment: S) -> None:
        self._uses[segment] = 0
        super().insert(segment)

    @override
    def touch(self, segment: S) -> None:
        self._uses[segment] += 1

    @override
    def split(self, upper: S, lower: S) -> None:
        self._uses[upper] = 0

    @override
    def remove(self, segment: S) -> None:
        uses = self._uses.pop(segment)
        if uses and segment.parent in self._uses:
            self._uses[segment.parent] += uses


class Gdsf(Lfu[S], Generic[S]):
    """Evict the lowest rank: uses times worth, plus the age of the cache at the last use.

    The age is the rank of the last victim, so unused segments fall behind. All blocks have one size; worth is the
    computation that a block saves.
    """

    _deeper = 0.0  # additional worth per block above it; a first block is worth 1

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._bases: dict[S, float] = {}  # age of the cache at the last use of each segment

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
    """GDSF in which the worth of a block grows with its depth, like the time to compute it."""

    DOUBLING_BLOCKS = 256
    """Depth at which computing a block costs twice as much as the first: about 30,000 tokens, or 256 blocks of 128.
    There a dense 8B model (32 layers of 4,096) spends as many FLOPs on attention, 4 * 32 * 4,096 per token and token
    of depth, as on everything else, 2 * 8e9 per token."""
    _deeper = 1 / DOUBLING_BLOCKS

    @override
    def resize(self, segment: S) -> None:
        self._leaves.push(segment)  # a shorter chain is worth less
