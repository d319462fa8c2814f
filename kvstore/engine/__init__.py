"""Adapters: they copy an inference engine's KV cache to entries, and entries to its KV cache.

An adapter imports ``kvstore``, ``kvstore.errors``, ``kvstore.fp4`` and the shared modules of this package.
No adapter imports another, and importing this package imports no engine. docs/adapter.md is the guide.
"""
