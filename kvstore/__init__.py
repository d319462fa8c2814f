"""A KV-cache store for LLM inference that knows what each byte of a model's cache is for.

Importing it is light: the cache, and the FP4 functions, are loaded when they are first named.
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
from kvstore.tier.pages import Pages

if TYPE_CHECKING:
    from kvstore import fp4
    from kvstore.blocks.block_store import BlockStore
    from kvstore.cache import Entries, Match, PinnedPages, Stored
    from kvstore.cache.prefix_cache import PrefixCache
    from kvstore.transfer.threads import Job

__all__ = [
    "BlockStore",
    "CapacityError",
    "ConfigError",
    "Entries",
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
    "PrefixCache",
    "ReplayHook",
    "ReplayRequest",
    "StoreBusy",
    "StoreError",
    "Stored",
    "WindowSnapshot",
    "fp4",
    "layout",
    "weights_digest",
]

_ON_FIRST_USE = {
    "BlockStore": "kvstore.blocks.block_store",
    "Entries": "kvstore.cache",
    "Match": "kvstore.cache",
    "Job": "kvstore.transfer.threads",
    "PinnedPages": "kvstore.cache",
    "PrefixCache": "kvstore.cache.prefix_cache",
    "Stored": "kvstore.cache",
}

deprecated.install()


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
