"""A frame: one block as it is stored. Bytes in, bytes out; no medium, no policy, no codec.

``header | token ids | part checksums | reserved | payload``. A *part* is everything one owner layer
contributes to a block. Inside a part, entries lie planar per 64: all packed values of 64 entries,
then all their scales, so that a part is a plain copy away from an engine's 64-record page.
docs/format.md, section 4, is normative for every byte written here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.block import BlockHash
from kvstore.errors import ConfigError
from kvstore.layout import LayerGroup, Layout

FORMAT_VERSION = 1
"""Version of the frame. A store of another version is refused, never guessed at."""

UNIT_ENTRIES = 64
"""Entries per planar unit: the page size of the engines that read V4.1 records (vLLM, FlashMLA)."""

_HEADER = struct.Struct("<4sHHIIIIQ32s32sQQ")
_MAGIC = b"KVSB"
_HAS_IMAGES = 1
HEADER_BYTES = _HEADER.size
CHECKED_BYTES = HEADER_BYTES - 8
"""The header checksum covers what precedes it in the header, and all up to the payload."""
RESERVED_BYTES = 32
"""Room for a nonce (12) and a tag (16) of authenticated encryption, zero until there is some."""

assert HEADER_BYTES == 112, "docs/format.md promises a 112-byte header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a frame says about itself."""

    block_tokens: int
    number: int
    namespace_id: int
    payload_bytes: int
    block_hash: BlockHash
    parent_hash: BlockHash
    sequence: int
    has_images: bool = False
    """An image touches the block, so its hash does not follow from its token ids alone."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where one plane of one group lies: a strided box in the payload and one in the entries."""

    group: str
    layers: slice
    """Positions of the run's layers on the group's layer axis."""
    columns: slice
    """Bytes of an entry that this plane holds."""
    entries: int
    """Entries of a block."""
    shape: tuple[int, int, int]
    """``[layers, units, entries of a unit]``"""
    item: str
    """One entry's bytes of this plane as one item, which NumPy copies faster than its bytes."""
    offset: int
    """Of the first byte, from the start of the frame."""
    strides: tuple[int, int, int]

    def in_frame(self, frame: bytearray | memoryview) -> NDArray[np.void]:
        return np.ndarray(self.shape, self.item, frame, self.offset, self.strides)

    def in_entries(self, entries: NDArray[np.uint8], first: int) -> NDArray[np.void]:
        box = entries[self.layers, first : first + self.entries, self.columns]
        return box.view(self.item).reshape(self.shape)  # splits one axis, so this is a view


def head_sum(frame: bytes | bytearray | memoryview) -> int:
    """Return the head checksum that a frame carries."""
    (found,) = struct.unpack_from("<Q", frame, CHECKED_BYTES)
    assert isinstance(found, int)
    return found


