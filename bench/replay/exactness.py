"""Exactness of a continuation from the cache, relative to a cold run.

Question: a prompt of H + r tokens hits at H. Do the suffix's global entries and the logits equal those of a
          cold run, with the window from the pool (W or 2W - 2 rows), and after a replay?
Method:   the reference engine in float64 with a real store; one line per suffix length r. Expected
          (docs/decisions/0010): from the pool entries are always equal, and logits iff r >= 2W - 1 - R for R
          rows; after a replay both differ, unless the hit is at most W tokens. In float32 products of other
          shapes may round differently: differing FP4 codes of the suffix are counted.
Bound:    logits are equal up to 1e-9: products of other shapes round differently.
Run:      python -m bench.replay.exactness [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine, Result

HIT = 512
SUFFIXES = (1, 2, 60, 126, 127, 128, 200)
SHORT_HIT = 128
Window = Literal["pool W", "pool 2W-2", "replay", "replay, short hit"]


@dataclass(frozen=True, slots=True)
class Row:
    """One continuation and its cold run."""

    window: Window
    hit_tokens: int
    suffix_tokens: int
    replay_tokens: int
    entries_equal: bool
    """Whether all bytes of the suffix's global entries are equal."""
    logit_difference: float
    """Largest, over the vocabulary."""
    flipped_codes: int
    """FP4 codes of the suffix that differ."""
    codes: int
    dtype: str


def prompt(length: int) -> NDArray[np.uint32]:
    """Return random tokens."""
    return np.random.default_rng(1).integers(0, 256, length).astype(np.uint32)


def suffixes(result: Result, config: ReferenceConfig, start: int) -> dict[str, NDArray[np.uint8]]:
    """Return the entries of tokens from ``start`` on, by group."""
    return {
        group.name: result.entries[group.name][:, start // group.tokens_per_entry :]
        for group in config.layout().global_groups
    }


def flipped(one: Result, other: Result, config: ReferenceConfig, start: int) -> tuple[int, int]:
    """Count the FP4 codes of tokens from ``start`` on that differ, and all of them: two a byte."""
    count = total = 0
    theirs = suffixes(other, config, start)
    for name, mine in suffixes(one, config, start).items():
        changed = (mine ^ theirs[name])[..., : config.layout().group(name).planes[0]]
        count += int((changed & 0x0F != 0).sum()) + int((changed & 0xF0 != 0).sum())
        total += 2 * changed.size
    return count, total


def measure(
    config: ReferenceConfig, hit: int, suffix: int, window: Window, dtype: torch.dtype
) -> Row:
    """Store a cold run of the first ``hit`` tokens, then continue it."""
    rows = 2 * config.sliding_window - 2 if window == "pool 2W-2" else config.sliding_window
    tokens = prompt(hit + suffix)
    engine = ReferenceEngine(config, dtype=dtype)
    cold = engine.prefill(tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        kvstore.PrefixCache.open(
            f"{folder}/store",
            layout=engine.layout,
            namespace=engine.namespace,
            ssd_bytes="64MiB",
            device_bytes=0,
            window_bytes=0 if window.startswith("replay") else "64MiB",
            window_rows=rows,
        ) as cache,
    ):
        engine.cache = cache
        engine.prefill(tokens[:hit])
        cache.flush()
        warm = engine.prefill(tokens)
    assert warm.hit_tokens == hit
    assert warm.window_source == window.split()[0].rstrip(",")
    count, total = flipped(cold, warm, config, hit)
    mine, theirs = (suffixes(result, config, hit) for result in (cold, warm))
    return Row(
        window=window,
        hit_tokens=hit,
        suffix_tokens=suffix,
        replay_tokens=warm.replay_tokens,
        entries_equal=all(np.array_equal(mine[name], theirs[name]) for name in mine),
        logit_difference=float((cold.logits - warm.logits).abs().max()),
        flipped_codes=count,
        codes=total,
        dtype=str(dtype).removeprefix("torch."),
    )


def main() -> None:
    """Print a row per window and suffix length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = ReferenceConfig.tiny()
    cases: list[tuple[Window, int]] = [
        ("pool W", HIT),
        ("pool 2W-2", HIT),
        ("replay", HIT),
        ("replay, short hit", SHORT_HIT),
    ]
    found = [
        measure(config, hit, r, window, dtype)
        for dtype in (torch.float64, torch.float32)
        for window, hit in cases
        for r in SUFFIXES
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    print(
        f"{'':8} {'window':18} {'hit':>4} {'r':>4} {'replayed':>8}  {'entries':8} "
        f"{'logits differ by':>16} {'codes flipped':>16}"
    )
    for row in found:
        print(
            f"{row.dtype:8} {row.window:18} {row.hit_tokens:4} {row.suffix_tokens:4} "
            f"{row.replay_tokens:8}  {'equal' if row.entries_equal else 'differ':8} "
            f"{row.logit_difference:16.2e} {row.flipped_codes:7} / {row.codes:6}"
        )


if __name__ == "__main__":
    main()
