"""Reference engine: a small DeepSeek-V4.1-shaped model over the public contract of kvstore.

Read in this order: ``config`` (the layer table), ``ops`` (one function per formula), ``weights``,
``entries`` and ``state`` (the KV of one sequence), ``layer`` and ``model`` (the forward pass), ``engine``
(prefill, bounded replay and decoding around a ``PrefixCache``). Optional systems of a config follow:
``indexer``, ``residual``, ``engram``, ``vision``, ``draft``, ``prompt``. The widths are small: the engine
shows which numbers are stored, restored and recomputed, and that they agree. See docs/reference.md.
"""

from kvstore.distribution import require_torch

require_torch()
