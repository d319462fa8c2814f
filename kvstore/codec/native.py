"""Python calls of the C kernels, on addresses and strides of rows; return codes become exceptions.

The only codec module that imports ``_kvstore_native``. native/include/kvstore_native.h documents each call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from _kvstore_native import ffi, lib
from numpy.typing import NDArray

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from _kvstore_native import CData

VERSION = 6
"""Version of the C interface that this module calls."""

if lib.kvstore_native_version() != VERSION:
    raise ImportError(
        f"_kvstore_native has version {lib.kvstore_native_version()}, expected {VERSION}; "
        "it was built from another kvstore: reinstall the package"
    )

DTYPES: Mapping[str, int] = {
    "float32": lib.KVSTORE_F32,
    "float16": lib.KVSTORE_F16,
    "bfloat16": lib.KVSTORE_BF16,
}
FP4_FORMATS: Mapping[str, int] = {"nvfp4": lib.KVSTORE_NVFP4, "mxfp4": lib.KVSTORE_MXFP4}
FP8_FORMATS: Mapping[str, int] = {"mxfp8": lib.KVSTORE_MXFP8, "fp8": lib.KVSTORE_FP8}
_FORMATS: Mapping[str, int] = {**FP4_FORMATS, **FP8_FORMATS}
RULES: Mapping[str, int] = {
    "v41": lib.KVSTORE_RULE_V41,
    "torchao": lib.KVSTORE_RULE_TORCHAO,
    "floor": lib.KVSTORE_RULE_FLOOR,
    "even": lib.KVSTORE_RULE_EVEN,
    "rceil": lib.KVSTORE_RULE_RCEIL,
    "amax": lib.KVSTORE_RULE_AMAX,
}

UNPACKING_RULES: Mapping[str, str] = {
    "nvfp4": "torchao",
    "mxfp4": "floor",
    "mxfp8": "rceil",
    "fp8": "amax",
}
"""Rules to prepare a dequantizing kernel with: it ignores the rule, but these allow a global scale."""
LEVELS: Mapping[str, int] = {
    "portable": lib.KVSTORE_LEVEL_PORTABLE,
    "avx2": lib.KVSTORE_LEVEL_AVX2,
    "avx512": lib.KVSTORE_LEVEL_AVX512,
}
"""Instruction sets of the kernels, lowest first; all compute the same bytes."""
LEVEL_VARIABLE = "KVSTORE_LEVEL"

_MESSAGES: Mapping[int, str] = {
    lib.KVSTORE_ERR_DTYPE: f"unknown element type, expected one of {', '.join(DTYPES)}",
    lib.KVSTORE_ERR_FORMAT: f"unknown format, expected one of {', '.join(_FORMATS)}",
    lib.KVSTORE_ERR_RULE: "the format has no such scale rule",
    lib.KVSTORE_ERR_GLOBAL_SCALE: (
        "global_scale must lie in [2**-100, 2**100], and be 1 but for the rule torchao"
    ),
    lib.KVSTORE_ERR_SHAPE: "a row must hold a whole number of blocks, and a row of fp8 a value",
    lib.KVSTORE_ERR_NULL: "a non-empty buffer has the address 0",
    lib.KVSTORE_ERR_STRIDE: "rows of an output overlap: its stride is shorter than a row",
    lib.KVSTORE_ERR_OVERLAP: "an output shares memory with another buffer",
    lib.KVSTORE_ERR_LEVEL: "this processor does not support the level",
    lib.KVSTORE_ERR_ALIGN: "a codec must be aligned to 64 bytes",
    lib.KVSTORE_ERR_INDEX: "an entry or a page does not exist",
    lib.KVSTORE_ERR_SUM: "the bytes do not match the checksum",
    lib.KVSTORE_ERR_RANGE: "a token id lies outside [0, 2**32)",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Address and stride of the rows of one buffer. The stride is in bytes and may be negative."""

    address: int
    stride: int

    def arguments(self, ctype: str = "uint8_t *") -> tuple[CData, int]:
        """Return address and stride as C arguments."""
        return ffi.cast(ctype, self.address), self.stride


@dataclass(frozen=True, slots=True)
class Pool:
    """Address and strides, in bytes, of the entries of one plane of a pool of pages."""

    address: int
    page_stride: int
    stride: int


