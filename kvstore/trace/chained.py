"""Chained block ids: checking that ids name prefixes, and re-keying those that name blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.trace.columns import Numbers, Trace

STEP = 1 << 22
"""References per batch: it bounds the memory of temporary arrays."""


def parents(trace: Trace) -> Numbers:
    """Return the parent of each block, -1 for a first one, [distinct blocks].

    Raises ``TraceError`` if an id has two parents, so that it names a block and not a prefix. With one
    parent each, no id is at two depths or twice in a request.
    """
    parent = np.full(trace.distinct_blocks, -2, np.int32)
    for blocks, above in _steps(trace):
        parent[blocks] = above
    for blocks, above in _steps(trace):
        wrong = np.flatnonzero(parent[blocks] != above)
        if len(wrong):
            block = int(blocks[wrong[0]])
            msg = (
                f"block id {block} (in order of first appearance or size) follows two different blocks, so ids "
                "name blocks and not prefixes; re-key them (--unchained rekey)"
            )
            raise TraceError(trace.name, msg)
    return parent


def _steps(trace: Trace) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield batches of references with the id before each."""
    blocks = trace.blocks
    firsts = trace.offsets[:-1][trace.chain_blocks > 0]
    for start in range(0, len(blocks), STEP):
        stop = min(start + STEP, len(blocks))
        above = np.empty(stop - start, np.int32)
        above[1:] = blocks[start : stop - 1]
        above[0] = blocks[start - 1] if start else -1
        first, last = np.searchsorted(firsts, (start, stop))
        above[firsts[first:last] - start] = -1
        yield blocks[start:stop], above


def rekeyed(blocks: Numbers, offsets: NDArray[np.int64]) -> tuple[Numbers, int]:
    """Return ids that name a block and its parent, numbered by first appearance."""
    numbers: dict[tuple[int, int], int] = {}
    out = np.empty(len(blocks), np.int32)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        above = -1
        for at, block in enumerate(blocks[start:stop].tolist(), start):
            above = numbers.setdefault((above, block), len(numbers))
            out[at] = above
    return out, len(numbers)
