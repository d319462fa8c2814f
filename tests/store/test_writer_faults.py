"""Faults of medium, disk and process: a block is recomputed, wrong bytes are never returned, nothing crashes."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import StoreError
from kvstore.frame.format import FrameFormat
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

COUNT = 12 * BLOCK + 1


def fill(path: Path) -> np.ndarray[Any, np.dtype[np.uint32]]:
    tokens = tokens_of(COUNT)
    with open_cache(path) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
    return tokens


def payload_place(path: Path, tokens: Any, number: int) -> int:
    """Offset in the file of a byte in the middle of a block's payload."""
    with open_cache(path) as cache:
        record = tier_of(cache).record(cache.probe(tokens).prefix.key(number))
    assert record is not None
    assert record.page > 0
    form = FrameFormat(DENSE, BLOCK)
    return record.page * 4096 + 16 + form.payload_offset + form.payload_bytes // 2


def flip(path: Path, offset: int) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("number", [0, 5, 11])
def test_a_flipped_bit_shortens_the_hit_and_is_replaced_by_a_fresh_block(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    flip(path, payload_place(path, tokens, number))
    with open_cache(path) as cache:
        for attempt in range(2):
            with cache.lookup(tokens) as match:
                assert match.hit_tokens == (12 if attempt == 0 else number) * BLOCK
                found = cache.read(match)
                assert found.tokens == match.hit_tokens == number * BLOCK
                assert_entries(DENSE, found, tokens, number * BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"] == {"checksum": 1, "total": 1}
        assert cache.stats()["tiers"]["ssd"]["blocks"] == number
        assert sum("unusable" in record.message for record in caplog.records) == 1
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 12 * BLOCK)


def test_a_load_into_pages_stops_at_a_bad_block_too(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    flip(path, payload_place(path, tokens, 4))
    with open_cache(path, device_bytes="1MiB") as cache, cache.lookup(tokens) as match:
        pages = cache.load(match)
        assert pages.tokens == match.hit_tokens == 4 * BLOCK
        assert cache.device.free_pages == cache.device.page_count - 4
        pages.release()


def test_a_collision_of_keys_is_a_miss(tmp_path: Path) -> None:
    """Another block's intact frame under this key: only the identity check finds it."""
    path = tmp_path / "s"
    tokens = fill(path)
    other = tokens_of(COUNT, seed=1)
    with open_cache(path) as cache:
        cache.store(other, entries_of(DENSE, other))
        cache.flush()
        ssd = tier_of(cache)
        mine, theirs = (cache.probe(t).prefix.key(3) for t in (tokens, other))
        frame = ssd.frame(theirs)
        assert frame is not None
        with ssd._env.begin(write=True) as txn:
            txn.put(mine, frame, db=ssd._pay)
        ssd.amend([mine], page=0)
        with cache.lookup(tokens) as match:
            assert cache.read(match).tokens == 3 * BLOCK
        assert cache.stats()["counters"]["corrupt_blocks"]["identity"] == 1


def test_a_stale_hint_costs_a_second_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    with open_cache(path) as cache:
        ssd = tier_of(cache)
        prefix = cache.probe(tokens).prefix
        wrong = ssd.record(prefix.key(1))
        assert wrong is not None
        ssd.amend([prefix.key(0), prefix.key(2)], page=wrong.page)
        ssd.amend([prefix.key(3)], page=1 << 40)
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 12 * BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0


def test_hints_are_written_down_and_right(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = fill(path)
    form = FrameFormat(DENSE, BLOCK)
    with open_cache(path) as cache:
        ssd = tier_of(cache)
        prefix = cache.probe(tokens).prefix
        for number in range(12):
            record = ssd.record(prefix.key(number))
            assert record is not None
            with (path / "data.mdb").open("rb") as file:
                file.seek(record.page * 4096 + 16)
                frame = memoryview(file.read(form.frame_bytes))
            assert form.fault(frame, prefix.hashes[number], prefix.parent_hash(number),
                              prefix.block_ids(number)) is None  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [lmdb.MapFullError("full"), lmdb.DiskError("No space left on device")],
    ids=["map full", "disk full"],
)
def test_a_full_medium_is_retried_once_after_evicting_a_little(
    tmp_path: Path, error: BaseException
) -> None:
    with open_cache(tmp_path / "s") as cache:
        old, new = tokens_of(20 * BLOCK + 1, 1), tokens_of(4 * BLOCK + 1, 2)
        cache.store(old, entries_of(DENSE, old))
        cache.flush()
        tier_of(cache).fail("put", error)
        cache.store(new, entries_of(DENSE, new))
        cache.flush()
        assert cache.lookup(new).hit_tokens == 4 * BLOCK
        assert cache.lookup(old).hit_tokens == 4 * BLOCK
        assert cache.stats()["counters"]["write_errors"] == 0


def test_three_failed_commits_make_the_tier_read_only_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        failing = tier_of(cache).fail("put", *[OSError(errno.EIO, "I/O error")] * 3)
        for seed in range(1, 4):
            lost = tokens_of(BLOCK + 1, seed)
            cache.store(lost, entries_of(DENSE, lost))
            writer_of(cache).queue.drain()
            assert cache.lookup(lost).hit_tokens == 0
        assert failing == []
        more = tokens_of(BLOCK, 9)
        assert cache.store(more, entries_of(DENSE, more)).dropped == 1
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["is_read_only"]
        assert stats["counters"]["dropped_blocks"] == {"write_error": 4, "total": 4}
        assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)


def test_a_failed_commit_never_leaves_a_child_without_its_parent(tmp_path: Path) -> None:
    tokens = tokens_of(300 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        tier_of(cache).fail("put", OSError(errno.EIO, "I/O error"))
        cache.store(tokens, entries_of(DENSE, tokens), wait=30)
        cache.flush()
        index = writer_of(cache).index
        assert index.blocks == tier_of(cache).block_count == 0
        assert cache.stats()["counters"]["dropped_blocks"]["no_parent"] > 0


def test_a_bug_in_a_commit_surfaces_at_flush_and_the_writer_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        tier_of(cache).fail("put", RuntimeError("a bug"))
        cache.store(tokens, entries_of(DENSE, tokens))
        with pytest.raises(StoreError, match="a bug"):
            cache.flush()
        assert cache.store(tokens, entries_of(DENSE, tokens)).present == 0
        cache.flush()
        assert cache.lookup(tokens).hit_tokens == 2 * BLOCK


def test_failed_deletes_are_made_up_for(tmp_path: Path) -> None:
    tokens = tokens_of(10 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        ssd = tier_of(cache)
        with ssd.failing("delete", lmdb.DiskError("I/O error")):
            cache.clear()
        assert ssd.block_count == 10
        again = tokens[: 3 * BLOCK]
        cache.store(again, entries_of(DENSE, again))
        cache.flush()
        cache.clear(cache.scope(cache.namespace))
        assert ssd.block_count == 0


def test_a_failed_delete_is_not_forgotten_for_a_store_that_fails_too(tmp_path: Path) -> None:
    """The block would stay on the medium without an index entry, and become an orphan with its parent's eviction."""
    tokens = tokens_of(10 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        ssd = tier_of(cache)
        with ssd.failing("delete", lmdb.DiskError("I/O error")):
            cache.clear()
            ssd.fail("put", OSError(errno.EIO, "I/O error"))
            again = tokens[: 3 * BLOCK]
            cache.store(again, entries_of(DENSE, again))
            writer_of(cache).queue.drain()
        cache.clear()
        assert ssd.block_count == 0


_KILLED = """
import sys
from tests.stores import *
with open_cache(Path(sys.argv[1]), ssd_bytes="2MiB") as cache:
    seed = int(sys.argv[2])
    while True:
        tokens = tokens_of(25 * BLOCK + 1, seed)
        cache.store(tokens, entries_of(DENSE, tokens), wait=10)
        cache.flush()
        print(seed, flush=True)
        seed += 1
"""


def test_kill_9_loses_no_flushed_block_and_keeps_metadata_and_payload_together(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    seed = 0
    for cycle in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(path), str(seed)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            done = [int(writer.stdout.readline()) for _ in range(3 + cycle)]
            time.sleep(0.002 * cycle)
            writer.send_signal(signal.SIGKILL)
            done += [int(line) for line in writer.stdout.read().split()]
        with open_cache(path, ssd_bytes="2MiB") as cache:
            assert cache.role == "owner"
            assert cache.stats()["counters"]["quarantined_stores"] == 0
            last = tokens_of(25 * BLOCK + 1, done[-1])
            with cache.lookup(last) as match:
                assert match.hit_tokens == 25 * BLOCK
                assert_entries(DENSE, cache.read(match), last, 25 * BLOCK)
            for old in range(done[-1] + 2):
                tokens = tokens_of(25 * BLOCK + 1, old)
                with cache.lookup(tokens) as match:
                    found = cache.read(match)
                    assert_entries(DENSE, found, tokens, found.tokens)
            assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0
        seed = done[-1] + 1


def test_the_file_stays_below_its_cap_while_it_turns_over(tmp_path: Path) -> None:
    cap = 2 << 20
    with open_cache(tmp_path / "s", ssd_bytes=cap) as cache:
        rng = np.random.default_rng(0)
        for seed in range(120):
            tokens = tokens_of(int(rng.integers(1, 60)) * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
        cache.flush()
        stats = cache.stats()
        assert stats["counters"]["evicted_blocks"]["ssd"] > 2000
        assert stats["counters"]["write_errors"] == 0
        assert stats["counters"]["dropped_blocks"]["total"] == 0
        assert stats["tiers"]["ssd"]["file_bytes"] <= cap
        assert (tmp_path / "s" / "data.mdb").stat().st_size <= cap


class Watched:
    """An environment that records its write transactions and syncs; the next syncs or commits fail."""

    def __init__(self, ssd: SsdTier, failing: int = 0, failing_commits: int = 0) -> None:
        self.real, self.failing, self.failing_commits = ssd._env, failing, failing_commits
        self.done: list[str] = []
        ssd._env = self  # type: ignore[assignment]

    def begin(self, **options: Any) -> Any:
        if not options.get("write"):
            return self.real.begin(**options)
        self.done.append("commit")
        self.failing_commits -= 1
        return self.real.begin(**options) if self.failing_commits < 0 else self.refused(options)

    @contextmanager
    def refused(self, options: dict[str, Any]) -> Iterator[Any]:
        with self.real.begin(**options) as txn:
            yield txn
            raise lmdb.Error("mdb_txn_commit: Input/output error")

    def sync(self, force: bool) -> None:
        self.failing -= 1
        if self.failing >= 0:
            raise lmdb.Error("mdb_env_sync: Input/output error")
        self.done.append("sync")
        self.real.sync(force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def test_after_a_failed_sync_the_next_promise_takes_a_commit_and_a_sync(tmp_path: Path) -> None:
    """The kernel may have dropped unsynced pages: a second sync alone proves nothing."""
    tokens, more = tokens_of(4 * BLOCK + 1), tokens_of(2 * BLOCK + 1, 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        env = Watched(tier_of(cache), failing=1)
        with pytest.raises(StoreError, match="cannot be synced"):
            cache.flush()
        env.done.clear()
        cache.flush()
        assert env.done == ["commit", "sync", "sync"]
        env.done.clear()
        cache.store(more, entries_of(DENSE, more))
        cache.flush()
        assert env.done == ["commit", "sync"], "healed once"
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_a_failed_commit_is_followed_by_one_that_is_synced_before_anything_else(
    tmp_path: Path,
) -> None:
    tokens, more = tokens_of(4 * BLOCK + 1), tokens_of(2 * BLOCK + 1, 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        env = Watched(tier_of(cache), failing_commits=1)
        cache.store(more, entries_of(DENSE, more))
        cache.flush()
        assert env.done == ["commit", "commit", "sync", "sync"]
        assert cache.stats()["counters"]["write_errors"] == 1
        assert cache.lookup(more).hit_tokens == 0
        cache.store(more, entries_of(DENSE, more))
        cache.flush()
        assert env.done[4:] == ["commit", "sync"], "healed once"
        assert cache.lookup(more).hit_tokens == 2 * BLOCK
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_a_second_failed_sync_ends_writing_until_the_store_is_reopened(tmp_path: Path) -> None:
    """Another commit could overwrite pages of the last state on disk."""
    tokens, more = tokens_of(4 * BLOCK + 1), tokens_of(2 * BLOCK + 1, 1)
    path = tmp_path / "s"
    with open_cache(path) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        env = Watched(tier_of(cache), failing=2)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be synced"):
                cache.flush()
        env.done.clear()
        cache.store(more, entries_of(DENSE, more))
        with pytest.raises(StoreError, match="cannot be synced"):
            cache.flush()
        assert env.done == []
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)
        with pytest.raises(StoreError, match="cannot be synced"):
            cache.close()
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK
        cache.store(more, entries_of(DENSE, more))
        cache.flush()
        assert cache.lookup(more).hit_tokens == 2 * BLOCK


_KILLED_READER = """
import os, signal, sys
from tests.stores import *
with open_cache(Path(sys.argv[1]), role="reader", ssd_bytes="1MiB") as cache:
    txn = tier_of(cache)._env.begin()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_killed_in_the_middle_of_a_read_does_not_fill_the_map(tmp_path: Path) -> None:
    """Its slot would keep all pages freed since, until the store is reopened."""
    path = tmp_path / "s"
    with open_cache(path, ssd_bytes="1MiB") as cache:
        cache.store(tokens_of(BLOCK), entries_of(DENSE, tokens_of(BLOCK)))
        cache.flush()
        subprocess.run([sys.executable, "-c", _KILLED_READER, str(path)], check=False, timeout=60)
        for seed in range(200):
            tokens = tokens_of(4 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
            if seed % 8 == 0:
                cache.flush()
        cache.flush()
        counters = cache.stats()["counters"]
        assert counters["evicted_blocks"]["ssd"] > 400
        assert counters["write_errors"] == counters["dropped_blocks"]["total"] == 0


def test_a_map_without_room_for_uses_fails_no_flush(tmp_path: Path) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        writer_of(cache).queue.drain()
        cache.lookup(tokens)
        failing = tier_of(cache).fail("put", lmdb.MapFullError("full"))
        cache.flush()
        assert failing == []
        assert writer_of(cache).retention.uses, "uses wait for the next commit"
        assert cache.stats()["counters"]["write_errors"] == 0


def test_a_reader_that_is_stuck_neither_empties_the_store_nor_ends_writing(tmp_path: Path) -> None:
    """The reader keeps all freed pages: eviction does not help, and the disk has not failed."""
    with open_cache(tmp_path / "s") as cache:
        old = tokens_of(100 * BLOCK + 1)
        cache.store(old, entries_of(DENSE, old))
        cache.flush()
        failing = tier_of(cache).fail("put", *[lmdb.MapFullError("full")] * 40)
        for seed in range(1, 11):
            tokens = tokens_of(BLOCK + 1, seed)
            cache.store(tokens, entries_of(DENSE, tokens))
            writer_of(cache).queue.drain()
        stats = cache.stats()
        assert not stats["tiers"]["ssd"]["is_read_only"]
        assert stats["counters"]["dropped_blocks"]["write_error"] == 10
        assert stats["counters"]["evicted_blocks"]["ssd"] == 48, "three times 16, once"
        failing.clear()
        last = tokens_of(BLOCK + 1, 11)
        cache.store(last, entries_of(DENSE, last))
        cache.flush()
        assert cache.lookup(last).hit_tokens == BLOCK
