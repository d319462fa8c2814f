"""The forward pass against the same model written token by token, and cut in every way."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import Result
from kvstore.reference.engram import addresses, open_tables
from kvstore.reference.state import Chunk, Floors, SequenceState
from kvstore.reference.vision import Image
from kvstore.reference.weights import random_weights
from tests.reference.oracle import Oracle
from tests.reference.support import (
    LOGITS_EQUAL,
    SYSTEMS,
    difference,
    engine_of,
    image_at,
    prompt_tokens,
    tables,
    with_images,
)

SMALL = ReferenceConfig.tiny(sliding_window=8, index_topk=4)
PROMPT = 45
IMAGES = (image_at(10, seed=1), image_at(31, height=1, width=3, seed=2))
"""[10, 18) and [31, 37): a replay of 8 rows may start inside either."""
every_system = pytest.mark.parametrize("system", SYSTEMS)


def small(system: str) -> ReferenceConfig:
    return dataclasses.replace(SMALL, **SYSTEMS[system])


def images_of(config: ReferenceConfig) -> tuple[Image, ...]:
    return () if config.image_token_id is None else IMAGES


def prompt_of(config: ReferenceConfig) -> NDArray[np.uint32]:
    return with_images(config, prompt_tokens(PROMPT), images_of(config))


def state_of(
    config: ReferenceConfig, floors: Floors, tokens: NDArray[np.uint32] | None = None
) -> SequenceState:
    tokens = prompt_of(config) if tokens is None else tokens
    return SequenceState(
        config,
        config.layout(),
        tokens,
        floors=floors,
        prompt=len(tokens),
        dtype=torch.float64,
        images=images_of(config),
    )


def packed(result: Result, group: str, row: int) -> list[bytes]:
    return [entry.tobytes() for entry in result.entries[group][row]]


@functools.cache
def cold(system: str) -> Result:
    config = small(system)
    return engine_of(config).prefill(prompt_of(config), images=images_of(config))


def oracle_of(config: ReferenceConfig, **start: Any) -> Oracle:
    """The model token by token, with its tables and images."""
    weights = random_weights(config, 0, torch.float64)
    decoded = {
        layer: table.gather(torch.arange(addresses(config)[layer].row_count)).numpy()
        for layer, table in open_tables(config, tables(), seed=0, dtype=torch.float64).items()
    }
    shown: dict[int, NDArray[np.float64]] = {}
    for image in images_of(config):
        assert weights.vision is not None
        place = image.span.start
        height, width = (size // 3 for size in image.patches.shape[:2])
        shown[place] = weights.vision.start.numpy()
        for row in range(height):
            for column in range(width):
                square = image.patches[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
                place += 1
                shown[place] = square.ravel().astype(float) @ weights.vision.project.numpy()
            place += 1
            shown[place] = weights.vision.newline.numpy()
        shown[place + 1] = weights.vision.end.numpy()
    return Oracle(config, weights, tables=decoded, shown=shown, **start)


@functools.cache
def cold_oracle(system: str) -> tuple[Oracle, NDArray[np.float64]]:
    """The whole prompt, token by token, and its logits."""
    config = small(system)
    oracle = oracle_of(config)
    return oracle, oracle.logits(prompt_of(config).tolist())


@every_system
def test_cold_prefill_equals_the_model_written_token_by_token(system: str) -> None:
    oracle, expected = cold_oracle(system)

    result = cold(system)

    assert np.abs(result.logits.numpy() - expected).max() < LOGITS_EQUAL
    for ratio, owners in ((2, (2, 4)), (1, (6,))):
        for row, owner in enumerate(owners):
            assert packed(result, f"main_r{ratio}", row) == oracle.main_bytes[owner]
            assert packed(result, f"index_r{ratio}", row) == oracle.index_bytes[owner]


@pytest.mark.parametrize(
    ("system", "hit"),
    [*(("attention", hit) for hit in (4, 8, 16, 32, 44)), *((s, 20) for s in SYSTEMS), ("all", 44)],
)
def test_bounded_replay_equals_its_definition(system: str, hit: int) -> None:
    """Restored entries below the hit, windows truncated at the replay's start."""
    config = small(system)
    tokens = prompt_of(config)
    whole, _ = cold_oracle(system)
    start = hit - min(8, hit)
    warm = oracle_of(
        config,
        read_floor=start,
        write_floor=hit,
        main={owner: rows[: hit // SMALL.ratios[owner]] for owner, rows in whole.main.items()},
        index={owner: rows[: hit // SMALL.ratios[owner]] for owner, rows in whole.index.items()},
    )
    expected = warm.logits(tokens.tolist(), start)

    model = engine_of(config).model
    state = state_of(config, Floors.replay(hit, 8))
    state.entries.restore(cold(system).entries, hit)
    rows = model.encode([Chunk(state, start, PROMPT)])
    logits = model.logits(model.decode(rows.rows(-8), [Chunk(state, PROMPT - 8, PROMPT)]))[-1]

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


@pytest.mark.parametrize("system", ["attention", "all"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_prefill_does_not_depend_on_where_it_is_cut(cuts: Sequence[int], system: str) -> None:
    config = small(system)

    cut = engine_of(config).prefill(prompt_of(config), images=images_of(config), chunks=cuts)

    assert difference(cold(system), cut) < LOGITS_EQUAL
    for name, stored in cold(system).entries.items():
        assert np.array_equal(stored, cut.entries[name])


@pytest.mark.parametrize("system", ["attention", "candidates"])
def test_a_prompt_of_one_repeated_token_does_not_depend_on_where_it_is_cut(system: str) -> None:
    """Equal tokens make equal rows, so that index scores tie everywhere."""
    tokens = np.full(PROMPT, 7, np.uint32)
    engine = engine_of(small(system))

    whole, cut = engine.prefill(tokens), engine.prefill(tokens, chunks=range(0, PROMPT, 7))

    assert difference(whole, cut) < LOGITS_EQUAL
    for name in whole.entries:
        assert np.array_equal(whole.entries[name], cut.entries[name])


@pytest.mark.parametrize("system", ["attention", "all"])
def test_several_sequences_in_one_pass_are_each_what_they_are_alone(system: str) -> None:
    config = dataclasses.replace(small(system), image_token_id=None)
    model = engine_of(config).model
    lengths = (5, 32, 17)

    def chunk(length: int) -> Chunk:
        tokens = prompt_tokens(length, seed=length)
        return Chunk(state_of(config, Floors.replay(0, 8), tokens), 0, length)

    together = [chunk(length) for length in lengths]
    outputs = torch.tensor_split(model.encode(together).mixed(), (5, 37))
    for length, batched, rows in zip(lengths, together, outputs, strict=True):
        alone = chunk(length)
        assert torch.allclose(model.encode([alone]).mixed(), rows, atol=LOGITS_EQUAL, rtol=0)
        for name, stored in alone.state.entries.export(0, length).items():
            assert np.array_equal(batched.state.entries.export(0, length)[name], stored)


@every_system
def test_what_must_not_be_read_may_hold_anything(system: str) -> None:
    """Windows below their floors, rows of groups below the write floor, entries nobody has written."""
    hit, start = 32, 24
    config = small(system)
    model = engine_of(config).model

    def run(fill: float) -> torch.Tensor:
        state = state_of(config, Floors.replay(hit, 8))
        state.windows[:, :start] = fill
        state.windows[SMALL.last_owner :, : PROMPT - 8] = fill
        for waiting in state.groups.values():
            waiting[:] = fill
        state.entries.restore(cold(system).entries, hit)
        rows = model.encode([Chunk(state, start, PROMPT)])
        logits = model.logits(model.decode(rows.rows(-8), [Chunk(state, PROMPT - 8, PROMPT)]))
        if model.drafter is None:
            return logits
        return torch.cat((logits[-1], model.drafter.propose(state, 3, PROMPT - 1).confidence))

    expected = run(3.0)
    assert bool(expected.isfinite().all())
    for poison in (math.nan, math.inf, 1e12, 0.0):
        assert torch.equal(run(poison), expected)


@every_system
@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
def test_an_entry_below_the_write_floor_is_never_written(system: str, poison: int) -> None:
    """0x7F is a scale that is NaN: whoever reads such an entry is lost, and still it stays."""
    hit = 32
    config = small(system)
    model = engine_of(config).model
    state = state_of(config, Floors.replay(hit, 8))
    foreign = {
        name: np.full_like(stored[:, : hit // (2 if name.endswith("r2") else 1)], poison)
        for name, stored in cold(system).entries.items()
    }
    state.entries.restore(foreign, hit)

    rows = model.encode([Chunk(state, 24, PROMPT)])
    model.decode(rows.rows(-8), [Chunk(state, PROMPT - 8, PROMPT)])

    for name, stored in state.entries.export(0, hit).items():
        assert np.array_equal(stored, foreign[name])


@pytest.mark.parametrize("system", ["attention", "all"])
def test_every_readable_number_matters(system: str) -> None:
    """Without this, a test that nothing changed could pass on a model that reads nothing."""
    config = small(system)
    engine = engine_of(config)
    for position in (0, 20, PROMPT - 16, PROMPT - 1):
        changed = prompt_of(config)
        changed[position] ^= 1
        other = engine.prefill(changed, images=images_of(config))
        assert difference(cold(system), other) > 1e-6


def test_mxfp8_window_rows_restore_what_the_model_computed_with() -> None:
    config = dataclasses.replace(SMALL, window_format="mxfp8")
    state = state_of(config, Floors.replay(0, 8))
    engine_of(config).model.encode([Chunk(state, 0, PROMPT)])
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
