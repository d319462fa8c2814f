"""Formats at rest: quantized or compressed payloads of an engine's bfloat16, float16 or float32 entries.

Blocks are converted when stored and converted back when read. *Quantized* groups are FP4 or FP8: the error of each
block is measured, and a block whose error exceeds the budget, or with a NaN or an infinity, is stored *lossless*, in
the engine's format. *Compressed* groups are zstd-compressed without loss; a block that does not shrink by a page is
stored uncompressed.
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
from kvstore.codec.quantized import PackStats, QuantizedCodec
from kvstore.codec.raw import DTYPES
from kvstore.codec.zstd import LEAST_SAVED, Range, TopBytes
from kvstore.errors import ConfigError
from kvstore.frame.format import FrameFormat, Frames
from kvstore.frame.geometry import PartBatch
from kvstore.frame.header import Header, form_flags
from kvstore.frame.targets import AddressTable
from kvstore.layout import SCALE_RULES, Layout

ZSTD = "zstd"  # lossless format at rest: the engine's own format, compressed


@dataclass(frozen=True, slots=True)
class Packing:
    """Formats at rest of a store (not empty), and the largest quantization error of a block (not NaN)."""

    formats: Mapping[str, str]  # by GLOBAL group; others keep the engine's format
    error_budget: float = math.inf  # largest relative RMS error; above it, blocks are lossless


def loses(formats: Mapping[str, str]) -> bool:
    """Return whether any of the formats at rest quantizes."""
    return any(at_rest != ZSTD for at_rest in formats.values())


def quantized_layout(layout: Layout, formats: Mapping[str, str]) -> Layout:
    """Return the layout of quantized blocks. Raises ``ConfigError`` for an unknown or non-float group or format."""
    known = {group.name: group for group in layout.global_groups}
    for name, entry_format in formats.items():
        if name not in known:
            msg = f"ssd_formats names group {name!r}, expected some of {', '.join(known)}"
            raise ConfigError(msg)
        if entry_format not in (*SCALE_RULES, ZSTD):
            raise ConfigError(
                f"ssd_formats: group {name!r} cannot be stored as {entry_format!r}, expected one of "
                f"{', '.join([*SCALE_RULES, ZSTD])}"
            )
        found = known[name].entry_format
        if DTYPES.get(found, "uint8") == "uint8":
            raise ConfigError(
                f"ssd_formats: group {name!r} is cached as {found}, expected f32, f16 or bf16; "
                "leave out groups that are quantized already"
            )
    groups = tuple(
        replace(group, entry_format=formats[group.name], scale_rule="")
        if formats.get(group.name, ZSTD) != ZSTD
        else group
        for group in layout.groups
    )
    return replace(layout, groups=groups)


class CompressedFormat(FrameFormat):
    """Frames with a compressed payload; heads and part checksums as uncompressed. docs/format.md, section 4.2."""

    def __init__(self, plain: FrameFormat, groups: Collection[str]) -> None:
        """Compress the numbers of ``groups`` in frames of the format ``plain``."""
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
            [Range(start, stop, widths.get(group.name, 1)) for start, stop, group in self.ranges()],
        )

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: AddressTable, block: int
    ) -> bytearray:
        """Return the frame of a block; uncompressed if compression does not save a page."""
        frame = self._plain.encode(header, tokens, source, block)
        found = self._tops.compress(frame)
        if found is None:
            return frame
        self.set_form(found)
        return found

    def fits(self, size: int) -> bool:
        """Return whether a frame can have ``size`` bytes: at least a page less than uncompressed."""
        return self.payload_offset < size <= self.frame_bytes - LEAST_SAVED

    def laid_out(self, frame: memoryview) -> memoryview | None:
        """Return a frame with its payload decompressed, None if it is damaged."""
        return self._tops.decompress(frame)

    @override
    def reader(
        self, target: AddressTable, *, any_parent: bool = False, checks_first: bool = False
    ) -> None:
        """Return None: frames of any size are read one by one."""


@dataclass(frozen=True, slots=True)
class AtRestTarget:
    """Targets for frames of both layouts."""

    quantized: AddressTable
    lossless: AddressTable


@dataclass(frozen=True, slots=True)
class AtRestSource:
    """Source of blocks, and a buffer for one quantized block."""

    entries: Mapping[str, NDArray[np.uint8]]
    lossless: AddressTable
    buffer: Mapping[str, NDArray[np.uint8]]
    quantized: AddressTable  # source of the buffer, as block 0


class AtRestFormat:
    """Frames of a layout with formats at rest; implements :class:`Frames`.

    Entries in sources and targets have the engine's format. A frame as a whole is quantized or lossless, compressed or
    not, as stated by its flags.
    """

    def __init__(self, layout: Layout, block_tokens: int, packing: Packing) -> None:
        """Raise ``ConfigError`` as :func:`quantized_layout`."""
        self.packing = packing
        self.layout = layout
        self.block_tokens = block_tokens
        self.lossless = FrameFormat(layout, block_tokens)
        self.quantized = FrameFormat(
            quantized_layout(layout, packing.formats),
            block_tokens,
            is_packed=loses(packing.formats),
        )
        plain = [self.lossless, self.quantized]
        zstd = [name for name, at_rest in packing.formats.items() if at_rest == ZSTD]
        written = [CompressedFormat(form, zstd) if zstd else form for form in plain]
        self._write_lossless, self._write_quantized = written
        self._forms: dict[int, FrameFormat] = {form.form: form for form in (*plain, *written)}
        self.entries = self.lossless.entries
        self.payload_bytes = self.lossless.payload_bytes  # of a block, as in device pages
        self.frame_bytes = max(self.lossless.frame_bytes, self.quantized.frame_bytes)
        self._codecs: dict[str, tuple[QuantizedCodec, np.dtype[np.generic]]] = {}
        for group in self.quantized.layout.global_groups:
            codec = codec_for(group) if group.name in packing.formats else None
            if isinstance(codec, QuantizedCodec):
                engine_format = layout.group(group.name).entry_format
                self._codecs[group.name] = codec, numpy_dtype(DTYPES[engine_format])

    def form_of(self, frame: bytes | bytearray | memoryview) -> FrameFormat:
        """Return the format named by a frame's flags, unchecked."""
        return self._forms.get(form_flags(frame), self.lossless)

    def entries_source(self, entries: Mapping[str, NDArray[np.uint8]]) -> AtRestSource:
        """Return a source of entries in the engine's format; as :meth:`FrameFormat.entries_source`."""
        buffer = self.quantized.empty(1)
        return AtRestSource(
            entries,
            self.lossless.entries_source(entries),
            buffer,
            self.quantized.entries_source(buffer),
        )

    def encode(
        self, header: Header, tokens: NDArray[np.uint32], source: AtRestSource, block: int
    ) -> bytearray:
        """Return the frame of one block: quantized, if the measured error is within the budget, then compressed."""
        if not self._codecs:
            return self._write_lossless.encode(header, tokens, source.lossless, block)
        errors = [0.0]
        for name, buffer in source.buffer.items():
            count = self.entries[name]
            entries = source.entries[name][:, block * count : (block + 1) * count]
            if name in self._codecs:
                codec, dtype = self._codecs[name]
                stats = PackStats(is_measured=True)
                codec.encode(entries.view(dtype), buffer, stats)
                errors.append(stats.relative_error)
            else:
                buffer[...] = entries
        error = float(np.max(errors))  # NaN if one is
        header = replace(header, error=error)
        if error <= self.packing.error_budget:
            return self._write_quantized.encode(header, tokens, source.quantized, 0)
        return self._write_lossless.encode(header, tokens, source.lossless, block)

    @property
    def whole(self) -> PartBatch:
        """All parts as one batch."""
        return self.lossless.whole

    def part_batches(self, blocks: int) -> tuple[PartBatch, ...]:
        """Return all parts as one batch: frames of two layouts are read whole."""
        del blocks
        return (self.whole,)

    def entries_target(
        self, entries: Mapping[str, NDArray[np.uint8]], batch: PartBatch | None = None
    ) -> AtRestTarget:
        """Return a target of entries in the engine's format; as :meth:`FrameFormat.entries_target`."""
        lossless = self.lossless.entries_target(entries, batch)
        numbers = {name: entries[name].view(dtype) for name, (_, dtype) in self._codecs.items()}
        return AtRestTarget(self.quantized.mixed_target(entries, numbers, batch), lossless)

    def readers(self, target: AtRestTarget) -> Mapping[int, native.FrameReader]:
        """Return readers of frames of either size; as :meth:`FrameFormat.readers`."""
        return {
            **self.quantized.readers(target.quantized),
            **self.lossless.readers(target.lossless),
        }

    def scatter(self, frame: memoryview, target: AtRestTarget, block: int) -> str | None:
        """Copy a frame's payload, dequantized if necessary; as :meth:`FrameFormat.scatter`."""
        found = self.form_of(frame)
        own = target.quantized if found.is_packed else target.lossless
        return found.scatter(frame, own, block)

    def empty(self, blocks: int, batch: PartBatch | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries in the engine's format for ``blocks`` blocks, by group."""
        return self.lossless.empty(blocks, batch)


def frames_of(layout: Layout, block_tokens: int, packing: Packing | None) -> Frames:
    """Return the frame format of a layout and its formats at rest. Raises ``ConfigError`` as they do."""
    if packing is None:
        return FrameFormat(layout, block_tokens)
    return AtRestFormat(layout, block_tokens, packing)
