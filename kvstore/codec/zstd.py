"""Numbers without loss in fewer bytes: the highest byte of each goes through zstd, the others stay.

Sign and exponent of a cache's floats take few values, so a Huffman code halves them and more; the low
bytes are noise that no code shortens. docs/format.md, section 4.2, is normative for the bytes.
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
"""What compressing must save: a page of the file. Less may save nothing, and reading takes longer."""
_WINDOW_LOG = 17
"""A window as long as a zstd block, 128 KiB, and the largest that is read: nothing repeats further off."""
HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)
"""zstd that hardly looks for repetitions: exponents have none, a Huffman code is all there is to gain.
Next to level 1 that is 2.5 times as fast, and smaller. docs/decisions/0024."""
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a frame that are numbers of one width."""

    start: int
    stop: int
    width: int
    """Bytes of a number; 1 for what stays as it is."""


class _Room(threading.local):
    """What a thread needs to compress and to decompress; made when it first does."""

    def __init__(self, frame_bytes: int, top_bytes: int) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        self.tops = np.empty(top_bytes, np.uint8)
        self.frame = np.empty(frame_bytes, np.uint8)


class TopBytes:
    """Compresses the highest bytes of the numbers in frames of one layout.

    A frame is what stays before ``start``, then the runs. Compressed, it is what stays, a checksum of
    all that follows, the bytes of the runs but the highest ones, and those as one zstd frame.

    Threads: any.
    """

    def __init__(self, start: int, runs: Iterable[Run]) -> None:
        """``runs`` follow each other from ``start`` to the end of a frame."""
        self._start = start
        self._rest: list[tuple[slice, slice]] = []
        """Bytes that zstd leaves alone: where they lie in a frame, and where in a compressed one."""
        self._tops: list[tuple[slice, slice]] = []
        """The highest ones: where they lie in a frame, and where in what zstd is given."""
        at, top, stop = start + _SUM.size, 0, start
        for width, like in groupby(runs, lambda run: run.width):
            begin, stop = stop, [run.stop for run in like][-1]
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
        self._room = _Room(stop, top)

    def compress(self, frame: bytearray) -> bytearray | None:
        """Return a frame compressed, None if that would not save a page."""
        room, source = self._room, np.frombuffer(frame, np.uint8)
        _gather(self._tops, source, room.tops)
        tops = room.compressor.compress(room.tops.data)
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
        """Return the frame that was compressed, None if these bytes are not what was made of it.

        Nothing is decompressed before its checksum held; it takes no more memory than a frame and a
        window of zstd, whatever the bytes say. The frame is the thread's, until its next call.
        """
        if len(stored) < self._tops_at:
            return None
        if _SUM.unpack_from(stored, self._start)[0] != self._sum(stored):
            return None
        room, source = self._room, np.frombuffer(stored, np.uint8)
        try:
            with room.decompressor.stream_reader(stored[self._tops_at :]) as reader:
                is_whole = reader.readinto(room.tops) == len(room.tops) and not reader.read(1)
        except zstandard.ZstdError:
            return None
        if not is_whole:
            return None
        room.frame[: self._start] = source[: self._start]
        _scatter(self._rest, source, room.frame)
        _scatter(self._tops, room.tops, room.frame)
        return room.frame.data

    def _sum(self, stored: memoryview) -> int:
        return native.xxh3_64(stored[self._start + _SUM.size :])


def _gather(
    places: Iterable[tuple[slice, slice]], frame: NDArray[np.uint8], packed: NDArray[np.uint8]
) -> None:
    for here, there in places:
        packed[there] = frame[here]


def _scatter(
    places: Iterable[tuple[slice, slice]], packed: NDArray[np.uint8], frame: NDArray[np.uint8]
) -> None:
    for here, there in places:
        frame[here] = packed[there]
