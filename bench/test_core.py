"""Speed of the core operations relative to the machine.

Question: what do a lookup, a warm read and a durable store cost?
Method:   pytest-benchmark rounds; the bound is measured in the same test, interleaved, and the ratio of
          medians is in ``extra_info``.
Bound:    memcpy of the same bytes for a read; pwrite and fdatasync of the same bytes for a store.
Run:      make bench
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore

BLOCKS = 256
TOKENS = BLOCKS * 128
LAYOUTS = ["deepseek-v4.1-flash", "smollm2-135m"]


def random_entries(layout: kvstore.Layout, tokens: int) -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return {
        g.name: rng.integers(
            0, 256, (len(g.layers), tokens // g.tokens_per_entry, g.entry_bytes), np.uint8
        )
        for g in layout.global_groups
    }


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.fixture(params=LAYOUTS)
def filled(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[kvstore.PrefixCache, NDArray[np.uint32], int]]:
    layout = kvstore.layout(request.param)
    blocks = BLOCKS if layout.bytes_per_token < 1000 else BLOCKS // 8
    tokens = np.random.default_rng(1).integers(0, 1 << 17, blocks * 128 + 1, np.uint32)
    namespace = kvstore.Namespace(model=request.param)
    with kvstore.PrefixCache.open(tmp_path / "s", layout=layout, namespace=namespace) as cache:
        cache.store(tokens, random_entries(layout, len(tokens)), wait=60)
        cache.flush()
        yield cache, tokens, int(blocks * 128 * layout.bytes_per_token)


def test_look_up_of_a_million_tokens(benchmark: Any, tmp_path: Path) -> None:
    layout = kvstore.Layout(
        model="one byte a token",
        groups=(kvstore.LayerGroup(name="b", layers=(0,), values=1, entry_format="u8"),),
    )
    tokens = np.random.default_rng(1).integers(0, 1 << 17, (1 << 20) + 1, np.uint32)
    namespace = kvstore.Namespace(model="m")
    with kvstore.PrefixCache.open(tmp_path / "s", layout=layout, namespace=namespace) as cache:
        cache.store(tokens, {"b": np.zeros((1, len(tokens), 1), np.uint8)}, wait=60)
        cache.flush()
        match = benchmark.pedantic(cache.lookup, (tokens,), rounds=31, warmup_rounds=2)
        assert match.hit_tokens == 1 << 20
    benchmark.extra_info["blocks"] = (1 << 20) // 128


def test_warm_read(benchmark: Any, filled: tuple[kvstore.PrefixCache, Any, int]) -> None:
    cache, tokens, size = filled
    source = np.ones(size, np.uint8)
    copies: list[float] = []

    def measure_bound() -> None:
        copies.append(seconds(source.copy))

    with cache.lookup(tokens) as match:
        found = benchmark.pedantic(cache.read, (match,), setup=measure_bound, rounds=31)
        assert found.tokens == match.hit_tokens
    median = benchmark.stats.stats.median
    benchmark.extra_info["gb_per_s"] = size / median / 1e9
    benchmark.extra_info["ratio_to_memcpy"] = statistics.median(copies) / median


@pytest.mark.parametrize("name", LAYOUTS)
def test_durable_store(benchmark: Any, tmp_path: Path, name: str) -> None:
    layout = kvstore.layout(name)
    blocks = BLOCKS if layout.bytes_per_token < 1000 else BLOCKS // 8
    entries = random_entries(layout, blocks * 128)
    size = sum(array.nbytes for array in entries.values())
    rng = np.random.default_rng(2)
    raw = np.ones(size, np.uint8)
    bounds: list[float] = []

    def write_raw() -> None:
        fd = os.open(tmp_path / "raw", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        step = 16 << 20
        for at in range(0, size, step):
            os.pwrite(fd, raw[at : at + step].data, at)
            os.fdatasync(fd)
        os.close(fd)

    def setup() -> tuple[tuple[NDArray[np.uint32]], dict[str, Any]]:
        bounds.append(seconds(write_raw))
        return (rng.integers(0, 1 << 17, blocks * 128, np.uint32),), {}

    def store(tokens: NDArray[np.uint32]) -> None:
        assert not cache.store(tokens, entries, wait=60).dropped
        cache.flush()

    namespace = kvstore.Namespace(model=name)
    with kvstore.PrefixCache.open(tmp_path / "s", layout=layout, namespace=namespace) as cache:
        benchmark.pedantic(store, setup=setup, rounds=11)
    median = benchmark.stats.stats.median
    benchmark.extra_info["gb_per_s"] = size / median / 1e9
    benchmark.extra_info["ratio_to_raw"] = statistics.median(bounds) / median
