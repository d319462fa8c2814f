"""``BlockStore``: blocks of one size on SSD under keys that callers choose.

Start with ``block_store`` (the public class), then ``keyed`` (its operations on one open store) and ``keys`` (keys as
blocks of a chain).
"""
