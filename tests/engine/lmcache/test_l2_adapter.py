"""LMCache's own storage manager, controllers and plugin factory on block stores."""

from __future__ import annotations

import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.require import engine

engine("lmcache", "lmcache.v1.distributed.storage_manager", "tests.engine.lmcache.engine")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryObj

from kvstore import ConfigError, LayoutMismatch, StoreBusy
from kvstore.engine.lmcache import (
    KVStoreL2Adapter,
    KVStoreL2AdapterConfig,
)
from kvstore.engine.lmcache import tasks as tasks_module
from kvstore.engine.lmcache.keys import decode_key, encode_key
from kvstore.engine.lmcache.tasks import TaskQueue
from tests.engine.lmcache.engine import SHAPE, SIZE, WAIT, Server, key_of, spec, until
from tests.stores import tier_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_objects_go_out_and_come_back_equal(tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(8)]
    with Server(tmp_path) as server:
        assert type(server.adapter) is KVStoreL2Adapter
        written = server.store(keys)
        assert server.status["stored_object_count"] == 8
        server.forget()
        hits, found = server.fetch([*keys, key_of(99)])
        assert hits == 8
        assert all(torch.equal(f, written[k]) for f, k in zip(found, keys, strict=True))
        until(lambda: server.status["locked_key_count"] == 0)
        assert server.status["failed_tasks"] == 0
        assert server.manager.report_status()["is_healthy"]


def test_a_restart_keeps_objects_and_the_books(tmp_path: Path) -> None:
    keys = [key_of(i, salt) for i in range(3) for salt in ("", "a", "ä b")]
    with Server(tmp_path) as server:
        written = server.store(keys)
        usage = server.adapter.get_usage()
    with Server(tmp_path) as server:
        assert server.adapter.get_usage() == usage
        assert dict(usage.bytes_by_cache_salt) == {"": 3 * SIZE, "a": 3 * SIZE, "ä b": 3 * SIZE}
        assert (usage.total_bytes_used, usage.total_capacity_bytes) == (9 * SIZE, 8 << 20)
        hits, found = server.fetch(keys)
        assert hits == 9
        assert all(torch.equal(f, written[k]) for f, k in zip(found, keys, strict=True))


OTHERS = [
    {"salt": "yours"},
    {"salt": ""},
    {"model": "n"},
    {"rank": 2},
    {"group": 1},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_key_never_hits(tmp_path: Path, other: dict[str, Any]) -> None:
    with Server(tmp_path) as server:
        server.store([key_of(1, "mine")])
        server.forget()
        assert server.fetch([key_of(1, **{"salt": "mine", **other})])[0] == 0
        assert server.fetch([key_of(1, "mine")])[0] == 1


@pytest.mark.parametrize(
    "desc",
    [
        MemoryLayoutDesc([SHAPE], [torch.float16]),
        MemoryLayoutDesc([torch.Size([2, 3, 32, 16])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 3, 8, 32])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 3, 16, 32]), torch.Size([4])], [torch.bfloat16] * 2),
    ],
    ids=["dtype", "shape of equal size", "chunk size", "a further part"],
)
def test_another_layout_never_hits(tmp_path: Path, desc: Any) -> None:
    with Server(tmp_path, sizes=2) as server:
        server.store([key_of(1)])
        server.forget()
        assert server.fetch([key_of(1)], desc)[0] == 0
        server.forget()
        assert server.fetch([key_of(1)])[0] == 1


@pytest.mark.parametrize("other", [{"revision": "2"}, {"tenant": "another"}], ids=str)
def test_another_revision_or_tenant_never_hits(tmp_path: Path, other: dict[str, str]) -> None:
    with Server(tmp_path) as server:
        server.store([key_of(1)])
    with Server(tmp_path, **other) as server:
        assert server.fetch([key_of(1)])[0] == 0
    with Server(tmp_path) as server:
        assert server.fetch([key_of(1)])[0] == 1


