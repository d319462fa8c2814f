"""Header of a frame: 112 bytes that identify a block and its form at rest. Normative: docs/format.md, section 4."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.identity.block import BlockHash

FORMAT_VERSION = 1  # version of the frame. A store of another version is refused.

_HEADER = struct.Struct("<4sHHIIIIQ32s32sQQ")
_MAGIC = b"KVSB"
_HAS_IMAGES = 1
IS_QUANTIZED = 2
IS_COMPRESSED = 4
_FLAGS, _FLAGS_OFFSET = struct.Struct("<H"), 6
_NAMESPACE, _NAMESPACE_OFFSET = struct.Struct("<I"), 16
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size
FIXED_BYTES = 32  # before the hashes; within a form only number, namespace, image flag vary
CHECKED_BYTES = HEADER_BYTES - _SUM.size
"""The head checksum covers the header up to here, and everything between the header and the payload."""

assert HEADER_BYTES == 112, "docs/format.md specifies a 112-byte header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Fields of a frame's header, and the quantization error from its reserved bytes."""

    block_tokens: int
    number: int
    namespace_id: int
    payload_bytes: int
    block_hash: BlockHash
    parent_hash: BlockHash
    sequence: int
    has_images: bool = False  # so that its token ids do not determine its hash
    is_packed: bool = False  # the payload is quantized at rest; reads dequantize it
    error: float = 0.0  # of quantization, also of a block kept lossless because of it
    is_compressed: bool = False  # compressed; ``payload_bytes`` is the uncompressed size


def pack_header(header: Header, form: int, parts: int, payload_bytes: int) -> bytes:
    """Return the bytes of a header, with flags and payload size of a form and a checksum of 0."""
    return _HEADER.pack(
        *(_MAGIC, FORMAT_VERSION, _HAS_IMAGES * header.has_images | form, header.block_tokens),
        *(header.number, header.namespace_id, parts, payload_bytes),
        *(header.block_hash, header.parent_hash, header.sequence, 0),
    )


def unpack_header(frame: memoryview, parts: int, error: float) -> Header | None:
    """Return the header of a frame, None for another version or number of parts; checksum and form are not checked."""
    magic, version, flags, block_tokens, number, namespace, count, size, block, parent, seq, _ = (
        _HEADER.unpack_from(frame)
    )
    if (magic, version, count) != (_MAGIC, FORMAT_VERSION, parts):
        return None
    return Header(
        block_tokens=block_tokens,
        number=number,
        namespace_id=namespace,
        payload_bytes=size,
        block_hash=block,
        parent_hash=parent,
        sequence=seq,
        has_images=bool(flags & _HAS_IMAGES),
        is_packed=bool(flags & IS_QUANTIZED),
        error=error,
        is_compressed=bool(flags & IS_COMPRESSED),
    )


def head_sum(frame: bytes | bytearray | memoryview) -> int:
    """Return the head checksum stored in a frame."""
    (found,) = _SUM.unpack_from(frame, CHECKED_BYTES)
    assert isinstance(found, int)
    return found


def set_head_sum(frame: bytearray, value: int) -> None:
    """Store a head checksum in a frame."""
    _SUM.pack_into(frame, CHECKED_BYTES, value)


def form_flags(frame: bytes | bytearray | memoryview) -> int:
    """Return the form flags of a frame, unchecked; 0 for a short frame."""
    if len(frame) < HEADER_BYTES:
        return 0
    (flags,) = _FLAGS.unpack_from(frame, _FLAGS_OFFSET)
    assert isinstance(flags, int)
    return flags & ~_HAS_IMAGES


def set_form_flags(frame: bytearray, form: int) -> None:
    """Store the flags of a form in a frame; its image flag does not change."""
    (flags,) = _FLAGS.unpack_from(frame, _FLAGS_OFFSET)
    _FLAGS.pack_into(frame, _FLAGS_OFFSET, flags & _HAS_IMAGES | form)


def set_namespace(frame: bytearray, namespace_id: int) -> None:
    """Store a namespace number in a frame."""
    _NAMESPACE.pack_into(frame, _NAMESPACE_OFFSET, namespace_id)
