"""Models with full and sliding layers: exact from the pool, bounded replay without it.

What is compared with is transformers alone: its own cache, cut at the same places.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache

import kvstore
from kvstore.engine.layers import StoredLayer, WindowLayer
from kvstore.engine.transformers import (
    CausalModel,
    TransformersAdapter,
    _cache_argument,
    model_layout,
)
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.layout import Lifetime
from kvstore.tier.ssd.values import Put
from kvstore.tier.window import POISON
from tests.engine import hybrids
from tests.engine.hybrids import BLOCK, KINDS, WINDOW, hybrid_model, open_cache, prompt
from tests.engine.tiny import tiny_model
from tests.stores import tier_of

Logits = NDArray[np.float32]
log = logging.getLogger(__name__)

every_kind = pytest.mark.parametrize("kind", sorted(KINDS))
every_model = pytest.mark.parametrize(
    ("kind", "dtype", "attention"),
    [
        ("gemma3", torch.float32, "sdpa"),
        ("gemma3", torch.float32, "eager"),
        ("gemma3", torch.bfloat16, "sdpa"),
        ("gpt_oss", torch.float32, "eager"),  # transformers has no sdpa with its sinks
        ("gpt_oss", torch.bfloat16, "eager"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than such small models compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SUFFIXES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]


def cold(model: Any, tokens: list[int], cuts: set[int] | None = None) -> Logits:
    """The last token's logits by transformers alone, cut at ``cuts`` and where every prefill is."""
    last = (len(tokens) - 1) // BLOCK * BLOCK
    ends = sorted({0, last, len(tokens)} | (cuts or set()))
    past, causal = DynamicCache(config=model.config), CausalModel(model)
    return [causal.forward(tokens[a:b], past) for a, b in itertools.pairwise(ends)][-1]


def difference(found: Logits, expected: Logits) -> float:
    return float(np.abs(found - expected).max())


def filled(model: Any, tokens: list[int]) -> Cache:
    past = DynamicCache(config=model.config)
    CausalModel(model).forward(tokens, past)
    return past


def sliding(model: Any) -> list[int]:
    return [i for i, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]


def full(model: Any) -> list[int]:
    return [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]


# ---- entries and snapshots ---------------------------------------------------------------------


@every_kind
def test_full_layers_are_global_and_sliding_ones_windows(kind: str) -> None:
    model = hybrid_model(kind, torch.bfloat16)
    layout = model_layout(model, dtype={"k": "mxfp8", "v": "bf16"})
    facts = {g.name: (list(g.layers), g.entry_format, g.lifetime) for g in layout.groups}
    assert facts == {
        "k": (full(model), "mxfp8", Lifetime.GLOBAL),
        "v": (full(model), "bf16", Lifetime.GLOBAL),
        "k_window": (sliding(model), "bf16", Lifetime.WINDOW),
        "v_window": (sliding(model), "bf16", Lifetime.WINDOW),
    }
    assert layout.window_tokens == WINDOW