def test_a_store_with_a_secret_is_refused_without_it(tmp_path: Path) -> None:
    with Server(tmp_path, secret=True) as server:
        server.store([key_of(1)])
    with Server(tmp_path, secret=True) as server:
        assert server.fetch([key_of(1)])[0] == 1
    with pytest.raises(LayoutMismatch, match="secret"):
        Server(tmp_path)


def test_a_corrupt_object_is_a_miss_and_leaves_the_books(tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(4)]
    with Server(tmp_path) as server:
        written = server.store(keys)
    file = tmp_path / f"size-{SIZE}" / "data.mdb"
    data = bytearray(file.read_bytes())
    needle = written[keys[2]].view(torch.uint8).numpy().tobytes()
    data[data.find(needle) + SIZE // 2] ^= 1
    file.write_bytes(data)
    with Server(tmp_path) as server:
        hits, found = server.fetch(keys)
        assert hits == 2, "the prefix ends before it"
        assert all(torch.equal(f, written[k]) for f, k in zip(found, keys, strict=False))
        until(lambda: server.status["locked_key_count"] == 0)
        assert server.adapter.get_usage().total_bytes_used == 3 * SIZE
        server.forget()
        server.store([keys[2]])
        server.forget()
        assert server.fetch(keys)[0] == 4


def test_the_stores_keep_the_cap_and_the_books_follow(tmp_path: Path) -> None:
    with Server(tmp_path, ssd_bytes="1MiB") as server:
        for n in range(60):
            server.store([key_of(2 * n), key_of(2 * n + 1)])
        size = sum(file.stat().st_size for file in tmp_path.rglob("data.mdb"))
        assert size <= 1 << 20
        status, usage = server.status, server.adapter.get_usage()
        blocks = status["stores"][str(SIZE)]["tiers"]["ssd"]["blocks"]
        assert 10 < blocks < 120
        assert status["stored_object_count"] == blocks
        assert usage.total_bytes_used == blocks * SIZE
        server.forget()
        assert server.fetch([key_of(119)])[0] == 1
        assert server.fetch([key_of(0)])[0] == 0


def test_lmcaches_own_eviction_deletes_before_the_store_has_to(tmp_path: Path) -> None:
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.1, "eviction_ratio": 0.5}
    with Server(tmp_path, ssd_bytes="2MiB", eviction=eviction) as server:
        for n in range(100):
            server.store([key_of(n)])
        until(lambda: server.adapter.get_usage().usage_fraction < 0.1)
        store = server.status["stores"][str(SIZE)]
        assert store["counters"]["evicted_blocks"] == {}
        assert server.status["stored_object_count"] == store["tiers"]["ssd"]["blocks"] < 100


def test_a_serde_of_lmcache_around_it(tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(4)]
    with Server(tmp_path, serde={"type": "fp8"}) as server:
        written = server.store(keys)
        server.forget()
        hits, found = server.fetch(keys)
        assert hits == 4
        for item, key in zip(found, keys, strict=True):
            torch.testing.assert_close(item, written[key], rtol=0.07, atol=0.07)


# ---- the adapter by itself, as the plugin factory makes it --------------------------------------


