"""The decisions, as values: what to load, what to store, what to run again.

Pure functions of lengths, residency and measured speeds. Nothing here touches a tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

REQUEST_SHARE = 0.5
"""What one request may take of a tier by default. On six public traces (Mooncake, WEKA's Claude Code,
LMCache's agents) LRU's hit ratio is the same with and without this bound wherever the tier holds two of
the longest prompts; at one, it differs by -10.7 (one session alone) to +0.1 points, at a half of one by
-13.4 to +2.0. A quarter costs up to 14 points at two. docs/decisions/0043."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring blocks ``[start, stop)`` of a prefix from a tier."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Write blocks ``[start, stop)`` of a prefix."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Free at least this many bytes before what is planned next may come in."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Let the engine run tokens ``[start, stop)`` again for their window KV."""

    start: int
    stop: int


Step = Load | Store | Evict | Replay


@dataclass(frozen=True, slots=True)
class Floors:
    """Where replay starts and what it may touch, in tokens. Source: docs/decisions/0010."""

    replay_start: int
    read_floor: int
    """Window rows exist from here."""
    write_floor: int
    """Global entries below it are settled; a write to them is dropped."""
    window_write_floor: int
    """Window rows below it are settled."""


def hit_limit(token_count: int, block_tokens: int) -> int:
    """Return the longest hit that leaves one token to compute, in tokens."""
    return max(0, token_count - 1) // block_tokens * block_tokens


def floors(hit_tokens: int, window_tokens: int, snapshot_start: int | None) -> Floors:
    """Return the floors of a hit.

    ``window_tokens`` is W, 0 for a model without windows. ``snapshot_start`` is the first row of
    the pooled window that ends at the hit, None when the pool has none.
    """
    if not window_tokens:
        return Floors(hit_tokens, 0, hit_tokens, hit_tokens)
    if snapshot_start is not None:
        return Floors(hit_tokens, snapshot_start, hit_tokens, hit_tokens)
    start = hit_tokens - min(window_tokens, hit_tokens)
    return Floors(start, start, hit_tokens, start)


def loads(hit_blocks: int, resident: Mapping[str, int]) -> tuple[Load, ...]:
    """Plan the reads of a hit: the nearest tier first, the next one for what it lacks.

    ``resident`` maps tiers, nearest first, to the leading blocks each holds.
    """
    steps: list[Load] = []
    at = 0
    for tier, blocks in resident.items():
        stop = min(blocks, hit_blocks)
        if stop > at:
            steps.append(Load(tier, at, stop))
            at = stop
    return tuple(steps)


def replay(hit_tokens: int, where: Floors) -> Replay | None:
    """Plan the replay of a hit: none when its window is at hand or nobody needs one."""
    if where.replay_start >= hit_tokens:
        return None
    return Replay(where.replay_start, hit_tokens)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What becomes of the blocks ``[start, stop)`` that a caller offers."""

    present: int
    """Blocks already stored or queued."""
    store: Store | None
    """Blocks to write; None when there are none or their parent is missing."""
    orphans: int
    """Blocks dropped because the parent of ``start`` is neither stored nor queued."""
    excess: int = 0
    """Blocks dropped because they lie beyond what one request may take."""


def stores(start: int, stop: int, known: int, limit: int) -> StorePlan:
    """Plan a store of blocks ``[start, stop)`` when the first ``known`` are stored or queued.

    Of a request only the first ``limit`` blocks are stored: its head, which is of use by itself.
    What is there beyond them stays.
    """
    if known < start:
        lost = stop - start
        return StorePlan(0, None, 0, lost) if known >= limit else StorePlan(0, None, lost)
    first = min(max(start, known), stop)
    end = min(stop, max(first, limit))
    return StorePlan(first - start, Store(first, end) if first < end else None, 0, stop - end)


def request_blocks(tier_blocks: int, share: float | None) -> int:
    """Return the most blocks of one path that a tier takes: its head.

    Without a share it is all that the tier holds; else that share of it, one block at least.
    """
    if share is None:
        return tier_blocks
    return min(tier_blocks, max(1, int(Fraction(str(share)) * tier_blocks)))


def room(live_bytes: int, incoming_bytes: int, high_bytes: int, low_bytes: int) -> Evict | None:
    """Plan what must leave before ``incoming_bytes`` may come in.

    Nothing until the high watermark would be crossed; then enough to come down to the low one.
    """
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
    """Say whether using a hit is cheaper than computing its tokens again.

    A hit that lies inside the window of a model that needs one, without that window, is not: replay
    runs every cached token anyway. Otherwise loading must cost less than the tokens it saves.
    With no measured prefill speed yet (0), any hit is worth loading.
    """
    if not hit_tokens:
        return False
    replayed = hit_tokens - where.replay_start
    if window_tokens and replayed >= hit_tokens:
        return False
    if not prefill_seconds_per_token:
        return True
    return load_seconds < (hit_tokens - replayed) * prefill_seconds_per_token
