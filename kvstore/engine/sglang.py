"""SGLang's hierarchical cache on a block store: a storage backend for its ``dynamic`` type.

Pools whose pages every later token needs (KV, indexer, compressed KV) go to SSD, a store for each.
Pools of which only the last pages matter (sliding windows, recurrent states) go to an evictable
pool in host memory. Which pool is which is a table of names: one that is not in it is refused.

SGLang calls from its prefetch, auxiliary, backup and scheduler threads, and a thread that meets an
exception there may end in silence. So once a backend is attached no call raises: what fails is a
miss, counted, and logged once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from typing_extensions import override

from kvstore.blocks.block_store import BlockStore
from kvstore.codec.host import host_bytes, writable_bytes
from kvstore.distribution import install_command
from kvstore.engine.options import UNCHECKED, check_options, check_weights
from kvstore.engine.trailing import TrailingPages
from kvstore.errors import ConfigError, KVStoreError
from kvstore.identity.namespace import weights_digest
from kvstore.output.sizes import size_bytes

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.runtime_context import get_context, get_lora, get_serving
    from sglang.version import __version__ as sglang_version
except ImportError as error:
    _msg = (
        f"kvstore.engine.sglang needs SGLang 0.5.23 ({install_command('sglang')}); "
        f"it cannot be imported: {error}"
    )
    raise ImportError(_msg) from error

logger = logging.getLogger(__name__)

KV = "kv"
ON_SSD = frozenset(
    {KV, "indexer", "draft", "draft_indexer"}
    | {f"deepseek_v4_{part}" for part in ("c1", "c2", "c4", "c128", "c4_rope", "c128_rope")}
    | {f"deepseek_v4_{part}_indexer" for part in ("c1", "c2", "c4")}
    | {f"deepseek_v4_{part}_indexer_scale" for part in ("c1", "c2", "c4")}
)
"""Pools whose every page a later token may read."""
IN_HOST = frozenset(
    {"mamba", "swa", "auxiliary_swa", "draft_swa"}
    | {f"deepseek_v4_{part}_state" for part in ("c4", "c4_indexer", "c128")}
)
"""Pools of which only the pages at the end of a prefix are read."""

_SETTINGS: dict[str, tuple[str, ...]] = {
    "model": (
        *("context_length", "dtype", "json_model_override_args", "kv_cache_dtype", "load_format"),
        *("model_impl", "modelopt_quant", "qsa_indexer_dtype", "quantization"),
        *("quantization_param_path", "rl_quant_profile"),
    ),
    "mm": ("mm_attention_backend", "mm_process_config", "trust_mm_content_hashes"),
    "spec": (
        *("speculative_algorithm", "speculative_draft_kv_cache_dtype"),
        *("speculative_draft_model_path", "speculative_draft_model_quantization"),
        *("speculative_draft_model_revision", "speculative_draft_window_size"),
    ),
    "exec.kernel": (),
    "exec.deterministic": (),
    "exec.dllm": (),
    "exec.mamba": ("mamba_backend", "mamba_ssm_dtype", "linear_attn_prefill_backend"),
    "exec.moe": (
        *("deepep_dispatcher_output_dtype", "enable_w4a4_mxfp4_megamoe"),
        *("flashinfer_mxfp4_moe_precision", "moe_runner_backend"),
    ),
    "exec.comm": ("enable_quant_communications",),
    "exec.features": (
        *("enable_decoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay"),
        "enable_tf32_matmul",
    ),
}
"""Settings of SGLang that decide the numbers in a page, by its namespaces; () is all of one.

