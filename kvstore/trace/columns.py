"""Trace in memory: arrival times, lengths, sessions and block ids of requests, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
"""Session number of a request without a session."""
SECOND, MILLISECOND = 1_000_000, 1_000
"""In microseconds, the unit of ``Trace.arrival``."""

Ints = NDArray[np.int64]
Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Invariants: ``arrival`` is non-decreasing. Block ids are dense, from 0 to ``distinct_blocks`` - 1, and
        *chained*: an id names a block and all blocks before it, so it has one parent. A trace of lengths
        alone has no block ids, and ``block_tokens`` 0.
    Cost: 4 bytes per block reference, 36 bytes per request.
    """

    name: str
    block_tokens: int
    arrival: Ints
    """Microseconds since the first request, [requests]."""
    input_tokens: Ints
    """Tokens of each prompt, [requests]."""
    output_tokens: Ints
    """Tokens of each answer, [requests]."""
    sessions: Numbers
    """Session number of each request, [requests]; ``UNKNOWN`` without a session."""
    offsets: Ints
    """Start of each request's blocks in ``blocks``, [requests + 1]."""
    blocks: Numbers
    """Concatenated block ids of all prompts, in prefix order, [references]."""
    distinct_blocks: int
    reordered: int = 0
    """Requests that were out of order in the file."""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def references(self) -> int:
        """Number of block ids."""
        return len(self.blocks)

    @property
    def chain_blocks(self) -> Ints:
        """Blocks of each prompt, [requests]."""
        return np.diff(self.offsets)

    def chain(self, request: int) -> Numbers:
        """Return the block ids of one prompt, in prefix order."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def take(self, requests: Ints) -> Trace:
        """Return a trace of some requests, given in ascending order."""
        sizes = self.chain_blocks[requests]
        offsets = ends(sizes)
        within = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], sizes)
        blocks = self.blocks[np.repeat(self.offsets[:-1][requests], sizes) + within]
        blocks, distinct = dense(blocks)
        arrival = self.arrival[requests]
        return replace(
            self,
            arrival=arrival - (arrival[0] if len(arrival) else 0),
            input_tokens=self.input_tokens[requests],
            output_tokens=self.output_tokens[requests],
            sessions=self.sessions[requests],
            offsets=offsets,
            blocks=blocks,
            distinct_blocks=distinct,
            reordered=0,
        )


def ends(sizes: NDArray[np.integer] | Sequence[int]) -> Ints:
    """Return the boundaries of consecutive ranges of these sizes, [sizes + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def dense(ids: NDArray[np.integer]) -> tuple[Numbers, int]:
    """Return non-negative ids as dense numbers in the same order, and the number of distinct ids.

    Cost: one pass and a byte per id where ids are about as many as references; otherwise a sort.
    """
    if not len(ids):
        return ids.astype(np.int32), 0
    top = int(ids.max()) + 1
    if top > 4 * len(ids) + 1024:
        found, numbers = np.unique(ids, return_inverse=True)
        return numbers.astype(np.int32), len(found)
    seen = np.zeros(top, np.bool_)
    seen[ids] = True
    if seen.all():
        return ids.astype(np.int32, copy=False), top
    numbers = np.cumsum(seen, dtype=np.int32) - 1
    return numbers[ids], int(seen.sum())