class Item:
    """A memory object of LMCache over a plain tensor, with the members that the adapter uses."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_size(self) -> int:
        return self.tensor.nbytes

    def get_shapes(self) -> list[torch.Size]:
        return [self.tensor.shape]

    def get_dtypes(self) -> list[torch.dtype]:
        return [self.tensor.dtype]

    @property
    def byte_array(self) -> memoryview:
        array: Any = self.tensor.view(torch.uint8).numpy().reshape(-1)
        return memoryview(array)


def item_of(number: int, size: int = 4096) -> Any:
    return Item(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seeded(number)))


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


DESCS = {0: MemoryLayoutDesc([torch.Size([4096])], [torch.uint8])}


@contextmanager
def adapter(path: Path, **options: Any) -> Iterator[Any]:
    found = create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(path, **options)))
    try:
        yield found
    finally:
        found.close()


def signalled(fd: int) -> None:
    assert select.select([fd], [], [], WAIT)[0], "no event"
    os.eventfd_read(fd)


def store(a: Any, keys: list[Any], items: list[Any]) -> Any:
    task = a.submit_store_task(keys, items)
    results: dict[int, Any] = {}
    while task not in results:
        signalled(a.get_store_event_fd())
        results |= a.pop_completed_store_tasks()
    assert task not in a.pop_completed_store_tasks(), "a result comes once"
    return results[task]


def lookup(a: Any, keys: list[Any], descs: Any = DESCS) -> list[bool]:
    task = a.submit_lookup_and_lock_task(keys, descs)
    while (found := a.query_lookup_and_lock_result(task)) is None:
        signalled(a.get_lookup_and_lock_event_fd())
    assert a.query_lookup_and_lock_result(task) is None, "a result comes once"
    return [found.test(i) for i in range(len(keys))]


def load(a: Any, keys: list[Any], items: list[Any]) -> list[bool]:
    task = a.submit_load_task(keys, items)
    while (found := a.query_load_result(task)) is None:
        signalled(a.get_load_event_fd())
    assert a.query_load_result(task) is None, "a result comes once"
    return [found.test(i) for i in range(len(keys))]


def test_three_distinct_event_fds(tmp_path: Path) -> None:
    with adapter(tmp_path) as a, adapter(tmp_path / "other") as b:
        fds = [
            f()
            for x in (a, b)
            for f in (x.get_store_event_fd, x.get_lookup_and_lock_event_fd, x.get_load_event_fd)
        ]
        assert len(set(fds)) == 6
        assert a.query_load_result(7) is a.query_lookup_and_lock_result(7) is None
        assert a.pop_completed_store_tasks() == {}


def test_store_lookup_load_unlock(tmp_path: Path) -> None:
    keys, items = [key_of(i) for i in range(3)], [item_of(i) for i in range(3)]
    with adapter(tmp_path) as a:
        assert store(a, keys, items).bytes_transferred() == 3 * 4096
        again = store(a, keys, [item_of(9)] * 3)
        assert again.is_successful(), "they are there"
        assert again.bytes_transferred() == 0
        assert lookup(a, [*keys, key_of(9)]) == [True, True, True, False]
        targets = [item_of(77) for _ in range(4)]
        assert load(a, [*keys, key_of(9)], targets) == [True, True, True, False]
        assert all(torch.equal(t.tensor, i.tensor) for t, i in zip(targets, items, strict=False))
        assert torch.equal(targets[3].tensor, item_of(77).tensor), "a miss touches nothing"


def test_a_lock_protects_until_it_is_given_back_as_often(tmp_path: Path) -> None:
    key = key_of(1)
    with adapter(tmp_path, ssd_bytes="1MiB") as a:
        store(a, [key], [item_of(1)])
        assert lookup(a, [key]) == lookup(a, [key]) == [True]
        a.submit_unlock([key])
        a.delete([key])
        for n in range(2, 300):
            store(a, [key_of(n)], [item_of(n)])
        target = item_of(0)
        assert load(a, [key], [target]) == [True]
        assert torch.equal(target.tensor, item_of(1).tensor)
        a.submit_unlock([key, key, key_of(299)])  # one too many, and one that was never locked
        assert a.report_status()["locked_key_count"] == 0
        a.delete([key])
        assert lookup(a, [key]) == [False]


def test_two_layouts_of_one_key_are_locked_and_given_back_apart(tmp_path: Path) -> None:
    key, other = key_of(1), {0: MemoryLayoutDesc([torch.Size([2, 2048])], [torch.uint8])}
    second = Item(item_of(2).tensor.reshape(2, 2048))
    with adapter(tmp_path) as a:
        store(a, [key], [item_of(1)])
        store(a, [key], [second])
        assert lookup(a, [key]) == lookup(a, [key], other) == [True]
        assert lookup(a, [key], {}) == [True], "without a hint, any"
        target = Item(torch.zeros(2, 2048, dtype=torch.uint8))
        assert load(a, [key], [target]) == [True]
        assert torch.equal(target.tensor, second.tensor)
        a.submit_unlock([key] * 3)
        a.delete([key])
        assert a.get_usage().total_bytes_used == 0


def test_a_store_task_fails_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter(tmp_path) as a:
        store(a, [key_of(0)], [item_of(0)])
        own = a.objects.stores[4096]
        real = own.exists
        bad = encode_key(key_of(2), a._entries([key_of(2)], [item_of(2)])[0].layout)
        monkeypatch.setattr(own, "exists", lambda names: 0 if names == [bad] else real(names))
        assert not store(a, [key_of(1), key_of(2)], [item_of(1), item_of(2)]).is_successful()
        assert lookup(a, [key_of(0), key_of(1), key_of(2)]) == [True, False, False]
        assert a.get_usage().total_bytes_used == 4096
        monkeypatch.undo()
        assert not store(a, [key_of(3), key_of(4)], [item_of(3), item_of(4, 8192)]).is_successful()
        assert lookup(a, [key_of(3)]) == [False], "nothing of it is there"
        assert a.report_status()["failed_tasks"] == 1


def test_a_failing_disk_fails_tasks_and_shows_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapter(tmp_path) as a:
        store(a, [key_of(0)], [item_of(0)])
        tier = tier_of(a.objects.stores[4096])

        def fail(*_: Any) -> None:
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(tier, "put", fail)
            for n in range(1, 5):
                assert not store(a, [key_of(n)], [item_of(n)]).is_successful()
            assert not a.report_status()["is_healthy"]
            assert lookup(a, [key_of(0), key_of(1)]) == [True, False]


def test_a_failing_disk_ends_no_thread_of_lmcache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with adapter(tmp_path, sizes=2) as a:
        keys, items = [key_of(0), key_of(1)], [item_of(0), item_of(1, 8192)]
        assert store(a, keys, items).is_successful()
        monkeypatch.setattr(a.objects.stores[4096], "delete", fail)
        a.delete([keys[0]])
        assert a.report_status()["failed_tasks"] == 1
        monkeypatch.setattr(tier_of(a.objects.stores[4096]), "sync", fail)
    assert a.report_status()["is_healthy"] is False
    with adapter(tmp_path, sizes=2) as a:
        assert lookup(a, keys, {}) == [True, True], "both stores were closed"


def test_tasks_after_the_end_fail_at_once(tmp_path: Path) -> None:
    with adapter(tmp_path) as a:
        store(a, [key_of(0)], [item_of(0)])
        lookup(a, [key_of(0)])
    task = a.submit_store_task([key_of(1)], [item_of(1)])
    assert not a.pop_completed_store_tasks()[task].is_successful()
    task = a.submit_lookup_and_lock_task([key_of(0)], DESCS)
    assert not a.query_lookup_and_lock_result(task).test(0)
    task = a.submit_load_task([key_of(0)], [item_of(9)])
    assert not a.query_load_result(task).test(0)
    a.submit_unlock([key_of(0)])


def test_an_object_that_goes_before_it_is_noted_leaves_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapter(tmp_path) as a:
        enter = a.objects.enter

        def late(block_id: bytes, entry: Any) -> bool:
            a.objects.stores[4096].delete([entry.name])
            a.report_removed()  # as in a thread of LMCache's that evicts or loads
            return bool(enter(block_id, entry))

        monkeypatch.setattr(a.objects, "enter", late)
        store(a, [key_of(0)], [item_of(0)])
        assert a.get_usage().total_bytes_used == 0
        assert a.list_l2_keys().entries == ()


def test_objects_of_several_sizes_share_the_cap(tmp_path: Path) -> None:
    with adapter(tmp_path, sizes=2, ssd_bytes="4MiB") as a:
        items = [item_of(i, size) for i, size in enumerate((4096, 8192, 4096, 8192))]
        keys = [key_of(i) for i in range(4)]
        assert store(a, keys, items).is_successful()
        targets = [item_of(9, size) for size in (4096, 8192, 4096, 8192)]
        assert load(a, keys, targets) == [True] * 4
        assert all(torch.equal(t.tensor, i.tensor) for t, i in zip(targets, items, strict=True))
        assert load(a, keys[:1], [item_of(9, 8192)]) == [False], "of another size"
        stores = a.report_status()["stores"]
        caps = [stores[size]["tiers"]["ssd"]["capacity_bytes"] for size in ("4096", "8192")]
        assert sum(caps) <= 4 << 20
        assert not store(a, [key_of(5)], [item_of(5, 1234)]).is_successful()
    with pytest.raises(ConfigError, match="2 object sizes"), adapter(tmp_path, sizes=1):
        pass


def _is_idle(worker: TaskQueue) -> bool:
    return worker.waiting == 0


def test_a_full_queue_fails_at_once_and_unlocking_never_does(tmp_path: Path) -> None:
    with adapter(tmp_path, queue_tasks=1) as a:
        key, item = key_of(1), item_of(1)
        store(a, [key], [item])
        lookup(a, [key])
        gate = threading.Event()
        for worker in (a.writer, a.reader):
            worker.submit(lambda: gate.wait(WAIT) and None)
            is_idle = functools.partial(_is_idle, worker)
            until(is_idle)
        first = a.submit_store_task([key_of(2)], [item_of(2)])
        refused = a.submit_store_task([key_of(3)], [item_of(3)])
        signalled(a.get_store_event_fd())
        done = a.pop_completed_store_tasks()
        assert list(done) == [refused]
        assert not done[refused].is_successful()
        waiting = a.submit_load_task([key], [item_of(0)])
        refused = a.submit_lookup_and_lock_task([key], DESCS)
        assert not a.query_lookup_and_lock_result(refused).test(0)
        assert a.query_load_result(waiting) is None
        a.submit_unlock([key])
        assert a.report_status()["locked_key_count"] == 0
        assert a.report_status()["refused_tasks"] == 2
        gate.set()
        until(lambda: first in a.pop_completed_store_tasks())
        assert until(lambda: a.query_load_result(waiting)).test(0)


def test_what_waits_is_finished_by_close(tmp_path: Path) -> None:
    a = create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(tmp_path)))
    for n in range(20):
        a.submit_store_task([key_of(n)], [item_of(n)])
    a.close()
    a.close()
    with adapter(tmp_path) as a:
        assert lookup(a, [key_of(n) for n in range(20)]) == [True] * 20


class Listener:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.calls.append(("stored", keys))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.calls.append(("accessed", keys))

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.calls.append(("deleted", keys))


def test_listeners_hear_of_everything_once(tmp_path: Path) -> None:
    with adapter(tmp_path, ssd_bytes="1MiB") as a:
        listener = Listener()
        a.register_listener(listener)
        key = key_of(0)
        store(a, [key], [item_of(0)])
        load(a, [key], [item_of(1)])
        a.delete([key])
        assert listener.calls == [("stored", [key]), ("accessed", [key]), ("deleted", [key])]
        for n in range(200):
            store(a, [key_of(n % 150)], [item_of(n % 150)])
        there: set[Any] = set()
        for what, keys in listener.calls:
            if what == "stored":
                assert there.isdisjoint(keys), "stored twice"
                there.update(keys)
            elif what == "deleted":
                assert there.issuperset(keys), "deleted and never stored"
                there.difference_update(keys)
        assert there == set(a.objects.entries)
        assert a.get_usage().total_bytes_used == 4096 * len(there)


def test_keys_are_listed_in_pages(tmp_path: Path) -> None:
    keys = [key_of(i, model=model) for i in range(7) for model in ("m", "n")]
    with adapter(tmp_path) as a:
        store(a, keys, [item_of(i) for i in range(14)])
        seen, cursor = [], None
        while True:
            page = a.list_l2_keys("m", page_size=3, cursor=cursor)
            seen += [entry.key for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                break
        assert sorted(k.chunk_hash_hex for k in seen) == sorted(
            k.chunk_hash.hex() for k in keys if k.model_name == "m"
        )
        assert len(a.list_l2_keys().entries) == 14
        assert all(entry.size_bytes == 4096 for entry in a.list_l2_keys().entries)
        for size in (0, -1, True):
            with pytest.raises(ValueError, match="page_size"):
                a.list_l2_keys(page_size=size)
        for token in ("", "zz", "6b76"):
            with pytest.raises(ValueError, match="cursor"):
                a.list_l2_keys(cursor=token)


def test_threads_of_both_controllers_and_an_evictor_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with adapter(tmp_path, ssd_bytes="1MiB") as a:

        def stores() -> None:
            for n in range(150):
                store(a, [key_of(n % 40)], [item_of(n % 40)])

        def loads() -> None:
            for n in range(150):
                key = key_of(n % 40)
                if lookup(a, [key])[0]:
                    target = item_of(99)
                    assert load(a, [key], [target]) == [True], "what was locked loads"
                    assert torch.equal(target.tensor, item_of(n % 40).tensor)
                    a.submit_unlock([key])

        def deletes() -> None:
            for n in range(150):
                a.delete([key_of(n * 7 % 40)])

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(w,)) for w in (stores, loads, deletes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures
        a.report_removed()
        status = a.report_status()
        assert status["stored_object_count"] == status["stores"]["4096"]["tiers"]["ssd"]["blocks"]
        assert a.get_usage().total_bytes_used == 4096 * status["stored_object_count"]
        assert (status["failed_tasks"], status["locked_key_count"]) == (0, 0)


# ---- keys and options ---------------------------------------------------------------------------


def test_no_two_keys_spell_the_same_bytes() -> None:
    keys = [
        key_of(1),
        ObjectKey(b"", "", 0),
        ObjectKey(b"a", "b", 1),
        ObjectKey(b"", "ab", 1),
        ObjectKey(b"ab", "", 1),
        ObjectKey(b"a", "b1", 1),
        ObjectKey(b"a", "b", 11),
        ObjectKey(b"a", "b", 1, 1),
        ObjectKey(b"a", "b", 1, 0, "1"),
        ObjectKey(b"a", "b", -1, 0, "1"),
        ObjectKey(b"a", "b", 2**70, 3, "ä"),
    ]
    layouts = [b"x" * 32, b"y" * 32]
    names = {encode_key(key, layout) for key in keys for layout in layouts}
    assert len(names) == len(keys) * 2
    for key in keys:
        assert decode_key(encode_key(key, layouts[0])) == (key, layouts[0])
    for bad in (b"", b"kvl1", encode_key(keys[0], b"x")[:-1], encode_key(keys[0], b"x") + b"y"):
        assert decode_key(bad) is None


GIVEN = {"path": "p", "revision": "unchecked"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "'path' is missing"),
        ({"path": "p", "size": 1}, "'size' is unknown, expected some of path, ssd_bytes, sizes"),
        ({"path": 1}, "'path' must be text"),
        ({"path": "p"}, "'revision' is missing.*weights_digest.*or 'unchecked'"),
        ({"path": "p", "revision": ""}, "'revision' is missing"),
        ({"path": "p", "revision": 7}, "'revision' must be text"),
        ({"path": "p", "secret": 1}, "'secret' must be True or False"),
        ({**GIVEN, "ssd_bytes": "lots"}, "ssd_bytes must be bytes"),
        ({**GIVEN, "sizes": 0}, "'sizes' must be a positive integer"),
        ({**GIVEN, "queue_tasks": True}, "'queue_tasks' must be a positive integer"),
    ],
)
def test_options_are_checked(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStoreL2AdapterConfig.from_dict(params)
    assert "ssd_bytes" in KVStoreL2AdapterConfig.help()


def test_another_process_that_owns_the_store_is_named(tmp_path: Path) -> None:
    with adapter(tmp_path) as a:
        store(a, [key_of(1)], [item_of(1)])
        code = f"""
