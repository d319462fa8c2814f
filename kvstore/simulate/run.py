"""A trace at many sizes under many policies: the rows, the ceiling, the curve, what they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from kvstore.index import plan
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.choice import LRU, OPTIMAL, SHARES, WORTH_CHANGING, choose, smallest
from kvstore.simulate.cost import FREE, Cost, Link, first_token_seconds, ttft_report
from kvstore.simulate.curve import Curve, lru_curve, summed
from kvstore.simulate.flat import flat_policy, simulate_flat
from kvstore.simulate.optimal import optimal_hits
from kvstore.simulate.trace_index import ChainLists, simulate_policy
from kvstore.simulate.sizes import Size
from kvstore.trace.columns import Ints, Trace
from kvstore.trace.chains import links_of, chains_of

Window = str
"""Which requests are counted: ``all``, ``last_half``, or a share such as ``last_75%``."""
Semantics = Literal["prefix", "flat"]
CURVE_POINTS = 200
"""Points of a curve in a report: enough for a smooth line of 800 pixels."""


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

    With ``request_share`` one request takes no more than that share of a cache, and of each tier. The
    exact LRU curve, the ceiling and the optimum are those without it.

    Raises:
        TraceError: if the trace has no block ids, or unchained ones.
        ValueError: if the share is not above 0 and at most 1.
    """

    def __init__(self, trace: Trace, request_share: float | None = None) -> None:
        if request_share is not None and not 0 < request_share <= 1:
            msg = f"expected a share for one request above 0 and at most 1, found {request_share}"
            raise ValueError(msg)
        self.trace = trace
        self.request_share = request_share
        self.chains = chains_of(trace)
        self.links = links_of(self.chains)

    @cached_property
    def chain_lists(self) -> ChainLists:
        """The paths as lists."""
        return ChainLists(self.chains)

    @cached_property
    def curve(self) -> Curve:
        """LRU at every size."""
        return lru_curve(self.links, self.trace.chain_blocks)

    def prepare(self) -> None:
        """Work out what is otherwise worked out when it is first needed."""
        _ = self.chain_lists, self.curve

    def infinite_cache_hits(self) -> Ints:
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
        made, room = make_policy(policy), self.room(capacity)
        is_bounded = room < min(capacity, int(self.trace.chain_blocks.max(initial=0)))
        if capacity >= self.trace.distinct_blocks and not is_bounded:
            return self.infinite_cache_hits()
        if policy == "lru" and not is_bounded:
            return self.curve.hits(capacity)
        return np.array(simulate_policy(self.chain_lists, made, capacity, room=room), np.int64)

    def room(self, capacity: int) -> int:
        """Return the most blocks of one request that a cache of ``capacity`` blocks takes."""
        return plan.request_blocks(capacity, self.request_share)

    def ratios(self, hits: Ints, window: Window = "all", blocks: Ints | None = None) -> Ratios:
        """Return the shares of a window. ``blocks`` are all hits, where they are more than the run."""
        return self.ratios_from(hits, first_counted(self.trace, window), blocks)

    def ratios_from(self, hits: Ints, first: int, blocks: Ints | None = None) -> Ratios:
        """Return the shares of the requests from ``first`` on."""
        trace, run = self.trace, hits[first:]
        tokens = trace.input_tokens[first:]
        served = np.minimum(run * trace.block_tokens, tokens)
        asked = int(trace.chain_blocks[first:].sum())
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
        return self.run(policy, size, window, semantics)[0]

    def run(
        self, policy: str, size: Size, window: Window = "all", semantics: Semantics = "prefix"
    ) -> tuple[Row, Ints]:
        """Simulate one policy at one size; return the row, and the hit of each request in blocks."""
        blocks = None
        if semantics == "flat":
            if policy == OPTIMAL:
                msg = "optimal is a bound on prefixes; expected a policy with flat semantics"
                raise ValueError(msg)
            runs, found = simulate_flat(
                self.trace,
                flat_policy(policy, size.blocks),
                size.blocks,
                room=self.room(size.blocks),
            )
            hits, blocks = np.array(runs, np.int64), np.array(found, np.int64)
        else:
            hits = self.hits(policy, size.blocks)
        ratios = self.ratios(hits, window, blocks)
        return Row(self.trace.name, policy, size.blocks, size.fraction, ratios, window), hits


def window_of(warmup: float) -> Window:
    """Return the window after this share of the requests has warmed the cache up.

    Raises:
        ValueError: if no request would be left.
    """
    if not 0 <= warmup < 1:
        msg = f"the warm-up is a share of the requests, from 0 to below 1, found {warmup}"
        raise ValueError(msg)
    named = {0.0: "all", 0.5: "last_half"}
    return named.get(warmup) or f"last_{float(100 - 100 * Fraction(str(warmup))):g}%"


def first_counted(trace: Trace, window: Window) -> int:
    """Return the first request of a window: those before it warm the cache up."""
    share = {"all": "100", "last_half": "50"}.get(window) or re.sub(r"last_(.*)%", r"\1", window)
    return int(len(trace) * (100 - Fraction(share)) / 100)


Each = Callable[[Callable[[Simulation, Any], Any], Iterable[Any]], Iterable[Any]]
"""Call a function on the simulation and each task, and yield what it returns, in order."""


def in_turn(simulation: Simulation) -> Each:
    """Call one after the other."""
    return lambda function, tasks: map(partial(function, simulation), tasks)


