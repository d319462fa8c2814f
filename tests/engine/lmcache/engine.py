"""LMCache's storage manager with its store, prefetch and eviction controllers, over this adapter."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

from kvstore.engine.lmcache import KVStoreL2Adapter

SHAPE = torch.Size([2, 3, 16, 32])
DESC = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
SIZE = SHAPE.numel() * 2
WAIT = 60.0


def key_of(number: int, salt: str = "", model: str = "m", rank: int = 1, group: int = 0) -> Any:
    return ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt)


def spec(path: Path, **options: Any) -> dict[str, Any]:
    outer: dict[str, Any] = {n: options.pop(n) for n in ("eviction", "serde") if n in options}
    return {
        "type": "plugin",
        "module_path": "kvstore.engine.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"path": str(path), "ssd_bytes": "8MiB", "revision": "1", **options},
        **outer,
    }


def until(what: Callable[[], Any]) -> Any:
    """Wait for something that LMCache's threads will bring about."""
    deadline = time.monotonic() + WAIT
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)
    return found


class Server:
    """LMCache's storage manager with its store, prefetch and eviction controllers."""

    def __init__(self, path: Path, **options: Any) -> None:
        parser = add_storage_manager_args(argparse.ArgumentParser())
        arguments = [
            *("--l1-size-gb", "0.03", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(spec(path, **options))),
        ]
        self.manager = StorageManager(parse_args_to_config(parser.parse_args(arguments)))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    @property
    def adapter(self) -> Any:
        return self.manager.l2_adapters()[0][1]

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manager.report_status()["l2_adapters"][0]
        return found

    def store(self, keys: list[Any], desc: Any = DESC) -> dict[Any, torch.Tensor]:
        """Write objects to L1 and wait until the store controller has them in L2."""
        objects = self.manager.reserve_write(keys, desc)
        for item in objects.values():
            item.tensor.copy_(torch.randn(item.tensor.shape))
        written = {key: item.tensor.clone() for key, item in objects.items()}
        self.manager.finish_write(list(objects))
        until(lambda: all(key in self.books for key in objects))
        return written

    @property
    def books(self) -> Any:
        """The keys that the adapter has, with or without a serde around it."""
        found = self.adapter
        return (found if isinstance(found, KVStoreL2Adapter) else found._inner).objects.entries

    def forget(self) -> None:
        self.manager.clear(force=True)

    def fetch(self, keys: list[Any], desc: Any = DESC) -> tuple[int, list[torch.Tensor]]:
        """Prefetch through the controller; return the L2 hits, and the objects in order."""
        rows = [GroupedObjectKeys(keys, keys[0].object_group_id, desc)]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        assert self.manager.wait_prefetch_status(handle, WAIT)
        result = self.manager.query_prefetch_status(handle)
        hits = [key for i, key in enumerate(keys) if result.hit_cells[0].test(i)]
        found = []
        if hits:
            with self.manager.read_prefetched_results(hits) as objects:
                found = [item.tensor.clone() for item in objects]
            self.manager.finish_read_prefetched(hits)
        return result.l2_hit_count, found
