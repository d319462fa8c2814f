"""Hints and recommendation of a report."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvstore.output.sizes import Size, size_text
from kvstore.simulate.cost import Cost
from kvstore.simulate.json_form import as_dict
from kvstore.simulate.report import make_report
from kvstore.simulate.run import SimulateOptions, Simulation, first_counted, interval_of
from kvstore.simulate.sentences import hint_lines
from kvstore.simulate.tiers import Tier
from kvstore.simulate.window import Windows
from kvstore.trace.columns import SECOND
from tests.simulate.support import grown_paths, trace_of

PATHS = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 9], [7], [1, 2, 3], [8, 8, 8, 8, 8]]


def simulation() -> Simulation:
    """Requests ten seconds apart, in blocks of four tokens."""
    trace = trace_of(PATHS, block_tokens=4)
    return Simulation(replace(trace, arrival=np.arange(len(PATHS)) * 10 * SECOND))


def report(simulation: Simulation, options: SimulateOptions) -> dict[str, Any]:
    """A report in its JSON form."""
    found: dict[str, Any] = as_dict(make_report(simulation, options))
    return found


def asked(**changes: object) -> SimulateOptions:
    return replace(SimulateOptions(policies=["lru"], sizes=[Size(4, 0.4)]), **changes)  # type: ignore[arg-type]


def test_hints_tell_what_is_reused_and_what_never_fits() -> None:
    found = report(simulation(), asked(semantics="flat"))["hints"]
    assert found["top_prefixes"] == [
        {"first_request": 0, "start_token": 0, "stop_token": 8, "requests": 4, "reused_tokens": 24},
        {"first_request": 0, "start_token": 8, "stop_token": 12, "requests": 3, "reused_tokens": 8},
    ]
    assert found["once_only"] == 8 / 11
    assert found["reuse_seconds"] == {"p50": 10.0, "p90": 30.0, "p99": 30.0}
    assert found["longer_than_cache"] == [{"size_blocks": 4, "requests": 1}]
    lines = " / ".join(hint_lines(make_report(simulation(), asked(semantics="flat")).hints))
    for part in (
        "72.7% of blocks are used once",
        "p50 10 s, p90 30 s",
        "1 requests are longer than 4 blocks",
        "tokens 0 to 8 of request 0 occur in 4 requests: 24 tokens",
    ):
        assert part in lines


def test_hits_behind_a_gap_are_named() -> None:
    made = Simulation(trace_of(grown_paths(2)))
    flat = asked(policies=["s3fifo"], sizes=[Size(17, 0.1)], semantics="flat")
    rows = report(made, flat)
    (row,) = rows["rows"]
    gap = row["block_hit_ratio"] - row["prefix_hit_ratio"]
    assert gap > 0
    (stranded,) = rows["hints"]["stranded"]
    assert stranded == {"policy": "s3fifo", "size_blocks": 17, "block_ratio": gap}
    assert "behind a gap" in hint_lines(make_report(made, flat).hints)[-1]
    assert report(made, asked(sizes=[Size(4, 0.5)]))["hints"]["stranded"] == []


def test_the_recommendation_is_said_in_words() -> None:
    question = asked(
        token_bytes=Fraction(1 << 20),
        cost=Cost(Fraction(1 << 20), 100.0),
        tiers=[Tier("device", 3, "through", 1e12), Tier("ssd", 9, "through", 1e12)],
        windows=Windows(8, 300.0),
    )
    found = report(simulation(), question)
    said = found["recommendation"]["text"]
    choice = found["recommendation"]["choice"]
    blocks = choice["size_blocks"]
    assert said[0] == (
        f"use lru with {size_text(4 * blocks << 20)} of SSD ({blocks} blocks, {blocks / 11:.1%} of all blocks): "
        f"{choice['prefix_token_hit_ratio']:.1%} of tokens hit, {choice['share_of_ceiling']:.1%} of "
        "the blocks that an infinite cache hits"
    )
    assert choice["size_bytes"] == 4 * blocks << 20
    assert not any("other policies" in sentence for sentence in said)
    # Of three hits, two go on where a prompt ended 10 and 40 s before; one forks off where none did.
    assert found["recommendation"]["window"]["ttl_seconds"] == 60.0
    assert "with a window TTL of 60 s, 67% of turns need no replay" in said
    assert "loading is faster than computing above 100 MiB/s" in said
    (tiers,) = found["hierarchies"]
    assert f"tiers under lru: {tiers['prefix_token_hit_ratio']:.1%} of tokens hit, " in "".join(
        said
    )
    day = size_text(tiers["tiers"][1]["written_bytes_per_day"])
    assert f"lru writes {day} per day to ssd" in said
    assert any("(prefill and loading, no queue)" in sentence for sentence in said)


def test_nothing_to_reuse_is_said_so() -> None:
    found = report(Simulation(trace_of([[1], [2]])), asked())
    assert found["recommendation"]["text"][0].startswith("no block is used twice")
    assert (found["recommendation"]["choice"], found["recommendation"]["policy"]) == (None, "lru")
    assert found["hints"]["top_prefixes"] == []
    assert found["hints"]["reuse_seconds"] is None


def scanned() -> Simulation:
    """Four repeated prompts, and single ones between them."""
    paths = [[hot, 1, 2] for hot in range(4)] * 4
    for once in range(100):
        paths += [[100 + once, 1, 2, 3], [300 + once, 1, 2], [once % 4, 1, 2]]
    return Simulation(trace_of(paths))


def test_a_policy_that_needs_less_is_recommended_with_its_own_size() -> None:
    made = scanned()
    question = asked(policies=["lru", "lfu", "fifo", "optimal"], sizes=[Size(20, 0.0)])
    found = report(made, question)["recommendation"]
    choice = found["choice"]
    assert (choice["policy"], found["policy"]) == ("lfu", "lfu")
    # Its own size, close to the smallest that has the share; not LRU's, which is twice that.
    ceiling = int(made.infinite_cache_hits().sum())
    hits = {size: int(made.hits("lfu", size).sum()) for size in range(41)}
    enough = [size for size, blocks in hits.items() if blocks >= 0.9 * ceiling]
    assert choice["size_blocks"] == min(enough)
    assert choice["lru_size_blocks"] == found["sizes"]["90%"] > 1.5 * choice["size_blocks"]
    # Each figure is of that policy with that size.
    for policy, ratio in {"lfu": choice["prefix_token_hit_ratio"], **choice["others"]}.items():
        row = made.row(policy, Size(choice["size_blocks"], 0.0))
        assert row.ratios.prefix_token_hit_ratio == ratio
    assert set(choice["others"]) == {"lru", "fifo"}
    assert found["gain_over_lru"] == choice["prefix_token_hit_ratio"] - choice["others"]["lru"]
    assert choice["share_of_ceiling"] == hits[choice["size_blocks"]] / ceiling
    use, beside, at_size, *_ = found["text"]
    assert use.startswith(f"use lfu with {choice['size_blocks']} blocks")
    points = 100 * (choice["others"]["lru"] - choice["prefix_token_hit_ratio"])
    assert beside.startswith(f"lru needs {choice['lru_size_blocks']} blocks")
    assert f"at the size of lfu: lru {points:+.1f} points, fifo " in beside
    (gain,) = found["gains"]
    assert (
        at_size
        == f"with 20 blocks, lfu hits {100 * gain['gain_over_lru']:.1f} points of tokens more than lru"
    )


def test_lru_is_what_is_compared_with_whether_it_was_asked_for_or_not() -> None:
    alone = report(scanned(), asked(policies=["lfu"]))["recommendation"]
    assert alone["choice"]["policy"] == "lfu"
    assert alone["choice"]["others"].keys() == {"lru"}
    bound = report(scanned(), asked(policies=["optimal"]))["recommendation"]
    assert (bound["choice"]["policy"], bound["choice"]["others"]) == ("lru", {})
    assert bound["choice"]["size_blocks"] == bound["sizes"]["90%"]
    for words in (*alone["text"], *bound["text"]):
        assert "was not among" not in words
        assert "on average" not in words


def test_what_gains_elsewhere_is_no_reason_to_change() -> None:
    """With lru's size it has all of the ceiling; a policy that gains with half of it has its size said."""
    made = scanned()
    found = report(made, asked(policies=["lru", "fifo"], sizes=[Size(13, 0.0)]))["recommendation"]
    assert found["choice"]["policy"] == "lru"
    assert found["gain_over_lru"] == 0.0
    others = found["choice"]["others"]
    gap = 100 * (others["fifo"] - found["choice"]["prefix_token_hit_ratio"])
    assert found["text"][1] == f"other policies at this size: fifo {gap:+.1f} points"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_choice_under_a_share_for_one_request_is_simulated_with_it(share: float) -> None:
    made = Simulation(trace_of(grown_paths(3)), share)
    found = report(made, asked(policies=["lru", "arc"]))["recommendation"]
    choice = found["choice"]
    hits = made.hits(choice["policy"], choice["size_blocks"])
    assert (
        int(hits.sum()) / int(made.infinite_cache_hits().sum()) == choice["share_of_ceiling"] >= 0.9
    )
    assert made.ratios(hits).prefix_token_hit_ratio == choice["prefix_token_hit_ratio"]
    assert any(s.startswith("lru without --request-share needs") for s in found["text"])


def test_a_warm_up_is_a_share_of_the_requests() -> None:
    trace = trace_of(PATHS)
    intervals = [interval_of(share) for share in (0.0, 0.5, 0.25, 1 / 3)]
    assert intervals == ["all", "last_half", "last_75%", "last_66.6667%"]
    assert [first_counted(trace, interval) for interval in intervals] == [0, 3, 1, 1]
