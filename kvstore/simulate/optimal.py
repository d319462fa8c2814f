"""Optimal cache: the upper bound of all policies, Belady's policy with bypass.

After each request it keeps, of the cached blocks and the request's, those that are used again soonest.
Without bypass a long request would evict useful blocks, which a tier can avoid.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.simulate.curve import summed
from kvstore.trace.chains import Links
from kvstore.trace.columns import Ints

OPTIMAL = "optimal"
"""Name of the bound. No tier can run it, because it needs the future."""
SUMMARY = "the block used again last; a bound, as it needs the future"


def optimal_hits(links: Links, capacity: int) -> Ints:
    """Return the hit of each request, in blocks, in a cache of ``capacity`` blocks.

    All blocks of a link are used again by the same request, so links are cut from their tails. Blocks in no
    link are never used again and never kept. A parent is used no later than its children, so the kept
    blocks are closed under prefixes. Cost: O(log links) per link.
    """
    later = links.later.tolist()
    kept = [0] * len(later)
    sizes = links.blocks.tolist()
    # As one request's links are ordered from the root down, a later number is a deeper block.
    order = np.lexsort((np.arange(len(later)), links.earlier)).tolist()
    heap: list[tuple[int, int]] = []
    used, request = 0, -1
    offsets = links.offsets.tolist()
    earlier = links.earlier.tolist()
    at = 0
    hits = np.zeros(len(later), np.int64)
    for request in range(len(offsets) - 1):
        for link in range(offsets[request], offsets[request + 1]):
            hits[link] = kept[link]
            used -= kept[link]
            kept[link] = 0
        while at < len(order) and earlier[order[at]] == request:
            link = order[at]
            kept[link] = sizes[link]
            used += sizes[link]
            heapq.heappush(heap, (-later[link], -link))
            at += 1
        while used > capacity:
            link = -heap[0][1]
            count = min(used - capacity, kept[link])
            kept[link] -= count
            used -= count
            if not kept[link]:
                heapq.heappop(heap)
    return summed(hits, links)
