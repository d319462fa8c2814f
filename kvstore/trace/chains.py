"""A trace as chains of segments: the input of simulation.

A segment ends where chains fork and where a request ends, so a request is a whole number of segments:
8 to 78 times fewer than blocks on real traces.
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
    """The chain of each request, as segment numbers from the root down.

    Invariants: A segment has one parent and one depth. A request contains whole segments only.
    """

    trace: Trace
    refs: Numbers
    """Concatenated segments of all requests, [segment references]."""
    offsets: Ints
    """Start of each request's segments in ``refs``, [requests + 1]."""
    starts: Ints
    """Depth of each segment's first block, [segments]."""
    blocks: Ints
    """Blocks of each segment, [segments]."""
    parents: Numbers
    """Parent of each segment, -1 for the root, [segments]."""

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.starts)

    @property
    def stops(self) -> Ints:
        """Depth of the block after each segment's last, [segments]."""
        return self.starts + self.blocks


def chains_of(trace: Trace) -> Chains:
    """Split a trace into segments.

    Raises ``TraceError`` if it has no block ids, or ids that name blocks and not prefixes.
    Cost: two passes over the references in NumPy, 12 bytes per distinct block and 1 per reference.
    """
    if not trace.references:
        msg = "has lengths but no block ids, so reuse is unknown; expected hash_ids or chunk_hashes"
        raise TraceError(trace.name, msg)
    parent = parents(trace)
    is_head = _heads(trace, parent)
    at = np.flatnonzero(_looked_up(is_head, trace.blocks))
    first_blocks = trace.blocks[at]
    numbers = np.cumsum(is_head, dtype=np.int32) - np.int32(1)
    refs = numbers[first_blocks]
    offsets = np.searchsorted(at, trace.offsets)
    lengths = np.diff(at, append=trace.references)  # references contain whole segments
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
    """Return whether each block begins a segment: its parent ends a chain or forks."""
    children = np.bincount(parent[parent >= 0], minlength=trace.distinct_blocks)
    is_last = children > 1
    used = trace.chain_blocks > 0
    is_last[trace.blocks[trace.offsets[1:][used] - 1]] = True
    return (parent < 0) | is_last[np.maximum(parent, 0)]


def _looked_up(values: NDArray[np.bool_], numbers: Numbers) -> NDArray[np.bool_]:
    """Return ``values[numbers]`` in batches, as NumPy copies the numbers to 64 bits."""
    out = np.empty(len(numbers), np.bool_)
    for start in range(0, len(numbers), STEP):
        out[start : start + STEP] = values[numbers[start : start + STEP]]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Pairs of requests that use the same blocks one after the other.

    Blocks of a request with the same last use before it are consecutive in its chain: one link. Blocks
    without a use before are in no link. Order: by the later request, then from the root down.
    """

    earlier: Ints
    """The request with the last use before, [links]."""
    later: Ints
    """The request with the next use, [links]."""
    start: Ints
    """Depth of the first block, [links]."""
    blocks: Ints
    """Number of blocks, [links]."""
    offsets: Ints
    """Start of the links to each request, [requests + 1]."""


def links_of(chains: Chains) -> Links:
    """Join the uses of each segment into links. Cost: one sort of the segment references."""
    refs = chains.refs
    request = np.repeat(np.arange(len(chains.trace)), np.diff(chains.offsets))
    order = np.argsort(refs, kind="stable")
    before = np.full(len(refs), -1, np.int64)
    again = refs[order[1:]] == refs[order[:-1]]
    before[order[1:][again]] = request[order[:-1][again]]
    is_first = np.ones(len(refs), np.bool_)
    is_first[1:] = (before[1:] != before[:-1]) | (request[1:] != request[:-1])
    at = np.flatnonzero(is_first)
    sizes = np.add.reduceat(chains.blocks[refs], at) if len(at) else np.zeros(0, np.int64)
    used = before[at] >= 0
    at, sizes = at[used], sizes[used]
    later = request[at]
    counts = np.bincount(later, minlength=len(chains.trace))
    return Links(before[at], later, chains.starts[refs[at]], sizes, ends(counts))
