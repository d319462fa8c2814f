"""Adapters: they copy an inference engine's KV cache to entries, and entries to its KV cache.

An adapter imports the public names: ``kvstore``, ``kvstore.errors`` and ``kvstore.fp4``. Modules of
this package that adapters share may also use ``kvstore.checks`` and ``kvstore.distribution``.
No adapter imports another, and importing this package imports no engine. docs/adapter.md is the guide.
"""

from kvstore.distribution import require_torch

require_torch()
