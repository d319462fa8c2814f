"""Output: SVG charts, HTML pages, atomically written files, sizes and units.

Imports only ``errors`` and ``checks``; any package may use it.
"""
