"""The index of a tier over a trace whose paths are known: the same events, without any key.

``PrefixIndex`` compares keys, block by block, because it does not know what comes. Here every path
is a row of segments that were cut beforehand, so a match is a walk up from the last of them, and a piece
of the tree is two depths. A policy cannot tell the two apart: it hears the same events
about the same pieces in the same order, which ``tests/simulate`` checks for each policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.index.prefix_tree import NEVER
from kvstore.policy.protocol import Policy
from kvstore.trace.chains import Chains


class Node:
    """A run of blocks of the tree, as a ``Segment`` is one of an index."""

    __slots__ = (
        "bottom",
        "children",
        "is_evictable",
        "last_use",
        "parent",
        "rows",
        "start",
        "stop",
    )

    expires = NEVER

    def __init__(
        self, parent: Node | None, bottom: int, start: int, stop: int, now: int, rows: ChainLists
    ) -> None:
        self.parent = parent
        self.bottom = bottom
        """The segment of the trace that its last block is in."""
        self.start = start
        self.stop = stop
        self.children = 0
        self.last_use = now
        self.is_evictable = True
        self.rows = rows

    def key(self, number: int) -> int:
        """Return a number for a block of the piece that no other block of the trace has."""
        rows, at = self.rows, self.bottom
        while rows.starts[at] > number:
            at = rows.parents[at]
        return rows.firsts[at] + number


class ChainLists:
    """Chains as lists, which plain Python reads fastest; shared by all simulations of a trace.

    Number -1 is the root, above all segments. It has no blocks, and no depth is above its start.
    """

    def __init__(self, paths: Chains) -> None:
        refs = np.append(paths.refs, -1)
        is_empty = np.diff(paths.offsets) == 0
        self.lasts: list[int] = np.where(is_empty, -1, refs[paths.offsets[1:] - 1]).tolist()
        """The deepest segment of each request, which tells its whole path."""
        self.starts: list[int] = [*paths.starts.tolist(), -1]
        self.stops: list[int] = [*paths.stops.tolist(), 0]
        self.parents: list[int] = [*paths.parents.tolist(), -1]
        first = paths.blocks.cumsum() - paths.blocks
        self.firsts: list[int] = (first - paths.starts).tolist()
        """What to add to a block's depth for its number among all blocks, by segment."""


Observer = Callable[[int, int], object]
"""Hear which block was evicted for which request: the request, the block's number."""


def simulate_policy(
    rows: ChainLists,
    policy: Policy[Any],
    capacity: int,
    evicted: Observer | None = None,
    *,
    room: int | None = None,
) -> list[int]:
    """Return the hit of each request, in blocks, in a cache of ``capacity`` blocks.

    A request is looked up and stored at once. Its path is pinned meanwhile, and what is longer than
    ``room``, by default the whole cache, keeps its head. Time is logical: a request uses what it
    hits, then stores the rest.

    ``evicted`` hears of each evicted block, for tests.

    Cost: O(log n) a request, and as much for each piece that comes or goes.
    """
    hits: list[int] = []
    starts, stops, parents = rows.starts, rows.stops, rows.parents
    root = Node(None, -1, 0, 0, 0, rows)
    root.is_evictable = False
    holder: list[Node | None] = [None] * len(starts)
    """The piece that has the last cached block of each segment of the trace."""
    holder[-1] = root
    free = capacity
    longest = capacity if room is None else min(room, capacity)
    now = 0
    for request, deepest in enumerate(rows.lasts):
        last = at = deepest
        while (piece := holder[at]) is None:
            at = parents[at]
        hit = piece.stop
        if stops[at] < hit:
            hit = stops[at]
            piece = _split(piece, at, holder, rows, policy)
        if hit:
            now += 1
            piece.last_use = now
            policy.touch(piece)
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
        piece.children += 1  # counted before it is there, which pins the path
        piece.is_evictable = False
        if missing > free:
            free += _evict(missing - free, holder, rows, policy, request, evicted)
        free -= missing
        fresh = Node(piece, last, hit, stop, now, rows)
        while starts[last] >= hit:
            holder[last] = fresh
            last = parents[last]
        if stops[last] > hit:  # it goes on inside a segment of the trace
            holder[last] = fresh
        policy.insert(fresh)
    return hits


def _split(
    lower: Node, bottom: int, holder: list[Node | None], rows: ChainLists, policy: Policy[Any]
) -> Node:
    """Cut the blocks down to the end of ``bottom`` off as a new upper piece, as an index does."""
    starts, parents = rows.starts, rows.parents
    at, start = rows.stops[bottom], lower.start
    upper = Node(lower.parent, bottom, start, at, lower.last_use, rows)
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
    rows: ChainLists,
    policy: Policy[Any],
    request: int,
    evicted: Observer | None,
) -> int:
    """Remove ``blocks`` blocks in the policy's order, each piece from its tail."""
    starts, parents = rows.starts, rows.parents
    left = blocks
    while left:
        victim: Node | None = policy.victim(left)
        assert victim is not None, "all but the path may go"
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
