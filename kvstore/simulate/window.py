"""Simulated window pool: hits and replays of the window KV of each request.

The rules are those of ``kvstore.tier.window.WindowPool``, on sizes alone; ``tests/simulate`` compares both
after each request.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.simulate.json_form import INLINE, OPTIONAL
from kvstore.trace.columns import SECOND, Ints, Trace

TTLS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""TTLs of the curve, in seconds. Half of an agent's calls follow the previous one within 18 s, 99 % within
2,190 s (48,000 calls of the Weka traces)."""
TTL_SHARES = (0.90, 0.95, 0.99)
"""Shares of turns for which a report names a TTL."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Options of a window pool."""

    tokens: int
    """W: last tokens that a window layer reads."""
    ttl: float
    """TTL: seconds that a window is kept after it was put into the pool."""
    budget: int | None = None
    """Capacity in tokens; None for no limit."""


class Pool:
    """Windows by the block that each ends with: LRU within a capacity, with a TTL."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._budget = math.inf if windows.budget is None else windows.budget
        self.held: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Expiry and tokens of each window, least recently used first."""
        self.used = 0
        self.evicted = 0
        self.expired = 0
        self._due: deque[tuple[float, int]] = deque()  # in order, as all have the same TTL

    def use(self, block: int, now: float) -> bool:
        """Return whether the pool holds the window that ends with ``block``, and make it most recent."""
        found = self.held.get(block)
        if found is None or found[0] <= now:
            return False
        self.held.move_to_end(block)
        return True

    def put(self, block: int, tokens: int, now: float) -> None:
        """Add the window that ends with ``block``, replacing an earlier one."""
        self._expire(now)
        if tokens > self._budget:
            return
        if block in self.held:
            self.used -= self.held.pop(block)[1]
        while self.used + tokens > self._budget:
            self.used -= self.held.popitem(last=False)[1][1]
            self.evicted += 1
        expires = now + self._windows.ttl
        self.held[block] = expires, tokens
        self._due.append((expires, block))
        self.used += tokens

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            expires, block = self._due.popleft()
            found = self.held.get(block)
            if found is not None and found[0] == expires:
                self.used -= self.held.pop(block)[1]
                self.expired += 1


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Outcome of a simulated window pool."""

    replayed: Ints
    """Replayed tokens, at most W, [requests]; 0 where the pool had the window."""
    evicted: int
    expired: int


def simulate_windows(
    trace: Trace,
    hits: Ints,
    windows: Windows,
    observer: Callable[[int, Pool], object] = lambda _request, _pool: None,
) -> Outcome:
    """Run a trace whose requests hit these blocks, [requests], through a window pool.

    A request needs the window at the end of its hit; if it is missing, the last W tokens are replayed and it
    is added again. Then the window at the end of the prompt is added. Windows end at whole blocks.
    Cost: O(1) per request.
    """
    pool = Pool(windows)
    replayed = np.zeros(len(trace), np.int64)
    arrival, starts = trace.arrival.tolist(), trace.offsets[:-1].tolist()
    size, limit = trace.block_tokens, windows.tokens
    whole = whole_blocks(trace)
    ends = np.minimum(hits, whole).tolist()
    for request, (hit, stop) in enumerate(zip(ends, whole.tolist(), strict=True)):
        now, start = arrival[request] / SECOND, starts[request]
        if hit:
            block = int(trace.blocks[start + hit - 1])
            if not pool.use(block, now):
                replayed[request] = tokens = min(limit, hit * size)
                pool.put(block, tokens, now)
        if stop:
            block = int(trace.blocks[start + stop - 1])
            pool.put(block, min(limit, stop * size), now)
        observer(request, pool)
    return Outcome(replayed, pool.evicted, pool.expired)


def whole_blocks(trace: Trace) -> Ints:
    """Return the blocks that each prompt fills completely, [requests]."""
    return np.minimum(trace.chain_blocks, trace.input_tokens // max(1, trace.block_tokens))


def all_window_tokens(trace: Trace, windows_tokens: int) -> int:
    """Return the tokens of the windows of all prompts of a trace: 100 % of a budget."""
    whole = whole_blocks(trace)
    used = whole > 0
    _, first = np.unique(trace.blocks[(trace.offsets[:-1] + whole)[used] - 1], return_index=True)
    sizes = whole[used][first] * trace.block_tokens
    return int(np.minimum(sizes, windows_tokens).sum())


@dataclass(frozen=True, slots=True)
class TtlPoint:
    """Result of a window pool with one TTL."""

    ttl_seconds: float | None
    """None for an infinite TTL."""
    turns: int
    """Counted requests with a hit."""
    replays: int
    replayed_tokens: int
    kept: float
    """Share of the turns whose window was in the pool."""
    kept_token_ratio: float
    """The same, with each turn weighted by its hit."""
    evicted: int
    expired: int


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Result of a window pool, and of the same pool with other TTLs."""

    window_tokens: int
    budget_tokens: int | None
    asked: TtlPoint = field(metadata=INLINE)
    """The point of the requested TTL."""
    curve: Sequence[TtlPoint]
    """By TTL; the last is infinite."""
    ttl_for: Mapping[str, float | None]
    """Shortest TTL of the curve for each of ``TTL_SHARES``; None where none reaches it."""
    replay_seconds: float | None = field(default=None, metadata=OPTIONAL)
    """Compute time of the replays; None where the engine's speed is unknown."""


def window_report(
    trace: Trace,
    hits: Ints,
    windows: Windows,
    first: int,
    ttls: Sequence[float] = TTLS,
    prefill_tps: float | None = None,
) -> WindowReport:
    """Simulate a window pool with its own TTL and others. ``first`` is the first counted request."""
    points = [
        _point(trace, hits, replace(windows, ttl=ttl), first)
        for ttl in sorted({*ttls, windows.ttl, math.inf})
    ]
    asked = next(each for each in points if each.ttl_seconds == _finite(windows.ttl))
    ttl_for = {
        f"{share:.0%}": next(
            (p.ttl_seconds for p in points if p.ttl_seconds and p.kept >= share), None
        )
        for share in TTL_SHARES
    }
    seconds = None if prefill_tps is None else asked.replayed_tokens / prefill_tps
    return WindowReport(windows.tokens, windows.budget, asked, points, ttl_for, seconds)


def _point(trace: Trace, hits: Ints, windows: Windows, first: int) -> TtlPoint:
    outcome = simulate_windows(trace, hits, windows)
    reach = np.minimum(hits, whole_blocks(trace))[first:] * trace.block_tokens
    replayed = outcome.replayed[first:]
    lost = int(reach[replayed > 0].sum())
    turns: NDArray[np.bool_] = reach > 0
    replays, asked = int((replayed > 0).sum()), int(turns.sum())
    return TtlPoint(
        ttl_seconds=_finite(windows.ttl),
        turns=asked,
        replays=replays,
        replayed_tokens=int(replayed.sum()),
        kept=1 - replays / asked if asked else 1.0,
        kept_token_ratio=1 - lost / int(reach.sum()) if asked else 1.0,
        evicted=outcome.evicted,
        expired=outcome.expired,
    )


def _finite(ttl: float) -> float | None:
    """Return a TTL as JSON has it: None for an infinite one."""
    return None if ttl == math.inf else ttl
