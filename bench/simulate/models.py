"""Reference model of the simulator: a cache block by block."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from kvstore.trace.columns import Trace


class Block:
    """A cached block."""

    __slots__ = ("block", "children", "depth", "parent", "stored", "used", "uses")

    def __init__(self, block: int, parent: Block | None, depth: int, now: int) -> None:
        self.block, self.parent, self.depth = block, parent, depth
        self.children = 0
        self.stored = self.used = now
        self.uses = 1


class LeafFirst:
    """Cache of single blocks: evicts the lowest rank of the blocks without a cached child, deepest first.

    It implements the specification literally, without segments and policies.
    """

    def __init__(self, rank: Callable[[Block], Any], capacity: int) -> None:
        self._rank = rank
        self._capacity = capacity
        self._cached: dict[int, Block] = {}
        self._leaves: list[tuple[Any, int, int]] = []

    def _push(self, block: Block) -> None:
        heapq.heappush(self._leaves, (self._rank(block), -block.depth, block.block))

    def _evict(self, pinned: set[int]) -> None:
        spared = []
        while True:
            entry = heapq.heappop(self._leaves)
            block = self._cached.get(entry[2])
            if block is None or block.children:
                continue
            if (self._rank(block), -block.depth) != entry[:2]:
                self._push(block)
            elif block.block in pinned:
                spared.append(block)
            else:
                break
        del self._cached[block.block]
        if block.parent is not None:
            block.parent.children -= 1
            self._push(block.parent)
        for other in spared:
            self._push(other)

    def request(self, path: list[int], now: int) -> int:
        """Look up and store a chain; return its hit in blocks."""
        hit, parent = 0, None
        while hit < len(path) and (block := self._cached.get(path[hit])) is not None:
            block.used, parent = now, block
            block.uses += 1
            hit += 1
        pinned = set(path)
        for depth, number in enumerate(path[hit : self._capacity], hit):
            if len(self._cached) == self._capacity:
                self._evict(pinned)
            fresh = self._cached[number] = Block(number, parent, depth, now)
            if parent is not None:
                parent.children += 1
            parent = fresh
        if parent is not None:
            self._push(parent)
        return hit


def leaf_first(trace: Trace, rank: Callable[[Block], Any], capacity: int) -> int:
    """Return the blocks of a trace that hit, in leading runs."""
    cache = LeafFirst(rank, capacity)
    paths = pairwise(trace.offsets.tolist())
    return sum(
        cache.request(trace.blocks[start:stop].tolist(), now)
        for now, (start, stop) in enumerate(paths)
    )
