"""Chained SHA-256 hashes of blocks of tokens, and digests of namespaces.

Every field is type-tagged and length-prefixed before hashing, so different inputs have different encodings. Results do
not depend on the process, its environment or Python's ``hash``. docs/format.md, section 2, is normative.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from collections.abc import Sequence
from typing import overload

import numpy as np
from _kvstore_native import ffi, lib
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.identity.block import BlockHash, ImageSpan
from kvstore.identity.namespace import Namespace

_DIGEST_BYTES = 32
_LEVEL = lib.kvstore_level()
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_KINDS = {
    np.dtype(np.int32): lib.KVSTORE_INT32,
    np.dtype(np.uint32): lib.KVSTORE_UINT32,
    np.dtype(np.int64): lib.KVSTORE_INT64,
    np.dtype(np.uint64): lib.KVSTORE_UINT64,
}
TOKEN_LIMIT = 2**32  # token ids are hashed and stored as unsigned 32-bit integers


def as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return token ids as a contiguous uint32 array; no copy if they already are one.

    Raises:
        ValueError: if they are not one-dimensional integers in ``[0, 2**32)``.
    """
    array = _integers(tokens)
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if not array.size:
        return np.empty(0, np.uint32)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= TOKEN_LIMIT:
        raise ValueError(f"token ids must lie in [0, 2**32), found {low if low < 0 else high}")
    return np.ascontiguousarray(array, np.uint32)


def _integers(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
    """Return tokens as a one-dimensional array of integers. Raises as :func:`as_tokens`."""
    if isinstance(tokens, np.ma.MaskedArray):
        msg = "tokens must be plain integers, found a masked array; fill or drop masked ids first"
        raise ValueError(msg)
    try:
        array = np.asarray(tokens)
    except Exception as error:  # ragged, a tensor on a device, a custom __array__
        msg = f"tokens must be a sequence of integers or a one-dimensional integer array: {error}"
        raise ValueError(msg) from error
    if array.ndim != 1:
        msg = f"tokens must be the ids of one prompt, one-dimensional, found shape {list(array.shape)}"
        raise ValueError(msg)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, found dtype {array.dtype}")
    return array


def _text(tag: bytes, value: str | None) -> bytes:
    if value is None:
        return tag + b"n"
    encoded = value.encode("utf-8", "surrogatepass")
    return tag + b"s" + _U64.pack(len(encoded)) + encoded


def root_digest(encoded: bytes, secret: bytes | None) -> BlockHash:
    """Return a root digest, SHA-256 or HMAC under a secret, without which no hash below it can be computed."""
    if secret is None:
        return BlockHash(hashlib.sha256(encoded).digest())
    return BlockHash(hmac.digest(secret, encoded, "sha256"))


def secret_fingerprint(secret: bytes) -> str:
    """Return a hex digest that identifies a secret without revealing it."""
    return root_digest(b"kvstore.secret.1", secret).hex()


def namespace_digest(
    fingerprint: str, block_tokens: int, namespace: Namespace, secret: bytes | None = None
) -> BlockHash:
    """Return the digest of a namespace: the root of all its chains.

    ``fingerprint`` is the layout's; with ``block_tokens`` it separates the keys of other layouts and block sizes.
    ``secret`` is that of the store, if any.
    """
    fields = [
        b"kvstore.namespace.1",
        _text(b"L", fingerprint),
        b"B" + _U64.pack(block_tokens),
        _text(b"M", namespace.model),
        _text(b"W", namespace.weights),
        _text(b"T", namespace.tokenizer),
        _text(b"A", namespace.adapter),
        _text(b"S", namespace.tenant),
        b"G" + _U64.pack(namespace.generation),
    ]
    return root_digest(b"".join(fields), secret)


class HashRun(Sequence[BlockHash]):
    """Sequence of digests, concatenated in ``joined``; items are created on access."""

    __slots__ = ("joined",)
    __hash__ = None  # type: ignore[assignment]  # it equals lists, which are unhashable

    def __init__(self, joined: bytes) -> None:
        assert len(joined) % _DIGEST_BYTES == 0
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined) // _DIGEST_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> HashRun: ...
    @override
    def __getitem__(self, index: int | slice) -> BlockHash | HashRun:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return HashRun(b"".join([self[i] for i in range(start, stop, step)]))
            return HashRun(self.joined[start * _DIGEST_BYTES : max(start, stop) * _DIGEST_BYTES])
        at = range(len(self))[index]  # as in a list: negative from the end, or IndexError
        return BlockHash(self.joined[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES])

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"HashRun({list(self)!r})"

    def prefixes(self, length: int) -> bytes:
        """Return the first ``length`` bytes of each digest, concatenated."""
        table = np.frombuffer(self.joined, np.uint8).reshape(-1, _DIGEST_BYTES)
        return table[:, :length].tobytes()


