"""Rows, intervals, infinite caches and curves; flat blocks; notation of sizes."""

from __future__ import annotations

import json
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvstore.errors import TraceError
from kvstore.output.sizes import Size, size_of
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.flat import simulate_flat
from kvstore.simulate.json_form import as_dict
from kvstore.simulate.recommendation import smallest
from kvstore.simulate.report import make_report
from kvstore.simulate.run import SimulateOptions, Simulation
from kvstore.trace.columns import Trace
from tests.simulate.support import grown_paths, trace_of

# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5%", 9139),
        ("0.5%", 913),
        ("100%", 182_790),
        ("20000b", 20_000),
        ("1GiB", 2**20),
        ("0%", 0),
    ],
)
def test_a_size_is_a_share_blocks_or_bytes(text: str, blocks: int) -> None:
    assert size_of(text, 182_790, Fraction(1024)).blocks == blocks


def test_a_share_is_floored_exactly() -> None:
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert size_of("29%", 100) == Size(29, 0.29)
    assert size_of("50b", 200).fraction == 0.25


@pytest.mark.parametrize("text", ["5", "b", "-1%", "1G", "1e3b", "5%%", "", "nan%"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as"):
        size_of(text, 100)


def test_bytes_need_the_bytes_of_a_token() -> None:
    with pytest.raises(ValueError, match=r"a size in bytes \(1GiB\) needs the bytes per token"):
        size_of("1GiB", 100)


# ---- ratios ------------------------------------------------------------------------------------


def partial() -> Trace:
    """Requests of 10, 10, 4 and 10 tokens in blocks of 4: the last block of three is partial."""
    trace = trace_of([[1, 2, 3], [1, 2, 3], [1], [1, 2, 9]])
    tokens = np.array([10, 10, 4, 10], np.int64)
    fields = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    return Trace(**{**fields, "input_tokens": tokens})


def test_tokens_of_a_partial_block_count_as_many_as_there_are() -> None:
    simulation = Simulation(partial())
    row = as_dict(simulation.row("lru", Size(4, 1.0)))
    assert row == {
        "trace": "made",
        "policy": "lru",
        "size_blocks": 4,
        "size_fraction": 1.0,
        "prefix_hit_ratio": (3 + 1 + 2) / 10,
        "prefix_token_hit_ratio": (10 + 4 + 8) / 34,
        "block_hit_ratio": 0.6,
        "requests_with_hit_ratio": 0.75,
        "window": "all",
    }


def test_a_window_of_the_last_half_is_warmed_up_by_the_first() -> None:
    row = as_dict(Simulation(partial()).row("lru", Size(4, 1.0), "last_half"))
    assert row["prefix_hit_ratio"] == 3 / 4
    assert row["prefix_token_hit_ratio"] == 12 / 14
    assert row["requests_with_hit_ratio"] == 1.0


@pytest.mark.parametrize("name", [*POLICIES, "optimal"])
def test_a_cache_of_nothing_hits_nothing(name: str) -> None:
    simulation = Simulation(trace_of(grown_paths(1)))
    assert simulation.row(name, Size(0, 0.0)).ratios.prefix_hit_ratio == 0.0


def test_hits_do_not_depend_on_the_order_of_requests_at_one_time_beyond_recency() -> None:
    """Two requests at one time in either order leave the same blocks, so later hits are the same."""
    before, after = [[1, 2], [3, 4], [5]], [[1, 2, 6], [3, 4, 7]]
    one = Simulation(trace_of([*before, *after]))
    two = Simulation(trace_of([before[1], before[0], before[2], *after]))
    assert one.hits("lru", 6)[3:].tolist() == two.hits("lru", 6)[3:].tolist()


def test_lengths_alone_cannot_be_simulated() -> None:
    with pytest.raises(TraceError, match="no block ids"):
        Simulation(trace_of([[], []]))


# ---- the report --------------------------------------------------------------------------------


def simulate(
    simulation: Simulation, policies: list[str], sizes: list[Size], **others: Any
) -> dict[str, Any]:
    """A report in its JSON form."""
    options = SimulateOptions(policies=policies, sizes=sizes)
    found: dict[str, Any] = as_dict(make_report(simulation, options, **others))
    return found


def report(seed: int = 2) -> tuple[Simulation, dict[str, Any]]:
    simulation = Simulation(trace_of(grown_paths(seed, 300)))
    blocks = simulation.trace.distinct_blocks
    sizes = [size_of(text, blocks) for text in ("5%", "20%", "100%")]
    return simulation, simulate(simulation, ["lru", "arc", "optimal"], sizes)


def test_a_report_has_a_row_for_each_policy_and_size_and_is_the_same_each_time() -> None:
    _, found = report()
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [(row["policy"], row["size_fraction"]) for row in rows] == [
        (policy, size) for policy in ("lru", "arc", "optimal") for size in (0.05, 0.2, 1.0)
    ]
    assert json.dumps(found) == json.dumps(report()[1])
    assert set(found) == {
        *("schema", "trace", "rows", "ceiling", "lru_curve", "recommendation", "ceilings", "hints"),
        *("parameters", "seed", "command", "version"),
    }


def test_the_curve_of_a_report_goes_through_its_lru_rows_and_ends_at_the_ceiling() -> None:
    simulation, found = report()
    curve, ceiling = found["lru_curve"], found["ceiling"]
    assert isinstance(curve, list)
    assert isinstance(ceiling, dict)
    assert curve[-1]["prefix_hit_ratio"] == ceiling["prefix_hit_ratio"]
    for point in curve:
        ratios = simulation.ratios(simulation.hits("lru", point["size_blocks"]))
        assert point["prefix_token_hit_ratio"] == ratios.prefix_token_hit_ratio
    ratios_of_curve = [point["prefix_hit_ratio"] for point in curve]
    assert ratios_of_curve == sorted(ratios_of_curve)


@pytest.mark.parametrize("seed", range(5))
def test_the_size_for_a_share_of_the_ceiling_is_the_smallest(seed: int) -> None:
    simulation, found = report(seed)
    ceiling = int(simulation.infinite_cache_hits().sum())
    sizes = found["recommendation"]["sizes"]
    assert list(sizes) == ["90%", "95%", "99%"]
    for name, size in sizes.items():
        wanted = ceiling * int(name[:-1])
        assert int(simulation.curve.hits(size).sum()) * 100 >= wanted
        assert int(simulation.curve.hits(size - 1).sum()) * 100 < wanted


def test_shares_are_found_between_the_bends_of_a_curve() -> None:
    sizes, hits = np.array([0, 10, 20, 40]), np.array([0, 30, 30, 50])
    assert [smallest(sizes, hits, share) for share in (0.0, 0.1, 0.6, 0.62, 1.0)] == [
        0,
        2,
        10,
        21,
        40,
    ]


def test_the_knee_and_the_gaps_lie_where_they_should() -> None:
    paths = [[hot, 1, 2, 3] for hot in range(5)] * 40 + [[100 + cold] for cold in range(200)]
    simulation = Simulation(trace_of(paths))
    found = simulate(simulation, ["lru", "fifo", "optimal"], [Size(12, 12 / 220)])["recommendation"]
    assert found["knee"]["size_blocks"] == 20
    assert found["knee"]["share_of_ceiling"] == 1.0
    assert found["policy"] == "lru"
    gaps = found["gaps"][0]
    lru, fifo, optimal = (
        simulation.row(name, Size(12, 0)).ratios.prefix_token_hit_ratio
        for name in ("lru", "fifo", "optimal")
    )
    ceiling = simulation.ratios(simulation.infinite_cache_hits()).prefix_token_hit_ratio
    assert gaps["policy"] == optimal - max(lru, fifo)
    assert gaps["capacity"] == ceiling - optimal


def test_another_policy_is_recommended_where_it_gains() -> None:
    paths = [[hot, 1, 2] for hot in range(4)] * 4
    for once in range(100):
        paths += [[100 + once, 1, 2, 3], [300 + once, 1, 2], [once % 4, 1, 2]]
    simulation = Simulation(trace_of(paths))
    found = simulate(simulation, ["lru", "lfu"], [Size(20, 0.0)])["recommendation"]
    assert found["policy"] == "lfu"
    assert found["gain_over_lru"] > 0.01


def test_a_trace_without_reuse_has_no_sizes_to_name() -> None:
    found = simulate(Simulation(trace_of([[1], [2], [3]])), ["lru"], [Size(1, 1 / 3)])
    assert found["recommendation"]["sizes"] == {"90%": None, "95%": None, "99%": None}
    assert found["ceiling"]["prefix_hit_ratio"] == 0.0


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"no policy named 'x'; expected one of lru.*optimal"):
        simulate(Simulation(trace_of([[1]])), ["lru", "x"], [Size(1, 1.0)])


def test_progress_hears_of_each_run() -> None:
    heard: list[str] = []
    simulate(Simulation(trace_of([[1]])), ["lru", "arc"], [Size(1, 1.0)], progress=heard.append)
    assert heard == ["made: lru, 1 blocks", "made: arc, 1 blocks"]


# ---- flat --------------------------------------------------------------------------------------


def flat_lru(trace: Trace, capacity: int) -> list[int]:
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in range(len(trace)):
        hit = 0
        for block in trace.chain(request).tolist():
            if block in held:
                hit += 1
                held.move_to_end(block)
                continue
            if len(held) == capacity:
                held.popitem(last=False)
            held[block] = None
        hits.append(hit)
    return hits


def flat_sieve(trace: Trace, capacity: int) -> list[int]:
    """SIEVE as its authors draw it: a list, oldest first, a mark each, and a hand."""
    queue: list[int] = []
    marked: set[int] = set()
    hand = 0
    hits = []
    for request in range(len(trace)):
        hit = 0
        for block in trace.chain(request).tolist():
            if block in queue:
                hit += 1
                marked.add(block)
                continue
            if len(queue) == capacity:
                while queue[hand] in marked:
                    marked.discard(queue[hand])
                    hand = (hand + 1) % len(queue)
                del queue[hand]
                hand %= max(1, len(queue))  # past the newest it begins again, before the next comes
            queue.append(block)
        hits.append(hit)
    return hits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "model"), [("lru", flat_lru), ("sieve", flat_sieve)])
