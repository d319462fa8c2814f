"""SGLang's own controllers, host pools and hashes on a block store."""

from __future__ import annotations

import inspect
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.require import engine

engine(
    "sglang",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.observability.metrics_collector",
    "tests.engine.sglang.engine",
)

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore import ConfigError, LayoutMismatch, StoreError
from kvstore.engine.sglang import KVStoreHiCache
from kvstore.engine.sglang.pools import IN_HOST, KV, ON_SSD
from tests.builders import Clock
from tests.engine.sglang.engine import (
    PAGE,
    backend,
    config,
    device_pool,
    extra,
    fill,
    host_pool,
    tokens,
)
from tests.stores import tier_of

pytestmark = pytest.mark.filterwarnings("ignore")

WAIT = 60.0
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES


class Allocator:
    """The one method of a token allocator that a controller asks at its start."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def get_kvcache(self) -> Any:
        return self.pool


@contextmanager
def controller(
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "layer_first",
    page: int = PAGE,
    model: str = "m",
    **options: Any,
) -> Iterator[Any]:
    """SGLang's controller with its four storage threads, on a real host pool."""
    device = device_pool(dtype, page)
    found = HiCacheController(
        *(Allocator(device), host_pool(device, layout), page, None, threading.Event()),
        io_backend="direct",
        storage_backend="dynamic",
        model_name=model,
        storage_backend_extra_config=extra(path, **options),
    )
    fill(found.mem_pool_host)
    try:
        yield found
    finally:
        found.detach_storage_backend()


def pages_at(pool: Any, indices: torch.Tensor, page: int = PAGE) -> list[torch.Tensor]:
    starts = indices[::page].tolist()
    return [pool.get_data_page(start).view(torch.uint8).clone() for start in starts]


def backup(c: Any, ids: Any, indices: torch.Tensor, **pools: Any) -> int:
    hashes = get_storage_hash_str(ids, None, page_size=c.page_size)
    c.write_storage(indices, ids, hashes, **pools)
    return int(c.ack_backup_queue.get(timeout=WAIT).completed_tokens)


def prefetch(
    c: Any,
    ids: Any,
    indices: torch.Tensor,
    between: Callable[[], Any] = lambda: None,
    handle: Any = "r",
    **pools: Any,
) -> tuple[int, int, Any]:
    """Query, then transfer, through the controller's threads; return tokens found and tokens loaded."""
    c.prefetch(handle, ids, **pools)
    operation = c.prefetch_hit_queue.get(timeout=WAIT)
    found = operation.storage_hit_count
    between()
    operation.host_indices = indices[:found]
    if not found:
        return 0, 0, operation
    c.prefetch_buffer.put(operation)
    came = 0
    while not (ack := c.ack_prefetch_queue.get(timeout=WAIT)).completed_req:
        came = ack.completed_tokens if ack.completed_tokens is not None else came
        operation.pool_hits = ack.pool_hits
    return found, came, operation


def threads_of(c: Any) -> list[threading.Thread]:
    return [*(c.prefetch_thread, c.prefetch_io_aux_thread, c.prefetch_sync_thread, c.backup_thread)]


# ---- through the controller's own threads -------------------------------------------------------


