"""The simulator runs the tiers' own policies and equals a tier's index, event by event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.policy.protocol import Policy
from kvstore.policy.queues import Arc
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.curve import lru_curve
from kvstore.simulate.flat import simulate_flat
from kvstore.simulate.optimal import OPTIMAL, optimal_hits
from kvstore.simulate.run import Simulation
from kvstore.simulate.trace_index import ChainLists, simulate_policy
from kvstore.trace.chains import chains_of, links_of
from tests.simulate.support import (
    Driven,
    Prefix,
    drive_blocks,
    drive_index,
    drive_optimal,
    grown_paths,
    trace_of,
)

SIZES = (1, 2, 3, 5, 9, 17, 40)
every_policy = pytest.mark.parametrize("name", POLICIES)


def drive_tree(paths: list[list[int]], policy: Policy[Any], capacity: int) -> Driven:
    """The simulator, with its block numbers as prefixes again."""
    cut = chains_of(trace_of(paths))
    rows = ChainLists(cut)
    names: dict[int, Prefix] = {}
    for symbols, last in zip(paths, rows.lasts, strict=True):
        segment = last
        while segment >= 0:
            for depth in range(rows.starts[segment], rows.stops[segment]):
                names[rows.firsts[segment] + depth] = tuple(symbols[: depth + 1])
            segment = rows.parents[segment]
    assert len(names) == cut.trace.distinct_blocks
    driven = Driven(evicted=[[] for _ in paths])
    driven.hits = simulate_policy(
        rows, policy, capacity, lambda request, block: driven.evicted[request].append(names[block])
    )
    return driven


@every_policy
@pytest.mark.parametrize("seed", range(6))
def test_event_by_event_the_simulator_does_what_a_tiers_index_does(name: str, seed: int) -> None:
    paths = grown_paths(seed)
    evicted = 0
    for capacity in SIZES:
        index = drive_index(paths, make_policy(name), capacity)
        tree = drive_tree(paths, make_policy(name), capacity)
        assert tree.hits == index.hits
        assert tree.evicted == index.evicted
        evicted += sum(map(len, tree.evicted))
    assert evicted > 100, "too little was evicted to compare"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("lru", lambda block: block.used),
        ("ttl", lambda block: block.used),  # nothing here expires
        ("fifo", lambda block: block.stored),
        ("lfu", lambda block: (block.uses, block.used)),
    ],
)
def test_on_segments_it_is_what_the_specification_says_of_blocks(
    name: str, rank: Any, seed: int
) -> None:
    paths = grown_paths(seed)
    rows = ChainLists(chains_of(trace_of(paths)))
    for capacity in SIZES:
        assert simulate_policy(rows, make_policy(name), capacity) == drive_blocks(
            paths, rank, capacity
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_lru_curve_is_every_size_of_lru(seed: int) -> None:
    trace = trace_of(grown_paths(seed))
    cut = chains_of(trace)
    rows, curve = ChainLists(cut), lru_curve(links_of(cut), trace.chain_blocks)
    bends, totals = curve.points()
    for capacity in range(trace.distinct_blocks + 2):
        run = simulate_policy(rows, make_policy("lru"), capacity)
        assert curve.hits(capacity).tolist() == run
        assert np.interp(capacity, bends, totals) == pytest.approx(sum(run), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_part_of_the_curve_counts_the_requests_of_that_part(seed: int) -> None:
    trace = trace_of(grown_paths(seed))
    curve = lru_curve(links_of(chains_of(trace)), trace.chain_blocks)
    half = len(trace) // 2
    bends, totals = curve.points(half)
    for capacity in (0, 1, 7, 30, trace.distinct_blocks):
        assert np.interp(capacity, bends, totals) == pytest.approx(
            curve.hits(capacity)[half:].sum()
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_keeps_what_is_used_again_soonest(seed: int) -> None:
    paths = grown_paths(seed, requests=60)
    links = links_of(chains_of(trace_of(paths)))
    for capacity in (0, *SIZES):
        assert optimal_hits(links, capacity).tolist() == drive_optimal(paths, capacity)


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_beats_the_optimum_and_a_larger_optimum_or_lru_never_hits_less(
    seed: int,
) -> None:
    trace = trace_of(grown_paths(seed))
    simulation = Simulation(trace)
    ceiling = int(simulation.infinite_cache_hits().sum())
    before = {"lru": 0, OPTIMAL: 0}
    for capacity in range(trace.distinct_blocks + 1):
        bound = int(simulation.hits(OPTIMAL, capacity).sum())
        assert bound <= ceiling
        now = {name: int(simulation.hits(name, capacity).sum()) for name in before}
        assert all(now[name] >= hits for name, hits in before.items())
        before = now
        for name in POLICIES if capacity in SIZES else ():
            assert int(simulation.hits(name, capacity).sum()) <= bound
    assert before == {"lru": ceiling, OPTIMAL: ceiling}


@every_policy
def test_a_cache_of_the_whole_trace_hits_all_that_is_reused(name: str) -> None:
    paths = grown_paths(1)
    trace = trace_of(paths)
    run = simulate_policy(ChainLists(chains_of(trace)), make_policy(name), trace.distinct_blocks)
    assert run == Simulation(trace).infinite_cache_hits().tolist() == drive_optimal(paths, 10**9)


@every_policy
def test_the_tail_goes_first_and_the_head_serves_what_comes_back(name: str) -> None:
    # llm-d-inference-sim issue 704: blocks of one request are equals, and the head went.
    paths = [[1, 2, 3], [9], [1, 2, 3]]
    driven = drive_tree(paths, make_policy(name), 3)
    assert driven.evicted[1] == [(1, 2, 3)]
    assert driven.hits == [0, 0, 2]


@every_policy
def test_a_request_never_evicts_what_it_hits(name: str) -> None:
    # vLLM issue 42948: making room for a request took the blocks that its lookup had found.
    driven = drive_tree([[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]], make_policy(name), 4)
    assert driven.hits == [0, 3, 4]


@every_policy
def test_a_path_longer_than_the_cache_keeps_its_head(name: str) -> None:
    long = list(range(10))
    assert drive_tree([long, long, [5], long], make_policy(name), 4).hits == [0, 4, 0, 3]


def hot_and_scan() -> list[list[int]]:
    """A few prompts that are asked again and again, and a stream of others that never are."""
    paths = [[hot, 1, 2] for hot in range(4)] * 4
    for once in range(60):
        paths += [[100 + once, 1, 2, 3], [200 + once, 1, 2]]
        paths += [[once % 4, 1, 2]]
    return paths


@pytest.mark.parametrize("name", ["arc", "s3fifo", "lfu", "gdsf", "cost", "2q", "slru"])
def test_what_is_used_often_outlives_what_passes_once(name: str) -> None:
    # SGLang pull request 18843: a count of uses was never raised, and LFU was LRU in disguise.
    rows = ChainLists(chains_of(trace_of(hot_and_scan())))
    lru = sum(simulate_policy(rows, make_policy("lru"), 20))
    assert sum(simulate_policy(rows, make_policy(name), 20)) > lru + 20


def test_each_policy_is_one_of_its_own() -> None:
    runs: dict[str, tuple[Any, ...]] = {}
    rows = [ChainLists(chains_of(trace_of(grown_paths(seed, 250)))) for seed in range(8)]
    for name in POLICIES:
        runs[name] = tuple(
            tuple(simulate_policy(each, make_policy(name), size))
            for each in rows
            for size in (9, 25)
        )
    del runs["ttl"]  # which is LRU where nothing expires
    assert len(set(runs.values())) == len(runs)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no policy named 'mru'; expected one of lru, arc"):
        make_policy("mru")


def test_arc_gives_room_to_the_side_whose_evicted_blocks_come_back() -> None:
    arc: Arc[Any] = Arc()
    again = [[9], [9], [8], [8]]
    simulate_flat(trace_of([*again, [1], [2], [3], [1]]), arc, 4)
    grown = arc._target
    assert grown > 0, "a block used once came back, and its side got no room"
    arc = Arc()
    kept_goes = [[1], [1], [2], [2], [3], [3], [4], [4], [5], [5], [1]]
    arc._target = 3.0
    simulate_flat(trace_of(kept_goes), arc, 4)
    assert arc._target < 3.0, "a block used again came back, and its side got no room"