import sys
from kvstore import StoreBusy
from kvstore.engine.lmcache import KVStoreL2Adapter, KVStoreL2AdapterConfig
try:
    KVStoreL2Adapter(KVStoreL2AdapterConfig.from_dict({{"path": {str(tmp_path)!r}, "revision": "1"}}))
except StoreBusy as error:
    print("busy" if "{os.getpid()}" in str(error) else error)
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stdout.strip().endswith("busy"), done.stderr
    assert issubclass(StoreBusy, Exception)


def test_a_directory_that_nothing_can_be_stored_in_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be created: .* choose a directory"):
        create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(tmp_path / "file" / "below")))
    with pytest.raises(ConfigError, match="cannot be created: .* choose a directory"):
        create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(tmp_path / "file")))
    with adapter(tmp_path / "s") as a:
        store(a, [key_of(1)], [item_of(1)])
    (one,) = (tmp_path / "s").iterdir()
    with pytest.raises(ConfigError, match="is a store of its own; choose a new or empty directory"):
        create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(one)))


def test_a_store_that_cannot_be_opened_is_ill_health_until_one_can(tmp_path: Path) -> None:
    with adapter(tmp_path, ssd_bytes="1KiB") as a:
        assert a.report_status()["is_healthy"]
        assert not store(a, [key_of(1)], [item_of(1)]).is_successful()
        status = a.report_status()
        assert not status["is_healthy"]
        assert "ssd_bytes is 1024, expected at least" in status["alarms"][0]
        a.objects.capacity = 1 << 26
        assert store(a, [key_of(1)], [item_of(1)]).is_successful()
        assert a.report_status()["is_healthy"]


