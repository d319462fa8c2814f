"""Block records of the SSD tier: single, and as columns. Byte layout: docs/format.md, section 5."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import KEY_BYTES, BlockKey

_RECORD = struct.Struct("<16sIIQQdIHeQ")
RECORD_BYTES = _RECORD.size
_LOCATION, _LOCATION_AT = struct.Struct("<Q8xI"), 32
_ROW = np.dtype(
    [
        *(("key", ">u8", 2), ("parent", ">u8", 2), ("number", "<u4"), ("namespace_id", "<u4")),
        *(("sequence", "<u8"), ("page", "<u8"), ("expires", "<f8"), ("frame_bytes", "<u4")),
        *(("flags", "<u2"), ("error", "<f2"), ("head_sum", "<u8")),
    ]
)
"""A key and its record. Compared as two big-endian words, keys sort in their order."""
assert _ROW.itemsize == KEY_BYTES + RECORD_BYTES
_MOST_ERROR = 65504.0  # largest float16
_PINNED, _PACKED, _COMPRESSED = 1, 2, 4
_MOST_SEQUENCES = 2**63  # larger sequences are damage, read as 0, the oldest
PLAUSIBLE_SEQUENCE = 2**62  # new ones continue below it: one changed bit cannot exhaust the range


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of one block, which is read without its frame."""

    parent: BlockKey
    number: int
    namespace_id: int
    sequence: int  # tick of the last insert or use: the order of recency across restarts
    page: int = 0  # page of the payload in the file, a hint; 0 if unknown
    expires: float = 0.0  # wall-clock seconds, 0 for never
    frame_bytes: int = 0
    is_pinned: bool = False
    is_packed: bool = False
    is_compressed: bool = False
    error: float = 0.0  # relative error of quantization, as in the frame, rounded to float16
    head_sum: int = 0  # checksum of the frame's head, which contains the checksums of its parts

    def pack(self, page: int | None = None) -> bytes:
        """Return the stored bytes of the record, with its page replaced by ``page`` if given."""
        flags = _PINNED * self.is_pinned | _PACKED * self.is_packed
        flags |= _COMPRESSED * self.is_compressed
        return _RECORD.pack(
            *(self.parent, self.number, self.namespace_id, self.sequence),
            *(self.page if page is None else page, self.expires, self.frame_bytes, flags),
            *(min(self.error, _MOST_ERROR), self.head_sum),
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record | None:
        """Return the record that ``pack`` wrote as ``data``, None for any other bytes."""
        if len(data) != RECORD_BYTES:
            return None
        parent, number, namespace, sequence, page, *others = _RECORD.unpack(data)
        expires, size, flags, error, head = others
        return cls(
            parent=parent,
            number=number,
            namespace_id=namespace,
            sequence=sequence if sequence < _MOST_SEQUENCES else 0,
            page=page,
            expires=0.0 if math.isnan(expires) else expires,
            frame_bytes=size,
            is_pinned=bool(flags & _PINNED),
            is_packed=bool(flags & _PACKED),
            is_compressed=bool(flags & _COMPRESSED),
            error=error,
            head_sum=head,
        )


def location_of(data: bytes | memoryview) -> tuple[int, int]:
    """Return the page and the frame size of a stored record, zeros for no record; a tenth of unpacking it."""
    if len(data) != RECORD_BYTES:
        return 0, 0
    page, size = _LOCATION.unpack_from(data, _LOCATION_AT)
    return page, size


class Records:
    """All records of a store as columns, in key order. Iteration creates pairs of a key and its record one by one."""

    __slots__ = ("_rows",)

    def __init__(self, rows: bytes) -> None:
        """``rows`` are concatenated pairs of a key and a record, in key order."""
        self._rows = np.frombuffer(rows, _ROW)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[BlockKey, Record]]:
        for row in self._rows:
            data = row.tobytes()
            record = Record.unpack(data[KEY_BYTES:])
            assert record is not None, "the size matches"
            yield BlockKey(data[:KEY_BYTES]), record

    @property
    def key(self) -> NDArray[np.void]:
        """Keys, 16 bytes each."""
        return np.ascontiguousarray(self._rows["key"]).view(f"V{KEY_BYTES}").reshape(-1)

    @property
    def number(self) -> NDArray[np.int64]:
        """Block numbers."""
        return self._rows["number"].astype(np.int64)

    @property
    def namespace_id(self) -> NDArray[np.uint32]:
        """Namespace numbers."""
        return np.ascontiguousarray(self._rows["namespace_id"])

    @property
    def frame_bytes(self) -> NDArray[np.int64]:
        """Frame sizes in bytes."""
        return self._rows["frame_bytes"].astype(np.int64)

    @property
    def sequence(self) -> NDArray[np.uint64]:
        """Recency, below 2**63."""
        sequence = self._rows["sequence"].astype(np.uint64)
        return np.where(sequence < np.uint64(_MOST_SEQUENCES), sequence, np.uint64(0))

    @property
    def expires(self) -> NDArray[np.float64]:
        """Wall-clock seconds, 0 for never."""
        expires = self._rows["expires"]
        return np.where(np.isnan(expires), 0.0, expires)

    @property
    def is_pinned(self) -> NDArray[np.bool_]:
        """Persistent pins."""
        found: NDArray[np.bool_] = (self._rows["flags"] & _PINNED) != 0
        return found

    def parents(self) -> NDArray[np.int64]:
        """Return the position of each block's parent in the records, -1 for none. Cost: about 0.3 µs a block."""
        if not len(self):
            return np.empty(0, np.int64)
        high, low = self._rows["key"].T.astype(np.uint64)
        wanted_high, wanted_low = self._rows["parent"].T.astype(np.uint64)
        order = np.argsort(wanted_high)  # consecutive searches access neighbouring addresses
        wanted_high, wanted_low = wanted_high[order], wanted_low[order]
        first = np.searchsorted(high, wanted_high, "left")
        last = np.searchsorted(high, wanted_high, "right")
        while (is_wide := last - first > 1).any():  # keys with the same first half: rare
            middle = np.where(is_wide, (first + last) // 2, 0)
            is_at_most = low[middle] <= wanted_low
            first = np.where(is_wide & is_at_most, middle, first)
            last = np.where(is_wide & ~is_at_most, middle, last)
        found: NDArray[np.int64] = np.minimum(first, len(self) - 1)
        found[(high[found] != wanted_high) | (low[found] != wanted_low)] = -1
        positions = np.empty_like(found)
        positions[order] = found
        return positions
