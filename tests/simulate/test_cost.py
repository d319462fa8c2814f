"""Times to first token, bytes of tiers, and their notation on the command line."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvstore.layout import layout
from kvstore.output.sizes import rate_of, seconds_of, size_text
from kvstore.simulate.cost import FREE, Cost, Link, bytes_of_model, first_token_seconds, ttft_report
from kvstore.simulate.hierarchy import hierarchy_report, tiers_of
from kvstore.simulate.json_form import as_dict
from kvstore.simulate.run import SimulateOptions, first_counted
from kvstore.simulate.tiers import Tier, simulate_tiers
from kvstore.trace.columns import SECOND
from tests.simulate.support import grown_paths, trace_of

COST = Cost(Fraction(1000), prefill_tps=100.0)
"""10 ms and 1,000 bytes a token: break-even at 100,000 bytes a second."""


def test_a_hit_saves_its_tokens_less_what_loading_them_takes() -> None:
    trace = trace_of([[1, 2, 3, 4, 5]], block_tokens=4)  # 20 tokens: 0.2 s
    served = np.array([[2, 2]])
    links = [Link(None, 0.0), Link(400_000.0, 0.01)]
    seconds, loaded = first_token_seconds(trace, served, links, COST)
    assert seconds[0] == pytest.approx(4 / 100 + 8 * 1000 / 400_000 + 0.01)
    assert loaded[0] == 16


@pytest.mark.parametrize(("bandwidth", "loaded"), [(100_001.0, 16), (99_999.0, 8)])
def test_a_tier_is_read_only_from_the_break_even_on(bandwidth: float, loaded: int) -> None:
    assert COST.break_even == 100_000
    trace = trace_of([[1, 2, 3, 4]], block_tokens=4)
    links = [FREE, Link(bandwidth, 0.0)]
    seconds, found = first_token_seconds(trace, np.array([[2, 2]]), links, COST)
    assert found[0] == loaded
    assert seconds[0] <= 8 / 100


def test_a_slow_tier_is_read_where_a_fast_one_below_it_makes_up_for_it() -> None:
    trace = trace_of([[1, 2, 3, 4]], block_tokens=4)
    served, links = np.array([[1, 3]]), [Link(90_000.0, 0.0), FREE]
    seconds, loaded = first_token_seconds(trace, served, links, COST)
    assert loaded[0] == 16
    assert seconds[0] == pytest.approx(4000 / 90_000)


def test_a_latency_that_costs_more_than_it_saves_is_not_paid() -> None:
    trace = trace_of([[1], [1, 2]], block_tokens=4)
    served, links = np.array([[1], [2]]), [Link(None, 0.05)]
    seconds, loaded = first_token_seconds(trace, served, links, COST)
    assert loaded.tolist() == [0, 8]
    assert seconds.tolist() == pytest.approx([0.04, 0.05])


def test_a_partial_block_saves_the_tokens_it_has() -> None:
    trace = replace(trace_of([[1, 2]]), input_tokens=np.array([6], np.int64))
    seconds, loaded = first_token_seconds(trace, np.array([[2]]), [FREE], COST)
    assert (seconds[0], loaded[0]) == (0.0, 6)


def test_times_are_reported_beside_those_without_a_cache() -> None:
    trace = trace_of([[1]] * 100, block_tokens=4)
    seconds = np.arange(1, 101) / 10_000
    found = as_dict(ttft_report(trace, seconds, COST, 0))
    assert found["ttft_seconds"]["p50"] == 0.005
    assert found["ttft_seconds"]["p95"] == 0.0095
    assert found["ttft_seconds"]["p99"] == 0.0099
    assert found["ttft_seconds"]["mean"] == pytest.approx(0.00505)
    assert found["without_cache"] == pytest.approx(
        dict.fromkeys(("mean", "p50", "p95", "p99"), 0.04)
    )
    assert found["saved_seconds"] == pytest.approx(100 * 0.04 - 0.505)


def test_a_models_bytes_are_those_of_its_layout() -> None:
    found = bytes_of_model("deepseek-v4.1-flash")
    known = layout("deepseek-v4.1-flash")
    assert (int(found.token_bytes), found.window_tokens) == (890, 128)
    assert found.window_token_bytes * 128 == known.window_bytes
    assert bytes_of_model("smollm2-135m").window_tokens == 0


# ---- tiers as they are written -----------------------------------------------------------------


def test_tiers_are_read_as_they_are_written() -> None:
    block = Fraction(1 << 20)
    texts = [
        "device=64MiB@200GB/s",
        "ssd=10%@3GB/s,write=on-evict,latency=2s",
        "remote=7b,policy=arc",
    ]
    assert tiers_of(texts, "inclusive", 1000, block) == [
        Tier("device", 64, "through", 200e9),
        Tier("ssd", 100, "on-evict", 3e9, 2.0),
        Tier("remote", 7, "through", None, 0.0, "arc"),
    ]
    assert [t.write for t in tiers_of(["a=1b", "b=2b"], "exclusive", 9)] == ["through", "on-evict"]


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        (["ssd"], "expected a tier such as"),
        (["=5%"], "expected a tier such as"),
        (["ssd=5"], "expected a size such as"),
        (["ssd=5%@3GB"], "expected a rate such as 3GB/s"),
        (["ssd=1GiB"], "needs the bytes per token"),
        (["ssd=5%,speed=9"], "tier ssd: expected write=, latency= or policy=, found speed"),
        (["a=5%", "ssd=5%,write=back"], "expected write=through or on-evict, found 'back'"),
        (["ssd=5%,write=on-evict"], "no tier is above the first one"),
        (["ssd=5%,policy=mru"], "tier ssd: no policy named 'mru'; expected one of lru"),
        (["ssd=5%,latency=9"], "expected a time such as"),
        (["ssd=5%", "ssd=6%"], "two tiers are named 'ssd'"),
    ],
)  # fmt: skip
def test_a_tier_that_is_written_otherwise_is_refused(texts: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        tiers_of(texts, "inclusive", 1000)


def test_tiers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="tiers are exclusive"):
        tiers_of(["a=1b", "b=2b,write=through"], "exclusive", 9)


def test_units_are_what_they_say() -> None:
    assert rate_of("500MiB/s") == 500 * 2**20
    assert [seconds_of(text) for text in ("300s", "5m", "2h", "100us", "1d")] == [
        300, 300, 7200, pytest.approx(1e-4), 86400,
    ]  # fmt: skip
    assert [size_text(size) for size in (12, 2**30 * 38, 1536)] == [
        "12 bytes",
        "38.0 GiB",
        "1.50 KiB",
    ]


# ---- tiers as they are reported ----------------------------------------------------------------


def options_of(tiers: list[Tier], **others: Any) -> SimulateOptions:
    return SimulateOptions(policies=["lru"], sizes=[], tiers=tiers, **others)


def test_bytes_rates_and_endurance_follow_from_blocks_and_time() -> None:
    paths = grown_paths(3, 200)
    trace = replace(trace_of(paths), arrival=np.arange(len(paths), dtype=np.int64) * 7 * SECOND)
    tiers = [Tier("device", 9, "through", 1e9), Tier("ssd", 30, "on-evict", 1e6)]
    flow = simulate_tiers(trace, tiers, "inclusive")
    first = first_counted(trace, "last_75%")
    options = options_of(tiers, interval="last_75%", token_bytes=Fraction(10), cost=COST)
    found = as_dict(hierarchy_report(trace, flow, options, "lru"))
    days = (len(paths) - first - 1) * 7 / 86400
    for number, tier in enumerate(found["tiers"]):
        written = int(flow.written[first:, number].sum()) * 40
        assert tier["written_bytes"] == written
        assert tier["written_bytes_per_day"] == pytest.approx(written / days)
        assert tier["read_bytes"] == int(flow.served[first:, number].sum()) * 40
        minutes = trace.arrival[first:] // (60 * SECOND)
        busiest = max(
            int(flow.served[first:, number][minutes == m].sum()) for m in set(minutes.tolist())
        )
        assert tier["busiest_minute_bytes_per_second"] == pytest.approx(busiest * 40 / 60)
    parts = [tier["prefix_hit_ratio"] for tier in found["tiers"]]
    assert sum(parts) == pytest.approx(found["prefix_hit_ratio"])
    assert found["ttft_seconds"]["mean"] < found["without_cache"]["mean"]
    assert 0 < found["loaded_token_ratio"] <= found["prefix_token_hit_ratio"]


def test_without_bytes_or_time_there_are_blocks_alone() -> None:
    trace = replace(trace_of([[1], [1]]), arrival=np.zeros(2, np.int64))
    tiers = [Tier("device", 9, "through")]
    flow = simulate_tiers(trace, tiers, "inclusive")
    bare = as_dict(hierarchy_report(trace, flow, options_of(tiers), "lru"))
    assert bare["tiers"][0]["read_blocks"] == 1
    assert bare["tiers"][0]["read_bytes"] is None
    assert "ttft_seconds" not in bare
    options = options_of(tiers, token_bytes=Fraction(10))
    sized = as_dict(hierarchy_report(trace, flow, options, "lru"))
    assert sized["tiers"][0]["written_bytes"] == 40
    assert sized["tiers"][0]["written_bytes_per_day"] is None
