"""Callers with their own keys: whole keys, verified reads, a tree or a list, and one mechanism."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from kvstore import BlockStore, ConfigError, LayoutMismatch, StoreBusy, StoreError  # noqa: F401 - scripts below take names from here
from kvstore.admin import inspect as admin
from kvstore.blocks import keys as keys_module
from kvstore.blocks.keyed import KeyedBlocks
from kvstore.blocks.keys import keys_root, named
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import Header
from kvstore.store.store_format import StoreFormat, format_text
from tests.stores import inside, open_cache

SIZE = 5000
KEYS_ROOT = keys_root(None)
"""Bytes of a block: no multiple of anything."""
Block = NDArray[np.uint8]


def block_of(key: bytes | str, version: int = 0, size: int = SIZE) -> Block:
    """Bytes that no other key or version has."""
    data = key if isinstance(key, bytes) else key.encode()
    seed = int.from_bytes(data[:64], "little") * 1009 + version * 7 + len(data)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_store(path: Path, **options: Any) -> BlockStore:
    return BlockStore.open(path, **{"block_bytes": SIZE, "ssd_bytes": "2MiB", **options})


def put(store: BlockStore, keys: list[Any], parents: list[Any] | None = None) -> list[bool]:
    done = store.put(keys, [block_of(key) for key in keys], parents, wait=30)
    store.flush()
    return done


def get(store: BlockStore, keys: list[Any]) -> list[Block | None]:
    targets = [np.full(SIZE, 0xAB, np.uint8) for _ in keys]
    found = store.get(keys, targets)
    for target, is_there in zip(targets, found, strict=True):
        assert is_there or (target == 0xAB).all(), "a miss wrote into its target"
    return [t if ok else None for t, ok in zip(targets, found, strict=True)]


def assert_served(store: BlockStore, keys: list[Any]) -> None:
    for key, found in zip(keys, get(store, keys), strict=True):
        assert found is not None, key
        np.testing.assert_array_equal(found, block_of(key))


def tree(store: BlockStore) -> KeyedBlocks:
    return inside(store)


def chain(count: int, name: str = "c") -> tuple[list[str], list[str | None]]:
    keys = [f"{name}{i}" for i in range(count)]
    return keys, [None, *keys[:-1]]


# ---- putting and getting ------------------------------------------------------------------------


def test_what_was_put_is_what_comes_back(tmp_path: Path) -> None:
    keys = [f"key {i}" for i in range(40)]
    with open_store(tmp_path / "s") as store:
        assert store.exists(keys) == 0
        assert put(store, keys) == [True] * 40
        assert store.exists(keys) == 40
        assert_served(store, keys[::-1])


def test_keys_of_every_kind_are_kept_apart(tmp_path: Path) -> None:
    keys = [
        "",
        "\0",
        "\0\0",
        b"\xff",
        "a",
        "a\0",
        "A",
        "ä",
        "a\u0308",
        "../x",
        "x" * 256,
        "x" * 255,
    ]
    keys += [b"\0" * n for n in (3, 4, 5, 255, 256)]
    with open_store(tmp_path / "s") as store:
        put(store, keys)
        assert_served(store, keys)
        assert store.stats()["tiers"]["ssd"]["blocks"] == len(keys)
        assert store.exists(["a"]) == store.exists([b"a"]) == 1, "a text is its UTF-8 bytes"
    with open_store(tmp_path / "s") as store:
        assert_served(store, keys)


def test_two_keys_that_share_sixteen_bytes_of_hash_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "block_key", lambda _: b"same for all key")
    with open_store(tmp_path / "s") as store:
        put(store, ["mine"])
        assert store.exists(["yours"]) == 1, "nothing but a read can tell them apart"
        assert get(store, ["yours"]) == [None]
        assert store.stats()["counters"]["corrupt_blocks"]["identity"] == 1


def test_two_keys_that_share_their_whole_hash_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "block_hash", lambda *_: KEYS_ROOT)
    with open_store(tmp_path / "s") as store:
        put(store, ["mine"])
        assert get(store, ["yours"]) == [None]
        assert store.stats()["counters"]["corrupt_blocks"]["tokens"] == 1


def test_the_first_writer_of_a_key_wins(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, ["k"])
        assert store.put(["k", "k"], [block_of("other")] * 2, [None, None]) == [True, True]
        store.flush()
        assert_served(store, ["k"])
        assert store.stats()["counters"]["present_blocks"] == 2
        assert store.stats()["tiers"]["ssd"]["blocks"] == 1


def test_a_key_twice_in_one_call_is_stored_once(tmp_path: Path) -> None:
    keys = ["a", "b", "a"]
    with open_store(tmp_path / "s") as store:
        sources = [block_of("a"), block_of("b"), block_of("late")]
        assert store.put(keys, sources, [None, "a", "b"]) == [True] * 3
        store.flush()
        assert_served(store, ["a", "b"])
        assert store.stats()["tiers"]["ssd"]["blocks"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_tensors_of_any_dtype_and_shape_go_in_and_out(tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.from_numpy(block_of("t", size=4096)).view(dtype).reshape(2, -1, 8)
    target = torch.zeros(4096, dtype=torch.uint8).view(dtype).reshape(source.shape)
    with open_store(tmp_path / "s", block_bytes=4096) as store:
        assert store.put(["t", "strided"], [source, source.transpose(0, 1)]) == [True, True]
        store.flush()
        assert store.get(["t"], [target]) == [True]
        assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
        flat = bytearray(4096)
        assert store.get(["strided"], [flat]) == [True]
        assert flat == source.transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()


def test_a_source_may_change_as_soon_as_put_returned(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        source = block_of("k")
        store.put(["k"], [source])
        source[:] = 0
        store.flush()
        assert_served(store, ["k"])


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.put(["a", "b"], [block_of("a")]), "one for each of 2 keys, found 1"),
        (lambda s: s.put(["a"], [block_of("a")], []), "parents: expected one"),
        (lambda s: s.put(["a"], [block_of("a")[:-1]]), "4999 bytes, expected exactly 5000"),
        (lambda s: s.put(["ok", "a"], [block_of("ok"), b""]), "sources\\[1\\] has 0 bytes"),
        (lambda s: s.put(["a"], [[1, 2]]), "expected a NumPy array.*found list"),
        (lambda s: s.put(["a"], [np.array([None])]), "expected a NumPy array"),
        (lambda s: s.put([7], [block_of("a")]), "bytes or str, found int"),
        (lambda s: s.put("a", [block_of("a")]), "a list of keys, found 'a'"),
        (lambda s: s.put(["x" * 257], [block_of("a")]), "257 bytes, expected at most 256"),
        (lambda s: s.put(["a"], [block_of("a")], wait=-1), "wait must be seconds"),
        (lambda s: s.put(["a"], [block_of("a")], wait=float("nan")), "wait must be seconds"),
        (lambda s: s.get(["ok"], [bytes(SIZE)]), "writable"),
        (lambda s: s.get(["ok"], [np.zeros(2 * SIZE, np.uint8)[::2]]), "contiguous"),
        (lambda s: s.get(["ok"], [np.zeros(SIZE + 1, np.uint8)]), "expected exactly 5000"),
        (lambda s: s.get(["ok"], [torch.zeros(2, SIZE).t()]), "contiguous"),
        (lambda s: s.get(["ok"], []), "one for each of 1 keys"),
        (lambda s: s.exists([None]), "bytes or str"),
        (lambda s: s.delete(["ok", 3]), "bytes or str"),
    ],
)
def test_a_bad_argument_says_so_and_costs_nothing(tmp_path: Path, call: Any, message: str) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, ["ok"])
        with pytest.raises(ValueError, match=message):
            call(store)
        assert store.stats()["tiers"]["ssd"]["blocks"] == 1
        assert_served(store, ["ok"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_bytes": 0}, "block_bytes must be an integer in"),
        ({"block_bytes": True}, "block_bytes"),
        ({"block_bytes": 1.5}, "block_bytes"),
        ({"key_bytes": 0}, "key_bytes"),
        ({"key_bytes": 1 << 20}, "key_bytes"),
        ({"ssd_bytes": "1KiB"}, "expected at least"),
        ({"role": "boss"}, "role"),
    ],
)
def test_an_option_that_cannot_work_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "~no-such-user/s"], ids=ascii)
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        open_store(path)  # type: ignore[arg-type]


# ---- whose directory it is ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"block_bytes": SIZE + 1}, {"key_bytes": 128}])
def test_another_size_is_another_store(tmp_path: Path, options: dict[str, Any]) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, ["k"])
        with pytest.raises(LayoutMismatch, match="left untouched"):
            open_store(tmp_path / "s", **options)
    with pytest.raises(LayoutMismatch):
        open_store(tmp_path / "s", **options)
    with open_store(tmp_path / "s") as store:
        assert_served(store, ["k"])


def test_a_prefix_cache_and_a_block_store_never_share_a_directory(tmp_path: Path) -> None:
    with open_store(tmp_path / "keys"), pytest.raises(LayoutMismatch):
        open_cache(tmp_path / "keys")
    open_cache(tmp_path / "tokens").close()
    with pytest.raises(LayoutMismatch):
        open_store(tmp_path / "tokens")
    # Not even where the layout is the very same: a key and a token id are different things.
    form = keys_module.keyed_format(SIZE, 256)
    open_cache(tmp_path / "alike", form.layout, block_tokens=form.block_tokens).close()
    with pytest.raises(LayoutMismatch):
        open_store(tmp_path / "alike")


def test_a_second_opening_shares_the_first(tmp_path: Path) -> None:
    first, second = open_store(tmp_path / "s"), open_store(tmp_path / "s")
    put(first, ["k"])
    assert second.exists(["k"]) == 1
    first.close()
    first.close()
    assert_served(second, ["k"])
    second.close()
    with pytest.raises(StoreError, match="closed"):
        second.exists(["k"])


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


READER = """
import sys, pathlib
from tests.blocks.test_block_store import *
store = open_store(pathlib.Path(sys.argv[1]))
keys = [f"key {i}" for i in range(10)]
assert not store.is_owner
assert store.exists([*keys, "no"]) == 10
assert_served(store, keys)
assert get(store, ["no"]) == [None]
assert store.put(["new"], [block_of("new")]) == [False]
for call in (store.pin, store.unpin, store.delete):
    try:
        call(keys)
    except StoreBusy as error:
        assert "only its owner" in str(error)
    else:
        raise AssertionError(call)
