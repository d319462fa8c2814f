"""The result of a request must not depend on the hit, within the limits of replay.

The law, for a hit of H tokens, a prompt of N and R window rows kept below H: with a pooled window,
global entries of the suffix are byte-equal to a cold run's; logits are equal exactly when
``N - H >= 2 W - 1 - R``. After replay neither holds, unless the whole hit was replayed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine, Result, Tokens
from tests.reference.support import (
    LOGITS_EQUAL,
    difference,
    entries_equal,
    open_cache,
    prompt_tokens,
)

LOG = logging.getLogger(__name__)
"""How far results differ where they may; shown with ``-o log_cli=1 --log-level=INFO``."""

CONFIG = ReferenceConfig.tiny()
W = CONFIG.sliding_window
BLOCK = 128
HIT = 512
SUFFIXES = (1, 2, 60, 126, 127, 128, 200)
TOKENS = prompt_tokens(1024)

SMALL = ReferenceConfig.tiny(sliding_window=16, index_topk=8)
SMALL_BLOCK = 32


@functools.cache
def cold(length: int) -> Result:
    """The result without a cache for the first ``length`` tokens."""
    return ReferenceEngine(CONFIG).prefill(TOKENS[:length])


def warm_engine(
    cache: kvstore.PrefixCache,
    *,
    replay: Literal["fold", "hook"] = "fold",
    restore: Literal["read", "pages"] = "read",
) -> ReferenceEngine:
    return ReferenceEngine(CONFIG, cache, replay=replay, restore=restore)


@functools.cache
def left_behind(hit: int) -> tuple[kvstore.Entries, kvstore.WindowSnapshot]:
    """A cache with 2 W - 2 window rows after a cold prefill of ``hit + 1`` tokens."""
    rows = 2 * W - 2
    with (
        tempfile.TemporaryDirectory() as folder,
        open_cache(Path(folder), CONFIG, window_rows=rows) as cache,
    ):
        warm_engine(cache).prefill(TOKENS[: hit + 1])
        cache.flush()
        with cache.lookup(TOKENS[: hit + 1]) as match:
            return cache.read(match), cache.window(match)


def fill(cache: kvstore.PrefixCache, hit: int, *, window: bool) -> None:
    """Leave ``hit`` tokens of a cold run in the cache, with the window that ends there or without."""
    entries, snapshot = left_behind(hit)
    cache.store(TOKENS[:hit], entries)
    if window:
        cache.put_window(TOKENS[:hit], snapshot)
    cache.flush()


def test_a_window_that_a_replay_made_is_offered_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it never replaces a computed window; later windows are computed."""
    offered = []
    keep = kvstore.PrefixCache.put_window

    def spy(
        cache: kvstore.PrefixCache, tokens: Tokens, snapshot: kvstore.WindowSnapshot, **named: Any
    ) -> bool:
        offered.append((snapshot.stop, snapshot.source))
        return keep(cache, tokens, snapshot, **named)

    monkeypatch.setattr(kvstore.PrefixCache, "put_window", spy)
    tokens = prompt_tokens(3 * SMALL_BLOCK)
    with open_cache(tmp_path, SMALL, block_tokens=SMALL_BLOCK) as cache:
        ReferenceEngine(SMALL, cache).prefill(tokens[: SMALL_BLOCK + 1])
        cache.flush()
    with open_cache(tmp_path, SMALL, block_tokens=SMALL_BLOCK) as cache:
        # The pool went with its process.
        for length in (len(tokens), SMALL_BLOCK + 2):
            result = ReferenceEngine(SMALL, cache).prefill(tokens[:length])
            assert (result.hit_tokens, result.window_source) == (SMALL_BLOCK, "replay")

    computed = [(number * SMALL_BLOCK, "engine") for number in (1, 2, 3)]
    assert offered == [*computed, (SMALL_BLOCK, "replay")]


