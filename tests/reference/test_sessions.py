"""One cache for many sessions: each result equals that of the session alone.

A session whose windows came from the pool, never from a replay, continues the cold run; so its tokens
are those of an engine without a cache. After a replay they are an approximation, and what must hold is
that nothing depends on who else was there.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import Result
from tests.reference.support import (
    LOGITS_EQUAL,
    SYSTEMS,
    difference,
    engine_of,
    entries_equal,
    open_cache,
    prompt_tokens,
)

W = 16
BLOCK = 32
SHORT = {
    "num_hidden_layers": 6,
    "compress_ratios": (0, 2, 2, 1, 1, 1),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 4),
    "candidate_source_layer_id": 3,
    "engram_layer_ids": (1,),
    "num_nextn_predict_layers": 0,
}
SMALL = ReferenceConfig.tiny(
    **{**SYSTEMS["all"], **SHORT, "sliding_window": W, "index_topk": 8, "hidden_size": 32}
)
ROWS = 2 * W - 2

Tokens = NDArray[np.uint32]


def joined(*parts: Tokens | tuple[int, ...]) -> Tokens:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def cache_at(path: Path) -> kvstore.PrefixCache:
    return open_cache(path, SMALL, window_rows=ROWS, block_tokens=BLOCK)


@functools.cache
def alone(tokens: bytes, count: int) -> Result:
    return engine_of(SMALL).generate(np.frombuffer(tokens, np.uint32), count)


def check_alone(result: Result, tokens: Tokens) -> None:
    """Compare a turn with the same turn of an engine without a cache."""
    expected = alone(tokens.tobytes(), len(result.new_tokens))
    assert result.new_tokens == expected.new_tokens
    assert difference(result, expected) < LOGITS_EQUAL
    assert entries_equal(result, expected, start=result.entries_start)


def test_forks_of_a_conversation_share_its_prefix_and_nothing_after_it(tmp_path: Path) -> None:
    trunk = prompt_tokens(70, seed=1)
    with cache_at(tmp_path) as cache:
        engine = engine_of(SMALL, cache)
        engine.generate(trunk, 3)
        cache.flush()
        for fork in range(3):
            tokens = joined(trunk, prompt_tokens(30, seed=10 + fork))
            result = engine.generate(tokens, 3)
            cache.flush()
            assert (result.hit_tokens, result.window_source) == (64, "pool")
            check_alone(result, tokens)
            longer = joined(tokens, result.new_tokens, prompt_tokens(5, seed=20 + fork))
            again = engine.generate(longer, 3)
            assert (again.hit_tokens, again.window_source) == (96, "pool")
            check_alone(again, longer)


def test_an_agent_with_tool_outputs_of_any_length_continues_itself(tmp_path: Path) -> None:
    tokens = prompt_tokens(40, seed=2)
    with cache_at(tmp_path) as cache:
        engine = engine_of(SMALL, cache)
        for turn, tool_output in enumerate((1, 50, 2, 31, 33)):
            result = engine.generate(tokens, 4)
            cache.flush()
            assert turn == 0 or result.window_source == "pool"
            check_alone(result, tokens)
            tokens = joined(tokens, result.new_tokens, prompt_tokens(tool_output, seed=50 + turn))
        hits = engine.prefill(tokens).hit_tokens

    assert hits == (len(tokens) - 33) // BLOCK * BLOCK


def test_interleaved_sessions_do_not_meet(tmp_path: Path) -> None:
    """Each turn of each session comes between turns of the others, on one cache and two engines."""
    sessions = [prompt_tokens(20 + 13 * number, seed=number) for number in range(4)]
    with cache_at(tmp_path) as cache:
        engines = [engine_of(SMALL, cache), engine_of(SMALL, cache, restore="pages")]
        for turn in range(3):
            for number, tokens in enumerate(sessions):
                result = engines[(turn + number) % 2].generate(tokens, 3)
                cache.flush()
                check_alone(result, tokens)
                more = prompt_tokens(9 + 7 * number, seed=100 + 10 * number + turn)
                sessions[number] = joined(tokens, result.new_tokens, more)


def check_replayed(result: Result, tokens: Tokens, path: Path) -> None:
    """Compare a turn after a replay with the same turn on a cache that has its hit and nothing else."""
    with cache_at(path) as cache:
        hit = result.hit_tokens
        found = {
            name: entries[:, : hit // SMALL.layout().group(name).tokens_per_entry]
            for name, entries in result.entries.items()
        }
        cache.store(tokens[:hit], found)
        cache.flush()
        again = engine_of(SMALL, cache).generate(tokens, len(result.new_tokens))
    assert (again.hit_tokens, again.window_source) == (hit, "replay")
    assert again.new_tokens == result.new_tokens
    assert difference(again, result) < LOGITS_EQUAL
    assert entries_equal(again, result)


def test_eviction_shortens_hits_and_changes_no_result(tmp_path: Path) -> None:
    """Room for a few blocks and for the windows of one session: all is evicted sooner or later."""
    sessions = [prompt_tokens(60 + 20 * number, seed=number) for number in range(4)]
    is_exact = [True] * len(sessions)
    hits: dict[str, list[bool]] = {"none": [], "pool": [], "replay": []}
    with kvstore.PrefixCache.open(
        tmp_path / "shared",
        layout=SMALL.layout(),
        namespace=kvstore.Namespace(model="reference"),
        block_tokens=BLOCK,
        ssd_bytes=320_000,
        device_bytes=0,
        window_bytes=4 * SMALL.layout().window_bytes,
        window_rows=ROWS,
    ) as cache:
        engine = engine_of(SMALL, cache)
        for turn, number in enumerate((0, 1, 1, 2, 3, 3) * 4):
            tokens = sessions[number]
            result = engine.generate(tokens, 2)
            cache.flush()
            # What the turn before left, if nothing of it is gone.
            kept = (len(tokens) - 41) // BLOCK * BLOCK
            hits[result.window_source].append(result.hit_tokens >= kept)
            if result.window_source == "replay":
                check_replayed(result, tokens, tmp_path / str(turn))
            # A prefix that a replay has continued is no longer that of a cold run.
            is_exact[number] &= result.window_source != "replay"
            if is_exact[number] or result.window_source == "none":
                check_alone(result, tokens)
            more = prompt_tokens(40, seed=100 + turn)
            sessions[number] = joined(tokens, result.new_tokens, more)
        evicted = cache.stats()["counters"]["evicted_blocks"]

    assert all(hits.values())
    assert not all(found for each in hits.values() for found in each)
    assert evicted["ssd"] > 0


@pytest.mark.parametrize("window", [True, False], ids=["pool", "replay"])
def test_prefill_may_be_cut_anywhere_inside_the_replay(window: bool, tmp_path: Path) -> None:
    """A chunk that ends before the hit stores nothing, and the next one continues at its end."""
    tokens = prompt_tokens(100, seed=7)
    entries = engine_of(SMALL).prefill(tokens).entries
    results = []
    for number, cuts in enumerate([(), range(49, 64), (50, 63, 65), (64,), range(48, 100, 3)]):
        with cache_at(tmp_path / str(number)) as cache:
            engine = engine_of(SMALL, cache)
            if window:
                engine.prefill(tokens[:65])
            else:
                cache.store(tokens, entries)
            cache.flush()
            limit = 64 if window else 96
            result = engine.prefill(tokens[: limit + 4], chunks=cuts)
            cache.flush()
            assert result.hit_tokens == limit
            results.append(result)

    for result in results[1:]:
        assert difference(result, results[0]) < LOGITS_EQUAL
        assert entries_equal(result, results[0])


@pytest.mark.parametrize(("window", "block"), [(W, BLOCK), (128, 128)])
def test_a_prompt_of_every_length_hits_at_its_last_boundary(
    window: int, block: int, tmp_path: Path
) -> None:
    """Every remainder of a block and of a group: one session that grows by a token at a time."""
    config = dataclasses.replace(SMALL, sliding_window=window)
    first, last = (1, 3 * block + 2) if block == BLOCK else (block - 1, 2 * block + 2)
    tokens = prompt_tokens(last, seed=8)
    whole = engine_of(config).prefill(tokens)
    with open_cache(tmp_path, config, window_rows=2 * window - 2, block_tokens=block) as cache:
        engine = engine_of(config, cache)
        for length in range(first, last + 1):
            result = engine.prefill(tokens[:length])
            cache.flush()
            # The boundary is stored by the first prompt that reaches it, and hit by the next.
            assert result.hit_tokens == (length - 1) // block * block
            assert result.window_source == ("pool" if result.hit_tokens else "none")
            assert entries_equal(result, whole, stop=length)
            if length == len(tokens):
                assert difference(result, whole) < LOGITS_EQUAL
