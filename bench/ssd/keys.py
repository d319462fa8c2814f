"""Keys of blocks that stores with and without keys share."""

from __future__ import annotations

import xxhash


def key_of(number: int) -> bytes:
    """Return the key of a block: 16 bytes in no order, the last four its number."""
    return xxhash.xxh3_128_digest(number.to_bytes(4, "big"))[:12] + number.to_bytes(4, "big")


def number_of(key: bytes) -> int:
    """Return the number of a block, for stores that have no keys."""
    return int.from_bytes(key[-4:], "big")