@pytest.mark.parametrize("window_rows", [W, 2 * W - 2])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_after_a_pooled_window_only_logits_of_short_suffixes_differ(
    suffix: int,
    window_rows: int,
    tmp_path: Path,
) -> None:
    expected = cold(HIT + suffix)
    with open_cache(tmp_path, CONFIG, window_rows=window_rows) as cache:
        fill(cache, HIT, window=True)
        warm = warm_engine(cache).prefill(TOKENS[: HIT + suffix])

    assert (warm.hit_tokens, warm.window_source, warm.replay_tokens) == (HIT, "pool", 0)
    assert warm.encoder_rows == max(suffix, W)
    assert entries_equal(warm, expected)
    LOG.info("suffix %d: logits differ by %.1e", suffix, difference(warm, expected))
    if suffix >= 2 * W - 1 - window_rows:
        assert difference(warm, expected) < LOGITS_EQUAL
    else:
        assert difference(warm, expected) > LOGITS_EQUAL


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_after_replay_restored_entries_stay_and_everything_else_differs(
    suffix: int, tmp_path: Path
) -> None:
    expected = cold(HIT + suffix)
    with open_cache(tmp_path, CONFIG) as cache:
        fill(cache, HIT, window=False)
        warm = warm_engine(cache).prefill(TOKENS[: HIT + suffix])

    assert (warm.hit_tokens, warm.window_source, warm.replay_tokens) == (HIT, "replay", W)
    assert warm.encoder_rows == W + suffix
    assert entries_equal(warm, expected, stop=HIT)
    assert not entries_equal(warm, expected)
    LOG.info("suffix %d: logits differ by %.1e", suffix, difference(warm, expected))
    assert difference(warm, expected) > LOGITS_EQUAL


@pytest.mark.parametrize("suffix", [1, 2, 127, 128, 200])
def test_replay_of_a_whole_hit_equals_the_cold_run(suffix: int, tmp_path: Path) -> None:
    expected = cold(W + suffix)
    with open_cache(tmp_path, CONFIG) as cache:
        fill(cache, W, window=False)
        warm = warm_engine(cache).prefill(TOKENS[: W + suffix])

    assert (warm.hit_tokens, warm.window_source, warm.replay_tokens) == (W, "replay", W)
    assert entries_equal(warm, expected)
    assert difference(warm, expected) < LOGITS_EQUAL


@pytest.mark.parametrize("window", [False, True], ids=["replay", "pool"])
def test_restored_entries_are_reused_whoever_wrote_them(window: bool, tmp_path: Path) -> None:
    """Replayed rows before the hit compute other entries, which must not be written."""
    entries, snapshot = left_behind(HIT)
    # Other signs for half of the values: still valid FP4, and nothing this engine would write.
    foreign = {name: stored.copy() for name, stored in entries.items()}
    for name, stored in foreign.items():
        stored[..., : CONFIG.layout().group(name).planes[0]] ^= 0x08
    with open_cache(tmp_path, CONFIG) as cache:
        cache.store(TOKENS[:HIT], foreign)
        if window:
            cache.put_window(TOKENS[:HIT], snapshot)
        cache.flush()
        warm = warm_engine(cache).prefill(TOKENS[: HIT + 200])
        cache.flush()
        kept = cache.read(cache.lookup(TOKENS[: HIT + 200]))

    assert warm.hit_tokens == HIT
    assert kept.tokens == HIT + BLOCK
    for name, stored in foreign.items():
        assert np.array_equal(warm.entries[name][:, : stored.shape[1]], stored)
        assert np.array_equal(kept[name][:, : stored.shape[1]], stored)


def test_a_lost_block_costs_a_shorter_hit_and_nothing_else(tmp_path: Path) -> None:
    tokens = TOKENS[: HIT + 20]
    with open_cache(tmp_path / "short", CONFIG) as cache:
        fill(cache, HIT - BLOCK, window=False)
        expected = warm_engine(cache).prefill(tokens)
    with open_cache(tmp_path / "lost", CONFIG) as cache:
        fill(cache, HIT, window=True)
        damage(tmp_path / "lost", left_behind(HIT)[0]["main_r1"][0, HIT - BLOCK :])
        warm = warm_engine(cache).prefill(tokens)

    assert (warm.hit_tokens, warm.window_source) == (HIT - BLOCK, "replay")
    assert entries_equal(warm, expected)
    assert difference(warm, expected) < LOGITS_EQUAL


def damage(store: Path, entries: NDArray[np.uint8]) -> None:
    """Flip a bit of the block that holds ``entries``, ``[n, entry_bytes]``, in the store's file."""
    nibble_bytes = CONFIG.layout().group("main_r1").planes[0]
    # A frame holds the nibbles of 64 entries in a row.
    pattern = entries[:64, :nibble_bytes].tobytes()
    for path in store.rglob("*"):
        if path.is_file() and (place := path.read_bytes().find(pattern)) >= 0:
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([pattern[0] ^ 1]))
            return
    pytest.fail(f"no file under {store} holds the entries")