counters = store.stats()["counters"]
assert counters["dropped_blocks"] == {"reader": 1, "total": 1}, counters
assert counters["corrupt_blocks"]["total"] == 0, "a miss is no damage"
print("fine")
"""


def test_a_reader_beside_the_owner(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, [f"key {i}" for i in range(10)])
        done = python(READER, tmp_path / "s")
        assert done.stdout == "fine\n", done.stderr
        assert store.exists([f"key {i}" for i in range(10)]) == 10


KILLED = """
import sys, pathlib
from tests.blocks.test_block_store import *
store = open_store(pathlib.Path(sys.argv[1]), ssd_bytes="1MiB")
n = 0
while True:
    keys, parents = chain(7, f"{n}-")
    store.put(keys, [block_of(k) for k in keys], parents, wait=30)
    if n % 3 == 0:
        store.flush()
        print(n, flush=True)
    n += 1
"""


def test_a_killed_owner_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for round_ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        flushed = [int(child.stdout.readline()) for _ in range(2 + round_)][-1]
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
        child.stdout.close()
        with open_store(path, ssd_bytes="1MiB") as store:
            for n in range(flushed + 1):  # they fit: nothing was evicted yet
                assert_served(store, chain(7, f"{n}-")[0])
            for n in range(flushed + 1, flushed + 60):
                keys, _ = chain(7, f"{n}-")
                assert_served(store, keys[: store.exists(keys)])
        assert admin.verify_store(path, lambda *_: None)["bad_blocks"] == 0
        with open_store(path, ssd_bytes="1MiB") as store:
            store.clear()


def test_a_forked_child_must_reopen(tmp_path: Path) -> None:
    code = """
