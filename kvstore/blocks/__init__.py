"""``BlockStore``: blocks of one size on SSD under keys chosen by callers.

Start with ``block_store`` (the public class), then ``keyed`` (its operations) and ``keys`` (keys as blocks of a chain).
"""
