"""Simulation of several tiers, one below the other. The rules: ``docs/decisions/0033``.

Each tier is a ``PrefixIndex`` with a policy, as in a store; this module decides which tier stores which chain,
and which evicted blocks move down. ``tests/simulate`` has a second implementation, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, Literal, TypeVar

import numpy as np
from typing_extensions import override

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.index import plan
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.registry import make_policy
from kvstore.simulate.forest import Forest
from kvstore.trace.chained import parents
from kvstore.trace.columns import Ints, Trace

Inclusion = Literal["inclusive", "exclusive"]
Write = Literal["through", "on-evict"]
Index = TypeVar("Index", bound=PrefixIndex)


@dataclass(frozen=True, slots=True)
class Tier:
    """Options of one tier."""

    name: str
    blocks: int
    """Capacity."""
    write: Write
    """When it stores a chain: on each request, as the first tier does, or on eviction by the tier above."""
    bandwidth: float | None = None
    """Read bandwidth in bytes per second; None for reads that take no time."""
    latency: float = 0.0
    """Seconds before the first byte, once per request that reads from it."""
    policy: str | None = None
    """Its own policy; None for the simulated one."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Traffic of the tiers, [requests, tiers], in blocks."""

    served: Ints
    """Blocks that each request read from each tier, and from no tier above: consecutive ranges of its chain."""
    written: Ints
    """Blocks written to each tier while the request was served."""


