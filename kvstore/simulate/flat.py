"""Simulation of independent blocks, for comparison with simulators of other caches.

Each block is looked up, stored and evicted by itself, in prompt order. A block may hit behind a gap, where
no engine could use it; ``runs`` count the leading hits. Two policies are filled as in libCacheSim, unlike
their papers and the tiers, so that equal algorithms are compared: docs/decisions/0035.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from typing_extensions import override

from kvstore.index.prefix_tree import NEVER
from kvstore.policy.protocol import Policy
from kvstore.policy.queues import S3Fifo, Slru
from kvstore.policy.registry import make_policy
from kvstore.trace.columns import Trace


class _Block:
    """A block as a segment without parent and children."""

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


def simulate_flat(
    trace: Trace, policy: Policy[Any], capacity: int, *, room: int | None = None
) -> tuple[list[int], list[int]]:
    """Return, for each request, the leading hits and all hits, in blocks.

    The first ``room`` blocks of a request are stored, by default all. Cost: O(log n) per reference.
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
            elif capacity and (room is None or at < room):
                if len(held) == capacity:
                    victim = policy.victim(1)
                    assert victim is not None, "every block is evictable"
                    policy.remove(victim)
                    victim.is_evictable = False
                    del held[victim.block]
                fresh = held[block] = _Block(block, now)
                policy.insert(fresh)
        runs.append(run)
        hits.append(found)
    return runs, hits


class _FilledS3Fifo(S3Fifo[Any]):
    """S3-FIFO as in libCacheSim since 2024.

    Unlike in the paper, until the cache is full, a new block enters the main queue if the small one is full.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._room = int(capacity * self.NEW_SHARE)
        self._is_full = False

    @override
    def insert(self, segment: Any) -> None:
        super().insert(segment)
        if not self._is_full and self._new.blocks > self._room:
            self.move(segment, self._kept, self._end())

    @override
    def victim(self, blocks: int) -> Any:
        self._is_full = True
        return super().victim(blocks)


class _FilledSlru(Slru[Any]):
    """SLRU as in libCacheSim: a new block enters the lowest queue with room."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._room = capacity // self.QUEUES

    @override
    def limit(self) -> float:
        return self._room

    @override
    def insert(self, segment: Any) -> None:
        super().insert(segment)
        lowest, *others = self._queues
        if lowest.blocks > self._room:
            for queue in others:
                if queue.blocks < self._room:
                    self.move(segment, queue, self._end())
                    break


_FILLED: Mapping[str, Callable[[int], Policy[Any]]] = {"s3fifo": _FilledS3Fifo, "slru": _FilledSlru}


def flat_policy(name: str, capacity: int) -> Policy[Any]:
    """Return a new policy for ``capacity`` blocks, filled as libCacheSim fills it.

    Raises:
        ValueError: for an unknown policy.
    """
    return _FILLED[name](capacity) if name in _FILLED else make_policy(name)
