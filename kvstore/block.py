"""Names for the bytes that identify a block, and the one rule that turns one into the other."""

from __future__ import annotations

from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: chained SHA-256 of everything up to a block's end. Compared on every read."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: what a tier is keyed by. A collision is a miss, because the whole hash is compared."""

KEY_BYTES = 16
"""128 bits: a chance of 2**-48 that any two of 2**40 blocks share a key, and then it is a miss."""


def block_key(block_hash: BlockHash) -> BlockKey:
    """Return the key of a block: the first 16 bytes of its hash."""
    return BlockKey(block_hash[:KEY_BYTES])