import os, sys, pathlib
from tests.blocks.test_block_store import *
path = pathlib.Path(sys.argv[1])
store = open_store(path); put(store, ["k"])
pid = os.fork()
if not pid:
    try:
        store.exists(["k"])
        os._exit(1)
    except StoreError as error:
        assert "after a fork" in str(error)
    with open_store(path) as mine:
        assert not mine.is_owner
        assert_served(mine, ["k"])
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert_served(store, ["k"])
print("fine")
"""
    done = python(code, tmp_path / "s")
    assert done.stdout == "fine\n", done.stderr


def test_a_child_forked_while_threads_use_the_store_can_open_it(tmp_path: Path) -> None:
    code = """
import os, signal, sys, pathlib, threading
from kvstore.tier.ssd import tier as ssd
from tests.blocks.test_block_store import *
path = pathlib.Path(sys.argv[1])
store = open_store(path); put(store, ["k"])

def busy():
    n = 0
    while not done.is_set():
        put(store, [f"k{n}"]); store.get(["k"], [bytearray(SIZE)]); n += 1

def child():
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(30)
    try:
        with open_store(path) as mine:
            assert_served(mine, ["k"])
    except StoreError as error:
        assert "busy when this process forked" in str(error)
        os._exit(8)
    os._exit(7)

