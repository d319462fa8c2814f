"""Shared helpers of the reference engine's tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine, Result
from kvstore.reference.vision import Image

SYSTEMS: dict[str, dict[str, Any]] = {
    "attention": {},
    "candidates": {
        "index_source_layer_ids": (2, 4, 6, 8, 10),
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 3,
    },
    "streams": {"hc_mult": 4, "hc_sinkhorn_iters": 3},
    "n-grams": {
        "engram_layer_ids": (1, 4),
        "engram_vocab_size": 500,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
    },
    "images": {"vocab_size": 258, "image_token_id": 256, "vision_hidden_size": 8},
    "drafts": {
        "vocab_size": 258,
        "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0),
        "num_nextn_predict_layers": 2,
        "dspark_noise_token_id": 257,
        "dspark_target_layer_ids": (9, 11),
        "dspark_markov_rank": 16,
    },
}
"""The config fields that enable each system."""
SYSTEMS["all"] = {name: value for system in SYSTEMS.values() for name, value in system.items()}

LOGITS_EQUAL = 1e-9
"""Logits that differ by less are equal: matrix products may round differently for other shapes."""


def prompt_tokens(length: int, seed: int = 1) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)


@functools.cache
def tables() -> Path:
    """Return the folder where this process has its Engram tables."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder


def engine_of(
    config: ReferenceConfig, cache: kvstore.PrefixCache | None = None, **options: Any
) -> ReferenceEngine:
    return ReferenceEngine(config, cache, tables=tables(), **options)


def image_at(start: int, *, height: int = 2, width: int = 2, seed: int = 0) -> Image:
    """Return an image of ``2 + height * (width + 1)`` tokens, of random features."""
    shape = (3 * height, 3 * width, 8)
    return Image(start, np.random.default_rng(seed).standard_normal(shape, np.float32))


def with_images(
    config: ReferenceConfig, tokens: NDArray[np.uint32], images: Sequence[Image]
) -> NDArray[np.uint32]:
    """Return the tokens with the image token where the images lie."""
    shown = tokens.copy()
    for image in images:
        assert config.image_token_id is not None
        shown[image.span.start : image.span.stop] = config.image_token_id
    return shown


def difference(one: Result, other: Result) -> float:
    """Return the largest difference between the logits of two results."""
    return float((one.logits - other.logits).abs().max())


def entries_equal(one: Result, other: Result, *, start: int = 0, stop: int | None = None) -> bool:
    """Return whether the entries of tokens ``[start, stop)`` are byte-equal, by default to the end."""
    for ratio in (1, 2):
        for kind in ("main", "index"):
            name = f"{kind}_r{ratio}"
            parts = []
            for result in (one, other):
                skip = result.entries_start // ratio
                end = None if stop is None else stop // ratio - skip
                parts.append(result.entries[name][:, start // ratio - skip : end])
            if not np.array_equal(parts[0], parts[1]):
                return False
    return True


def open_cache(
    path: Path,
    config: ReferenceConfig,
    *,
    window_rows: int | None = None,
    block_tokens: int = 128,
    dtype: torch.dtype = torch.float64,
) -> kvstore.PrefixCache:
    return kvstore.PrefixCache.open(
        path,
        layout=config.layout(dtype),
        namespace=kvstore.Namespace(model="reference"),
        block_tokens=block_tokens,
        ssd_bytes="64MiB",
        device_bytes="1MiB",
        window_rows=window_rows,
    )
