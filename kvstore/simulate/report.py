"""Simulation of one trace: rows, costs, curve, tiers, windows and recommendation, as one ``Report``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.output.sizes import Size
from kvstore.simulate.cost import FirstToken
from kvstore.simulate.hierarchy import Hierarchy, hierarchy_report
from kvstore.simulate.hints import hints
from kvstore.simulate.optimal import OPTIMAL
from kvstore.simulate.recommendation import Progress, recommend
from kvstore.simulate.results import CurvePoint, InfiniteCache, Report, RowCost, TraceFacts
from kvstore.simulate.run import (
    Each,
    Row,
    SimulateOptions,
    Simulation,
    first_counted,
    in_turn,
)
from kvstore.simulate.sentences import recommendation_lines
from kvstore.simulate.tiers import Flow, simulate_tiers
from kvstore.simulate.window import window_report
from kvstore.trace.columns import SECOND, Trace

CURVE_POINTS = 200
"""Points of a curve in a report: enough for a smooth line of 800 pixels."""


def make_report(
    simulation: Simulation,
    options: SimulateOptions,
    *,
    each: Each | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Simulate a trace with ``options``. ``each`` runs the tasks, by default one after the other."""
    trace, spread = simulation.trace, each or in_turn(simulation)
    first = first_counted(trace, options.interval)
    tasks = [(policy, size, options) for policy in options.policies for size in options.sizes]
    rows, costs = [], []
    for row, spent in spread(_row, tasks):
        progress(f"{row.trace}: {row.policy}, {row.size_blocks:,} blocks")
        rows.append(row)
        if spent is not None:
            size_bytes = options.size_bytes(row.size_blocks, trace.block_tokens)
            costs.append(RowCost(row.policy, row.size_blocks, size_bytes, spent))
    hits = simulation.infinite_cache_hits()
    windows = None
    if options.windows is not None:
        # Blocks stay on SSD for days, so the pool is simulated with the hits of an infinite cache.
        speed = None if options.cost is None else options.cost.prefill_tps
        windows = window_report(trace, hits, options.windows, first, prefill_tps=speed)
    advice = recommend(simulation, options, rows, windows, first, progress)
    ratios = simulation.ratios(hits, first)
    report = Report(
        trace=_facts(trace, options),
        rows=rows,
        costs=None if options.cost is None else costs,
        infinite_cache=InfiniteCache(trace.distinct_blocks, ratios, options.interval),
        lru_curve=_curve(simulation, options),
        recommendation=advice,
        infinite_cache_of={
            name: simulation.ratios(hits, first_counted(trace, name))
            for name in ("all", "last_half")
        },
        hierarchies=_hierarchies(simulation, options, spread, progress) if options.tiers else None,
        window_pool=windows,
        hints=hints(simulation, rows, first),
    )
    text = recommendation_lines(report, options, is_bounded=simulation.request_share is not None)
    return replace(report, recommendation=replace(advice, text=tuple(text)))


def _row(
    simulation: Simulation, task: tuple[str, Size, SimulateOptions]
) -> tuple[Row, FirstToken | None]:
    policy, size, options = task
    row, hits = simulation.run(policy, size, options.interval, options.semantics)
    return row, simulation.first_token(hits, options)


def _facts(trace: Trace, options: SimulateOptions) -> TraceFacts:
    token_bytes = options.token_bytes
    return TraceFacts(
        name=trace.name,
        requests=len(trace),
        seconds=int(trace.arrival[-1] - trace.arrival[0]) / SECOND if len(trace) else 0.0,
        block_tokens=trace.block_tokens,
        block_references=trace.references,
        distinct_blocks=trace.distinct_blocks,
        bytes_per_token=None if token_bytes is None else float(token_bytes),
    )


def _curve(simulation: Simulation, options: SimulateOptions) -> list[CurvePoint]:
    """Return points of the exact LRU curve, dense where caches are small."""
    trace, first = simulation.trace, first_counted(simulation.trace, options.interval)
    sizes, _ = simulation.curve.points(first)
    if len(sizes) > CURVE_POINTS:
        spaced = np.geomspace(1, int(sizes[-1]), CURVE_POINTS - 1).round().astype(np.int64)
        sizes = np.unique(np.concatenate([[0], spaced]))
    points = []
    for size in sizes.tolist():
        hits = simulation.curve.hits(size)
        ratios, spent = simulation.ratios(hits, first), simulation.first_token(hits, options)
        points.append(
            CurvePoint(
                size_blocks=size,
                size_fraction=size / trace.distinct_blocks,
                prefix_hit_ratio=ratios.prefix_hit_ratio,
                prefix_token_hit_ratio=ratios.prefix_token_hit_ratio,
                size_bytes=options.size_bytes(size, trace.block_tokens),
                ttft_seconds=None if spent is None else spent.ttft_seconds,
            )
        )
    return points


def _hierarchies(
    simulation: Simulation, options: SimulateOptions, each: Each, progress: Progress
) -> list[Hierarchy]:
    trace = simulation.trace
    policies = [policy for policy in options.policies if policy != OPTIMAL]
    found = []
    flows = each(_flow, [(policy, options) for policy in policies])
    for policy, flow in zip(policies, flows, strict=True):
        progress(f"{trace.name}: {policy}, {len(options.tiers)} tiers")
        found.append(hierarchy_report(trace, flow, options, policy))
    return found


def _flow(simulation: Simulation, task: tuple[str, SimulateOptions]) -> Flow:
    policy, options = task
    return simulate_tiers(
        simulation.trace, options.tiers, options.inclusion, policy, simulation.request_share
    )
