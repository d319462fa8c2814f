"""``BlockStore``: the SSD tier for callers with their own keys.

Start with ``block_store`` (the public class), then ``keyed`` (its operations on one open store) and ``keys`` (keys as
blocks of a chain).
"""
