"""A small DeepSeek-V4.1-shaped model, and an engine around it that uses kvstore as a stranger would.

Read in this order: ``config`` (the layer table), ``ops`` (one function per formula), ``weights``,
``entries`` and ``state`` (what one sequence holds), ``layer`` and ``model`` (the forward pass), ``engine``
(prefill, bounded replay and decoding around a ``PrefixCache``). Then what a config switches on:
``indexer``, ``residual``, ``engram``, ``vision``, ``draft``, ``prompt``. The widths are small: the point is
which numbers are kept, restored and computed again, and whether they agree. docs/reference.md has the map.
"""

from kvstore.distribution import require_torch

require_torch()
