"""What an attack on the cache found: each test failed once."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import (
    BlockStore,
    ConfigError,
    ImageSpan,
    KVStoreError,
    Namespace,
    PrefixCache,
    StoreBusy,
    StoreError,
    WindowSnapshot,
)
from kvstore.cache.scope import Scope
from kvstore.codec.host import is_tensor
from kvstore.identity.block import KEY_BYTES
from kvstore.store import opening
from kvstore.tier.ssd import opening as ssd_opening
from kvstore.tier.ssd.files import LOCK_FILE
from kvstore.tier.ssd.owner_lock import try_lock
from kvstore.tier.ssd.tier import SsdTier
from kvstore.transfer.commit_queue import CommitQueue
from tests.builders import Clock, snapshot_of
from tests.stores import (
    BLOCK,
    DENSE,
    NAMESPACE,
    WINDOWED,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    paged,
    tier_of,
    tokens_of,
    writer_of,
)


def shown(value: object) -> str:
    """Name a parameter the same in every process."""
    return re.sub(r" object at 0x[0-9a-f]+", "", str(value))


def kept(cache: Scope, count: int = 4 * BLOCK + 1, seed: int = 0, **options: Any) -> Any:
    """Store a prompt for good and return its tokens."""
    tokens = tokens_of(count, seed)
    cache.store(tokens, entries_of(cache.layout, tokens), **options)
    cache.flush()
    return tokens


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keep every commit waiting until the event is set."""
    go = threading.Event()
    next_batch = CommitQueue._next_batch

    def wait(self: CommitQueue[Any]) -> Any:
        batch = next_batch(self)
        if isinstance(batch, list):
            go.wait(30)
        return batch

    monkeypatch.setattr(CommitQueue, "_next_batch", wait)
    yield go
    go.set()


