"""Measured bytes per token on SSD: stores random blocks and counts pages. Shares no formula with ``cost``."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.errors import StoreError
from kvstore.identity.namespace import Namespace
from kvstore.layout import Layout

_PROMPT_BLOCKS, _PROMPT_BYTES = 50, 1 << 24
"""Most blocks and payload of one prompt, which bounds the memory."""
_CAPACITY = "8GiB"
"""Capacity of the store: far above the payload, so that nothing is evicted."""
_WAIT_SECONDS = 60.0
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured size of some blocks."""

    blocks: int
    tokens: int
    live_bytes: int
    """Bytes of pages in use, for payload, records and index."""
    file_bytes: int
    """Size of the file: up to the highest page ever used."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that JSON adds to a model's cost."""
        return {
            "measured_ssd_bytes_per_token": self.live_bytes / self.tokens,
            "measured": {
                "blocks": self.blocks,
                "tokens": self.tokens,
                "live_bytes": self.live_bytes,
                "file_bytes": self.file_bytes,
                "file_bytes_per_token": self.file_bytes / self.tokens,
            },
        }


def measure(
    layout: Layout,
    block_tokens: int,
    blocks: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Measured:
    """Write blocks to a store in a temporary directory, flush, and count its pages.

    Raises ``StoreError`` if the directory has no room. Cost: the payload on disk; a few copies of one
    block, or of 16 MiB, in memory.
    """
    block_bytes = math.ceil(layout.bytes_per_token * block_tokens)
    rng = np.random.default_rng(_SEED)
    in_prompt = max(1, min(blocks, _PROMPT_BLOCKS, _PROMPT_BYTES // block_bytes))
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-") as folder,
        PrefixCache.open(
            f"{folder}/store",
            layout=layout,
            namespace=Namespace(model="measured"),
            block_tokens=block_tokens,
            ssd_bytes=_CAPACITY,
            device_bytes=0,
            window_bytes=0,
        ) as cache,
    ):
        for done in range(0, blocks, in_prompt):
            progress(done, blocks)
            count = min(in_prompt, blocks - done) * block_tokens
            entries = {
                group.name: rng.integers(
                    0,
                    256,
                    (len(group.layers), count // group.tokens_per_entry, group.entry_bytes),
                    np.uint8,
                )
                for group in layout.global_groups
            }
            tokens = rng.integers(0, 1 << 17, count, np.uint32)
            stored = cache.store(tokens, entries, wait=_WAIT_SECONDS)
            if stored.dropped:
                msg = f"{stored.dropped} of {count // block_tokens} blocks were dropped by the store in {folder}"
                raise StoreError(msg)
        cache.flush()
        ssd = cache.stats()["tiers"]["ssd"]
        if ssd["blocks"] != blocks:
            msg = f"the store in {folder} has {ssd['blocks']} of {blocks} blocks; is its disk full?"
            raise StoreError(msg)
    progress(blocks, blocks)
    return Measured(
        blocks=blocks,
        tokens=ssd["tokens"],
        live_bytes=ssd["live_bytes"],
        file_bytes=ssd["file_bytes"],
    )
