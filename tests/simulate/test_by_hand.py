"""Policies on traces worked by hand from their papers. Each block is a path of its own."""

from __future__ import annotations

import pytest

from kvstore.index.plan import request_blocks
from kvstore.output.sizes import Size
from kvstore.policy.registry import make_policy
from kvstore.simulate.flat import flat_policy, simulate_flat
from kvstore.simulate.run import Simulation
from kvstore.simulate.trace_index import ChainLists, simulate_policy
from kvstore.trace.chains import chains_of
from tests.simulate.support import trace_of


def hits(name: str, asked: list[int], capacity: int) -> list[int]:
    """Return 1 for each request that hits, the same with prefixes and without."""
    trace = trace_of([[each] for each in asked])
    _, flat = simulate_flat(trace, make_policy(name), capacity)
    assert simulate_policy(ChainLists(chains_of(trace)), make_policy(name), capacity) == flat
    return flat


def test_2q_looks_a_ghost_up_before_making_room_forgets_it() -> None:
    # Four blocks: one new one at least, two ghosts. 5 and 6 send 1 and 2 to the ghosts. To make room
    # for 1, 3 becomes a ghost, and 1 the oldest of three; it was asked for before, so it is kept.
    # 7 to 10 pass through the new ones and 1 is still there.
    asked = [1, 2, 3, 4, 5, 6, 1, 7, 8, 9, 10, 1]
    assert hits("2q", asked, 4) == [0] * 11 + [1]


def test_2q_keeps_nothing_for_uses_while_it_is_new() -> None:
    # 1 is used, but a use of a new block may be of the same burst: it goes first all the same.
    assert hits("2q", [1, 2, 3, 4, 1, 1, 5, 1], 4) == [0, 0, 0, 0, 1, 1, 0, 0]


def test_s3fifo_goes_on_in_the_small_queue_until_a_block_goes() -> None:
    # Twenty blocks, two of them new. All but 20 are used twice, so 21 sends 19 to the main queue and
    # 20 away, and 22 sends 1 away, as only 21 was new. 21 is used twice. So for 23, 21 moves to the
    # main queue; the small one is short of two now, but its turn ends when a block goes: 22.
    fill, again = list(range(1, 21)), list(range(1, 20))
    asked = [*fill, *again, *again, 21, 22, 21, 21, 23, 2, 22]
    assert hits("s3fifo", asked, 20) == [0] * 20 + [1] * 38 + [0, 0, 1, 1, 0, 1, 0]


def test_slru_lifts_by_one_and_what_overflows_sinks_by_one() -> None:
    # Four queues of one. 1 is used twice and stands in the third; 2 stands in the second until 3 is
    # used. So of 2, 4 and 5, which are in the lowest, 4 goes first, then 2.
    asked = [1, 2, 3, 4, 1, 1, 2, 3, 5, 6, 1, 3, 2]
    assert hits("slru", asked, 4) == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0]


def test_arc_grows_the_side_that_was_cut_too_early() -> None:
    # 1 and 2 are used again. 3, 4 and 5 pass, 3 goes as the oldest that was used once. It comes back:
    # one more block may be new, so the next to go is 1, the oldest that was used again, not 4.
    asked = [1, 2, 1, 2, 3, 4, 5, 3, 4]
    assert hits("arc", asked, 4) == [0, 0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["clock", "sieve", "fifo"])
def test_one_queue_in_the_order_of_storing(name: str) -> None:
    # Three blocks, 1 used. FIFO sends 1 away for 4; the others spare it and send 2.
    found = {"fifo": [0, 0, 0, 1, 0, 1, 0], "clock": [0, 0, 0, 1, 0, 0, 1]}
    asked = [1, 2, 3, 1, 4, 2, 1]
    assert hits(name, asked, 3) == found.get(name, found["clock"])


def test_the_hand_of_sieve_begins_again_when_it_took_the_newest() -> None:
    # 1 and 2 were used: for 4 the hand spares them and takes 3, the newest. Before 4 comes it is at the
    # oldest again, so 5 takes 1, and 4 is still there.
    assert hits("sieve", [1, 2, 3, 1, 2, 4, 5, 4, 2, 1], 3) == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "capacity", "asked_again"),
    [
        # A tenth is one block: 1 is in the small queue, 2 to 10 in the main one; so 11 goes for 12.
        ("s3fifo", 10, 2),
        # A quarter is two blocks: 1 and 2 are in the lowest queue, 3 and 4 in the next one; so 9 goes.
        ("slru", 8, 3),
    ],
)
def test_flat_caches_are_filled_as_libcachesims_are(
    name: str, capacity: int, asked_again: int
) -> None:
    more = asked_again
    trace = trace_of([*([n] for n in range(1, capacity + more + 1)), [asked_again]])
    _, filled = simulate_flat(trace, flat_policy(name, capacity), capacity)
    _, published = simulate_flat(trace, make_policy(name), capacity)
    assert sum(filled) == filled[-1] == 1
    assert sum(published) == 0


# ---- one request as large as the tier ----------------------------------------------------------

PREFIXES = [[hot, *range(19)] for hot in range(20)]
"""Twenty blocks each: 400 in all."""
LARGE = [999, *range(399)]
LATEST_FIRST = PREFIXES[::-1]
"""Asked in this order, what is left is not evicted by what is missing before it is its turn."""


def left(share: float | None, policy: str = "lru", semantics: str = "prefix") -> list[int]:
    """Return what each prefix hits after a prompt as large as the tier, the latest first."""
    trace = trace_of([*PREFIXES, LARGE, *LATEST_FIRST])
    simulation = Simulation(trace, share)
    _, hits = simulation.run(policy, Size(400, 0.5), semantics=semantics)  # type: ignore[arg-type]
    found: list[int] = hits.tolist()
    assert sum(found[:21]) == 0
    return found[21:]


def test_one_prompt_as_large_as_the_tier_evicts_all_of_it() -> None:
    assert left(None) == left(1.0) == [0] * 20


def test_with_a_share_it_keeps_its_head_and_the_rest_stays() -> None:
    # A quarter is 100 blocks: the five prefixes that were used longest ago go for them.
    assert left(0.25) == [20] * 15 + [0] * 5
    assert left(0.25, "fifo") == [20] * 15 + [0] * 5
    assert left(0.25, semantics="flat") == [20] * 15 + [0] * 5
    assert left(0.05) == [20] * 19 + [0]
    assert left(0.01) == [4] * 20  # no request keeps more, so there is room for all
    # Its own head is there when it comes again.
    trace = trace_of([*PREFIXES, LARGE, LARGE])
    assert Simulation(trace, 0.25).hits("lru", 400).tolist()[-1] == 100


def test_a_share_is_exact_and_at_least_a_block_of_a_tier_that_has_any() -> None:
    assert [request_blocks(blocks, 0.29) for blocks in (0, 1, 3, 100, 400)] == [0, 1, 1, 29, 116]
    assert [request_blocks(blocks, share) for blocks, share in ((7, None), (7, 1.0))] == [7, 7]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a share for one request above 0 and at most 1"):
        Simulation(trace_of([[1]]), share)
