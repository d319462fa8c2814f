"""Keeping a store in shape from outside: what goes, what stays, and who is in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockStore, ConfigError, Namespace, StoreBusy, StoreError
from kvstore.admin import inspect as admin
from kvstore.admin import upkeep
from kvstore.admin.access import open_for_reading
from kvstore.cli import main as cli
from kvstore.tier.ssd import database, files, opening, owner_lock
from kvstore.tier.ssd import tier as ssd_module
from kvstore.tier.ssd.tier import SsdTier
from tests.stores import (
    BLOCK,
    DENSE,
    assert_entries,
    entries_of,
    open_cache,
    tier_of,
    tokens_of,
    writer_of,
)


def nothing(done: int, total: int) -> None:
    pass


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for the layer of a container that the tests may run on."""
    messages = [record.message for record in caplog.records]
    return [message for message in messages if "use a volume" not in message]


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
        writer_of(cache).eviction.evict(gone)
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
    lock = owner_lock.try_lock(path)
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


# ---- compact -----------------------------------------------------------------------------------------


def holes(path: Path, **options: Any) -> int:
    """Make a store most of whose file is free; return the file's length."""
    fill(path, range(20), **options)
    upkeep.evict(path, "20%")
    return (path / "data.mdb").stat().st_size


def snapshot(path: Path, seeds: range) -> list[bytes]:
    """Return every frame that is left, as stored."""
    with open_for_reading(path) as store:
        return [store.ssd.frame(key) or b"" for key, _ in sorted(store.ssd.records())]


