"""A trace as paths of segments: what simulation works on.

Blocks that always occur together are one segment, which ends where paths fork and where a request
ends. So every request is a whole number of segments, 8 to 78 times fewer than blocks on real traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.trace.chained import STEP, parents
from kvstore.trace.columns import Ints, Numbers, Trace, ends


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Requests as rows of segment numbers, from the root down.

    Invariants:
        A segment has one parent and one depth. A request that has a segment has all of it.
    """

    trace: Trace
    refs: Numbers
    """Segments of all requests, end to end, [segment references]."""
    offsets: Ints
    """Where each request's begin in ``refs``, [requests + 1]."""
    starts: Ints
    """Depth of each segment's first block, [segments]."""
    blocks: Ints
    """How many blocks each segment has, [segments]."""
    parents: Numbers
    """The segment above each, -1 at the root, [segments]."""

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.starts)

    @property
    def stops(self) -> Ints:
        """Depth of the block after each segment's last, [segments]."""
        return self.starts + self.blocks


def chains_of(trace: Trace) -> Chains:
    """Cut a trace into segments.

    Raises:
        TraceError: if it has no block ids, or if they name blocks and not prefixes.

    Cost: two passes over the references in NumPy, 12 bytes a distinct block and 1 a reference.
    """
    if not trace.references:
        raise TraceError(
            trace.name,
            "has lengths but no block ids, so nothing can be said about reuse; "
            "expected hash_ids or chunk_hashes",
        )
    parent = parents(trace)
    is_head = _heads(trace, parent)
    at = np.flatnonzero(_looked_up(is_head, trace.blocks))
    first_blocks = trace.blocks[at]
    numbers = np.cumsum(is_head, dtype=np.int32) - np.int32(1)
    refs = numbers[first_blocks]
    offsets = np.searchsorted(at, trace.offsets)
    lengths = np.diff(at, append=trace.references)  # a reference has all of its segment
    segments = int(is_head.sum())
    starts, blocks = np.empty(segments, np.int64), np.empty(segments, np.int64)
    request = np.repeat(np.arange(len(trace)), np.diff(offsets))
    starts[refs] = at - trace.offsets[request]
    blocks[refs] = lengths
    above = np.full(segments, -1, np.int32)
    above[refs[1:]] = refs[:-1]
    above[starts == 0] = -1
    return Chains(trace, refs, offsets, starts, blocks, above)


def _heads(trace: Trace, parent: Numbers) -> NDArray[np.bool_]:
    """Say of each block whether a segment begins with it: its parent ends a path, or forks."""
    children = np.bincount(parent[parent >= 0], minlength=trace.distinct_blocks)
    is_last = children > 1
    used = trace.chain_blocks > 0
    is_last[trace.blocks[trace.offsets[1:][used] - 1]] = True
    return (parent < 0) | is_last[np.maximum(parent, 0)]


def _looked_up(values: NDArray[np.bool_], numbers: Numbers) -> NDArray[np.bool_]:
    """Return ``values[numbers]`` without NumPy's copy of the numbers as 64 bits at once."""
    out = np.empty(len(numbers), np.bool_)
    for start in range(0, len(numbers), STEP):
        out[start : start + STEP] = values[numbers[start : start + STEP]]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Consecutive uses of the same blocks: which request used them before, and which does now.

    All blocks that a request shares with one earlier last use lie in a row on its path, so they are
    one link. What was never used before is in no link.

    Order: by the later request, then from the root down.
    """

    earlier: Ints
    """The request that used the blocks before, [links]."""
    later: Ints
    """The request that uses them again, [links]."""
    start: Ints
    """Depth of the first block, [links]."""
    blocks: Ints
    """How many blocks, [links]."""
    offsets: Ints
    """Where the links to each request begin, [requests + 1]."""


def links_of(paths: Chains) -> Links:
    """Join the uses of each segment into links. Cost: one sort of the segment references."""
    refs = paths.refs
    request = np.repeat(np.arange(len(paths.trace)), np.diff(paths.offsets))
    order = np.argsort(refs, kind="stable")
    before = np.full(len(refs), -1, np.int64)
    again = refs[order[1:]] == refs[order[:-1]]
    before[order[1:][again]] = request[order[:-1][again]]
    is_first = np.ones(len(refs), np.bool_)
    is_first[1:] = (before[1:] != before[:-1]) | (request[1:] != request[:-1])
    at = np.flatnonzero(is_first)
    sizes = np.add.reduceat(paths.blocks[refs], at) if len(at) else np.zeros(0, np.int64)
    used = before[at] >= 0
    at, sizes = at[used], sizes[used]
    later = request[at]
    counts = np.bincount(later, minlength=len(paths.trace))
    return Links(before[at], later, paths.starts[refs[at]], sizes, ends(counts))
