"""Persistent KV cache for LLM inference: prefix KV on GPU and SSD, sliding-window KV in host memory.

``__all__`` is the public contract: an adapter of an engine needs these names, ``kvstore.errors`` and
``kvstore.fp4``, and no other module. Importing this package does not import torch; the names of
``_ON_FIRST_USE`` are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from kvstore.tier.pages import Pages

if TYPE_CHECKING:
    from kvstore import fp4
    from kvstore.blocks.block_store import BlockStore
    from kvstore.cache import Entries, Match, PinnedPages, Scope, Stored
    from kvstore.cache.jobs import Event
    from kvstore.cache.prefix_cache import PrefixCache
    from kvstore.identity.hash import as_tokens
    from kvstore.output.sizes import size_bytes
    from kvstore.policy.protocol import Policy
    from kvstore.tier.paged import decode_rows, encode_rows
    from kvstore.transfer.threads import Job

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
    "layout",
    "size_bytes",
    "weights_digest",
]

_ON_FIRST_USE = {
    "BlockStore": "kvstore.blocks.block_store",
    "Entries": "kvstore.cache",
    "Event": "kvstore.cache.jobs",
    "Job": "kvstore.transfer.threads",
    "Match": "kvstore.cache",
    "PinnedPages": "kvstore.cache",
    "Policy": "kvstore.policy.protocol",
    "PrefixCache": "kvstore.cache.prefix_cache",
    "Scope": "kvstore.cache",
    "Stored": "kvstore.cache",
    "as_tokens": "kvstore.identity.hash",
    "decode_rows": "kvstore.tier.paged",
    "encode_rows": "kvstore.tier.paged",
    "size_bytes": "kvstore.output.sizes",
}


def __getattr__(name: str) -> Any:
    if name == "fp4":
        return import_module("kvstore.fp4")
    if name in _ON_FIRST_USE:
        value = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
        return value
    msg = f"module 'kvstore' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