@dataclass(frozen=True, slots=True)
class _Task:
    """One run, as it is handed to whoever does it."""

    policy: str
    size: Size
    window: Window
    semantics: Semantics
    cost: Cost | None
    link: Link


def _run(simulation: Simulation, task: _Task) -> tuple[Row, dict[str, Any] | None]:
    """Simulate one policy at one size, with its times where a token's cost is known."""
    row, hits = simulation.run(task.policy, task.size, task.window, task.semantics)
    if task.cost is None:
        return row, None
    return row, times(simulation, hits, task.window, task.cost, task.link)


def times(
    simulation: Simulation, hits: Ints, window: Window, cost: Cost, link: Link
) -> dict[str, Any]:
    """Return the times to first token of requests that hit these blocks in one place."""
    trace = simulation.trace
    seconds, _ = first_token_seconds(trace, hits[:, None], [link], cost)
    found: dict[str, Any] = ttft_report(trace, seconds, cost, first_counted(trace, window))
    return found


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def simulate(
    simulation: Simulation,
    policies: Sequence[str],
    sizes: Sequence[Size],
    *,
    window: Window = "all",
    semantics: Semantics = "prefix",
    cost: Cost | None = None,
    link: Link = FREE,
    each: Each | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return rows of every policy at every size, the ceiling, the LRU curve and what they say.

    With ``cost``, ``costs`` has the times to first token of each row, reading through ``link``.
    ``each`` does the runs, by default one after the other; ``progress`` hears which one is done.
    The same trace and options give the same result.

    Raises:
        ValueError: naming an unknown policy and those there are.
    """
    for policy in policies:
        if policy not in {*POLICIES, OPTIMAL}:
            msg = f"no policy named {policy!r}; expected one of {', '.join([*POLICIES, OPTIMAL])}"
            raise ValueError(msg)
    tasks = [
        _Task(policy, size, window, semantics, cost, link) for policy in policies for size in sizes
    ]
    rows, costs = [], []
    for row, spent in (each or in_turn(simulation))(_run, tasks):
        progress(f"{row.trace}: {row.policy}, {row.size_blocks:,} blocks")
        rows.append(row)
        if spent is not None and cost is not None:
            size_bytes = round(row.size_blocks * cost.token_bytes * simulation.trace.block_tokens)
            name = {"policy": row.policy, "size_blocks": row.size_blocks, "size_bytes": size_bytes}
            costs.append(name | spent)
    ceiling = simulation.ratios(simulation.infinite_cache_hits(), window)
    return {
        "rows": [row.as_dict() for row in rows],
        **({"costs": costs} if cost is not None else {}),
        "ceiling": {
            "size_blocks": simulation.trace.distinct_blocks,
            **asdict(ceiling),
            "window": window,
        },
        "lru_curve": curve_points(simulation, window),
        "recommendation": recommendation(simulation, rows, policies, window, progress),
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


def recommendation(
    simulation: Simulation,
    rows: Sequence[Row],
    policies: Sequence[str],
    window: Window,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return the policy to use with its size, and what the rows and the LRU curve say.

    ``choice`` is the decision (``kvstore.simulate.choice``), None where nothing is reused. ``sizes``
    are the smallest with a share of the ceiling under LRU, None where nothing is reused; the knee is
    where the curve is highest above the line from nothing to the whole trace. Of the gaps,
    ``capacity`` is what the best policy of this size could not serve, and ``policy`` what the best
    one here left to it. ``gains`` are of sizes that were asked for.
    """
    first = first_counted(simulation.trace, window)
    sizes, hits = simulation.curve.points(first)
    blocks = simulation.trace.distinct_blocks
    knee = int(np.argmax(hits * blocks - sizes * int(hits[-1])))
    choice = choose(simulation, policies, first, progress)
    return {
        "choice": None if choice is None else asdict(choice),
        "sizes": {
            f"{share:.0%}": smallest(sizes, hits, share) if hits[-1] else None for share in SHARES
        },
        "knee": {
            "size_blocks": int(sizes[knee]),
            "size_fraction": int(sizes[knee]) / blocks,
            "share_of_ceiling": _share(int(hits[knee]), int(hits[-1])),
        },
        "policy": LRU if choice is None else choice.policy,
        "gain_over_lru": None if choice is None else choice.gain_over_lru,
        "gains": _gains(simulation, rows, first),
        "gaps": _gaps(simulation, rows, window),
    }


def _gains(simulation: Simulation, rows: Sequence[Row], first: int) -> list[dict[str, Any]]:
    """Return the best policy of each size that was asked for, where it is worth changing from LRU.

    LRU's hits are its row's, or by prefix where it has none.
    """
    by_size: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.policy != OPTIMAL:
            ratio = row.ratios.prefix_token_hit_ratio
            by_size.setdefault(row.size_blocks, {})[row.policy] = ratio
    found = []
    for size, served in sorted(by_size.items()):
        lru = served.get(LRU)
        if lru is None:
            lru = simulation.ratios_from(simulation.hits(LRU, size), first).prefix_token_hit_ratio
        most, best = max((ratio, policy) for policy, ratio in served.items())
        if most - lru >= WORTH_CHANGING:
            found.append({"size_blocks": size, "policy": best, "gain_over_lru": most - lru})
    return found


def _gaps(simulation: Simulation, rows: Sequence[Row], window: Window) -> list[dict[str, Any]]:
    ceiling = simulation.ratios(simulation.infinite_cache_hits(), window).prefix_token_hit_ratio
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
