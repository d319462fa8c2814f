"""A frame: one block as it is stored. Bytes in, verified bytes or numbers out; no medium, no policy.

``header | token ids | part checksums | reserved | payload``. A *part* is everything one owner layer
contributes to a block. Inside a part, entries lie planar per 64: all packed values of 64 entries,
then all their scales, so that a part is a plain copy away from an engine's 64-record page.
docs/format.md, section 4, is normative for every byte written here.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.codec import codec_for, native
from kvstore.codec.arrays import FLOATS, check_apart, check_in, check_out, host_view
from kvstore.codec.packed import PackedCodec
from kvstore.codec.raw import RawCodec
from kvstore.errors import ConfigError
from kvstore.identity.block import BlockHash
from kvstore.layout import LayerGroup, Layout

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array

FORMAT_VERSION = 1
"""Version of the frame. A store of another version is refused, never guessed at."""

UNIT_ENTRIES = 64
"""Entries per planar unit: the page size of the engines that read V4.1 records (vLLM, FlashMLA)."""

_HEADER = struct.Struct("<4sHHIIIIQ32s32sQQ")
_PLACE, _STRIDE = (native.PIECE_FIELDS.index(name) for name in ("place", "place_stride"))
_BYTES = ("uint8",)
_MAGIC = b"KVSB"
_HAS_IMAGES = 1
_IS_PACKED = 2
_IS_COMPRESSED = 4
_FLAGS = struct.Struct("<H")
_FLAGS_AT = 6
_NAMESPACE = struct.Struct("<I")
_NAMESPACE_AT = 16
_ERROR = struct.Struct("<f")
HEADER_BYTES = _HEADER.size
_HASHES_OFFSET = 32
CHECKED_BYTES = HEADER_BYTES - 8
"""The header checksum covers what precedes it in the header, and all up to the payload."""
RESERVED_BYTES = 32
"""Room for a nonce (12) and a tag (16) of authenticated encryption, zero until there is some; then
what packing lost."""

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
    is_packed: bool = False
    """The payload is packed at rest: the engine's entries are what it unpacks to."""
    error: float = 0.0
    """Relative error of packing the block, also where it was too much and the block is lossless."""
    is_compressed: bool = False
    """The payload is stored compressed; ``payload_bytes`` is its size before."""


