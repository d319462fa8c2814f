"""What a report says beside its rows: hints, and a recommendation in plain words."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from kvstore.simulate.cost import Cost
from kvstore.simulate.hints import hint_lines
from kvstore.simulate.report import Question, report
from kvstore.simulate.run import Simulation, first_counted, window_of
from kvstore.simulate.sizes import Size
from kvstore.simulate.tiers import Tier
from kvstore.simulate.window import Windows
from kvstore.trace.columns import SECOND
from tests.simulate.support import grown_paths, trace_of

PATHS = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 9], [7], [1, 2, 3], [8, 8, 8, 8, 8]]


def simulation() -> Simulation:
    """Requests ten seconds apart, in blocks of four tokens."""
    trace = trace_of(PATHS, block_tokens=4)
    return Simulation(replace(trace, arrival=np.arange(len(PATHS)) * 10 * SECOND))


def asked(**changes: object) -> Question:
    return replace(Question(policies=["lru"], sizes=[Size(4, 0.4)]), **changes)  # type: ignore[arg-type]


def test_hints_tell_what_is_reused_and_what_never_fits() -> None:
    found = report(simulation(), asked(semantics="flat"))["hints"]
    assert found["top_prefixes"] == [
        {"first_request": 0, "start_token": 0, "stop_token": 8, "requests": 4, "reused_tokens": 24},
        {"first_request": 0, "start_token": 8, "stop_token": 12, "requests": 3, "reused_tokens": 8},
    ]
    assert found["once_only"] == 8 / 11
    assert found["reuse_seconds"] == {"p50": 10.0, "p90": 30.0, "p99": 30.0}
    assert found["longer_than_cache"] == [{"size_blocks": 4, "requests": 1}]
    lines = " / ".join(hint_lines(found))
    for part in (
        "72.7% of blocks are used once",
        "p50 10 s, p90 30 s",
        "1 requests are longer than 4 blocks",
        "tokens 0 to 8 of request 0 come in 4 requests: 24 tokens",
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
    assert "behind a gap" in hint_lines(rows["hints"])[-1]
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
    blocks = found["recommendation"]["sizes"]["90%"]
    assert said[0] == (
        f"for 90% of the ceiling: {4 * blocks}.0 MiB of SSD ({blocks} blocks, "
        f"{blocks / 11:.1%} of all blocks)"
    )
    assert "lru is the policy to use: no other here gains a point over it" in said
    # Of three hits, two go on where a prompt ended 10 and 40 s before; one forks off where none did.
    assert found["recommendation"]["window"]["ttl_seconds"] == 60.0
    assert "a window TTL of 60 s keeps 67% of turns from replay" in said
    assert "loading is faster than computing from 100.0 MiB/s on" in said
    (tiers,) = found["hierarchies"]
    assert (
        f"with these tiers under lru: {tiers['prefix_token_hit_ratio']:.1%} of tokens hit, "
        in "".join(said)
    )
    day = tiers["tiers"][1]["written_bytes_per_day"] / 2**40
    assert f"lru writes {day * 1024:,.1f} GiB a day to ssd" in said
    assert any("(prefill only, no queue)" in sentence for sentence in said)


def test_nothing_to_reuse_is_said_so() -> None:
    found = report(Simulation(trace_of([[1], [2]])), asked())
    assert found["recommendation"]["text"][0].startswith("nothing is used twice")
    assert found["hints"]["top_prefixes"] == []
    assert found["hints"]["reuse_seconds"] is None


def test_a_policy_that_gains_is_recommended_with_its_gain() -> None:
    paths = [[hot, 1, 2] for hot in range(4)] * 4
    for once in range(100):
        paths += [[100 + once, 1, 2, 3], [300 + once, 1, 2], [once % 4, 1, 2]]
    found = report(
        Simulation(trace_of(paths)), asked(policies=["lru", "lfu"], sizes=[Size(20, 0.0)])
    )
    gain = found["recommendation"]["gain_over_lru"]
    said = f"lfu is the policy to use: it hits {100 * gain:.1f} points more than lru on average"
    assert said in found["recommendation"]["text"]
    alone = report(Simulation(trace_of(paths)), asked(policies=["lfu"]))["recommendation"]["text"]
    assert "lfu is the best of the policies here; lru was not among them" in alone


def test_a_warm_up_is_a_share_of_the_requests() -> None:
    trace = trace_of(PATHS)
    windows = [window_of(share) for share in (0.0, 0.5, 0.25, 1 / 3)]
    assert windows == ["all", "last_half", "last_75%", "last_66.6667%"]
    assert [first_counted(trace, window) for window in windows] == [0, 3, 1, 1]