done = threading.Event()
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads: thread.start()
assert [child() for _ in range(8)] == [7] * 8
done.set()
for thread in threads: thread.join()
ssd.FORK_SECONDS = 0.0
with tree(store).ssd._using():  # as a call does that a disk never answers
    assert child() == 8
assert_served(store, ["k"])
store.close()
print("fine")
"""
    done = python(code, tmp_path / "s")
    assert done.stdout == "fine\n", done.stderr


def test_a_restart_keeps_blocks_their_tree_and_their_order(tmp_path: Path) -> None:
    keys, parents = chain(6)
    with open_store(tmp_path / "s") as store:
        put(store, keys, parents)
        put(store, ["fork"], ["c2"])
        before = dict(tree(store)._index.parents)
    with open_store(tmp_path / "s") as store:
        assert tree(store)._index.parents == before
        assert_served(store, [*keys, "fork"])
        put(store, ["below the fork"], ["fork"])
        assert store.delete(["c2"]) == 6
        assert store.exists(keys) == 2


# ---- damage -------------------------------------------------------------------------------------


def flip(path: Path, key: str, where: int = 1000) -> None:
    """Flip a bit of a stored block: byte ``where`` of its frame's payload."""
    with open_store(path) as store:
        record = tree(store).ssd.record(named(key, 256, KEYS_ROOT).key)
        assert record is not None
        assert record.page
        frames = tree(store).format
        assert isinstance(frames, FrameFormat)
        offset = record.page * 4096 + 16 + frames.payload_offset + where
    with (path / "data.mdb").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("where", [0, 2500, SIZE - 1, -200])
def test_a_corrupt_block_is_a_miss_and_heals(tmp_path: Path, where: int) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        put(store, ["a", "bad", "c"])
    flip(path, "bad", where)
    assert admin.verify_store(path, lambda *_: None)["bad_blocks"] == 1
    with open_store(path) as store:
        assert store.exists(["a", "bad", "c"]) == 3
        found = get(store, ["a", "bad", "c"])
        assert found[1] is None
        assert_served(store, ["a", "c"])
        assert store.stats()["counters"]["corrupt_blocks"]["total"] == 1
        assert store.exists(["bad"]) == 0
        put(store, ["bad"])
        assert_served(store, ["bad"])