WAVE_BYTES = 4 << 20
"""Least bytes of a wave: it takes a millisecond or two, of which setting it up is a tenth."""
WAVE_BLOCK_BYTES = 16 << 10
"""Least bytes of a block in a wave: a read of its own costs as much as these. docs/ssd.md."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Parts ``[start, stop)`` of some frames: the entries of a few layers, which a load brings together."""

    start: int
    stop: int
    layers: tuple[int, ...]
    """The owner layers of those parts."""
    bounds: tuple[int, int]
    """Where they start and end in the largest frame."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in it."""
        return self.bounds[1] - self.bounds[0]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the payloads of blocks go to or come from, worked out once for many blocks.

    Made by :class:`FrameFormat`.

    Threads: any number may scatter to one at a time, each to blocks of its own.
    """

    blocks: int
    """Whole blocks that there is room for."""
    _table: NDArray[np.int64]
    """The pieces of a payload in order; columns as in ``native.PIECE_FIELDS``, for block 0."""
    _steps: NDArray[np.int64]
    """Bytes from where a piece of one block goes to where that of the next one does."""
    _parts: Sequence[native.Part]
    _kept: object
    """What owns the memory that the table points to."""
    _first_part: int = 0
    """Parts of a frame before those that are handed out here."""
    _is_shifted: bool = False
    """Whether ``_steps`` are by block instead, from where any piece of block 0 goes to where its does."""

    def pieces(self, block: int) -> NDArray[np.int64]:
        """Return the table for one block. Raises ``ValueError`` if there is no room for it."""
        if not 0 <= block < self.blocks:
            msg = f"there is room for {self.blocks} blocks, found number {block}"
            raise ValueError(msg)
        table = self._table.copy()
        table[:, _PLACE] += self._steps[block] if self._is_shifted else block * self._steps
        return table

    def reader(
        self, shape: native.FrameShape, *, any_parent: bool = False, checks_first: bool = False
    ) -> native.FrameReader:
        """Return what reads frames of a shape to these places."""
        return native.FrameReader(
            *(shape, self._parts, self._table, self._steps, self.blocks),
            first_part=self._first_part,
            is_shifted=self._is_shifted,
            any_parent=any_parent,
            checks_first=checks_first,
        )

    def take(self, frame: memoryview, sums: Sequence[int], block: int) -> bool:
        """Hand out parts of a frame, verified; say whether they have their sums among ``sums``."""
        stop = self._first_part + len(self._parts)
        return native.read_parts(
            frame, self._parts, sums[self._first_part : stop], self.pieces(block)
        )


def _unit(entries: int) -> int:
    """Return how many entries lie planar together, of so many in a block."""
    return UNIT_ENTRIES if entries % UNIT_ENTRIES == 0 else entries


def head_sum(frame: bytes | bytearray | memoryview) -> int:
    """Return the head checksum that a frame carries."""
    (found,) = struct.unpack_from("<Q", frame, CHECKED_BYTES)
    assert isinstance(found, int)
    return found


class Frames(Protocol):
    """What knows the frames of a store: blocks to frames and back, in the engine's form."""

    @property
    def layout(self) -> Layout:
        """The engine's layout."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def entries(self) -> Mapping[str, int]:
        """Entries of a block, by group."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block in the engine's form."""
        ...

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest frame."""
        ...

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> Any:
        """Return what ``encode`` takes as the place of entries. It is for one thread at a time."""
        ...

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: Any, block: int
    ) -> bytearray:
        """Return the frame of the ``block``-th whole block of a source."""
        ...

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return the format that a frame says it has, which checks it, reads it and hands it out."""
        ...

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], wave: Wave | None = None
    ) -> Any:
        """Return what ``scatter`` takes as the place of entries, of those of a wave if one is given."""
        ...

    def readers(self, target: Any) -> Mapping[int, native.FrameReader]:
        """Return what reads many frames of one size to a target at once, by the size in bytes.

        Frames of a size that is not there are read one by one.
        """
        ...

    def scatter(self, frame: memoryview, target: Any, block: int) -> str | None:
        """Hand out a payload, verified on the way; return what is wrong with it, or None."""
        ...

    def empty(self, blocks: int, wave: Wave | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries for ``blocks`` blocks, by GLOBAL group, of a wave or all."""
        ...

    def waves(self, blocks: int) -> Sequence[Wave]:
        """Return the waves of so many blocks: all parts, in the order of their layers."""
        ...

    @property
    def whole(self) -> Wave:
        """All parts as one wave."""
        ...


class FrameFormat:
    """The frame of one layout at one block size.

    Invariants:
        ``block_tokens`` is a multiple of the layout's alignment. Every frame has ``frame_bytes``
        bytes.
    """

    def __init__(
        self,
        layout: Layout,
        block_tokens: int,
        *,
        is_packed: bool = False,
        is_compressed: bool = False,
    ) -> None:
        """Lay out a block. Raises ``ConfigError`` if its entries would not be whole.

        ``is_packed`` frames say that their layout is not the engine's, ``is_compressed`` ones that
        what is stored is not the payload itself (kvstore/frame/at_rest.py).
        """
        is_number = isinstance(block_tokens, int) and not isinstance(block_tokens, bool)
        if not is_number or not 1 <= block_tokens < 2**32 or block_tokens % layout.alignment:
            msg = (
                f"block_tokens must be a positive multiple of the layout's alignment "
                f"{layout.alignment}, found {block_tokens!r}"
            )
            raise ConfigError(msg)
        self.layout = layout
        self.block_tokens = block_tokens
        self.is_packed = is_packed
        self.is_compressed = is_compressed
        self.marks = _IS_PACKED * is_packed | _IS_COMPRESSED * is_compressed
        """Flags of these frames that tell them from other forms."""
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
        self.part_bounds: list[tuple[int, int]] = []
        """Start and end of each part in the frame, in order of owner layer."""
        offset = self.payload_offset
        self._members = {layer: self._members_of(layer) for layer in owners}
        """Groups that a layer owns, in the order of its part."""
        for members in self._members.values():
            size = sum(self.entries[g.name] * g.entry_bytes for g in members)
            self.part_bounds.append((offset, offset + size))
            offset += size
        self.frame_bytes = offset
        self.payload_bytes = offset - self.payload_offset

    @property
    def whole(self) -> Wave:
        """All parts as one wave."""
        bounds = self.part_bounds[0][0], self.part_bounds[-1][1]
        return Wave(0, self.part_count, tuple(self._members), bounds)

    def waves(self, blocks: int) -> tuple[Wave, ...]:
        """Return the waves of so many blocks: all parts, in the order of their layers.

        A wave is as many layers as it takes to be worth setting up, and in each block a read of its own.
        """
        least = max(WAVE_BLOCK_BYTES, -(-WAVE_BYTES // max(1, blocks)))
        waves: list[Wave] = []
        first, owners = 0, tuple(self._members)
        for stop, (_, end) in enumerate(self.part_bounds, 1):
            start = self.part_bounds[first][0]
            if end - start >= least or stop == self.part_count:
                waves.append(Wave(first, stop, owners[first:stop], (start, end)))
                first = stop
        return tuple(waves)

    def _members_of(self, layer: int) -> tuple[LayerGroup, ...]:
        """Groups that a layer owns, those of one compression ratio together."""
        owned = [group for group in self.layout.global_groups if layer in group.layers]
        order = list(dict.fromkeys(group.tokens_per_entry for group in owned))
        return tuple(sorted(owned, key=lambda group: order.index(group.tokens_per_entry)))

    def runs(self) -> Iterator[tuple[int, int, LayerGroup]]:
        """Yield the payload in order, as start and end in the frame of entries of one group."""
        offset = self.payload_offset
        for members in self._members.values():
            for _, alike in groupby(members, lambda group: group.tokens_per_entry):
                groups = list(alike)
                unit = _unit(self.entries[groups[0].name])
                for group in groups * (self.entries[groups[0].name] // unit):
                    yield offset, offset + unit * group.entry_bytes, group
                    offset += unit * group.entry_bytes

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: Places, block: int
    ) -> bytearray:
        """Return the frame of the ``block``-th whole block of ``source``.

        Shapes:
            ``tokens`` are the block's own ids, ``[block_tokens]``.

        Cost: one pass over the payload; each byte is summed when it is copied.
        """
        frame = bytearray(self.frame_bytes)
        ids = tokens.astype("<u4", copy=False)
        memoryview(frame)[self._ids_offset : self._sums_offset] = ids.tobytes()
        self._seal(frame, header, native.write_parts(frame, source._parts, source.pieces(block)))  # noqa: SLF001
        return frame

    def seal(self, frame: bytearray, header: Header) -> None:
        """Write the header and all checksums over the token ids and payload already in place."""
        view = self.laid_out(memoryview(frame))
        assert view is not None, "a payload to be sealed is intact"
        sums = [xxhash.xxh3_64_intdigest(view[start:stop]) for start, stop in self.part_bounds]
        self._seal(frame, header, sums)

    def _seal(self, frame: bytearray, header: Header, sums: Sequence[int]) -> None:
        self._sums.pack_into(frame, self._sums_offset, *sums)
        fields = (
            *(
                _MAGIC,
                FORMAT_VERSION,
                _HAS_IMAGES * header.has_images | self.marks,
                header.block_tokens,
                header.number,
                header.namespace_id,
            ),
            *(self.part_count, self.payload_bytes, header.block_hash, header.parent_hash),
            header.sequence,
        )
        _HEADER.pack_into(frame, 0, *fields, 0)
        _ERROR.pack_into(frame, self.payload_offset - _ERROR.size, header.error)
        self._sum_head(frame)

    def renumber(self, frame: bytearray, namespace_id: int) -> None:
        """Give an intact frame to a namespace of another store, in place; only its head is summed."""
        _NAMESPACE.pack_into(frame, _NAMESPACE_AT, namespace_id)
        self._sum_head(frame)

    def mark(self, frame: bytearray) -> None:
        """Give an intact head of another form the marks of this one, in place."""
        (flags,) = _FLAGS.unpack_from(frame, _FLAGS_AT)
        _FLAGS.pack_into(frame, _FLAGS_AT, flags & _HAS_IMAGES | self.marks)
        self._sum_head(frame)

    def forge(self, frame: bytes, other: bytes) -> bytearray:
        """Return ``frame`` with the payload of ``other`` and every checksum made right.

        This is what no checksum can see: the negative control of tests and demonstrations.
        """
        header = self.header(memoryview(frame))
        assert header is not None
        forged = bytearray(frame[: self.payload_offset] + other[self.payload_offset :])
        self.seal(forged, header)
        return forged

    def _sum_head(self, frame: bytearray) -> None:
        struct.pack_into("<Q", frame, CHECKED_BYTES, self._head_sum(memoryview(frame)))

    def _head_sum(self, frame: memoryview) -> int:
        head = xxhash.xxh3_64(frame[:CHECKED_BYTES])
        head.update(frame[HEADER_BYTES : self.payload_offset])
        return head.intdigest()

    def header(self, frame: memoryview) -> Header | None:
        """Return the header, or None if these bytes are not an intact head of this format."""
        if not self.fits(len(frame)):
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
        if (magic, version, block_tokens, parts, size) != expected:
            return None
        if flags & ~_HAS_IMAGES != self.marks:
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
            is_packed=self.is_packed,
            error=self.error_of(frame),
            is_compressed=self.is_compressed,
        )

    def error_of(self, frame: bytearray | memoryview) -> float:
        """Return what packing lost or would have lost, as the frame says."""
        (error,) = _ERROR.unpack_from(frame, self.payload_offset - _ERROR.size)
        assert isinstance(error, float)
        return error

    def fits(self, size: int) -> bool:
        """Say whether a frame may have so many bytes."""
        return size == self.frame_bytes

    def laid_out(self, frame: memoryview) -> memoryview | None:
        """Return a frame with its payload as laid out, None if that cannot be had: this one.

        Where it is another one it is the thread's, until its next call.
        """
        return frame

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return this format: there is no other."""
        del frame
        return self

    @staticmethod
    def marks_of(frame: bytes | bytearray | memoryview) -> int:
        """Return the marks of the form that a frame says it has. Nothing is checked."""
        if len(frame) < HEADER_BYTES:
            return 0
        (flags,) = _FLAGS.unpack_from(frame, _FLAGS_AT)
        assert isinstance(flags, int)
        return flags & ~_HAS_IMAGES

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

        Checks :meth:`head_fault`, then the checksum of every part.
        """
        found = self.head_fault(frame, block_hash, parent_hash, tokens)
        return found or (None if self.is_payload_intact(frame) else "checksum")

    def head_fault(
        self,
        frame: memoryview,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
        tokens: NDArray[np.uint32],
    ) -> str | None:
        """Return why this is not the head of the block asked for, or None; the payload is not read.

        A block whose hash does not depend on its parent is asked for with ``parent_hash`` None.
        Checks, on the copy handed out: head checksum, then identity (both hashes and the token ids
        themselves, so that a hash collision is a miss).
        """
        header = self.header(frame)
        if header is None:
            return "header"
        if header.block_hash != block_hash or parent_hash not in (None, header.parent_hash):
            return "identity"
        ids = np.frombuffer(frame, "<u4", self.block_tokens, self._ids_offset)
        return None if np.array_equal(ids, tokens) else "tokens"

    def is_payload_intact(self, frame: memoryview) -> bool:
        """Say whether every part matches its checksum."""
        sums: Sequence[int] = self._sums.unpack_from(frame, self._sums_offset)
        whole = self.laid_out(frame)
        return whole is not None and all(
            xxhash.xxh3_64_intdigest(whole[start:stop]) == expected
            for (start, stop), expected in zip(self.part_bounds, sums, strict=True)
        )

    def scatter(self, frame: memoryview, target: Places, block: int) -> str | None:
        """Hand out a frame's payload as the ``block``-th block of ``target``, verified on the way.

        Returns ``"checksum"`` if what was handed out does not have the checksums of the parts: the
        place of that block holds anything then and must not be used. Else None.

        Raises:
            ValueError: if there is no room for the block; nothing was written then.

        Cost: one pass over the payload; each byte is summed when it is copied or unpacked.
        """
        sums: Sequence[int] = self._sums.unpack_from(frame, self._sums_offset)
        whole = self.laid_out(frame)
        return None if whole is not None and target.take(whole, sums, block) else "checksum"

    def reader(
        self, target: Places, *, any_parent: bool = False, checks_first: bool = False
    ) -> native.FrameReader | None:
        """Return what reads many frames from a file to a target at once.

        It takes a frame for good exactly if :meth:`head_fault` and :meth:`scatter` find no fault.
        None on a machine whose integers are not those of a frame. ``any_parent`` is for blocks whose
        hash does not depend on their parent. With ``checks_first`` the place of a bad frame keeps what
        it held.
        """
        if sys.byteorder != "little":
            return None
        head = _HEADER.pack(
            *(_MAGIC, FORMAT_VERSION, self.marks, self.block_tokens, 0, 0),
            *(self.part_count, self.payload_bytes, b"", b"", 0, 0),
        )
        shape = native.FrameShape(
            self.frame_bytes, self.block_tokens, self.payload_offset, head[:_HASHES_OFFSET]
        )
        return target.reader(shape, any_parent=any_parent, checks_first=checks_first)

    def readers(self, target: Places) -> Mapping[int, native.FrameReader]:
        """Return :meth:`reader` by the size of the frames that it reads."""
        reader = self.reader(target)
        return {} if reader is None else {self.frame_bytes: reader}

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], wave: Wave | None = None
    ) -> Places:
        """Return a target of entries as they are stored, of those of a wave if one is given.

        Shapes:
            ``entries[group]`` is uint8 ``[layers, n, entry_bytes]``, contiguous along the last
            axis; or ``[pages, layers, entries of a block, entry_bytes]``, and blocks are pages.
            ``layers`` are those of the group, in its order; of a wave only those that are in it.

        Raises:
            ValueError: naming what was found and what was expected.
        """
        return self.mixed_target(entries, {}, wave)

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> Places:
        """Return a source of entries as they are to be stored.

        Shapes:
            As :meth:`entries_target`; arrays may be read-only and share memory.

        Raises:
            ValueError: naming what was found and what was expected.
        """
        return self._places(entries, {}, dict.fromkeys(self.entries, _BYTES), None, is_output=False)

    def apart_target(self, blocks: Sequence[NDArray[np.uint8]]) -> Places:
        """Return a target of blocks that each lie in memory of their own, for one group of one layer.

        Shapes:
            each uint8 ``[payload_bytes]``, contiguous and writable.

        Raises:
            ValueError: naming what was found and what was expected.
        """
        return self._apart(blocks, is_output=True)

    def apart_source(self, blocks: Sequence[NDArray[np.uint8]]) -> Places:
        """Return a source of such blocks, which may be read-only and share memory."""
        return self._apart(blocks, is_output=False)

    def _apart(self, blocks: Sequence[NDArray[np.uint8]], *, is_output: bool) -> Places:
        views = [host_view(block, f"block {n}", _BYTES).data for n, block in enumerate(blocks)]
        for number, view in enumerate(views):
            (check_out if is_output else check_in)(view, f"block {number}", (self.payload_bytes,))
        starts = np.array([view.__array_interface__["data"][0] for view in views], np.int64)
        table = self._one_apart._table.copy()  # noqa: SLF001
        table[:, _PLACE] += starts[0]
        return replace(
            self._one_apart,
            blocks=len(views),
            _table=table,
            _steps=starts - starts[0],
            _kept=views,
            _is_shifted=True,
        )

    @cached_property
    def _one_apart(self) -> Places:
        """The places of one block of one group and layer, as if its memory began at address 0."""
        (group,) = self.layout.global_groups
        (_,) = group.layers
        block = np.empty((1, self.entries[group.name], group.entry_bytes), np.uint8)
        places = self._places({group.name: block}, {}, {group.name: _BYTES}, None, is_output=True)
        places._table[:, _PLACE] -= block.__array_interface__["data"][0]  # noqa: SLF001
        return places

    def values_target(self, values: Mapping[str, Array]) -> Places:
        """Return a target of numbers: packed entries are unpacked, as by their groups' codecs.

        A frame that goes there must not change meanwhile.

        Shapes:
            ``values[group]`` is ``[layers, n, group.values]`` or ``[pages, layers, entries of a
            block, group.values]``, a NumPy array or a CPU tensor, contiguous along the last axis.
            It is float32, float16 or bfloat16 for packed formats, and else of the format's dtype.

        Raises:
            ValueError: naming what was found and what was expected.
            ConfigError: for a format without a codec.
        """
        return self.mixed_target({}, values)

    def mixed_target(
        self,
        entries: Mapping[str, NDArray[np.uint8]],
        values: Mapping[str, Array],
        wave: Wave | None = None,
    ) -> Places:
        """Return a target of numbers for the groups in ``values``, of entries for the others.

        Shapes and errors as :meth:`values_target` and :meth:`entries_target`.
        """
        dtypes: dict[str, Sequence[str]] = dict.fromkeys(self.entries, _BYTES)
        codecs: dict[str, native.Prepared] = {}
        for name, array in values.items():
            codec = codec_for(self.layout.group(name))
            dtypes[name] = (codec.dtype,) if isinstance(codec, RawCodec) else FLOATS
            if isinstance(codec, PackedCodec):
                view = host_view(array, f"group {name!r}", FLOATS)
                codecs[name] = codec.kernel.prepared(view.dtype)
        return self._places({**entries, **values}, codecs, dtypes, wave, is_output=True)

    def _places(
        self,
        arrays: Mapping[str, Array],
        codecs: Mapping[str, native.Prepared],
        dtypes: Mapping[str, Sequence[str]],
        wave: Wave | None,
        *,
        is_output: bool,
    ) -> Places:
        blocks: list[int] = []
        views: dict[str, NDArray[np.generic]] = {}
        layers_of = self._layers(wave)
        for group in self.layout.global_groups:
            if not layers_of[group.name]:
                continue
            role, count = f"group {group.name!r}", self.entries[group.name]
            view = host_view(arrays[group.name], role, dtypes[group.name]).data
            if view.ndim == 3:  # [layers, n, length] as [blocks, layers, entries, length]
                layers, whole, length = view.shape[0], view.shape[1] // count, view.shape[2]
                cut = view[:, : whole * count].reshape(layers, whole, count, length)
                view = cut.transpose(1, 0, 2, 3)  # one axis is split, so this is a view
                blocks.append(whole)
            else:
                blocks.append(view.shape[0])
            length = group.entry_bytes if dtypes[group.name] == _BYTES else group.values
            (check_out if is_output else check_in)(
                view, role, (blocks[-1], len(layers_of[group.name]), count, length)
            )
            views[group.name] = view
        if is_output:
            check_apart(views)
        addresses = {name: view.__array_interface__["data"][0] for name, view in views.items()}
        rows: list[tuple[int, ...]] = []
        steps: list[int] = []
        parts: list[native.Part] = []
        chosen = slice(None) if wave is None else slice(wave.start, wave.stop)
        numbered = zip(self._members.items(), self.part_bounds, strict=True)
        for (layer, members), bounds in list(numbered)[chosen]:
            first = len(rows)
            for group in members:
                view, codec = views[group.name], codecs.get(group.name)
                count = self.entries[group.name]
                unit = _unit(count)
                address = (
                    addresses[group.name] + layers_of[group.name].index(layer) * view.strides[1]
                )
                for length in (group.values,) if codec else group.planes:
                    shape = (codec.address if codec else 0, count // unit, unit, length)
                    rows.append((*shape, address, view.strides[2]))
                    steps.append(view.strides[0])
                    address += length
            parts.append(native.Part(*bounds, first, len(rows)))
        table = np.array(rows, np.int64)
        kept = (tuple(views.values()), tuple(codecs.values()))
        steps_of = np.array(steps, np.int64)
        before = 0 if wave is None else wave.start
        return Places(min(blocks), table, steps_of, tuple(parts), kept, before)

    def _layers(self, wave: Wave | None) -> dict[str, list[int]]:
        """Return the layers of each group, in its order; of a wave only those that are in it."""
        return {
            group.name: [n for n in group.layers if wave is None or n in wave.layers]
            for group in self.layout.global_groups
        }

    def empty(self, blocks: int, wave: Wave | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries for ``blocks`` blocks, by GLOBAL group, of a wave or all."""
        layers_of = self._layers(wave)
        return {
            group.name: np.empty(
                (len(layers_of[group.name]), blocks * self.entries[group.name], group.entry_bytes),
                np.uint8,
            )
            for group in self.layout.global_groups
        }
