"""Traces made of symbols, and slow models that know nothing of segments."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.identity.block import KEY_BYTES
from kvstore.index.prefix_tree import PrefixIndex
from kvstore.policy.protocol import Policy
from kvstore.trace.columns import Trace, ends
from tests.builders import path_of

Prefix = tuple[int, ...]


def trace_of(paths: Sequence[Sequence[int]], block_tokens: int = 4) -> Trace:
    """A trace whose requests are paths of symbols; equal prefixes are the same blocks."""
    numbers: dict[Prefix, int] = {}
    rows = [
        [numbers.setdefault(tuple(p[: i + 1]), len(numbers)) for i in range(len(p))] for p in paths
    ]
    sizes = np.array([len(path) for path in paths], np.int64)
    flat = [block for row in rows for block in row]
    return Trace(
        name="made",
        block_tokens=block_tokens,
        arrival=np.arange(len(paths), dtype=np.int64) * 1_000_000,
        input_tokens=sizes * block_tokens,
        output_tokens=np.zeros(len(paths), np.int64),
        sessions=np.full(len(paths), -1, np.int32),
        offsets=ends(sizes),
        blocks=np.array(flat, np.int32),
        distinct_blocks=len(numbers),
    )


def grown_paths(seed: int, requests: int = 120, depth: int = 14) -> list[list[int]]:
    """Chains that often go on where earlier ones went: conversations, forks, repeats, empty ones."""
    draw = random.Random(seed)
    paths: list[list[int]] = []
    for _ in range(requests):
        old = draw.choice(paths[-20:]) if paths and draw.random() < 0.8 else []
        kept = old[: draw.randint(0, len(old))] if draw.random() < 0.4 else old
        fresh = [draw.randrange(3) for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 9]))]
        paths.append(([*kept, *fresh] or [draw.randrange(5)])[:depth])
        if draw.random() < 0.03:
            paths.append([])
    return paths


@dataclass
class Driven:
    """What a run did: each request's hit, and the blocks evicted for it, in order."""

    hits: list[int] = field(default_factory=list)
    evicted: list[list[Hashable]] = field(default_factory=list)


def drive_index(paths: Sequence[Sequence[int]], policy: Policy[Any], capacity: int) -> Driven:
    """Look up and store each path in a real index, the way a tier does."""
    names: dict[bytes, Prefix] = {}
    index = PrefixIndex(policy)
    driven = Driven()
    now = 0
    for symbols in paths:
        path = path_of(symbols)
        for i in range(len(symbols)):
            names[path[i * KEY_BYTES : (i + 1) * KEY_BYTES]] = tuple(symbols[: i + 1])
        position = index.match(path)
        segment = index.split_at(position)
        if position.depth:
            now += 1
            index.touch(segment, now)
        driven.hits.append(position.depth)
        driven.evicted.append([])
        stop = min(len(symbols), capacity)
        if stop <= position.depth:
            continue
        now += 1
        index.pin(segment)
        short = stop - position.depth - (capacity - index.blocks)
        driven.evicted[-1] += [names[key] for key in index.evict(max(0, short))]
        fresh = path[position.depth * KEY_BYTES : stop * KEY_BYTES]
        index.insert(segment, fresh, now=now, namespace_id=1)
        index.unpin(segment)
        assert index.blocks <= capacity
    return driven


@dataclass
class Cached:
    """A block of the slow model."""

    stored: int
    used: int
    uses: int


def drive_blocks(
    paths: Sequence[Sequence[int]], rank: Callable[[Cached], Any], capacity: int
) -> list[int]:
    """The specification, block by block: the lowest rank among blocks without a child goes."""
    cached: dict[Prefix, Cached] = {}
    hits = []
    for now, symbols in enumerate(paths):
        path = [tuple(symbols[: i + 1]) for i in range(len(symbols))]
        hit = 0
        while hit < len(path) and path[hit] in cached:
            hit += 1
        hits.append(hit)
        for prefix in path[:hit]:
            cached[prefix].used = now
            cached[prefix].uses += 1
        for prefix in path[hit:capacity]:
            if len(cached) == capacity:
                inner = {each[:-1] for each in cached}
                free = [each for each in cached if each not in inner and each not in path]
                victim = min(free, key=lambda each: (rank(cached[each]), -len(each)))
                del cached[victim]
            cached[prefix] = Cached(now, now, 1)
    return hits


def drive_optimal(paths: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Of the cached and the offered blocks, those used again soonest stay."""
    whole = [[tuple(p[: i + 1]) for i in range(len(p))] for p in paths]
    cached: set[Prefix] = set()
    hits = []
    for now, path in enumerate(whole):
        hit = 0
        while hit < len(path) and path[hit] in cached:
            hit += 1
        hits.append(hit)
        following: dict[Prefix, int] = {}
        for later in range(len(whole) - 1, now, -1):
            following.update(dict.fromkeys(whole[later], later))
        offered = [each for each in cached | set(path) if each in following]
        offered.sort(key=lambda each: (following[each], len(each)))
        cached = set(offered[:capacity])
    return hits