def levels() -> tuple[str, ...]:
    """Return the levels that this processor can run, lowest first."""
    return tuple(name for name, level in LEVELS.items() if level <= lib.kvstore_level())


@functools.cache
def default_level() -> str:
    """Return the default level: the environment variable KVSTORE_LEVEL, else the highest supported.

    Raises ``ConfigError`` if KVSTORE_LEVEL names no level that this processor supports.
    """
    return choose_level(os.environ.get(LEVEL_VARIABLE, ""))


def choose_level(name: str) -> str:
    """Return the level of that name, the highest for an empty one. Raises as :func:`default_level`."""
    if name and name not in levels():
        msg = f"{LEVEL_VARIABLE}={name}: expected one of {', '.join(levels())}, which this processor can run"
        raise ConfigError(msg)
    return name or levels()[-1]


def _streamed_bytes() -> int:
    # Half of the last-level cache: a larger output evicts itself before it is read.
    try:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        cache = 0
    return cache // 2 if cache > 0 else _UNKNOWN_CACHE_BYTES // 2


_UNKNOWN_CACHE_BYTES = 32 << 20
STREAMED_BYTES = _streamed_bytes()
"""Outputs of at least this size are written with non-temporal stores."""


@dataclass(frozen=True, slots=True)
class PackResult:
    """``PackStats`` of one call."""

    nan_blocks: int
    inf_values: int
    squared_error: float
    squared_values: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Kernels of a format and a dtype, with their tables. Made by :func:`prepare`. Threads: any."""

    _pointer: CData
    _memory: CData
    """Owner of the memory behind the pointer."""

    @property
    def address(self) -> int:
        """Address, for a table of segments. This object must outlive the table."""
        return int(ffi.cast("uintptr_t", self._pointer))

    def pack(
        self,
        values: Rows,
        codes: Rows,
        scales: Rows,
        *,
        rows: int,
        row_values: int,
        is_measured: bool = False,
    ) -> PackResult:
        """Quantize rows, and return their counters and, if ``is_measured``, the error.

        Raises ``ValueError`` for any code but KVSTORE_OK; nothing was written. The GIL is released; the
        buffers must stay alive and unshared until the return.
        """
        stats = ffi.new("struct kvstore_pack_stats *")
        error = ffi.new("struct kvstore_pack_error *")
        code = lib.kvstore_pack(
            self._pointer,
            ffi.cast("void *", values.address),
            rows,
            row_values,
            values.stride,
            *(*codes.arguments(), *scales.arguments(), stats),
            error if is_measured else ffi.NULL,
        )
        _check(code)
        return PackResult(stats.nan_blocks, stats.inf_values, error.difference, error.value)

    def unpack(
        self, codes: Rows, scales: Rows, values: Rows, *, rows: int, row_values: int
    ) -> None:
        """Dequantize rows. Raises and threads as :meth:`pack`."""
        planes = (*codes.arguments(), *scales.arguments())
        wide = values.arguments("void *")
        _check(lib.kvstore_unpack(self._pointer, *planes, rows, row_values, *wide))

    def gather(
        self,
        codes: Pool,
        scales: Pool,
        index: int,
        values: Rows,
        *,
        pages: tuple[int, int],
        table: tuple[int, int] | None,
        rows: int,
        row_values: int,
    ) -> None:
        """Dequantize chosen entries. Raises and threads as :meth:`pack`.

        ``index`` is the address of ``rows`` int64 numbers, ``pages`` are the pages of the pool and the
        entries of each, ``table`` is the address and the length of the page table.
        """
        entries = ffi.new(
            "struct kvstore_entries *",
            {
                "codes": ffi.cast("uint8_t *", codes.address),
                "scales": ffi.cast("uint8_t *", scales.address),
                "code_page_stride": codes.page_stride,
                "code_stride": codes.stride,
                "scale_page_stride": scales.page_stride,
                "scale_stride": scales.stride,
                "pool_pages": pages[0],
                "page_entries": pages[1],
                "table": ffi.cast("int64_t *", table[0] if table else 0),
                "table_pages": table[1] if table else 0,
            },
        )
        chosen, wide = ffi.cast("int64_t *", index), values.arguments("void *")
        _check(lib.kvstore_gather(self._pointer, entries, chosen, rows, row_values, *wide))


@functools.lru_cache(maxsize=64)
def prepare(
    entry_format: str,
    scale_rule: str,
    dtype: str,
    global_scale: float,
    level: str,
    streamed_bytes: int = STREAMED_BYTES,
) -> Prepared:
    """Return the kernels of a format, its rule and the dtype of its wide side.

    Raises ``ValueError`` for an unsupported rule, global scale or level. Cost: milliseconds and 67 KB once.
    """
    size = lib.kvstore_codec_bytes()
    memory = ffi.new(f"char[{size + _ALIGNMENT}]")
    address = int(ffi.cast("uintptr_t", memory)) + _ALIGNMENT - 1
    pointer = ffi.cast("struct kvstore_codec *", address // _ALIGNMENT * _ALIGNMENT)
    code = lib.kvstore_codec_prepare(
        pointer,
        DTYPES[dtype],
        _FORMATS[entry_format],
        RULES[scale_rule],
        global_scale,
        LEVELS[level],
        streamed_bytes,
    )
    _check(code)
    return Prepared(pointer, memory)


_ALIGNMENT = 64

SEGMENT_FIELDS = ("codec", "units", "rows", "row_values", "address", "stride")
"""Columns of a table of segments: an int64 array whose rows are each a ``struct kvstore_segment``. Creating objects
would cost more than copying their bytes. ``codec`` is 0 or the address of a :class:`Prepared`."""
assert ffi.sizeof("struct kvstore_segment") == 8 * len(SEGMENT_FIELDS), "needs 64-bit addresses"


class Part(NamedTuple):
    """Bytes ``[start, stop)`` of a frame, copied to segments ``[first, last)`` of a table."""

    start: int
    stop: int
    first: int
    last: int


def read_parts(
    memory: memoryview | NDArray[np.uint8],
    parts: Sequence[Part],
    sums: Sequence[int],
    segments: NDArray[np.int64],
    level: str | None = None,
) -> bool:
    """Copy parts to their segments, verified in the same pass; return whether all are intact.

    ``sums`` are the expected checksums; ``segments`` is a table of ``SEGMENT_FIELDS``. The first corrupt
    part ends the call: its segments are undefined, later ones unchanged. Raises ``ValueError`` for any
    other code but KVSTORE_OK.

    Threads: the GIL is released; all memory must stay alive and unshared until the return.
    Cost: one C call per part, about 1 us each, and one pass over the bytes.
    """
    start = ffi.from_buffer("uint8_t[]", memory)
    table = ffi.from_buffer("struct kvstore_segment[]", segments)
    number = LEVELS[level or default_level()]
    _check_parts(parts, len(start), len(table))
    for (begin, stop, first, last), expected in zip(parts, sums, strict=True):
        code = lib.kvstore_read_part(
            start + begin,
            stop - begin,
            expected,
            table + first,
            last - first,
            number,
            STREAMED_BYTES,
        )
        if code == lib.KVSTORE_ERR_SUM:
            return False
        _check(code)
    return True


def write_parts(
    memory: bytearray, parts: Sequence[Part], segments: NDArray[np.int64], level: str | None = None
) -> list[int]:
    """Copy segments to their parts; return the parts' checksums, computed in the same pass.

    Raises ``ValueError`` for any code but KVSTORE_OK. Threads and cost as :func:`read_parts`.
    """
    start = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
    table = ffi.from_buffer("struct kvstore_segment[]", segments)
    number = LEVELS[level or default_level()]
    found = ffi.new("uint64_t[]", len(parts))
    _check_parts(parts, len(start), len(table))
    for at, (begin, stop, first, last) in enumerate(parts):
        segment, count = table + first, last - first
        _check(
            lib.kvstore_write_part(start + begin, stop - begin, segment, count, number, found + at)
        )
    return list(found)


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Sizes and first bytes that all frames of one format share."""

    frame_bytes: int
    block_tokens: int
    payload_offset: int
    head: bytes
    """First 32 bytes of a frame; its number, namespace and image flag are ignored."""


