"""A small DeepSeek-V4.1-shaped model, and an engine around it that uses kvstore as a stranger would.

Read in this order: ``config`` (the layer table), ``ops`` (one function per formula), ``weights``,
``entries`` and ``state`` (what one sequence holds), ``model`` (the forward pass), ``engine`` (prefill,
bounded replay and decoding around a ``PrefixCache``). The widths are small and the weights random:
the point is which numbers are kept, restored and computed again, and whether they agree.
"""
