"""Forms of a frame at rest: an engine's floats take fewer bytes on their way to SSD.

An engine that caches bfloat16 goes on doing so; the store keeps its blocks in another form and hands
them out in the engine's. *Packed* groups are FP4 or FP8: what that loses is measured for each block, and
a block that would lose more than the error budget is kept as it is, *lossless*. So is one that holds a
NaN or an infinity. *Compressed* groups went through zstd and lose nothing; a block that this does not
make a page smaller is kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codec import codec_for, native
from kvstore.codec.arrays import numpy_dtype
from kvstore.codec.packed import PackedCodec, PackStats
from kvstore.codec.raw import DTYPES
from kvstore.codec.zstd import LEAST_SAVED, Run, TopBytes
from kvstore.errors import ConfigError
from kvstore.frame.format import FrameFormat, Frames, Header, Places, Wave
from kvstore.layout import SCALE_RULES, Layout

ZSTD = "zstd"
"""Name among formats at rest of what loses nothing: the engine's own format, compressed."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a store packs at rest, and how much a block may lose.

    Invariants:
        ``formats`` is not empty; the budget is not NaN.
    """

    formats: Mapping[str, str]
    """Format at rest, by GLOBAL group. Groups that are not named stay as they are."""
    error_budget: float = math.inf
    """Most relative root-mean-square error of any group of a block; above it, it is lossless."""


def loses(formats: Mapping[str, str]) -> bool:
    """Say whether any of some formats at rest loses anything."""
    return any(at_rest != ZSTD for at_rest in formats.values())


def packed_layout(layout: Layout, formats: Mapping[str, str]) -> Layout:
    """Return the layout of packed blocks; what is compressed has its own format there.

    Raises:
        ConfigError: for a group that there is none of or that holds no floats, or a format that
            is none at rest.
    """
    known = {group.name: group for group in layout.global_groups}
    for name, entry_format in formats.items():
        if name not in known:
            msg = f"ssd_formats names group {name!r}, expected some of {', '.join(known)}"
            raise ConfigError(msg)
        if entry_format not in (*SCALE_RULES, ZSTD):
            formats_known = ", ".join([*SCALE_RULES, ZSTD])
            msg = f"ssd_formats: group {name!r} cannot be packed as {entry_format!r}, expected one of {formats_known}"
            raise ConfigError(msg)
        found = known[name].entry_format
        if DTYPES.get(found, "uint8") == "uint8":
            msg = (
                f"ssd_formats: group {name!r} is cached as {found}, expected f32, f16 or bf16; "
                "what is packed already is stored as it is"
            )
            raise ConfigError(msg)
    groups = tuple(
        replace(group, entry_format=formats[group.name], scale_rule="")
        if formats.get(group.name, ZSTD) != ZSTD
        else group
        for group in layout.groups
    )
    return replace(layout, groups=groups)


class CompressedFormat(FrameFormat):
    """Frames of another format whose payload is stored compressed. docs/format.md, section 4.2.

    Invariants:
        Heads and checksums of parts are those of the frames before, and so are entries handed out.
    """

    def __init__(self, plain: FrameFormat, groups: Collection[str]) -> None:
        """Compress the numbers of ``groups`` in frames of ``plain``."""
        super().__init__(
            plain.layout, plain.block_tokens, is_packed=plain.is_packed, is_compressed=True
        )
        self._plain = plain
        widths = {
            name: numpy_dtype(DTYPES[plain.layout.group(name).entry_format]).itemsize
            for name in groups
        }
        self._tops = TopBytes(
            self.payload_offset,
            [Run(start, stop, widths.get(group.name, 1)) for start, stop, group in self.runs()],
        )

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: Places, block: int
    ) -> bytearray:
        """Return the frame of a block as :meth:`FrameFormat.encode`, plain if that is as good."""
        frame = self._plain.encode(header, tokens, source, block)
        found = self._tops.compress(frame)
        if found is None:
            return frame
        self.mark(found)
        return found

    def fits(self, size: int) -> bool:
        """Say whether a frame may have so many bytes: a page less than a plain one has."""
        return self.payload_offset < size <= self.frame_bytes - LEAST_SAVED

    def laid_out(self, frame: memoryview) -> memoryview | None:
        """Return a frame with its payload decompressed, None if it is damaged."""
        return self._tops.decompress(frame)

    @override
    def reader(
        self, target: Places, *, any_parent: bool = False, checks_first: bool = False
    ) -> None:
        """Return None: frames of any size are read one by one."""


@dataclass(frozen=True, slots=True)
class PackingTarget:
    """Where payloads go, for frames of every form."""

    packed: Places
    lossless: Places


@dataclass(frozen=True, slots=True)
class PackingSource:
    """Where payloads come from, and room for one packed block."""

    entries: Mapping[str, NDArray[np.uint8]]
    lossless: Places
    room: Mapping[str, NDArray[np.uint8]]
    packed: Places
    """Of the room, as block 0."""


class PackingFormat:
    """The frames of a layout that has other forms at rest. Offers what :class:`FrameFormat` does.

    Entries that go in and come out are the engine's; only the store sees other ones.

    Invariants:
        A frame is packed or lossless as a whole, compressed or not, and says which.
    """

    def __init__(self, layout: Layout, block_tokens: int, packing: Packing) -> None:
        """Lay out all forms of a block. Raises ``ConfigError`` as :func:`packed_layout`."""
        self.packing = packing
        self.layout = layout
        self.block_tokens = block_tokens
        self.lossless = FrameFormat(layout, block_tokens)
        self.packed = FrameFormat(
            packed_layout(layout, packing.formats), block_tokens, is_packed=loses(packing.formats)
        )
        plain = [self.lossless, self.packed]
        zstd = [name for name, at_rest in packing.formats.items() if at_rest == ZSTD]
        written = [CompressedFormat(form, zstd) if zstd else form for form in plain]
        self._write_lossless, self._write_packed = written
        self._forms: dict[int, FrameFormat] = {form.marks: form for form in (*plain, *written)}
        self.entries = self.lossless.entries
        self.payload_bytes = self.lossless.payload_bytes
        """Of a block in the engine's form, as device pages hold it."""
        self.frame_bytes = max(self.lossless.frame_bytes, self.packed.frame_bytes)
        self._codecs: dict[str, tuple[PackedCodec, np.dtype[np.generic]]] = {}
        for group in self.packed.layout.global_groups:
            codec = codec_for(group) if group.name in packing.formats else None
            if isinstance(codec, PackedCodec):
                engine_format = layout.group(group.name).entry_format
                self._codecs[group.name] = codec, numpy_dtype(DTYPES[engine_format])

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return the format that a frame's own flag names; whoever reads checks all of it anyway."""
        return self._forms.get(FrameFormat.marks_of(frame), self.lossless)

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> PackingSource:
        """Return a source of entries in the engine's form; as :meth:`FrameFormat.entries_source`."""
        room = self.packed.empty(1)
        return PackingSource(
            entries, self.lossless.entries_source(entries), room, self.packed.entries_source(room)
        )

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: PackingSource, block: int
    ) -> bytearray:
        """Return the frame of one block: packed if that loses no more than the budget.

        Cost: packs, measures, compresses, and copies the payload.
        """
        if not self._codecs:
            return self._write_lossless.encode(header, tokens, source.lossless, block)
        errors = [0.0]
        for name, room in source.room.items():
            count = self.entries[name]
            entries = source.entries[name][:, block * count : (block + 1) * count]
            if name in self._codecs:
                codec, dtype = self._codecs[name]
                stats = PackStats(is_measured=True)
                codec.encode(entries.view(dtype), room, stats)
                errors.append(stats.relative_error)
            else:
                room[...] = entries
        error = float(np.max(errors))  # NaN if one is
        header = replace(header, error=error)
        if error <= self.packing.error_budget:
            return self._write_packed.encode(header, tokens, source.packed, 0)
        return self._write_lossless.encode(header, tokens, source.lossless, block)

    @property
    def whole(self) -> Wave:
        """All parts as one wave."""
        return self.lossless.whole

    def waves(self, blocks: int) -> tuple[Wave, ...]:
        """Return all parts as one wave, since frames of two kinds are read whole."""
        del blocks
        return (self.whole,)

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], wave: Wave | None = None
    ) -> PackingTarget:
        """Return a target of entries in the engine's form; as :meth:`FrameFormat.entries_target`."""
        lossless = self.lossless.entries_target(entries, wave)
        numbers = {name: entries[name].view(dtype) for name, (_, dtype) in self._codecs.items()}
        return PackingTarget(self.packed.mixed_target(entries, numbers, wave), lossless)

    def readers(self, target: PackingTarget) -> Mapping[int, native.FrameReader]:
        """Return what reads frames of either size; as :meth:`FrameFormat.readers`."""
        return {**self.packed.readers(target.packed), **self.lossless.readers(target.lossless)}

    def scatter(self, frame: memoryview, target: PackingTarget, block: int) -> str | None:
        """Hand out a frame's payload, unpacked if need be; as :meth:`FrameFormat.scatter`."""
        found = self.form_of(frame)
        place = target.packed if found.is_packed else target.lossless
        return found.scatter(frame, place, block)

    def empty(self, blocks: int, wave: Wave | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries in the engine's form for ``blocks`` blocks, by group."""
        return self.lossless.empty(blocks, wave)


def frames_of(layout: Layout, block_tokens: int, packing: Packing | None) -> Frames:
    """Return the frames of a layout, as they are at rest. Raises ``ConfigError`` as they do."""
    if packing is None:
        return FrameFormat(layout, block_tokens)
    return PackingFormat(layout, block_tokens, packing)