def test_flat_blocks_are_what_other_simulators_have(name: str, model: object, seed: int) -> None:
    trace = trace_of(grown_paths(seed))
    for capacity in (1, 2, 5, 17):
        _, hits = simulate_flat(trace, make_policy(name), capacity)
        assert hits == model(trace, capacity)  # type: ignore[operator]


def test_blocks_that_hit_behind_a_gap_are_no_prefix() -> None:
    # Four blocks, first in first out: the head goes first and strands what is behind it.
    trace = trace_of([[1, 2, 3, 4], [9], [1, 2, 3, 4]])
    runs, hits = simulate_flat(trace, make_policy("fifo"), 4)
    assert runs[2] == 0
    assert hits[2] == 0  # each miss takes the next one away
    runs, hits = simulate_flat(trace, make_policy("lfu"), 4)
    assert (runs[2], hits[2]) == (0, 0)
    row = Simulation(trace).row("fifo", Size(5, 1.0), semantics="flat")
    assert row.ratios.block_hit_ratio == row.ratios.prefix_hit_ratio == 4 / 9


def test_the_optimum_is_of_prefixes_only() -> None:
    with pytest.raises(ValueError, match="optimal is a bound on prefixes"):
        Simulation(trace_of([[1]])).row("optimal", Size(1, 1.0), semantics="flat")
