"""SGLang's host pools, and their pages: in stores on SSD, or in host memory.

A pool whose pages every later token reads (KV, indexer, compressed KV) has a store. Pools of which only
the last pages are read (sliding windows, recurrent states) share ``TrailingPages``. The names of both
kinds are listed here; a pool of another name is refused.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolTransfer
from sglang.srt.runtime_context import get_serving

import kvstore
from kvstore.engine.faults import Faults
from kvstore.engine.options import UNCHECKED
from kvstore.engine.sglang.options import HiCacheOptions, adapters, settings
from kvstore.engine.trailing import TrailingPages
from kvstore.errors import ConfigError, KVStoreError

KV = "kv"
ON_SSD = frozenset(
    {KV, "indexer", "draft", "draft_indexer"}
    | {f"deepseek_v4_{kind}" for kind in ("c1", "c2", "c4", "c128", "c4_rope", "c128_rope")}
    | {f"deepseek_v4_{kind}_indexer" for kind in ("c1", "c2", "c4")}
    | {f"deepseek_v4_{kind}_indexer_scale" for kind in ("c1", "c2", "c4")}
)
"""Pools whose pages every later token may read."""
IN_HOST = frozenset(
    {"mamba", "swa", "auxiliary_swa", "draft_swa"}
    | {f"deepseek_v4_{kind}_state" for kind in ("c4", "c4_indexer", "c128")}
)
"""Pools of which only the pages at the end of a prefix are read."""
CHUNK_PAGES = 16
"""Pages copied from a host pool at a time; bounds the memory of one call besides the queue."""
_PUT_WAIT_SECONDS = 5.0
"""Longest wait of the backup thread for room in the queue, after which pages are dropped."""


class HostPool(Protocol):
    """Members of SGLang's host pools that are used here."""

    page_size: int
    layout: str
    dtype: torch.dtype
    size_per_token: int
    start_layer: int
    end_layer: int

    def get_data_page(self, index: int, flat: bool = ...) -> torch.Tensor:  # noqa: FBT001
        """Return the page that starts at slot ``index``."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return an empty flat page."""

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a flat page to the slots from ``index`` on."""


@dataclass(slots=True)
class Pool:
    """A registered host pool."""

    name: str
    host: HostPool
    identity: bytes
    """Digest of all facts that must be equal for reuse of a page; the start of every key."""
    page_bytes: int
    """0 for a pool that counts pages and has no bytes of its own."""
    store: kvstore.BlockStore | None = None

    @property
    def block_bytes(self) -> int:
        """Block size of its store in bytes."""
        return max(1, self.page_bytes)

    @property
    def weight(self) -> int:
        """Share of the cap: 4 KiB pages needed for a page of the pool."""
        return -(-(self.block_bytes + 1024) // 4096)

    def key(self, page: str) -> bytes:
        """Return the store's key of a page."""
        return self.identity + page.encode()

    def starts(self, pages: Sequence[str], indices: torch.Tensor | None) -> list[int]:
        """Return the first slot of each page. Raises ``ValueError`` if the indices do not fit."""
        size = self.host.page_size
        found = 0 if indices is None else indices.numel()
        if indices is None or found != len(pages) * size:
            msg = f"pool {self.name!r}: expected {len(pages)} x {size} host indices, found {found}"
            raise ValueError(msg)
        return [int(start) for start in indices[::size].tolist()]


