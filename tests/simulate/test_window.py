"""The simulated window pool equals the real one, event by event; its report."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kvstore.identity.block import BlockHash
from kvstore.simulate.json_form import as_dict
from kvstore.simulate.run import Simulation
from kvstore.simulate.window import (
    Pool,
    Windows,
    all_window_tokens,
    simulate_windows,
    window_report,
)
from kvstore.tier.window import WindowPool
from kvstore.trace.columns import SECOND, Trace
from tests.builders import Clock, snapshot_of, windowed_layout
from tests.simulate.support import grown_paths, trace_of

W = 8
ROW_BYTES = 10
"""Of ``windowed_layout``."""
OWNER = BlockHash(bytes(32))


def timed(paths: list[list[int]], seed: int = 0) -> Trace:
    """Chains with gaps between them, some of none and some long."""
    draw = random.Random(seed)
    gaps = [draw.choice([0, 1, 3, 10, 60]) * SECOND for _ in paths]
    gaps[0] = 0
    return replace(trace_of(paths), arrival=np.cumsum(gaps))


def key_of(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(32, "big"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [None, 0, 7, 8, 20, 60])
@pytest.mark.parametrize("ttl", [1.0, 20.0, 90.0])
def test_event_by_event_it_does_what_the_real_pool_does(
    ttl: float, budget: int | None, seed: int
) -> None:
    trace = timed(grown_paths(seed), seed)
    hits = Simulation(trace).infinite_cache_hits()
    clock = Clock(0.0)
    layout = windowed_layout(W)
    real = WindowPool(
        layout,
        capacity_bytes=10**9 if budget is None else budget * ROW_BYTES,
        ttl_seconds=ttl,
        rows=W,
        clock=clock,
    )
    replayed = []

    def follow(request: int, pool: Pool) -> None:
        """Do to the real pool what an engine does for one request, then compare all they hold."""
        clock.now = int(trace.arrival[request]) / SECOND
        path, hit = trace.chain(request).tolist(), int(hits[request])
        replayed.append(0)
        if hit:
            stop = hit * trace.block_tokens
            snapshot = real.pin(key_of(path[hit - 1]))
            if snapshot is not None:
                real.unpin(snapshot)
            else:
                start = max(0, stop - W)
                replayed[-1] = stop - start
                rebuilt = snapshot_of(layout, start, stop)
                real.put(key_of(path[hit - 1]), rebuilt, owner=OWNER, is_replayed=True)
        if path:
            stop = len(path) * trace.block_tokens
            real.put(key_of(path[-1]), snapshot_of(layout, 0, stop), owner=OWNER)
        assert [key_of(block) for block in pool.held] == list(real._held), request
        assert pool.used * ROW_BYTES == real.used_bytes
        assert (pool.evicted, pool.expired) == (real.evicted, real.expired)

    outcome = simulate_windows(trace, hits, Windows(W, ttl, budget), follow)
    assert outcome.replayed.tolist() == replayed
    assert any(replayed)
    assert (outcome.evicted, outcome.expired) == (real.evicted, real.expired)


def test_a_window_that_is_gone_costs_at_most_w_tokens_and_never_the_hit() -> None:
    # vLLM issue 48435: with the window evicted, reuse fell to nothing though all else was there.
    paths = [[1, 2, 3], [1, 2, 3, 4], [1]]
    trace = trace_of(paths, block_tokens=4)
    hits = Simulation(trace).infinite_cache_hits()
    outcome = simulate_windows(trace, hits, Windows(W, math.inf, budget=0))
    assert hits.tolist() == [0, 3, 1]
    assert outcome.replayed.tolist() == [0, W, 4]


def test_a_block_that_is_filled_in_part_needs_no_window_and_leaves_none() -> None:
    trace = replace(trace_of([[1, 2], [1, 2]]), input_tokens=np.array([6, 6], np.int64))
    hits = Simulation(trace).infinite_cache_hits()
    seen: list[list[int]] = []
    simulate_windows(
        trace, hits, Windows(W, math.inf), lambda _request, pool: seen.append(list(pool.held))
    )
    assert seen == [[0], [0]]
    assert all_window_tokens(trace, W) == 4


def test_the_windows_of_all_prompts_are_each_counted_once() -> None:
    trace = trace_of([[1], [1], [1, 2, 3], [9, 9], []])
    assert all_window_tokens(trace, W) == 4 + 8 + 8


def test_a_longer_life_never_means_more_replays_without_a_budget() -> None:
    trace = timed(grown_paths(3, 300), 3)
    hits = Simulation(trace).infinite_cache_hits()
    found = as_dict(window_report(trace, hits, Windows(W, 20.0), 0, ttls=(1.0, 5.0, 60.0, 300.0)))
    kept = [point["kept"] for point in found["curve"]]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
    assert [point["ttl_seconds"] for point in found["curve"]] == [1, 5, 20, 60, 300, None]
    assert found["kept"] == kept[2]
    assert found["replays"] == round((1 - found["kept"]) * found["turns"])
    assert found["ttl_for"] == {"90%": None, "95%": None, "99%": None}, "few of these go on"


def test_only_requests_after_the_warm_up_are_counted() -> None:
    trace = timed([[1, 2], [1, 2], [1, 2], [1, 2]])
    hits = Simulation(trace).infinite_cache_hits()
    assert window_report(trace, hits, Windows(W, 1e6), 2).asked.turns == 2
    assert window_report(trace, hits, Windows(W, 1e6), 0).asked.turns == 3
    nothing = window_report(trace, hits * 0, Windows(W, 1e6), 0).asked
    assert (nothing.turns, nothing.kept) == (0, 1.0)


def test_a_time_to_live_is_named_for_each_share_of_turns() -> None:
    gaps = [0, *[10] * 93, *[100] * 3, *[1000] * 4]
    trace = replace(trace_of([[1, 2]] * 101), arrival=np.cumsum(gaps) * SECOND)
    hits = Simulation(trace).infinite_cache_hits()
    found = as_dict(window_report(trace, hits, Windows(W, 5.0), 0, ttls=(20.0, 200.0, 2000.0)))
    assert found["kept"] == 0.0
    assert found["ttl_for"] == {"90%": 20.0, "95%": 200.0, "99%": 2000.0}
    assert found["replayed_tokens"] == 100 * W