Read in ``sglang.srt.arg_groups.fields`` of 0.5.23. What only places work or bounds memory is left out.
"""
_OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys of the extra config that SGLang's factory and controller read themselves."""
_CHUNK_PAGES = 16
"""Pages copied out of a host pool at a time: bounds what one call takes beside the queue."""
_PUT_WAIT_SECONDS = 5.0
"""How long the backup thread waits for room in the queue before pages are dropped."""
_SAMPLES = 1024
"""Transfers whose speeds are kept for SGLang's metrics between two of its looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheOptions:
    """What ``--hicache-storage-backend-extra-config`` may say to kvstore."""

    path: str
    """Directory of the stores: one below it for each rank and pool."""
    ssd_bytes: int | str = "16GiB"
    """Cap of all stores of this rank together."""
    window_bytes: int | str = "1GiB"
    """Cap of the pool for trailing pages, in host memory."""
    window_ttl: float = 300.0
    """Seconds after which a trailing page is not served any more."""
    tenant: str = ""
    """Keeps users of one directory apart. Salts of single requests are in SGLang's own keys."""
    weights: str
    """Digest or revision of the weights; the model's name says nothing about them."""
    secret: bool = False
    """Whether keys are hashed under a random secret in each store's directory; for good."""

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> HiCacheOptions:
        """Return the options in an extra config. Raises ``ConfigError`` for what is unknown."""
        given = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        known = [field.name for field in fields(cls)]
        check_options("extra config", given, known, ("path", "tenant", "weights"), ("secret",))
        check_weights("extra config", "weights", given)
        options = cls(**given)
        ttl: object = options.window_ttl
        if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0:
            msg = f"extra config: 'window_ttl' must be positive seconds, found {ttl!r}"
            raise ConfigError(msg)
        return options


def settings() -> dict[str, Any]:
    """Return what decides a page's numbers and is no part of SGLang's keys, as JSON values.

    Raises:
        ConfigError: if SGLang has not published its settings in this process.
    """
    found: dict[str, Any] = {"version": sglang_version}
    try:
        for namespace, names in _SETTINGS.items():
            top, *below = namespace.split(".")
            bag = get_context().config_bag(top)
            for part in below:
                bag = getattr(bag, part)
            found[namespace] = {name: str(getattr(bag, name)) for name in names or bag._fields}
        found["weight_version"] = get_serving().weight_version
    except ValueError as error:
        msg = (
            f"SGLang's settings decide what a page holds, and cannot be read: {error}; attach the "
            "backend in a scheduler process of SGLang 0.5.23"
        )
        raise ConfigError(msg) from error
    return found


def adapters() -> dict[str, str]:
    """Return name and digest of the adapters in ``--lora-paths``: SGLang's keys have name and path.

    One that is loaded later is named by a random number, and never hits after a restart.

    Raises:
        ConfigError: if one is not in a local folder.
    """
    return {
        str(ref.lora_name): weights_digest(ref.lora_path) for ref in get_lora().lora_paths or ()
    }


