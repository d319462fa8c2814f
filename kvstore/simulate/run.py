"""A trace at many sizes under many policies: the rows, the ceiling, the curve, what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.curve import Curve, lru_curve, summed
from kvstore.simulate.flat import simulate_flat
from kvstore.simulate.optimal import optimal_hits
from kvstore.simulate.sizes import Size
from kvstore.simulate.tree import Rows, simulate_policy
from kvstore.trace.columns import Ints, Trace
from kvstore.trace.paths import links_of, paths_of

OPTIMAL = "optimal"
"""Name of the bound. It is no policy of a tier: it knows the future."""
Window = Literal["all", "last_half"]
Semantics = Literal["prefix", "flat"]
CURVE_POINTS = 200
"""Points of a curve in a report: enough for a smooth line of 800 pixels."""
SHARES = (0.90, 0.95, 0.99)
"""Shares of the ceiling that a report names a size for."""
WORTH_CHANGING = 0.01
"""Gain over LRU, averaged over the sizes, from which another policy is recommended. On public traces
no policy gains more than 0.016 at any size, and what leads changes with it."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """What a cache served, as shares of what was asked."""

    prefix_hit_ratio: float
    """Blocks of leading hits over all blocks asked for."""
    prefix_token_hit_ratio: float
    """Tokens of leading hits over all tokens asked for."""
    block_hit_ratio: float
    """All blocks hit, though an engine could not use them, over all asked for."""
    requests_with_hit_ratio: float
    """Requests that hit anything, over all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one size."""

    trace: str
    policy: str
    size_blocks: int
    size_fraction: float
    ratios: Ratios
    window: Window

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "trace": self.trace,
            "policy": self.policy,
            "size_blocks": self.size_blocks,
            "size_fraction": self.size_fraction,
            **asdict(self.ratios),
            "window": self.window,
        }


class Simulation:
    """A trace, cut into paths once and simulated as often as asked.

    Raises:
        TraceError: if the trace has no block ids, or unchained ones.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.paths = paths_of(trace)
        self.links = links_of(self.paths)

    @cached_property
    def rows(self) -> Rows:
        """The paths as lists."""
        return Rows(self.paths)

    @cached_property
    def curve(self) -> Curve:
        """LRU at every size."""
        return lru_curve(self.links, self.trace.path_blocks)

    def ceiling_hits(self) -> Ints:
        """Return the hit of each request in a cache without bounds, in blocks."""
        return summed(self.links.blocks, self.links)

    def hits(self, policy: str, capacity: int) -> Ints:
        """Return the hit of each request, in blocks.

        LRU comes from its curve, everything at the size of the trace from the ceiling: both equal
        the run of the policy, request by request, which ``tests/simulate`` checks.

        Raises:
            ValueError: if there is no such policy.
        """
        if policy == OPTIMAL:
            return optimal_hits(self.links, capacity)
        made = make_policy(policy)
        if capacity >= self.trace.distinct_blocks:
            return self.ceiling_hits()
        if policy == "lru":
            return self.curve.hits(capacity)
        return np.array(simulate_policy(self.rows, made, capacity), np.int64)

    def ratios(self, hits: Ints, window: Window = "all", blocks: Ints | None = None) -> Ratios:
        """Return the shares of a window. ``blocks`` are all hits, where they are more than the run."""
        first = first_counted(self.trace, window)
        trace, run = self.trace, hits[first:]
        tokens = trace.input_tokens[first:]
        served = np.minimum(run * trace.block_tokens, tokens)
        asked = int(trace.path_blocks[first:].sum())
        every = run if blocks is None else blocks[first:]
        return Ratios(
            prefix_hit_ratio=_share(int(run.sum()), asked),
            prefix_token_hit_ratio=_share(int(served.sum()), int(tokens.sum())),
            block_hit_ratio=_share(int(every.sum()), asked),
            requests_with_hit_ratio=_share(int((every > 0).sum()), len(run)),
        )

    def row(
        self, policy: str, size: Size, window: Window = "all", semantics: Semantics = "prefix"
    ) -> Row:
        """Simulate one policy at one size."""
        blocks = None
        if semantics == "flat":
            if policy == OPTIMAL:
                msg = "optimal is a bound on prefixes; expected a policy with flat semantics"
                raise ValueError(msg)
            runs, found = simulate_flat(self.trace, make_policy(policy), size.blocks)
            hits, blocks = np.array(runs, np.int64), np.array(found, np.int64)
        else:
            hits = self.hits(policy, size.blocks)
        ratios = self.ratios(hits, window, blocks)
        return Row(self.trace.name, policy, size.blocks, size.fraction, ratios, window)