@pytest.mark.parametrize("suffix", [1, 60, 200])
def test_the_hook_rebuilds_what_folding_rebuilds(suffix: int, tmp_path: Path) -> None:
    results = {}
    for replay in ("fold", "hook"):
        with open_cache(tmp_path / replay, CONFIG) as cache:
            fill(cache, HIT, window=False)
            engine = warm_engine(cache, replay=replay)
            results[replay] = engine.prefill(TOKENS[: HIT + suffix])

    assert results["hook"].window_source == "replay"
    assert results["hook"].replay_tokens == results["fold"].replay_tokens == W
    # The hook's rows are run before the prefill, which runs those the decoder needs once more.
    assert results["hook"].encoder_rows == W + max(suffix, W)
    assert entries_equal(results["hook"], results["fold"])
    assert difference(results["hook"], results["fold"]) < LOGITS_EQUAL


@pytest.mark.parametrize("window", [False, True], ids=["replay", "pool"])
def test_entries_gathered_from_pages_are_those_read_to_the_host(
    window: bool, tmp_path: Path
) -> None:
    results = {}
    for restore in ("read", "pages"):
        with open_cache(tmp_path / restore, CONFIG) as cache:
            fill(cache, HIT, window=window)
            engine = warm_engine(cache, restore=restore)
            results[restore] = engine.generate(TOKENS[: HIT + 3], 4)

    assert results["pages"].entries_start == HIT
    assert results["pages"].new_tokens == results["read"].new_tokens
    assert difference(results["pages"], results["read"]) < LOGITS_EQUAL
    assert entries_equal(results["pages"], results["read"], start=HIT)


CUTS: dict[str, Sequence[int]] = {
    "odd": range(1, HIT + 200, 97),
    "inside the replay": (HIT - 100, HIT - 1, HIT + 1, HIT + 77),
    "at the decoder's first row": (HIT + 200 - W, HIT + 199),
}


@pytest.mark.parametrize("window", [False, True], ids=["replay", "pool"])
def test_no_result_depends_on_where_prefill_is_cut(window: bool, tmp_path: Path) -> None:
    results = {}
    for name, chunks in {"whole": (), **CUTS}.items():
        with open_cache(tmp_path / name, CONFIG) as cache:
            fill(cache, HIT, window=window)
            results[name] = warm_engine(cache).prefill(TOKENS[: HIT + 200], chunks=chunks)

    whole = results["whole"]
    assert whole.window_source == ("pool" if window else "replay")
    for cut in results.values():
        assert cut.hit_tokens == HIT
        assert entries_equal(cut, whole)
        assert difference(cut, whole) < LOGITS_EQUAL


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_no_cold_result_depends_on_where_prefill_is_cut(cuts: Sequence[int]) -> None:
    cut = ReferenceEngine(CONFIG).prefill(TOKENS[: HIT + 200], chunks=cuts)

    assert entries_equal(cut, cold(HIT + 200))
    assert difference(cut, cold(HIT + 200)) < LOGITS_EQUAL


def test_an_exact_repeat_finds_the_window_that_ends_where_it_hits(tmp_path: Path) -> None:
    for length, hit in ((HIT, HIT - BLOCK), (HIT + 50, HIT)):
        with open_cache(tmp_path / str(length), CONFIG, window_rows=2 * W - 2) as cache:
            engine = warm_engine(cache)
            first = engine.prefill(TOKENS[:length])
            cache.flush()
            again = engine.prefill(TOKENS[:length])

        assert (again.hit_tokens, again.window_source) == (hit, "pool")
        assert difference(first, again) < LOGITS_EQUAL
        assert entries_equal(first, again)


def test_the_next_turn_continues_from_the_end_of_output_as_a_cold_run_would(
    tmp_path: Path,
) -> None:
    """Decoding one token at a time leaves the entries of a prefill."""
    rows = 2 * SMALL.sliding_window - 2
    tokens = TOKENS[:50]
    with open_cache(tmp_path, SMALL, window_rows=rows, block_tokens=SMALL_BLOCK) as cache:
        engine = ReferenceEngine(SMALL, cache)
        turn = engine.generate(tokens, 60)
        cache.flush()
        conversation = np.concatenate([tokens, np.array(turn.new_tokens, np.uint32), TOKENS[50:60]])
        warm = engine.prefill(conversation)
    cold_run = ReferenceEngine(SMALL).prefill(conversation)

    assert (warm.hit_tokens, warm.window_source) == (96, "pool")
    assert entries_equal(turn, cold_run, stop=109)
    assert entries_equal(warm, cold_run)
    assert difference(warm, cold_run) < LOGITS_EQUAL


