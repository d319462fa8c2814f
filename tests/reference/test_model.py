"""The forward pass against the same model written token by token, and cut in every way."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine, Result
from kvstore.reference.state import Chunk, Floors, SequenceState
from kvstore.reference.weights import random_weights
from tests.reference.oracle import Oracle
from tests.reference.support import LOGITS_EQUAL, difference, prompt_tokens

SMALL = ReferenceConfig.tiny(sliding_window=8, index_topk=4)
PROMPT = 45


def packed(result: Result, group: str, row: int) -> list[bytes]:
    return [entry.tobytes() for entry in result.entries[group][row]]


@functools.cache
def cold_oracle() -> tuple[Oracle, NDArray[np.float64]]:
    """The whole prompt, token by token, and its logits."""
    oracle = Oracle(SMALL, ReferenceEngine(SMALL).model.weights)
    return oracle, oracle.logits([int(token) for token in prompt_tokens(PROMPT)])


def test_cold_prefill_equals_the_model_written_token_by_token() -> None:
    tokens = prompt_tokens(PROMPT)
    oracle, expected = cold_oracle()

    result = ReferenceEngine(SMALL).prefill(tokens)

    assert np.abs(result.logits.numpy() - expected).max() < LOGITS_EQUAL
    for ratio, owners in ((2, (2, 4)), (1, (6,))):
        for row, owner in enumerate(owners):
            assert packed(result, f"main_r{ratio}", row) == oracle.main_bytes[owner]
            assert packed(result, f"index_r{ratio}", row) == oracle.index_bytes[owner]


@pytest.mark.parametrize("hit", [4, 8, 16, 32, 44])
def test_bounded_replay_equals_its_definition(hit: int) -> None:
    """Restored entries below the hit, windows truncated at the replay's start."""
    tokens = prompt_tokens(PROMPT)
    ids = [int(token) for token in tokens]
    engine = ReferenceEngine(SMALL)
    cold, _ = cold_oracle()
    start = hit - min(8, hit)
    warm = Oracle(
        SMALL,
        engine.model.weights,
        read_floor=start,
        write_floor=hit,
        main={owner: rows[: hit // SMALL.ratios[owner]] for owner, rows in cold.main.items()},
        index={owner: rows[: hit // SMALL.ratios[owner]] for owner, rows in cold.index.items()},
    )
    expected = warm.logits(ids, start)

    state = SequenceState(
        SMALL,
        engine.layout,
        tokens,
        floors=Floors.replay(hit, 8),
        prompt=PROMPT,
        dtype=torch.float64,
    )
    state.entries.restore(engine.prefill(tokens).entries, hit)
    rows = engine.model.encode([Chunk(state, start, PROMPT)])
    last = [Chunk(state, PROMPT - 8, PROMPT)]
    logits = engine.model.decode(rows.rows(-8), last)[-1]

    assert np.abs(logits.numpy() - expected).max() < LOGITS_EQUAL
    for ratio, owners in ((2, (2, 4)), (1, (6,))):
        for row, owner in enumerate(owners):
            written = state.entries.export(hit, PROMPT)[f"main_r{ratio}"][row]
            assert [entry.tobytes() for entry in written] == warm.main_bytes.get(owner, [])


CUTS = {
    "one token at a time": range(PROMPT),
    "three at a time": range(0, PROMPT, 3),
    "inside pairs": (1, 3, 5, 20, 33, 44),
    "last token alone": (PROMPT - 1,),
    "inside the last window": (PROMPT - 9, PROMPT - 8, PROMPT - 7, PROMPT - 3),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_prefill_does_not_depend_on_where_it_is_cut(cuts: tuple[int, ...]) -> None:
    tokens = prompt_tokens(PROMPT)
    engine = ReferenceEngine(SMALL)

    whole, cut = engine.prefill(tokens), engine.prefill(tokens, chunks=cuts)

    assert difference(whole, cut) < LOGITS_EQUAL
    for name in whole.entries:
        assert np.array_equal(whole.entries[name], cut.entries[name])


def test_a_prompt_of_one_repeated_token_does_not_depend_on_where_it_is_cut() -> None:
    """Equal tokens make equal rows, so that index scores tie everywhere."""
    tokens = np.full(PROMPT, 7, np.uint32)
    engine = ReferenceEngine(SMALL)

    whole, cut = engine.prefill(tokens), engine.prefill(tokens, chunks=range(0, PROMPT, 7))

    assert difference(whole, cut) < LOGITS_EQUAL
    for name in whole.entries:
        assert np.array_equal(whole.entries[name], cut.entries[name])


def test_several_sequences_in_one_pass_are_each_what_they_are_alone() -> None:
    engine = ReferenceEngine(SMALL)
    lengths = (5, 32, 17)

    def chunk(length: int) -> Chunk:
        state = SequenceState(
            SMALL,
            engine.layout,
            prompt_tokens(length, seed=length),
            floors=Floors.replay(0, 8),
            prompt=length,
            dtype=torch.float64,
        )
        return Chunk(state, 0, length)

    together = [chunk(length) for length in lengths]
    outputs = torch.tensor_split(engine.model.encode(together).mixed(), (5, 37))
    for length, batched, rows in zip(lengths, together, outputs, strict=True):
        alone = chunk(length)
        assert torch.allclose(engine.model.encode([alone]).mixed(), rows, atol=LOGITS_EQUAL, rtol=0)
        for name, stored in alone.state.entries.export(0, length).items():
            assert np.array_equal(batched.state.entries.export(0, length)[name], stored)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e12, 0.0])
def test_a_poisoned_window_row_below_the_read_floor_changes_nothing(poison: float) -> None:
    hit, start = 32, 24
    tokens = prompt_tokens(PROMPT)
    engine = ReferenceEngine(SMALL)
    entries = engine.prefill(tokens).entries

    def run(fill: float) -> torch.Tensor:
        state = SequenceState(
            SMALL,
            engine.layout,
            tokens,
            floors=Floors.replay(hit, 8),
            prompt=PROMPT,
            dtype=torch.float64,
        )
        state.windows[:, :start] = fill
        state.windows[SMALL.last_owner :, : PROMPT - 8] = fill
        state.entries.restore(entries, hit)
        rows = engine.model.encode([Chunk(state, start, PROMPT)])
        return engine.model.decode(rows.rows(-8), [Chunk(state, PROMPT - 8, PROMPT)])

    assert torch.equal(run(poison), run(3.0))


def test_every_readable_number_matters() -> None:
    """Without this, a test that nothing changed could pass on a model that reads nothing."""
    tokens = prompt_tokens(PROMPT)
    engine = ReferenceEngine(SMALL)
    base = engine.prefill(tokens)
    for position in (0, 20, PROMPT - 9, PROMPT - 1):
        changed = tokens.copy()
        changed[position] ^= 1
        assert difference(base, engine.prefill(changed)) > 1e-6


def test_mxfp8_window_rows_restore_what_the_model_computed_with() -> None:
    config = dataclasses.replace(SMALL, window_format="mxfp8")
    engine = ReferenceEngine(config)
    state = SequenceState(
        config,
        engine.layout,
        prompt_tokens(PROMPT),
        floors=Floors.replay(0, 8),
        prompt=PROMPT,
        dtype=torch.float64,
    )
    engine.model.encode([Chunk(state, 0, PROMPT)])
    snapshot = state.snapshot(24, 32, "engine")
    assert snapshot.rows["window"].shape == (6, 8, config.head_dim + 1)

    kept = state.windows.clone()
    state.windows[:, 24:32] = torch.nan
    state.restore_window(snapshot)
    assert torch.equal(state.windows[:6], kept[:6])


def test_weights_of_a_seed_are_the_same_in_another_process() -> None:
    script = (
        "import hashlib; from kvstore.reference.config import ReferenceConfig;"
        "from kvstore.reference.weights import random_weights; import torch;"
        "w = random_weights(ReferenceConfig.tiny(), 11, torch.float64);"
        "print(hashlib.sha256(w.head.numpy().tobytes()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    def digest(seed: int) -> str:
        weights = random_weights(ReferenceConfig.tiny(), seed, torch.float64)
        return hashlib.sha256(weights.head.numpy().tobytes()).hexdigest()

    assert other.stdout.strip() == digest(11) != digest(12)
