"""Bytes on disk per token, next to what the layout alone needs.

Question: what does one cached token of DeepSeek-V4.1-Flash cost on SSD?
Method:   store 1,000 blocks of random entries through the real tier, in one prompt per 50 blocks,
          flush, and count pages. No clock, so the figures are the same on every machine.
Bound:    890 bytes a token, from the layer table; 896 with LMDB's whole pages of 4,096 bytes.
Run:      python -m bench.footprint
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass

import numpy as np

import kvstore

SEED = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """One row; sizes are bytes per token."""

    layout: str
    blocks: int
    bytes_per_token: float
    ssd_bytes_per_token: float
    """Live pages of all sub-databases."""
    high_water_bytes_per_token: float
    """The highest page ever used: what the file takes."""

    @property
    def overhead(self) -> float:
        """Live bytes over the layout's own, as a share."""
        return self.ssd_bytes_per_token / self.bytes_per_token - 1

    @property
    def high_water_overhead(self) -> float:
        """The same for the high-water mark."""
        return self.high_water_bytes_per_token / self.bytes_per_token - 1


def measure(name: str, blocks: int, blocks_per_prompt: int = 50) -> Footprint:
    """Store ``blocks`` blocks of 128 tokens and count what they take."""
    layout = kvstore.layout(name)
    rng = np.random.default_rng(SEED)
    count = blocks_per_prompt * 128
    entries = {
        group.name: rng.integers(
            0,
            256,
            (len(group.layers), count // group.tokens_per_entry, group.entry_bytes),
            np.uint8,
        )
        for group in layout.global_groups
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        kvstore.PrefixCache.open(
            f"{folder}/store",
            layout=layout,
            namespace=kvstore.Namespace(model=name),
            ssd_bytes="8GiB",
        ) as cache,
    ):
        for _ in range(blocks // blocks_per_prompt):
            tokens = rng.integers(0, 1 << 17, count, np.uint32)
            stored = cache.store(tokens, entries, wait=60)
            assert not stored.dropped, "the queue was full for a minute"
        cache.flush()
        ssd = cache.stats()["tiers"]["ssd"]
    return Footprint(
        layout=name,
        blocks=ssd["blocks"],
        bytes_per_token=float(layout.bytes_per_token),
        ssd_bytes_per_token=ssd["live_bytes"] / ssd["tokens"],
        high_water_bytes_per_token=ssd["file_bytes"] / ssd["tokens"],
    )


def main() -> None:
    """Print a row per layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure("deepseek-v4.1-flash", options.blocks)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'layout':22} {'blocks':>6} {'layout B/tok':>12} {'SSD B/tok':>10} {'high water':>10}")
    for row in rows:
        print(
            f"{row.layout:22} {row.blocks:6} {row.bytes_per_token:12.2f} "
            f"{row.ssd_bytes_per_token:10.2f} {row.high_water_bytes_per_token:10.2f}   "
            f"(+{row.overhead:.2%}, +{row.high_water_overhead:.2%})"
        )


if __name__ == "__main__":
    main()
