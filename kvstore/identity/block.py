"""Identifiers of blocks: hashes and keys, and the images in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from kvstore.checks import integer

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: chained SHA-256 of all tokens and images up to a block's end. Compared on every read."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: key of a block in a tier. A collision is a miss, because the whole hash is compared."""

KEY_BYTES = 16
"""128 bits: two of 2**40 blocks share a key with a probability of 2**-48, and then a read is a miss."""


def block_key(block_hash: BlockHash) -> BlockKey:
    """Return the key of a block: the first 16 bytes of its hash."""
    return BlockKey(block_hash[:KEY_BYTES])


@dataclass(frozen=True, slots=True, order=True)
class ImageSpan:
    """Tokens ``[start, stop)`` of a prompt that represent one image.

    All positions of an image have the same placeholder id, so the prefix is identified by ``digest`` and the offset
    inside the image too.
    """

    start: int
    stop: int
    digest: bytes
    """Digest of the image's content and preprocessing."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an empty or negative span or an empty digest."""
        start = integer(self.start, "start of an image span")
        stop = integer(self.stop, "stop of an image span", start + 1)
        object.__setattr__(self, "start", start)  # a narrow NumPy integer would overflow
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.digest, bytes) or not self.digest:
            raise ValueError(f"an image digest must be non-empty bytes, found {self.digest!r}")
