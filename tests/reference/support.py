"""What the tests of the reference engine share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import Result

LOGITS_EQUAL = 1e-9
"""Logits that differ by less are equal: matrix products may round differently for other shapes."""


def prompt_tokens(length: int, seed: int = 1) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)


def difference(one: Result, other: Result) -> float:
    """Return the largest difference between the logits of two results."""
    return float((one.logits - other.logits).abs().max())


def entries_equal(one: Result, other: Result, *, start: int = 0, stop: int | None = None) -> bool:
    """Say whether the entries of tokens ``[start, stop)`` are byte-equal, by default to the end."""
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
