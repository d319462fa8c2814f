"""The bound: a cache that knows the future and may decline to store.

After each request its path is on offer, and of all blocks those stay that are used again soonest.
That is Belady's policy with bypass. Nothing beats it at the same size; with insertion mandatory, a
request longer than what is worth keeping would do harm that no tier has to suffer.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.simulate.curve import summed
from kvstore.trace.chains import Links
from kvstore.trace.columns import Ints

SUMMARY = "the bound: knows the future, and may decline to store"


def optimal_hits(links: Links, capacity: int) -> Ints:
    """Return the hit of each request, in blocks, in a cache of ``capacity`` blocks.

    All blocks of a link are used again at one time and not before, so a link is kept or cut as one,
    from its tail. What is in no link is never used again, so it is never kept. A parent is used no
    later than its children, so what stays is closed under prefixes by itself.

    Cost: O(log links) a link.
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
