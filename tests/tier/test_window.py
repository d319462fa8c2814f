"""The window pool: a cap, a time to live, pins that hold, and snapshots that could serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvstore
from kvstore.identity.block import BlockHash
from kvstore.layout import LayerGroup, Layout, Lifetime
from kvstore.layout.replay import WindowSnapshot
from kvstore.tier.window import POISON, WindowPool, check_snapshot, copy_of
from tests.builders import Clock, snapshot_of, windowed_layout

LAYOUT = windowed_layout(8)
ROW = 10  # bytes a row: 3 * 2 + 1 * 4
OWNER, OTHER = BlockHash(b"o" * 32), BlockHash(b"p" * 32)


def key(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def make_pool(clock: Clock | None = None, rows: int = 8, snapshots: int = 3) -> WindowPool:
    return WindowPool(
        LAYOUT,
        capacity_bytes=snapshots * 8 * ROW,
        ttl_seconds=60.0,
        rows=rows,
        clock=clock or Clock(),
        poison_on_free=True,
    )


def put(pool: WindowPool, number: int, **options: Any) -> bool:
    return pool.put(key(number), snapshot_of(LAYOUT, 8, 16, number), owner=OWNER, **options)


def held(pool: WindowPool) -> list[int]:
    return [number for number in range(30) if pool.peek(key(number)) is not None]


def is_whole(snapshot: WindowSnapshot, number: int) -> bool:
    expected = snapshot_of(LAYOUT, snapshot.start, snapshot.stop, number)
    return all(np.array_equal(snapshot.rows[name], expected.rows[name]) for name in expected.rows)


def is_poisoned(snapshot: WindowSnapshot) -> bool:
    return all((array == POISON).all() for array in snapshot.rows.values())


# ---- cap and order -----------------------------------------------------------------------------


def test_a_snapshot_comes_back_as_it_went_in() -> None:
    pool = make_pool()
    given = snapshot_of(LAYOUT, 8, 16, 1)
    assert pool.put(key(1), given, owner=OWNER)
    for array in given.rows.values():
        array[...] = 0  # the pool keeps a copy
    found = pool.peek(key(1))
    assert found is not None
    assert (found.start, found.stop, found.source) == (8, 16, "pool")
    assert is_whole(found, 1)
    assert pool.used_bytes == 8 * ROW
    assert pool.peek(key(2)) is None
    assert pool.pin(key(2)) is None


def test_a_full_pool_drops_the_least_recently_used() -> None:
    pool = make_pool()
    for number in (1, 2, 3):
        assert put(pool, number)
    used = pool.pin(key(1))
    assert used is not None
    pool.unpin(used)
    assert put(pool, 4)
    assert held(pool) == [1, 3, 4]
    assert put(pool, 5)
    assert held(pool) == [1, 4, 5]
    assert pool.evicted == 2
    assert pool.used_bytes == pool.capacity_bytes


def test_a_peek_does_not_make_recent() -> None:
    pool = make_pool()
    for number in (1, 2, 3):
        put(pool, number)
    assert pool.peek(key(1)) is not None
    put(pool, 4)
    assert held(pool) == [2, 3, 4]


def test_a_replacement_is_recent_and_counted_once() -> None:
    pool = make_pool()
    for number in (1, 2, 3):
        put(pool, number)
    assert pool.put(key(1), snapshot_of(LAYOUT, 8, 16, 9), owner=OWNER)
    assert pool.used_bytes == pool.capacity_bytes
    put(pool, 4)
    assert held(pool) == [1, 3, 4]
    found = pool.peek(key(1))
    assert found is not None
    assert is_whole(found, 9)


def test_one_large_snapshot_drops_as_many_as_it_takes_and_no_more() -> None:
    pool = make_pool(rows=100)
    for number in (1, 2, 3):
        put(pool, number)
    assert pool.put(key(4), snapshot_of(LAYOUT, 4, 16), owner=OWNER)
    assert held(pool) == [3, 4]
    assert pool.used_bytes == 20 * ROW


def test_what_is_larger_than_the_pool_is_refused_and_costs_nothing() -> None:
    pool = make_pool(rows=100)
    for number in (1, 2, 3):
        put(pool, number)
    assert not pool.put(key(4), snapshot_of(LAYOUT, 0, 32), owner=OWNER)
    assert held(pool) == [1, 2, 3]
    assert pool.evicted == 0


def test_a_replacement_that_does_not_fit_leaves_the_old_one() -> None:
    pool = make_pool(rows=100)
    put(pool, 1)
    assert not pool.put(key(1), snapshot_of(LAYOUT, 0, 32, 9), owner=OWNER)
    found = pool.peek(key(1))
    assert found is not None
    assert is_whole(found, 1)
    assert pool.used_bytes == 8 * ROW


def test_a_pool_without_bytes_holds_nothing() -> None:
    pool = make_pool(snapshots=0)
    assert not put(pool, 1)
    assert len(pool) == pool.used_bytes == 0


# ---- pins --------------------------------------------------------------------------------------


def test_a_pinned_snapshot_is_passed_over() -> None:
    pool = make_pool()
    for number in (1, 2, 3):
        put(pool, number)
    pinned = pool.pin(key(1))
    assert pinned is not None
    for number in (4, 5, 6, 7):
        assert put(pool, number)
    assert held(pool) == [1, 6, 7]
    assert is_whole(pinned, 1)


def test_what_pins_leave_no_room_for_is_refused_and_costs_nothing() -> None:
    pool = make_pool(rows=100)
    for number in (1, 2, 3):
        put(pool, number)
    pins = [pool.pin(key(number)) for number in (1, 2)]
    assert not pool.put(key(4), snapshot_of(LAYOUT, 4, 16), owner=OWNER)
    assert held(pool) == [1, 2, 3], "evicting 3 could not have made room"
    assert put(pool, 5)
    assert held(pool) == [1, 2, 5]
    assert all(pin is not None and is_whole(pin, n) for n, pin in enumerate(pins, 1))


def test_a_pinned_snapshot_survives_its_replacement_until_the_last_pin() -> None:
    pool = make_pool()
    put(pool, 1)
    first, again = pool.pin(key(1)), pool.pin(key(1))
    assert first is not None
    assert first is again
    assert pool.put(key(1), snapshot_of(LAYOUT, 8, 16, 9), owner=OWNER)
    assert pool.used_bytes == 2 * 8 * ROW, "the doomed one still takes its bytes"
    assert is_whole(first, 1)
    pool.unpin(first)
    assert is_whole(first, 1)
    assert pool.used_bytes == 2 * 8 * ROW
    pool.unpin(first)
    assert is_poisoned(first)
    assert pool.used_bytes == 8 * ROW
    found = pool.peek(key(1))
    assert found is not None
    assert is_whole(found, 9)


def test_a_replacement_of_a_pinned_snapshot_that_does_not_fit_leaves_the_old_one() -> None:
    pool = make_pool(snapshots=1)
    put(pool, 1)
    pinned = pool.pin(key(1))
    assert pinned is not None
    assert not pool.put(key(1), snapshot_of(LAYOUT, 8, 16, 9), owner=OWNER)
    assert pool.peek(key(1)) is pinned
    pool.unpin(pinned)
    assert is_whole(pinned, 1)


def test_old_and_new_snapshots_of_one_key_are_pinned_apart() -> None:
    pool = make_pool()
    put(pool, 1)
    old = pool.pin(key(1))
    pool.put(key(1), snapshot_of(LAYOUT, 8, 16, 9), owner=OWNER)
    new = pool.pin(key(1))
    assert old is not None
    assert new is not None
    pool.unpin(new)
    assert is_whole(old, 1)
    assert is_whole(new, 9)
    pool.unpin(old)
    assert is_poisoned(old)
    assert is_whole(new, 9)


def test_a_freed_snapshot_is_poisoned_and_a_copy_of_it_is_not() -> None:
    pool = make_pool()
    put(pool, 1)
    found = pool.peek(key(1))
    assert found is not None
    kept = copy_of(found)
    pool.clear(OWNER)
    assert is_poisoned(found)
    assert is_whole(kept, 1)
    assert (kept.start, kept.stop, kept.source) == (found.start, found.stop, found.source)


def test_without_debug_mode_nothing_is_poisoned() -> None:
    pool = WindowPool(
        LAYOUT, capacity_bytes=1000, ttl_seconds=60.0, rows=8, clock=Clock(), poison_on_free=False
    )
    put(pool, 1)
    found = pool.peek(key(1))
    pool.clear(OWNER)
    assert found is not None
    assert is_whole(found, 1)


def test_clearing_takes_the_snapshots_of_one_owner() -> None:
    pool = make_pool()
    put(pool, 1)
    pool.put(key(2), snapshot_of(LAYOUT, 8, 16, 2), owner=OTHER)
    pinned = pool.pin(key(1))
    pool.clear(OWNER)
    assert held(pool) == [2]
    assert pinned is not None
    assert is_whole(pinned, 1)
    assert pool.used_bytes == 2 * 8 * ROW
    pool.unpin(pinned)
    assert pool.used_bytes == 8 * ROW


# ---- time --------------------------------------------------------------------------------------


def test_a_snapshot_is_gone_at_the_end_of_its_time() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    clock.now += 59.9
    assert held(pool) == [1]
    clock.now += 0.1
    assert held(pool) == []
    assert pool.pin(key(1)) is None
    assert pool.used_bytes == 8 * ROW, "reading frees nothing"
    pool.expire()
    assert (len(pool), pool.used_bytes, pool.expired, pool.evicted) == (0, 0, 1, 0)


def test_a_use_does_not_lengthen_a_life_and_a_replacement_does() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    put(pool, 2)
    clock.now += 40
    used = pool.pin(key(1))
    assert used is not None
    pool.unpin(used)
    put(pool, 2)
    clock.now += 30
    assert held(pool) == [2]


def test_what_expired_makes_room_before_anything_is_evicted() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    clock.now += 30
    put(pool, 2)
    put(pool, 3)
    used = pool.pin(key(1))  # the most recent, and the first to expire
    assert used is not None
    pool.unpin(used)
    clock.now += 30
    put(pool, 4)
    assert held(pool) == [2, 3, 4]
    assert (pool.expired, pool.evicted) == (1, 0)


def test_a_pinned_snapshot_outlives_its_time_until_it_is_unpinned() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    pinned = pool.pin(key(1))
    assert pinned is not None
    clock.now += 1000
    pool.expire()
    assert held(pool) == []
    assert is_whole(pinned, 1)
    assert pool.used_bytes == 8 * ROW
    pool.unpin(pinned)
    assert is_poisoned(pinned)
    assert pool.used_bytes == 0


def test_a_clock_that_jumps_ahead_ends_everything_and_breaks_nothing() -> None:
    clock = Clock()
    pool = make_pool(clock)
    for number in (1, 2, 3):
        put(pool, number)
    clock.now = 1e12
    assert put(pool, 4)
    assert held(pool) == [4]
    assert pool.expired == 3


def test_a_clock_that_jumps_back_keeps_what_is_there_and_breaks_nothing() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    clock.now = -1e6
    assert put(pool, 2)
    assert held(pool) == [1, 2]
    clock.now += 60
    assert held(pool) == [1]
    clock.now = 1060.0
    assert held(pool) == []


# ---- replay, rows ------------------------------------------------------------------------------


def test_a_replayed_snapshot_never_replaces_one_that_is_there() -> None:
    clock = Clock()
    pool = make_pool(clock)
    put(pool, 1)
    replayed = snapshot_of(LAYOUT, 8, 16, 9)
    assert not pool.put(key(1), replayed, owner=OWNER, is_replayed=True)
    found = pool.peek(key(1))
    assert found is not None
    assert is_whole(found, 1)
    assert put(pool, 2, is_replayed=True)
    assert not put(pool, 2, is_replayed=True)
    assert put(pool, 2)
    clock.now += 60
    assert pool.put(key(1), replayed, owner=OWNER, is_replayed=True), "what expired is not there"


@pytest.mark.parametrize(("rows", "start"), [(7, 9), (8, 8), (9, 7), (14, 2), (100, 0)])
def test_rows_older_than_the_pool_keeps_are_cut_off(rows: int, start: int) -> None:
    pool = make_pool(rows=rows)
    assert pool.put(key(1), snapshot_of(LAYOUT, 0, 16, 5), owner=OWNER)
    found = pool.peek(key(1))
    assert found is not None
    assert (found.start, found.stop) == (start, 16)
    assert is_whole(found, 5)
    assert pool.used_bytes == (16 - start) * ROW
    assert all(array.base is None for array in found.rows.values()), "the rest is not kept alive"


@pytest.mark.parametrize("rows", range(7, 17))
def test_rows_are_cut_at_whole_entries(rows: int) -> None:
    """A window group may have entries of two tokens; start must say which rows are there."""
    pairs = LayerGroup(
        name="pairs",
        layers=(0,),
        values=3,
        entry_format="u8",
        tokens_per_entry=2,
        lifetime=Lifetime.WINDOW,
    )
    layout = Layout(model="m", groups=(*LAYOUT.groups, pairs), window_tokens=8)
    pool = WindowPool(layout, capacity_bytes=10_000, ttl_seconds=60.0, rows=rows, clock=Clock())
    pool.put(key(1), snapshot_of(layout, 0, 16, 5), owner=OWNER)
    found = pool.peek(key(1))
    assert found is not None
    check_snapshot(found, layout, 8)
    expected = snapshot_of(layout, found.start, 16, 5)
    assert all(np.array_equal(found.rows[name], expected.rows[name]) for name in expected.rows)
    assert rows <= 16 - found.start <= rows + 1


def test_a_v41_snapshot_takes_the_bytes_that_the_layout_promises() -> None:
    layout = kvstore.layout("deepseek-v4.1-flash")
    pool = WindowPool(layout, capacity_bytes=2 << 20, ttl_seconds=60.0, rows=128, clock=Clock())
    given = WindowSnapshot(0, 256, {"window": np.zeros((20, 256, 528), np.uint8)})
    check_snapshot(given, layout, 128)
    assert pool.put(key(1), given, owner=OWNER)
    assert pool.used_bytes == layout.window_bytes == 1_351_680


# ---- check_snapshot ----------------------------------------------------------------------------


def test_a_snapshot_that_could_serve_is_accepted() -> None:
    for start, stop in [(0, 8), (1, 8), (9, 16), (0, 16), (17, 24)]:
        check_snapshot(snapshot_of(LAYOUT, start, stop), LAYOUT, 8)
    check_snapshot(snapshot_of(LAYOUT, 0, 4), LAYOUT, 4)  # shorter than W: all there is


def with_rows(change: Callable[[dict[str, Any]], None]) -> WindowSnapshot:
    snapshot = snapshot_of(LAYOUT, 8, 16)
    rows: dict[str, Any] = dict(snapshot.rows)
    change(rows)
    return replace(snapshot, rows=rows)


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (snapshot_of(LAYOUT, 1, 9), r"block boundary \(a multiple of 8\), found 9"),
        (WindowSnapshot(0, 0, snapshot_of(LAYOUT, 0, 8).rows), "block boundary .* found 0"),
        (WindowSnapshot(0, -8, snapshot_of(LAYOUT, 0, 8).rows), "block boundary .* found -8"),
        (snapshot_of(LAYOUT, 10, 16), "at most 9 to serve a hit at 16, found 10"),
        (snapshot_of(LAYOUT, 16, 16), "at most 9 to serve a hit at 16, found 16"),
        (WindowSnapshot(-1, 16, snapshot_of(LAYOUT, 0, 16).rows), "at most 9 .* found -1"),
        (snapshot_of(LAYOUT, 2, 8), "at most 1 to serve a hit at 8, found 2"),
        (
            with_rows(lambda rows: rows.pop("far")),
            r"groups \['near'\], expected .*\['far', 'near'\]",
        ),
        (
            with_rows(lambda rows: rows.update(kept=1)),
            r"groups \['far', 'kept', 'near'\], expected",
        ),
        (with_rows(dict.clear), r"groups \[\], expected"),
        (
            with_rows(lambda rows: rows.update(far=rows["far"][:, 1:])),
            r"'far': expected uint8 \[1, 8, 4\], found uint8 \[1, 7, 4\]",
        ),
        (
            with_rows(lambda rows: rows.update(near=rows["near"].astype(np.int8))),
            r"'near': expected uint8 \[3, 8, 2\], found int8 \[3, 8, 2\]",
        ),
        (
            with_rows(lambda rows: rows.update(near=rows["near"][:2])),
            r"'near': expected uint8 \[3, 8, 2\], found uint8 \[2, 8, 2\]",
        ),
        (
            with_rows(lambda rows: rows.update(far=rows["far"].ravel())),
            r"'far': expected uint8 \[1, 8, 4\], found uint8 \[32\]",
        ),
    ],
)
def test_a_snapshot_that_could_not_serve_is_refused_with_what_was_found(
    snapshot: WindowSnapshot, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_snapshot(snapshot, LAYOUT, 8)


# ---- everything together -----------------------------------------------------------------------


@dataclass
class Kept:
    """What the model knows of a snapshot."""

    number: int
    rows: int
    fill: int
    owner: BlockHash
    expires: float
    pins: int = 0


@dataclass
class Model:
    """A pool as a list, least recently used first."""

    kept: list[Kept] = field(default_factory=list)
    doomed: list[Kept] = field(default_factory=list)

    def find(self, number: int) -> Kept | None:
        return next((kept for kept in self.kept if kept.number == number), None)

    def drop(self, kept: Kept) -> None:
        self.kept.remove(kept)
        if kept.pins:
            self.doomed.append(kept)

    def used(self) -> int:
        return ROW * sum(kept.rows for kept in [*self.kept, *self.doomed])


class PoolMachine(RuleBasedStateMachine):
    """The pool against the list."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = make_pool(self.clock, rows=16)
        self.model = Model()
        self.pins: list[tuple[WindowSnapshot, Kept]] = []

    @rule(
        number=st.integers(0, 4),
        rows=st.sampled_from([7, 8, 12, 16, 20, 25]),
        fill=st.integers(0, 200),
        owner=st.sampled_from([OWNER, OTHER]),
        is_replayed=st.booleans(),
    )
    def put(self, number: int, rows: int, fill: int, owner: BlockHash, is_replayed: bool) -> None:
        snapshot = snapshot_of(LAYOUT, 32 - rows, 32, fill)
        found = self.pool.put(key(number), snapshot, owner=owner, is_replayed=is_replayed)
        self.expire_model()
        rows = min(rows, 16)
        present = self.model.find(number)
        if present is not None and is_replayed:
            assert not found
            return
        model = self.model
        fixed = sum(kept.rows for kept in [*model.kept, *model.doomed] if kept.pins)
        if (fixed + rows) * ROW > self.pool.capacity_bytes:
            assert not found
            return
        assert found
        if present is not None:
            model.drop(present)
        for kept in list(model.kept):
            if model.used() + rows * ROW > self.pool.capacity_bytes and not kept.pins:
                model.drop(kept)
        model.kept.append(Kept(number, rows, fill, owner, self.clock.now + 60.0))

    @rule(number=st.integers(0, 4))
    def pin(self, number: int) -> None:
        snapshot = self.pool.pin(key(number))
        kept = self.model.find(number)
        if kept is None or kept.expires <= self.clock.now:
            assert snapshot is None
            return
        assert snapshot is not None
        kept.pins += 1
        self.model.kept.remove(kept)
        self.model.kept.append(kept)
        self.pins.append((snapshot, kept))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.pins) - 1))
        snapshot, kept = self.pins.pop(place)
        self.pool.unpin(snapshot)
        kept.pins -= 1
        if not kept.pins and any(each is kept for each in self.model.doomed):
            self.model.doomed = [each for each in self.model.doomed if each is not kept]
            assert is_poisoned(snapshot)

    @rule(seconds=st.sampled_from([1.0, 25.0, 60.0, -10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        self.pool.expire()
        self.expire_model()

    @rule(owner=st.sampled_from([OWNER, OTHER]))
    def clear(self, owner: BlockHash) -> None:
        self.pool.clear(owner)
        for kept in [kept for kept in self.model.kept if kept.owner == owner]:
            self.model.drop(kept)

    def expire_model(self) -> None:
        for kept in [kept for kept in self.model.kept if kept.expires <= self.clock.now]:
            self.model.drop(kept)

    @invariant()
    def bytes_are_those_of_what_is_held(self) -> None:
        assert self.pool.used_bytes == self.model.used() <= self.pool.capacity_bytes
        assert len(self.pool) == len(self.model.kept)

    @invariant()
    def what_is_held_is_whole(self) -> None:
        for number in range(5):
            kept = self.model.find(number)
            found = self.pool.peek(key(number))
            if kept is None or kept.expires <= self.clock.now:
                assert found is None
            else:
                assert found is not None
                assert found.stop - found.start == kept.rows
                assert is_whole(found, kept.fill)

    @invariant()
    def what_is_pinned_is_whole(self) -> None:
        for snapshot, kept in self.pins:
            assert is_whole(snapshot, kept.fill)


TestEveryOrderOfOperations = PoolMachine.TestCase
TestEveryOrderOfOperations.settings = settings(max_examples=120, stateful_step_count=40)
