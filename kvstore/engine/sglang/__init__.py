"""SGLang's hierarchical cache (HiCache) on block stores: a storage backend for its ``dynamic`` type.

``options`` has the configuration, ``pools`` the stores behind SGLang's host pools, and ``hicache`` the
backend's interface. See docs/sglang.md.
"""

from __future__ import annotations

from kvstore.engine.options import engine_missing

try:
    from kvstore.engine.sglang.hicache import KVStoreHiCache
except ImportError as error:
    engine_missing("sglang", "SGLang 0.5.23", error)

__all__ = ["KVStoreHiCache"]
