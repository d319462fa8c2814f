"""Backends of SGLang's hierarchical cache over its own host pools, without a controller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE = 16
"""Tokens of a page."""


def device_pool(dtype: torch.dtype = torch.bfloat16, page: int = PAGE) -> Any:
    return MHATokenToKVPool(1024, page, dtype, 2, 8, 3, "cpu", enable_memory_saver=False)


def host_pool(device: Any, layout: str = "layer_first") -> Any:
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        *(2.0, 0, device.page_size, layout),
        pin_memory=False,
        device_capacity_tokens=1024,
        start_layer=0,
        end_layer=2,
    )


def extra(path: Path, **options: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvstore",
        "module_path": "kvstore.engine.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "path": str(path),
        "ssd_bytes": "8MiB",
        "weights": "revision 1",
        **options,
    }


def fill(pool: Any) -> None:
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 120, raw.shape, dtype=torch.uint8))  # no NaN: pages are compared


def tokens(pages: int, seed: int = 0, page: int = PAGE) -> list[int]:
    return [seed * 100_000 + i for i in range(pages * page)]


def config(options: dict[str, Any] | None, **fields: Any) -> Any:
    return HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": False,
            "model_name": "m",
            "extra_config": options,
            **fields,
        }
    )


@contextmanager
def backend(
    path: Path, pool: Any = None, options: Mapping[str, Any] | None = None, **fields: Any
) -> Iterator[Any]:
    given = config(extra(path, **(options or {})), **fields)
    found = StorageBackendFactory.create_backend("dynamic", given, None)
    found.register_mem_pool_host(pool if pool is not None else host_pool(device_pool()))
    found.on_host_pools_registered()
    try:
        yield found
    finally:
        found.close()
