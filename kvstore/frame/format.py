"""Frame of one block: sealing, verifying, and copying entries, without I/O. docs/format.md, section 4."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.codec import native
from kvstore.frame import targets
from kvstore.frame.geometry import FrameGeometry, PartBatch
from kvstore.frame.header import (
    CHECKED_BYTES,
    FIXED_BYTES,
    FORMAT_VERSION,
    HEADER_BYTES,
    IS_COMPRESSED,
    IS_QUANTIZED,
    Header,
    form_flags,
    head_sum,
    pack_header,
    set_form_flags,
    set_head_sum,
    set_namespace,
    unpack_header,
)
from kvstore.frame.targets import AddressTable
from kvstore.identity.block import BlockHash
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array

__all__ = ["FORMAT_VERSION", "FrameFormat", "Frames", "Header"]

_ERROR = struct.Struct("<f")


class Frames(Protocol):
    """The frame formats of a store: conversion of blocks to frames and back, in the engine's form."""

    @property
    def layout(self) -> Layout:
        """The engine's layout."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def entries(self) -> Mapping[str, int]:
        """Entries of a block, by group."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block in the engine's form."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest frame."""

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> Any:
        """Return a source for ``encode``, for one thread at a time."""

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: Any, block: int
    ) -> bytearray:
        """Return the frame of the ``block``-th whole block of a source."""

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return the format named by a frame's flags, for verifying and reading it."""

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], batch: PartBatch | None = None
    ) -> Any:
        """Return a target for ``scatter``, of all entries or those of a batch."""

    def readers(self, target: Any) -> Mapping[int, native.FrameReader]:
        """Return readers of many frames at once, by frame size in bytes. Other frames are read one by one."""

    def scatter(self, frame: memoryview, target: Any, block: int) -> str | None:
        """Copy a payload to a target and verify it; return its fault, or None."""

    def empty(self, blocks: int, batch: PartBatch | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries for ``blocks`` blocks, by GLOBAL group, of a batch or all."""

    def part_batches(self, blocks: int) -> Sequence[PartBatch]:
        """Return all parts in batches, in order of layer, for a load of ``blocks`` blocks."""

    @property
    def whole(self) -> PartBatch:
        """All parts as one batch."""


class FrameFormat(FrameGeometry):
    """Frames of one layout, block size and form at rest. Every frame has ``frame_bytes`` bytes."""

    def __init__(
        self,
        layout: Layout,
        block_tokens: int,
        *,
        is_packed: bool = False,
        is_compressed: bool = False,
    ) -> None:
        """Raise ``ConfigError`` if a block would contain a fraction of an entry.

        ``is_packed`` frames have a quantized layout instead of the engine's; ``is_compressed`` frames are stored
        compressed (kvstore/frame/at_rest.py).
        """
        super().__init__(layout, block_tokens)
        self.is_packed = is_packed
        self.is_compressed = is_compressed
        self.form = IS_QUANTIZED * is_packed | IS_COMPRESSED * is_compressed
        """Header flags of the form at rest."""
        self._sums = struct.Struct(f"<{self.part_count}Q")

    # ---- sealing

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: AddressTable, block: int
    ) -> bytearray:
        """Return the frame of the ``block``-th whole block of ``source``.

        Shapes:
            ``tokens`` are the block's own ids, ``[block_tokens]``.

        Cost: one pass over the payload; each byte is summed when it is copied.
        """
        frame = bytearray(self.frame_bytes)
        ids = tokens.astype("<u4", copy=False)
        memoryview(frame)[HEADER_BYTES : self.sums_offset] = ids.tobytes()
        self._seal(frame, header, native.write_parts(frame, source.parts, source.segments(block)))
        return frame

    def seal(self, frame: bytearray, header: Header) -> None:
        """Write the header and all checksums of a frame that contains its token ids and payload."""
        view = self.laid_out(memoryview(frame))
        assert view is not None, "a payload to be sealed is intact"
        sums = [xxhash.xxh3_64_intdigest(view[start:stop]) for start, stop in self.part_bounds]
        self._seal(frame, header, sums)

    def _seal(self, frame: bytearray, header: Header, sums: Sequence[int]) -> None:
        self._sums.pack_into(frame, self.sums_offset, *sums)
        frame[:HEADER_BYTES] = self._head(header)
        _ERROR.pack_into(frame, self.payload_offset - _ERROR.size, header.error)
        set_head_sum(frame, self.sum_head(frame))

    def _head(self, header: Header) -> bytes:
        return pack_header(header, self.form, self.part_count, self.payload_bytes)

    def renumber(self, frame: bytearray, namespace_id: int) -> None:
        """Move an intact frame to a namespace of another store, in place; only its head is summed."""
        set_namespace(frame, namespace_id)
        set_head_sum(frame, self.sum_head(frame))

    def set_form(self, frame: bytearray) -> None:
        """Set the flags of this form in an intact head of another form, in place."""
        set_form_flags(frame, self.form)
        set_head_sum(frame, self.sum_head(frame))

    def forge(self, frame: bytes, other: bytes) -> bytearray:
        """Return ``frame`` with another's payload and valid checksums: a negative control for tests and demos."""
        header = self.header(memoryview(frame))
        assert header is not None
        forged = bytearray(frame[: self.payload_offset] + other[self.payload_offset :])
        self.seal(forged, header)
        return forged

    # ---- verifying

    def sum_head(self, frame: bytearray | memoryview) -> int:
        """Compute the head checksum of a frame."""
        view = memoryview(frame)
        head = xxhash.xxh3_64(view[:CHECKED_BYTES])
        head.update(view[HEADER_BYTES : self.payload_offset])
        return head.intdigest()

    def header(self, frame: memoryview) -> Header | None:
        """Return the header, None if the frame has no intact head of this form."""
        if not self.fits(len(frame)) or form_flags(frame) != self.form:
            return None
        found = unpack_header(frame, self.part_count, self.error_of(frame))
        if found is None or head_sum(frame) != self.sum_head(frame):
            return None
        expected = (self.block_tokens, self.payload_bytes)
        return found if (found.block_tokens, found.payload_bytes) == expected else None

    def error_of(self, frame: bytearray | memoryview) -> float:
        """Return the relative quantization error stored in a frame, also in a lossless one."""
        (error,) = _ERROR.unpack_from(frame, self.payload_offset - _ERROR.size)
        assert isinstance(error, float)
        return error

    def fits(self, size: int) -> bool:
        """Return whether a frame can have ``size`` bytes."""
        return size == self.frame_bytes

    def laid_out(self, frame: memoryview) -> memoryview | None:
        """Return the decompressed frame (here itself), valid until the thread's next call; None if it is damaged."""
        return frame

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return this format, the only one."""
        del frame
        return self

    def tokens(self, frame: memoryview) -> NDArray[np.uint32]:
        """Return a copy of the block's token ids."""
        ids = np.frombuffer(frame, "<u4", self.block_tokens, HEADER_BYTES)
        return ids.astype(np.uint32)

    def fault(
        self,
        frame: memoryview,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
        tokens: NDArray[np.uint32],
    ) -> str | None:
        """Return the fault of a frame that should be the requested block, or None: head, then part checksums."""
        found = self.head_fault(frame, block_hash, parent_hash, tokens)
        return found or (None if self.is_payload_intact(frame) else "checksum")

    def head_fault(
        self,
        frame: memoryview,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
        tokens: NDArray[np.uint32],
    ) -> str | None:
        """Return the fault of a head that should be the requested block's, or None; reads no payload.

        ``parent_hash`` is None for a block whose hash does not depend on its parent. Compares the head checksum, then
        both hashes and the token ids, so that a hash collision is a miss.
        """
        header = self.header(frame)
        if header is None:
            return "header"
        if header.block_hash != block_hash or parent_hash not in (None, header.parent_hash):
            return "identity"
        ids = np.frombuffer(frame, "<u4", self.block_tokens, HEADER_BYTES)
        return None if np.array_equal(ids, tokens) else "tokens"

    def is_payload_intact(self, frame: memoryview) -> bool:
        """Return whether every part matches its checksum."""
        sums: Sequence[int] = self._sums.unpack_from(frame, self.sums_offset)
        whole = self.laid_out(frame)
        return whole is not None and all(
            xxhash.xxh3_64_intdigest(whole[start:stop]) == expected
            for (start, stop), expected in zip(self.part_bounds, sums, strict=True)
        )

    # ---- reading into targets

    def scatter(self, frame: memoryview, target: AddressTable, block: int) -> str | None:
        """Copy a frame's payload to the ``block``-th block of ``target`` and verify it.

        Returns None, or ``"checksum"`` if a part does not match its checksum: the block's memory is then undefined.
        Raises ``ValueError`` if ``target`` has no such block; nothing is written then. Cost: one pass over the
        payload; each byte is summed when it is copied or dequantized.
        """
        sums: Sequence[int] = self._sums.unpack_from(frame, self.sums_offset)
        whole = self.laid_out(frame)
        return None if whole is not None and target.take(whole, sums, block) else "checksum"

    def reader(
        self, target: AddressTable, *, any_parent: bool = False, checks_first: bool = False
    ) -> native.FrameReader | None:
        """Return a reader of many frames from a file into a target, None on a big-endian machine.

        It accepts a frame exactly if :meth:`head_fault` and :meth:`scatter` find no fault. ``any_parent`` is for blocks
        whose hash does not depend on their parent. With ``checks_first`` a bad frame leaves the memory of its block
        unchanged.
        """
        if sys.byteorder != "little":
            return None
        none = BlockHash(b"")
        header = Header(
            block_tokens=self.block_tokens,
            number=0,
            namespace_id=0,
            payload_bytes=self.payload_bytes,
            block_hash=none,
            parent_hash=none,
            sequence=0,
        )
        head = self._head(header)[:FIXED_BYTES]
        shape = native.FrameShape(self.frame_bytes, self.block_tokens, self.payload_offset, head)
        return target.reader(shape, any_parent=any_parent, checks_first=checks_first)

    def readers(self, target: AddressTable) -> Mapping[int, native.FrameReader]:
        """Return :meth:`reader` by the size of its frames."""
        reader = self.reader(target)
        return {} if reader is None else {self.frame_bytes: reader}

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], batch: PartBatch | None = None
    ) -> AddressTable:
        """Return a target of entries in their stored format, of all parts or those of a batch.

        Shapes:
            ``entries[group]`` is uint8 ``[layers, n, entry_bytes]``, contiguous along the last axis; or
            ``[pages, layers, entries of a block, entry_bytes]``, where pages are blocks. ``layers`` are those of the
            group, in its order; of a batch only those in it.

        Raises ``ValueError`` naming the value found and the values expected.
        """
        return targets.target_of(self, entries, {}, batch)

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> AddressTable:
        """Return a source of entries to store, as :meth:`entries_target`; arrays may be read-only and share memory."""
        return targets.source_of(self, entries)

    def mixed_target(
        self,
        entries: Mapping[str, NDArray[np.uint8]],
        values: Mapping[str, Array],
        batch: PartBatch | None = None,
    ) -> AddressTable:
        """Return a target of numbers for the groups in ``values``, of entries for the others.

        Quantized entries are dequantized to numbers, as by their groups' codecs. A frame must not change while it is
        read.

        Shapes:
            ``values[group]`` is ``[layers, n, group.values]`` or ``[pages, layers, entries of a block,
            group.values]``, a NumPy array or a CPU tensor, contiguous along the last axis. It is float32, float16 or
            bfloat16 for quantized formats, otherwise of the format's dtype. ``entries`` as :meth:`entries_target`.

        Raises:
            ValueError: naming the value found and the values expected.
            ConfigError: for a format without a codec.
        """
        return targets.target_of(self, entries, values, batch)

    @cached_property
    def _block_at_zero(self) -> AddressTable:
        return targets.block_at_zero(self)

    def apart_target(self, blocks: Sequence[NDArray[np.uint8]]) -> AddressTable:
        """Return a target of separate uint8 ``[payload_bytes]`` arrays, contiguous, writable; one group and layer."""
        one, size = self._block_at_zero, self.payload_bytes
        return targets.separate_blocks(one, blocks, size, is_output=True)

    def apart_source(self, blocks: Sequence[NDArray[np.uint8]]) -> AddressTable:
        """Return a source of blocks in separate arrays, which may be read-only and share memory."""
        one, size = self._block_at_zero, self.payload_bytes
        return targets.separate_blocks(one, blocks, size, is_output=False)
