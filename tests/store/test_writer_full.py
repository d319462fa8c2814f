"""A full disk, file or quota of the file system: eviction, no read-only store, recovery."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest

from kvstore import PrefixCache, StoreError
from kvstore.store.commit import FULL_RETRIES, RETRY_EVICTION_BLOCKS
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tier_of, tokens_of, writer_of

PROMPT = 4 * BLOCK


def keep(cache: PrefixCache, seed: int) -> int:
    """Store a prompt of four blocks and wait for its commit; return how many tokens are a hit."""
    tokens = tokens_of(PROMPT + 1, seed)
    cache.store(tokens, entries_of(DENSE, tokens))
    writer_of(cache).queue.drain()
    return cache.probe(tokens).hit_tokens


def of_lmdb(code: int) -> lmdb.Error:
    error: Any = lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")
    error.code = code  # as the module does
    return cast("lmdb.Error", error)


NO_ROOM = [
    lmdb.MapFullError("full"),
    lmdb.DiskError("No space left on device"),
    *(OSError(code, "x") for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *(of_lmdb(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=repr)
def test_want_of_room_is_known_by_its_code(tmp_path: Path, error: Exception) -> None:
    with open_cache(tmp_path / "s") as cache:
        assert tier_of(cache).lacks_room(error, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_error_of_input_and_output_asks_the_file_system(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB reports every short write as EIO, whatever its cause."""
    with open_cache(tmp_path / "s") as cache:
        ssd = tier_of(cache)
        assert not ssd.lacks_room(of_lmdb(errno.EIO), 1)
        assert not ssd.lacks_room(lmdb.Error("File too large, No space left on device"), 1)

        def refused(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", refused)
        assert ssd.lacks_room(of_lmdb(errno.EIO), 1)
        assert not ssd.lacks_room(of_lmdb(errno.EACCES), 1)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit files of this process to ``size`` bytes; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full_tmpfs(folder: Path) -> Iterator[None]:
    """Leave 64 KiB on a file system of two MiB."""
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - (64 << 10)))
    try:
        yield
    finally:
        ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "kvstore-test", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only who may mount a file system has a small one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def use(cache: PrefixCache, limit: Any) -> None:
    """Store far more than fits under a limit, then continue without it."""
    with limit:
        hits = [keep(cache, seed) for seed in range(60)]
        assert sum(hits) > 20 * PROMPT, "what is old goes for what is new"
        assert not cache.stats()["tiers"]["ssd"]["is_read_only"]
        with suppress(StoreError):
            cache.flush()
    assert [keep(cache, seed) for seed in range(100, 104)] == [PROMPT] * 4
    cache.flush()
    stats = cache.stats()
    assert not stats["tiers"]["ssd"]["is_read_only"]
    assert not stats["alarms"]


def test_a_file_at_its_largest_size_goes_on_within_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="8MiB") as cache:
        use(cache, largest_file(640 << 10))
    with open_cache(tmp_path / "s") as cache:
        assert cache.probe(tokens_of(PROMPT + 1, 103)).hit_tokens == PROMPT
        assert cache.stats()["counters"]["quarantined_stores"] == 0


def test_a_full_disk_goes_on_within_what_it_has(small_disk: Path) -> None:
    with open_cache(small_disk / "s", ssd_bytes="8MiB") as cache:
        for seed in range(200, 210):
            keep(cache, seed)
        use(cache, full_tmpfs(small_disk))


def test_a_disk_that_others_fill_neither_empties_the_store_nor_ends_writing(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        for seed in range(30):
            keep(cache, seed)
        before = cache.stats()["tiers"]["ssd"]["blocks"]
        with tier_of(cache).failing("put", of_lmdb(errno.EDQUOT)):
            assert [keep(cache, seed) for seed in range(100, 110)] == [0] * 10
            cache.flush()  # it only keeps recency for later
            gone = before - cache.stats()["tiers"]["ssd"]["blocks"]
            assert gone == FULL_RETRIES * RETRY_EVICTION_BLOCKS, "evicted for the first commit only"
        assert keep(cache, 200) == PROMPT


# ---- space taken ahead -------------------------------------------------------------------------------


def taken(path: Path) -> int:
    """Bytes on disk of everything below a folder."""
    return sum(item.stat().st_blocks * 512 for item in path.rglob("*"))


def test_more_than_is_free_is_refused_with_both_sizes_and_nothing_taken(small_disk: Path) -> None:
    with pytest.raises(
        StoreError, match=r"8388608 bytes of ssd_bytes, 8388608 bytes more"
    ) as error:
        open_cache(small_disk / "s", ssd_bytes="8MiB", preallocate=True)
    found = re.search(r"found (\d+) free; nothing was allocated", str(error.value))
    assert found is not None
    assert 1 << 20 < int(found[1]) <= 2 << 20
    assert taken(small_disk / "s") <= 4096  # the lock file
    with open_cache(small_disk / "s", ssd_bytes="1MiB", preallocate=True) as cache:
        assert keep(cache, 0) == PROMPT
        assert taken(small_disk / "s") >= 1 << 20


def test_what_the_file_has_already_is_not_asked_for_again(small_disk: Path) -> None:
    for _ in range(2):
        with open_cache(small_disk / "s", ssd_bytes="1800KiB", preallocate=True) as cache:
            keep(cache, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_allocation_that_fails_half_way_is_undone(
    tmp_path: Path, code: int, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space does not show a quota: the allocation meets it."""
    path = tmp_path / "s"
    if not is_new:
        with open_cache(path) as cache:
            keep(cache, 0)
    before = taken(path)
    real = os.posix_fallocate

    def half(fd: int, first: int, size: int) -> None:
        real(fd, first, size // 2)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        with pytest.raises(
            StoreError, match=f"refused: {os.strerror(code)}; nothing was allocated"
        ):
            open_cache(path, ssd_bytes="8MiB", preallocate=True)
    assert taken(path) <= before + (128 << 10)  # some pages of trees, of the 8 MiB
    with open_cache(path) as cache:
        assert cache.probe(tokens_of(PROMPT + 1)).hit_tokens == (0 if is_new else PROMPT)
        assert cache.stats()["counters"]["quarantined_stores"] == 0


def test_a_limit_of_a_files_size_is_named(tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(StoreError, match="refused: File too large"):
        open_cache(tmp_path / "s", ssd_bytes="8MiB", preallocate=True)
    assert taken(tmp_path / "s") < 128 << 10


def test_a_system_that_takes_no_space_ahead_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    with open_cache(tmp_path / "s", preallocate=True) as cache:
        assert keep(cache, 0) == PROMPT
    assert sum("cannot be allocated now" in line for line in caplog.messages) == 1


def test_a_reader_takes_no_space(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        keep(cache, 0)
    before = taken(tmp_path / "s")
    with open_cache(tmp_path / "s", role="reader", ssd_bytes="1TiB", preallocate=True):
        assert taken(tmp_path / "s") == before