def test_what_hangs_on_a_corrupt_block_goes_with_it_even_if_pinned(tmp_path: Path) -> None:
    path = tmp_path / "s"
    keys, parents = chain(5)
    with open_store(path) as store:
        put(store, keys, parents)
    flip(path, "c2")
    with open_store(path) as store:
        assert store.pin(["c4"]) == [True]
        found = get(store, keys)
        assert [block is None for block in found] == [False, False, True, False, False]
        assert store.exists(keys) == 2
        put(store, keys[2:], parents[2:])
        assert_served(store, keys)
        assert store.pin(["c4"]) == [True]
        store.unpin(["c4"])
        assert store.delete(["c4"]) == 0, "one of two pins was given back"
        store.unpin(["c4"])
        assert store.delete(["c4"]) == 1


# ---- eviction -----------------------------------------------------------------------------------


def test_without_parents_the_least_recently_used_goes_and_the_cap_holds(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, ["hot", "cold"])
        for n in range(200):
            assert put(store, [f"n{n}"]) == [True]
            assert_served(store, ["hot"])
            assert (tmp_path / "s" / "data.mdb").stat().st_size <= 1 << 20
        assert store.exists(["cold"]) == 0
        assert store.exists([f"n{n}" for n in range(190, 200)]) == 10
        assert store.stats()["counters"]["evicted_blocks"]["ssd"] > 50


def test_putting_a_key_again_is_a_use(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, ["hot", "cold"])
        for n in range(200):
            put(store, [f"n{n}", "hot"])
        assert store.exists(["hot"]) == 1
        assert store.exists(["cold"]) == 0


def test_exists_is_no_use(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, ["k"])
        for n in range(200):
            put(store, [f"n{n}"])
            store.exists(["k"])
        assert store.exists(["k"]) == 0


def test_with_parents_leaves_go_first_and_every_block_has_its_parent(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        keys, parents = chain(8, "old")
        put(store, keys, parents)
        for n in range(30):
            fresh, above = chain(8, f"n{n}-")
            put(store, fresh, above)
            run = store.exists(keys)
            assert [store.exists([key]) for key in keys] == [1] * run + [0] * (8 - run)
            for some in range(n + 1):
                names, _ = chain(8, f"n{some}-")
                count = store.exists(names)
                assert not any(store.exists([name]) for name in names[count:])
        assert store.exists(keys) == 0


def test_a_parent_is_protected_by_what_hangs_on_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, ["parent", "child"], [None, "parent"])
        for n in range(200):
            put(store, [f"n{n}"])
            assert_served(store, ["child"])
        assert_served(store, ["parent"])


def test_a_batch_larger_than_the_store_keeps_its_head(tmp_path: Path) -> None:
    keys, parents = chain(300)
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, keys, parents)
        run = store.exists(keys)
        assert 20 < run < 300
        assert_served(store, keys[:run])
        assert not any(store.exists([key]) for key in keys[run:])


