"""Second tier (L2) of LMCache: an adapter for the ``plugin`` type of its MP server. See docs/lmcache.md.

``options`` has the parameters, ``keys`` the encoding of object keys, ``objects`` the stores and their
index, ``tasks`` LMCache's asynchronous tasks, and ``adapter`` LMCache's interface.
"""

from __future__ import annotations

from kvstore.engine.options import engine_missing

try:
    from kvstore.engine.lmcache.adapter import KVStoreL2Adapter
    from kvstore.engine.lmcache.options import KVStoreL2AdapterConfig
except ImportError as error:
    engine_missing("lmcache", "LMCache 0.5.6", error)

__all__ = ["KVStoreL2Adapter", "KVStoreL2AdapterConfig"]
