"""Callers' keys as blocks: the hash, the frame and the chain of a block under a caller's key.

A block is one entry of raw bytes in a layout of one GLOBAL group. Its token ids are the caller's key, so a frame
contains the whole key and a read compares it byte by byte. docs/format.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.frame.format import FrameFormat
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey, block_key
from kvstore.identity.hash import block_hash, root_digest
from kvstore.layout import LayerGroup, Layout

Key = bytes | str  # a caller's key. A string is encoded as UTF-8.

KEYS_NAMESPACE: Mapping[str, Any] = {"model": "keys of callers"}
"""The namespace of all blocks under callers' keys."""
GROUP = "block"  # name of the group
KEY_BYTES_LIMIT = 4096  # reserved in each block of a store with such keys


def keys_root(secret: bytes | None) -> BlockHash:
    """Return the root: the parent of blocks without a parent, and the prefix of every key's hash."""
    return root_digest(b"kvstore.keys.1", secret)


def key_words(key_bytes: int) -> int:
    """Return the number of 32-bit words for a key of up to ``key_bytes`` bytes and its length."""
    return 1 + -(-key_bytes // 4)


def keyed_format(block_bytes: int, key_bytes: int) -> FrameFormat:
    """Return the frame format for blocks of ``block_bytes`` under keys of up to ``key_bytes`` bytes."""
    words = key_words(key_bytes)
    group = LayerGroup(
        name=GROUP, layers=(0,), values=block_bytes, entry_format="u8", tokens_per_entry=words
    )
    return FrameFormat(Layout(model="keyed blocks", groups=(group,)), words)


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """A caller's key as words, and its block hash."""

    words: NDArray[np.uint32]
    hash: BlockHash

    @property
    def key(self) -> BlockKey:
        """The block key in tier and index."""
        return block_key(self.hash)


def named(key: Key, key_bytes: int, root: BlockHash) -> NamedBlock:
    """Return a key's words and hash under ``keys_root``. Raises ``ValueError`` for other types or too long a key."""
    given: object = key
    if isinstance(given, str):
        data = given.encode("utf-8", "surrogatepass")
    elif isinstance(given, bytes):
        data = given
    else:
        raise ValueError(f"a key must be bytes or str, found {type(given).__name__}")
    if len(data) > key_bytes:
        raise ValueError(
            f"a key has {len(data)} bytes, expected at most {key_bytes}; hash long keys, or open "
            "a store with a larger key_bytes"
        )
    raw = (len(data).to_bytes(4, "little") + data).ljust(4 * key_words(key_bytes), b"\0")
    ids = np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)
    return NamedBlock(ids, block_hash(root, raw))


def key_of(words: NDArray[np.uint32]) -> bytes:
    """Return the caller's key from the words returned by ``named``."""
    return words[1:].astype("<u4").tobytes()[: int(words[0])]


@dataclass(frozen=True, slots=True)
class KeyChain:
    """A chain of blocks under callers' keys: the blocks to store, and the keys of their ancestors."""

    root: BlockHash  # the ``keys_root`` of the store
    above: bytes  # concatenated keys of the ancestors from the root on
    parent: BlockHash  # hash of the last ancestor; the root if there is none
    blocks: Sequence[NamedBlock]
    chain: bytes = field(
        default=b"", init=False
    )  # concatenated keys of all blocks from the root on

    def __post_init__(self) -> None:
        """Concatenate the keys."""
        keys = [block.key for block in self.blocks]
        object.__setattr__(self, "chain", self.above + b"".join(keys))

    @property
    def first(self) -> int:
        """Number of the first of ``blocks``."""
        return len(self.above) // KEY_BYTES

    def block(self, number: int) -> NamedBlock:
        """Block ``number``, counted from the root."""
        return self.blocks[number - self.first]

    def key(self, number: int) -> BlockKey:
        """Key of block ``number``."""
        return BlockKey(self.chain[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def hash_of(self, number: int) -> BlockHash:
        """Hash of block ``number``, which must be one of ``blocks``."""
        return self.block(number).hash

    def parent_hash(self, number: int) -> BlockHash:
        """Hash of the parent of block ``number``, which must be one of ``blocks``."""
        return self.block(number - 1).hash if number > self.first else self.parent

    def has_images(self, number: int) -> bool:  # noqa: ARG002 - the interface of a chain
        """Return False: no block contains an image."""
        return False