def test_pins_survive_any_pressure_and_count(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        put(store, ["p", "q", "free"], [None, "p", None])
        assert store.pin(["q", "no"]) == [True, False]
        assert store.pin(["q"]) == [True]
        store.unpin(["q", "free", "no"])
        for n in range(200):
            put(store, [f"n{n}"])
        assert_served(store, ["p", "q"])
        assert store.exists(["free"]) == 0
        store.unpin(["q"])
        for n in range(200):
            put(store, [f"m{n}"])
        assert store.exists(["p"]) == 0
        assert store.stats()["pinned_keys"] == 0
    with open_store(tmp_path / "s") as store:
        assert not any(segment.pins for segment in tree(store)._index)


def test_a_store_full_of_pins_takes_nothing_and_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        keys = [f"n{n}" for n in range(300)]
        for key in keys:
            put(store, [key])
            store.pin([key])
        there = [key for key in keys if store.exists([key])]
        assert 20 < len(there) < 300
        assert_served(store, there)
        assert store.stats()["counters"]["dropped_blocks"]["no_room"] > 0


# ---- parents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parents", [["unknown"], ["k"]])
def test_a_block_whose_parent_is_unknown_is_not_taken(
    tmp_path: Path, parents: list[str | None]
) -> None:
    with open_store(tmp_path / "s") as store:
        assert put(store, ["k"], parents) == [False]
        assert put(store, ["k", "x"], [*parents, None]) == [False, True]
        assert store.exists(["x"]) == 1
        assert store.stats()["counters"]["dropped_blocks"]["no_parent"] == 2


def test_a_batch_may_fork_and_hang_on_what_is_queued(tmp_path: Path) -> None:
    keys = ["r", "a", "aa", "b", "bb", "s", "ab"]
    parents = [None, "r", "a", "r", "b", None, "a"]
    with open_store(tmp_path / "s") as store:
        assert store.put(keys, [block_of(k) for k in keys], parents, wait=30) == [True] * 7
        assert store.put(["later"], [block_of("later")], ["ab"], wait=30) == [True]
        store.flush()
        assert_served(store, [*keys, "later"])
        assert store.delete(["a"]) == 4
        assert_served(store, ["r", "b", "bb", "s"])


def test_a_key_keeps_the_parent_it_came_with(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, ["p", "q", "k"], [None, None, "p"])
        assert put(store, ["k"], ["q"]) == [True]
        assert store.delete(["q"]) == 1
        assert_served(store, ["k"])
        assert store.delete(["p"]) == 2
        put(store, ["k"])
        assert_served(store, ["k"])


def test_delete_keeps_what_a_pin_needs_and_waits_for_the_queue(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        keys, parents = chain(4)
        put(store, keys, parents)
        store.pin(["c2"])
        assert store.delete(["c0"]) == store.delete(["c2"]) == 0
        assert store.delete(["c3"]) == 1
        store.unpin(["c2"])
        assert store.delete(["c0", "c1"]) == 3
        store.put(["queued"], [block_of("queued")])
        assert store.delete(["queued"]) == 1
        store.flush()
        assert store.exists(["queued"]) == 0


def test_keys_are_listed_and_what_leaves_is_told(tmp_path: Path) -> None:
    left: list[bytes] = []
    keys = ["", "a", "ä", "\0x", "y" * 256]
    with open_store(tmp_path / "s", ssd_bytes="1MiB", on_removed=left.append) as store:
        put(store, keys)
        listed = dict(store.listing())
        assert listed == {store.block_id(key): key.encode() for key in keys}
        store.delete(["a"])
        assert left == [store.block_id("a")]
        for n in range(200):
            put(store, [f"n{n}"])
        gone = {store.block_id(k) for k in [*keys, *(f"n{n}" for n in range(200))]}
        gone -= {block_id for block_id, _ in store.listing()}
        assert sorted(left) == sorted(gone), "each of them once"


# ---- threads ------------------------------------------------------------------------------------


def test_many_threads_on_the_same_keys_never_see_a_wrong_byte(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    store = open_store(tmp_path / "s", ssd_bytes="1MiB")

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                name = f"{rng.randrange(12)}-"
                keys, parents = chain(rng.randrange(1, 8), name)
                match rng.randrange(5):
                    case 0 | 1:
                        store.put(keys, [block_of(k) for k in keys], parents, wait=10)
                    case 2:
                        for key, found in zip(keys, get(store, keys), strict=True):
                            assert found is None or (found == block_of(key)).all()
                    case 3:
                        is_pinned = store.pin(keys)
                        held = [k for k, ok in zip(keys, is_pinned, strict=True) if ok]
                        assert_served(store, held)
                        store.unpin(held)
                    case _:
                        store.delete(keys[-1:])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    assert store.stats()["counters"]["corrupt_blocks"]["total"] == 0
    store.flush()
    assert set(tree(store)._index.parents) == {key for key, _ in tree(store).ssd.records()}
    assert not any(segment.pins for segment in tree(store)._index)
    store.close()
    assert admin.verify_store(tmp_path / "s", lambda *_: None)["bad_blocks"] == 0


def test_a_put_that_may_not_wait_is_refused_while_the_queue_is_full(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ssd_bytes="1MiB") as store:
        owned = tree(store).writer
        assert owned is not None
        with owned.changing:  # the writer waits in its commit
            keys = [f"k{n}" for n in range(300)]
            done = store.put(keys, [block_of(k) for k in keys], wait=0)
        assert 0 < sum(done) < 300
        store.flush()
        dropped = store.stats()["counters"]["dropped_blocks"]
        assert dropped["queue_full"] == done.count(False)
        queued = [key for key, taken in zip(keys, done, strict=True) if taken]
        assert sum(store.exists([key]) for key in queued) > 20


# ---- against a dict -----------------------------------------------------------------------------

WALKS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map("".join)
FLAT = st.sampled_from([f"flat{n}" for n in range(30)])
KEYS = st.one_of(WALKS, FLAT)
EVERY = {f"flat{n}": named(f"flat{n}", 256, KEYS_ROOT).key for n in range(30)} | {
    walk: named(walk, 256, KEYS_ROOT).key
    for size in range(1, 7)
    for walk in map("".join, itertools.product("ab", repeat=size))
}


class StoreMachine(RuleBasedStateMachine):
    """Walks are a tree: the parent of "aba" is "ab"; flat keys have none."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.open()
        self.truth: dict[str, Block] = {}
        self.pins: dict[str, int] = {}
        self.version = 0

    def open(self) -> BlockStore:
        return open_store(self.folder / "s", ssd_bytes="640KiB")

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def present(self) -> set[str]:
        parents = tree(self.store)._index.parents
        return {key for key, name in EVERY.items() if name in parents}

    @rule(keys=st.lists(KEYS, min_size=1, max_size=5))
    def put(self, keys: list[str]) -> None:
        self.version += 1
        whole = [key[: n + 1] for key in keys if key[0] != "f" for n in range(len(key))]
        whole += [key for key in keys if key[0] == "f"]
        parents = [key[:-1] or None if key[0] != "f" else None for key in whole]
        self.store.flush()
        before = self.present()
        sources = [block_of(key, self.version) for key in whole]
        done = self.store.put(whole, sources, parents, wait=30)
        for key, source, is_taken in zip(whole, sources, done, strict=True):
            if key not in before:
                assert is_taken
                self.truth[key] = source

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8))
    def get(self, keys: list[str]) -> None:
        self.store.flush()
        before = self.present()
        for key, found in zip(keys, get(self.store, keys), strict=True):
            assert (found is not None) == (key in before)
            if found is not None:
                np.testing.assert_array_equal(found, self.truth[key])

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3))
    def pin(self, keys: list[str]) -> None:
        for key, is_pinned in zip(keys, self.store.pin(keys), strict=True):
            self.pins[key] = self.pins.get(key, 0) + is_pinned

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3))
    def unpin(self, keys: list[str]) -> None:
        self.store.unpin(keys)
        for key in keys:
            self.pins[key] = max(0, self.pins.get(key, 0) - 1)

    @rule()
    def unpin_all(self) -> None:
        for key, count in self.pins.items():
            self.store.unpin([key] * count)
        self.pins = {}

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.flush()
        before = self.present()
        below = {k for k in before if k == key or (key[0] != "f" and k.startswith(key))}
        is_held = any(self.pins.get(k) for k in below)
        count = self.store.delete([key])
        assert count == (0 if is_held else len(below))
        assert self.present() == (before if is_held else before - below)

    @precondition(lambda self: not any(self.pins.values()))
    @rule()
    def reopen(self) -> None:
        self.store.flush()
        before = self.present()
        self.store.close()
        self.store = self.open()
        assert self.present() == before

    @rule(key=KEYS)
    def corrupt(self, key: str) -> None:
        """The medium loses a block: a miss, and all that hangs on it goes."""
        self.store.flush()
        if key not in self.present():
            assert not self.store.exists([key])
            return
        assert self.store.exists([key])
        tree(self.store).ssd.delete([named(key, 256, KEYS_ROOT).key])
        assert get(self.store, [key]) == [None]
        for lost in [k for k in EVERY if k == key or (key[0] != "f" and k.startswith(key))]:
            assert lost not in self.present()
            while self.pins.get(lost):  # its holders let go of nothing
                self.store.unpin([lost])
                self.pins[lost] -= 1

    @invariant()
    def accounts_agree(self) -> None:
        self.store.flush()
        shared = tree(self.store)
        index = shared._index
        assert set(index.parents) == {key for segment in index for key in segment.block_keys()}
        assert set(index.parents) == {key for key, _ in shared.ssd.records()}
        held = {key for key, count in self.pins.items() if count}
        assert shared.stats()["pinned_keys"] == len(held)
        assert sum(segment.pins for segment in index) == len(held)
        there = self.present()
        assert held <= there, "a pinned block is gone"
        assert all(key[:-1] in there for key in there if key[0] != "f" and len(key) > 1)
        assert (self.folder / "s" / "data.mdb").stat().st_size <= 640 << 10


StoreMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, derandomize=True
)
TestStoreAgainstADict = StoreMachine.TestCase


GOLDEN_FRAME = (
    "4b565342010000000300000001000000010000000100000005000000000000006c15cd1f9d9489d64909ea5b0b8d90"
    "a7257956df1caa4393ffcd5e7ba8c4aa36af2d1722a2e4219fe08a7b491702481131ca9b7a4f97d46fc05d18cbe46f"
    "b07f0700000000000000f2716798ea6c1696010000006b00000000000000be0fca843a7575b0000000000000000000"
    "00000000000000000000000000000000000000000000000001020304"
)
"""Block 1, key "k" below "p", of a store of 5-byte blocks and keys of up to 8. Never edited."""


def test_the_format_of_a_keyed_block_is_as_documented() -> None:
    form = keys_module.keyed_format(5, 8)
    block, parent = named("k", 8, KEYS_ROOT), named("p", 8, KEYS_ROOT)
    ids = struct.pack("<3I", 1, ord("k"), 0)
    assert block.words.tobytes() == ids
    root = hashlib.sha256(b"kvstore.keys.1").digest()
    spelled = b"kvb1" + struct.pack("<I", 3) + root + ids + struct.pack("<I", 0)
    assert block.hash == hashlib.sha256(spelled).digest()
    header = Header(
        block_tokens=form.block_tokens,
        number=1,
        namespace_id=1,
        payload_bytes=form.payload_bytes,
        block_hash=block.hash,
        parent_hash=parent.hash,
        sequence=7,
    )
    entries = {keys_module.GROUP: np.arange(5, dtype=np.uint8).reshape(1, 1, 5)}
    assert form.encode(header, block.words, form.entries_source(entries), 0).hex() == GOLDEN_FRAME
    text = json.loads(format_text(StoreFormat(form.layout, form.block_tokens, 8)))
    assert (text["key_bytes"], text["block_tokens"]) == (8, 3)
    group = text["groups"][0]
    assert (group["name"], group["values"], group["entry_format"]) == ("block", 5, "u8")
    assert (group["layers"], group["tokens_per_entry"]) == ([0], 3)


def test_the_environment_is_not_asked(tmp_path: Path) -> None:
    """Keys mean the same in every process, whatever Python's hash seed."""
    code = "from kvstore.blocks.keys import keys_root, named; print(named('k', 256, keys_root(None)).hash.hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert seen == {named("k", 256, KEYS_ROOT).hash.hex() + "\n"}
