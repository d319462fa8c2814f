"""A trace as columns: who asked when, how long it was, and which blocks it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
"""Session of a request that names none."""
SECOND, MILLISECOND = 1_000_000, 1_000
"""In microseconds, the unit of ``Trace.arrival``."""

Ints = NDArray[np.int64]
Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Invariants:
        ``arrival`` never falls. Block ids are dense: every number below ``distinct_blocks`` occurs.
        An id is *chained*: it names a block and everything before it, so an id has one parent.
        A trace of lengths alone has no block ids at all, and ``block_tokens`` 0.

    Cost: 4 bytes a block reference, 36 bytes a request.
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
    """Number of each request's session, [requests]; ``UNKNOWN`` where it names none."""
    offsets: Ints
    """Where each request's blocks begin in ``blocks``, [requests + 1]."""
    blocks: Numbers
    """Ids of all prompts' blocks, in prefix order, end to end, [references]."""
    distinct_blocks: int
    reordered: int = 0
    """Requests that came before one with an earlier time, and were sorted."""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def references(self) -> int:
        """How many block ids it holds in all."""
        return len(self.blocks)

    @property
    def chain_blocks(self) -> Ints:
        """Blocks of each prompt, [requests]."""
        return np.diff(self.offsets)

    def chain(self, request: int) -> Numbers:
        """Return the block ids of one prompt, in prefix order."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def take(self, requests: Ints) -> Trace:
        """Return a trace of some requests, which are given in ascending order."""
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
    """Return where runs of these sizes begin and end, laid end to end: one more than the sizes."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def dense(ids: NDArray[np.integer]) -> tuple[Numbers, int]:
    """Return non-negative ids as numbers without gaps, in the same order, and how many there are.

    Cost: one pass and a byte an id where ids are about as many as references; else a sort.
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
