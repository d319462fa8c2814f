"""Adapters: how an inference engine's own cache becomes entries, and entries its cache again.

An adapter uses the public contract of ``kvstore`` and nothing behind it. Adapters do not know each
other, and importing this package imports torch but no engine.
"""

from kvstore.distribution import require_torch

require_torch()