# ---- drift --------------------------------------------------------------------------------------

ABSTRACT = [
    *("get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd"),
    *("submit_store_task", "pop_completed_store_tasks"),
    *("submit_lookup_and_lock_task", "query_lookup_and_lock_result", "submit_unlock"),
    *("submit_load_task", "query_load_result", "close"),
]


@pytest.mark.parametrize("name", [*ABSTRACT, "delete", "list_l2_keys", "report_status"])
def test_signatures_are_those_of_lmcache(name: str) -> None:
    theirs = inspect.signature(getattr(L2AdapterInterface, name)).parameters
    ours = inspect.signature(getattr(KVStoreL2Adapter, name)).parameters
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_nothing_abstract_is_left_and_nothing_new_was_added() -> None:
    assert set(L2AdapterInterface.__abstractmethods__) == set(ABSTRACT)
    assert not KVStoreL2Adapter.__abstractmethods__
    for name in ("get_size", "get_shapes", "get_dtypes", "byte_array"):
        assert hasattr(MemoryObj, name)


def test_a_worker_runs_what_it_took_and_stops() -> None:
    worker = TaskQueue("test", 2)
    done: list[int] = []
    for number in range(2):
        assert worker.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    worker.close()
    assert done == [0, 1]
    assert not worker.submit(lambda: None)


