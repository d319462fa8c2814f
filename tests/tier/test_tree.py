"""A changed bit in what LMDB believes is found before LMDB sees it; a sound file is never blamed."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import lmdb.verify
import numpy as np
import pytest

from kvstore.tier import tree
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tokens_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with branches in its trees and lists of free pages."""
    path = tmp_path / "s"
    with open_cache(path, ssd_bytes="3MiB") as cache:
        for seed in range(40):
            tokens = tokens_of(10 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
            cache.flush()
    return path


def test_a_sound_file_has_no_problem(store: Path) -> None:
    assert tree.problem_of(store / "data.mdb") == ""


def test_it_agrees_with_the_verifier_of_lmdb(store: Path) -> None:
    """On every bit of heads, nodes and meta pages that it is told of: none that matters is missed."""
    data = store / "data.mdb"
    whole = data.read_bytes()
    rng = np.random.default_rng(0)
    pages = [
        n
        for n in range(2, len(whole) // 4096)
        if struct.unpack_from("<QHH", whole, n * 4096)[::2] in ((n, 1), (n, 2))
    ]
    found = 0
    for _ in range(300):
        page = int(rng.choice([0, 1, *pages]))
        at = page * 4096 + int(rng.choice([rng.integers(0, 160), rng.integers(0, 4096)]))
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << int(rng.integers(8))
        data.write_bytes(spoiled)
        try:
            theirs = bool(lmdb.verify.verify(str(store)))  # type: ignore[no-untyped-call]
        except lmdb.verify.VerifyError:
            theirs = True
        ours = tree.problem_of(data)
        assert ours or not theirs, f"byte {at % 4096} of page {page} was missed"
        found += bool(ours)
    assert found > 10, "most bits are of pages that are free, or of no consequence"


@pytest.mark.parametrize(
    ("form", "offset", "value"),
    [("<I", 40, 8192), ("<H", 92, 4), ("<Q", 96, 1 << 40), ("<Q", 136, 1 << 40)],
    ids=["page size", "flags", "counter", "last page"],
)
def test_a_meta_page_that_lies_is_set_aside_and_not_for_ever_in_the_way(
    store: Path, form: str, offset: int, value: int
) -> None:
    """LMDB alone refuses such a file at each opening, or counts pages that are not there."""
    data = store / "data.mdb"
    spoiled = bytearray(data.read_bytes())
    for meta in (0, 4096):
        struct.pack_into(form, spoiled, meta + offset, value)
    data.write_bytes(spoiled)
    tokens = tokens_of(2 * BLOCK + 1, 99)
    with open_cache(store, ssd_bytes="3MiB") as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert cache.lookup(tokens).hit_tokens == 2 * BLOCK