def block_hashes(
    root: BlockHash,
    tokens: NDArray[np.uint32],
    block_tokens: int,
    images: Sequence[ImageSpan] = (),
) -> HashRun:
    """Return the chained digest of every whole block of ``tokens``, in order.

    Digest i covers the root, every token and every image up to the end of block i. Tokens after the last whole block
    are ignored.

    Cost: one SHA-256 over 4 bytes a token plus 45 bytes a block, in one pass of the C extension; a block with an image
        is hashed by hashlib.
    """
    if sys.byteorder == "big":
        tokens = tokens.byteswap()
    tokens = np.ascontiguousarray(tokens)
    blocks = len(tokens) // block_tokens
    tails = _image_fields(images, block_tokens) if images else {}
    digests, done = b"", 0
    for number in sorted(number for number in tails if number < blocks):
        digests += _plain_hashes(_last(digests, root), tokens, done, number, block_tokens)
        ids = tokens[number * block_tokens : (number + 1) * block_tokens].tobytes()
        digests += block_hash(_last(digests, root), ids, tails[number])
        done = number + 1
    return HashRun(
        digests + _plain_hashes(_last(digests, root), tokens, done, blocks, block_tokens)
    )


def block_hash(parent: BlockHash, ids: bytes, images: bytes = _U32.pack(0)) -> BlockHash:
    """Return the digest of one block from its parent's digest, its stored ids and its images."""
    head = b"kvb1" + _U32.pack(len(ids) // 4) + parent
    return BlockHash(hashlib.sha256(head + ids + images).digest())


def identify(
    root: BlockHash,
    tokens: Sequence[int] | NDArray[np.integer],
    block_tokens: int,
    images: Sequence[ImageSpan] = (),
) -> tuple[NDArray[np.uint32], HashRun]:
    """Return token ids as ``as_tokens`` does, in a new array, and their ``block_hashes``.

    Raises:
        ValueError: as ``as_tokens``.

    Cost: that of ``block_hashes`` for an array of 32 or 64 bits: ids are checked and copied in the same pass.
    """
    array = _integers(tokens)
    kind = _KINDS.get(array.dtype)
    if images or kind is None or sys.byteorder == "big":
        ids = as_tokens(array).copy()
        return ids, block_hashes(root, ids, block_tokens, images)
    array = np.require(array, requirements=("C", "A"))
    ids = np.empty(len(array), np.uint32)
    found = bytearray(_DIGEST_BYTES * (len(array) // block_tokens))
    code = lib.kvstore_identify(
        ffi.from_buffer("uint8_t[]", root),
        ffi.from_buffer("char[]", array),
        kind,
        len(array),
        block_tokens,
        _LEVEL,
        ffi.from_buffer("uint32_t[]", ids),
        ffi.from_buffer("uint8_t[]", found),
    )
    if code == lib.KVSTORE_ERR_RANGE:
        as_tokens(array)  # raises with the id
    assert code == lib.KVSTORE_OK, f"kvstore_identify returned {code}"
    return ids, HashRun(bytes(found))


def _last(digests: bytes, root: BlockHash) -> BlockHash:
    return BlockHash(digests[-_DIGEST_BYTES:]) if digests else root


def _plain_hashes(
    parent: BlockHash,
    tokens: NDArray[np.uint32],
    start: int,
    stop: int,
    block_tokens: int,
    level: int = _LEVEL,
) -> bytes:
    """Return the concatenated digests of blocks ``[start, stop)``, which have no images."""
    if stop <= start:
        return b""
    found = bytearray(_DIGEST_BYTES * (stop - start))
    code = lib.kvstore_block_hashes(
        ffi.from_buffer("uint8_t[]", parent),
        ffi.from_buffer("uint32_t[]", tokens[start * block_tokens : stop * block_tokens]),
        stop - start,
        block_tokens,
        level,
        ffi.from_buffer("uint8_t[]", found),
    )
    assert code == lib.KVSTORE_OK, f"kvstore_block_hashes returned {code}"
    return bytes(found)


def _image_fields(images: Sequence[ImageSpan], block_tokens: int) -> dict[int, bytes]:
    """Return the encoded image fields of each block with an image."""
    spans: dict[int, list[bytes]] = {}
    previous_stop = 0
    for image in sorted(images):
        if image.start < previous_stop:
            msg = f"image spans must not overlap, found an overlap at token {image.start}"
            raise ValueError(msg)
        previous_stop = image.stop
        for number in range(image.start // block_tokens, (image.stop - 1) // block_tokens + 1):
            start = max(image.start, number * block_tokens)
            stop = min(image.stop, (number + 1) * block_tokens)
            span = struct.pack(
                "<QQQ", start - number * block_tokens, stop - start, start - image.start
            )
            field = b"I" + span + _U64.pack(len(image.digest)) + image.digest
            spans.setdefault(number, []).append(field)
    return {number: _U32.pack(len(fields)) + b"".join(fields) for number, fields in spans.items()}
