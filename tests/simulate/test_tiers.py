"""Several tiers equal the specification of single blocks, in all combinations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvstore.index.plan import request_blocks
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.run import Simulation
from kvstore.simulate.tiers import Flow, Inclusion, Tier, simulate_tiers
from kvstore.simulate.trace_index import ChainLists, simulate_policy
from kvstore.trace.chains import chains_of
from tests.simulate.support import grown_paths, trace_of
from tests.simulate.tiers_model import RANKS, Exclusive, Inclusive

CAPACITIES = ((3, 8), (8, 3), (1, 1, 1), (5, 9, 20), (4, 0, 30), (0, 6, 12), (12, 4, 9), (9, 2, 7))
every_policy = pytest.mark.parametrize("policy", POLICIES)


def tiers_of(capacities: tuple[int, ...], writes: tuple[str, ...]) -> list[Tier]:
    return [
        Tier(f"t{number}", blocks, "through" if write == "through" else "on-evict")
        for number, (blocks, write) in enumerate(zip(capacities, writes, strict=True))
    ]


def simulated(
    paths: list[list[int]],
    tiers: list[Tier],
    inclusion: Inclusion,
    policy: str = "lru",
    share: float | None = None,
) -> Flow:
    return simulate_tiers(trace_of(paths), tiers, inclusion, policy, share)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", RANKS)
def test_inclusive_tiers_are_what_the_specification_says_of_blocks(policy: str, seed: int) -> None:
    paths = grown_paths(seed, 70)
    for capacities in CAPACITIES:
        below = product(("through", "on-evict"), repeat=len(capacities) - 1)
        for writes in [("through", *each) for each in below]:
            flow = simulated(paths, tiers_of(capacities, writes), "inclusive", policy)
            model = Inclusive(capacities, writes, [policy] * len(capacities))
            served, written = model.run(paths)
            assert flow.served.tolist() == served, (capacities, writes)
            assert flow.written.tolist() == written, (capacities, writes)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", RANKS)
def test_exclusive_tiers_are_what_the_specification_says_of_blocks(policy: str, seed: int) -> None:
    paths = grown_paths(seed, 70)
    for capacities in CAPACITIES:
        writes = ("through", *["on-evict"] * (len(capacities) - 1))
        flow = simulated(paths, tiers_of(capacities, writes), "exclusive", policy)
        served, written = Exclusive(capacities, writes, [policy] * len(capacities)).run(paths)
        assert flow.served.tolist() == served, capacities
        assert flow.written.tolist() == written, capacities


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("policy", RANKS)
def test_one_request_takes_its_share_of_each_tier(policy: str, share: float) -> None:
    paths = grown_paths(3, 70)
    for capacities in CAPACITIES:
        rooms = [min(blocks, max(1, int(share * blocks))) for blocks in capacities]
        for writes in product(("through",), *[("through", "on-evict")] * (len(capacities) - 1)):
            flow = simulated(paths, tiers_of(capacities, writes), "inclusive", policy, share)
            model = Inclusive(capacities, writes, [policy] * len(capacities), rooms)
            assert (flow.served.tolist(), flow.written.tolist()) == model.run(paths)
        writes = ("through", *["on-evict"] * (len(capacities) - 1))
        flow = simulated(paths, tiers_of(capacities, writes), "exclusive", policy, share)
        exclusive = Exclusive(capacities, writes, [policy] * len(capacities), rooms)
        assert (flow.served.tolist(), flow.written.tolist()) == exclusive.run(paths)


def test_each_tier_may_have_a_policy_of_its_own() -> None:
    paths = grown_paths(5)
    tiers = [Tier("a", 5, "through"), Tier("b", 12, "on-evict", policy="lfu")]
    policies = ["fifo", "lfu"]
    for inclusion, model in (("inclusive", Inclusive), ("exclusive", Exclusive)):
        flow = simulate_tiers(trace_of(paths), tiers, inclusion, "fifo")  # type: ignore[arg-type]
        served, written = model([5, 12], ["through", "on-evict"], policies).run(paths)
        assert (flow.served.tolist(), flow.written.tolist()) == (served, written)


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_one_tier_is_the_simulation_of_its_size(policy: str, seed: int) -> None:
    paths = grown_paths(seed)
    rows = ChainLists(chains_of(trace_of(paths)))
    for blocks in (1, 4, 11, 30):
        for share in (None, 0.3):
            room = request_blocks(blocks, share)
            alone = simulate_policy(rows, make_policy(policy), blocks, room=room)
            for inclusion in ("inclusive", "exclusive"):
                tier = Tier("one", blocks, "through")
                flow = simulated(paths, [tier], inclusion, policy, share)
                assert flow.served[:, 0].tolist() == alone


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_a_tier_is_what_it_is_without_those_below_it_and_written_through_without_those_above(
    policy: str, seed: int
) -> None:
    paths = grown_paths(seed)
    rows = ChainLists(chains_of(trace_of(paths)))
    tiers = tiers_of((4, 11, 30), ("through",) * 3)
    flow = simulated(paths, tiers, "inclusive", policy)
    alone = [simulate_policy(rows, make_policy(policy), tier.blocks) for tier in tiers]
    reach = np.maximum.accumulate(np.array(alone).T, axis=1)
    assert np.cumsum(flow.served, axis=1).tolist() == reach.tolist()
    lower = tiers_of((4, 11, 30), ("through", "on-evict", "on-evict"))
    for inclusion in ("inclusive", "exclusive"):
        flow = simulated(paths, lower, inclusion, policy)
        assert flow.served[:, 0].tolist() == alone[0]


@every_policy
@pytest.mark.parametrize("inclusion", ["inclusive", "exclusive"])
def test_tiers_never_hit_more_than_the_trace_repeats_and_all_of_it_with_room_for_all(
    inclusion: Inclusion, policy: str
) -> None:
    paths = grown_paths(7)
    trace = trace_of(paths)
    ceiling = Simulation(trace).infinite_cache_hits()
    flow = simulated(paths, tiers_of((3, 9), ("through", "on-evict")), inclusion, policy)
    assert (flow.served.sum(axis=1) <= ceiling).all()
    room = (5, trace.distinct_blocks)
    flow = simulated(paths, tiers_of(room, ("through", "on-evict")), inclusion, policy)
    assert flow.served.sum(axis=1).tolist() == ceiling.tolist()


def test_exclusive_tiers_hold_more_than_inclusive_ones_of_the_same_size() -> None:
    paths = [[hot, 1] for hot in range(6)] * 10
    tiers = tiers_of((4, 8), ("through", "on-evict"))
    inclusive = simulated(paths, tiers, "inclusive").served
    exclusive = simulated(paths, tiers, "exclusive").served
    assert exclusive.sum() == 2 * 6 * 9  # twelve blocks in twelve places
    assert inclusive.sum() < exclusive.sum()


def test_exclusive_tiers_cannot_be_written_through() -> None:
    tiers = tiers_of((4, 8), ("through", "through"))
    with pytest.raises(ValueError, match="found write=through"):
        simulated([[1]], tiers, "exclusive")
