"""A changed bit in what LMDB believes is found before LMDB sees it; a sound file is never blamed."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import lmdb.verify
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.tier.ssd import btree
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tier_of, tokens_of


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


def problem_of(data: Path) -> str:
    """All that can be found: the trees, and the heads of values."""
    trees = btree.check(data)
    return trees.problem or btree.problem_of_heads(data, trees.values, None)


def pages_of_kind(whole: bytes, *kinds: int) -> list[int]:
    """Return the pages that say of themselves that they are of a kind, in use or not."""
    heads = [struct.unpack_from("<QHH", whole, at)[::2] for at in range(0, len(whole), 4096)]
    return [
        n for n, (number, flags) in enumerate(heads) if number == n and flags in kinds and n > 1
    ]


def test_a_sound_file_has_no_problem(store: Path) -> None:
    assert problem_of(store / "data.mdb") == ""


def test_values_that_have_pages_of_their_own_are_found(store: Path) -> None:
    """Oracle: LMDB's own count of such pages, and the hint that each record has."""
    values = btree.check(store / "data.mdb").values
    with open_cache(store, ssd_bytes="3MiB", role="reader") as cache:
        pages = {record.page for _, record in tier_of(cache).records()}
    assert len(pages) > 20
    assert pages <= set(values["page"].tolist())
    with lmdb.open(str(store), max_dbs=8, lib_version=0, readonly=True) as env:
        overflow = 0
        for name in (b"sys", b"meta", b"pay", b"age"):
            db = env.open_db(name, create=False)
            with env.begin() as txn:
                overflow += txn.stat(db)["overflow_pages"]
    assert values["pages"].sum() >= overflow > 0  # free lists may have some too


def test_it_agrees_with_the_verifier_of_lmdb(store: Path) -> None:
    """On every bit of heads, nodes and meta pages that it is told of: none that matters is missed."""
    data = store / "data.mdb"
    whole = data.read_bytes()
    rng = np.random.default_rng(0)
    pages = [0, 1, *pages_of_kind(whole, 1, 2, 4)]
    found = 0
    for _ in range(400):
        page = int(rng.choice(pages))
        at = page * 4096 + int(
            rng.choice([rng.integers(0, 16), rng.integers(0, 160), rng.integers(0, 4096)])
        )
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << int(rng.integers(8))
        data.write_bytes(spoiled)
        try:
            theirs = bool(lmdb.verify.verify(str(store)))  # type: ignore[no-untyped-call]
        except lmdb.verify.VerifyError:
            theirs = True
        ours = problem_of(data)
        assert ours or not theirs, f"byte {at % 4096} of page {page} was missed"
        found += bool(ours)
    assert found > 10, "most bits are of pages that are free, or of no consequence"


def test_the_head_of_a_value_is_looked_at_and_its_bytes_are_not(store: Path) -> None:
    data = store / "data.mdb"
    whole = data.read_bytes()
    values = btree.check(data).values
    page = int(values["page"][len(values) // 2])
    for at, is_bad in ((0, True), (10, True), (12, True), (8, False), (16, False), (4000, False)):
        spoiled = bytearray(whole)
        spoiled[page * 4096 + at] ^= 1
        data.write_bytes(spoiled)
        assert btree.check(data).problem == ""
        expected = f"page {page} is not the head of a value" if is_bad else ""
        assert btree.problem_of_heads(data, values, None) == expected
    with pytest.raises(TimeoutError):
        btree.problem_of_heads(data, values, -1.0)


@given(seed=st.integers(0, 2**32), changes=st.integers(1, 40))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_in_a_file_looking_does_no_harm(store: Path, seed: int, changes: int) -> None:
    """Nothing is expected but an answer; the C tests do the same with sanitizers."""
    data = store / "data.mdb"
    whole = bytearray(data.read_bytes())
    rng = np.random.default_rng(seed)
    pages = pages_of_kind(bytes(whole), 1, 2)
    for _ in range(changes):
        at = int(rng.choice(pages)) * 4096 + int(rng.integers(0, 4096))
        size = int(rng.choice([1, 2, 8]))
        whole[at : at + size] = rng.bytes(size)
    spoiled = data.with_name("spoiled.mdb")
    spoiled.write_bytes(whole[: len(whole) - int(rng.integers(0, 2)) * 4096])
    trees = btree.check(spoiled)
    if not trees.problem:
        btree.problem_of_heads(spoiled, trees.values, None)


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
