"""Benchmark of drift: its turns equal those of an engine with a store, and its counts are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from bench.replay import drift as replay_drift
from bench.replay.drift import (
    Conversation,
    answered,
    chains_of,
    conversations,
    converse,
    drift_figures,
    near_figures,
    slopes,
    ways_of,
)
from bench.replay.quality import Bench, Way, interval
from bench.replay.train import Schedule, Trainee
from kvstore.reference.engine import ReferenceEngine
from tests.reference.support import LOGITS_EQUAL

FIRST_HIT, TURNS = 96, 3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return the bench of an untrained model, in binary64."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    schedule = Schedule(depth="shallow", steps=1, batch=1, tokens=8, rate=1e-3, seed=3)
    Trainee(schedule).save_model(folder / "model.npz", schedule, 0)
    return Bench(folder / "model.npz", folder, torch.float64)


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    rng = np.random.default_rng(5)
    count = FIRST_HIT + TURNS * replay_drift.TURN_TOKENS
    return Conversation(rng.integers(0, 256, count).astype(np.uint32), FIRST_HIT)


@pytest.fixture(scope="module")
def turns(bench: Bench, conversation: Conversation) -> list[Any]:
    with torch.inference_mode():
        return list(answered(bench, conversation))


@pytest.mark.parametrize(("name", "pool_bytes"), [("replay 32", 0), ("pool kept", "8MiB")])
def test_a_chain_is_what_an_engine_with_a_store_does(
    name: str,
    pool_bytes: str | int,
    bench: Bench,
    conversation: Conversation,
    turns: list[Any],
    tmp_path: Path,
) -> None:
    tokens = conversation.tokens
    engine = ReferenceEngine(
        bench.config, weights=bench.weights, dtype=torch.float64, tables=bench.tables
    )
    with kvstore.PrefixCache.open(
        tmp_path,
        layout=engine.layout,
        namespace=engine.namespace,
        block_tokens=2,
        ssd_bytes="64MiB",
        device_bytes="1MiB",
        window_bytes=pool_bytes,
        window_rows=2 * bench.config.sliding_window - 2,
    ) as cache:
        engine.cache = cache
        engine.prefill(tokens[:FIRST_HIT])
        for turn, _, answers in turns:
            cache.flush()
            asked = engine.prefill(tokens[: turn.prompt])
            assert (asked.hit_tokens, asked.window_source) == (turn.hit, name.split(maxsplit=1)[0])
            gap = float((answers[name].logits[0] - asked.logits).abs().max())
            assert gap < LOGITS_EQUAL
            # The whole turn, as its answer would be: the store has its entries, and the next turn's hit.
            stored = engine.prefill(tokens[: len(turn.tokens)]).entries
            own = answers[name].state.entries.export(0, len(turn.tokens))
            assert all(np.array_equal(stored[group], own[group]) for group in own)


def test_controls_are_exact_and_replays_drift(bench: Bench, turns: list[Any]) -> None:
    chains = chains_of(bench.config)
    assert [way.name for way in chains if way.is_exact] == ["pool kept", "halo replay"]
    for number, (turn, cold, answers) in enumerate(turns):
        assert turn.scored == replay_drift.TURN_TOKENS - replay_drift.SUFFIX
        for way in chains:
            gap = float((answers[way.name].logits - answers["cold"].logits).abs().max())
            assert (gap < LOGITS_EQUAL) == way.is_exact, (number, way.name)
            is_same = replay_drift.changed(answers[way.name].state, cold, turn) == 0
            assert is_same or not way.is_exact
            if not way.is_exact:
                once = answers[way.name + replay_drift.ONCE].logits
                moved = float((answers[way.name].logits - once).abs().max())
                # The first turn is over the cold run's entries, as once is.
                assert (moved < LOGITS_EQUAL) == (number == 0), (number, way.name)


def test_a_turn_has_a_number_for_each_measure_of_each_way(
    bench: Bench, conversation: Conversation
) -> None:
    with torch.inference_mode():
        found = converse(bench, conversation)["ways"]
    assert found.keys() == {way.name for way in ways_of(bench.config)}
    assert all(len(values) == TURNS for one in found.values() for values in one.values())
    assert found["cold"]["kl"] == found["pool kept"]["moved_kl"] == [0.0] * TURNS
    assert found["cold"]["changed"] == found["halo replay"]["changed"] == [0.0] * TURNS
    assert found["replay 32"]["moved_kl"][0] == 0.0 < found["replay 32"]["moved_kl"][2]
    assert found["replay 32"]["kl"][0] == found["replay 32, once"]["kl"][0] > 0


def test_conversations_do_not_overlap_and_hit_at_every_even_place_of_a_window() -> None:
    text = np.arange(60 * 1000, dtype=np.uint32).view(np.uint8)[::4].copy()
    found = conversations(text, 60)
    places = set()
    for number, one in enumerate(found):
        start = number * 1000
        assert np.array_equal(one.tokens, text[start : start + len(one.tokens)])
        assert len(one.tokens) <= 1000
        turns = one.turns
        assert len(turns) == replay_drift.TURNS
        assert [len(turn.tokens) for turn in turns[:-1]] == [turn.hit for turn in turns[1:]]
        assert turns[0].hit == one.first_hit
        assert len(turns[-1].tokens) == len(one.tokens)
        places |= {turn.hit % 32 for turn in turns}
    assert places == set(range(0, 32, 2))
    with pytest.raises(ValueError, match="need"):
        conversations(text, 70)


CHAIN = Way(name="replay 32", encoder=32, decoder=32)
EXACT = Way(name="pool kept", pool=62, decoder=32, is_exact=True)


def made(count: int, slope: float, noise: float) -> list[dict[str, Any]]:
    """Conversations whose excess grows by ``slope`` a turn, and whose loss is 0.5 more than cold."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(count):
        once = rng.uniform(1, 2, 40)
        excess = slope * np.arange(40) + noise * rng.normal(size=40)
        zero = np.zeros(40)

        def one(kl: Any, loss: float, changed: Any) -> dict[str, Any]:
            of = {"kl": kl, "first_kl": 2 * kl, "moved_kl": kl, "changed": changed}
            return {**of, "loss": np.full(40, loss), "first_loss": np.full(40, 3 * loss)}

        rows.append(
            {
                "ways": {
                    "cold": one(zero, 2.0, zero),
                    "replay 32, once": one(once, 2.25, zero),
                    "replay 32": one(once + excess, 2.5, np.arange(40) / 40),
                    "pool kept": one(zero, 2.0, zero),
                }
            }
        )
    return rows