class FrameReader:
    """Reader of many frames into one target. See ``kvstore_read_frames``. Threads: one call at a time."""

    def __init__(
        self,
        shape: FrameShape,
        parts: Sequence[Part],
        segments: NDArray[np.int64],
        steps: NDArray[np.int64],
        blocks: int,
        *,
        first_part: int = 0,
        is_shifted: bool = False,
        any_parent: bool = False,
        checks_first: bool = False,
    ) -> None:
        """``segments`` are those of block 0, ``steps`` the bytes from a segment to that of the next block.

        The target has ``blocks`` blocks; ``parts`` are those of a frame from ``first_part`` on. If
        ``is_shifted``, ``steps`` are by block, from the segments of block 0 to its own. ``any_parent``
        skips the check of the parent hash; ``checks_first`` writes nothing of a bad frame.
        """
        self._frames = ffi.new("struct kvstore_frames *")
        self._parts = ffi.new("struct kvstore_frame_part[]", [tuple(part) for part in parts])
        scratch = np.empty_like(segments)
        self._kept = segments, steps, scratch
        frames = self._frames
        frames.frame_bytes = shape.frame_bytes
        frames.block_tokens = shape.block_tokens
        frames.payload_offset = shape.payload_offset
        frames.head = shape.head
        frames.parts, frames.part_count = self._parts, len(parts)
        frames.first_part = first_part
        frames.segments = ffi.from_buffer("struct kvstore_segment[]", segments)
        taken = ffi.from_buffer("ptrdiff_t[]", steps)
        frames.steps, frames.shifts = (ffi.NULL, taken) if is_shifted else (taken, ffi.NULL)
        frames.any_parent, frames.checks_first = any_parent, checks_first
        frames.scratch = ffi.from_buffer("struct kvstore_segment[]", scratch)
        frames.segment_count = len(segments)
        self._buffer = ffi.new("uint8_t[]", shape.frame_bytes)
        self._block_tokens = shape.block_tokens
        self._blocks = blocks
        self._done = ffi.new("size_t *")
        # Not per frame: the first frames leave the cache before the last are written.
        self._streamed = 0 if blocks * shape.frame_bytes >= STREAMED_BYTES else STREAMED_BYTES

    def read(
        self,
        file: int,
        offsets: NDArray[np.int64],
        hashes: bytes,
        ids: NDArray[np.uint32],
        first_block: int,
        level: str | None = None,
    ) -> int:
        """Read frames at ``offsets`` of a file; return the number of intact leading frames.

        Shapes: hashes ``[n + 1, 32]`` of parent and blocks, end to end; ids ``[n, block_tokens]``.
        Raises ``ValueError`` for other shapes, or blocks beyond the target. The GIL is released.
        """
        count = len(offsets)
        if len(hashes) != 32 * (count + 1) or ids.size != count * self._block_tokens:
            raise ValueError(f"{len(hashes)} bytes of hashes and {ids.size} ids for {count} blocks")
        if not 0 <= first_block <= self._blocks - count:
            msg = f"there is room for {self._blocks} blocks, found {count} from {first_block} on"
            raise ValueError(msg)
        code = lib.kvstore_read_frames(
            self._frames,
            file,
            ffi.from_buffer("int64_t[]", offsets),
            count,
            ffi.from_buffer("uint8_t[]", hashes),
            ffi.from_buffer("uint32_t[]", ids),
            first_block,
            self._buffer,
            LEVELS[level or default_level()],
            self._streamed,
            self._done,
        )
        _check(code)
        return int(self._done[0])


def _check_parts(parts: Sequence[Part], size: int, rows: int) -> None:
    for part in parts:
        begin, stop, first, last = part
        if not (0 <= begin <= stop <= size and 0 <= first <= last <= rows):
            raise ValueError(f"{part} lies outside {size} bytes or {rows} segments")


def xxh3_64(data: memoryview, level: str | None = None) -> int:
    """Return the XXH3 checksum of contiguous bytes. The GIL is released."""
    found = ffi.new("uint64_t *")
    number = LEVELS[level or default_level()]
    _check(lib.kvstore_xxh3_64(ffi.from_buffer("char[]", data), data.nbytes, number, found))
    return int(found[0])


def _check(code: int) -> None:
    if code != lib.KVSTORE_OK:
        raise ValueError(f"{_MESSAGES.get(code, 'unknown code')} (code {code})")
