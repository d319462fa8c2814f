"""The index of a tier over a trace whose paths are known: the same events, without any key.

``PrefixIndex`` compares keys, block by block, because it does not know what comes. Here every path
is a row of segments that were cut beforehand, so a match is a look at the last segments of a row,
and a piece of the tree is two depths. A policy cannot tell the two apart: it hears the same events
about the same pieces in the same order, which ``tests/simulate`` checks for each policy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from kvstore.index import NEVER
from kvstore.policy.protocol import Policy
from kvstore.trace.paths import Paths


class Piece:
    """A run of blocks of the tree, as a ``Segment`` is one of an index."""

    __slots__ = (
        "bottom",
        "children",
        "expires",
        "is_evictable",
        "last_use",
        "parent",
        "rows",
        "start",
        "stop",
    )

    def __init__(
        self, parent: Piece | None, bottom: int, start: int, stop: int, now: int, rows: Rows
    ) -> None:
        self.parent = parent
        self.bottom = bottom
        """The segment of the trace that its last block is in."""
        self.start = start
        self.stop = stop
        self.children = 0
        self.last_use = now
        self.expires = NEVER
        self.is_evictable = True
        self.rows = rows

    def key(self, number: int) -> int:
        """Return a number for a block of the piece that no other block of the trace has."""
        rows, at = self.rows, self.bottom
        while rows.starts[at] > number:
            at = rows.parents[at]
        return rows.firsts[at] + number


class Rows:
    """Paths as lists, which plain Python reads fastest; shared by all simulations of a trace."""

    def __init__(self, paths: Paths) -> None:
        refs, offsets = paths.refs.tolist(), paths.offsets.tolist()
        self.paths: list[list[int]] = [refs[start:stop] for start, stop in pairwise(offsets)]
        self.starts: list[int] = paths.starts.tolist()
        self.stops: list[int] = paths.stops.tolist()
        self.parents: list[int] = paths.parents.tolist()
        first = paths.blocks.cumsum() - paths.blocks
        self.firsts: list[int] = (first - paths.starts).tolist()
        """What to add to a block's depth for its number among all blocks, by segment."""


Observer = Callable[[int, int], object]
"""Hear which block was evicted for which request: the request, the block's number."""


def simulate_policy(
    rows: Rows, policy: Policy[Any], capacity: int, evicted: Observer | None = None
) -> list[int]:
    """Return the hit of each request, in blocks, in a cache of ``capacity`` blocks.

    A request is looked up and stored at once. Its path is pinned meanwhile, and what is longer than
    the cache keeps its head. Time is logical: a request uses what it hits, then stores the rest.

    ``evicted`` hears of each evicted block, for tests.

    Cost: O(log n) a request, and as much for each piece that comes or goes.
    """
    hits: list[int] = []
    starts, stops = rows.starts, rows.stops
    holder: list[Piece | None] = [None] * len(starts)
    """The piece that has the last cached block of each segment of the trace."""
    root = Piece(None, -1, 0, 0, 0, rows)
    root.is_evictable = False
    free = capacity
    now = 0
    for request, path in enumerate(rows.paths):
        # What is cached is a prefix of the path, so look from its end.
        at = len(path) - 1
        while at >= 0 and (piece := holder[path[at]]) is None:
            at -= 1
        if at < 0:
            hit, piece = 0, root
        else:
            assert piece is not None
            bottom = path[at]
            hit = piece.stop
            if stops[bottom] < hit:
                hit = stops[bottom]
                piece = _split(piece, bottom, hit, holder, rows, policy)
            now += 1
            piece.last_use = now
            policy.touch(piece)
        hits.append(hit)
        stop = min(stops[path[-1]], capacity) if path else 0
        if stop <= hit:
            continue
        missing = stop - hit
        now += 1
        piece.children += 1  # counted before it is there, which pins the path
        piece.is_evictable = False
        if missing > free:
            free += _evict(missing - free, holder, rows, policy, request, evicted)
        free -= missing
        last = len(path) - 1
        while starts[path[last]] >= stop:
            last -= 1
        fresh = Piece(piece, path[last], hit, stop, now, rows)
        if at < 0 or stops[path[at]] <= hit:
            at += 1
        for segment in path[at : last + 1]:
            holder[segment] = fresh
        policy.insert(fresh)
    return hits


def _split(
    lower: Piece,
    bottom: int,
    at: int,
    holder: list[Piece | None],
    rows: Rows,
    policy: Policy[Any],
) -> Piece:
    """Cut the blocks above depth ``at`` off as a new upper piece, as an index does."""
    upper = Piece(lower.parent, bottom, lower.start, at, lower.last_use, rows)
    upper.children = 1
    upper.is_evictable = False
    lower.parent, lower.start = upper, at
    starts, start = rows.starts, upper.start
    holder[bottom] = upper
    while starts[bottom] > start:
        bottom = rows.parents[bottom]
        holder[bottom] = upper
    policy.split(upper, lower)
    return upper


def _evict(
    blocks: int,
    holder: list[Piece | None],
    rows: Rows,
    policy: Policy[Any],
    request: int,
    evicted: Observer | None,
) -> int:
    """Remove ``blocks`` blocks in the policy's order, each piece from its tail."""
    starts, parents = rows.starts, rows.parents
    gone = 0
    while gone < blocks:
        victim: Piece | None = policy.victim()
        assert victim is not None, "all but the path may go"
        size = victim.stop - victim.start
        count = min(size, blocks - gone)
        policy.evict(victim, count)
        stop, at = victim.stop - count, victim.bottom
        if evicted is not None:
            for number in reversed(range(stop, victim.stop)):
                evicted(request, victim.key(number))
        gone += count
        while at >= 0 and starts[at] >= stop:
            holder[at] = None
            at = parents[at]
        if count < size:
            victim.stop, victim.bottom = stop, at
            policy.resize(victim)
            continue
        parent = victim.parent
        assert parent is not None
        policy.remove(victim)
        victim.is_evictable = False
        if at >= 0 and holder[at] is victim:  # it began inside a segment of the trace
            holder[at] = parent
        parent.children -= 1
        parent.last_use = max(parent.last_use, victim.last_use)
        if not parent.children and parent.parent is not None:
            parent.is_evictable = True
            policy.release(parent)
    return gone