def test_generation_is_greedy_and_the_same_warm_and_cold(tmp_path: Path) -> None:
    rows = 2 * SMALL.sliding_window - 2
    tokens = TOKENS[:75]
    expected = ReferenceEngine(SMALL).generate(tokens, 12)
    assert expected.new_tokens[0] == int(expected.logits.argmax())
    assert len(expected.new_tokens) == 12
    assert len(set(expected.new_tokens)) > 3
    with open_cache(tmp_path, SMALL, window_rows=rows, block_tokens=SMALL_BLOCK) as cache:
        engine = ReferenceEngine(SMALL, cache)
        first = engine.generate(tokens, 12)
        cache.flush()
        again = engine.generate(tokens, 12)

    assert (first.hit_tokens, again.hit_tokens) == (0, 64)
    assert first.new_tokens == again.new_tokens == expected.new_tokens


def test_the_hook_rebuilds_many_windows_in_one_pass_as_it_would_each_alone(
    tmp_path: Path,
) -> None:
    prompts = [prompt_tokens(length, seed=length) for length in (33, 70, 100)]
    batches: list[list[kvstore.ReplayRequest]] = []

    def hook(requests: list[kvstore.ReplayRequest], /) -> list[kvstore.WindowSnapshot]:
        batches.append(requests)
        return engine.replay_hook(requests)

    with (
        open_cache(tmp_path, SMALL, block_tokens=SMALL_BLOCK) as cache,
        contextlib.ExitStack() as held,
    ):
        engine = ReferenceEngine(SMALL, cache)
        for prompt in prompts:
            cache.store(prompt, ReferenceEngine(SMALL).prefill(prompt).entries)
        cache.flush()
        matches = [held.enter_context(cache.lookup(prompt)) for prompt in prompts]
        for match in matches:
            held.enter_context(cache.load(match))
        together = cache.windows([(match, hook) for match in matches])
        alone = [engine.replay_hook([request])[0] for request in batches[0]]

    assert [len(batch) for batch in batches] == [3]
    assert [(s.start, s.stop) for s in together] == [(16, 32), (48, 64), (80, 96)]
    for one, other in zip(together, alone, strict=True):
        assert one.source == "replay"
        rows, expected = (
            torch.from_numpy(snapshot.rows["window"]).view(torch.float64)
            for snapshot in (one, other)
        )
        assert torch.allclose(rows, expected, atol=LOGITS_EQUAL, rtol=0)


def test_replay_without_the_hits_global_entries_is_refused() -> None:
    request = kvstore.ReplayRequest(
        start=0,
        stop=32,
        read_floor=0,
        write_floor=32,
        window_write_floor=0,
        tokens=TOKENS[:40],
    )
    with pytest.raises(ValueError, match="load the match before its window"):
        ReferenceEngine(SMALL).replay_hook([request])


def test_engines_with_other_weights_do_not_share_a_namespace() -> None:
    engines = [
        ReferenceEngine(SMALL),
        ReferenceEngine(SMALL, seed=1),
        ReferenceEngine(SMALL, dtype=torch.float32),
        ReferenceEngine(CONFIG),
    ]

    assert len({engine.namespace for engine in engines}) == 4
    assert ReferenceEngine(SMALL).namespace == engines[0].namespace


def test_binary32_reuses_a_prefix_as_well(tmp_path: Path) -> None:
    tokens = TOKENS[:90]
    with open_cache(tmp_path, SMALL, block_tokens=SMALL_BLOCK, dtype=torch.float32) as cache:
        engine = ReferenceEngine(SMALL, cache, dtype=torch.float32)
        first = engine.prefill(tokens)
        cache.flush()
        again = engine.prefill(tokens)

    assert first.logits.dtype == torch.float32
    assert (again.hit_tokens, again.window_source) == (64, "pool")
    assert entries_equal(again, first, stop=64)


@pytest.mark.parametrize(("tokens", "count"), [([], 1), ([1, 2], 0)])
def test_nothing_to_run_is_refused(tokens: list[int], count: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        ReferenceEngine(SMALL).generate(tokens, count)
