"""Chains of blocks, and the prefix of a request as a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey, ImageSpan
from kvstore.identity.hash import HashRun


def split_keys(chain: bytes) -> list[BlockKey]:
    """Return the list of keys of a chain."""
    return [BlockKey(chain[at : at + KEY_BYTES]) for at in range(0, len(chain), KEY_BYTES)]


class Chain(Protocol):
    """Blocks from a root on, each the child of the one before it."""

    @property
    def root(self) -> BlockHash:
        """The parent of the first block: its namespace's hash."""

    @property
    def chain(self) -> bytes:
        """Concatenated keys of its blocks, for an index to match."""

    def key(self, number: int) -> BlockKey:
        """Key of block ``number``."""

    def hash_of(self, number: int) -> BlockHash:
        """Hash of block ``number``."""

    def parent_hash(self, number: int) -> BlockHash:
        """Hash of the block before ``number``, the root's for the first."""

    def has_images(self, number: int) -> bool:
        """Whether an image overlaps block ``number``."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request's tokens with the hash of every whole block."""

    root: BlockHash
    tokens: NDArray[np.uint32]
    hashes: HashRun
    images: Sequence[ImageSpan]
    block_tokens: int
    chain: bytes = field(default=b"", init=False)  # concatenated keys, for an index to match

    def __post_init__(self) -> None:
        """Join the keys, which are prefixes of the hashes."""
        object.__setattr__(self, "chain", self.hashes.prefixes(KEY_BYTES))

    def cut(self, blocks: int) -> Prefix:
        """Return its first ``blocks`` blocks, without later tokens."""
        tokens = self.tokens[: blocks * self.block_tokens]
        if len(tokens) == len(self.tokens):
            return self
        return replace(self, tokens=tokens, hashes=self.hashes[:blocks])

    def head(self, blocks: int) -> bytes:
        """Concatenated keys of its first ``blocks`` blocks."""
        return self.chain[: blocks * KEY_BYTES]

    def key(self, number: int) -> BlockKey:
        """Key of block ``number``."""
        return BlockKey(self.chain[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def keys(self, first: int, stop: int) -> list[BlockKey]:
        """Keys of blocks ``[first, stop)``."""
        return split_keys(self.chain[first * KEY_BYTES : stop * KEY_BYTES])

    def hash_of(self, number: int) -> BlockHash:
        """Hash of block ``number``."""
        return self.hashes[number]

    def parent_hash(self, number: int) -> BlockHash:
        """Hash of the block before ``number``, the root's for the first."""
        return self.hashes[number - 1] if number else self.root

    def hash_at(self, tokens: int) -> BlockHash:
        """Hash of its first ``tokens`` tokens, a block boundary."""
        return self.parent_hash(tokens // self.block_tokens)

    def block_ids(self, number: int) -> NDArray[np.uint32]:
        """Token ids of block ``number``."""
        return self.tokens[number * self.block_tokens : (number + 1) * self.block_tokens]

    def run_of_hashes(self, first: int, count: int) -> bytes:
        """Concatenated hashes of the parent of block ``first`` and of ``count`` blocks from it on."""
        return self.parent_hash(first) + self.hashes[first : first + count].joined

    def run_of_ids(self, first: int, count: int) -> NDArray[np.uint32]:
        """Token ids of ``count`` blocks from ``first`` on."""
        return self.tokens[first * self.block_tokens : (first + count) * self.block_tokens]

    def has_images(self, number: int) -> bool:
        """Whether an image overlaps block ``number``."""
        start, stop = number * self.block_tokens, (number + 1) * self.block_tokens
        return any(image.start < stop and image.stop > start for image in self.images)
