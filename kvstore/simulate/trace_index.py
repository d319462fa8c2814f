"""Index of a simulated tier over precomputed chains, without keys.

Every chain is a row of segments, so a lookup walks up from the last one, and a node of the tree is two
depths. A policy receives the same events in the same order as from a ``PrefixIndex``; ``tests/simulate``
checks this for each policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.index.prefix_tree import NEVER
from kvstore.policy.protocol import Policy
from kvstore.trace.chains import Chains


class Node:
    """Consecutive cached blocks of a chain: a node of the tree, like ``Segment`` in an index."""

    __slots__ = (
        "bottom",
        "chains",
        "children",
        "is_evictable",
        "last_use",
        "parent",
        "start",
        "stop",
    )

    expires = NEVER

    def __init__(
        self, parent: Node | None, bottom: int, start: int, stop: int, now: int, chains: ChainLists
    ) -> None:
        self.parent = parent
        self.bottom = bottom
        """The segment of the trace that has its last block."""
        self.start = start
        self.stop = stop
        self.children = 0
        self.last_use = now
        self.is_evictable = True
        self.chains = chains

    def key(self, number: int) -> int:
        """Return the number of a block, unique in the trace."""
        chains, at = self.chains, self.bottom
        while chains.starts[at] > number:
            at = chains.parents[at]
        return chains.firsts[at] + number


class ChainLists:
    """Chains as lists, the fastest form for plain Python; shared by all simulations of a trace.

    Segment -1 is the root. It has no blocks, and its start is below every depth.
    """

    def __init__(self, chains: Chains) -> None:
        refs = np.append(chains.refs, -1)
        is_empty = np.diff(chains.offsets) == 0
        self.lasts: list[int] = np.where(is_empty, -1, refs[chains.offsets[1:] - 1]).tolist()
        """The deepest segment of each request, which determines its chain."""
        self.starts: list[int] = [*chains.starts.tolist(), -1]
        self.stops: list[int] = [*chains.stops.tolist(), 0]
        self.parents: list[int] = [*chains.parents.tolist(), -1]
        first = chains.blocks.cumsum() - chains.blocks
        self.firsts: list[int] = (first - chains.starts).tolist()
        """Offset from a block's depth to its number among all blocks, by segment."""


Observer = Callable[[int, int], object]
"""Called with the request and the number of each evicted block."""


def simulate_policy(
    chains: ChainLists,
    policy: Policy[Any],
    capacity: int,
    evicted: Observer | None = None,
    *,
    room: int | None = None,
) -> list[int]:
    """Return the hit of each request, in blocks, in a cache of ``capacity`` blocks.

    A request is looked up and stored at once, with its chain pinned. Of a chain longer than ``room``, by
    default the whole cache, the first blocks are stored. Time is logical: a request uses its hit, then
    stores the rest. ``evicted`` is for tests. Cost: O(log n) per request, and per node added or removed.
    """
    hits: list[int] = []
    starts, stops, parents = chains.starts, chains.stops, chains.parents
    root = Node(None, -1, 0, 0, 0, chains)
    root.is_evictable = False
    holder: list[Node | None] = [None] * len(starts)
    """The node that has the last cached block of each segment of the trace."""
    holder[-1] = root
    free = capacity
    longest = capacity if room is None else min(room, capacity)
    now = 0
    for request, deepest in enumerate(chains.lasts):
        last = at = deepest
        while (node := holder[at]) is None:
            at = parents[at]
        hit = node.stop
        if stops[at] < hit:
            hit = stops[at]
            node = _split(node, at, holder, chains, policy)
        if hit:
            now += 1
            node.last_use = now
            policy.touch(node)
        hits.append(hit)
        stop = stops[last]
        if stop > longest:
            stop = longest
            while starts[last] >= stop:
                last = parents[last]
        missing = stop - hit
        if missing <= 0:
            continue
        now += 1
        node.children += 1  # counted before it exists, which pins the chain
        node.is_evictable = False
        if missing > free:
            free += _evict(missing - free, holder, chains, policy, request, evicted)
        free -= missing
        fresh = Node(node, last, hit, stop, now, chains)
        while starts[last] >= hit:
            holder[last] = fresh
            last = parents[last]
        if stops[last] > hit:  # it continues inside a segment of the trace
            holder[last] = fresh
        policy.insert(fresh)
    return hits


def _split(
    lower: Node, bottom: int, holder: list[Node | None], chains: ChainLists, policy: Policy[Any]
) -> Node:
    """Split off the blocks down to the end of ``bottom`` as a new parent."""
    starts, parents = chains.starts, chains.parents
    at, start = chains.stops[bottom], lower.start
    upper = Node(lower.parent, bottom, start, at, lower.last_use, chains)
    upper.children = 1
    upper.is_evictable = False
    lower.parent, lower.start = upper, at
    holder[bottom] = upper
    while starts[bottom] > start:
        bottom = parents[bottom]
        holder[bottom] = upper
    policy.split(upper, lower)
    return upper


def _evict(
    blocks: int,
    holder: list[Node | None],
    chains: ChainLists,
    policy: Policy[Any],
    request: int,
    evicted: Observer | None,
) -> int:
    """Evict ``blocks`` blocks in the policy's order, each node from its tail."""
    starts, parents = chains.starts, chains.parents
    left = blocks
    while left:
        victim: Node | None = policy.victim(left)
        assert victim is not None, "all nodes but the pinned chain are evictable"
        at, start = victim.bottom, victim.start
        stop = max(start, victim.stop - left)
        if evicted is not None:
            for number in reversed(range(stop, victim.stop)):
                evicted(request, victim.key(number))
        left -= victim.stop - stop
        while starts[at] >= stop:
            holder[at] = None
            at = parents[at]
        if stop > start:
            victim.stop, victim.bottom = stop, at
            policy.resize(victim)
            continue
        parent = victim.parent
        assert parent is not None
        policy.remove(victim)
        victim.is_evictable = False
        if holder[at] is victim:  # it began inside a segment of the trace
            holder[at] = parent
        parent.last_use = max(parent.last_use, victim.last_use)
        parent.children -= 1
        if not parent.children and parent.parent is not None:
            parent.is_evictable = True
            policy.release(parent)
    return blocks
