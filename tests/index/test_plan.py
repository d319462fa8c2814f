"""Decisions: pure functions of lengths, checked for every length that matters."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.plan import (
    Evict,
    Floors,
    Load,
    Store,
    StorePlan,
    floors,
    hit_limit,
    loads,
    request_blocks,
    room,
    stores,
    worth_loading,
)

WINDOWS = [1, 2, 16, 32, 127, 128, 129, 254]
HITS = range(0, 129 * 6, 32)


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 32, 128, 130, 256])
def test_a_hit_leaves_one_token_to_compute_at_every_length(block_tokens: int) -> None:
    for count in range(401):
        limit = hit_limit(count, block_tokens)
        boundaries = [at for at in range(0, count, block_tokens) if at <= count - 1]
        assert limit == max(boundaries, default=0)
        assert limit % block_tokens == 0
        assert not count or limit < count
        assert not count or count - limit <= block_tokens


# ---- floors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_without_a_window_replay_covers_the_last_w_tokens_of_the_hit(window: int) -> None:
    for hit in HITS:
        start = hit - min(window, hit)
        assert astuple(floors(hit, window, None)) == (start, start, hit, start)
        assert 0 <= start <= hit
        assert hit - start <= window


@pytest.mark.parametrize("window", WINDOWS)
def test_with_a_window_nothing_is_replayed_and_its_rows_are_settled(window: int) -> None:
    for hit in HITS[1:]:
        for snapshot_start in {0, max(0, hit - window + 1), max(0, hit - 2 * window + 2)}:
            found = floors(hit, window, snapshot_start)
            assert astuple(found) == (hit, snapshot_start, hit, hit)


def test_a_model_without_windows_never_replays() -> None:
    for hit in HITS:
        assert astuple(floors(hit, 0, None)) == (hit, 0, hit, hit)


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_below_the_hit_never_overwrite_global_entries(window: int) -> None:
    for hit in HITS:
        for start in (None, 0):
            found = floors(hit, window, start)
            assert found.write_floor == hit
            assert found.read_floor <= found.replay_start <= hit
            assert found.window_write_floor == found.replay_start


def test_the_example_of_a_scheduler_holds() -> None:
    """Prompt 100, block 16, W 32: hit 96, replay from 64. Source: vLLM's scheduler test of bounded replay."""
    hit = hit_limit(100, 16)
    assert hit == 96
    assert floors(hit, 32, None).replay_start == 64


def test_a_replay_that_has_its_window_is_empty() -> None:
    assert floors(256, 128, 129).replay_start == 256
    assert floors(256, 128, None).replay_start == 128
    assert floors(64, 128, None).replay_start == 0
    assert floors(0, 128, None).replay_start == 0


# ---- loads -------------------------------------------------------------------------------------


def test_the_nearest_tier_is_read_first_and_the_next_for_what_it_lacks() -> None:
    assert loads(5, {"device": 2, "ssd": 9}) == (Load("device", 0, 2), Load("ssd", 2, 5))
    assert loads(5, {"device": 7, "ssd": 9}) == (Load("device", 0, 5),)
    assert loads(5, {"device": 0, "ssd": 5}) == (Load("ssd", 0, 5),)
    assert loads(5, {"device": 4, "ssd": 3}) == (Load("device", 0, 4),)
    assert loads(0, {"device": 4}) == ()
    assert loads(5, {}) == ()


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4))
def test_every_block_is_loaded_once_from_the_nearest_tier_that_has_it(
    hit: int, held: list[int]
) -> None:
    resident = {f"tier{number}": blocks for number, blocks in enumerate(held)}
    source: dict[int, str] = {}
    at = 0
    for step in loads(hit, resident):
        assert isinstance(step, Load)
        assert step.start == at < step.stop
        at = step.stop
        source |= dict.fromkeys(range(step.start, step.stop), step.tier)
    for block in range(hit):
        nearest = next((tier for tier, blocks in resident.items() if blocks > block), None)
        assert source.get(block) == nearest
    assert all(block < hit for block in source)


