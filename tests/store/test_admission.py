"""request_share: a long prompt keeps its first blocks, and other prompts keep theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import BlockStore, ConfigError, PrefixCache
from kvstore.admin.archive import export_store, import_store
from tests.stores import (
    BLOCK,
    DENSE,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tokens_of,
    writer_of,
)

CAP = 9 << 19
"""4.5 MiB: some 440 blocks below the high watermark."""
PREFIXES, LENGTH = 20, 20


def put(cache: PrefixCache, tokens: NDArray[np.uint32], start: int = 0, stop: int = -1) -> int:
    """Store the blocks of a prompt up to token ``stop``; return how many were dropped."""
    ids = tokens[: stop if stop >= 0 else len(tokens) // BLOCK * BLOCK]
    stored = cache.store(ids, entries_of(DENSE, ids, start), start, wait=60)
    cache.flush()
    return stored.dropped


def hit(cache: PrefixCache, tokens: NDArray[np.uint32]) -> int:
    return cache.probe(tokens).hit_tokens // BLOCK


def room(cache: PrefixCache) -> int:
    ssd = writer_of(cache).ssd
    return ssd.high_bytes // ssd.block_bytes


def hot(cache: PrefixCache) -> list[NDArray[np.uint32]]:
    """Store and use the prefixes of all others."""
    prompts = [tokens_of(LENGTH * BLOCK + 1, seed) for seed in range(PREFIXES)]
    for tokens in prompts:
        assert put(cache, tokens) == 0
        with cache.lookup(tokens):
            pass
    assert sum(hit(cache, tokens) for tokens in prompts) == PREFIXES * LENGTH
    return prompts


@pytest.mark.parametrize(("share", "least", "most"), [(None, 0.45, 0.6), (0.1, 0.8, 1), (1, 0, 0)])
def test_a_prompt_as_large_as_the_tier_leaves_others_their_share(
    tmp_path: Path, share: float | None, least: float, most: float
) -> None:
    with open_cache(tmp_path / "s", ssd_bytes=CAP, request_share=share) as cache:
        prompts, blocks = hot(cache), room(cache)
        scan = tokens_of(blocks * BLOCK + 1, 99)
        dropped = put(cache, scan)
        left = sum(hit(cache, tokens) for tokens in prompts)
        assert least <= left / (PREFIXES * LENGTH) <= most
        kept = hit(cache, scan)
        if share == 1:
            return  # what found no room is another's test
        assert kept == int(blocks * (share or 0.5))
        with cache.lookup(scan) as match:
            assert_entries(DENSE, dict(cache.read(match)), scan, kept * BLOCK)
        counted = cache.stats()["counters"]["dropped_blocks"]
        assert counted == {"request_share": blocks - kept, "total": blocks - kept}
        assert dropped == blocks - kept


def test_pieces_and_repetitions_get_no_further_than_one_call(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes=CAP, request_share=0.1) as cache:
        most = int(room(cache) * 0.1)
        scan = tokens_of(100 * BLOCK + 1, 1)
        for first in range(0, 100, 7):
            put(cache, scan, first * BLOCK, min(100, first + 7) * BLOCK)
        assert hit(cache, scan) == most
        assert put(cache, scan) == 100 - most
        assert hit(cache, scan) == most
        dropped = cache.stats()["counters"]["dropped_blocks"]
        assert dropped == {"request_share": 2 * (100 - most), "total": 2 * (100 - most)}


def test_what_is_there_beyond_the_bound_stays_and_an_import_has_none(tmp_path: Path) -> None:
    path, scan = tmp_path / "s", tokens_of(100 * BLOCK + 1, 1)
    with open_cache(path, ssd_bytes=CAP) as cache:
        assert put(cache, scan) == 0
    with open_cache(path, ssd_bytes=CAP, request_share=0.01) as cache:
        assert put(cache, scan) == 0  # present
        assert hit(cache, scan) == 100
    export_store(path, tmp_path / "a.tar", (), lambda *_: None)
    import_store(tmp_path / "a.tar", tmp_path / "t", "2MiB", lambda *_: None)
    with open_cache(tmp_path / "t", ssd_bytes="2MiB") as cache:
        assert hit(cache, scan) == 100


def test_a_tenant_s_bound_is_the_same_and_its_siblings_are_no_part_of_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes=CAP, request_share=0.1) as cache:
        most = int(room(cache) * 0.1)
        stem = tokens_of((most - 2) * BLOCK, 1)
        for seed in range(5):  # each branch goes two blocks further, and they are ten
            branch = np.append(stem, tokens_of(4 * BLOCK + 1, 10 + seed)).astype(np.uint32)
            put(cache, branch)
            assert hit(cache, branch) == most


@pytest.mark.parametrize("has_parents", [True, False])
def test_a_chain_of_parents_is_bounded_and_blocks_apart_are_not(
    tmp_path: Path, *, has_parents: bool
) -> None:
    size, count = 4000, 60
    keys = [b"%d" % number for number in range(count)]
    parents: Any = [None, *keys[:-1]] if has_parents else None
    with BlockStore.open(
        tmp_path / "s", block_bytes=size, ssd_bytes="2MiB", request_share=0.1
    ) as store:
        side = inside(store).writer
        assert side is not None
        most = int(side.ssd.high_bytes // side.ssd.block_bytes * 0.1)
        assert 1 < most < count
        taken = store.put(keys, [bytes(size)] * count, parents, wait=60)
        store.flush()
        expected = most if has_parents else count
        assert taken == [True] * expected + [False] * (count - expected)
        assert store.exists(keys) == expected
        counted = store.stats()["counters"]["dropped_blocks"]
        assert counted.get("request_share", 0) == counted["total"] == count - expected


@pytest.mark.parametrize(
    "share", [0, -0.5, 1.01, float("nan"), float("inf"), True, "0.5", [1], 2**99]
)
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: Any) -> None:
    with pytest.raises(ConfigError, match="request_share must be a share in"):
        open_cache(tmp_path / "s", request_share=share)
    with pytest.raises(ConfigError, match="request_share must be a share in"):
        BlockStore.open(tmp_path / "s", block_bytes=10, request_share=share)
    assert not (tmp_path / "s").exists()
