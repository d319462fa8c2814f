"""LMCache's second tier (L2) on block stores: an adapter for the ``plugin`` type of its MP server.

``options`` has the parameters, ``keys`` encodes object keys, ``objects`` holds the stores and the index of stored objects, ``tasks``
runs LMCache's asynchronous tasks, and ``adapter`` implements LMCache's interface. See docs/lmcache.md.
"""

from __future__ import annotations

from kvstore.engine.options import engine_missing

try:
    from kvstore.engine.lmcache.adapter import KVStoreL2Adapter
    from kvstore.engine.lmcache.options import KVStoreL2AdapterConfig
except ImportError as error:
    engine_missing("lmcache", "LMCache 0.5.6", error)

__all__ = ["KVStoreL2Adapter", "KVStoreL2AdapterConfig"]
