"""One open store directory in one process.

``registry`` shares one ``OpenStore`` per directory and process; ``opening`` creates it, ``agreement`` compares the
options of later openings; ``store_format`` and ``secret`` identify it. ``writer`` is the part of ``open_store`` that
changes the store, in its owner. It joins ``admission``, ``pending`` (the write queue), ``commit``, ``quota``,
``eviction``, ``retention`` (recency, expiry, pins), ``failures``, ``namespaces`` and ``rebuild``. ``scrub`` and
``integrity`` verify stored blocks; ``generations`` records generations of weights; ``context`` and ``metrics`` are
shared. Imports ``transfer``, ``tier.ssd`` and everything below; called by ``cache``, ``blocks`` and ``admin``.
"""
