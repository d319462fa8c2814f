"""Adapters for inference engines: copies between an engine's KV cache and entries. See docs/adapter.md.

An adapter imports the public names: ``kvstore``, ``kvstore.errors`` and ``kvstore.fp4``. Modules shared
by adapters may also use ``kvstore.checks`` and ``kvstore.distribution``. No adapter imports another, and
importing this package imports no engine.
"""

from kvstore.distribution import require_torch

require_torch()
