"""Recommendation for a trace: policy, size, window TTL, and the gains that remain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.simulate.choice import (
    LRU,
    OPTIMAL,
    SHARES,
    WORTH_CHANGING,
    Choice,
    Progress,
    choose,
    smallest,
)
from kvstore.simulate.cost import share
from kvstore.simulate.json_form import OPTIONAL, SHARE_OF_CEILING
from kvstore.simulate.options import SimulateOptions
from kvstore.simulate.run import Row, Simulation, first_counted
from kvstore.simulate.window import WindowReport

WINDOW_SHARE = 0.95
"""Replays that the recommended TTL avoids, as a share of those that an infinite TTL avoids."""


@dataclass(frozen=True, slots=True)
class Knee:
    """Size at which the LRU curve is highest above the line from no cache to the whole trace."""

    size_blocks: int
    size_fraction: float
    share_of_infinite_cache: float = field(metadata=SHARE_OF_CEILING)


@dataclass(frozen=True, slots=True)
class Gain:
    """The best policy at a requested size, where it is ``WORTH_CHANGING`` better than LRU."""

    size_blocks: int
    policy: str
    gain_over_lru: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Token hit ratios that a larger cache and a better policy could add at one size."""

    size_blocks: int
    capacity: float
    """Infinite cache less optimum."""
    policy: float
    """Optimum less the best simulated policy."""


@dataclass(frozen=True, slots=True)
class WindowAdvice:
    """The shortest TTL of the curve that has ``WINDOW_SHARE`` of an infinite one's effect."""

    ttl_seconds: float | None
    kept: float
    kept_without_end: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The policy to use and its size, with the figures it rests on."""

    choice: Choice | None
    """None for a trace without reuse."""
    sizes: Mapping[str, int | None]
    """LRU's smallest size for each of ``SHARES`` of an infinite cache's hits; None without reuse."""
    knee: Knee
    policy: str
    gain_over_lru: float | None
    gains: Sequence[Gain]
    gaps: Sequence[Gap]
    window: WindowAdvice | None = field(metadata=OPTIONAL)
    text: Sequence[str] = ()
    """The recommendation in sentences."""
    command: str = ""
    """The command that simulates the choice."""


def recommend(
    simulation: Simulation,
    options: SimulateOptions,
    rows: Sequence[Row],
    windows: WindowReport | None,
    progress: Progress,
) -> Recommendation:
    """Return the recommendation that follows from the rows, the LRU curve and the window pool."""
    trace = simulation.trace
    first = first_counted(trace, options.interval)
    sizes, hits = simulation.curve.points(first)
    knee = int(np.argmax(hits * trace.distinct_blocks - sizes * int(hits[-1])))
    knee_size = int(sizes[knee])
    choice = choose(simulation, options.policies, first, progress)
    if choice is not None:
        size_bytes = options.size_bytes(choice.size_blocks, trace.block_tokens)
        choice = replace(choice, size_bytes=size_bytes)
    return Recommendation(
        choice=choice,
        sizes={f"{each:.0%}": smallest(sizes, hits, each) if hits[-1] else None for each in SHARES},
        knee=Knee(
            knee_size, knee_size / trace.distinct_blocks, share(int(hits[knee]), int(hits[-1]))
        ),
        policy=LRU if choice is None else choice.policy,
        gain_over_lru=None if choice is None else choice.gain_over_lru,
        gains=_gains(simulation, rows, first),
        gaps=_gaps(simulation, rows, first),
        window=None if windows is None else _window_advice(windows),
    )


def _online(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Return token hit ratios by size and policy, without the optimum's."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.policy != OPTIMAL:
            ratio = row.ratios.prefix_token_hit_ratio
            found.setdefault(row.size_blocks, {})[row.policy] = ratio
    return found


def _gains(simulation: Simulation, rows: Sequence[Row], first: int) -> list[Gain]:
    """LRU's ratio is that of its row, or of prefixes where it has none."""
    found = []
    for size, served in sorted(_online(rows).items()):
        lru = served.get(LRU)
        if lru is None:
            lru = simulation.ratios_from(simulation.hits(LRU, size), first).prefix_token_hit_ratio
        most, best = max((ratio, policy) for policy, ratio in served.items())
        if most - lru >= WORTH_CHANGING:
            found.append(Gain(size, best, most - lru))
    return found


def _gaps(simulation: Simulation, rows: Sequence[Row], first: int) -> list[Gap]:
    infinite = simulation.ratios_from(simulation.infinite_cache_hits(), first)
    online, most = _online(rows), infinite.prefix_token_hit_ratio
    return [
        Gap(size, most - bound, bound - max(online[size].values()))
        for size, bound in (
            (row.size_blocks, row.ratios.prefix_token_hit_ratio)
            for row in rows
            if row.policy == OPTIMAL and row.size_blocks in online
        )
    ]


def _window_advice(pool: WindowReport) -> WindowAdvice:
    *points, without_end = pool.curve
    enough = (point for point in points if point.kept >= WINDOW_SHARE * without_end.kept)
    chosen = next(enough, points[-1])
    return WindowAdvice(chosen.ttl_seconds, chosen.kept, without_end.kept)