# ---- stores ------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 30), st.integers(1, 30))
def test_every_offered_block_is_present_written_an_orphan_or_too_much(
    start: int, count: int, known: int, limit: int
) -> None:
    stop = start + count
    decided = stores(start, stop, known, limit)
    written = range(decided.store.start, decided.store.stop) if decided.store else range(0)
    assert decided.present + len(written) + decided.orphans + decided.excess == count
    if known < start:
        assert decided in (StorePlan(0, None, count), StorePlan(0, None, 0, count))
        assert decided.excess == (count if known >= limit else 0)
    else:
        offered = range(start, stop)
        assert list(written) == [block for block in offered if known <= block < limit]
        assert decided.present == sum(block < known for block in offered)
        assert decided.excess == sum(block >= max(known, limit) for block in offered)


def test_stores_of_known_lengths_are_what_one_expects() -> None:
    assert stores(0, 4, 0, 9) == StorePlan(0, Store(0, 4), 0)
    assert stores(0, 4, 2, 9) == StorePlan(2, Store(2, 4), 0)
    assert stores(2, 4, 2, 9) == StorePlan(0, Store(2, 4), 0)
    assert stores(2, 4, 1, 9) == StorePlan(0, None, 2)
    assert stores(0, 4, 9, 9) == StorePlan(4, None, 0)
    assert stores(3, 3, 3, 9) == StorePlan(0, None, 0)
    assert stores(0, 9, 0, 4) == StorePlan(0, Store(0, 4), 0, 5)
    assert stores(4, 9, 4, 4) == StorePlan(0, None, 0, 5)
    assert stores(6, 9, 4, 4) == StorePlan(0, None, 0, 3)
    assert stores(0, 9, 6, 4) == StorePlan(6, None, 0, 3)
    assert [request_blocks(400, share) for share in (0.5, 1.0, 0.001)] == [200, 400, 1]


# ---- room --------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 100), st.integers(0, 100))
def test_nothing_leaves_below_the_high_watermark_and_then_down_to_the_low_one(
    live: int, incoming: int, high: int, low: int
) -> None:
    low = min(low, high)
    need = room(live, incoming, high, low)
    if live + incoming <= high:
        assert need is None
    else:
        assert need is not None
        assert live - need.bytes + incoming == low


def test_the_high_watermark_itself_may_be_reached() -> None:
    assert room(90, 10, 100, 80) is None
    assert room(90, 11, 100, 80) == Evict(21)


# ---- worth loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 32, 128])
def test_a_hit_inside_a_missing_window_is_not_worth_loading(window: int) -> None:
    for hit in range(1, 3 * window + 2):
        bare = floors(hit, window, None)
        assert worth_loading(hit, bare, window, 0.0, 0.0) == (hit > window)
        assert worth_loading(hit, bare, window, 0.0, 1.0) == (hit > window)
        assert worth_loading(hit, floors(hit, window, 0), window, 0.0, 1.0)


def test_nothing_is_not_worth_loading() -> None:
    assert not worth_loading(0, Floors(0, 0, 0, 0), 0, 0.0, 0.0)
    assert not worth_loading(0, Floors(0, 0, 0, 0), 128, 0.0, 1.0)


def test_without_a_measured_prefill_any_hit_is_worth_loading() -> None:
    assert worth_loading(128, floors(128, 0, None), 0, 1e9, 0.0)


def test_loading_must_cost_less_than_the_tokens_it_saves() -> None:
    """A hit of 256 with a replay of 128 saves 128 tokens, with its window 256."""
    bare, pooled = floors(256, 128, None), floors(256, 128, 0)
    assert worth_loading(256, bare, 128, 127.0, 1.0)
    assert not worth_loading(256, bare, 128, 128.0, 1.0)
    assert worth_loading(256, pooled, 128, 255.0, 1.0)
    assert not worth_loading(256, pooled, 128, 256.0, 1.0)
    assert worth_loading(256, floors(256, 0, None), 0, 255.0, 1.0)
    assert not worth_loading(256, floors(256, 0, None), 0, 256.0, 1.0)
