"""Transient errors: a miss while they last, and no block is lost."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import BlockStore, PrefixCache, StoreError
from kvstore.cli.main import main
from kvstore.store.failures import RETRY_SECONDS, WRITE_ERRORS_TO_READ_ONLY
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, is_transient
from kvstore.tier.ssd.tier import SsdTier
from tests.builders import Clock
from tests.stores import (
    BLOCK,
    DENSE,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tier_of,
    tokens_of,
    writer_of,
)

SLOTS = 512

PASSING = [
    lmdb.ReadersFullError("readers"),
    lmdb.TlsFullError("keys of threads"),
    lmdb.MapResizedError("resized"),
    lmdb.BadRslotError("slot"),
    OSError(errno.ENOMEM, "memory"),
    OSError(errno.EMFILE, "descriptors"),
    OSError(errno.ENFILE, "descriptors of all"),
    OSError(errno.EAGAIN, "again"),
    OSError(errno.EINTR, "interrupted"),
]
DAMAGE = [lmdb.CorruptedError("bad"), lmdb.PageNotFoundError("gone"), OSError(errno.EIO, "I/O")]


def name(error: BaseException) -> str:
    return type(error).__name__ + str(getattr(error, "errno", ""))


def put(cache: PrefixCache, seed: int, count: int = 4) -> tuple[NDArray[np.uint32], int]:
    """Store a prompt and wait for its commit; return it, and how many blocks were taken."""
    tokens = tokens_of(count * BLOCK + 1, seed)
    cache.store(tokens[:-1], entries_of(DENSE, tokens[:-1]), wait=30)
    writer_of(cache).queue.drain()
    return tokens, cache.probe(tokens).hit_tokens // BLOCK


def read(cache: PrefixCache, tokens: NDArray[np.uint32]) -> int:
    """Read a prompt; return how many blocks came, all of them right."""
    with cache.lookup(tokens) as match:
        found = cache.read(match)
    assert_entries(DENSE, dict(found), tokens, found.tokens)
    return found.tokens // BLOCK


TAKER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_spare_txns=0, max_dbs=8)
taken = []
try:
    while True:
        taken.append(env.begin())
except lmdb.ReadersFullError:
    print(len(taken), flush=True)
sys.stdin.read()
"""


