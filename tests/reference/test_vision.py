"""Images: their rows, and their identity in the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.vision import Image, image_rows, unshuffle
from kvstore.reference.weights import random_weights
from tests.reference.support import (
    LOGITS_EQUAL,
    SYSTEMS,
    difference,
    engine_of,
    entries_equal,
    image_at,
    open_cache,
    prompt_tokens,
    with_images,
)

SMALL = ReferenceConfig.tiny(sliding_window=16, index_topk=8, **SYSTEMS["all"])
BLOCK = 32


def test_a_square_of_patches_is_one_row() -> None:
    patches = torch.arange(6 * 9 * 2).reshape(6, 9, 2)

    rows = unshuffle(patches, 3)

    assert rows.shape == (2, 3, 18)
    assert rows[1, 2].tolist() == patches[3:6, 6:9].flatten().tolist()


def test_an_image_is_start_then_rows_with_newlines_then_end() -> None:
    weights = random_weights(SMALL, 0, torch.float64).vision
    assert weights is not None
    image = image_at(7, height=2, width=3)

    rows = image_rows(weights, image)

    assert (image.span.start, image.span.stop) == (7, 7 + len(rows))
    assert len(rows) == 1 + 2 * (3 + 1) + 1
    assert torch.equal(rows[0], weights.start)
    assert torch.equal(rows[-1], weights.end)
    for newline in (4, 8):
        assert torch.equal(rows[newline], weights.newline)
    square = torch.from_numpy(image.patches[3:6, 3:6]).double().flatten()
    assert torch.allclose(rows[6], square @ weights.project)


def test_the_largest_image_of_the_release_takes_1024_rows() -> None:
    """1344 x 1344 pixels in patches of 14, joined by three."""
    image = Image(0, np.zeros((96, 96, 1), np.float32))

    assert image.span.stop == 2 + 32 * (32 + 1)


def test_content_and_shape_identify_an_image_and_its_place_does_not() -> None:
    one = image_at(3)
    changed = one.patches.copy()
    changed[-1, -1, -1] += 1
    turned = np.ascontiguousarray(one.patches.reshape(12, 3, 8))

    digests = {
        one.span.digest,
        Image(3, changed).span.digest,
        Image(3, turned).span.digest,
    }
    assert len(digests) == 3
    assert dataclasses.replace(one, start=9).span.digest == one.span.digest
    with pytest.raises(ValueError, match="multiples of 3"):
        Image(0, np.zeros((6, 7, 8), np.float32))


REPLAYED = image_at(40, height=2, width=8, seed=5)
"""[40, 60): after a hit of 64 tokens, a replay starts at 48, eight rows into it."""
SHOWN = with_images(SMALL, prompt_tokens(90), [REPLAYED])


def test_a_replay_that_starts_inside_an_image_is_the_same_folded_or_by_the_hook(
    tmp_path: Path,
) -> None:
    entries = engine_of(SMALL).prefill(SHOWN, images=[REPLAYED]).entries
    found = {}
    for name, options in {
        "fold": {},
        "pages": {"restore": "pages"},
        "hook": {"replay": "hook"},
    }.items():
        with open_cache(tmp_path / name, SMALL, block_tokens=BLOCK) as cache:
            cache.store(SHOWN, entries, images=[REPLAYED.span])
            cache.flush()
            engine = engine_of(SMALL, cache, **options)
            found[name] = engine.prefill(SHOWN, images=[REPLAYED])

    for warm in found.values():
        assert (warm.hit_tokens, warm.window_source, warm.replay_tokens) == (64, "replay", 16)
        assert entries_equal(warm, found["fold"], start=64)
        assert difference(warm, found["fold"]) < LOGITS_EQUAL


@pytest.mark.parametrize("restore", ["read", "pages"])
def test_a_pooled_window_that_ends_behind_an_image_continues_the_cold_run(
    restore: str, tmp_path: Path
) -> None:
    expected = engine_of(SMALL).prefill(SHOWN, images=[REPLAYED])
    with open_cache(tmp_path, SMALL, window_rows=30, block_tokens=BLOCK) as cache:
        engine = engine_of(SMALL, cache, restore=restore)
        engine.prefill(SHOWN[:65], images=[REPLAYED])
        cache.flush()
        warm = engine.prefill(SHOWN, images=[REPLAYED])

    assert (warm.hit_tokens, warm.window_source) == (64, "pool")
    assert entries_equal(warm, expected, start=64)
    assert difference(warm, expected) < LOGITS_EQUAL


def test_another_image_at_the_same_place_is_another_prefix(tmp_path: Path) -> None:
    one, other = image_at(40, seed=5), image_at(40, seed=6)
    tokens = with_images(SMALL, prompt_tokens(90), [one])
    with open_cache(tmp_path, SMALL, block_tokens=BLOCK) as cache:
        engine = engine_of(SMALL, cache)
        engine.prefill(tokens, images=[one])
        cache.flush()
        hits = {
            "same": engine.prefill(tokens, images=[one]).hit_tokens,
            "other": engine.prefill(tokens, images=[other]).hit_tokens,
        }
    cold = engine_of(SMALL)
    shown = [cold.prefill(tokens, images=[image]) for image in (one, other)]

    # The block before the image is shared, those it touches and all after them are not.
    assert hits == {"same": 64, "other": 32}
    assert difference(*shown) > 1e-6


def test_an_image_out_of_place_is_refused() -> None:
    image = image_at(10)
    tokens = with_images(SMALL, prompt_tokens(40), [image])
    engine = engine_of(SMALL)

    wide = Image(10, np.zeros((6, 6, 9), np.float32))
    for images in ([], [image_at(11)], [image, image], [image_at(38)], [wide]):
        with pytest.raises(ValueError, match="image"):
            engine.prefill(tokens, images=images)


def test_a_replay_without_the_features_of_its_image_is_refused(tmp_path: Path) -> None:
    image = image_at(40, seed=5)
    tokens = with_images(SMALL, prompt_tokens(90), [image])
    with open_cache(tmp_path, SMALL, block_tokens=BLOCK) as cache:
        engine_of(SMALL, cache).prefill(tokens, images=[image])
        cache.flush()
        with cache.lookup(tokens, images=[image.span]) as match, cache.load(match) as pages:
            request = kvstore.ReplayRequest(
                start=48,
                stop=64,
                read_floor=48,
                write_floor=64,
                window_write_floor=48,
                tokens=tokens,
                images=[image.span],
                pages=pages,
            )
            with pytest.raises(ValueError, match="no features"):
                engine_of(SMALL, cache).replay_hook([request])


def test_the_image_token_is_never_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated tokens are in the next prompt, where an image token would need an image."""
    engine = engine_of(SMALL)
    logits_of = engine.model.logits

    def eager(*given: Any) -> torch.Tensor:
        logits = logits_of(*given)
        logits[:, 256] += 1e6
        return logits

    monkeypatch.setattr(engine.model, "logits", eager)
    result = engine.generate(prompt_tokens(20), 6)

    assert 256 not in result.new_tokens
    assert int(result.logits.argmax()) == 256