def first_counted(trace: Trace, window: Window) -> int:
    """Return the first request of a window: half of the requests warm the cache up."""
    return len(trace) // 2 if window == "last_half" else 0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def simulate(
    simulation: Simulation,
    policies: Sequence[str],
    sizes: Sequence[Size],
    *,
    window: Window = "all",
    semantics: Semantics = "prefix",
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return rows of every policy at every size, the ceiling, the LRU curve and what they say.

    ``progress`` hears what is simulated next. The same trace and options give the same result.

    Raises:
        ValueError: naming an unknown policy and those there are.
    """
    for policy in policies:
        if policy not in {*POLICIES, OPTIMAL}:
            msg = f"no policy named {policy!r}; expected one of {', '.join([*POLICIES, OPTIMAL])}"
            raise ValueError(msg)
    rows = []
    for policy in policies:
        for size in sizes:
            progress(f"{simulation.trace.name}: {policy}, {size.blocks:,} blocks")
            rows.append(simulation.row(policy, size, window, semantics))
    ceiling = simulation.ratios(simulation.ceiling_hits(), window)
    return {
        "rows": [row.as_dict() for row in rows],
        "ceiling": {
            "size_blocks": simulation.trace.distinct_blocks,
            **asdict(ceiling),
            "window": window,
        },
        "lru_curve": curve_points(simulation, window),
        "recommendation": recommendation(simulation, rows, window),
    }


def curve_points(simulation: Simulation, window: Window) -> list[dict[str, Any]]:
    """Return points of the exact LRU curve, dense where caches are small."""
    sizes, _ = simulation.curve.points(first_counted(simulation.trace, window))
    if len(sizes) > CURVE_POINTS:
        last = int(sizes[-1])
        spaced = np.geomspace(1, last, CURVE_POINTS - 1).round().astype(np.int64)
        sizes = np.unique(np.concatenate([[0], spaced]))
    points = []
    for size in sizes.tolist():
        ratios = simulation.ratios(simulation.curve.hits(size), window)
        points.append(
            {
                "size_blocks": size,
                "size_fraction": size / simulation.trace.distinct_blocks,
                "prefix_hit_ratio": ratios.prefix_hit_ratio,
                "prefix_token_hit_ratio": ratios.prefix_token_hit_ratio,
            }
        )
    return points


def recommendation(simulation: Simulation, rows: Sequence[Row], window: Window) -> dict[str, Any]:
    """Return the sizes and the policy that the rows and the LRU curve speak for.

    ``sizes`` are the smallest with a share of the ceiling under LRU, None where nothing is reused;
    the knee is where the curve is highest above the line from nothing to the whole trace. Of the
    gaps, ``capacity`` is what the best policy of this size could not serve, and ``policy`` what the
    best one here left to it.
    """
    sizes, hits = simulation.curve.points(first_counted(simulation.trace, window))
    blocks = simulation.trace.distinct_blocks
    knee = int(np.argmax(hits * blocks - sizes * int(hits[-1])))
    policy, gain = _best(rows)
    return {
        "sizes": {
            f"{share:.0%}": smallest(sizes, hits, share) if hits[-1] else None for share in SHARES
        },
        "knee": {
            "size_blocks": int(sizes[knee]),
            "size_fraction": int(sizes[knee]) / blocks,
            "share_of_ceiling": _share(int(hits[knee]), int(hits[-1])),
        },
        "policy": policy,
        "gain_over_lru": gain,
        "gaps": _gaps(simulation, rows, window),
    }


def smallest(sizes: Ints, hits: Ints, share: float) -> int:
    """Return the smallest size, in blocks, that has a share of the most hits, exactly."""
    wanted = int(np.ceil(share * int(hits[-1])))
    at = int(np.searchsorted(hits, wanted))
    if at == 0:
        return int(sizes[0])
    rise, run = int(hits[at] - hits[at - 1]), int(sizes[at] - sizes[at - 1])
    return int(sizes[at - 1]) + -(-(wanted - int(hits[at - 1])) * run // rise)


def _means(rows: Sequence[Row]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row.policy, []).append(row.ratios.prefix_token_hit_ratio)
    return {policy: sum(each) / len(each) for policy, each in values.items()}


def _best(rows: Sequence[Row]) -> tuple[str, float | None]:
    """Return the policy to use and its mean gain over LRU, None where LRU was not simulated."""
    means = {policy: mean for policy, mean in _means(rows).items() if policy != OPTIMAL}
    if not means:
        return "lru", None
    best = max(means, key=lambda policy: means[policy])
    if "lru" not in means:
        return best, None
    gain = means[best] - means["lru"]
    return (best, gain) if gain > WORTH_CHANGING else ("lru", 0.0)


def _gaps(simulation: Simulation, rows: Sequence[Row], window: Window) -> list[dict[str, Any]]:
    ceiling = simulation.ratios(simulation.ceiling_hits(), window).prefix_token_hit_ratio
    online: dict[int, float] = {}
    for row in rows:
        if row.policy != OPTIMAL:
            served = row.ratios.prefix_token_hit_ratio
            online[row.size_blocks] = max(online.get(row.size_blocks, 0.0), served)
    return [
        {
            "size_blocks": row.size_blocks,
            "capacity": ceiling - row.ratios.prefix_token_hit_ratio,
            "policy": row.ratios.prefix_token_hit_ratio - online[row.size_blocks],
        }
        for row in rows
        if row.policy == OPTIMAL and row.size_blocks in online
    ]
