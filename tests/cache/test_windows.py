"""Window KV: from the pool while it is there, by replay when it is not, never from a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import ConfigError, PrefixCache, ReplayRequest, WindowSnapshot
from kvstore.frame.format import FrameFormat
from tests.cache.test_contract import Clock
from tests.stores import BLOCK, DENSE, WINDOWED, entries_of, inside, open_cache, tier_of, tokens_of

W = WINDOWED.window_tokens
GROUP = WINDOWED.group("window")
ROW_BYTES = len(GROUP.layers) * GROUP.entry_bytes


def rows_of(start: int, stop: int, salt: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Rows that say which token each stands for."""
    values = (np.arange(start, stop) * 7 + salt).astype(np.uint8)
    shape = (len(GROUP.layers), stop - start, GROUP.entry_bytes)
    return {"window": np.ascontiguousarray(np.broadcast_to(values[None, :, None], shape))}


def snapshot_of(stop: int, rows: int = W, salt: int = 0) -> WindowSnapshot:
    start = max(0, stop - rows)
    return WindowSnapshot(start, stop, rows_of(start, stop, salt))


class Engine:
    """A replay hook that remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[list[ReplayRequest]] = []

    def __call__(self, requests: list[ReplayRequest]) -> Sequence[WindowSnapshot]:
        self.calls.append(requests)
        return [WindowSnapshot(r.start, r.stop, rows_of(r.start, r.stop, 100)) for r in requests]


def filled(path: Path, blocks: int = 10, **options: Any) -> tuple[PrefixCache, Any]:
    tokens = tokens_of(blocks * BLOCK + 3)
    cache = open_cache(path, WINDOWED, **options)
    cache.store(tokens, entries_of(WINDOWED, tokens))
    cache.flush()
    return cache, tokens


def test_a_pooled_window_is_served_and_replay_is_not_asked_for(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        hit = 10 * BLOCK
        assert cache.put_window(tokens, snapshot_of(hit))
        engine = Engine()
        with cache.lookup(tokens) as match:
            assert match.window_hit
            assert match.replay_start == match.write_floor == match.window_write_floor == hit
            assert match.read_floor == hit - W
            window = cache.window(match, engine)
            assert (window.source, window.start, window.stop) == ("pool", hit - W, hit)
            np.testing.assert_array_equal(window.rows["window"], rows_of(hit - W, hit)["window"])
        assert engine.calls == []


def test_a_missing_window_never_vetoes_the_global_hit_and_is_replayed(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        hit = 10 * BLOCK
        engine = Engine()
        with cache.lookup(tokens, request_id="r7") as match:
            assert match.hit_tokens == hit
            assert not match.window_hit
            floors = (match.replay_start, match.read_floor, match.write_floor)
            assert (*floors, match.window_write_floor) == (hit - W, hit - W, hit, hit - W)
            pages = cache.load(match)
            window = cache.window(match, engine)
            assert window.source == "replay"
            (request,) = engine.calls[0]
            assert (request.start, request.stop) == (hit - W, hit)
            assert (request.read_floor, request.write_floor) == (hit - W, hit)
            assert request.window_write_floor == hit - W
            assert request.pages is pages
            assert request.request_id == "r7"
            np.testing.assert_array_equal(request.tokens, tokens)
            pages.release()
        counters = cache.stats()["counters"]
        assert (counters["replay_requests"], counters["replayed_tokens"]) == (1, W)
        with cache.lookup(tokens) as match:  # a replayed window serves the next request
            assert cache.window(match, engine).source == "pool"
        assert len(engine.calls) == 1


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_hit_inside_the_window_replays_from_the_start(tmp_path: Path, blocks: int) -> None:
    cache, tokens = filled(tmp_path / "s", blocks)
    with cache, cache.lookup(tokens) as match:
        hit = blocks * BLOCK
        assert match.hit_tokens == hit
        assert match.replay_start == max(0, hit - W)
        assert match.worth_loading == (hit > W)
        engine = Engine()
        assert cache.window(match, engine).source == "replay"
        assert cache.put_window(tokens, snapshot_of(hit))
        assert cache.lookup(tokens).worth_loading


def test_a_replayed_window_never_replaces_one_that_is_there_but_a_cold_one_does(
    tmp_path: Path,
) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        hit = 10 * BLOCK
        engine = Engine()
        with cache.lookup(tokens) as match:
            cache.put_window(tokens, snapshot_of(hit))  # another request was faster
            assert cache.window(match, engine).source == "replay"
        with cache.lookup(tokens) as match:
            exact = cache.window(match, engine).rows["window"]
            np.testing.assert_array_equal(exact, snapshot_of(hit).rows["window"])
        cache.put_window(tokens, snapshot_of(hit, salt=5))
        with cache.lookup(tokens) as match:
            newer = cache.window(match, engine).rows["window"]
            np.testing.assert_array_equal(newer, snapshot_of(hit, salt=5).rows["window"])


def test_windows_hands_requests_of_one_hook_over_in_one_call(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        other = tokens_of(6 * BLOCK + 1, 5)
        cache.store(other, entries_of(WINDOWED, other))
        cache.flush()
        cache.put_window(tokens[: 5 * BLOCK + 1], snapshot_of(5 * BLOCK))
        first, second = Engine(), Engine()
        matches = [
            cache.lookup(t) for t in (tokens, other, tokens[: 5 * BLOCK + 1], tokens[:BLOCK])
        ]
        found = cache.windows(
            [(matches[0], first), (matches[1], first), (matches[2], second), (matches[3], None)]
        )
        assert [window.source for window in found] == ["replay", "replay", "pool", "none"]
        assert [[r.stop for r in call] for call in first.calls] == [[10 * BLOCK, 6 * BLOCK]]
        assert second.calls == []
        assert [window.stop for window in found] == [10 * BLOCK, 6 * BLOCK, 5 * BLOCK, 0]


class Batching:
    """An engine whose hook is a bound method, and so a new object each time it is named."""

    def __init__(self) -> None:
        self.engine = Engine()

    def replay(self, requests: list[ReplayRequest]) -> Sequence[WindowSnapshot]:
        return self.engine(requests)


def test_bound_methods_of_one_engine_are_one_hook(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        batching = Batching()
        matches = [cache.lookup(tokens[: n * BLOCK + 1]) for n in (5, 6, 7)]
        cache.windows([(match, batching.replay) for match in matches])
        assert len(batching.engine.calls) == 1


def test_a_window_that_an_engine_replayed_by_itself_never_replaces_an_exact_one(
    tmp_path: Path,
) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        hit = 10 * BLOCK
        folded = replace(snapshot_of(hit, salt=9), source="replay")
        assert cache.put_window(tokens, folded)
        assert cache.put_window(tokens, snapshot_of(hit))
        assert not cache.put_window(tokens, folded)
        counters = cache.stats()["counters"]
        assert (counters["replay_requests"], counters["replayed_tokens"]) == (2, 2 * W)
        with cache.lookup(tokens) as match:
            rows = cache.window(match).rows["window"]
            np.testing.assert_array_equal(rows, snapshot_of(hit).rows["window"])


def test_an_engine_that_cannot_replay_asks_for_the_longest_hit_with_a_window(
    tmp_path: Path,
) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        assert cache.lookup(tokens, need_window=True).hit_tokens == 0
        cache.put_window(tokens, snapshot_of(4 * BLOCK))
        cache.put_window(tokens, snapshot_of(7 * BLOCK))
        with cache.lookup(tokens, need_window=True) as match:
            assert match.hit_tokens == 7 * BLOCK
            assert cache.window(match).source == "pool"
            assert cache.read(match).tokens == 7 * BLOCK
        assert cache.lookup(tokens).hit_tokens == 10 * BLOCK
        with (
            cache.lookup(tokens) as match,
            pytest.raises(ValueError, match="not in the pool and there is no replay hook"),
        ):
            cache.window(match)


def test_what_was_looked_up_is_what_loads_however_full_the_pool_gets(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s", window_bytes=2 * W * ROW_BYTES)
    with cache:
        cache.put_window(tokens, snapshot_of(10 * BLOCK))
        with cache.lookup(tokens, need_window=True) as match:
            for stop in range(3, 9):
                cache.put_window(tokens, snapshot_of(stop * BLOCK))
            window = cache.window(match)
            np.testing.assert_array_equal(
                window.rows["window"], snapshot_of(10 * BLOCK).rows["window"]
            )
        assert cache.stats()["window"]["used_bytes"] <= 2 * W * ROW_BYTES


def test_a_window_expires_by_the_injected_clock(tmp_path: Path) -> None:
    clock = Clock()
    cache, tokens = filled(tmp_path / "s", clock=clock, window_ttl=60)
    with cache:
        cache.put_window(tokens, snapshot_of(10 * BLOCK))
        clock.now += 59
        assert cache.lookup(tokens).window_hit
        clock.now += 2
        assert not cache.lookup(tokens).window_hit


def test_a_shortened_hit_looks_for_the_window_of_where_it_ends(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache:
        cache.put_window(tokens, snapshot_of(10 * BLOCK))
        cache.put_window(tokens, snapshot_of(6 * BLOCK))
        with cache.lookup(tokens) as match:
            keys = [match.prefix.key(n) for n in (9, 8, 7, 6)]
            tier_of(cache).delete(keys)
            assert cache.read(match).tokens == 6 * BLOCK
            window = cache.window(match)
            assert (window.source, window.stop) == ("pool", 6 * BLOCK)
            np.testing.assert_array_equal(
                window.rows["window"], snapshot_of(6 * BLOCK).rows["window"]
            )
        with cache.lookup(tokens) as match:
            tier_of(cache).delete([match.prefix.key(n) for n in (5, 4)])
            cache.read(match)
            assert match.hit_tokens == 4 * BLOCK
            assert match.replay_start == 4 * BLOCK - W


def test_more_rows_are_kept_when_asked_for(tmp_path: Path) -> None:
    rows = 2 * W - 2
    cache, tokens = filled(tmp_path / "s", window_rows=rows)
    with cache:
        cache.put_window(tokens, snapshot_of(10 * BLOCK, rows=60))
        match = cache.lookup(tokens)
        assert match.read_floor == 10 * BLOCK - rows
    with pytest.raises(ConfigError, match=f"at least W - 1 = {W - 1}, found {W - 2}"):
        open_cache(tmp_path / "t", WINDOWED, window_rows=W - 2)


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (snapshot_of(10 * BLOCK + 1), r"block boundary \(a multiple of 8\), found 81"),
        (snapshot_of(10 * BLOCK, rows=W - 2), "start must be at most 65 .*found 66"),
        (WindowSnapshot(64, 80, {}), r"has groups \[\], expected the WINDOW groups \['window'\]"),
        (
            WindowSnapshot(64, 80, rows_of(64, 79)),
            r"expected uint8 \[3, 16, 16\], found uint8 \[3, 15",
        ),
        (snapshot_of(88), "stops at 88, beyond the 83 tokens"),
    ],
)
def test_a_snapshot_that_could_serve_nothing_is_refused(
    tmp_path: Path, snapshot: WindowSnapshot, message: str
) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache, pytest.raises(ValueError, match=message):
        cache.put_window(tokens, snapshot)


def test_a_hook_that_returns_the_wrong_rows_is_told_so(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s")
    with cache, cache.lookup(tokens) as match:
        with pytest.raises(ValueError, match=r"returned rows \[64, 72\), expected \[64, 80\)"):
            cache.window(match, lambda _: [WindowSnapshot(64, 72, rows_of(64, 72))])
        with pytest.raises(ValueError, match="returned 0 snapshots for 1 requests"):
            cache.window(match, lambda _: [])
        with pytest.raises(ZeroDivisionError):
            cache.window(match, lambda _: [1 / 0])  # type: ignore[arg-type]
        assert not inside(cache).context.lock._is_owned()  # type: ignore[attr-defined]


def test_a_hook_runs_in_the_callers_thread_with_no_lock_held(tmp_path: Path) -> None:
    import threading

    cache, tokens = filled(tmp_path / "s")

    def hook(requests: list[ReplayRequest]) -> list[WindowSnapshot]:
        assert threading.current_thread() is caller
        done = threading.Event()

        def elsewhere() -> None:
            cache.lookup(tokens)
            done.set()

        threading.Thread(target=elsewhere).start()
        assert done.wait(20)
        return list(Engine()(requests))

    caller = threading.current_thread()
    with cache, cache.lookup(tokens) as match:
        assert cache.window(match, hook).source == "replay"


def test_window_kv_never_reaches_the_disk(tmp_path: Path) -> None:
    marker = b"\xa7window row that must stay off disk\x5a"[: GROUP.entry_bytes]
    cache, tokens = filled(tmp_path / "s")
    rows = np.zeros((len(GROUP.layers), W, GROUP.entry_bytes), np.uint8)
    rows[:] = np.frombuffer(marker, np.uint8)
    with cache:
        assert cache.put_window(
            tokens, WindowSnapshot(10 * BLOCK - W, 10 * BLOCK, {"window": rows})
        )
        with cache.lookup(tokens) as match:
            assert marker in cache.window(match).rows["window"].tobytes()
    assert marker not in (tmp_path / "s" / "data.mdb").read_bytes()
    names = set(FrameFormat(WINDOWED, BLOCK).entries)
    assert names == {"main", "index", "last"}


def test_no_window_pool_is_legal(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s", window_bytes=0, device_bytes=0)
    with cache:
        assert not cache.put_window(tokens, snapshot_of(10 * BLOCK))
        with cache.lookup(tokens) as match:
            assert cache.window(match, Engine()).source == "replay"


def test_a_model_without_windows_has_nothing_to_replay(tmp_path: Path) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    with open_cache(tmp_path / "s", DENSE) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert match.replay_start == match.hit_tokens
            assert match.read_floor == 0
            assert cache.window(match).source == "none"
            assert not match.window_hit
            assert match.worth_loading


def test_debug_mode_poisons_what_a_stale_view_would_see(tmp_path: Path) -> None:
    cache, tokens = filled(tmp_path / "s", debug=True, window_bytes=W * ROW_BYTES)
    with cache:
        cache.put_window(tokens, snapshot_of(10 * BLOCK))
        match = cache.lookup(tokens)
        assert match.snapshot is not None
        stale = match.snapshot.rows["window"]
        with match:
            assert cache.window(match).rows["window"] is not stale
        cache.put_window(tokens, snapshot_of(5 * BLOCK))
        assert (stale == 0xFF).all()


# ---- a pool that cannot hold a window ------------------------------------------------------------

SNAPSHOT_BYTES = 3 * 16 * 16
"""One snapshot of the windowed layout: 3 layers, 16 rows of 4 float32."""


def test_a_pool_smaller_than_one_snapshot_says_so_with_the_least_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(5 * BLOCK)
    with open_cache(tmp_path / "s", WINDOWED, window_bytes=SNAPSHOT_BYTES - 1) as cache:
        (record,) = [r for r in caplog.records if "window pool" in r.getMessage()]
        assert f"less than the {SNAPSHOT_BYTES} of one snapshot" in record.getMessage()
        assert record.getMessage() in cache.stats()["alarms"]
        assert not cache.put_window(tokens, snapshot_of(2 * BLOCK))
        assert cache.stats()["window"]["refused"] == 1
    caplog.clear()
    with open_cache(tmp_path / "s", WINDOWED, window_bytes=SNAPSHOT_BYTES) as cache:
        assert cache.put_window(tokens, snapshot_of(2 * BLOCK))
        assert cache.stats()["alarms"] == []
    assert not caplog.records


def test_a_pool_of_nothing_is_a_choice_until_a_window_is_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(5 * BLOCK)
    with open_cache(tmp_path / "s", WINDOWED, window_bytes=0) as cache:
        assert cache.stats()["alarms"] == []
        cache.put_window(tokens, snapshot_of(2 * BLOCK))
        (alarm,) = cache.stats()["alarms"]
        assert "the window pool of" in alarm
    with open_cache(tmp_path / "dense", window_bytes=0) as cache:
        assert cache.stats()["alarms"] == []
    assert not caplog.records


def test_windows_that_go_before_any_use_are_counted(tmp_path: Path) -> None:
    prompts = [tokens_of(3 * BLOCK, seed) for seed in range(4)]
    with open_cache(tmp_path / "s", WINDOWED, window_bytes=2 * SNAPSHOT_BYTES) as cache:
        for tokens in prompts:
            cache.store(tokens, entries_of(WINDOWED, tokens))
        cache.flush()
        for tokens in prompts[:3]:
            cache.put_window(tokens, snapshot_of(2 * BLOCK))
        assert cache.stats()["window"]["evicted_unused"] == 1  # the first, for the third
        with cache.lookup(prompts[1], need_window=True) as match:
            assert match.window_hit
        for tokens in (prompts[3], prompts[0]):  # evict the third unused, then the second, used
            cache.put_window(tokens, snapshot_of(2 * BLOCK))
        window = cache.stats()["window"]
        assert (window["evicted"], window["evicted_unused"]) == (3, 2)