def test_a_task_that_hangs_keeps_no_close_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that never answers: the close gives up, and the thread does not outlive the process."""
    monkeypatch.setattr(tasks_module, "CLOSE_SECONDS", 0.01)
    worker, gate, done = TaskQueue("test", 2), threading.Event(), threading.Event()
    assert worker.submit(lambda: done.set() if gate.wait(WAIT) else None)
    worker.close()
    worker.close()
    assert not done.is_set()
    assert all(t.daemon for t in threading.enumerate() if t.name == "test")
    gate.set()
    assert done.wait(WAIT)


# ---- the server ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_lmcaches_server_starts_with_it_and_is_healthy(tmp_path: Path) -> None:
    port, http = free_port(), free_port()
    command = [
        # Its command, which may be installed below the environment that runs this.
        *(sys.executable, "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())"),
        *("server", "--host", "127.0.0.1"),
        *("--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)),
        *("--l1-size-gb", "0.05", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *("--l2-adapter", json.dumps(spec(tmp_path / "l2"))),
    ]
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    try:

        def status() -> Any:
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/status", timeout=5) as reply:
                    return json.load(reply)
            except OSError:
                return None

        text = json.dumps(until(status))
        assert '"type": "KVStoreL2Adapter"' in text, text
        assert '"is_healthy": false' not in text
    finally:
        server.terminate()
        server.wait(timeout=60)