class Keys:
    """Map between the blocks of a trace and index keys."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._parents = parents(trace)
        request = np.repeat(np.arange(len(trace)), trace.chain_blocks)
        self._request = np.empty(trace.distinct_blocks, np.int32)
        self._request[trace.blocks] = request
        self._depth = np.empty(trace.distinct_blocks, np.int32)
        self._depth[trace.blocks] = np.arange(trace.references) - trace.offsets[:-1][request]

    def chain(self, request: int, blocks: int | None = None) -> bytes:
        """Return the concatenated keys of a request's first ``blocks`` blocks, by default of all."""
        words = np.zeros((len(ids := self._trace.chain(request)[:blocks]), 2), ">u8")
        words[:, 1] = ids
        return words.tobytes()

    def chain_to(self, key: BlockKey) -> bytes:
        """Return the keys of the chain that ends with a block."""
        block = _number(key)
        return self.chain(int(self._request[block]), self.depth(key) + 1)

    def depth(self, key: BlockKey) -> int:
        """Return the number of blocks before a block."""
        return int(self._depth[_number(key)])

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Return the block before a block; None for a first one."""
        parent = int(self._parents[_number(key)])
        return None if parent < 0 else BlockKey(parent.to_bytes(KEY_BYTES, "big"))

    def runs(self, evicted: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        """Yield evicted blocks as runs of one chain each, the last block of a run first."""
        run: list[BlockKey] = []
        for key in evicted:
            if run and self.parent(run[-1]) != key:
                yield run
                run = []
            run.append(key)
        if run:
            yield run


def _number(key: BlockKey) -> int:
    return int.from_bytes(key, "big")


def simulate_tiers(
    trace: Trace,
    tiers: Sequence[Tier],
    inclusion: Inclusion,
    policy: str = "lru",
    request_share: float | None = None,
) -> Flow:
    """Simulate tiers, the fastest first. ``policy`` is that of tiers without their own.

    ``request_share`` limits the blocks of one request in each tier, as a share of the tier. Raises
    ``ValueError`` for an unknown policy, or an exclusive tier below the first with write=through.
    Cost: O(blocks) per request, in bytes compared and copied; 48 bytes per cached block.
    """
    check_tiers(tiers, inclusion)
    policies = [make_policy(tier.policy or policy) for tier in tiers]
    keys = Keys(trace)
    if inclusion == "inclusive":
        indexes = [PrefixIndex(each) for each in policies]
        return _Inclusive(keys, tiers, indexes, request_share).run(len(trace))
    forests = [Forest(each, keys.parent) for each in policies]
    return _Exclusive(keys, tiers, forests, request_share).run(len(trace))


def check_tiers(tiers: Sequence[Tier], inclusion: Inclusion) -> None:
    """Raise ``ValueError`` if tiers contradict each other."""
    if inclusion == "exclusive" and any(tier.write == "through" for tier in tiers[1:]):
        msg = "tiers are exclusive: expected write=on-evict below the first, found write=through"
        raise ValueError(msg)


class _Tiers(Generic[Index]):
    """Base of both kinds of tiers: an index per tier, logical time, and the traffic."""

    def __init__(
        self,
        keys: Keys,
        tiers: Sequence[Tier],
        indexes: Sequence[Index],
        request_share: float | None,
    ) -> None:
        self._keys = keys
        self._tiers = tiers
        self._rooms = [plan.request_blocks(tier.blocks, request_share) for tier in tiers]
        """Most blocks of one chain in each tier."""
        self._indexes = indexes
        self._now = 0
        self._written = [0] * len(tiers)

    def run(self, requests: int) -> Flow:
        """Serve all requests in order."""
        served = np.zeros((requests, len(self._tiers)), np.int64)
        written = np.zeros_like(served)
        for request in range(requests):
            served[request] = self._serve(self._keys.chain(request))
            written[request] = self._written
            self._written = [0] * len(self._tiers)
        return Flow(served, written)

    def _serve(self, chain: bytes) -> list[int]:
        """Look up and store a chain; return the blocks read from each tier."""
        raise NotImplementedError

    def _tick(self) -> int:
        self._now += 1
        return self._now


class _Inclusive(_Tiers[PrefixIndex]):
    """Tiers that each hold whole prefixes, independent of the tiers above."""

    @override
    def _serve(self, chain: bytes) -> list[int]:
        served, reach, used = [], 0, []
        for index in self._indexes:
            position = index.match(chain)
            segment = index.split_at(position)
            if position.depth:
                index.touch(segment, self._tick())
                index.pin(segment)
                used.append((index, segment))
            served.append(max(0, position.depth - reach))
            reach = max(reach, position.depth)
        for number, tier in enumerate(self._tiers):
            if number == 0 or tier.write == "through":
                self._store(number, chain)
        for index, segment in used:
            index.unpin(segment)
        return served

    def _store(self, number: int, chain: bytes) -> None:
        """Store the missing blocks of a chain in a tier; evicted and excess blocks move down."""
        index, capacity = self._indexes[number], self._tiers[number].blocks
        asked = len(chain) // KEY_BYTES
        position = index.match(chain)
        missing = min(asked, self._rooms[number]) - position.depth
        evicted: list[BlockKey] = []
        fresh = 0
        if missing > 0:
            segment = index.split_at(position)
            index.pin(segment)
            evicted = index.evict(max(0, missing - (capacity - index.blocks)))
            fresh = min(missing, capacity - index.blocks)  # fewer if pinned blocks stay
            if fresh:
                start = position.depth * KEY_BYTES
                keys = chain[start : start + fresh * KEY_BYTES]
                index.insert(segment, keys, now=self._tick(), namespace_id=0)
            index.unpin(segment)
        self._written[number] += fresh
        below = number + 1
        if below == len(self._tiers) or self._tiers[below].write == "through":
            return
        for run in self._keys.runs(evicted):
            self._store(below, self._keys.chain_to(run[0]))
        if position.depth + fresh < asked:
            self._store(below, chain)


class _Exclusive(_Tiers[Forest]):
    """Tiers without a common block: each holds one range of a chain, the first tier the first one."""

    _kept: list[int]
    """Blocks of the current chain that stay in each tier."""

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """Ranges of a chain that the tiers store: the blocks that do not fit the tiers above."""
        return list(pairwise(np.cumsum([0, *self._rooms]).tolist()))

    @override
    def _serve(self, chain: bytes) -> list[int]:
        reach, served = 0, []
        used: list[tuple[Forest, Segment]] = []
        ends: list[Segment] = []
        """The last segment of the chain that stays in each tier: the parent of stored blocks."""
        self._kept = []
        for index, (first, _) in zip(self._indexes, self._ranges, strict=True):
            found = index.match(chain[reach * KEY_BYTES :]).depth
            served.append(found)
            rising = min(found, max(0, first - reach))  # stored by the tiers above
            if rising:
                index.remove(chain[reach * KEY_BYTES : (reach + rising) * KEY_BYTES])
            segment = index.root
            if found > rising:
                start = (reach + rising) * KEY_BYTES
                segment = index.split_at(index.match(chain[start : (reach + found) * KEY_BYTES]))
                index.touch(segment, self._tick())
                index.pin(segment)
                used.append((index, segment))
            ends.append(segment)
            self._kept.append(found - rising)
            reach += found
        for number, segment in enumerate(ends):
            self._store(number, chain, segment)
        for index, segment in used:
            index.unpin(segment)
        return served

    def _store(self, number: int, chain: bytes, end: Segment) -> None:
        """Store the missing blocks of a tier's range below ``end``; evicted blocks move down."""
        index, (first, stop) = self._indexes[number], self._ranges[number]
        start = first + self._kept[number]
        missing = min(len(chain) // KEY_BYTES, stop) - start
        if missing <= 0:
            return
        evicted = index.evict(max(0, missing - (self._tiers[number].blocks - index.blocks)))
        keys = chain[start * KEY_BYTES : (start + missing) * KEY_BYTES]
        index.add(end, keys, start, self._tick())
        self._written[number] += missing
        self._sink(number + 1, evicted)

    def _sink(self, number: int, evicted: Sequence[BlockKey]) -> None:
        """Store in a tier the blocks that the tier above evicted for one request, the last first."""
        if number == len(self._tiers) or not evicted:
            return
        index, capacity = self._indexes[number], self._tiers[number].blocks
        cut = max(0, len(evicted) - (capacity - self._kept[number]))
        passed, taken = evicted[:cut], evicted[cut:]
        out = index.evict(max(0, len(taken) - (capacity - index.blocks)))
        for run in self._keys.runs(taken):
            keys = b"".join(reversed(run))
            index.add(index.root, keys, self._keys.depth(run[-1]), self._tick())
        self._written[number] += len(taken)
        self._sink(number + 1, [*out, *passed])
