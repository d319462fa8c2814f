"""``KVStoreHiCache``: SGLang's storage interface over ``Pools``.

Callers are SGLang's prefetch, auxiliary, backup and scheduler threads, which an exception may end without
a message. So no call of an attached backend raises: a failure is a miss, counted, and logged once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from typing_extensions import override

from kvstore.engine.faults import Faults
from kvstore.engine.sglang.pools import CHUNK_PAGES, KV, ON_SSD, HostPool, Pool, Pools

_SAMPLES = 1024
"""Most recorded transfer speeds between two reads of SGLang's metrics."""

F = TypeVar("F", bound=Callable[..., Any])


def _or_miss(miss: Callable[..., Any]) -> Callable[[F], F]:
    """Make a method return ``miss(*arguments)`` instead of raising. The exception is counted."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVStoreHiCache, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # would end a thread of SGLang
                self.faults.report(f"error in {method.__name__}", repr(error))
                return miss(*args, **kwargs)

        return cast("F", guarded)

    return decorate


def _all_missed(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _each_missed(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc] # the engine is not typed
    """Storage backend of SGLang's hierarchical cache. Threads: any.

    Its unit is SGLang's page of ``page_size`` tokens. A page is stored with a checksum under its whole
    key, which begins with a digest of model, weights, tenant, SGLang's settings that decide values,
    shard, dtype, layout and size.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - how the factory calls it
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the configuration. Stores are opened after all host pools are registered.

        Raises:
            ConfigError: for an option that is unknown, missing or out of range.
        """
        self.faults = Faults(logging.getLogger("kvstore.engine.sglang"))
        self.pools = Pools(storage_config, self.faults, clock)
        self._lock = threading.Lock()
        self._speeds: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_SAMPLES),
            "backup": deque(maxlen=_SAMPLES),
        }

    @property
    def _kv(self) -> Pool:
        return self.pools.by_name[KV]

    # ---- host pools ----------------------------------------------------------------------------

    @override
    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Register the anchor pool, which has the KV pages. Raises ``ConfigError`` if it is unusable."""
        self.mem_pool_host = mem_pool_host
        self.pools.add_anchor(mem_pool_host)

    @override
    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Register another pool. Lookups in an unknown one, or one without flat pages, always miss."""
        self.pools.add(str(host_pool_name), host_pool)

    @override
    def on_host_pools_registered(self) -> None:
        """Open the stores. Raises ``KVStoreError`` if one cannot be opened: SGLang does not attach."""
        self.pools.open()

    # ---- copies --------------------------------------------------------------------------------

    def _load(self, pool: Pool, pages: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Load pages into the slots of a host pool, each through a temporary flat page."""
        starts = pool.starts(pages, indices)
        began = time.perf_counter()
        done: list[bool] = []
        for first in range(0, len(pages), CHUNK_PAGES):
            some = pages[first : first + CHUNK_PAGES]
            flat = [torch.empty(pool.page_bytes, dtype=torch.uint8) for _ in some]
            found = self.pools.get(pool, some, flat)
            for start, page, is_there in zip(starts[first:], flat, found, strict=False):
                if is_there:
                    pool.host.set_from_flat_data_page(start, page.view(pool.host.dtype))
            done += found
        self._measure("prefetch", sum(done), pool, began)
        return done

    def _save(
        self,
        pool: Pool,
        pages: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Store pages from the slots of a host pool."""
        starts = pool.starts(pages, indices)
        prefix = extra_info.prefix_keys if extra_info is not None else None
        return self._put(pool, pages, lambda i: pool.host.get_data_page(starts[i]), prefix)

    def _put(
        self,
        pool: Pool,
        pages: Sequence[str],
        values: Callable[[int], torch.Tensor],
        prefix: Sequence[str] | None = None,
    ) -> list[bool]:
        began = time.perf_counter()
        done = self.pools.put(pool, pages, values, prefix)
        self._measure("backup", sum(done), pool, began)
        return done

    def _measure(self, direction: str, pages: int, pool: Pool, began: float) -> None:
        """Record the speed of a transfer in GB/s, SGLang's unit."""
        if pages:
            seconds = max(time.perf_counter() - began, 1e-9)
            with self._lock:
                speed = pages * pool.page_bytes / seconds / 1e9
                self._speeds[direction].append((pages, speed))

    # ---- interface 1: KV pages as tensors ------------------------------------------------------

    @override
    @_or_miss(lambda *_, **__: None)
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Return the page in ``target_location`` or a new flat page, None for a miss."""
        host = self._kv.host
        target = host.get_dummy_flat_data_page() if target_location is None else target_location
        return target if self.pools.get(self._kv, [key], [target])[0] else None

    @override
    @_or_miss(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: list[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Return for each key its filled target, None for a miss."""
        pool = self._kv
        targets = target_locations or [pool.host.get_dummy_flat_data_page() for _ in keys]
        began = time.perf_counter()
        found = self.pools.get(pool, keys, targets)
        self._measure("prefetch", sum(found), pool, began)
        return [t if ok else None for t, ok in zip(targets, found, strict=True)]

    @override
    @_or_miss(lambda *_, **__: False)
    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store one KV page; return whether it is stored."""
        return self._batch_set([key], [value])

    @override
    @_or_miss(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store KV pages, each a child of the one before it; return whether all are stored."""
        return self._batch_set(keys, values)

    def _batch_set(self, keys: Sequence[str], values: Sequence[torch.Tensor | None] | None) -> bool:
        pages = [value for value in values or () if value is not None]
        if values is None or len(pages) != len(keys):
            raise ValueError(f"expected a page for each of {len(keys)} keys, found {len(pages)}")
        return all(self._put(self._kv, keys, pages.__getitem__))

    @override
    @_or_miss(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether a KV page is stored."""
        return self.pools.exists(self._kv, [key]) == 1

    @override
    @_or_miss(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return the number of leading KV pages that are stored."""
        return self.pools.exists(self._kv, keys)

    # ---- interface 2: KV pages by their slots in the host pool ---------------------------------

    @override
    @_or_miss(_each_missed)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load KV pages into the host pool; return which were loaded."""
        return self._load(self._kv, keys, host_indices)

    @override
    @_or_miss(_each_missed)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store KV pages of the host pool; return which are stored."""
        return self._save(self._kv, keys, host_indices, extra_info)

    # ---- interface 3: several pools ------------------------------------------------------------

    @override
    @_or_miss(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that every pool can restore, and the hit of each pool."""
        reach = {KV: self.pools.exists(self._kv, keys)}
        restorable = list(range(1, reach[KV] + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never limits the hit, and is not stored
            pages = keys[: reach[KV]]
            lengths = self._restorable(transfer, pages)
            if lengths:
                reach[str(transfer.name)] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        hits = {name: count for name, count in reach.items() if count}
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def _restorable(self, transfer: PoolTransfer, pages: Sequence[str]) -> frozenset[int]:
        """Return the lengths of the prefixes of ``pages`` that one pool can restore."""
        pool = self.pools.of(transfer)
        if pool is None:
            return frozenset()
        if pool.name in ON_SSD:
            return frozenset(range(1, self.pools.exists(pool, pages) + 1))
        last = max(1, len(transfer.keys or ()))
        there = [self.pools.has(pool, page) for page in pages]
        lengths = range(1, len(pages) + 1)
        return frozenset(n for n in lengths if all(there[max(0, n - last) : n]))

    @override
    @_or_miss(_all_missed)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; return which were loaded."""
        return self._each(transfers, lambda pool, t: self._load(pool, t.keys or [], t.host_indices))

    @override
    @_or_miss(_all_missed)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; return which are stored."""
        return self._each(
            transfers, lambda pool, t: self._save(pool, t.keys or [], t.host_indices, extra_info)
        )

    def _each(
        self, transfers: Sequence[PoolTransfer], work: Callable[[Pool, PoolTransfer], list[bool]]
    ) -> dict[str, list[bool]]:
        """Transfer the pages of each pool. A failure in one pool causes no miss in another."""
        done = _all_missed(transfers)
        for transfer in transfers:
            pool = self.pools.of(transfer)
            if pool is not None:
                try:
                    done[transfer.name] = work(pool, transfer)
                except Exception as error:  # as in _or_miss, for one pool
                    self.faults.report(f"error in pool {pool.name}", repr(error))
        return done

    # ---- maintenance ---------------------------------------------------------------------------

    @override
    @_or_miss(lambda: False)
    def clear(self) -> bool:
        """Remove all pages of this rank."""
        self.pools.clear()
        return True

    @override
    @_or_miss(lambda: None)
    def get_stats(self) -> Any:
        """Return SGLang's ``StorageMetrics`` of the transfers since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken = {name: list(samples) for name, samples in self._speeds.items()}
            for samples in self._speeds.values():
                samples.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in taken["prefetch"]],
            backup_pgs=[pages for pages, _ in taken["backup"]],
            prefetch_bandwidth=[speed for _, speed in taken["prefetch"]],
            backup_bandwidth=[speed for _, speed in taken["backup"]],
        )

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes of every pool as plain JSON values."""
        return {**self.pools.stats(), "counts": dict(self.faults.counts)}

    def close(self) -> None:
        """Flush and close every store, also after a failure. Idempotent."""
        self.pools.close()
