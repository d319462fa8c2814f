"""Reference engine: a small model with the structure of DeepSeek-V4.1, over the public API of kvstore.

Reading order: ``config`` (the layer table), ``ops`` (one function per formula), ``weights``, ``entries``
and ``state`` (the KV of one sequence), ``layer`` and ``model`` (the forward pass), ``engine`` (prefill,
bounded replay and decoding with a ``PrefixCache``). Optional systems: ``indexer``, ``residual``,
``engram``, ``vision``, ``draft``, ``prompt``. The engine demonstrates that stored, restored and recomputed
values agree, so small widths suffice. See docs/reference.md.
"""

from kvstore.distribution import require_torch

require_torch()
