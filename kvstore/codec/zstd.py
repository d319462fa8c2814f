"""Lossless compression of floats: zstd of the highest byte of each number, the other bytes stored raw.

A Huffman code more than halves signs and exponents of KV floats; the low bytes are incompressible noise.
docs/format.md, section 4.2, is normative for the bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvstore.codec import native

LEAST_SAVED = 4096
"""Fewest bytes that compression must save: one page of the file; less would only slow down reading."""
_WINDOW_LOG = 17
"""Log2 of the zstd window, 128 KiB (one zstd block): the largest written and the largest accepted."""
HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)
"""zstd with minimal match search, as exponents do not repeat and only the Huffman code compresses: 2.5 times
as fast as level 1, with a smaller result. docs/decisions/0024."""
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Range:
    """Byte range of a frame with numbers of one width."""

    start: int
    stop: int
    width: int
    """Bytes of a number; 1 for bytes stored raw."""


class _Buffers(threading.local):
    """Contexts and buffers of one thread, created at its first use."""

    def __init__(self, frame_bytes: int, top_bytes: int) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        self.tops = np.empty(top_bytes, np.uint8)
        self.frame = np.empty(frame_bytes, np.uint8)


class TopBytes:
    """Compressor of the highest bytes of the numbers in frames of one layout.

    A frame is a head up to ``start``, then the ranges. A compressed frame is the head, a checksum of the
    rest, the raw bytes of the ranges, and their highest bytes as one zstd frame. Threads: any.
    """

    def __init__(self, start: int, ranges: Iterable[Range]) -> None:
        """``ranges`` are adjacent, from ``start`` to the end of a frame."""
        self._start = start
        self._rest: list[tuple[slice, slice]] = []
        """Raw bytes: their slices of a frame and of a compressed frame."""
        self._tops: list[tuple[slice, slice]] = []
        """Highest bytes: their slices of a frame and of the zstd input."""
        at, top, stop = start + _SUM.size, 0, start
        for width, like in groupby(ranges, lambda each: each.width):
            begin, stop = stop, [each.stop for each in like][-1]
            count = (stop - begin) // width
            for byte in range(max(1, width - 1)):
                here = slice(begin + byte, stop, width)
                self._rest.append((here, slice(at, at + count)))
                at += count
            if width > 1:
                here = slice(begin + width - 1, stop, width)
                self._tops.append((here, slice(top, top + count)))
                top += count
        self._tops_at = at
        self._buffers = _Buffers(stop, top)

    def compress(self, frame: bytearray) -> bytearray | None:
        """Return a compressed frame, None if that would not save a page."""
        buffers, source = self._buffers, np.frombuffer(frame, np.uint8)
        _gather(self._tops, source, buffers.tops)
        tops = buffers.compressor.compress(buffers.tops.data)
        size = self._tops_at + len(tops)
        if size > len(frame) - LEAST_SAVED:
            return None
        found = bytearray(size)
        target = np.frombuffer(found, np.uint8)
        target[: self._start] = source[: self._start]
        _gather(self._rest, source, target)
        found[self._tops_at :] = tops
        _SUM.pack_into(found, self._start, self._sum(memoryview(found)))
        return found

    def decompress(self, stored: memoryview) -> memoryview | None:
        """Return the decompressed frame, valid until the thread's next call; None if the bytes are corrupt.

        The checksum is verified first. Memory is bounded by a frame and a zstd window for any input.
        """
        is_long = len(stored) >= self._tops_at
        if not is_long or _SUM.unpack_from(stored, self._start)[0] != self._sum(stored):
            return None
        buffers, source = self._buffers, np.frombuffer(stored, np.uint8)
        try:
            with buffers.decompressor.stream_reader(stored[self._tops_at :]) as reader:
                is_whole = reader.readinto(buffers.tops) == len(buffers.tops) and not reader.read(1)
        except zstandard.ZstdError:
            return None
        if not is_whole:
            return None
        buffers.frame[: self._start] = source[: self._start]
        _scatter(self._rest, source, buffers.frame)
        _scatter(self._tops, buffers.tops, buffers.frame)
        return buffers.frame.data

    def _sum(self, stored: memoryview) -> int:
        return native.xxh3_64(stored[self._start + _SUM.size :])


def _gather(
    slices: Iterable[tuple[slice, slice]], frame: NDArray[np.uint8], target: NDArray[np.uint8]
) -> None:
    for here, there in slices:
        target[there] = frame[here]


def _scatter(
    slices: Iterable[tuple[slice, slice]], source: NDArray[np.uint8], frame: NDArray[np.uint8]
) -> None:
    for here, there in slices:
        frame[here] = source[there]
