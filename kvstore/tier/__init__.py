"""Tiers: the media that store blocks. A tier copies bytes; it selects no blocks and imports no other tier.

``ssd`` is a store's directory, ``device`` the pages in GPU memory, ``window`` the pool of window KV in host memory.
Start with ``ssd``. Imports ``frame``, ``layout`` and ``codec``; called by ``store`` and ``cache``.
"""
