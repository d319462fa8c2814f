"""Several tiers, one below the other, with a trace running through them.

What a tier holds is a real ``PrefixIndex`` with a real policy, so nothing here decides what a tier
evicts. This module says which tier hears of which path, and what goes down when it is evicted.
``docs/decisions/0033`` has the rules; ``tests/simulate`` has them once more, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from typing_extensions import override

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.index import plan
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.protocol import Policy
from kvstore.policy.registry import make_policy
from kvstore.trace.chained import parents
from kvstore.trace.columns import Ints, Trace

Inclusion = Literal["inclusive", "exclusive"]
Write = Literal["through", "on-evict"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier, as a user describes it."""

    name: str
    blocks: int
    """What it holds at most."""
    write: Write
    """When it takes a path: with each request, or when the tier above evicts from it. The first tier
    takes each request."""
    bandwidth: float | None = None
    """Bytes a second it is read with; None where reading costs nothing."""
    latency: float = 0.0
    """Seconds before the first byte, once for each request that reads from it."""
    policy: str | None = None
    """Its own policy; None for the one that is simulated."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What went through the tiers, [requests, tiers], in blocks."""

    served: Ints
    """Blocks that each request read from each tier: those that no tier above has. The first tier's
    are the first blocks of the path, then the second's, and so on."""
    written: Ints
    """Blocks that came into each tier while the request was served."""