@every_model
@pytest.mark.parametrize("length", [5, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_a_restored_cache_is_the_computed_one_bit_for_bit(
    kind: str, dtype: torch.dtype, attention: str, length: int, tmp_path: Path
) -> None:
    model = hybrid_model(kind, dtype, attention=attention)
    past = filled(model, prompt(length))
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        snapshot = adapter.snapshot(past)
        restored = adapter.restore(adapter.capture(past), snapshot)
    held = min(length, WINDOW - 1)
    assert (snapshot.start, snapshot.stop, snapshot.source) == (length - held, length, "engine")
    assert len(restored.layers) == len(past.layers)
    for number, (found, expected) in enumerate(zip(restored.layers, past.layers, strict=True)):
        assert found.get_seq_length() == expected.get_seq_length() == length
        assert found.get_mask_sizes(3) == expected.get_mask_sizes(3)
        assert found.is_sliding == expected.is_sliding == (number in sliding(model))
        for mine, theirs in ((found.keys, expected.keys), (found.values, expected.values)):
            assert mine.dtype == theirs.dtype == dtype
            assert torch.equal(mine, theirs)


# ---- the window is in the pool -----------------------------------------------------------------


@every_model
@pytest.mark.parametrize("hit", [BLOCK, 5 * BLOCK])
def test_from_the_pool_every_suffix_is_exact(
    kind: str, dtype: torch.dtype, attention: str, hit: int, tmp_path: Path
) -> None:
    """Prompts shorter and longer than the window, suffixes over block boundaries: 0 different."""
    model = hybrid_model(kind, dtype, attention=attention)
    first = prompt(hit + 1)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(first, 1)
        cache.flush()
        for suffix in SUFFIXES:
            tokens = first[:hit] + prompt(suffix, seed=suffix)
            warm = adapter.prefill(tokens)
            assert (warm.hit_tokens, warm.replay_tokens) == (hit, 0)
            assert warm.window_source == "pool"
            np.testing.assert_array_equal(warm.logits, cold(model, tokens, {hit}))


@every_model
@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 4 * BLOCK - 1])
def test_an_exact_repeat_and_its_continuation_are_exact(
    kind: str, dtype: torch.dtype, attention: str, length: int, tmp_path: Path
) -> None:
    model = hybrid_model(kind, dtype, attention=attention)
    tokens = prompt(length)
    stages: list[str] = []
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache, on_stage=stages.append)
        first = adapter.generate(tokens, 5)
        cache.flush()
        stages.clear()
        again = adapter.generate(tokens, 5)
    assert (first.hit_tokens, first.window_source) == (0, "none")
    assert again.hit_tokens == (length - 1) // BLOCK * BLOCK
    assert again.window_source == "pool"
    assert first.new_tokens == again.new_tokens
    np.testing.assert_array_equal(again.logits, first.logits)
    np.testing.assert_array_equal(first.logits[0], cold(model, tokens))
    assert stages == ["lookup", "read", "restore", "forward"]


@every_kind
@pytest.mark.parametrize("count", [1, 17, 20])
def test_what_was_generated_can_be_gone_on_from(kind: str, count: int, tmp_path: Path) -> None:
    """Windows are kept at the last boundary of the output, and a block earlier at an even end."""
    model = hybrid_model(kind)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        tokens = prompt(2 * BLOCK)
        made = adapter.generate(tokens, count)
        cache.flush()
        run = tokens + list(made.new_tokens[:-1])
        longer = adapter.prefill(run + prompt(9, seed=1))
        repeat = adapter.prefill(run)
    boundary = len(run) // BLOCK * BLOCK
    assert (longer.hit_tokens, longer.window_source) == (boundary, "pool")
    assert repeat.hit_tokens == (len(run) - 1) // BLOCK * BLOCK
    assert repeat.window_source == "pool"


