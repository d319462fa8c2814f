"""One open store directory in one process: opening, writer, namespaces, rebuild, scrub and counters.

``opening`` shares one open store per process, ``open_store`` is that store, ``writer`` admits, commits and evicts.
Imports ``transfer``, ``tier.ssd`` and everything below; called by ``cache``, ``blocks`` and ``admin``.
"""
