"""Benchmark of replay: its runs equal an engine's, and its counts are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.replay import prefill_cost
from bench.replay import quality as replay_quality
from bench.replay.quality import Bench, Context, contexts, interval, measured, score, summarise
from bench.replay.train import Schedule, Trainee
from kvstore.reference.engine import ReferenceEngine
from tests.reference.support import LOGITS_EQUAL, open_cache

HIT = 96
SUFFIX = 2
"""A prompt that ends two tokens after its hit has it as its last block boundary, with blocks of two."""


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(replay_quality, "REPLAYED", (0, 16, 32, 256))
    monkeypatch.setattr(replay_quality, "SCORED_TOKENS", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an untrained model; its tables go there as well."""
    folder = tmp_path_factory.mktemp("model")
    schedule = Schedule(depth="shallow", steps=1, batch=1, tokens=8, rate=1e-3, seed=3)
    Trainee(schedule).save_model(folder / "model.npz", schedule, 0)
    return folder


@pytest.fixture
def context() -> Context:
    rng = np.random.default_rng(5)
    return Context(rng.integers(0, 256, HIT + SUFFIX + 4).astype(np.uint32), HIT, SUFFIX)


@pytest.mark.parametrize(
    ("name", "pooled_rows"),
    [("cold", None), ("encoder replay 32", 0), ("pool, W rows", 32), ("pool, 2W-2 rows", 62)],
)
def test_a_way_is_what_the_engine_does(
    name: str, pooled_rows: int | None, folder: Path, context: Context, tmp_path: Path
) -> None:
    bench = Bench(folder / "model.npz", folder, torch.float64)
    prompt = context.tokens[: context.prompt]
    with open_cache(tmp_path, bench.config, window_rows=62, block_tokens=2) as cache:
        engine = ReferenceEngine(
            bench.config,
            weights=bench.weights,
            dtype=torch.float64,
            tables=folder,
            window_rows=pooled_rows or None,
        )
        if pooled_rows is not None:
            # The entries of a cold run that went on, and its window if rows of it are to be pooled.
            engine.cache = cache if pooled_rows else None
            cold = engine.prefill(prompt[: HIT + 1])
            layout = bench.config.layout()
            cache.store(
                prompt[:HIT],
                {
                    name: stored[:, : HIT // layout.group(name).tokens_per_entry]
                    for name, stored in cold.entries.items()
                },
            )
            cache.flush()
            engine.cache = cache
        result = engine.prefill(prompt)
    with torch.inference_mode():
        logits = bench.logits(context, bench.ways)

    sources = {None: "none", 0: "replay"}
    assert result.window_source == sources.get(pooled_rows, "pool")
    assert result.hit_tokens == (0 if pooled_rows is None else HIT)
    assert float((logits[name][0] - result.logits).abs().max()) < LOGITS_EQUAL


def test_ways_that_are_exact_are_and_the_others_are_not(folder: Path, context: Context) -> None:
    bench = Bench(folder / "model.npz", folder, torch.float64)
    with torch.inference_mode():
        logits = bench.logits(context, bench.ways)

    equal = {
        way.name
        for way in bench.ways
        if float((logits[way.name] - logits[way.beside]).abs().max()) < LOGITS_EQUAL
    }
    exact = {way.name for way in bench.ways if way.is_exact}
    assert exact == {"pool, 2W-2 rows", "encoder replay 256", "halo replay"}
    assert equal == exact | {"all rows", "decoder replay 256"}
    assert replay_quality.exact_differences(bench, [context]).keys() == exact
    served = logits["as served: both replay W"]
    assert float((served - logits["encoder replay 32"]).abs().max()) < LOGITS_EQUAL


def test_contexts_do_not_overlap_and_hit_at_every_kind_of_place() -> None:
    text = np.arange(40 * 800, dtype=np.uint32).view(np.uint8)[::4].copy()
    found = contexts(text, 40)

    starts = [number * (len(text) // 40) for number in range(40)]
    for context, start, following in zip(found, starts, [*starts[1:], len(text)], strict=True):
        assert np.array_equal(context.tokens, text[start : start + len(context.tokens)])
        assert start + len(context.tokens) <= following
        assert len(context.tokens) == context.prompt + replay_quality.SCORED_TOKENS
        assert context.hit % 2 == 0
    assert {context.prompt % 2 for context in found} == {0, 1}
    assert len({context.hit % 128 for context in found}) > 20
    with pytest.raises(ValueError, match="need"):
        contexts(text, 400)


def test_measures_are_bits_of_the_scored_tokens() -> None:
    """A fair coin beside one that says three quarters, which is right three times of four."""
    fair, biased = torch.zeros(4, 2), torch.log(torch.tensor([[3.0, 1.0]] * 4))
    ways = [
        replay_quality.Way(name="fair", beside="fair", decoder=None),
        replay_quality.Way(name="biased", beside="fair", decoder=0),
    ]
    context = Context(np.array([9, 0, 0, 0, 1], np.uint32), 0, 1)
    scores = score(context, ways, {"fair": fair, "biased": biased})

    assert scores["fair"]["loss"] == [1, 1, 1, 1]
    assert scores["fair"]["kl"] == [0, 0, 0, 0]
    assert scores["biased"]["loss"] == pytest.approx([np.log2(4 / 3)] * 3 + [2], abs=1e-6)
    kl = 0.5 * np.log2(0.5 / 0.75) + 0.5 * np.log2(0.5 / 0.25)
    assert scores["biased"]["kl"] == pytest.approx([kl] * 4, abs=1e-6)
    assert scores["biased"]["agreement"] == [1, 1, 1, 1]

    rows = [{"suffix": suffix, "ways": scores} for suffix in (1, 40)]
    figures = summarise(ways, rows)["biased"]
    assert figures["loss_increase"]["mean"] == pytest.approx(
        0.75 * np.log2(4 / 3) + 0.5 - 1, abs=1e-6
    )
    # Tokens 1 to 4 and 40 to 43 after the hit: no context has one at 5 to 32.
    assert [one is None for one in figures["kl_since_hit"]] == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]


def test_an_interval_holds_the_mean_and_shrinks_with_contexts() -> None:
    values = np.random.default_rng(2).normal(3.0, 1.0, 400)
    many, few = interval(values), interval(values[:25])

    assert many.low < many.mean < many.high
    assert many.mean == pytest.approx(values.mean())
    # Twice 1.96 standard errors.
    assert many.high - many.low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert few.high - few.low > 2 * (many.high - many.low)


def test_contexts_are_not_run_twice(
    folder: Path, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(folder / "model.npz", folder, torch.float32)
    bench.ways = bench.ways[:1]
    stored = tmp_path / "contexts.jsonl"
    (first,) = measured(bench, [context], stored, "one model")
    monkeypatch.setattr(bench, "logits", None)

    assert list(measured(bench, [context], stored, "one model")) == [first]
    with pytest.raises(TypeError):
        list(measured(bench, [context], stored, "another model"))


def test_prefill_that_is_counted_is_that_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_cost, "TURN_TOKENS", 20)
    config = dataclasses.replace(prefill_cost.CONFIGS["full"], sliding_window=16)
    engine = ReferenceEngine(config, dtype=torch.float64, tables=tmp_path)
    tokens = np.random.default_rng(1).integers(0, 256, 100).astype(np.uint32)
    prompt = prefill_cost.Prompt(engine, tokens)
    with torch.inference_mode():
        row = prefill_cost.measure(engine, tokens, rounds=0)
        prefill, whole = prompt.prefill()[0], prompt.all_layers()[0]

    assert float((prefill - engine.prefill(tokens).logits).abs().max()) < LOGITS_EQUAL
    assert float((prefill - whole).abs().max()) > LOGITS_EQUAL
    # The decoder's 84 rows that do not run: each has at least a layer's projections and feed-forward.
    width, layers = config.hidden_size, config.num_hidden_layers - config.last_owner
    least = 84 * layers * 3 * width * config.intermediate_size
    assert row.all_madds - row.prefill_madds > least
    assert row.prefill_madds < row.all_madds * 0.7
    assert row.hit_madds < row.prefill_madds
