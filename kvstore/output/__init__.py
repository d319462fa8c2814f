"""Output for people: SVG charts, HTML pages, files that appear whole or not at all, sizes and units.

Imports only ``errors`` and ``checks``, so any package may use it.
"""