def test_compacting_gives_the_disk_its_space_back_and_changes_no_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    size = holes(path)
    before, frames = admin.store_stats(path), snapshot(path, range(20))
    with open_for_reading(path) as store:
        records = {key: replace(record, page=0) for key, record in store.ssd.records()}
        facts = store.ssd.facts("")
    assert cli.main(["compact", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_before"] == size
    assert found["bytes_after"] == (path / "data.mdb").stat().st_size < size // 2
    assert found["freed_bytes"] == size - found["bytes_after"]
    assert found["bytes_after"] < before["live_bytes"] * 1.1 + (64 << 12)
    with open_for_reading(path) as store:
        assert {k: replace(record, page=0) for k, record in store.ssd.records()} == records
        assert {**store.ssd.facts(""), "clean": b""} == {**facts, "clean": b""}
    after = admin.store_stats(path)
    assert [after[name] for name in ("blocks", "capacity_bytes", "namespaces")] == [
        before[name] for name in ("blocks", "capacity_bytes", "namespaces")
    ]
    assert snapshot(path, range(20)) == frames
    assert sorted(item.name for item in path.iterdir()) == [
        *("VERSION", "data.mdb", "lock.mdb", "owner.lock"),
    ]
    assert admin.verify_store(path, nothing)["bad_blocks"] == 0
    assert sum(hits(path, range(20))) == found["blocks"]


def test_hints_are_right_after_compacting(tmp_path: Path) -> None:
    """A read by a wrong hint would be right, and slow for ever."""
    path = tmp_path / "s"
    holes(path)
    upkeep.compact(path)
    with open_for_reading(path) as store:
        data = (path / "data.mdb").read_bytes()
        for key, record in store.ssd.records():
            at = record.page * 4096 + 16
            assert record.page > 0
            assert data[at : at + record.frame_bytes] == store.ssd.frame(key)


def test_a_compacted_store_takes_blocks_and_evicts_as_before(tmp_path: Path) -> None:
    path = tmp_path / "s"
    holes(path, ssd_bytes="2MiB")
    upkeep.compact(path)
    fill(path, range(100, 130), ssd_bytes="2MiB")
    assert hits(path, range(129, 130)) == [20]
    assert (path / "data.mdb").stat().st_size <= 2 << 20
    assert admin.verify_store(path, nothing)["bad_blocks"] == 0


def test_an_owner_may_compact_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    size = holes(path)
    with open_cache(path) as cache:
        tier_of(cache).compact()
        assert (path / "data.mdb").stat().st_blocks * 512 < size
        tokens = tokens_of(20 * BLOCK + 1, 77)
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 20 * BLOCK)
        assert tier_of(cache).fact("clean") == b"0"
    assert hits(path, range(77, 78)) == [20]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start processes that have a store open as readers until the test ends."""
    code = (
        "import sys; from tests.stores import *\n"
        "with open_cache(Path(sys.argv[1]), role='reader') as cache:\n"
        "    print(cache.lookup(tokens_of(20 * BLOCK + 1, 19)).hit_tokens, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    started: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{20 * BLOCK}\n"
        return process

    yield start
    for process in started:
        process.communicate()


def test_a_store_that_is_read_is_left_alone(tmp_path: Path, reader: Any) -> None:
    path = tmp_path / "s"
    size = holes(path)
    process = reader(path)
    with pytest.raises(StoreBusy, match="open in another process that reads it"):
        upkeep.compact(path)
    assert (path / "data.mdb").stat().st_size == size
    process.communicate()
    upkeep.compact(path)
    assert (path / "data.mdb").stat().st_size < size


def test_a_reader_that_comes_while_the_copy_is_made_keeps_the_old_file(
    tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    size = holes(path)
    real = SsdTier.find_hints

    def late(self: SsdTier) -> None:
        reader(path)
        real(self)

    monkeypatch.setattr(SsdTier, "find_hints", late)
    with pytest.raises(StoreBusy, match="open in another process"):
        upkeep.compact(path)
    assert (path / "data.mdb").stat().st_size == size
    assert not (path / "compacting").exists()
    fill(path, range(200, 202))
    assert hits(path, range(200, 202)) == [20, 20]


def test_a_reader_that_opens_during_the_exchange_gets_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path, range(2))
    other = tmp_path / "other"
    shutil.copytree(path, other)
    real = database.environment
    calls: list[Any] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        env = real(*args, **kwargs)
        if not calls:
            (other / "data.mdb").replace(path / "data.mdb")
        calls.append(env)
        return env

    monkeypatch.setattr(opening, "environment", slow)
    with open_cache(path, role="reader") as cache:
        assert len(calls) == 2
        ssd = tier_of(cache)
        assert os.fstat(ssd._file).st_ino == (path / "data.mdb").stat().st_ino


def test_an_owned_store_is_not_compacted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(1))
    lock = owner_lock.try_lock(path)
    assert lock is not None
    with pytest.raises(StoreBusy, match=r"owned by process \d+"):
        upkeep.compact(path)
    os.close(lock)


def test_a_disk_without_room_for_the_copy_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    size = holes(path)
    facts = os.statvfs(path)
    full = os.statvfs_result((*facts[:3], 10, 10, *facts[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(StoreError, match=rf"needs \d+ bytes free .* found {10 * facts.f_frsize}"):
        upkeep.compact(path)
    assert (path / "data.mdb").stat().st_size == size
    assert sum(hits(path, range(20))) > 0


@pytest.mark.parametrize("fault", ["copy", "count", "structure", "exchange"])
def test_a_copy_that_fails_or_is_wrong_leaves_the_store_as_it_was(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    size = holes(path)
    frames = snapshot(path, range(20))
    if fault == "exchange":

        def fails(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "exchange", fails)
    else:
        real = database.try_open

        def spoiled(folder: Path, *args: Any, **options: Any) -> Any:
            if folder.name == "compacting":
                with (folder / "data.mdb").open("r+b") as file:
                    if fault == "copy":
                        file.truncate(5 << 12)
                    elif fault == "structure":
                        file.seek(4 << 12)
                        file.write(b"\xff" * (8 << 12))
                tier, problem = real(folder, *args, **options)
                if fault == "count" and tier is not None:
                    tier.delete([next(iter(tier.records()))[0]])
                return tier, problem
            return real(folder, *args, **options)

        monkeypatch.setattr(ssd_module, "try_open", spoiled)
    with pytest.raises(StoreError, match=r"the store was not changed"):
        upkeep.compact(path)
    monkeypatch.undo()
    assert (path / "data.mdb").stat().st_size == size
    assert not (path / "compacting").exists()
    assert snapshot(path, range(20)) == frames


_KILLED = """
import os, sys
from pathlib import Path
from kvstore.admin import upkeep
from kvstore.tier.ssd import files
from kvstore.tier.ssd import tier as ssd

module, name = sys.argv[2].split(".")
owner = {"files": files, "tier": ssd.SsdTier}[module]
real = getattr(owner, name)

def die(*args, **kwargs):
    if sys.argv[3] == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), 9)

