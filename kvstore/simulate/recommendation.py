"""Recommendation for a trace: policy, size and window TTL, all simulated.

Policy and size are one decision, because the order of the policies changes with the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from kvstore.simulate.cost import share as share_of
from kvstore.simulate.curve import LRU
from kvstore.simulate.json_form import OPTIONAL, SHARE_OF_CEILING
from kvstore.simulate.optimal import OPTIMAL
from kvstore.simulate.run import Row, SimulateOptions, Simulation
from kvstore.simulate.window import WindowReport
from kvstore.trace.columns import Ints

SHARES = (0.90, 0.95, 0.99)
"""Shares of an infinite cache's hits with a size in the report. The policy is chosen at the first."""
WORTH_CHANGING = 0.01
"""Least gain over LRU, at the same size, for which another policy is recommended. No policy has it on public
traces at 90 % of the hits; at 1 % of all blocks S3-FIFO gains 0.024 on mooncake_conversation."""
STEPS = 100
"""Steps of a size: its precision is 1/100 of LRU's size, so no rounded percentage changes."""
WINDOW_SHARE = 0.95
"""Replays that the recommended TTL avoids, as a share of those that an infinite TTL avoids."""
Progress = Callable[[str], object]
"""Called with a message per run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A policy with a size, its leading hits, and those of the other policies at the same size."""

    policy: str
    size_blocks: int
    """The smallest size found with which the policy has ``SHARES[0]`` of an infinite cache's hits."""
    share_of_infinite_cache: float = field(metadata=SHARE_OF_CEILING)
    """Blocks hit over blocks that an infinite cache hits."""
    prefix_token_hit_ratio: float
    others: Mapping[str, float]
    """``prefix_token_hit_ratio`` of LRU and of each requested policy, at ``size_blocks``."""
    lru_size_blocks: int
    """The smallest size with which LRU has the same share."""
    size_bytes: int | None = None
    """None where the bytes of a token are unknown."""

    @property
    def gain_over_lru(self) -> float:
        """Difference of the token hit ratio to LRU's at the same size."""
        return self.prefix_token_hit_ratio - self.others.get(LRU, self.prefix_token_hit_ratio)


def smallest(sizes: Ints, hits: Ints, share: float) -> int:
    """Return the smallest size, in blocks, that has a share of the most hits, exactly."""
    wanted = int(np.ceil(share * int(hits[-1])))
    at = int(np.searchsorted(hits, wanted))
    if at == 0:
        return int(sizes[0])
    rise, width = int(hits[at] - hits[at - 1]), int(sizes[at] - sizes[at - 1])
    return int(sizes[at - 1]) + -(-(wanted - int(hits[at - 1])) * width // rise)


def choose(
    simulation: Simulation,
    policies: Sequence[str],
    first: int = 0,
    progress: Progress = lambda _: None,
) -> Choice | None:
    """Return the choice among LRU and ``policies``; None for a trace without reuse.

    Of the policies that hit ``WORTH_CHANGING`` more than LRU at the size that they need, the one with
    the smallest size; LRU if there is none. Requests from ``first`` on are counted. Cost: one run of each
    policy, and about eight more of each that needs less than LRU.
    """
    search = _Search(simulation, first, progress)
    if not search.most:
        return None
    asked = [policy for policy in dict.fromkeys(policies) if policy not in {LRU, OPTIMAL}]
    lru_size = search.size_of_lru()
    sizes = {LRU: lru_size}
    for policy in asked:
        size = search.size(policy, lru_size)
        if search.tokens(policy, size) - search.tokens(LRU, size) >= WORTH_CHANGING:
            sizes[policy] = size
    chosen = min(sizes, key=lambda policy: (sizes[policy], policy != LRU))
    size = sizes[chosen]
    return Choice(
        policy=chosen,
        size_blocks=size,
        share_of_infinite_cache=search.blocks(chosen, size) / search.most,
        prefix_token_hit_ratio=search.tokens(chosen, size),
        others={name: search.tokens(name, size) for name in (LRU, *asked) if name != chosen},
        lru_size_blocks=lru_size,
    )


class _Search:
    """Blocks and token hit ratios of policies by size, and the sizes that reach a share of the hits."""

    def __init__(self, simulation: Simulation, first: int, progress: Progress) -> None:
        self._simulation = simulation
        self._first = first
        self._progress = progress
        self._known: dict[tuple[str, int], tuple[int, float]] = {}
        self.most = int(simulation.infinite_cache_hits()[self._first :].sum())
        """Blocks that an infinite cache hits."""

    def _run(self, policy: str, size: int) -> tuple[int, float]:
        found = self._known.get((policy, size))
        if found is None:
            self._progress(f"{self._simulation.trace.name}: {policy}, {size:,} blocks")
            hits = self._simulation.hits(policy, size)
            tokens = self._simulation.ratios(hits, self._first).prefix_token_hit_ratio
            found = self._known[policy, size] = int(hits[self._first :].sum()), tokens
        return found

    def blocks(self, policy: str, size: int) -> int:
        return self._run(policy, size)[0]

    def tokens(self, policy: str, size: int) -> float:
        return self._run(policy, size)[1]

    def reaches(self, policy: str, size: int) -> bool:
        """Return whether a policy has ``SHARES[0]`` of the hits with a size."""
        return self.blocks(policy, size) >= math.ceil(SHARES[0] * self.most)

    def size_of_lru(self) -> int:
        """Return LRU's size: from its curve, or by search where a share limits each request."""
        share, trace = self._simulation.request_share, self._simulation.trace
        exact = smallest(*self._simulation.curve.points(self._first), SHARES[0])
        if share is None or self.reaches(LRU, exact):
            return exact
        # At this size every request fits its share, so LRU has all hits.
        longest = int(trace.chain_blocks.max())
        enough = max(trace.distinct_blocks, math.ceil(longest / Fraction(str(share))))
        return self.size(LRU, enough, exact)

    def size(self, policy: str, enough: int, short: int = 0) -> int:
        """Return a size, at most ``enough``, that reaches the share and is one step above one that fails.

        It is the smallest only for stack algorithms. If ``enough`` less a step fails, no other is tried.
        """
        step = max(1, enough // STEPS)
        middle = enough - step
        while enough - short > step:
            if self.reaches(policy, middle):
                enough = middle
            else:
                short = middle
            middle = (short + enough) // 2
        return enough


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
    """The policy to use and its size, with the figures behind it."""

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
    first: int,
    progress: Progress,
) -> Recommendation:
    """Return the recommendation that follows from the rows, the LRU curve and the window pool."""
    trace = simulation.trace
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
            knee_size, knee_size / trace.distinct_blocks, share_of(int(hits[knee]), int(hits[-1]))
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
    """Return the gains over LRU, whose ratio is that of its row, or else of prefixes."""
    found = []
    for size, served in sorted(_online(rows).items()):
        lru = served.get(LRU)
        if lru is None:
            lru = simulation.ratios(simulation.hits(LRU, size), first).prefix_token_hit_ratio
        most, best = max((ratio, policy) for policy, ratio in served.items())
        if most - lru >= WORTH_CHANGING:
            found.append(Gain(size, best, most - lru))
    return found


def _gaps(simulation: Simulation, rows: Sequence[Row], first: int) -> list[Gap]:
    infinite = simulation.ratios(simulation.infinite_cache_hits(), first)
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