def test_figures_of_drift_are_those_of_the_excess_over_one_replay() -> None:
    rows = made(50, 0.25, 0.0)
    found = drift_figures((CHAIN, EXACT), rows)
    chain = found["replay 32"]
    # The late turns are 30 to 39: their mean is 34.5.
    for name, value in {
        "excess_kl_a_turn": 0.25,
        "late_excess_kl": 0.25 * 34.5,
        "late_excess_loss": 0.25,
        "late_loss_increase": 0.5,
        "first_loss_increase": 1.5,
        "early_changed": 4.5 / 40,
        "late_changed": 34.5 / 40,
    }.items():
        assert chain[name] == pytest.approx({"mean": value, "low": value, "high": value}), name
    assert chain["excess_kl"] == pytest.approx((0.25 * np.arange(40)).tolist())
    once = np.array([row["ways"]["replay 32, once"]["kl"] for row in rows])
    assert chain["kl"] == pytest.approx((once.mean(axis=0) + 0.25 * np.arange(40)).tolist())
    exact = found["pool kept"]
    assert exact["late_kl"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert exact["excess_kl_a_turn"] is exact["late_excess_loss"] is None


def test_intervals_of_drift_draw_conversations_and_not_turns() -> None:
    rows = made(60, 0.25, 3.0)
    found = drift_figures((CHAIN,), rows)["replay 32"]["excess_kl_a_turn"]
    excess = np.array([row["ways"]["replay 32"]["kl"] for row in rows]) - np.array(
        [row["ways"]["replay 32, once"]["kl"] for row in rows]
    )
    by_conversation = np.array([np.polyfit(np.arange(40), one, 1)[0] for one in excess])
    assert slopes(excess) == pytest.approx(by_conversation)
    assert found["mean"] == pytest.approx(by_conversation.mean())
    assert found["low"] < 0.25 < found["high"]
    # Twice 1.96 standard errors over conversations.
    error = by_conversation.std(ddof=1) / np.sqrt(60)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert found == pytest.approx(dataclasses.asdict(interval(by_conversation)))


def test_figures_near_a_hit_have_the_first_token_apart() -> None:
    cold = {"loss": [1.0, 1.0, 1.0], "kl": [0.0] * 3, "agreement": [1.0] * 3}
    way = {"loss": [4.0, 1.0, 1.0], "kl": [0.3, 0.0, 0.0], "agreement": [0.0, 1.0, 1.0]}
    found = near_figures((CHAIN,), [{"ways": {"cold": cold, "replay 32": way}}] * 3)["replay 32"]
    means = {name: one["mean"] for name, one in found.items()}
    assert means == pytest.approx(
        {"loss_increase": 1.0, "kl": 0.1, "first_loss_increase": 3.0, "first_kl": 0.3}
    )
