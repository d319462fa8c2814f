"""Storage backend of SGLang's hierarchical cache (HiCache), for its ``dynamic`` type. See docs/sglang.md.

``options`` has the configuration, ``pools`` the stores of SGLang's host pools, ``hicache`` the interface.
"""

from __future__ import annotations

from kvstore.engine.options import engine_missing

try:
    from kvstore.engine.sglang.hicache import KVStoreHiCache
except ImportError as error:
    engine_missing("sglang", "SGLang 0.5.23", error)

__all__ = ["KVStoreHiCache"]