class Pools:
    """Host pools of one rank, and the stores of their pages. Threads: any."""

    def __init__(
        self, config: HiCacheStorageConfig, faults: Faults, clock: Callable[[], float]
    ) -> None:
        """Check the configuration. Raises ``ConfigError`` for an unknown, missing or invalid option."""
        self._config = config
        self._options = options = HiCacheOptions.of(config.extra_config)
        self._faults = faults
        self._settings = settings()
        if options.weights != UNCHECKED:
            self._settings["adapters"] = adapters()
        if config.should_split_heads:
            msg = "tp_lcm_size: kvstore stores a page as one rank wrote it; leave tp_lcm_size out"
            raise ConfigError(msg)
        self._ssd_bytes = kvstore.size_bytes(options.ssd_bytes, "ssd_bytes")
        self._window_bytes = kvstore.size_bytes(options.window_bytes, "window_bytes")
        self.trailing = TrailingPages(self._window_bytes, float(options.window_ttl), clock)
        self.by_name: dict[str, Pool] = {}
        self._is_open = False
        self._lock = threading.Lock()

    # ---- registration --------------------------------------------------------------------------

    def add_anchor(self, host: HostPool) -> None:
        """Register the pool of KV pages. Raises ``ConfigError`` if it has no flat pages."""
        self.by_name[KV] = self._described(KV, host)

    def add(self, name: str, host: HostPool) -> None:
        """Register another pool. An unknown, late or unusable one is refused: its pages miss."""
        if name == KV and KV in self.by_name and self.by_name[KV].host is host:
            return
        if name not in ON_SSD | IN_HOST:
            self._refuse(f"{name!r} is unknown to kvstore: its pages always miss")
        elif name in ON_SSD and self._is_open:
            self._refuse(f"{name!r} was registered after the stores were sized; attach again")
        else:
            try:
                self.by_name[name] = self._described(name, host)
            except ConfigError as error:
                self._refuse(str(error))

    def _refuse(self, detail: str) -> None:
        self._faults.report("pool refused", detail)

    def open(self) -> None:
        """Open a store for every pool on SSD, with its share of the cap. Raises ``KVStoreError``."""
        self._is_open = True
        pools = [pool for pool in self.by_name.values() if pool.name in ON_SSD]
        whole = sum(pool.weight for pool in pools)
        try:
            for pool in pools:
                pool.store = self._opened(pool, self._ssd_bytes * pool.weight // whole)
        except KVStoreError:
            self.close()
            raise

    def _described(self, name: str, host: HostPool) -> Pool:
        try:
            page_bytes = host.get_dummy_flat_data_page().nbytes
            facts = [host.layout, str(host.dtype), host.page_size, page_bytes]
            facts += [host.size_per_token, host.start_layer, host.end_layer]
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            msg = (
                f"host pool {name!r} ({type(host).__name__}) has no flat pages to store: {error!r}; "
                "use another --hicache-mem-layout"
            )
            raise ConfigError(msg) from error
        owner = [self._config.model_name, self._options.weights, self._options.tenant]
        identity = ["kvstore.sglang.2", owner, self._settings, self._shard(), name, facts]
        return Pool(name, host, hashlib.sha256(json.dumps(identity).encode()).digest(), page_bytes)

    def _shard(self) -> dict[str, Any]:
        """Return the parallel ranks that decide the content of this rank's pages."""
        config = self._config
        shard = {
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
        }
        if not config.is_mla_model:  # MLA ranks hold equal pages, and one of them writes
            shard["tp"] = [config.tp_rank, config.tp_size]
        return shard

    def _folder(self, pool: Pool) -> Path:
        shard = {**self._shard(), "dp": [self._config.dp_rank, 0]}
        names = sorted(f"{name}{rank}" for name, (rank, *_) in shard.items())
        return Path(self._options.path) / "-".join(names) / pool.name

    def _opened(self, pool: Pool, share: int) -> kvstore.BlockStore | None:
        """Open a pool's store; None if its writing rank has not created it yet."""
        is_writer = self._config.is_storage_writer
        try:
            store = kvstore.BlockStore.open(
                self._folder(pool),
                block_bytes=pool.block_bytes,
                ssd_bytes=share,
                role="auto" if is_writer else "reader",
                secret=self._options.secret,
            )
        except ConfigError:
            raise
        except KVStoreError:
            if is_writer:
                raise
            return None
        if is_writer and not store.is_owner:
            self._faults.report("reader", f"another process owns {self._folder(pool)}: read only")
        return store

    def _store(self, pool: Pool) -> kvstore.BlockStore | None:
        if pool.store is None and self._is_open and not self._config.is_storage_writer:
            with self._lock:
                if pool.store is None:
                    pool.store = self._opened(pool, self._ssd_bytes)
        return pool.store

    def of(self, transfer: PoolTransfer) -> Pool | None:
        """Return the pool of a transfer, None if the pool or the hit policy is refused."""
        name = str(transfer.name)
        pool = self.by_name.get(name)
        allowed = {PoolHitPolicy.ALL_PAGES: ON_SSD, PoolHitPolicy.TRAILING_PAGES: IN_HOST}
        if pool is None or name not in allowed.get(transfer.hit_policy, ()):
            self._refuse(f"{name!r} with {transfer.hit_policy}: its pages always miss")
            return None
        return pool

    # ---- pages ---------------------------------------------------------------------------------

    def _is_outdated(self) -> bool:
        """Return whether the engine's weights were replaced, which invalidates all stored pages."""
        now, then = get_serving().weight_version, self._settings["weight_version"]
        if now != then:
            detail = (
                f"weight version {now!r}, {then!r} when attached: every page misses; attach again"
            )
            self._faults.report("weights replaced", detail)
        return bool(now != then)

    def has(self, pool: Pool, page: str) -> bool:
        """Return whether a trailing page is in host memory."""
        return self.trailing.has((pool.name, pool.key(page)))

    def exists(self, pool: Pool, pages: Sequence[str]) -> int:
        """Return the number of leading pages that are stored."""
        if self._is_outdated():
            return 0
        if pool.name in IN_HOST:
            return next((i for i, page in enumerate(pages) if not self.has(pool, page)), len(pages))
        store = self._store(pool)
        return 0 if store is None else store.exists([pool.key(page) for page in pages])

    def get(self, pool: Pool, pages: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Copy pages to flat tensors, each wholly or not at all; return which were copied."""
        if self._is_outdated():
            return [False] * len(pages)
        keys = [pool.key(page) for page in pages]
        if pool.name in IN_HOST:
            return [
                (target.device.type == "cpu" and target.is_contiguous())
                and self.trailing.get((pool.name, key), _flat(target))
                for key, target in zip(keys, targets, strict=True)
            ]
        store = self._store(pool)
        if store is None:
            return [False] * len(pages)
        if not pool.page_bytes:
            return store.get(keys, [bytearray(1) for _ in keys])
        return store.get(keys, targets)

    def put(
        self,
        pool: Pool,
        pages: Sequence[str],
        values: Callable[[int], torch.Tensor],
        prefix: Sequence[str] | None,
    ) -> list[bool]:
        """Store pages after ``prefix``; return which are durable. ``values(i)`` returns page i."""
        if self._is_outdated():
            return [False] * len(pages)
        keys = [pool.key(page) for page in pages]
        if pool.name in IN_HOST:
            needed = len(pages) * pool.page_bytes
            if needed > self._window_bytes:
                detail = (
                    f"{pool.name!r}: it is {self._window_bytes}, one request's pages are {needed}"
                )
                self._faults.report("window_bytes is too small", detail)
            put = self.trailing.put
            return [put((pool.name, key), _flat(values(i))) for i, key in enumerate(keys)]
        store = self._store(pool)
        if store is None:
            return [False] * len(pages)
        room = max(0, store.request_blocks - len(prefix or ()))  # its parents may be evicted by now
        parent = pool.key(prefix[-1]) if prefix else None
        for first in range(0, min(room, len(keys)), CHUNK_PAGES):
            some = keys[first : min(room, first + CHUNK_PAGES)]
            data = [values(first + i) if pool.page_bytes else b"\0" for i in range(len(some))]
            taken = store.put(some, data, [parent, *some[:-1]], wait=_PUT_WAIT_SECONDS)
            is_orphan = first == 0 and parent is not None and not store.exists([parent])
            if is_orphan and not taken[0]:
                # Its parent was evicted or never stored; a root can be found by its own key.
                taken = store.put(some, data, [None, *some[:-1]], wait=0)
            if not all(taken):
                break
            parent = some[-1]
        store.flush()
        return [store.exists([key]) == 1 for key in keys]

    def clear(self) -> None:
        """Remove all pages of this rank."""
        self.trailing.clear()
        for pool in self.by_name.values():
            if pool.store is not None and pool.store.is_owner:
                pool.store.clear()

    def stats(self) -> dict[str, Any]:
        """Return ``stats`` of every store, and counters of the trailing pages."""
        trailing = self.trailing
        return {
            "pools": {
                name: pool.store.stats() if pool.store is not None else None
                for name, pool in self.by_name.items()
            },
            "trailing": {
                "pages": len(trailing),
                "live_bytes": trailing.live_bytes,
                "evicted": trailing.evicted,
                "expired": trailing.expired,
            },
        }

    def close(self) -> None:
        """Flush and close every store, also after a failure. Idempotent."""
        self.trailing.clear()
        with ExitStack() as stack:
            for pool in self.by_name.values():
                if pool.store is not None:
                    stack.callback(pool.store.close)


def _flat(page: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a page, in place if it is contiguous in host memory."""
    flat: NDArray[np.uint8] = page.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return flat