@pytest.mark.parametrize("v1", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_backed_up_and_prefetched_are_equal_byte_for_byte(
    tmp_path: Path, layout: str, v1: int
) -> None:
    with controller(tmp_path, layout=layout, interface_v1=v1) as c:
        host = c.mem_pool_host
        assert isinstance(c.storage_backend, KVStoreHiCache)
        ids, slots = tokens(8), host.alloc(8 * PAGE)
        before = pages_at(host, slots)
        assert backup(c, ids, slots) == 8 * PAGE
        host.kv_buffer.zero_()
        other = host.alloc(8 * PAGE)  # other slots than those they came from
        found, came, _ = prefetch(c, [*ids, 7], other)
        assert found == came == 8 * PAGE
        assert all(map(torch.equal, before, pages_at(host, other)))
        assert not host.kv_buffer.view(torch.uint8)[:, ..., :1].isnan().any()


def test_more_pages_than_a_batch_of_sglang(tmp_path: Path) -> None:
    pages = hicache_storage.STORAGE_BATCH_SIZE + 2  # a batch's chain ends where the next begins
    with controller(tmp_path, ssd_bytes="16MiB") as c:
        host = c.mem_pool_host
        pages = min(pages, host.size // PAGE)
        ids, slots = tokens(pages), host.alloc(pages * PAGE)
        before = pages_at(host, slots)
        assert backup(c, ids, slots) == pages * PAGE
        host.kv_buffer.zero_()
        assert prefetch(c, ids, slots)[:2] == (pages * PAGE, pages * PAGE)
        assert all(map(torch.equal, before, pages_at(host, slots)))


def test_a_restart_keeps_pages(tmp_path: Path) -> None:
    ids = tokens(6)
    with controller(tmp_path) as c:
        slots = c.mem_pool_host.alloc(6 * PAGE)
        before = pages_at(c.mem_pool_host, slots)
        backup(c, ids, slots)
    with controller(tmp_path) as c:
        slots = c.mem_pool_host.alloc(6 * PAGE)
        assert prefetch(c, ids, slots)[:2] == (6 * PAGE, 6 * PAGE)
        assert all(map(torch.equal, before, pages_at(c.mem_pool_host, slots)))


def test_a_store_with_a_secret_hits_after_a_restart_and_is_refused_without_it(
    tmp_path: Path,
) -> None:
    ids = tokens(6)
    for hit in (0, 6):
        with controller(tmp_path, secret=True) as c:
            slots = c.mem_pool_host.alloc(6 * PAGE)
            assert prefetch(c, ids, slots)[0] == hit * PAGE
            backup(c, ids, slots)
    with pytest.raises(LayoutMismatch, match="secret"), controller(tmp_path):
        pass


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"layout": "page_first"},
        {"model": "n"},
        {"weights": "revision 2"},
        {"tenant": "another"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_identity_never_hits(tmp_path: Path, other: dict[str, Any]) -> None:
    ids = tokens(4)
    with controller(tmp_path) as c:
        backup(c, ids, c.mem_pool_host.alloc(4 * PAGE))
    with controller(tmp_path, **other) as c:
        assert prefetch(c, ids, c.mem_pool_host.alloc(4 * PAGE))[0] == 0
    with controller(tmp_path) as c:
        assert prefetch(c, ids, c.mem_pool_host.alloc(4 * PAGE))[0] == 4 * PAGE


def test_another_page_size_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    ids = tokens(4)
    with controller(tmp_path) as c:
        backup(c, ids, c.mem_pool_host.alloc(4 * PAGE))
    with pytest.raises(LayoutMismatch, match="left untouched"), controller(tmp_path, page=8):
        pass
    with controller(tmp_path) as c:
        assert prefetch(c, ids, c.mem_pool_host.alloc(4 * PAGE))[0] == 4 * PAGE


def test_a_page_size_of_equal_bytes_never_hits(tmp_path: Path) -> None:
    ids = tokens(4)
    with controller(tmp_path, page=16) as c:
        backup(c, ids, c.mem_pool_host.alloc(4 * 16))
    with controller(tmp_path, page=8, dtype=torch.float32) as c:
        assert prefetch(c, ids, c.mem_pool_host.alloc(64))[0] == 0


@pytest.mark.parametrize(
    "mine", [{"cache_salt": "mine"}, {"extra_key": "lora-1"}, {"extra_key": "a", "cache_salt": "b"}]
)
def test_another_salt_or_lora_never_hits(tmp_path: Path, mine: dict[str, str]) -> None:
    ids = array("q", tokens(4))
    keys = [
        *(mine, {}, {"cache_salt": "yours"}, {"extra_key": "lora-2"}),
        {"extra_key": "", "cache_salt": "ab"},
    ]
    with controller(tmp_path) as c:
        slots = c.mem_pool_host.alloc(4 * PAGE)
        assert backup(c, RadixKey(ids, **mine), slots) == 4 * PAGE
        hits = [prefetch(c, RadixKey(ids, **key), slots)[0] for key in keys]
        assert hits == [4 * PAGE, 0, 0, 0, 0]


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit in the only occurrence of ``needle`` in a store's file."""
    data = bytearray(path.read_bytes())
    at = data.find(needle)
    assert at >= 0
    data[at + len(needle) // 2] ^= 1
    path.write_bytes(data)


def test_a_corrupt_page_ends_the_prefetch_before_it(tmp_path: Path) -> None:
    ids = tokens(6)
    with controller(tmp_path) as c:
        slots = c.mem_pool_host.alloc(6 * PAGE)
        before = pages_at(c.mem_pool_host, slots)
        backup(c, ids, slots)
    flip(next(tmp_path.rglob("data.mdb")), before[3].numpy().tobytes())
    with controller(tmp_path) as c:
        host = c.mem_pool_host
        slots = host.alloc(6 * PAGE)
        untouched = pages_at(host, slots)
        found, came, _ = prefetch(c, ids, slots)
        assert (found, came) == (6 * PAGE, 3 * PAGE)
        now = pages_at(host, slots)
        assert all(map(torch.equal, before[:3], now[:3]))
        assert torch.equal(now[3], untouched[3]), "a bad page was written half or whole"
        assert prefetch(c, ids, slots)[0] == 3 * PAGE, "it is gone, and what hangs on it"
        assert c.storage_backend.stats()["pools"]["kv"]["counters"]["corrupt_blocks"]["total"] == 1
        backup(c, ids, slots)
        assert prefetch(c, ids, slots)[:2] == (6 * PAGE, 6 * PAGE)


@pytest.mark.parametrize("v1", [0, 1])
def test_a_page_that_goes_between_query_and_transfer_is_a_miss(tmp_path: Path, v1: int) -> None:
    with controller(tmp_path, interface_v1=v1) as c:
        host, ids = c.mem_pool_host, tokens(6)
        slots = host.alloc(6 * PAGE)
        before = pages_at(host, slots)
        backup(c, ids, slots)
        host.kv_buffer.zero_()
        pool = c.storage_backend.pools.by_name[KV]
        last = get_storage_hash_str(ids, None, page_size=PAGE)[4]
        found, came, _ = prefetch(c, ids, slots, lambda: pool.store.delete([pool.key(last)]))
        assert (found, came) == (6 * PAGE, 4 * PAGE)
        now = pages_at(host, slots)
        assert all(map(torch.equal, before[:4], now[:4]))
        assert not now[4].any()


def test_an_error_below_never_ends_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    with controller(tmp_path) as c:
        ids, slots = tokens(4), c.mem_pool_host.alloc(4 * PAGE)
        backup(c, ids, slots)
        store = c.storage_backend.pools.by_name[KV].store
        for name in ("exists", "get", "put"):
            with monkeypatch.context() as patch:
                patch.setattr(store, name, fail)
                for _ in range(3):
                    assert prefetch(c, ids, slots)[1] in (0, 4 * PAGE)
                    backup(c, tokens(2, seed=3), slots[: 2 * PAGE])
        assert all(thread.is_alive() for thread in threads_of(c))
        counts = c.storage_backend.stats()["counts"]
        assert counts["error in batch_get_v1"] == counts["error in batch_exists"] == 3
        lines = [r.message for r in caplog.records if r.name == "kvstore.engine.sglang"]
        assert len(lines) == len(set(lines)), "one line for a kind of failure"
        assert prefetch(c, ids, slots)[:2] == (4 * PAGE, 4 * PAGE)


def test_sglangs_own_failure_injector_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    with controller(tmp_path) as c:
        host = c.mem_pool_host
        assert type(c.storage_backend).__name__ == "HiCacheStorageFailureInjector"
        slots = host.alloc(4 * PAGE)
        for seed in range(12):
            fill(host)
            before = pages_at(host, slots)
            backup(c, tokens(4, seed), slots)
            host.kv_buffer.zero_()
            _, came, _ = prefetch(c, tokens(4, seed), slots)
            now = pages_at(host, slots)
            assert all(map(torch.equal, before[: came // PAGE], now[: came // PAGE]))
        assert all(thread.is_alive() for thread in threads_of(c))


def test_eviction_keeps_the_cap_and_whole_prefixes(tmp_path: Path) -> None:
    with controller(tmp_path, ssd_bytes="1MiB") as c:
        host = c.mem_pool_host
        slots = host.alloc(8 * PAGE)
        for seed in range(60):
            backup(c, tokens(8, seed), slots)
            size = sum(file.stat().st_size for file in tmp_path.rglob("data.mdb"))
            assert size <= 1 << 20
        assert c.storage_backend.stats()["pools"]["kv"]["counters"]["evicted_blocks"]["ssd"] > 100
        assert prefetch(c, tokens(8, 59), slots)[:2] == (8 * PAGE, 8 * PAGE)
        assert prefetch(c, tokens(8, 0), slots)[0] == 0


# ---- several pools ------------------------------------------------------------------------------


class Hybrid:
    """SGLang's hybrid controller over real host pools: KV, an indexer beside it, a sliding window."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.pools = {name: host_pool(device_pool()) for name in ("kv", "indexer", "swa")}
        entries = [
            PoolEntry(
                name=PoolName(name),
                host_pool=pool,
                device_pool=None,
                layer_mapper=lambda layer: layer,
                is_primary_index_anchor=name == "kv",
            )
            for name, pool in self.pools.items()
        ]
        self.controller = HybridCacheController(
            *(Allocator(device_pool()), HostPoolGroup(entries), PAGE, None, threading.Event()),
            io_backend="direct",
            storage_backend="dynamic",
            model_name="m",
            storage_backend_extra_config=extra(path, **options),
        )
        for pool in self.pools.values():
            fill(pool)

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def transfers(self, window: torch.Tensor, keys: list[str]) -> list[Any]:
        return [
            PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV, hit_policy=ALL),
            PoolTransfer(PoolName.SWA, host_indices=window, keys=keys, hit_policy=TRAILING),
        ]

    def __enter__(self) -> Hybrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()


HANDLE = CacheRequestHandle("r", 0)


def test_three_pools_through_the_hybrid_controller(tmp_path: Path) -> None:
    with Hybrid(tmp_path) as h:
        ids = tokens(6)
        hashes = get_storage_hash_str(ids, None, page_size=PAGE)
        slots = {name: pool.alloc(6 * PAGE) for name, pool in h.pools.items()}
        slots["indexer"], window = slots["kv"], slots["swa"][: 2 * PAGE]
        before = {name: pages_at(h.pools[name], slots[name]) for name in ("kv", "indexer")}
        before["swa"] = pages_at(h.pools["swa"], window)
        transfers = h.transfers(window, hashes[4:])
        assert backup(h.controller, ids, slots["kv"], extra_pools=transfers) == 6 * PAGE
        for pool in h.pools.values():
            pool.kv_buffer.zero_()
        found, came, operation = prefetch(
            *(h.controller, ids, slots["kv"]),
            handle=HANDLE,
            extra_pools=h.transfers(window, hashes[4:]),
        )
        assert (found, came) == (6 * PAGE, 6 * PAGE)
        assert operation.pool_hits["swa"] == 2
        assert all(map(torch.equal, before["kv"], pages_at(h.pools["kv"], slots["kv"])))
        assert all(map(torch.equal, before["indexer"], pages_at(h.pools["indexer"], slots["kv"])))
        assert all(map(torch.equal, before["swa"], pages_at(h.pools["swa"], window)))
        assert h.backend.stats()["counts"] == {}


def test_trailing_pages_never_reach_the_disk(tmp_path: Path) -> None:
    with Hybrid(tmp_path) as h:
        ids, hashes = tokens(4), get_storage_hash_str(tokens(4), None, page_size=PAGE)
        slots, window = h.pools["kv"].alloc(4 * PAGE), h.pools["swa"].alloc(4 * PAGE)
        secret = [page.numpy().tobytes() for page in pages_at(h.pools["swa"], window)]
        shown = pages_at(h.pools["kv"], slots)[0].numpy().tobytes()
        backup(h.controller, ids, slots, extra_pools=h.transfers(window, hashes))
        assert len(h.backend.pools.trailing) == 4
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(shown in data for data in files), "the search can find what is there"
    assert not any(page[:64] in data for page in secret for data in files)
    assert {folder.name for folder in next(tmp_path.iterdir()).iterdir()} == {"kv", "indexer"}
    with Hybrid(tmp_path) as h:  # what only lived in memory is gone, and gates what needs it
        result = h.backend.batch_exists_v2(hashes, h.transfers(window, hashes[3:]))
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
        assert result.extra_pool_hit_pages == {"kv": 4, "indexer": 4}


def test_a_trailing_pool_restores_only_where_its_pages_are(tmp_path: Path) -> None:
    with Hybrid(tmp_path) as h:
        hashes = get_storage_hash_str(tokens(6), None, page_size=PAGE)
        slots, window = h.pools["kv"].alloc(6 * PAGE), h.pools["swa"].alloc(6 * PAGE)
        backup(h.controller, tokens(6), slots, extra_pools=h.transfers(window, hashes))
        for gone in (2, 5):
            pool = h.backend.pools.by_name["swa"]
            h.backend.pools.trailing._drop(("swa", pool.key(hashes[gone])))
        result = h.backend.batch_exists_v2(hashes, h.transfers(window, hashes[4:]))
        assert result.restorable_prefix_pages == [1, 2, 5]
        assert result.kv_hit_pages == 5
        found, _, _ = prefetch(
            *(h.controller, tokens(6), slots),
            handle=HANDLE,
            extra_pools=h.transfers(window[: 2 * PAGE], hashes[4:]),
        )
        assert found == 5 * PAGE, "SGLang takes the longest prefix that all pools can restore"


def test_a_sidecar_that_goes_between_query_and_transfer_clamps_both(tmp_path: Path) -> None:
    """sglang issue 31108: fresh KV pages were paired with stale pages of the indexer."""
    with Hybrid(tmp_path) as h:
        ids, hashes = tokens(6), get_storage_hash_str(tokens(6), None, page_size=PAGE)
        slots = h.pools["kv"].alloc(6 * PAGE)
        transfers = [PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV, hit_policy=ALL)]
        before = pages_at(h.pools["indexer"], slots)
        backup(h.controller, ids, slots, extra_pools=transfers)
        for pool in h.pools.values():
            pool.kv_buffer.zero_()
        pool = h.backend.pools.by_name["indexer"]
        found, came, _ = prefetch(
            *(h.controller, ids, slots, lambda: pool.store.delete([pool.key(hashes[2])])),
            handle=HANDLE,
            extra_pools=transfers,
        )
        assert (found, came) == (6 * PAGE, 2 * PAGE)
        now = pages_at(h.pools["indexer"], slots)
        assert all(map(torch.equal, before[:2], now[:2]))
        assert not any(page.any() for page in now[2:])


def test_trailing_pages_expire_and_are_capped(tmp_path: Path) -> None:
    clock = Clock()
    host = host_pool(device_pool())
    size = host.get_dummy_flat_data_page().nbytes
    options = extra(tmp_path, window_bytes=3 * size, window_ttl=10.0)
    backend = KVStoreHiCache(config(options), {}, clock=clock)
    backend.register_mem_pool_host(host)
    backend.register_mem_host_pool_v2(host, PoolName.SWA)
    backend.on_host_pools_registered()
    fill(host)
    slots = host.alloc(5 * PAGE)
    keys = [f"k{i}" for i in range(5)]

    def transfer(some: list[str], at: torch.Tensor) -> Any:
        return PoolTransfer(PoolName.SWA, host_indices=at, keys=some, hit_policy=TRAILING)

    assert backend.batch_set_v2([transfer(keys, slots)]) == {"swa": [True] * 5}
    assert backend.pools.trailing.live_bytes == 3 * size
    assert backend.stats()["counts"] == {"window_bytes is too small": 1}
    done = backend.batch_get_v2([transfer(keys, slots)])
    assert done == {"swa": [False, False, True, True, True]}
    clock.now += 9
    assert backend.batch_set_v2([transfer(keys[4:], slots[4 * PAGE :])]) == {"swa": [True]}
    clock.now += 2
    done = backend.batch_get_v2([transfer(keys, slots)])
    assert done == {"swa": [False, False, False, False, True]}
    assert backend.pools.trailing.live_bytes == size
    backend.close()


# ---- the backend by itself ----------------------------------------------------------------------


def page_of(found: Any, seed: int) -> torch.Tensor:
    page: torch.Tensor = found.mem_pool_host.get_dummy_flat_data_page()
    return page.copy_(torch.arange(page.numel()) % 251 + seed)


def test_the_five_basic_methods(tmp_path: Path) -> None:
    with backend(tmp_path) as b:
        keys = [f"{i:064x}" for i in range(5)]
        pages = [page_of(b, i) for i in range(5)]
        assert b.set(keys[0], pages[0])
        assert b.set(keys[0], pages[1]), "the first writer wins"
        assert b.batch_set(keys, pages)
        assert b.exists(keys[0])
        assert not b.exists("no")
        assert b.batch_exists([*keys[:3], "no", *keys[3:]]) == 3
        target = torch.zeros_like(pages[0])
        assert b.get(keys[0], target) is target
        assert torch.equal(target, pages[0])
        assert torch.equal(b.get(keys[4]), pages[4])
        assert b.get("no", target) is None
        found = b.batch_get([keys[1], "no", keys[2]], [torch.zeros_like(target) for _ in range(3)])
        assert torch.equal(found[0], pages[1])
        assert found[1] is None
        assert torch.equal(found[2], pages[2])
        assert b.stats()["counts"] == {}
        metrics = b.get_stats()
        assert isinstance(metrics, StorageMetrics)
        assert (sum(metrics.backup_pgs), sum(metrics.prefetch_pgs)) == (7, 2)
        assert b.get_stats().prefetch_pgs == []
        assert b.clear()
        assert b.batch_exists(keys) == 0


def test_a_wrong_size_or_count_is_a_miss_and_counted(tmp_path: Path) -> None:
    with backend(tmp_path) as b:
        assert not b.set("k", torch.zeros(3))
        assert not b.set("k", None)
        assert not b.batch_set(["k"], [])
        assert b.get("k", torch.zeros(3)) is None
        assert b.batch_get_v1(["k", "l"], torch.arange(PAGE)) == [False, False]
        assert b.batch_set_v1(["k"], None) == [False]
        assert b.batch_get_v2([PoolTransfer(PoolName.KV, keys=["k"])]) == {"kv": [False]}
        assert sum(b.stats()["counts"].values()) == 7


def test_parents_by_prefix_keys_and_without_them(tmp_path: Path) -> None:
    host = host_pool(device_pool())
    fill(host)
    with backend(tmp_path, host) as b:
        slots, keys = host.alloc(6 * PAGE), [f"k{i}" for i in range(6)]
        assert b.batch_set_v1(keys[:2], slots[: 2 * PAGE]) == [True] * 2
        info = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
        assert b.batch_set_v1(keys[2:4], slots[2 * PAGE : 4 * PAGE], info) == [True] * 2
        lost = HiCacheStorageExtraInfo(prefix_keys=["was never stored"])
        assert b.batch_set_v1(keys[4:], slots[4 * PAGE :], lost) == [True] * 2
        assert b.batch_exists(keys) == 6
        pool = b.pools.by_name[KV]
        assert pool.store.delete([pool.key(keys[1])]) == 3, "k2 and k3 are descendants of k1"
        assert pool.store.delete([pool.key(keys[4])]) == 2


def test_one_request_takes_no_more_than_its_share(tmp_path: Path) -> None:
    host = host_pool(device_pool())
    fill(host)
    with backend(tmp_path, host, {"ssd_bytes": "1MiB"}) as b:
        slots, keys = host.alloc(120 * PAGE), [f"k{i}" for i in range(120)]
        done: list[bool] = []
        for first in range(0, 120, 20):
            info = HiCacheStorageExtraInfo(prefix_keys=keys[:first])
            some = slots[first * PAGE : (first + 20) * PAGE]
            done += b.batch_set_v1(keys[first : first + 20], some, info)
        kept = sum(done)
        assert 20 < kept < 100
        assert done == [True] * kept + [False] * (120 - kept)
        assert b.batch_exists(keys) == kept
        assert b.pools.by_name[KV].store.stats()["tiers"]["ssd"]["blocks"] == kept


@pytest.mark.parametrize(
    "shard",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_another_shard_never_hits(tmp_path: Path, shard: dict[str, Any]) -> None:
    with backend(tmp_path) as b, backend(tmp_path, **shard) as other:
        b.set("k", page_of(b, 1))
        assert not other.exists("k")
        other.set("k", page_of(b, 2))
        assert torch.equal(b.get("k"), page_of(b, 1))
        assert torch.equal(other.get("k"), page_of(b, 2))


def test_ranks_that_share_replicated_pages_read_what_one_writes(tmp_path: Path) -> None:
    replicated: dict[str, Any] = {"is_mla_model": True, "tp_size": 2}
    with backend(tmp_path, **replicated, tp_rank=1) as reader:
        assert not reader.exists("k"), "nothing is there yet"
        assert not reader.set("k", page_of(reader, 1))
        with backend(tmp_path, **replicated, tp_rank=0) as writer:
            assert writer.set("k", page_of(writer, 1))
            assert torch.equal(reader.get("k"), page_of(writer, 1))


def test_pools_of_unknown_kind_are_refused(tmp_path: Path) -> None:
    host = host_pool(device_pool())
    fill(host)
    slots = host.alloc(PAGE)
    b = KVStoreHiCache(config(extra(tmp_path)), {})
    b.register_mem_pool_host(host)
    for name in (PoolName.KV, PoolName.SWA, "surprise"):
        b.register_mem_host_pool_v2(host, name)
    b.on_host_pools_registered()
    b.register_mem_host_pool_v2(host, PoolName.DRAFT)  # too late for a share of the cap
    wrong = [
        ("surprise", ALL),
        ("surprise", TRAILING),
        (PoolName.SWA, ALL),
        (PoolName.KV, TRAILING),
        (PoolName.MAMBA, TRAILING),
        (PoolName.DRAFT, ALL),
        (PoolName.INDEXER, PoolHitPolicy.BLOCK_GROUPS),
    ]
    assert b.batch_set_v1(["k"], slots) == [True]
    for name, policy in wrong:
        transfer = PoolTransfer(name, host_indices=slots, keys=["k"], hit_policy=policy)
        assert b.batch_set_v2([transfer]) == b.batch_get_v2([transfer]) == {name: [False]}
        gated = b.batch_exists_v2(["k"], [transfer]).kv_hit_pages
        assert gated == (1 if policy == PoolHitPolicy.BLOCK_GROUPS else 0)
    assert len(b.pools.trailing) == 0
    assert {item.name for item in next(tmp_path.iterdir()).iterdir()} == {"kv"}
    b.close()


def test_a_store_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    host = host_pool(device_pool())
    b = KVStoreHiCache(config(extra(tmp_path)), {})
    b.register_mem_pool_host(host)
    b.register_mem_host_pool_v2(host, PoolName.DRAFT)
    b.on_host_pools_registered()
    for pool in b.pools.by_name.values():
        monkeypatch.setattr(tier_of(pool.store), "sync", fail)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="the disk is gone"):
        b.close()
    with backend(tmp_path, host) as again:
        assert again.pools.by_name[KV].store.is_owner


def test_a_logical_anchor_counts_pages(tmp_path: Path) -> None:
    """DeepSeek V4's anchor holds no bytes, but its pages are asked for."""
    with backend(tmp_path, LogicalHostPool(8 * PAGE, PAGE)) as b:
        slots = torch.arange(2 * PAGE)
        assert b.batch_set_v1(["a", "b"], slots) == [True, True]
        assert b.batch_exists(["a", "b", "c"]) == 2
        assert b.batch_get_v1(["a", "c"], slots) == [True, False]


def test_a_host_pool_without_flat_pages_is_refused_at_once(tmp_path: Path) -> None:
    class Odd:
        page_size, layout, dtype = PAGE, "odd", torch.uint8

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise NotImplementedError("no flat pages")

    b = KVStoreHiCache(config(extra(tmp_path)), {})
    with pytest.raises(ConfigError, match="no flat pages"):
        b.register_mem_pool_host(Odd())  # type: ignore[arg-type]


GIVEN = {"path": "p", "weights": "unchecked"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'path' is missing"),
        ({"path": "p", "ssdbytes": 1}, "'ssdbytes' is unknown, expected some of path"),
        ({"path": 3}, "'path' must be text"),
        ({"path": "p", "tenant": None}, "'tenant' must be text"),
        ({"path": "p"}, "'weights' is missing.*weights_digest.*or 'unchecked'"),
        ({"path": "p", "weights": " "}, "'weights' is missing"),
        ({"path": "p", "weights": 7}, "'weights' must be text"),
        ({"path": "p", "secret": "yes"}, "'secret' must be True or False"),
        ({**GIVEN, "ssd_bytes": "much"}, "ssd_bytes must be bytes or a size"),
        ({**GIVEN, "window_ttl": 0}, "'window_ttl' must be positive seconds"),
        ({**GIVEN, "window_ttl": "1"}, "'window_ttl' must be positive seconds"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStoreHiCache(config(options), {})


def test_a_cap_that_holds_nothing_fails_the_attach(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least"), controller(tmp_path, ssd_bytes=1):
        pass
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        KVStoreHiCache(config(extra(tmp_path), should_split_heads=True), {})


def test_caps_of_all_pools_add_up(tmp_path: Path) -> None:
    with Hybrid(tmp_path, ssd_bytes="4MiB") as h:
        pools = h.backend.stats()["pools"]
        caps = [pools[name]["tiers"]["ssd"]["capacity_bytes"] for name in ("kv", "indexer")]
        assert sum(caps) <= 4 << 20
        assert pools["swa"] is None


def test_many_threads_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with backend(tmp_path) as b:

        def work(seed: int) -> None:
            try:
                for n in range(30):
                    keys = [f"{(seed + n) % 7}-{i}" for i in range(4)]
                    pages = [page_of(b, hash(key) % 5) for key in keys]
                    b.batch_set(keys, pages)
                    assert b.batch_exists(keys) in range(5)
                    targets = [torch.zeros_like(page) for page in pages]
                    for page, found in zip(pages, b.batch_get(keys, targets), strict=True):
                        assert found is None or torch.equal(found, page)
                    if n % 10 == 9:
                        b.clear()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures
        assert b.stats()["counts"] == {}


# ---- drift --------------------------------------------------------------------------------------


def test_every_pool_of_sglang_is_known() -> None:
    assert {str(name) for name in PoolName} == ON_SSD | IN_HOST
    assert not ON_SSD & IN_HOST
    assert {str(policy.value) for policy in PoolHitPolicy} == {
        *("all_pages", "trailing_pages", "block_groups")
    }


@pytest.mark.parametrize(
    "name",
    [
        *("get", "batch_get", "set", "batch_set", "exists", "batch_exists"),
        *("batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2"),
        *("register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered"),
        *("clear", "get_stats"),
    ],
)
def test_signatures_are_those_of_sglang(name: str) -> None:
    theirs = inspect.signature(getattr(HiCacheStorage, name)).parameters
    ours = inspect.signature(getattr(KVStoreHiCache, name)).parameters
    assert list(ours) == list(theirs)
    for parameter in theirs:
        assert (ours[parameter].default is inspect.Parameter.empty) == (
            theirs[parameter].default is inspect.Parameter.empty
        ) or parameter == "target_location"


def test_nothing_abstract_is_left_and_nothing_new_was_added() -> None:
    known = {
        *("get", "batch_get", "set", "batch_set", "exists", "batch_exists"),
        *("batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2"),
        *("register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered"),
        *("clear", "get_stats"),
    }
    theirs = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    assert theirs == known
    assert not KVStoreHiCache.__abstractmethods__
