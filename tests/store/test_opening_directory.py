"""Opening a directory: foreign and damaged files are refused or set aside, and files are private."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import BlockStore, ConfigError, LayoutMismatch, StoreError
from kvstore.admin import upkeep
from kvstore.frame.format import FrameFormat
from tests.store.test_writer_faults import fill, flip, payload_place
from tests.stores import (
    BLOCK,
    DENSE,
    WINDOWED,
    assert_entries,
    entries_of,
    open_cache,
    tier_of,
)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5000],
        lambda data: b"\xff" * len(data),
        lambda data: data[:4096] + b"\x00" * (len(data) - 4096),
        lambda data: np.random.default_rng(0).bytes(len(data)),
    ],
    ids=["half", "one page", "ones", "zeros", "noise"],
)
def test_a_corrupt_data_file_is_set_aside_and_the_cache_starts_empty(
    tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    data = path / "data.mdb"
    data.write_bytes(spoil(data.read_bytes()))
    (tmp_path / "s.bad-20200101T000000").mkdir()
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 0
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        assert sum("was broken" in record.message for record in caplog.records) == 1
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 12 * BLOCK)
    aside = list(tmp_path.glob("s.bad-*"))
    assert len(aside) == 1
    assert aside[0].name != "s.bad-20200101T000000"
    with open_cache(path) as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 0


def test_the_last_value_cut_off_is_found_at_open(tmp_path: Path) -> None:
    """LMDB's own verifier does not see it, and reading it would be SIGBUS."""
    path = tmp_path / "s"
    tokens = fill(path)
    with open_cache(path) as cache:
        size = cache.stats()["tiers"]["ssd"]["file_bytes"]
    os.truncate(path / "data.mdb", size - 4096)
    with open_cache(path) as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        assert cache.lookup(tokens).hit_tokens == 0


def test_another_layout_is_refused_and_the_store_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    for options in ({"layout": WINDOWED}, {"layout": DENSE, "block_tokens": 2 * BLOCK}):
        for role in ("auto", "owner", "reader"):
            with pytest.raises(LayoutMismatch, match=r"left untouched[\s\S]*found[\s\S]*expected"):
                open_cache(path, **options, role=role)
    after = {item.name: item.read_bytes() for item in path.iterdir()}
    assert {n: b for n, b in before.items() if n != "owner.lock"} == {
        n: b for n, b in after.items() if n != "owner.lock"
    }
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 12 * BLOCK


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file, expected a directory"):
        open_cache(path)
    with pytest.raises(StoreError, match="is a file"):
        open_cache(path, role="reader")
    assert path.read_text() == "mine"


def test_someone_elses_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(StoreError, match="is not a kvstore store"):
        open_cache(path)
    assert (path / "data.mdb").read_bytes() == before
    assert list(tmp_path.glob("*.bad-*")) == []


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"writable by others \(mode 0777\), .*run chmod 700"):
        open_cache(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    version = path / "VERSION"
    version.write_text(version.read_text().replace("kvstore 1", "kvstore 9"))
    with pytest.raises(StoreError, match="another version: found 'kvstore 9'"):
        open_cache(path)


def test_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {item.name: item.stat().st_mode & 0o777 for item in path.iterdir()} == dict.fromkeys(
        ("data.mdb", "lock.mdb", "owner.lock", "VERSION"), 384
    )


def test_files_are_private_whatever_the_umask_and_after_compacting(tmp_path: Path) -> None:
    path, mask = tmp_path / "s", os.umask(0)
    try:
        fill(path)
        upkeep.compact(path)
        with BlockStore.open(tmp_path / "b", block_bytes=64, ssd_bytes="8MiB", secret=True):
            pass
        found = {item: item.stat().st_mode & 0o777 for item in tmp_path.rglob("*")}
    finally:
        os.umask(mask)
    folders = (path, tmp_path / "b")
    assert {found[folder] for folder in folders} == {0o700}
    assert {mode for item, mode in found.items() if item not in folders} == {0o600}


def test_a_missing_parent_record_is_found_at_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    with open_cache(path) as cache:
        tier_of(cache).delete([cache.probe(tokens).prefix.key(7)])
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 7 * BLOCK
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 7
        assert cache.stats()["counters"]["dropped_blocks"]["orphan"] == 4
        assert "had no parent" in caplog.text


def test_preallocation_takes_the_space_at_open(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="4MiB", preallocate=True):
        facts = (tmp_path / "s" / "data.mdb").stat()
        assert facts.st_blocks * 512 >= facts.st_size == 4 << 20
    with open_cache(tmp_path / "s", ssd_bytes="4MiB") as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 0


def test_names_are_synced_before_anything_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a synced file is lost if its directory is not synced too."""
    path = tmp_path / "new" / "s"
    synced: list[tuple[str, frozenset[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        folder = Path(f"/proc/self/fd/{fd}").resolve()
        if folder.is_dir():
            synced.append((folder.name, frozenset(item.name for item in folder.iterdir())))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with open_cache(path):
        pass
    files = [names for folder, names in synced if folder == "s"]
    assert any("VERSION" in names and "data.mdb" not in names for names in files)
    assert {"VERSION", "data.mdb"} <= files[-1]
    assert any(folder == "new" and "s" in names for folder, names in synced)
    assert any(folder == tmp_path.name and "new" in names for folder, names in synced)


def test_a_directory_that_knows_no_sync_holds_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    tokens = fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        assert cache.lookup(tokens).hit_tokens == 12 * BLOCK


def test_damage_that_a_write_meets_is_looked_for_at_the_next_opening(tmp_path: Path) -> None:
    """Only deletes read the head of a value: without the check the store would stay full."""
    path = tmp_path / "s"
    tokens = fill(path)
    form = FrameFormat(DENSE, BLOCK)
    middle = form.payload_offset + form.payload_bytes // 2
    flip(path, payload_place(path, tokens, 5) - middle - 16 + 2)  # its number of a page
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 12 * BLOCK
        cache.clear()
        assert cache.stats()["counters"]["write_errors"] > 0
    with open_cache(path) as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 0
