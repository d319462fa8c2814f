"""Blocks without prefixes: what simulators of other caches do. For checks against them.

Each block is looked up and stored by itself, in prompt order, and any may go. So a block is hit
though one before it is gone, where no engine could use it; ``runs`` count what it could.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvstore.index import NEVER
from kvstore.policy.protocol import Policy
from kvstore.trace.columns import Trace


class _Block:
    """A block as a segment of its own that hangs on nothing."""

    __slots__ = ("block", "is_evictable", "last_use")

    parent = None
    start, stop = 0, 1
    expires = NEVER

    def __init__(self, block: int, now: int) -> None:
        self.block = block
        self.last_use = now
        self.is_evictable = True

    def key(self, number: int) -> int:  # noqa: ARG002 - it has one block
        """Return the number of its block."""
        return self.block


def simulate_flat(trace: Trace, policy: Policy[Any], capacity: int) -> tuple[list[int], list[int]]:
    """Return, for each request, the leading run of hits and all hits, in blocks.

    Cost: O(log n) a block reference.
    """
    runs: list[int] = []
    hits: list[int] = []
    held: dict[int, _Block] = {}
    now = 0
    offsets = trace.offsets.tolist()
    for start, stop in pairwise(offsets):
        run = found = 0
        for at, block in enumerate(trace.blocks[start:stop].tolist()):
            now += 1
            known = held.get(block)
            if known is not None:
                known.last_use = now
                policy.touch(known)
                run += found == at
                found += 1
            elif capacity:
                if len(held) == capacity:
                    victim = policy.victim(1)
                    assert victim is not None, "any block may go"
                    policy.remove(victim)
                    victim.is_evictable = False
                    del held[victim.block]
                fresh = held[block] = _Block(block, now)
                policy.insert(fresh)
        runs.append(run)
        hits.append(found)
    return runs, hits
