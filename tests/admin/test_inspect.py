"""Looking into a store from outside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import ImageSpan, Namespace, StoreError
from kvstore.admin import inspect as admin
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import head_sum
from kvstore.tier.ssd.values import Put
from tests.store.test_writer_faults import flip, payload_place
from tests.stores import BLOCK, DENSE, assert_entries, entries_of, open_cache, tier_of, tokens_of


def fill(path: Path) -> object:
    tokens = tokens_of(6 * BLOCK + 1)
    with open_cache(path) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        tenant = cache.scope(Namespace(model="test", tenant="b"))
        part = tokens[: 2 * BLOCK]
        image = [ImageSpan(1, 5, b"cat")]
        tenant.store(part, entries_of(DENSE, part), images=image)
    return tokens


def nothing(done: int, total: int) -> None:
    pass


def test_stats_counts_blocks_tokens_and_bytes_by_namespace(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    stats = admin.store_stats(tmp_path / "s")
    assert (stats["blocks"], stats["tokens"]) == (8, 8 * BLOCK)
    assert [(n["tenant"], n["blocks"], n["tokens"]) for n in stats["namespaces"]] == [
        ("", 6, 48),
        ("b", 2, 16),
    ]
    assert stats["layout"] == "tiny dense"
    assert stats["bytes_per_token"] == float(DENSE.bytes_per_token)
    assert stats["live_bytes"] <= stats["file_bytes"] <= stats["capacity_bytes"] == 8 << 20
    assert stats["ssd_bytes_per_token"] == stats["live_bytes"] / stats["tokens"]
    assert stats["owner_pid"] is None


def test_inspect_shows_a_block_and_its_parents(tmp_path: Path) -> None:
    tokens = fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        prefix = cache.probe(tokens).prefix  # type: ignore[arg-type]
    block = admin.inspect_block(tmp_path / "s", prefix.key(4).hex()[:12])
    assert block["number"] == 4
    assert block["tokens"] == [4 * BLOCK, 5 * BLOCK]
    assert block["header"]["block_hash"] == prefix.hashes[4].hex()
    assert block["header"]["parent_hash"] == prefix.hashes[3].hex()
    assert [parent["key"] for parent in block["parents"]] == [
        prefix.key(n).hex() for n in (3, 2, 1, 0)
    ]
    assert block["parent_count"] == 4
    assert block["chain_is_whole"]
    assert block["fault"] is None
    assert block["namespace"]["model"] == "test"
    with pytest.raises(ValueError, match="no block in .* starts with 'zz'"):
        admin.inspect_block(tmp_path / "s", "zz")
    with pytest.raises(ValueError, match="8 blocks in .* start with ''"):
        admin.inspect_block(tmp_path / "s", "")


def test_verify_finds_every_kind_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    assert admin.verify_store(path, nothing) == {
        "path": str(path),
        "blocks": 8,
        "bad_blocks": 0,
        "bad": [],
    }
    flip(path, payload_place(path, tokens, 2))
    with open_cache(path) as cache:
        ssd = tier_of(cache)
        prefix = cache.probe(tokens).prefix  # type: ignore[arg-type]
        frame = ssd.frame(prefix.key(3))
        assert frame is not None
        with ssd._env.begin(write=True) as txn:
            txn.put(prefix.key(4), frame, db=ssd._pay)
        ssd.amend([prefix.key(5)], number=9)
        names = {prefix.key(n).hex(): n for n in range(6)}
    found = admin.verify_store(path, nothing)
    assert {names[bad["key"]]: bad["fault"] for bad in found["bad"]} == {
        2: "checksum",
        4: "header",
        5: "identity",
    }


def test_the_negative_control_passes_every_check_but_has_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    with open_cache(path) as cache:
        ssd = tier_of(cache)
        prefix = cache.probe(tokens).prefix  # type: ignore[arg-type]
        mine, other = ssd.frame(prefix.key(2)), ssd.frame(prefix.key(3))
        record = ssd.record(prefix.key(2))
        assert mine is not None
        assert other is not None
        assert record is not None
        forged = FrameFormat(DENSE, BLOCK).forge(mine, other)
        record = replace(record, page=0, head_sum=head_sum(forged))
        ssd.put([Put(prefix.key(2), record, forged)])
        with cache.lookup(tokens) as match:  # type: ignore[arg-type]
            found = cache.read(match)
            assert found.tokens == 6 * BLOCK
            with pytest.raises(AssertionError, match="Mismatched elements"):
                assert_entries(DENSE, found, tokens, 6 * BLOCK)  # type: ignore[arg-type]
    assert admin.verify_store(path, nothing)["bad_blocks"] == 0


def test_what_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such directory"):
        admin.store_stats(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="is not a kvstore store"):
        admin.store_stats(tmp_path / "empty")
    fill(tmp_path / "above" / "rank-0-of-1")
    with pytest.raises(StoreError, match="there are stores in it: rank-0-of-1"):
        admin.store_stats(tmp_path / "above")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        admin.verify_store(tmp_path / "file", nothing)
    fill(tmp_path / "s")
    version = tmp_path / "s" / "VERSION"
    version.write_text(version.read_text().replace('"values":64', '"values":65'))
    with pytest.raises(StoreError, match="VERSION file is damaged"):
        admin.store_stats(tmp_path / "s")


def test_a_record_that_is_its_own_parent_ends_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = tokens_of(33)
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        tier = tier_of(cache)
        key = cache.lookup(tokens).prefix.key(2)
        tier.amend([key], parent=key)
    block = admin.inspect_block(path, key.hex())
    assert not block["chain_is_whole"]
    assert block["fault"] == "parent"


def test_a_namespace_fact_with_odd_values_is_still_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        fact = b'{"model": NaN, "tenant": 1e999, "id": "x", "weights": "w"}'
        tier_of(cache).set_fact("namespace:1", fact)
    (space,) = json.loads(json.dumps(admin.store_stats(path), allow_nan=False))["namespaces"]
    assert (space["id"], space["model"], space["weights"]) == (1, "?", "w")
