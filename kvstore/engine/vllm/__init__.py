"""Connector for vLLM: ``kvstore.engine.vllm:KVStoreConnector``. See docs/vllm.md."""

from __future__ import annotations

from kvstore.engine.options import engine_missing

try:
    from kvstore.engine.vllm.connector import KVStoreConnector
except ImportError as error:
    engine_missing("vllm", "vLLM 0.32", error)

__all__ = ["KVStoreConnector"]
