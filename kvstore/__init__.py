"""Persistent KV cache for LLM inference: prefix KV on GPU and SSD, sliding-window KV in host memory.

``__all__`` is the public contract: an engine adapter needs these names, ``kvstore.errors`` and ``kvstore.fp4``, and no
other module. Importing this package does not import torch; the names of ``_ON_FIRST_USE`` are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore import deprecated
from kvstore.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatch,
    StoreBusy,
    StoreError,
)
from kvstore.identity.block import ImageSpan
from kvstore.identity.namespace import Namespace, weights_digest
from kvstore.layout import LayerGroup, Layout, Lifetime, layout
from kvstore.layout.replay import ReplayHook, ReplayRequest, WindowSnapshot
from kvstore.tier.engine_pages import Pages

if TYPE_CHECKING:
    from kvstore import fp4
    from kvstore.blocks.block_store import BlockStore
    from kvstore.cache import Entries, Match, PinnedPages, Scope, Stored
    from kvstore.cache.jobs import Event
    from kvstore.cache.prefix_cache import PrefixCache
    from kvstore.identity.hash import as_tokens
    from kvstore.index.plan import hit_limit
    from kvstore.output.sizes import size_bytes
    from kvstore.policy.protocol import Policy
    from kvstore.tier.engine_copy import decode_rows, encode_rows
    from kvstore.transfer.job import Job

__all__ = [
    "BlockStore",
    "CapacityError",
    "ConfigError",
    "Entries",
    "Event",
    "ImageSpan",
    "Job",
    "KVStoreError",
    "LayerGroup",
    "Layout",
    "LayoutMismatch",
    "Lifetime",
    "Match",
    "Namespace",
    "Pages",
    "PinnedPages",
    "Policy",
    "PrefixCache",
    "ReplayHook",
    "ReplayRequest",
    "Scope",
    "StoreBusy",
    "StoreError",
    "Stored",
    "WindowSnapshot",
    "as_tokens",
    "decode_rows",
    "encode_rows",
    "fp4",
    "hit_limit",
    "layout",
    "size_bytes",
    "weights_digest",
]

_ON_FIRST_USE = {
    "BlockStore": "kvstore.blocks.block_store",
    "Entries": "kvstore.cache",
    "Event": "kvstore.cache.jobs",
    "Job": "kvstore.transfer.job",
    "Match": "kvstore.cache",
    "PinnedPages": "kvstore.cache",
    "Policy": "kvstore.policy.protocol",
    "PrefixCache": "kvstore.cache.prefix_cache",
    "Scope": "kvstore.cache",
    "Stored": "kvstore.cache",
    "as_tokens": "kvstore.identity.hash",
    "decode_rows": "kvstore.tier.engine_copy",
    "encode_rows": "kvstore.tier.engine_copy",
    "hit_limit": "kvstore.index.plan",
    "size_bytes": "kvstore.output.sizes",
}

deprecated.install()


def __getattr__(name: str) -> Any:
    if name == "fp4":
        return import_module("kvstore.fp4")
    if name in _ON_FIRST_USE:
        value = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
        return value
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