class Keys:
    """Blocks of a trace as keys of an index, and back."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._parents = parents(trace)
        request = np.repeat(np.arange(len(trace)), trace.chain_blocks)
        self._request = np.empty(trace.distinct_blocks, np.int32)
        self._request[trace.blocks] = request
        self._depth = np.empty(trace.distinct_blocks, np.int32)
        self._depth[trace.blocks] = np.arange(trace.references) - trace.offsets[:-1][request]

    def path(self, request: int, blocks: int | None = None) -> bytes:
        """Return the keys of a request's first blocks, end to end; by default of all."""
        words = np.zeros((len(ids := self._trace.chain(request)[:blocks]), 2), ">u8")
        words[:, 1] = ids
        return words.tobytes()

    def path_to(self, key: BlockKey) -> bytes:
        """Return the keys of a block and of all before it."""
        block = _number(key)
        return self.path(int(self._request[block]), self.depth(key) + 1)

    def depth(self, key: BlockKey) -> int:
        """Return how many blocks come before a block."""
        return int(self._depth[_number(key)])

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Return the block before a block, None of a first one."""
        parent = int(self._parents[_number(key)])
        return None if parent < 0 else BlockKey(parent.to_bytes(KEY_BYTES, "big"))

    def runs(self, gone: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        """Cut blocks in the order of their eviction where one is not the parent of the one before."""
        run: list[BlockKey] = []
        for key in gone:
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
    """Run a trace through tiers, the fastest first. ``policy`` is that of tiers without their own.

    ``request_share`` bounds what each tier takes of one path, as a share of the tier.

    Raises:
        ValueError: if a policy is unknown, or a tier below the first is written through though no
            block may be in two tiers.

    Cost: O(blocks) a request, in bytes compared and copied; 48 bytes a cached block.
    """
    check_tiers(tiers, inclusion)
    policies = [make_policy(tier.policy or policy) for tier in tiers]
    make = _Inclusive if inclusion == "inclusive" else _Exclusive
    return make(Keys(trace), tiers, policies, request_share).run(len(trace))


def check_tiers(tiers: Sequence[Tier], inclusion: Inclusion) -> None:
    """Raise ``ValueError`` if tiers contradict each other."""
    if inclusion == "exclusive" and any(tier.write == "through" for tier in tiers[1:]):
        msg = "tiers are exclusive, so what is below the first is written on-evict, found write=through"
        raise ValueError(msg)


class _Tiers:
    """What both kinds share: an index a tier, logical time, and what flowed."""

    def __init__(
        self,
        keys: Keys,
        tiers: Sequence[Tier],
        indexes: Sequence[PrefixIndex],
        request_share: float | None,
    ) -> None:
        self._keys = keys
        self._tiers = tiers
        self._rooms = [plan.request_blocks(tier.blocks, request_share) for tier in tiers]
        """Blocks of one path that each tier takes at most."""
        self._indexes = indexes
        self._now = 0
        self._written = [0] * len(tiers)

    def run(self, requests: int) -> Flow:
        """Serve all requests in order."""
        served = np.zeros((requests, len(self._tiers)), np.int64)
        written = np.zeros_like(served)
        for request in range(requests):
            served[request] = self._serve(self._keys.path(request))
            written[request] = self._written
            self._written = [0] * len(self._tiers)
        return Flow(served, written)

    def _serve(self, path: bytes) -> list[int]:
        """Look a path up and store it; return the blocks read from each tier."""
        raise NotImplementedError

    def _tick(self) -> int:
        self._now += 1
        return self._now


class _Inclusive(_Tiers):
    """Each tier holds whole prefixes, whatever the tiers above hold."""

    def __init__(
        self,
        keys: Keys,
        tiers: Sequence[Tier],
        policies: Sequence[Policy[Segment]],
        request_share: float | None,
    ) -> None:
        super().__init__(keys, tiers, [PrefixIndex(policy) for policy in policies], request_share)

    @override
    def _serve(self, path: bytes) -> list[int]:
        served, reach, used = [], 0, []
        for index in self._indexes:
            position = index.match(path)
            segment = index.settle(position)
            if position.depth:
                index.touch(segment, self._tick())
                index.pin(segment)
                used.append((index, segment))
            served.append(max(0, position.depth - reach))
            reach = max(reach, position.depth)
        for number, tier in enumerate(self._tiers):
            if number == 0 or tier.write == "through":
                self._store(number, path)
        for index, segment in used:
            index.unpin(segment)
        return served

    def _store(self, number: int, path: bytes) -> None:
        """Let a tier take what it lacks of a path, and the one below what leaves it for that."""
        index, capacity = self._indexes[number], self._tiers[number].blocks
        asked = len(path) // KEY_BYTES
        position = index.match(path)
        missing = min(asked, self._rooms[number]) - position.depth
        gone: list[BlockKey] = []
        fresh = 0
        if missing > 0:
            segment = index.settle(position)
            index.pin(segment)
            gone = index.evict(max(0, missing - (capacity - index.blocks)))
            fresh = min(missing, capacity - index.blocks)  # what requests use stays, so maybe less
            if fresh:
                start = position.depth * KEY_BYTES
                piece = path[start : start + fresh * KEY_BYTES]
                index.insert(segment, piece, now=self._tick(), namespace_id=0)
            index.unpin(segment)
        self._written[number] += fresh
        below = number + 1
        if below == len(self._tiers) or self._tiers[below].write == "through":
            return
        for run in self._keys.runs(gone):
            self._store(below, self._keys.path_to(run[0]))
        if position.depth + fresh < asked:
            self._store(below, path)


class _Exclusive(_Tiers):
    """Each block is in one tier at most; all tiers down to any one together hold whole prefixes.

    So a path lies in the tiers as one run of blocks each, the first tier's first.
    """

    _indexes: Sequence[Forest]

    def __init__(
        self,
        keys: Keys,
        tiers: Sequence[Tier],
        policies: Sequence[Policy[Segment]],
        request_share: float | None,
    ) -> None:
        forests = [Forest(policy, keys.parent) for policy in policies]
        super().__init__(keys, tiers, forests, request_share)
        ends = np.cumsum([0, *self._rooms]).tolist()
        self._shares = list(pairwise(ends))
        """Which blocks of a path a tier takes: those that no tier above has room for."""
        self._kept = [0] * len(tiers)
        """Blocks of the present path that stay where they are."""

    @override
    def _serve(self, path: bytes) -> list[int]:
        reach, served = 0, []
        used: list[tuple[Forest, Segment]] = []
        ends: list[Segment] = []
        """Where what a tier keeps of the path ends: what more it takes hangs there."""
        for number, (index, (first, _)) in enumerate(zip(self._indexes, self._shares, strict=True)):
            found = index.match(path[reach * KEY_BYTES :]).depth
            served.append(found)
            rising = min(found, max(0, first - reach))  # what the tiers above take
            if rising:
                index.take(path[reach * KEY_BYTES : (reach + rising) * KEY_BYTES])
            segment = index.root
            if found > rising:
                start = (reach + rising) * KEY_BYTES
                segment = index.settle(index.match(path[start : (reach + found) * KEY_BYTES]))
                index.touch(segment, self._tick())
                index.pin(segment)
                used.append((index, segment))
            ends.append(segment)
            self._kept[number] = found - rising
            reach += found
        for number, segment in enumerate(ends):
            self._store(number, path, segment)
        for index, segment in used:
            index.unpin(segment)
        return served

    def _store(self, number: int, path: bytes, end: Segment) -> None:
        """Let a tier take what it lacks of its share of a path; ``end`` is where its part ends."""
        index, (first, stop) = self._indexes[number], self._shares[number]
        start = first + self._kept[number]
        missing = min(len(path) // KEY_BYTES, stop) - start
        if missing <= 0:
            return
        gone = index.evict(max(0, missing - (self._tiers[number].blocks - index.blocks)))
        piece = path[start * KEY_BYTES : (start + missing) * KEY_BYTES]
        index.plant(end, piece, start, self._tick())
        self._written[number] += missing
        self._sink(number + 1, gone)

    def _sink(self, number: int, gone: Sequence[BlockKey]) -> None:
        """Let a tier take what the one above evicted for one request, the last evicted first."""
        if number == len(self._tiers) or not gone:
            return
        index, capacity = self._indexes[number], self._tiers[number].blocks
        cut = max(0, len(gone) - (capacity - self._kept[number]))
        passed, taken = gone[:cut], gone[cut:]
        out = index.evict(max(0, len(taken) - (capacity - index.blocks)))
        for run in self._keys.runs(taken):
            piece = b"".join(reversed(run))
            index.plant(index.root, piece, self._keys.depth(run[-1]), self._tick())
        self._written[number] += len(taken)
        self._sink(number + 1, [*out, *passed])


class Forest(PrefixIndex):
    """An index of pieces of paths, whose heads may be in a tier above.

    A piece without a head hangs on the root, and on its head again when that comes down.

    Invariants:
        ``_headless`` names exactly the pieces on the root that are not the beginning of a path.
    """

    def __init__(
        self, policy: Policy[Segment], parent: Callable[[BlockKey], BlockKey | None]
    ) -> None:
        """``parent`` names the block before a block, None of a first one."""
        super().__init__(policy)
        self._parent = parent
        self._headless: dict[BlockKey, list[Segment]] = {}
        """By the block that each would hang on."""

    def plant(self, end: Segment, keys: bytes, start: int, now: int) -> None:
        """Add blocks below ``end``, as a piece whose first block has the number ``start``.

        What has lost these blocks as its head hangs on them again.
        """
        piece = Segment(end, keys, start, 0)
        piece.last_use = now
        end.children[keys[:KEY_BYTES]] = piece
        self.blocks += piece.blocks
        self.segments += 1
        self._policy.insert(piece)
        if end is self.root:
            self._lift(piece)
        for number, key in enumerate(piece.block_keys(), start + 1):
            lower = self._headless.pop(key, None)
            if lower is None:
                continue
            upper = self._split(piece, number - piece.start) if number < piece.stop else piece
            for child in lower:
                first = child.keys[:KEY_BYTES]
                del self.root.children[first]
                child.parent, upper.children[first] = upper, child

    def take(self, keys: bytes) -> None:
        """Remove blocks that begin where a piece on the root does; what hangs on them stays."""
        segment: Segment | None = self.settle(self.match(keys))
        pieces = []
        while segment is not None and segment is not self.root:
            pieces.append(segment)
            segment = segment.parent
        for piece in reversed(pieces):
            self._policy.remove(piece)
            self._forget(piece)
            del self.root.children[piece.keys[:KEY_BYTES]]
            for first, child in piece.children.items():
                child.parent, self.root.children[first] = self.root, child
                self._lift(child)
            self.blocks -= piece.blocks
            self.segments -= 1
            piece.keys, piece.children = b"", {}

    @override
    def _split(self, lower: Segment, at: int) -> Segment:
        is_top = lower.parent is self.root
        if is_top:
            self._forget(lower)
        upper = super()._split(lower, at)
        if is_top:
            self._lift(upper)
        return upper

    @override
    def _trim(self, segment: Segment, count: int, removed: list[BlockKey]) -> None:
        if count == segment.blocks and segment.parent is self.root:
            self._forget(segment)
        super()._trim(segment, count, removed)

    def _lift(self, piece: Segment) -> None:
        """Note that a piece on the root has its head elsewhere, if it has one."""
        above = self._parent(BlockKey(piece.keys[:KEY_BYTES]))
        if above is not None:
            self._headless.setdefault(above, []).append(piece)

    def _forget(self, piece: Segment) -> None:
        above = self._parent(BlockKey(piece.keys[:KEY_BYTES]))
        if above is None:
            return
        left = self._headless[above]
        left.remove(piece)
        if not left:
            del self._headless[above]
