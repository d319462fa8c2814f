"""A KV-cache store for LLM inference that knows what each byte of a model's cache is for."""

from kvstore import fp4
from kvstore.assembly import PrefixCache
from kvstore.block import ImageSpan
from kvstore.cache import Entries, Match, Pages, Stored
from kvstore.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatch,
    StoreBusy,
    StoreError,
)
from kvstore.layout import LayerGroup, Layout, Lifetime, layout
from kvstore.namespace import Namespace, weights_digest
from kvstore.replay import ReplayHook, ReplayRequest, WindowSnapshot

__all__ = [
    "CapacityError",
    "ConfigError",
    "Entries",
    "ImageSpan",
    "KVStoreError",
    "LayerGroup",
    "Layout",
    "LayoutMismatch",
    "Lifetime",
    "Match",
    "Namespace",
    "Pages",
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
