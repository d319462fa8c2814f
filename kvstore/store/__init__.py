"""One open store directory in one process.

``registry`` shares one ``OpenStore`` per directory and process, made by ``opening`` under the options that ``agreement``
compares; ``store_format`` and ``secret`` identify it. ``open_store`` is that store; ``writer`` is the part that changes it,
in its owner. The writer joins ``admission``, ``pending`` (the write queue), ``commit``, ``quota``,
``eviction``, ``retention`` (recency, expiry, pins), ``failures``, ``namespaces`` and ``rebuild``. ``scrub`` and
``integrity`` check stored blocks; ``generations`` records generations of weights; ``context`` and ``metrics`` are shared.
Imports ``transfer``, ``tier.ssd`` and everything below; called by ``cache``, ``blocks`` and ``admin``.
"""
