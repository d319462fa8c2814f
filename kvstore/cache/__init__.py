"""The prefix cache: ``PrefixCache`` opens a store, ``Scope`` is one namespace's view of it.

``shared`` creates one object per task: ``chains`` (block hashes), ``lookups``, ``leases``, ``ssd_reads``,
``host_reads``, ``writes``, ``windows``, ``device_cache`` and ``jobs``. Engines call ``Scope`` only.
"""

from kvstore.cache.entries import Entries, Stored
from kvstore.cache.match import Match, PinnedPages
from kvstore.cache.scope import Scope
from kvstore.cache.shared import SharedTiers

__all__ = ["Entries", "Match", "PinnedPages", "Scope", "SharedTiers", "Stored"]