@contextmanager
def all_slots_taken(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold every slot of a store's readers."""
    command = [sys.executable, "-c", TAKER, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as taker:
        assert taker.stdout is not None
        assert int(taker.stdout.readline()) > SLOTS - 8
        yield taker
        taker.kill()


@pytest.mark.parametrize("way", ["ended", "killed"])
def test_with_all_slots_taken_no_block_is_lost_and_writing_resumes_by_itself(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        old = [put(cache, seed)[0] for seed in range(5)]
        with all_slots_taken(path) as taker:
            for tokens in old:
                assert read(cache, tokens) == 0
            lost = [put(cache, seed)[0] for seed in range(10, 20)]
            assert [read(cache, tokens) for tokens in lost] == [0] * 10
            with pytest.raises(StoreError, match="READERS_FULL"):
                cache.stats()
            if way == "ended":
                taker.communicate("")
        assert [read(cache, tokens) for tokens in old] == [4] * 5
        again, taken = put(cache, 10)
        assert (taken, read(cache, again)) == (4, 4)
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["blocks"] == 24
        assert not stats["tiers"]["ssd"]["is_read_only"]
        assert stats["counters"]["corrupt_blocks"]["total"] == 0
        assert stats["counters"]["passing_errors"] >= 5
        assert stats["alarms"] == []


def test_slots_of_killed_readers_are_cleared_when_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens, _ = put(cache, 1)
        with all_slots_taken(path) as taker:
            taker.kill()
            taker.wait()
            assert read(cache, tokens) == 4
        assert cache.stats()["counters"]["passing_errors"] == 0


def test_a_store_without_a_free_slot_is_left_as_it_is_and_opens_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens, _ = put(cache, 1)
    with all_slots_taken(path):
        for role in ("owner", "reader"):
            with pytest.raises(StoreError, match="READERS_FULL"):
                open_cache(path, role=role)
        assert main(["stats", str(path)]) == 2
        assert "try again when readers, memory or descriptors are free" in capsys.readouterr().err
    with open_cache(path, role="owner") as cache:
        assert read(cache, tokens) == 4
        assert cache.stats()["counters"]["quarantined_stores"] == 0


# ---- each error in each place --------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let every transaction that reads fail with an error."""

    def fail(*_args: Any, **_options: Any) -> Any:
        raise error

    monkeypatch.setattr(SsdTier, "_begin", fail)


@pytest.mark.parametrize("error", [*PASSING, *DAMAGE], ids=name)
def test_a_read_that_fails_costs_a_block_only_where_it_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    is_passing = error in PASSING
    with open_cache(tmp_path / "s") as cache:
        tokens, _ = put(cache, 1)
        with monkeypatch.context() as patched:
            broken(patched, error)
            assert read(cache, tokens) == 0
            match = cache.lookup(tokens)
            pages = cache.load(match)
            assert pages.tokens == 0
            pages.release()
        left = 4 if is_passing else 0
        assert read(cache, tokens) == left
        counters = cache.stats()["counters"]
        assert counters["corrupt_blocks"] == ({"total": 0} if is_passing else {"io": 1, "total": 1})
        assert counters["passing_errors"] == (2 if is_passing else 0)


@pytest.mark.parametrize("error", [*PASSING, *DAMAGE], ids=name)
def test_blocks_by_key_and_readers_tell_the_same_two_kinds_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    is_passing = error in PASSING
    path = tmp_path / "s"
    with BlockStore.open(path, block_bytes=100, ssd_bytes="1MiB") as store:
        store.put([b"a", b"b"], [bytes(100)] * 2)
        store.flush()
        with monkeypatch.context() as patched:
            broken(patched, error)
            assert store.get([b"a", b"b"], [bytearray(100) for _ in "ab"]) == [False, False]
        assert store.exists([b"a", b"b"]) == (2 if is_passing else 0)
        counters = store.stats()["counters"]
        assert counters["passing_errors"] == (2 if is_passing else 0)
        store.put([b"a", b"b"], [bytes(100)] * 2)
    with BlockStore.open(path, block_bytes=100, ssd_bytes="1MiB", role="reader") as store:
        with monkeypatch.context() as patched:
            broken(patched, error)
            assert store.exists([b"a"]) == 0
        assert store.exists([b"a"]) == 1
        counters = store.stats()["counters"]
        assert counters["passing_errors"] == is_passing
        assert counters["corrupt_blocks"]["total"] == (not is_passing)


@pytest.mark.parametrize("error", PASSING, ids=name)
def test_a_look_of_a_reader_that_fails_is_no_corrupt_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens, _ = put(cache, 1)
    with open_cache(tmp_path / "s", role="reader") as reader:
        with monkeypatch.context() as patched:
            broken(patched, error)
            assert reader.lookup(tokens).hit_tokens == 0
        assert read(reader, tokens) == 4
        counters = reader.stats()["counters"]
        assert (counters["passing_errors"], counters["corrupt_blocks"]["total"]) == (1, 0)


@pytest.mark.parametrize("error", PASSING, ids=name)
def test_verify_and_the_scrub_call_nothing_bad_that_they_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    from kvstore.admin.inspect import verify_store
    from kvstore.store.scrub import Scrubber

    path = tmp_path / "s"
    with open_cache(path) as cache:
        put(cache, 1)
        shared = inside(cache)
        scrub = Scrubber(
            shared.context,
            writer_of(cache),
            shared.format,
            bytes_per_second=1 << 30,
            keys_root=None,
        )
        scrub._direct = None
        scrub.step()
        with monkeypatch.context() as patched:
            broken(patched, error)
            with pytest.raises(MEDIUM_ERRORS):
                scrub.step()
        while scrub._due:
            scrub.step()
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["blocks"] == stats["counters"]["scrubbed_blocks"] == 4
        assert stats["counters"]["corrupt_blocks"]["total"] == 0

    def fail(*_args: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SsdTier, "frame", fail)
        with pytest.raises(
            StoreError, match="try again when readers, memory or descriptors are free"
        ):
            verify_store(path, lambda *_: None)
    assert verify_store(path, lambda *_: None)["bad_blocks"] == 0


@pytest.mark.parametrize("error", [*PASSING, *DAMAGE], ids=name)
def test_writing_goes_on_by_itself_unless_the_file_is_damaged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    clock = Clock()
    with open_cache(tmp_path / "s", clock=clock) as cache:
        with tier_of(cache).failing("put", error):
            for seed in range(WRITE_ERRORS_TO_READ_ONLY):
                assert put(cache, seed)[1] == 0
            stops = error not in PASSING
            assert writer_of(cache).is_read_only == stops
            clock.now += RETRY_SECONDS - 1
            assert writer_of(cache).is_read_only == stops
            clock.now += 1
            is_final = isinstance(error, lmdb.Error) and stops
            assert writer_of(cache).is_read_only == is_final
            assert put(cache, 8)[1] == 0  # one commit more, and it rests again
            assert writer_of(cache).is_read_only == stops
            assert bool(writer_of(cache).alarms) == stops
        assert sum(record.levelno == logging.ERROR for record in caplog.records) == stops
        clock.now += RETRY_SECONDS
        assert put(cache, 9)[1] == (0 if is_final else 4)
        assert writer_of(cache).is_read_only == is_final
        assert bool(writer_of(cache).alarms) == is_final
        assert ("work again" in caplog.text) == (stops and not is_final)


def test_what_passes_and_what_does_not() -> None:
    assert all(is_transient(error) for error in PASSING)
    others = [
        *DAMAGE,
        lmdb.MapFullError("full"),
        OSError(errno.ENOSPC, "full"),
        lmdb.DiskError("x"),
    ]
    assert not any(
        is_transient(error) for error in [*others, OSError(errno.EROFS, "ro"), ValueError("x")]
    )


READER = """
import sys
from pathlib import Path
from tests.stores import BLOCK, open_cache, tokens_of
with open_cache(Path(sys.argv[1]), role="reader", ssd_bytes="1MiB") as cache:
    for line in sys.stdin:
        tokens = tokens_of(4 * BLOCK + 1, int(line))
        with cache.lookup(tokens) as match:
            print(cache.read(match).tokens // BLOCK, cache.metrics(), flush=True)
""".replace(", cache.metrics()", "")


def test_a_reader_follows_an_owner_that_was_opened_with_a_larger_cap(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path, ssd_bytes="1MiB") as cache:
        put(cache, 1)
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask(seed: int) -> str:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(seed, file=reader.stdin, flush=True)
            return reader.stdout.readline().strip()

        assert ask(1) == "4"
        with open_cache(path, ssd_bytes="8MiB") as cache:
            for seed in range(2, 100):  # 3 MB, beyond the map of the reader
                put(cache, seed)
            assert [ask(1), ask(99)] == ["4", "4"]
        reader.stdin.close()