setattr(owner, name, die)
upkeep.compact(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "point",
    ["files.new_copy_folder", "tier._write_copy", "tier.find_hints", "files.exchange"],
)
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path, point: str, when: str) -> None:
    path = tmp_path / "s"
    size = holes(path)
    frames = snapshot(path, range(20))
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path), point, when], check=False)
    assert done.returncode == -9
    is_new = (point, when) == ("files.exchange", "after")
    assert ((path / "data.mdb").stat().st_size < size) == is_new
    assert snapshot(path, range(20)) == frames
    with open_cache(path) as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 0
        assert not (path / "compacting").exists()
    assert admin.verify_store(path, nothing)["bad_blocks"] == 0
    upkeep.compact(path)
    assert (path / "data.mdb").stat().st_size < size


# ---- a changed cap ---------------------------------------------------------------------------------


def test_a_lower_cap_evicts_and_compacts_when_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    fill(path, range(20))
    with open_cache(path, ssd_bytes="1MiB") as cache:
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["live_bytes"] <= 1 << 20
        assert stats["tiers"]["ssd"]["file_bytes"] <= 1 << 20
        assert stats["counters"]["evicted_blocks"]["ssd"] > 0
        assert stats["alarms"] == []
        assert (path / "data.mdb").stat().st_size <= 1 << 20
        with cache.lookup(tokens_of(20 * BLOCK + 1, 19)) as match:
            entries = cache.read(match)
            assert_entries(DENSE, entries, tokens_of(20 * BLOCK + 1, 19), 20 * BLOCK)
    assert not said(caplog)
    fill(path, range(50, 60), ssd_bytes="1MiB")
    assert (path / "data.mdb").stat().st_size <= 1 << 20


def test_a_file_that_somebody_reads_stays_large_which_is_said_once_and_an_alarm(
    tmp_path: Path, reader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    fill(path, range(20))
    process = reader(path)
    with open_cache(path, ssd_bytes="1MiB") as cache:
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["live_bytes"] <= 1 << 20 < stats["tiers"]["ssd"]["file_bytes"]
        (alarm,) = cache.stats()["alarms"]
        assert "more than ssd_bytes 1048576" in alarm
        assert "open in another process that reads it" in alarm
        assert said(caplog) == [alarm]
    process.communicate()
    with open_cache(path, ssd_bytes="1MiB") as cache:
        assert cache.stats()["alarms"] == []
    assert (path / "data.mdb").stat().st_size <= 1 << 20


def test_pins_above_a_lower_cap_stay_and_are_an_alarm(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = tokens_of(200 * BLOCK + 1)
    with open_cache(path) as cache:
        cache.store(tokens, entries_of(DENSE, tokens), wait=30, pin=True)
    with open_cache(path, ssd_bytes="1MiB") as cache:
        assert cache.lookup(tokens).hit_tokens == 200 * BLOCK
        assert "evict or unpin" in cache.stats()["alarms"][0]


def test_space_that_was_preallocated_beyond_a_lower_cap_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(1), ssd_bytes="8MiB", preallocate=True)
    assert (path / "data.mdb").stat().st_size == 8 << 20
    with open_cache(path, ssd_bytes="2MiB"):
        assert (path / "data.mdb").stat().st_size == 2 << 20
    assert hits(path, range(1)) == [20]


def test_a_higher_cap_takes_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, range(40), ssd_bytes="1MiB")
    few = admin.store_stats(path)["blocks"]
    fill(path, range(40, 80), ssd_bytes="4MiB")
    assert admin.store_stats(path)["blocks"] > 2 * few