@every_kind
def test_a_turn_after_a_turn_is_exact(kind: str, tmp_path: Path) -> None:
    """A warm prefill continues from the entries and windows of another warm prefill."""
    model = hybrid_model(kind)
    tokens, cuts, before = prompt(40), set[int](), 0
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        for turn in range(5):
            made = adapter.generate(tokens, 1)
            cache.flush()
            assert made.hit_tokens == before // BLOCK * BLOCK
            assert made.window_source == ("pool" if turn else "none")
            cuts |= {made.hit_tokens, (len(tokens) - 1) // BLOCK * BLOCK}
            np.testing.assert_array_equal(made.logits[0], cold(model, tokens, cuts))
            before = len(tokens)
            tokens = tokens + prompt(27, seed=turn + 1)


# ---- the window is gone ------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("hit", [BLOCK, 6 * BLOCK])
def test_without_its_window_a_hit_stays_whole_and_replays_exactly_the_window(
    kind: str, dtype: torch.dtype, attention: str, hit: int, tmp_path: Path
) -> None:
    model = hybrid_model(kind, dtype, attention=attention)
    with open_cache(tmp_path, model_layout(model), window_bytes=0) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(prompt(hit + 1), 1)
        cache.flush()
        worst = 0.0
        for suffix in SUFFIXES:
            tokens = prompt(hit) + prompt(suffix, seed=suffix)
            warm = adapter.prefill(tokens)
            assert warm.hit_tokens == hit
            assert warm.replay_tokens == min(WINDOW, hit)
            assert warm.window_source == "replay"
            expected = cold(model, tokens, {hit})
            worst = max(worst, difference(warm.logits, expected))
            if hit <= WINDOW:
                np.testing.assert_array_equal(warm.logits, expected)
    log.info("%s %s H=%d: replay moves a logit by at most %.3g", kind, dtype, hit, worst)
    assert (worst > 0) == (hit > WINDOW)


@every_kind
def test_a_replay_leaves_stored_entries_as_they_are(kind: str, tmp_path: Path) -> None:
    """Also those of replayed tokens, which a run of the same tokens would have made otherwise."""
    model = hybrid_model(kind)
    tokens = prompt(6 * BLOCK + 5)
    hit = 6 * BLOCK
    with open_cache(tmp_path, model_layout(model), window_bytes=0) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(tokens, 1)
        cache.flush()
        with cache.lookup(tokens) as match:
            before = dict(cache.read(match))
        warm = adapter.prefill(tokens)
        after = adapter.capture(warm.past, 0, hit)
        adapter.keep(tokens, warm.past, 0, warm.windows)
        cache.flush()
        with cache.lookup(tokens) as match:
            stored = dict(cache.read(match))
        # The control: what the replayed tokens would have made.
        past = adapter.restore(before)
        for number, start in enumerate(full(model)):
            assert past.layers[start].keys.shape[-2] == hit, number
        loose = adapter._empty(hit - WINDOW)
        for layer in full(model):
            kept = past.layers[layer]
            loose.update(kept.keys[:, :, : hit - WINDOW], kept.values[:, :, : hit - WINDOW], layer)
        CausalModel(model).forward(tokens[hit - WINDOW : hit], loose)
        other = adapter.capture(loose, 0, hit)
    assert warm.replay_tokens == WINDOW
    for name in ("k", "v"):
        np.testing.assert_array_equal(after[name], before[name])
        np.testing.assert_array_equal(stored[name], before[name])
        assert not np.array_equal(other[name], before[name])


class Oracle(Cache):  # type: ignore[misc]
    """Bounded replay from its definition: garbage where no row is, and masks written out."""

    def __init__(self, stored: dict[int, Any], start: int, garbage: float) -> None:
        super().__init__(layers=[])
        self.stored, self.start, self.garbage = stored, start, garbage
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx in self.stored:
            return self.stored[layer_idx]
        self.rows[layer_idx] = (key_states, value_states)
        heads, head_dim = key_states.shape[1], key_states.shape[3]
        missing = key_states.new_full((1, heads, self.start, head_dim), self.garbage)
        return tuple(torch.cat([missing, new], dim=2) for new in (key_states, value_states))


def oracle_rows(
    model: Any, past: Cache, tokens: list[int], start: int, garbage: float = 1e3
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    stop = len(tokens)
    stored = {i: (past.layers[i].keys, past.layers[i].values) for i in full(model)}
    cache = Oracle(stored, start, garbage)
    masks = {}
    for name in ("full_attention", "sliding_attention"):
        allowed = torch.zeros(1, 1, stop - start, stop, dtype=torch.bool)
        for p in range(start, stop):
            floor = 0 if name == "full_attention" else max(start, p - WINDOW + 1)
            allowed[0, 0, p - start, floor : p + 1] = True
        zeros = torch.zeros(allowed.shape, dtype=model.dtype)
        masks[name] = zeros.masked_fill(~allowed, torch.finfo(model.dtype).min)
    argument = _cache_argument(inspect.signature(model.forward).parameters)
    with torch.no_grad():
        model(
            input_ids=torch.tensor([tokens[start:]]),
            position_ids=torch.arange(start, stop)[None],
            attention_mask=masks,
            use_cache=True,
            **{argument: cache},
        )
    return cache.rows


def rebuilt(
    model: Any, path: Path, length: int, start: int
) -> tuple[Cache, Cache, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """The computed KV cache of a prompt, the one replayed from ``start``, and the oracle's rows."""
    tokens = prompt(length)
    formats = dict.fromkeys(("k", "v", "k_window", "v_window"), "f32")
    with open_cache(path, model_layout(model, dtype=formats)) as cache:
        past = filled(model, tokens)
        made = TransformersAdapter(model, cache).rebuild(past, tokens, start)
    return past, made, oracle_rows(model, past, tokens, start)


@pytest.mark.parametrize(("length", "start"), [(80, 56), (80, 40), (80, 79), (20, 0), (37, 0)])
@pytest.mark.parametrize(
    ("kind", "attention", "dtype"),
    [
        ("gemma3", "sdpa", torch.float32),
        ("gemma3", "sdpa", torch.float64),
        ("gemma3", "eager", torch.float32),
        ("gpt_oss", "eager", torch.float32),
        ("gpt_oss", "eager", torch.float64),
    ],
    ids=str,
)
def test_a_replay_reads_what_its_definition_says(
    kind: str, attention: str, length: int, start: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = hybrid_model(kind, dtype, attention=attention)
    _, made, rows = rebuilt(model, tmp_path, length, start)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-9
    for layer in sliding(model):
        found = made.layers[layer]
        held = min(length - start, WINDOW - 1)
        assert found.keys.shape[-2] == held
        assert found.get_seq_length() == length
        for mine, oracle in zip((found.keys, found.values), rows[layer], strict=True):
            torch.testing.assert_close(mine, oracle[:, :, -held:], atol=tolerance, rtol=tolerance)


@every_kind
def test_rows_below_the_read_floor_change_nothing(kind: str) -> None:
    """In the oracle, which has such rows; the replay has none to read."""
    model = hybrid_model(kind)
    tokens = prompt(80)
    past = filled(model, tokens)
    one = oracle_rows(model, past, tokens, 56, garbage=1e3)
    other = oracle_rows(model, past, tokens, 56, garbage=-7.0)
    for layer in sliding(model):
        assert all(map(torch.equal, one[layer], other[layer]))


@every_kind
def test_a_replay_as_long_as_all_windows_together_is_exact(kind: str, tmp_path: Path) -> None:
    """The receptive field of the topmost row: with so many tokens nothing is truncated."""
    model = hybrid_model(kind, torch.float64)
    depth = len(sliding(model))
    length = depth * (WINDOW - 1) + 40
    for tokens_again, is_exact in ((depth * (WINDOW - 1), True), (WINDOW, False)):
        store = tmp_path / str(tokens_again)
        past, made, _ = rebuilt(model, store, length, length - tokens_again)
        gaps = [
            float((made.layers[i].keys - past.layers[i].keys).abs().max()) for i in sliding(model)
        ]
        assert gaps[0] < 1e-5, "the lowest layer's rows depend on no window"
        assert (max(gaps) < 1e-5) == is_exact, gaps


@pytest.mark.parametrize(
    "wrong",
    [
        # Queries read what comes after them, as if they stood at the end.
        (StoredLayer, "get_mask_sizes", lambda self, n: (self.position + n, -n)),
        # Replayed tokens read one stored row less than there is.
        (StoredLayer, "get_mask_sizes", lambda self, n: (self.position + n, 1)),
        # Rows of the window are taken for younger ones.
        (WindowLayer, "get_mask_sizes", lambda self, n: (n, self.cumulative_length + 1)),
        # They are taken for older ones, which the window has left behind.
        (WindowLayer, "get_mask_sizes", lambda self, n: (n, self.cumulative_length - 5)),
    ],
    ids=["future", "full-shift", "younger", "older"],
)
@every_kind
def test_a_wrong_mask_shows(
    kind: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the comparison with the definition."""
    monkeypatch.setattr(*wrong)
    model = hybrid_model(kind, attention="eager")
    _, made, rows = rebuilt(model, tmp_path, 80, 56)
    gaps = [
        float((made.layers[i].keys - rows[i][0][:, :, -(WINDOW - 1) :]).abs().max())
        for i in sliding(model)
    ]
    assert max(gaps) > 1e-2


@every_kind
def test_what_transformers_own_layer_says_of_missing_rows_is_wrong(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why there is a layer of our own: theirs announces W - 1 rows, held or not."""
    monkeypatch.delattr(WindowLayer, "get_mask_sizes")
    with pytest.raises(RuntimeError, match="size"):
        rebuilt(hybrid_model(kind, attention="eager"), tmp_path, 80, 56)


def test_a_replay_beyond_what_is_stored_is_refused() -> None:
    model = hybrid_model("gpt_oss")
    past = filled(model, prompt(20))
    layer = StoredLayer(past.layers[1], 18)
    states = past.layers[1].keys[:, :, :3]
    with pytest.raises(
        ValueError, match="needs a stored row for each token, found token 20 of 20 rows"
    ):
        layer.update(states, states)


@every_kind
def test_poisoned_rows_outside_the_window_change_nothing(kind: str, tmp_path: Path) -> None:
    """A pooled snapshot may have more rows than the next token reads."""
    model = hybrid_model(kind)
    hit = 4 * BLOCK
    tokens = prompt(hit) + prompt(20, seed=1)
    with open_cache(tmp_path, model_layout(model), window_rows=2 * WINDOW) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(tokens[: hit + 1], 1)
        cache.flush()
        exact = adapter.prefill(tokens)
        with cache.lookup(tokens) as match:
            snapshot = cache.window(match)
        more = 11
        rows = {
            name: np.concatenate([np.full_like(array[:, :more], POISON), array], axis=1)
            for name, array in snapshot.rows.items()
        }
        assert cache.put_window(
            tokens, kvstore.WindowSnapshot(snapshot.start - more, hit, rows, "engine")
        )
        poisoned = adapter.prefill(tokens)
        # The control: one row further on, the poison is read.
        rows = {name: array.copy() for name, array in snapshot.rows.items()}
        for array in rows.values():
            array[:, 0] = POISON
        cache.put_window(tokens, replace(snapshot, rows=rows))
        control = adapter.prefill(tokens)
    assert exact.window_source == poisoned.window_source == control.window_source == "pool"
    np.testing.assert_array_equal(poisoned.logits, exact.logits)
    assert np.isnan(control.logits).all()


@every_kind
def test_a_replayed_window_is_pooled_and_replaces_none(kind: str, tmp_path: Path) -> None:
    model = hybrid_model(kind)
    tokens = prompt(5 * BLOCK + 3)
    with open_cache(tmp_path, model_layout(model)) as cache:
        TransformersAdapter(model, cache).generate(tokens, 1)
    with open_cache(tmp_path, model_layout(model)) as cache:  # the pool was host memory
        adapter = TransformersAdapter(model, cache)
        sources = [(w.stop, w.source) for w in adapter.prefill(tokens + [1] * BLOCK).windows]
        second = adapter.generate(tokens, 1)
        third = adapter.generate(tokens, 1)
        again = adapter.prefill(tokens)
        pooled = cache.stats()["window"]
        with cache.lookup(tokens) as match:
            window = cache.window(match)
        put = cache.put_window(tokens, replace(window, source="replay"))
    assert (second.window_source, second.replay_tokens) == ("replay", WINDOW)
    assert (third.window_source, third.replay_tokens) == ("pool", 0)
    # Rows that were replayed once are as good as pooled ones: the same run, bit for bit.
    np.testing.assert_array_equal(third.logits, second.logits)
    # A window after the hit is an engine's own, though its rows descend from replayed ones.
    assert sources == [(5 * BLOCK, "replay"), (6 * BLOCK, "engine")]
    assert again.windows == ()
    assert pooled["snapshots"] == 1
    assert window.stop - window.start == WINDOW - 1
    assert put is False


@every_kind
def test_a_damaged_block_shortens_the_hit_and_its_replay(kind: str, tmp_path: Path) -> None:
    model = hybrid_model(kind)
    tokens = prompt(5 * BLOCK + 3)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(tokens, 1)
        cache.flush()
        key, ssd = cache.probe(tokens).prefix.key(3), tier_of(cache)
        record, frame = ssd.record(key), ssd.frame(key)
        assert record is not None
        assert frame is not None
        damaged = bytearray(frame)
        damaged[len(frame) // 2] ^= 1
        ssd.put([Put(key, replace(record, page=0), damaged)])
        warm = adapter.prefill(tokens)
    assert (warm.hit_tokens, warm.replay_tokens) == (3 * BLOCK, WINDOW)
    assert warm.window_source == "replay"


# ---- formats, names, refusals ------------------------------------------------------------------


@every_kind
def test_float64_entries_round_once_and_a_replay_differs_by_more(kind: str, tmp_path: Path) -> None:
    """There is no 64-bit entry format. The difference that replay makes is no rounding."""
    model = hybrid_model(kind, torch.float64)
    hit = 5 * BLOCK
    tokens = prompt(hit + 9)
    formats = dict.fromkeys(("k", "v", "k_window", "v_window"), "f32")
    gaps = {}
    for window_bytes in ("64MiB", 0):
        store = tmp_path / str(window_bytes)
        options: dict[str, Any] = {"window_bytes": window_bytes}
        with open_cache(store, model_layout(model, dtype=formats), **options) as cache:
            adapter = TransformersAdapter(model, cache)
            adapter.generate(tokens, 1)
            cache.flush()
            warm = adapter.prefill(tokens)
        gaps[warm.window_source] = difference(warm.logits, cold(model, tokens))
    log.info("%s float64, f32 entries: pool %.3g, replay %.3g", kind, *gaps.values())
    assert gaps["pool"] < 1e-4 < 1e-2 < gaps["replay"]


@every_kind
def test_global_entries_may_be_packed_and_windows_stay_exact(kind: str, tmp_path: Path) -> None:
    model = hybrid_model(kind)
    tokens = prompt(2 * BLOCK + 5)
    layout = model_layout(model, dtype={"k": "nvfp4", "v": "bf16", "v_window": "bf16"})
    with open_cache(tmp_path, layout) as cache:
        adapter = TransformersAdapter(model, cache)
        past = filled(model, tokens)
        restored = adapter.restore(adapter.capture(past), adapter.snapshot(past))
    for layer in full(model):
        found, made = restored.layers[layer], past.layers[layer]
        assert torch.equal(found.values, made.values.to(torch.bfloat16).float())
        assert not torch.equal(found.keys, made.keys)
    for layer in sliding(model):
        found, made = restored.layers[layer], past.layers[layer]
        assert torch.equal(found.keys, made.keys)
        assert torch.equal(found.values, made.values.to(torch.bfloat16).float())


def renamed(kind: str, name: str) -> Any:
    """The model's class with a forward that calls its cache ``name``."""
    base = KINDS[kind][0]
    own = _cache_argument(inspect.signature(base.forward).parameters)

    if name == "cache":

        def forward(self: Any, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
            return base.forward(self, input_ids=input_ids, **{own: cache}, **others)

        return type("Renamed", (base,), {"forward": forward})

    def older(self: Any, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        return base.forward(self, input_ids=input_ids, **{own: past_key_values}, **others)

    return type("Renamed", (base,), {"forward": older})


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@every_kind
def test_either_name_of_the_cache_argument_works(kind: str, name: str, tmp_path: Path) -> None:
    model = hybrid_model(kind, model_class=renamed(kind, name))
    tokens = prompt(5 * BLOCK + 1)
    results = {}
    for window_bytes in ("64MiB", 0):
        store, options = tmp_path / str(window_bytes), {"window_bytes": window_bytes}
        with open_cache(store, model_layout(model), **options) as cache:
            adapter = TransformersAdapter(model, cache)
            first = adapter.generate(tokens, 2)
            cache.flush()
            warm = adapter.generate(tokens, 2)
        results[warm.window_source] = (first.logits, warm.logits)
    np.testing.assert_array_equal(*results["pool"])
    assert not np.array_equal(*results["replay"])


def test_a_model_whose_cache_was_opened_for_another_is_refused(tmp_path: Path) -> None:
    gemma, gpt_oss = hybrid_model("gemma3"), hybrid_model("gpt_oss")
    wider = hybrid_model("gpt_oss", sliding_window=32)
    turned = hybrid_model("gpt_oss", layer_types=["full_attention", "sliding_attention"] * 2)
    with open_cache(tmp_path, model_layout(gpt_oss)) as cache:
        for other in (gemma, wider, turned, tiny_model()):
            with pytest.raises(LayoutMismatch, match=r"v_window \(2 layers of 32\), window 24"):
                TransformersAdapter(other, cache)
    with (
        open_cache(tmp_path / "dense", model_layout(tiny_model())) as cache,
        pytest.raises(LayoutMismatch, match="window 24; open it with"),
    ):
        TransformersAdapter(gpt_oss, cache)


def test_a_window_of_one_token_is_refused(tmp_path: Path) -> None:
    model = hybrid_model("gpt_oss", sliding_window=1)
    with (
        open_cache(tmp_path, model_layout(model)) as cache,
        pytest.raises(ConfigError, match="a sliding window of 1, expected at least 2"),
    ):
        TransformersAdapter(model, cache)


def test_a_window_of_two_tokens_works(tmp_path: Path) -> None:
    """The smallest that holds a row."""
    model = hybrid_model("gpt_oss", sliding_window=2)
    tokens = prompt(40)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        first = adapter.generate(tokens, 3)
        cache.flush()
        again = adapter.generate(tokens, 3)
    assert again.window_source == "pool"
    np.testing.assert_array_equal(again.logits, first.logits)


# ---- processes ---------------------------------------------------------------------------------


def test_another_process_goes_on_from_a_long_prefix(tmp_path: Path) -> None:
    """Its pool is empty, so it replays: exactly where the hit lies within the window."""
    lengths = [BLOCK + 5, 40 * BLOCK + 5]
    arguments = [str(tmp_path), str(tmp_path / "first"), *map(str, lengths)]
    hybrids.main(*arguments)
    arguments[1] = str(tmp_path / "second")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.hybrids", *arguments],
        cwd=Path(__file__).parents[2],
        # As many threads as here: another number may round otherwise.
        env={"OMP_NUM_THREADS": str(torch.get_num_threads()), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = []
    for name in ("first", "second"):
        facts = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        with np.load(tmp_path / f"{name}.npz") as logits:
            runs.append((facts, dict(logits)))
    (before, cold_logits), (after, warm_logits) = runs
    for kind, length in itertools.product(KINDS, lengths):
        name, hit = f"{kind}-{length}", length // BLOCK * BLOCK
        first, second = before[name], after[name]
        assert (first["hit_tokens"], first["window_source"]) == (0, "none")
        assert (second["hit_tokens"], second["window_source"]) == (hit, "replay")
        assert second["replay_tokens"] == min(WINDOW, hit)
        assert len(second["new_tokens"]) == 8
        gap = difference(warm_logits[name][0], cold_logits[name][0])
        log.info("%s H=%d in another process: a logit moves by %.3g", kind, hit, gap)
        if hit <= WINDOW:
            np.testing.assert_array_equal(warm_logits[name], cold_logits[name])
            assert second["new_tokens"] == first["new_tokens"]
        else:
            assert gap > 0