class HostPool(Protocol):
    """What is asked of SGLang's host pools: pages as flat tensors, out and in."""

    page_size: int
    layout: str
    dtype: torch.dtype
    size_per_token: int
    start_layer: int
    end_layer: int

    def get_data_page(self, index: int, flat: bool = ...) -> torch.Tensor:  # noqa: FBT001
        """Return the page whose first slot is ``index``."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a flat page of the right size."""

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a flat page to where slot ``index`` begins."""


@dataclass(slots=True)
class _Pool:
    """A host pool that was registered."""

    name: str
    host: HostPool
    identity: bytes
    """Digest of all that must agree before a page may be reused; in front of every key."""
    page_bytes: int
    """0 for a pool that only counts pages, without bytes of its own."""
    store: BlockStore | None = None

    @property
    def block_bytes(self) -> int:
        return max(1, self.page_bytes)

    def key(self, page: str) -> bytes:
        return self.identity + page.encode()


F = TypeVar("F", bound=Callable[..., Any])


def _or_miss(miss: Callable[..., Any]) -> Callable[[F], F]:
    """Make a method return ``miss(*arguments)`` where it would raise; counted, logged once."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVStoreHiCache, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # a thread of SGLang would end
                self.note(f"error in {method.__name__}", repr(error))
                return miss(*args, **kwargs)

        return cast("F", guarded)

    return decorate


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc] # the engine is not typed
    """A storage backend of SGLang's hierarchical cache.

    Units: pages of SGLang, ``page_size`` tokens each. A page is stored with a checksum under its
    whole key, which begins with a digest of model, weights, tenant, SGLang's settings that decide
    numbers, shard, dtype, layout and size.

    Threads: any.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - how the factory calls it
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the configuration; stores open when the host pools are known.

        Raises:
            ConfigError: for an option that is unknown, missing or cannot work.
        """
        self.options = HiCacheOptions.of(storage_config.extra_config)
        self.config = storage_config
        self._settings = settings()
        if self.options.weights != UNCHECKED:
            self._settings["adapters"] = adapters()
        if storage_config.should_split_heads:
            msg = "tp_lcm_size: kvstore keeps a page as one rank wrote it; leave tp_lcm_size out"
            raise ConfigError(msg)
        self._ssd_bytes = size_bytes(self.options.ssd_bytes, "ssd_bytes")
        self._window_bytes = size_bytes(self.options.window_bytes, "window_bytes")
        self.trailing = TrailingPages(self._window_bytes, float(self.options.window_ttl), clock)
        self._pools: dict[str, _Pool] = {}
        self._is_sized = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._speeds: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_SAMPLES),
            "backup": deque(maxlen=_SAMPLES),
        }

    # ---- host pools ----------------------------------------------------------------------------

    @override
    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the anchor pool, that of the KV pages. Raises ``ConfigError`` if it cannot be used."""
        self.mem_pool_host = mem_pool_host
        self._pools[KV] = self._described(KV, mem_pool_host)

    @override
    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Take a further pool; one that is unknown, or has no flat pages, is refused and misses."""
        name = str(host_pool_name)
        if name == KV and KV in self._pools and self._pools[KV].host is host_pool:
            return
        if name not in ON_SSD | IN_HOST:
            self.note("pool refused", f"{name!r} is not known to kvstore: its pages always miss")
            return
        if name in ON_SSD and self._is_sized:
            self.note("pool refused", f"{name!r} came after the stores were sized; attach again")
            return
        try:
            self._pools[name] = self._described(name, host_pool)
        except ConfigError as error:
            self.note("pool refused", str(error))

    @override
    def on_host_pools_registered(self) -> None:
        """Open a store for every pool that goes to SSD, each with its share of the cap.

        Raises:
            KVStoreError: if one cannot be opened; SGLang then does not attach.
        """
        self._is_sized = True
        pools = [pool for pool in self._pools.values() if pool.name in ON_SSD]
        whole = sum(_weight(pool) for pool in pools)
        try:
            for pool in pools:
                share = self._ssd_bytes * _weight(pool) // whole
                pool.store = self._opened(pool, share)
        except KVStoreError:
            self.close()
            raise

    def _described(self, name: str, host: HostPool) -> _Pool:
        try:
            page_bytes = host.get_dummy_flat_data_page().nbytes
            facts = [host.layout, str(host.dtype), host.page_size, page_bytes]
            facts += [host.size_per_token, host.start_layer, host.end_layer]
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            msg = (
                f"host pool {name!r} ({type(host).__name__}) has no flat pages that could be "
                f"stored: {error!r}; use another --hicache-mem-layout"
            )
            raise ConfigError(msg) from error
        config, options = self.config, self.options
        owner = [config.model_name, options.weights, options.tenant]
        identity = ["kvstore.sglang.2", owner, self._settings, self._shard(), name, facts]
        return _Pool(name, host, hashlib.sha256(json.dumps(identity).encode()).digest(), page_bytes)

    def _shard(self) -> dict[str, Any]:
        """Which part of the model's cache this rank holds."""
        config = self.config
        shard = {
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
        }
        if not config.is_mla_model:  # else all ranks hold the same, and one writes it
            shard["tp"] = [config.tp_rank, config.tp_size]
        return shard

    def _folder(self, pool: _Pool) -> Path:
        shard = {**self._shard(), "dp": [self.config.dp_rank, 0]}
        parts = [f"{name}{rank}" for name, (rank, *_) in shard.items()]
        return Path(self.options.path) / "-".join(sorted(parts)) / pool.name

    def _opened(self, pool: _Pool, share: int) -> BlockStore | None:
        """Open a pool's store; None for one that its writing rank has not made yet."""
        is_writer = self.config.is_storage_writer
        try:
            store = BlockStore.open(
                self._folder(pool),
                block_bytes=pool.block_bytes,
                ssd_bytes=share,
                role="auto" if is_writer else "reader",
                secret=self.options.secret,
            )
        except ConfigError:
            raise
        except KVStoreError:
            if is_writer:
                raise
            return None
        if is_writer and not store.is_owner:
            self.note("reader", f"{self._folder(pool)} is owned by another process: read only")
        return store

    def _store(self, pool: _Pool) -> BlockStore | None:
        if pool.store is None and self._is_sized and not self.config.is_storage_writer:
            with self._lock:
                if pool.store is None:
                    pool.store = self._opened(pool, self._ssd_bytes)
        return pool.store

    def _is_outdated(self) -> bool:
        """Say whether the weights were replaced in the running engine: all that is here is of others."""
        now, then = get_serving().weight_version, self._settings["weight_version"]
        if now != then:
            what = (
                f"weight version {now!r}, {then!r} when attached: every page misses; attach again"
            )
            self.note("weights replaced", what)
        return bool(now != then)

    def _pool_of(self, transfer: PoolTransfer) -> _Pool | None:
        """Return the pool of a transfer, None for one that is refused."""
        name = str(transfer.name)
        pool = self._pools.get(name)
        allowed = ON_SSD if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else frozenset[str]()
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            allowed = IN_HOST
        if pool is None or name not in allowed:
            self.note("pool refused", f"{name!r} with {transfer.hit_policy}: its pages always miss")
            return None
        return pool

    # ---- pages ---------------------------------------------------------------------------------

    def _exists(self, pool: _Pool, pages: Sequence[str]) -> int:
        """Return how many leading pages are there."""
        if self._is_outdated():
            return 0
        if pool.name in IN_HOST:
            found = (self.trailing.has((pool.name, pool.key(page))) for page in pages)
            return next((i for i, is_there in enumerate(found) if not is_there), len(pages))
        store = self._store(pool)
        return 0 if store is None else store.exists([pool.key(page) for page in pages])

    def _get(
        self, pool: _Pool, pages: Sequence[str], targets: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Copy pages to flat tensors, each wholly or not at all."""
        if self._is_outdated():
            return [False] * len(pages)
        if pool.name in IN_HOST:
            return [
                (flat := writable_bytes(target)) is not None
                and self.trailing.get((pool.name, pool.key(page)), flat)
                for page, target in zip(pages, targets, strict=True)
            ]
        store = self._store(pool)
        if store is None:
            return [False] * len(pages)
        keys = [pool.key(page) for page in pages]
        if not pool.page_bytes:
            return store.get(keys, [bytearray(1) for _ in keys])
        return store.get(keys, targets)

    def _put(
        self,
        pool: _Pool,
        pages: Sequence[str],
        values: Callable[[int], torch.Tensor],
        prefix: Sequence[str] | None,
    ) -> list[bool]:
        """Store pages; say of each whether it is there for good now.

        ``values(i)`` returns page i. ``prefix`` are the pages before the first one.
        """
        if self._is_outdated():
            return [False] * len(pages)
        if pool.name in IN_HOST:
            needed = len(pages) * pool.page_bytes
            if needed > self._window_bytes:
                what = (
                    f"{pool.name!r}: it is {self._window_bytes}, one request's pages are {needed}"
                )
                self.note("window_bytes is too small", what)
            return [self._put_trailing(pool, page, values(i)) for i, page in enumerate(pages)]
        store = self._store(pool)
        if store is None:
            return [False] * len(pages)
        room = max(0, store.request_blocks - len(prefix or ()))  # its parents may be gone by now
        keys = [pool.key(page) for page in pages]
        wanted = keys[:room]
        above = pool.key(prefix[-1]) if prefix else None
        for first in range(0, len(wanted), _CHUNK_PAGES):
            some = wanted[first : first + _CHUNK_PAGES]
            data = [values(first + i) if pool.page_bytes else b"\0" for i in range(len(some))]
            parents = [above, *some[:-1]]
            taken = store.put(some, data, parents, wait=_PUT_WAIT_SECONDS)
            is_orphan = first == 0 and above is not None and not store.exists([above])
            if is_orphan and not taken[0]:
                # Its parent is gone, or was never backed up. It is found by its own key.
                taken = store.put(some, data, [None, *some[:-1]], wait=0)
            if not all(taken):
                break
            above = some[-1]
        store.flush()
        return [store.exists([key]) == 1 for key in keys]

    def _put_trailing(self, pool: _Pool, page: str, value: torch.Tensor) -> bool:
        flat = host_bytes(value)
        assert flat is not None
        return self.trailing.put((pool.name, pool.key(page)), flat)

    def _starts(self, pool: _Pool, pages: Sequence[str], indices: torch.Tensor | None) -> list[int]:
        """Return the first slot of each page. Raises ``ValueError`` if the indices do not fit."""
        size = pool.host.page_size
        found = 0 if indices is None else indices.numel()
        if indices is None or found != len(pages) * size:
            msg = (
                f"pool {pool.name!r}: expected {size} host indices for each of {len(pages)} pages, "
                f"found {found}"
            )
            raise ValueError(msg)
        return [int(start) for start in indices[::size].tolist()]

    def _load(self, pool: _Pool, pages: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Load pages into the slots of a host pool, by way of a page beside it."""
        starts = self._starts(pool, pages, indices)
        began = time.perf_counter()
        done: list[bool] = []
        for first in range(0, len(pages), _CHUNK_PAGES):
            some = pages[first : first + _CHUNK_PAGES]
            beside = [torch.empty(pool.page_bytes, dtype=torch.uint8) for _ in some]
            found = self._get(pool, some, beside)
            for start, page, is_there in zip(starts[first:], beside, found, strict=False):
                if is_there:
                    pool.host.set_from_flat_data_page(start, page.view(pool.host.dtype))
            done += found
        self._measure("prefetch", sum(done), pool, began)
        return done

    def _save(
        self,
        pool: _Pool,
        pages: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Store pages out of the slots of a host pool."""
        starts = self._starts(pool, pages, indices)
        began = time.perf_counter()
        prefix = extra_info.prefix_keys if extra_info is not None else None
        done = self._put(pool, pages, lambda i: pool.host.get_data_page(starts[i]), prefix)
        self._measure("backup", sum(done), pool, began)
        return done

    # ---- the five of the first interface: KV pages as tensors ----------------------------------

    @override
    @_or_miss(lambda *_, **__: None)
    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,
    ) -> torch.Tensor | None:
        """Return ``target_location`` (or a new flat page) with the page in it, None for a miss."""
        pool = self._pools[KV]
        target = (
            pool.host.get_dummy_flat_data_page() if target_location is None else target_location
        )
        return target if self._get(pool, [key], [target])[0] else None

    @override
    @_or_miss(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: list[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Return for each key its target with the page in it, None for a miss."""
        pool = self._pools[KV]
        targets = target_locations or [pool.host.get_dummy_flat_data_page() for _ in keys]
        began = time.perf_counter()
        found = self._get(pool, keys, targets)
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
        """Store one KV page."""
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
        """Store KV pages, each the child of the one before it; say whether all are there now."""
        return self._batch_set(keys, values)

    def _batch_set(self, keys: Sequence[str], values: Sequence[torch.Tensor | None] | None) -> bool:
        if values is None or len(values) != len(keys):
            msg = f"expected a page for each of {len(keys)} keys, found {values and len(values)}"
            raise ValueError(msg)
        pool = self._pools[KV]
        pages = [value for value in values if value is not None]
        began = time.perf_counter()
        done = self._put(pool, keys, lambda i: pages[i], None)
        self._measure("backup", sum(done), pool, began)
        return all(done)

    @override
    @_or_miss(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Say whether a KV page is there."""
        return self._exists(self._pools[KV], [key]) == 1

    @override
    @_or_miss(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading KV pages are there."""
        return self._exists(self._pools[KV], keys)

    # ---- the second: KV pages by their slots in the host pool ----------------------------------

    @override
    @_or_miss(lambda keys, *_, **__: [False] * len(keys))
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load KV pages into the host pool; say of each whether it came."""
        return self._load(self._pools[KV], keys, host_indices)

    @override
    @_or_miss(lambda keys, *_, **__: [False] * len(keys))
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store KV pages of the host pool; say of each whether it is there now."""
        return self._save(self._pools[KV], keys, host_indices, extra_info)

    # ---- the third: several pools --------------------------------------------------------------

    @override
    @_or_miss(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that every pool can restore, and how far each pool reaches."""
        reach = {KV: self._exists(self._pools[KV], keys)}
        restorable = list(range(1, reach[KV] + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # such a pool never gates the hit, and kvstore keeps none
            pages = keys[: reach[KV]]
            lengths = self._restorable(transfer, pages)
            if lengths:
                reach[str(transfer.name)] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        hits = {name: count for name, count in reach.items() if count}
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def _restorable(self, transfer: PoolTransfer, pages: Sequence[str]) -> frozenset[int]:
        """Return the lengths of prefixes of ``pages`` that one pool can restore."""
        pool = self._pool_of(transfer)
        if pool is None:
            return frozenset()
        if pool.name in ON_SSD:
            return frozenset(range(1, self._exists(pool, pages) + 1))
        last = max(1, len(transfer.keys or ()))
        there = [self.trailing.has((pool.name, pool.key(page))) for page in pages]
        lengths = range(1, len(pages) + 1)
        return frozenset(n for n in lengths if all(there[max(0, n - last) : n]))

    @override
    @_or_miss(lambda transfers, *_, **__: _all_missed(transfers))
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; say of each whether it came."""
        return self._each(transfers, lambda pool, t: self._load(pool, t.keys or [], t.host_indices))

    @override
    @_or_miss(lambda transfers, *_, **__: _all_missed(transfers))
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; say of each whether it is there now."""
        return self._each(
            transfers,
            lambda pool, t: self._save(pool, t.keys or [], t.host_indices, extra_info),
        )

    def _each(
        self,
        transfers: Sequence[PoolTransfer],
        work: Callable[[_Pool, PoolTransfer], list[bool]],
    ) -> dict[str, list[bool]]:
        """Do every pool's part; what fails in one is no other pool's miss."""
        done = _all_missed(transfers)
        for transfer in transfers:
            pool = self._pool_of(transfer)
            if pool is not None:
                try:
                    done[transfer.name] = work(pool, transfer)
                except Exception as error:  # as in _or_miss, for one pool of several
                    self.note(f"error in pool {pool.name}", repr(error))
        return done

    # ---- the rest ------------------------------------------------------------------------------

    @override
    @_or_miss(lambda: False)
    def clear(self) -> bool:
        """Remove every page that this rank owns."""
        self.trailing.clear()
        for pool in self._pools.values():
            if pool.store is not None and pool.store.is_owner:
                pool.store.clear()
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
        trailing = self.trailing
        return {
            "pools": {
                name: pool.store.stats() if pool.store is not None else None
                for name, pool in self._pools.items()
            },
            "trailing": {
                "pages": len(trailing),
                "live_bytes": trailing.live_bytes,
                "evicted": trailing.evicted,
                "expired": trailing.expired,
            },
            "counts": dict(self._counts),
        }

    def close(self) -> None:
        """Flush and close every store, also where one fails. Idempotent."""
        self.trailing.clear()
        with ExitStack() as stack:
            for pool in self._pools.values():
                if pool.store is not None:
                    stack.callback(pool.store.close)

    def note(self, topic: str, what: str) -> None:
        """Count what went wrong, and log it the first time."""
        with self._lock:
            self._counts[topic] += 1
            is_new = what not in self._said and len(self._said) < _SAMPLES
            self._said.add(what) if is_new else None
        if is_new:
            logger.warning("HiCache on kvstore: %s: %s; further ones are only counted", topic, what)

    def _measure(self, what: str, pages: int, pool: _Pool, began: float) -> None:
        """Note the speed of a transfer, in GB/s, which is SGLang's unit."""
        if pages:
            seconds = max(time.perf_counter() - began, 1e-9)
            with self._lock:
                self._speeds[what].append((pages, pages * pool.page_bytes / seconds / 1e9))


def _all_missed(transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _weight(pool: _Pool) -> int:
    """Return the share of the cap that a pool takes: the pages of 4 KiB that its page needs."""
    return -(-(pool.block_bytes + 1024) // 4096)
