"""Decisions on loads, stores, evictions and replays, as values: pure functions of lengths, residency and speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

REQUEST_SHARE = 0.5
"""Default bound on a request's share of a tier. On six public traces (Mooncake, WEKA's Claude Code, LMCache's agents)
LRU's hit ratio is the same with and without it if the tier holds two of the longest prompts; if it holds one, the ratio
differs by -10.7 (one session alone) to +0.1 points, if half of one, by -13.4 to +2.0. A share of 0.25 costs up to 14
points at two prompts. docs/decisions/0043."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load of blocks ``[start, stop)`` of a prefix from a tier."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """A write of blocks ``[start, stop)`` of a prefix."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Evict:
    """An eviction of at least ``bytes`` bytes."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Floors:
    """Token positions that bound a replay. Source: docs/decisions/0010."""

    replay_start: int
    read_floor: int  # first token whose window rows exist
    write_floor: int  # GLOBAL entries of tokens below it must not be overwritten
    window_write_floor: int  # window rows of tokens below it are final


def hit_limit(token_count: int, block_tokens: int) -> int:
    """Return the longest hit in tokens: whole blocks that leave at least one token to compute."""
    return max(0, token_count - 1) // block_tokens * block_tokens


def floors(hit_tokens: int, window_tokens: int, snapshot_start: int | None) -> Floors:
    """Return the floors of a hit.

    ``window_tokens`` is W, 0 for a model without windows. ``snapshot_start`` is the first row of the pooled window that
    ends at the hit; None if the pool has none.
    """
    if not window_tokens:
        return Floors(hit_tokens, 0, hit_tokens, hit_tokens)
    if snapshot_start is not None:
        return Floors(hit_tokens, snapshot_start, hit_tokens, hit_tokens)
    start = hit_tokens - min(window_tokens, hit_tokens)
    return Floors(start, start, hit_tokens, start)


def loads(hit_blocks: int, resident: Mapping[str, int]) -> tuple[Load, ...]:
    """Return the loads of a hit by tier; ``resident`` maps tiers, nearest first, to their numbers of leading blocks."""
    steps: list[Load] = []
    at = 0
    for tier, blocks in resident.items():
        stop = min(blocks, hit_blocks)
        if stop > at:
            steps.append(Load(tier, at, stop))
            at = stop
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The decision on blocks ``[start, stop)`` offered by a caller."""

    present: int  # blocks already stored or queued
    store: Store | None  # blocks to write; None if there are none or their parent is missing
    orphans: int  # blocks dropped because the parent of ``start`` is neither stored nor queued
    excess: int = 0  # blocks dropped because they exceed the request's limit


def stores(start: int, stop: int, known: int, limit: int) -> StorePlan:
    """Return the decision on blocks ``[start, stop)`` if the first ``known`` are stored or queued.

    At most the first ``limit`` blocks of a request are stored, which are usable by themselves. Blocks already stored
    beyond the limit remain.
    """
    if known < start:
        lost = stop - start
        return StorePlan(0, None, 0, lost) if known >= limit else StorePlan(0, None, lost)
    first = min(max(start, known), stop)
    end = min(stop, max(first, limit))
    return StorePlan(first - start, Store(first, end) if first < end else None, 0, stop - end)


def request_blocks(tier_blocks: int, share: float | None) -> int:
    """Return the most blocks of one request in a tier: ``share`` of it, at least one; None is no bound."""
    if share is None:
        return tier_blocks
    return min(tier_blocks, max(1, int(Fraction(str(share)) * tier_blocks)))


def room(live_bytes: int, incoming_bytes: int, high_bytes: int, low_bytes: int) -> Evict | None:
    """Return the eviction down to the low watermark that ``incoming_bytes`` need; None up to the high one."""
    if live_bytes + incoming_bytes <= high_bytes:
        return None
    return Evict(max(0, live_bytes + incoming_bytes - low_bytes))


def worth_loading(
    hit_tokens: int,
    where: Floors,
    window_tokens: int,
    load_seconds: float,
    prefill_seconds_per_token: float,
) -> bool:
    """Return whether loading a hit is faster than computing its tokens.

    A hit of at most W tokens without its window is not worth loading: replay runs all its tokens. Otherwise the load
    must be faster than the prefill of the tokens saved, or unmeasured (0 seconds a token).
    """
    if not hit_tokens:
        return False
    replayed = hit_tokens - where.replay_start
    if window_tokens and replayed >= hit_tokens:
        return False
    if not prefill_seconds_per_token:
        return True
    return load_seconds < (hit_tokens - replayed) * prefill_seconds_per_token
