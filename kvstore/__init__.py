"""A KV-cache store for LLM inference that knows what each byte of a model's cache is for."""

from kvstore.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatch,
    StoreBusy,
    StoreError,
)
from kvstore.hash import ImageSpan
from kvstore.layout import Layout, LayerGroup, Lifetime, layout
from kvstore.namespace import Namespace
from kvstore.replay import ReplayHook, ReplayRequest, WindowSnapshot

__all__ = [
    "CapacityError",
    "ConfigError",
    "ImageSpan",
    "KVStoreError",
    "LayerGroup",
    "Layout",
    "LayoutMismatch",
    "Lifetime",
    "Namespace",
    "ReplayHook",
    "ReplayRequest",
    "StoreBusy",
    "StoreError",
    "WindowSnapshot",
    "layout",
]
