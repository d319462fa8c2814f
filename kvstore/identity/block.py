"""What identifies a block: hashes, keys, and the images that its tokens stand for."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
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


@dataclass(frozen=True, slots=True, order=True)
class ImageSpan:
    """Tokens ``[start, stop)`` of a prompt that stand for one image.

    All positions of an image carry the same placeholder id, so the ids alone do not identify the
    prefix: ``digest`` does, together with the offset inside the image.
    """

    start: int
    stop: int
    digest: bytes
    """Digest of the image's content and preprocessing."""

    def __post_init__(self) -> None:
        """Reject an empty or negative span and an empty digest."""
        for name in ("start", "stop"):
            place: object = getattr(self, name)
            if isinstance(place, bool) or not isinstance(place, Integral):
                msg = f"an image span needs integers, found {name} {place!r}"
                raise ValueError(msg)
            object.__setattr__(self, name, int(place))  # a narrow NumPy integer would overflow
        if not 0 <= self.start < self.stop:
            msg = f"an image span needs 0 <= start < stop, found [{self.start}, {self.stop})"
            raise ValueError(msg)
        if not isinstance(self.digest, bytes) or not self.digest:
            msg = f"an image digest must be non-empty bytes, found {self.digest!r}"
            raise ValueError(msg)