def open_files() -> int:
    """Descriptors of this process, the one that looks included."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def edit(path: Path, name: bytes, change: Callable[[Any, Any], None]) -> None:
    """Change one database of a closed store behind its back."""
    env = lmdb.open(str(path), max_dbs=8, lib_version=0)
    db = env.open_db(name)
    with env.begin(write=True, db=db) as txn:
        change(txn, db)
    env.close()


def edit_records(path: Path, offset: int, value: bytes) -> None:
    """Overwrite a field of every record."""

    def change(txn: Any, db: Any) -> None:
        for key, data in list(txn.cursor(db)):
            txn.put(bytes(key), bytes(data)[:offset] + value + bytes(data)[offset + len(value) :])

    edit(path, b"meta", change)


# ---- requests and identity -------------------------------------------------------------------------


def test_a_request_id_of_one_tenant_says_nothing_about_anothers(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        other = cache.scope(Namespace(model="test", tenant="other"))
        tokens = kept(cache)
        match = cache.lookup(tokens, request_id="0")
        assert other.lookup(tokens, request_id="0").hit_tokens == 0
        other.release("0")
        assert cache.lookup(tokens, request_id="0") is match


def test_a_request_id_used_again_for_other_tokens_is_another_request(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        first = cache.lookup(tokens, request_id="0")
        assert cache.lookup(tokens_of(33, seed=9), request_id="0").hit_tokens == 0
        again = cache.lookup(tokens, request_id="0")
        assert again is not first
        assert again.hit_tokens == 4 * BLOCK


def test_leaving_a_match_forgets_its_own_request_only(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        first = cache.lookup(tokens, request_id="0")
        with first:
            cache.release("0")
            second = cache.lookup(tokens, request_id="0")
        assert cache.lookup(tokens, request_id="0") is second


def test_requests_that_are_never_released_are_forgotten_with_their_lease(tmp_path: Path) -> None:
    clock = Clock()
    with open_cache(tmp_path / "s", clock=clock) as cache:
        tokens = kept(cache)
        for number in range(20):
            cache.lookup(tokens, request_id=f"hit {number}")
            cache.lookup(tokens_of(20, seed=9), request_id=f"miss {number}")
        clock.now += 31
        cache.lookup(tokens)
        assert not inside(cache).lookups._by_request


def test_a_match_keeps_its_tokens_when_the_callers_buffer_changes(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        buffer = tokens.copy()
        match = cache.lookup(buffer)
        buffer[:] = 7
        with match:
            assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"] == {"total": 0}


def test_images_given_as_an_iterator_are_part_of_the_identity(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        spans: Any = [ImageSpan(0, BLOCK, b"cat")]
        tokens = kept(cache, images=iter(spans))
        assert cache.lookup(tokens).hit_tokens == 0
        spans = iter(spans)
        assert cache.lookup(tokens, images=spans).hit_tokens == 4 * BLOCK


def test_a_new_generation_counts_for_every_scope_of_its_namespace(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        twin, other = cache.scope(NAMESPACE), cache.scope(Namespace(model="other"))
        tokens = kept(cache)
        kept(other)
        assert cache.bump_generation() == 1
        assert twin.lookup(tokens).hit_tokens == 0
        assert twin.namespace.generation == 1
        assert twin.bump_generation() == 2
        assert other.lookup(tokens).hit_tokens == 4 * BLOCK


def test_the_last_generation_is_not_passed(tmp_path: Path) -> None:
    last = Namespace(model="test", generation=2**64 - 1)
    with open_cache(tmp_path / "s", namespace=last) as cache:
        tokens = kept(cache)
        with pytest.raises(ConfigError, match="generation"):
            cache.bump_generation()
    with open_cache(tmp_path / "s", namespace=last) as cache:
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


# ---- matches and pins ------------------------------------------------------------------------------


def test_a_match_entered_twice_is_pinned_until_it_is_left_twice(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        match = cache.lookup(tokens)
        with match:
            with match:
                pass
            assert not match.pins.is_released  # type: ignore[union-attr]
        assert match.pins.is_released  # type: ignore[union-attr]


def test_a_pin_of_queued_blocks_holds_once_they_are_stored(
    tmp_path: Path, held_writer: threading.Event
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = tokens_of(4 * BLOCK)
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.store(tokens, entries_of(DENSE, tokens), pin=True)
        held_writer.set()
        cache.flush()
        writer_of(cache).eviction.evict(100)
        assert cache.probe([*tokens, 0]).hit_tokens == 4 * BLOCK
    with open_cache(tmp_path / "s") as cache:
        writer_of(cache).eviction.evict(100)
        assert cache.probe([*tokens, 0]).hit_tokens == 4 * BLOCK


def test_a_longer_life_of_queued_blocks_counts_once_they_are_stored(
    tmp_path: Path, held_writer: threading.Event
) -> None:
    with open_cache(tmp_path / "s") as cache:
        now = inside(cache).context.wall_clock()
        inside(cache).context.wall_clock = lambda: now
        tokens = tokens_of(4 * BLOCK)
        cache.store(tokens, entries_of(DENSE, tokens), ttl=5)
        cache.store(tokens, entries_of(DENSE, tokens))
        held_writer.set()
        cache.flush()
        inside(cache).context.wall_clock = lambda: now + 10
        assert cache.probe([*tokens, 0]).hit_tokens == 4 * BLOCK


def test_unpinning_takes_back_the_marks_of_a_segment_that_was_split(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache, 8 * BLOCK + 1, pin=True)
        cache.lookup(tokens[: 4 * BLOCK + 1])
        cache.unpin(tokens)
        cache.flush()
        assert not any(record.is_pinned for _, record in tier_of(cache).records())


def test_a_pin_ends_where_it_did_also_after_a_restart(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache, 8 * BLOCK)
        cache.store(tokens[: 4 * BLOCK], entries_of(DENSE, tokens[: 4 * BLOCK]), pin=True)
        cache.lookup([*tokens, 0])
    with open_cache(tmp_path / "s") as cache:
        writer_of(cache).eviction.evict(100)
        assert cache.probe([*tokens, 0]).hit_tokens == 4 * BLOCK
        cache.unpin(tokens[: 4 * BLOCK])
        writer_of(cache).eviction.evict(100)
        assert cache.probe([*tokens, 0]).hit_tokens == 0


def test_a_block_stored_again_while_it_is_removed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        side = writer_of(cache)
        delete = side.removal.delete
        threads = []

        def slow(keys: Any) -> None:
            monkeypatch.undo()
            thread = threading.Thread(target=lambda: kept(cache))
            thread.start()
            threads.append(thread)
            thread.join(0.3)  # long enough for its commit, if nothing holds that back
            delete(keys)

        monkeypatch.setattr(side.removal, "delete", slow)
        cache.clear()
        threads[0].join()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)
        on_disk = {key for key, _ in tier_of(cache).records()}
        assert on_disk == {key for segment in side.index for key in segment.block_keys()}


def test_deletes_that_failed_leave_no_age_behind(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        kept(cache)
        tier = tier_of(cache)
        with tier.failing("_delete", OSError("no")):
            cache.clear()
        kept(cache)
        with tier._env.begin() as txn:
            assert txn.stat(tier._age)["entries"] == txn.stat(tier._meta)["entries"]


# ---- device pages ----------------------------------------------------------------------------------


def test_cleared_blocks_are_not_found_in_pages_that_are_still_in_use(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        other = cache.scope(Namespace(model="other"))
        tokens = kept(cache)
        kept(other)
        pages = cache.load(cache.lookup(tokens))
        other.load(other.lookup(tokens)).release()
        cache.clear()
        assert cache.lookup(tokens).hit_tokens == 0
        values = cache.device.gather(pages, "k", 0, None, _bfloat16())
        assert values.shape == (1, 4 * BLOCK, 64)
        pages.release()
        assert cache.lookup(tokens).hit_tokens == 0
        assert other.lookup(tokens).residency["device"] == 4 * BLOCK
        kept(cache)
        cache.load(cache.lookup(tokens)).release()
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_a_ttl_counts_in_device_pages_and_in_a_reader_too(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache, ttl=3600)
        cache.load(cache.lookup(tokens)).release()
        now = inside(cache).context.wall_clock()
        inside(cache).context.wall_clock = lambda: now + 3601
        assert cache.lookup(tokens).hit_tokens == 0
    with open_cache(tmp_path / "s", role="reader") as reader:
        assert reader.lookup(tokens).hit_tokens == 4 * BLOCK
        inside(reader).context.wall_clock = lambda: now + 3601
        assert reader.lookup(tokens).hit_tokens == 0


def test_a_load_that_is_interrupted_leaks_no_page_and_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        cache.load(cache.probe(tokens[: 2 * BLOCK + 1])).release()
        free = cache.device.free_pages

        def interrupted(*_args: Any, **_named: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(inside(cache).ssd_reads, "each", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.load(cache.probe(tokens))
        assert cache.device.free_pages == free
        assert all(not segment.pins for segment in paged(cache).index)


def test_pages_that_are_read_cannot_become_another_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "s", device_bytes=4 * BLOCK * 768) as cache:
        tokens, other = kept(cache), kept(cache, seed=1)
        cache.load(cache.probe(tokens)).release()
        writer_of(cache).discard(cache.probe(tokens).prefix.chain[:KEY_BYTES])
        match = cache.probe(tokens)
        assert match.residency == {"device": 4 * BLOCK, "ssd": 0}
        tier = paged(cache).tier
        read = tier.read

        def meanwhile(page: int, *where: Any) -> None:
            cache.load(cache.probe(other)).release()
            read(page, *where)

        monkeypatch.setattr(tier, "read", meanwhile)
        found = cache.read(match)
        assert_entries(DENSE, found, tokens, found.tokens)


def test_released_pages_are_not_gathered_from(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        pages = cache.load(cache.lookup(kept(cache)))
        pages.release()
        with pytest.raises(ValueError, match="released"):
            cache.device.gather(pages, "k", 0, None, _bfloat16())


def _bfloat16() -> Any:
    import torch

    return torch.bfloat16


# ---- windows ---------------------------------------------------------------------------------------


def test_a_hit_that_needs_its_window_never_outlives_it(tmp_path: Path) -> None:
    clock = Clock()
    with open_cache(tmp_path / "s", WINDOWED, clock=clock, window_ttl=60) as cache:
        tokens = kept(cache, 6 * BLOCK + 1)
        cache.put_window(tokens, snapshot_of(WINDOWED, 0, 3 * BLOCK))
        clock.now += 31
        cache.put_window(tokens, snapshot_of(WINDOWED, 0, 6 * BLOCK))
        match = cache.lookup(tokens, need_window=True)
        assert match.hit_tokens == 6 * BLOCK
        inside(cache).window.clear(match.prefix.root)
        clock.now += 31
        cache.put_window(tokens, snapshot_of(WINDOWED, 0, 2 * BLOCK))
        cache.lookup([1])
        with match:
            assert match.hit_tokens == 2 * BLOCK
            assert match.window_hit
            assert cache.read(match).tokens == 2 * BLOCK


def test_a_bad_block_shortens_a_hit_to_where_there_is_a_window(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        tokens = kept(cache, 6 * BLOCK + 1)
        for blocks in (2, 6):
            cache.put_window(tokens, snapshot_of(WINDOWED, 0, blocks * BLOCK))
        with cache.lookup(tokens, need_window=True) as match:
            tier_of(cache).delete([match.prefix.key(4)])
            found = cache.read(match)
            assert match.hit_tokens == found.tokens == 2 * BLOCK
            assert cache.window(match).source == "pool"
            assert_entries(WINDOWED, found, tokens, 2 * BLOCK)


@pytest.mark.parametrize("junk", [None, 3, [None], [3], ["rows"], iter(())], ids=shown)
def test_a_hook_that_returns_junk_is_told_so(tmp_path: Path, junk: Any) -> None:
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        match = cache.lookup(kept(cache))
        with pytest.raises(ValueError, match="the replay hook returned"):
            cache.window(match, lambda _requests: junk)


@pytest.mark.parametrize(
    "junk",
    [None, 3, WindowSnapshot(0, 32, None), WindowSnapshot(0, 32, {"w": None})],  # type: ignore[arg-type, dict-item]
    ids=shown,
)
def test_a_snapshot_that_is_none_is_refused(tmp_path: Path, junk: Any) -> None:
    with (
        open_cache(tmp_path / "s", WINDOWED) as cache,
        pytest.raises(ValueError, match="(?i)snapshot"),
    ):
        cache.put_window(tokens_of(33), junk)


def test_narrow_integers_and_tensors_make_a_window_like_any_other(tmp_path: Path) -> None:
    import torch

    with open_cache(tmp_path / "s", WINDOWED) as cache:
        tokens = kept(cache)
        plain = snapshot_of(WINDOWED, 0, 4 * BLOCK)
        rows: Any = {name: torch.from_numpy(array) for name, array in plain.rows.items()}
        narrow: Any = WindowSnapshot(np.uint8(0), np.uint8(4 * BLOCK), rows)  # type: ignore[arg-type]
        assert cache.put_window(tokens, narrow)
        found = cache.window(cache.lookup(tokens))
        for name, array in found.rows.items():
            np.testing.assert_array_equal(array, plain.rows[name][:, found.start :])


# ---- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 8.0}, "start must be a block boundary"),
        ({"start": False}, "start must be a block boundary"),
        ({"start": None}, "start must be a block boundary"),
        ({"ttl": float("nan")}, "ttl must be positive seconds"),
        ({"ttl": "1"}, "ttl must be positive seconds"),
        ({"ttl": -float("inf")}, "ttl must be positive seconds"),
        ({"wait": float("nan")}, "wait must be seconds"),
        ({"wait": None}, "wait must be seconds"),
        ({"images": [(0, 8, b"cat")]}, "images must be ImageSpan"),
    ],
    ids=shown,
)
def test_bad_arguments_of_a_store_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    tokens = tokens_of(33)
    with open_cache(tmp_path / "s") as cache, pytest.raises(ValueError, match=message):
        cache.store(tokens, entries_of(DENSE, tokens), **options)


@pytest.mark.parametrize("entries", [None, [], 3], ids=shown)
def test_entries_that_are_no_mapping_are_named(tmp_path: Path, entries: Any) -> None:
    with open_cache(tmp_path / "s") as cache, pytest.raises(ValueError, match="entries must map"):
        cache.store(tokens_of(33), entries)


@pytest.mark.parametrize("wait", [float("inf"), 1e12, -1, -float("inf"), np.float32(1)], ids=shown)
def test_any_number_of_seconds_may_be_waited(
    tmp_path: Path, held_writer: threading.Event, wait: float
) -> None:
    with open_cache(tmp_path / "s") as cache:
        writer = writer_of(cache).queue
        writer._queue_blocks = 1
        tokens = tokens_of(33)
        threading.Timer(0.2, held_writer.set).start()
        stored = cache.store(tokens, entries_of(DENSE, tokens), wait=wait)
        assert stored.end == 4 * BLOCK if wait > 0 else stored.end >= 0


@pytest.mark.parametrize(
    "tokens",
    [[[1, 2], [3]], [1, None], [2**70], object(), {1: 2}, "abc", [True] * 9, [1.0] * 9],
    ids=shown,
)
def test_strange_tokens_are_a_value_error(tmp_path: Path, tokens: Any) -> None:
    with open_cache(tmp_path / "s") as cache, pytest.raises(ValueError, match="token"):
        cache.lookup(tokens)


def test_tokens_of_every_integer_type_are_the_same_tokens(tmp_path: Path) -> None:
    import torch

    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        forms: list[Any] = [
            tokens.astype(">u4"),
            tokens.astype(">i8"),
            tokens.tolist(),
            tuple(tokens),
            torch.tensor(tokens.astype(np.int64)),
            np.repeat(tokens, 2)[::2],
        ]
        for form in forms:
            assert cache.lookup(form).hit_tokens == 4 * BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_bytes": "junk"}, "window_bytes must be"),
        ({"ssd_bytes": "1e3"}, "ssd_bytes must be"),
        ({"ssd_bytes": 10**400}, "ssd_bytes must be"),
        ({"ssd_bytes": -(10**400)}, "ssd_bytes must not be negative"),
        ({"window_ttl": float("nan")}, "window_ttl must be"),
        ({"window_rows": 2.5}, "window_rows must be"),
        ({"block_tokens": 2**40}, "block_tokens must be"),
        ({"block_tokens": 8.0}, "block_tokens must be"),
        ({"block_tokens": "8"}, "block_tokens must be"),
        ({"namespace": "test"}, "namespace must be"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_option_is_named_and_leaves_nothing_open(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    before = open_files()
    with pytest.raises(ConfigError, match=message):
        open_cache(tmp_path / "s", **options)
    assert open_files() == before
    with open_cache(tmp_path / "s") as cache:
        assert cache.role == "owner"


@pytest.mark.parametrize(
    "bad", [(1, float("nan")), (1, float("inf")), (float("nan"), 1), (float("inf"), 1)], ids=shown
)
def test_a_measurement_that_is_no_number_is_refused(tmp_path: Path, bad: Any) -> None:
    with open_cache(tmp_path / "s") as cache, pytest.raises(ValueError, match="positive tokens"):
        cache.observe_prefill(*bad)


# ---- opening ---------------------------------------------------------------------------------------


def test_a_cap_that_the_machine_cannot_map_leaves_the_store_alone(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_cache(tmp_path / "s", ssd_bytes="400TiB")
    assert [item.name for item in tmp_path.iterdir()] == ["s"]
    with open_cache(tmp_path / "s") as cache:
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("no space"), lmdb.MapFullError("full"), OSError(5)]
)
def test_a_medium_that_is_full_or_fails_at_open_leaves_the_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
    before = open_files()

    class Failing(SsdTier):
        def set_fact(self, *_args: Any) -> None:
            raise error

    with monkeypatch.context() as broken:
        broken.setattr(opening, "tier_class", Failing)
        with pytest.raises(StoreError, match="cannot be opened"):
            open_cache(tmp_path / "s")
    assert open_files() == before
    assert [item.name for item in tmp_path.iterdir()] == ["s"]
    with open_cache(tmp_path / "s") as cache:
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_a_store_that_another_process_takes_while_it_is_set_aside_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cache(tmp_path / "s").close()
    (tmp_path / "s" / "data.mdb").write_bytes(b"broken" * 4096)
    before = open_files()
    locks = [try_lock(tmp_path / "s"), None]
    monkeypatch.setattr(ssd_opening, "try_lock", lambda _: locks.pop(0))
    with pytest.raises(StoreBusy, match="is owned by process"):
        open_cache(tmp_path / "s", role="owner")
    assert open_files() == before


def test_a_process_killed_while_it_wrote_the_version_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    (path / "VERSION.partial").write_text("kvst")
    with open_cache(path) as cache:
        assert cache.role == "owner"


def test_processes_that_open_a_new_store_at_once_are_one_owner_and_readers(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.stores import open_cache\n"
        "sys.stdin.readline()\nwith open_cache(Path(sys.argv[1])) as c:\n"
        "    print(c.role, flush=True)\n    sys.stdin.readline()\n"
    )
    for attempt in range(3):
        command = [sys.executable, "-c", code, str(tmp_path / f"s{attempt}")]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        roles = [worker.stdout.readline().strip() for worker in workers if worker.stdout]
        for worker in workers:
            worker.communicate("\n", timeout=60)
        assert sorted(roles) == ["owner", "reader", "reader", "reader"]


def test_a_look_at_who_owns_a_store_does_not_pass_for_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    open_cache(tmp_path / "s").close()
    looking = os.open(tmp_path / "s" / LOCK_FILE, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    with open_cache(tmp_path / "s", role="owner") as cache:
        assert cache.role == "owner"
    os.close(looking)


def test_an_owner_is_not_made_of_a_reader_of_the_same_process(tmp_path: Path) -> None:
    open_cache(tmp_path / "s").close()
    with (
        open_cache(tmp_path / "s", role="reader"),
        pytest.raises(StoreBusy, match="reader in this process"),
    ):
        open_cache(tmp_path / "s", role="owner")


def test_a_broken_store_behind_a_link_is_set_aside_where_it_lies(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "s", tmp_path / "link"
    open_cache(real).close()
    link.symlink_to(real)
    (real / "data.mdb").write_bytes(b"junk" * 5000)
    with open_cache(link):
        assert link.is_symlink()
        assert len(list(real.parent.iterdir())) == 2


def test_a_broken_store_that_cannot_be_renamed_is_set_aside_inside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    rename = Path.rename

    def as_a_mount_point(self: Path, target: Path) -> Path:
        if self == path:
            raise OSError(16, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", as_a_mount_point)
    for _ in range(2):
        open_cache(path).close()
        (path / "data.mdb").write_bytes(b"junk" * 5000)
        with open_cache(path) as cache:
            tokens = kept(cache)
            assert cache.lookup(tokens).hit_tokens == 4 * BLOCK
        assert len([item for item in path.iterdir() if item.is_dir()]) == 1


def test_setting_a_store_aside_removes_nothing_of_anyone_elses(tmp_path: Path) -> None:
    path = tmp_path / "*"
    strangers = [tmp_path / "other.bad-20200101T000000", tmp_path / "*.bad-idea"]
    for stranger in strangers:
        stranger.mkdir()
    for _ in range(2):
        open_cache(path).close()
        (path / "data.mdb").write_bytes(b"junk" * 5000)
    open_cache(path).close()
    assert all(stranger.exists() for stranger in strangers)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_relative_path_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with PrefixCache.open(
        "s", layout=DENSE, namespace=NAMESPACE, block_tokens=BLOCK, ssd_bytes="8MiB"
    ) as cache:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert cache.stats()["path"] == str(tmp_path / "s")
        with PrefixCache.open(
            tmp_path / "s", layout=DENSE, namespace=NAMESPACE, block_tokens=BLOCK
        ) as second:
            assert inside(second) is inside(cache)


def test_a_reader_of_a_file_that_was_cut_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        kept(cache, 60 * BLOCK)
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", size * 9 // 10 // 4096 * 4096)
    with pytest.raises(StoreError, match="cannot be read: data.mdb has"):
        open_cache(path, role="reader")


def test_a_tree_that_breaks_only_while_it_is_indexed_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        kept(cache, 60 * BLOCK)
        tier = tier_of(cache)
        with tier._env.begin(buffers=True) as txn:
            cursor = txn.cursor(tier._meta)
            cursor.first()
            address = np.frombuffer(cursor.value(), np.uint8).__array_interface__["data"][0]
            page = ctypes.c_uint64.from_address(
                address // 4096 * 4096
            ).value  # what its header says
            del cursor
    with (path / "data.mdb").open("r+b") as file:
        file.seek(page * 4096)
        file.write(bytes(16))
    with open_cache(path) as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        tokens = kept(cache)
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


# ---- hostile records and facts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (32, struct.pack("<Q", 2**64 - 1)),
        (32, struct.pack("<Q", 2**52)),
        (32, struct.pack("<Q", 2**40)),
        (24, struct.pack("<Q", 2**64 - 1)),
        (40, struct.pack("<d", float("nan"))),
        (40, struct.pack("<d", float("inf"))),
        (20, struct.pack("<I", 2**32 - 1)),
        (48, struct.pack("<I", 0)),
        (56, bytes(8)),
    ],
    ids=[
        "page",
        "page offset",
        "page beyond",
        "sequence",
        "nan",
        "inf",
        "namespace",
        "size",
        "sum",
    ],
)
def test_a_record_with_a_damaged_field_hurts_nobody(
    tmp_path: Path, offset: int, value: bytes
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = kept(cache)
    edit_records(path, offset, value)
    for _ in range(2):
        with open_cache(path) as cache:
            with cache.lookup(tokens) as match:
                assert_entries(DENSE, cache.read(match), tokens, match.hit_tokens)
                assert match.hit_tokens == 4 * BLOCK
            fresh = kept(cache, seed=1)
            other = cache.scope(Namespace(model="other"))
            kept(other)
            assert cache.lookup(fresh).hit_tokens == 4 * BLOCK
            json.dumps(cache.stats(), allow_nan=False)


@pytest.mark.parametrize("data", [b"", b"x", bytes(63), bytes(65)], ids=len)
def test_a_record_of_another_size_is_a_miss(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = kept(cache)
        third = cache.lookup(tokens).prefix.key(2)
    edit(path, b"meta", lambda txn, _db: txn.put(third, data))
    edit(path, b"meta", lambda txn, _db: txn.put(b"key", bytes(64)))
    with open_cache(path, role="reader") as reader, reader.lookup(tokens) as match:
        assert_entries(DENSE, reader.read(match), tokens, match.hit_tokens)
        assert match.hit_tokens == 2 * BLOCK
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 2 * BLOCK
        kept(cache)
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)


@pytest.mark.parametrize(
    "value", [b"junk", b"[]", b"{}", b'{"root": []}', b"\xff", b"[" * 99999], ids=lambda v: v[:9]
)
def test_a_damaged_name_of_a_namespace_costs_its_name_only(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = kept(cache)
    for name in (b"namespace:1", b"namespace:x", b"namespace:4294967295"):

        def spoil(txn: Any, _db: Any, name: bytes = name) -> None:
            txn.put(name, value)

        edit(path, b"sys", spoil)
    with open_cache(path) as cache:
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK
        cache.stats()
        fresh = kept(cache, seed=1)
        assert cache.lookup(fresh).hit_tokens == 4 * BLOCK
    with open_cache(path, role="reader") as reader:
        reader.stats()


@pytest.mark.parametrize("value", [b"", b"-1", b"one", b"9" * 30, b"\xff"], ids=shown)
def test_a_damaged_generation_is_an_error_and_leaves_nothing_open(
    tmp_path: Path, value: bytes
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        name = f"generation:{cache._chains.lineage}".encode()
    edit(path, b"sys", lambda txn, _db: txn.put(name, value or b"\0"))
    for _ in range(2):
        with pytest.raises(StoreError, match="generation"):
            open_cache(path, role="owner")
    with open_cache(path, namespace=Namespace(model="other")) as cache:
        assert cache.role == "owner"


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "{}", "null", "{", '{"groups":[],"block_tokens":8}', "[" * 99999],
    ids=lambda text: text[:20],
)
def test_a_damaged_version_file_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    from kvstore.admin.inspect import store_stats

    path = tmp_path / "s"
    open_cache(path).close()
    (path / "VERSION").write_text(f"kvstore 1\n{text}\n")
    with pytest.raises(KVStoreError):
        open_cache(path)
    with pytest.raises(StoreError):
        store_stats(path)


def test_a_medium_that_fails_is_an_error_of_ours_in_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)

        def fail(*_args: Any, **_options: Any) -> Any:
            raise lmdb.DiskError("gone")

        for name in ("put", "delete", "amend", "set_facts", "fact", "facts", "_read_batch", "sync"):
            tier_of(cache).hooks[name] = fail
        monkeypatch.setattr(SsdTier, "live_bytes", property(fail))
        other = tokens_of(33, seed=1)
        cache.store(other, entries_of(DENSE, other), ttl=5, pin=True)
        assert cache.read(cache.lookup(tokens)).tokens == 0
        assert cache.load(cache.lookup(tokens)).tokens == 0
        for call in (cache.stats, cache.bump_generation, cache.flush, cache.clear):
            with pytest.raises(StoreError):
                call()
        monkeypatch.undo()
        tier_of(cache).hooks.clear()


# ---- the writer and forks --------------------------------------------------------------------------


def test_a_store_that_comes_while_the_writer_closes_is_dropped_and_counted(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        writer_of(cache).queue.close()
        tokens = tokens_of(33)
        stored = cache.store(tokens, entries_of(DENSE, tokens))
        assert (stored.end, stored.dropped) == (0, 4)
        assert cache.stats()["counters"]["dropped_blocks"]["closed"] == 4
        cache.flush()


def test_a_child_forked_while_the_lock_was_held_can_leave_what_it_inherited(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        match = cache.lookup(tokens, request_id="0")
        pages = cache.load(match)
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with inside(cache).context.lock:
                held.set()
                go.wait(30)

        with match:
            thread = threading.Thread(target=hold)
            thread.start()
            held.wait(30)
            child = os.fork()
            if not child:
                import signal

                signal.alarm(10)
                pages.release()
                cache.release("0")
                match.__exit__(None, None, None)
                cache.close()
                os._exit(0)
            go.set()
            thread.join()
            _, status = os.waitpid(child, 0)
        assert status == 0


def test_a_store_removed_under_its_owner_gives_way_to_a_new_one(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as old:
        tokens = kept(old)
        shutil.rmtree(tmp_path / "s")
        with old.lookup(tokens) as match:
            assert_entries(DENSE, old.read(match), tokens, 4 * BLOCK)
        with open_cache(tmp_path / "s") as new:
            assert new.lookup(tokens).hit_tokens == 0
            kept(new)
    with open_cache(tmp_path / "s") as new:
        assert new.lookup(tokens).hit_tokens == 4 * BLOCK


@pytest.mark.parametrize("failures", [1, 3])
def test_a_full_disk_that_looks_like_a_bad_one_is_made_room_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """LMDB reports a write that a full disk cuts short as an input/output error."""
    with open_cache(tmp_path / "s") as cache:
        kept(cache, 90 * BLOCK)
        short: Any = lmdb.Error("mdb_txn_commit: Input/output error")
        short.code = errno.EIO

        def full_delete(keys: Any) -> None:
            if len(keys) > 1:
                raise short

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        tier_of(cache).fail("put", *[short] * failures)
        tier_of(cache).hooks["_delete"] = full_delete
        tokens = kept(cache, seed=1)
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK
        assert cache.stats()["counters"]["write_errors"] == 0
        assert cache.stats()["counters"]["evicted_blocks"]["ssd"] >= 16


def test_an_import_of_torch_in_another_thread_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is in the table of modules before its classes are in it."""
    tokens = tokens_of(4 * BLOCK + 1)
    block = np.arange(64, dtype=np.uint8)
    with (
        open_cache(tmp_path / "s") as cache,
        BlockStore.open(tmp_path / "b", block_bytes=64, ssd_bytes="8MiB") as keyed,
    ):
        for half in (types.ModuleType("torch"), types.SimpleNamespace(Tensor=None), None):
            monkeypatch.setitem(sys.modules, "torch", half)
            cache.store(tokens, entries_of(DENSE, tokens))
            cache.flush()
            with cache.lookup(tokens) as match:
                assert_entries(DENSE, cache.read(match), tokens, 4 * BLOCK)
            assert keyed.put(["a"], [block]) == [True]
            keyed.flush()
            target = np.zeros(64, np.uint8)
            assert keyed.get(["a"], [target]) == [True]
            np.testing.assert_array_equal(target, block)
            assert not is_tensor(block)


def test_pages_are_made_without_the_lock_that_lookups_take(tmp_path: Path) -> None:
    """Making them imports torch, which takes seconds."""
    with open_cache(tmp_path / "s") as cache:
        tokens, device = kept(cache), inside(cache).device
        real, found = device._open_tier, []

        def make() -> Any:
            other = threading.Thread(target=lambda: found.append(cache.probe(tokens).hit_tokens))
            other.start()
            other.join(30)
            return real()

        device._open_tier = make
        assert cache.device.page_count
        assert found == [4 * BLOCK]