class FrameFormat:
    """The frame of one layout at one block size.

    Invariants:
        ``block_tokens`` is a multiple of the layout's alignment. Every frame of a store has
        ``frame_bytes`` bytes.
    """

    def __init__(self, layout: Layout, block_tokens: int) -> None:
        """Lay out a block. Raises ``ConfigError`` if its entries would not be whole."""
        is_number = isinstance(block_tokens, int) and not isinstance(block_tokens, bool)
        if not is_number or not 1 <= block_tokens < 2**32 or block_tokens % layout.alignment:
            msg = (
                f"block_tokens must be a positive multiple of the layout's alignment "
                f"{layout.alignment}, found {block_tokens!r}"
            )
            raise ConfigError(msg)
        self.layout = layout
        self.block_tokens = block_tokens
        self.entries = {
            group.name: block_tokens // group.tokens_per_entry for group in layout.global_groups
        }
        """Entries of a block, by group."""
        owners = sorted({layer for group in layout.global_groups for layer in group.layers})
        self.part_count = len(owners)
        self._ids_offset = HEADER_BYTES
        self._sums_offset = HEADER_BYTES + 4 * block_tokens
        self.payload_offset = self._sums_offset + 8 * self.part_count + RESERVED_BYTES
        self._sums = struct.Struct(f"<{self.part_count}Q")
        self._planes: list[_Plane] = []
        self.part_bounds: list[tuple[int, int]] = []
        """Start and end of each part in the frame, in order of owner layer."""
        offset = self.payload_offset
        for members, run in groupby(owners, key=self._members):
            offset = self._lay_out_run(members, list(run), offset)
        self.frame_bytes = offset
        self.payload_bytes = offset - self.payload_offset

    def _members(self, layer: int) -> tuple[LayerGroup, ...]:
        """Groups that a layer owns, those of one compression ratio together."""
        owned = [group for group in self.layout.global_groups if layer in group.layers]
        order = list(dict.fromkeys(group.tokens_per_entry for group in owned))
        return tuple(sorted(owned, key=lambda group: order.index(group.tokens_per_entry)))

    def _lay_out_run(self, members: tuple[LayerGroup, ...], layers: list[int], offset: int) -> int:
        """Place the parts of layers that own the same groups; return the offset behind them."""
        boxes: list[tuple[LayerGroup, int, int, int, int]] = []  # group, column, bytes, at, unit
        at = 0
        for ratio, bucket in groupby(members, key=lambda group: group.tokens_per_entry):
            groups = list(bucket)
            count = self.block_tokens // ratio
            unit = UNIT_ENTRIES if count % UNIT_ENTRIES == 0 else count
            unit_bytes = unit * sum(group.entry_bytes for group in groups)
            within = at
            for group in groups:
                column = 0
                for plane_bytes in group.planes:
                    boxes.append((group, column, plane_bytes, within, unit_bytes))
                    within += unit * plane_bytes
                    column += plane_bytes
            at += unit_bytes * (count // unit)
        part_bytes = at
        for group, column, plane_bytes, within, unit_bytes in boxes:
            count = self.entries[group.name]
            unit = UNIT_ENTRIES if count % UNIT_ENTRIES == 0 else count
            first = group.layers.index(layers[0])
            self._planes.append(
                _Plane(
                    group=group.name,
                    layers=slice(first, first + len(layers)),
                    columns=slice(column, column + plane_bytes),
                    entries=count,
                    shape=(len(layers), count // unit, unit),
                    item=f"V{plane_bytes}",
                    offset=offset + within,
                    strides=(part_bytes, unit_bytes, plane_bytes),
                )
            )
        for position in range(len(layers)):
            start = offset + position * part_bytes
            self.part_bounds.append((start, start + part_bytes))
        return offset + part_bytes * len(layers)

    def encode(
        self,
        header: Header,
        tokens: NDArray[np.uint32],
        entries: Mapping[str, NDArray[np.uint8]],
        block: int,
    ) -> bytearray:
        """Return the frame of one block.

        Shapes:
            ``tokens`` are the block's own ids, ``[block_tokens]``. ``entries[group]`` is uint8
            ``[layers, n, entry_bytes]``; the block is the ``block``-th whole block in it.

        Cost: one copy of the payload and one pass of xxh3_64.
        """
        frame = bytearray(self.frame_bytes)
        for plane in self._planes:
            source = plane.in_entries(entries[plane.group], block * plane.entries)
            plane.in_frame(frame)[...] = source
        view = memoryview(frame)
        ids = tokens.astype("<u4", copy=False)
        view[self._ids_offset : self._sums_offset] = ids.tobytes()
        self.seal(frame, header)
        return frame

    def seal(self, frame: bytearray, header: Header) -> None:
        """Write the header and all checksums over the token ids and payload already in place."""
        view = memoryview(frame)
        sums = [xxhash.xxh3_64_intdigest(view[start:stop]) for start, stop in self.part_bounds]
        self._sums.pack_into(frame, self._sums_offset, *sums)
        fields = (
            *(
                _MAGIC,
                FORMAT_VERSION,
                _HAS_IMAGES * header.has_images,
                header.block_tokens,
                header.number,
                header.namespace_id,
            ),
            *(self.part_count, header.payload_bytes, header.block_hash, header.parent_hash),
            header.sequence,
        )
        _HEADER.pack_into(frame, 0, *fields, 0)
        struct.pack_into("<Q", frame, CHECKED_BYTES, self._head_sum(view))

    def forge(self, frame: bytes, other: bytes) -> bytearray:
        """Return ``frame`` with the payload of ``other`` and every checksum made right.

        This is what no checksum can see: the negative control of tests and demonstrations.
        """
        header = self.header(memoryview(frame))
        assert header is not None
        forged = bytearray(frame[: self.payload_offset] + other[self.payload_offset :])
        self.seal(forged, header)
        return forged

    def _head_sum(self, frame: memoryview) -> int:
        head = xxhash.xxh3_64(frame[:CHECKED_BYTES])
        head.update(frame[HEADER_BYTES : self.payload_offset])
        return head.intdigest()

    def header(self, frame: memoryview) -> Header | None:
        """Return the header, or None if these bytes are not an intact head of this format."""
        if len(frame) != self.frame_bytes:
            return None
        (
            magic,
            version,
            flags,
            block_tokens,
            number,
            namespace,
            parts,
            size,
            block,
            parent,
            seq,
            found,
        ) = _HEADER.unpack_from(frame)
        expected = (_MAGIC, FORMAT_VERSION, self.block_tokens, self.part_count, self.payload_bytes)
        if (magic, version, block_tokens, parts, size) != expected or flags & ~_HAS_IMAGES:
            return None
        if found != self._head_sum(frame):
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
        )

    def tokens(self, frame: memoryview) -> NDArray[np.uint32]:
        """Return a copy of the block's token ids."""
        ids = np.frombuffer(frame, "<u4", self.block_tokens, self._ids_offset)
        return ids.astype(np.uint32)

    def fault(
        self,
        frame: memoryview,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
        tokens: NDArray[np.uint32],
    ) -> str | None:
        """Return why these bytes are not the block asked for, or None if they are.

        A block whose hash does not depend on its parent is asked for with ``parent_hash`` None.
        Checks, on the copy handed out: head checksum, identity (both hashes and the token ids
        themselves, so that a hash collision is a miss), then the checksum of every part.
        """
        header = self.header(frame)
        if header is None:
            return "header"
        if header.block_hash != block_hash or parent_hash not in (None, header.parent_hash):
            return "identity"
        ids = np.frombuffer(frame, "<u4", self.block_tokens, self._ids_offset)
        if not np.array_equal(ids, tokens):
            return "tokens"
        return None if self.is_payload_intact(frame) else "checksum"

    def is_payload_intact(self, frame: memoryview) -> bool:
        """Say whether every part matches its checksum."""
        sums: Sequence[int] = self._sums.unpack_from(frame, self._sums_offset)
        return all(
            xxhash.xxh3_64_intdigest(frame[start:stop]) == expected
            for (start, stop), expected in zip(self.part_bounds, sums, strict=True)
        )

    def scatter(
        self, frame: memoryview, entries: Mapping[str, NDArray[np.uint8]], block: int
    ) -> None:
        """Copy a frame's payload to its place as the ``block``-th whole block of ``entries``."""
        for plane in self._planes:
            target = plane.in_entries(entries[plane.group], block * plane.entries)
            target[...] = plane.in_frame(frame)

    def empty(self, blocks: int) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries for ``blocks`` blocks, by GLOBAL group."""
        return {
            group.name: np.empty(
                (len(group.layers), blocks * self.entries[group.name], group.entry_bytes), np.uint8
            )
            for group in self.layout.global_groups
        }
