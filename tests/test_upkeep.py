"""Keeping a store in shape from outside: what goes, what stays, and who is in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockStore, ConfigError, Namespace, StoreBusy, StoreError, admin, cli, upkeep
from kvstore.tier import directory
from tests.stores import BLOCK, DENSE, assert_entries, entries_of, open_cache, owned, tokens_of


def nothing(done: int, total: int) -> None:
    pass


def fill(path: Path, seeds: range, blocks: int = 20, **options: Any) -> None:
    with open_cache(path, **options) as cache:
        for seed in seeds:
            tokens = tokens_of(blocks * BLOCK + 1, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
        cache.flush()


def hits(path: Path, seeds: range, blocks: int = 20) -> list[int]:
    """Blocks of each prompt that are left, all of them read and compared."""
    found = []
    with open_cache(path) as cache:
        for seed in seeds:
            tokens = tokens_of(blocks * BLOCK + 1, seed)
            with cache.lookup(tokens) as match:
                entries = cache.read(match)
                assert_entries(DENSE, entries, tokens, entries.tokens)
                found.append(entries.tokens // BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0
    return found


# ---- evict -------------------------------------------------------------------------------------------


def test_what_was_used_least_recently_goes_and_prefixes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(10))
    with open_cache(path) as cache:
        with cache.lookup(tokens_of(20 * BLOCK + 1, 0)) as match:
            assert match.hit_tokens == 20 * BLOCK
        stats = cache.stats()
    target = stats["tiers"]["ssd"]["live_bytes"] * 35 // 100
    found = upkeep.evict(path, str(target))
    assert found["is_reached"]
    assert found["live_bytes"] <= target
    assert found["evicted_blocks"] + found["blocks"] == 200
    assert found["evicted_bytes"] + found["live_bytes"] == stats["tiers"]["ssd"]["live_bytes"]
    left = hits(path, range(10))
    assert sum(left) == found["blocks"]
    assert left[0] == left[9] == 20
    assert left[1:7] == [0] * 6
    assert admin.verify_store(path, nothing)["bad_blocks"] == 0


def test_the_tier_evicts_the_same_blocks_by_itself(tmp_path: Path) -> None:
    """The order of the command is that of the tier."""
    for name in ("a", "b"):
        fill(tmp_path / name, range(8))
    before = admin.store_stats(tmp_path / "a")["live_bytes"]
    upkeep.evict(tmp_path / "a", str(before // 2))
    gone = 160 - admin.store_stats(tmp_path / "a")["blocks"]
    with open_cache(tmp_path / "b") as cache:
        owned(cache)._evict(gone)
    assert hits(tmp_path / "a", range(8)) == hits(tmp_path / "b", range(8))


def test_pins_keep_a_store_above_the_size_and_that_is_a_failed_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    fill(path, range(4))
    pinned = tokens_of(10 * BLOCK + 1, 2)
    with open_cache(path) as cache:
        cache.store(pinned, entries_of(DENSE, pinned), pin=True)
    assert cli.main(["evict", str(path), "--to", "0%", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["is_reached"], found["blocks"], found["evicted_blocks"]) == (False, 10, 70)
    assert err.startswith(f"kvstore: pinned blocks keep {path} above 0 bytes")
    assert hits(path, range(4)) == [0, 0, 10, 0]


def test_an_empty_store_is_as_small_as_it_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "s", range(1))
    for gone in (20, 0):
        assert cli.main(["evict", str(tmp_path / "s"), "--to", "0"]) == 0
        assert capsys.readouterr().out.startswith(f"{gone} blocks of ")


def test_a_share_is_one_of_the_cap_that_the_owner_gave(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(2), ssd_bytes="4MiB")
    found = upkeep.evict(tmp_path / "s", "12.5%")
    assert found["target_bytes"] == 512 << 10
    assert found["capacity_bytes"] == 4 << 20
    assert admin.store_stats(tmp_path / "s")["capacity_bytes"] == 4 << 20


@pytest.mark.parametrize("to", ["", "x", "-1", "101%", "%", "5 parsecs"])
def test_what_is_no_size_is_bad_usage_and_changes_nothing(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "s", range(1))
    with pytest.raises(ConfigError, match="--to must"):
        upkeep.evict(tmp_path / "s", to)
    assert cli.main(["evict", str(tmp_path / "s"), f"--to={to}"]) == 2
    assert hits(tmp_path / "s", range(1)) == [20]


def test_an_owned_store_is_busy_and_its_owner_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(1))
    with open_cache(path), pytest.raises(StoreBusy, match="open in this process"):
        upkeep.evict(path, "0")
    lock = directory.try_lock(path)
    assert lock is not None
    with pytest.raises(StoreBusy, match=r"owned by process \d+"):
        upkeep.evict(path, "0")
    os.close(lock)
    assert hits(path, range(1)) == [20]


def test_keyed_and_packed_stores_are_evicted_too(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path / "keyed", block_bytes=5000, ssd_bytes="4MiB") as store:
        store.put([f"k{i}" for i in range(50)], [bytes([i]) * 5000 for i in range(50)])
        store.flush()
    found = upkeep.evict(tmp_path / "keyed", "5%")
    assert 0 < found["blocks"] < 50
    with BlockStore.open(tmp_path / "keyed", block_bytes=5000, ssd_bytes="4MiB") as store:
        kept = [store.exists([f"k{i}"]) for i in range(50)]
        assert kept == [0] * (50 - found["blocks"]) + [1] * found["blocks"]
    fill(tmp_path / "packed", range(2), ssd_formats={"v": "nvfp4"})
    assert upkeep.evict(tmp_path / "packed", "100kB")["is_reached"]
    assert admin.verify_store(tmp_path / "packed", nothing)["bad_blocks"] == 0


def test_there_must_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such directory"):
        upkeep.evict(tmp_path / "none", "1GiB")
    assert not (tmp_path / "none").exists()


def test_a_store_that_is_cut_off_is_left_to_its_owner(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(1))
    data = tmp_path / "s" / "data.mdb"
    data.write_bytes(data.read_bytes()[: 3 << 12])
    with pytest.raises(StoreError, match="cannot be read"):
        upkeep.evict(tmp_path / "s", "0")


def test_namespaces_are_not_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(2))
    fill(path, range(2), namespace=Namespace(model="test", tenant="b"))
    assert upkeep.evict(path, "0")["evicted_blocks"] == 80
