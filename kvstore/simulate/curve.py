"""Exact LRU curve: the hits at every size, from one pass over a trace.

Leaf-first LRU keeps the most recently used blocks, of one request the shallower ones first. A cache of C
blocks therefore holds a block if fewer than C precede it: those used since, and those of the same last
use above it. One number per link, the blocks used since, determines its hits at every size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.trace.chains import Links
from kvstore.trace.columns import Ints

LRU = "lru"
"""Baseline of every comparison: its exact curve has the hits at any size."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Stack distances of a trace's links under leaf-first LRU."""

    links: Links
    before: Ints
    """Distinct blocks used between the two uses of each link, [links]."""

    def hits(self, capacity: int) -> Ints:
        """Return the hit of each request in blocks in a cache of ``capacity`` blocks. Cost: O(links)."""
        found = np.clip(capacity - self.before, 0, self.links.blocks)
        return summed(found, self.links)

    def points(self, first: int = 0) -> tuple[Ints, Ints]:
        """Return the sizes where the curve bends, in blocks, and the blocks hit at each.

        Requests from ``first`` on are counted. The curve is linear between sizes, and constant after the last.
        """
        counted = self.links.later >= first
        start = self.before[counted]
        stop = start + self.links.blocks[counted]
        sizes, at = np.unique(np.concatenate([[0], start, stop]), return_inverse=True)
        slope = np.zeros(len(sizes), np.int64)
        np.add.at(slope, at[1 : 1 + len(start)], 1)
        np.add.at(slope, at[1 + len(start) :], -1)
        rise = np.cumsum(slope)[:-1] * np.diff(sizes)
        return sizes, np.concatenate([[0], np.cumsum(rise)])


def summed(found: Ints, links: Links) -> Ints:
    """Return the sums of the links' hits by request."""
    total = np.concatenate([[0], np.cumsum(found)])
    sums: Ints = total[links.offsets[1:]] - total[links.offsets[:-1]]
    return sums


def lru_curve(links: Links, chain_blocks: Ints) -> Curve:
    """Return the LRU curve of a trace. ``chain_blocks`` are the blocks of each request.

    Cost: O(log requests) per link, in plain Python.
    """
    requests = len(chain_blocks)
    tree = [0] * (requests + 1)
    """Blocks by the request that used them last, as a Fenwick tree."""
    before = [0] * len(links.later)
    offsets, earlier = links.offsets.tolist(), links.earlier.tolist()
    sizes, lengths = links.blocks.tolist(), chain_blocks.tolist()
    held = 0
    for request in range(requests):
        for link in range(offsets[request], offsets[request + 1]):
            at = earlier[link] + 1
            older, node = 0, at
            while node:
                older += tree[node]
                node &= node - 1
            before[link] = held - older
        # All links are counted first: a chain may share blocks with several earlier requests.
        fresh = lengths[request]
        for link in range(offsets[request], offsets[request + 1]):
            node, size = earlier[link] + 1, sizes[link]
            held -= size
            while node <= requests:
                tree[node] -= size
                node += node & -node
        held += fresh
        node = request + 1
        while node <= requests:
            tree[node] += fresh
            node += node & -node
    return Curve(links, np.array(before, np.int64))
