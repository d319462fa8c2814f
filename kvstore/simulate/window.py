"""The window pool of a trace: whose last tokens are at hand, and who has to run them again.

The rules are those of ``kvstore.tier.window.WindowPool``, on sizes alone; ``tests/simulate`` compares the
two after each request.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.trace.columns import SECOND, Ints, Trace

TTLS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds at which the curve is drawn: from a tool call to a pause for lunch. Half of an agent's calls
come within 18 s, 99 % within 2,190 s (48,000 calls of the Weka traces)."""
TTL_SHARES = (0.90, 0.95, 0.99)
"""Shares of turns for which a report names a time to live."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A window pool, as a user describes it."""

    tokens: int
    """W: how many of the last tokens a window layer reads."""
    ttl: float
    """Seconds that a window is kept after it was put there."""
    budget: int | None = None
    """Tokens whose rows it holds at most; None for no bound."""


class Pool:
    """Windows by the block that each ends with: a cap, a time to live, least recent out first."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._budget = math.inf if windows.budget is None else windows.budget
        self.held: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Expiry and tokens of each window, least recently used first."""
        self.used = 0
        self.evicted = 0
        self.expired = 0
        self._due: deque[tuple[float, int]] = deque()  # as all live equally long, in order

    def use(self, block: int, now: float) -> bool:
        """Say whether the window that ends with ``block`` is there, and make it recent."""
        found = self.held.get(block)
        if found is None or found[0] <= now:
            return False
        self.held.move_to_end(block)
        return True

    def put(self, block: int, tokens: int, now: float) -> None:
        """Keep the window that ends with ``block``, in place of one that is there."""
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
    """What became of each request's window."""

    replayed: Ints
    """Tokens that were run again, at most W, [requests]; 0 where the window was there."""
    evicted: int
    expired: int


def simulate_windows(
    trace: Trace,
    hits: Ints,
    windows: Windows,
    observer: Callable[[int, Pool], object] = lambda _request, _pool: None,
) -> Outcome:
    """Run a trace whose requests hit these blocks, [requests], through a window pool.

    A request needs the window that ends its hit. Where it is gone, the last W tokens are run again,
    and the window is there anew. Its own window is put at the end of its prompt. Windows end at
    whole blocks, so a block that a prompt fills in part neither needs nor leaves one.

    Cost: O(1) a request.
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
    """Return how many blocks each prompt fills, [requests]."""
    return np.minimum(trace.chain_blocks, trace.input_tokens // max(1, trace.block_tokens))


def all_window_tokens(trace: Trace, windows_tokens: int) -> int:
    """Return the tokens that the windows of all prompts of a trace have: 100 % of a budget."""
    whole = whole_blocks(trace)
    used = whole > 0
    _, first = np.unique(trace.blocks[(trace.offsets[:-1] + whole)[used] - 1], return_index=True)
    sizes = whole[used][first] * trace.block_tokens
    return int(np.minimum(sizes, windows_tokens).sum())


def window_report(
    trace: Trace, hits: Ints, windows: Windows, first: int, ttls: Sequence[float] = TTLS
) -> dict[str, Any]:
    """Return what a pool keeps from replay, and the same for other times to live.

    ``first`` is the first request that is counted. ``kept`` is the share of requests with a hit
    whose window was there, and ``kept_token_ratio`` that share with each weighed by its hit.
    """
    points = [
        _point(trace, hits, replace(windows, ttl=ttl), first)
        for ttl in sorted({*ttls, windows.ttl, math.inf})
    ]
    mine = next(each for each in points if each["ttl_seconds"] == _finite(windows.ttl))
    return {
        "window_tokens": windows.tokens,
        "budget_tokens": windows.budget,
        **mine,
        "curve": points,
        "ttl_for": {
            f"{share:.0%}": next(
                (p["ttl_seconds"] for p in points if p["ttl_seconds"] and p["kept"] >= share), None
            )
            for share in TTL_SHARES
        },
    }


def _point(trace: Trace, hits: Ints, windows: Windows, first: int) -> dict[str, Any]:
    outcome = simulate_windows(trace, hits, windows)
    hits = np.minimum(hits, whole_blocks(trace))
    turns: NDArray[np.bool_] = hits[first:] > 0
    replayed = outcome.replayed[first:]
    reach = hits[first:] * trace.block_tokens
    lost = int(reach[replayed > 0].sum())
    replays, asked = int((replayed > 0).sum()), int(turns.sum())
    return {
        "ttl_seconds": _finite(windows.ttl),
        "turns": asked,
        "replays": replays,
        "replayed_tokens": int(replayed.sum()),
        "kept": 1 - replays / asked if asked else 1.0,
        "kept_token_ratio": 1 - lost / int(reach.sum()) if asked else 1.0,
        "evicted": outcome.evicted,
        "expired": outcome.expired,
    }


def _finite(ttl: float) -> float | None:
    """Return a time to live as JSON has it: None for one without end."""
    return None if ttl == math.inf else ttl
