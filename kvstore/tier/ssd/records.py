"""What the SSD tier knows of its blocks without reading them: one record, and all of a store.

docs/format.md, section 5, is normative for the bytes.
"""

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
        ("key", ">u8", 2),
        ("parent", ">u8", 2),
        ("number", "<u4"),
        ("namespace_id", "<u4"),
        ("sequence", "<u8"),
        ("page", "<u8"),
        ("expires", "<f8"),
        ("frame_bytes", "<u4"),
        ("flags", "<u2"),
        ("error", "<f2"),
        ("head_sum", "<u8"),
    ]
)
"""A key and its record. Words of a key compare as keys do, the first one first."""
assert _ROW.itemsize == KEY_BYTES + RECORD_BYTES
_MOST_ERROR = 65504.0
"""Largest float16."""
_PINNED, _PACKED, _COMPRESSED = 1, 2, 4
_MOST_SEQUENCES = 2**63
"""What is not below is damage, and read as 0, the oldest: no store comes here."""
PLAUSIBLE_SEQUENCE = 2**62
"""Where counting goes on is below: one changed bit must not take it to where nothing is ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the tier knows of a block without reading it."""

    parent: BlockKey
    number: int
    namespace_id: int
    sequence: int
    """Grows with every insert and every use: the order of recency across restarts."""
    page: int = 0
    """Page of the payload in the file, 0 when unknown. A hint."""
    expires: float = 0.0
    """Wall-clock second, 0 for never."""
    frame_bytes: int = 0
    is_pinned: bool = False
    is_packed: bool = False
    is_compressed: bool = False
    error: float = 0.0
    """What packing lost, as the frame says; here with the precision of float16."""
    head_sum: int = 0
    """Checksum of the frame's head, which covers the checksums of its parts."""

    def pack(self, page: int | None = None) -> bytes:
        """Return the record as stored, with another page if one is given."""
        flags = _PINNED * self.is_pinned | _PACKED * self.is_packed
        flags |= _COMPRESSED * self.is_compressed
        return _RECORD.pack(
            *(self.parent, self.number, self.namespace_id, self.sequence),
            *(self.page if page is None else page, self.expires, self.frame_bytes, flags),
            *(min(self.error, _MOST_ERROR), self.head_sum),
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record | None:
        """Return the record that ``pack`` wrote, None for anything else."""
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
    """Return the page and the size of the frame that a stored record names, zeros for no record.

    Cost: a tenth of unpacking it.
    """
    if len(data) != RECORD_BYTES:
        return 0, 0
    page, size = _LOCATION.unpack_from(data, _LOCATION_AT)
    return page, size


class Records:
    """Every record of a store as columns, in the order of their keys.

    As an iterable: pairs of a key and its record, which are made when they are asked for.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: bytes) -> None:
        """Take pairs of a key and a record, end to end, in the order of their keys."""
        self._rows = np.frombuffer(rows, _ROW)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[BlockKey, Record]]:
        for row in self._rows:
            data = row.tobytes()
            record = Record.unpack(data[KEY_BYTES:])
            assert record is not None, "it has the size of one"
            yield BlockKey(data[:KEY_BYTES]), record

    @property
    def key(self) -> NDArray[np.void]:
        """Keys, 16 bytes each."""
        return np.ascontiguousarray(self._rows["key"]).view(f"V{KEY_BYTES}").reshape(-1)

    @property
    def number(self) -> NDArray[np.int64]:
        """Places of the blocks in their chains."""
        return self._rows["number"].astype(np.int64)

    @property
    def namespace_id(self) -> NDArray[np.uint32]:
        """Numbers of their namespaces."""
        return np.ascontiguousarray(self._rows["namespace_id"])

    @property
    def frame_bytes(self) -> NDArray[np.int64]:
        """Sizes of their frames."""
        return self._rows["frame_bytes"].astype(np.int64)

    @property
    def sequence(self) -> NDArray[np.uint64]:
        """Their order of recency, below 2**63."""
        sequence = self._rows["sequence"].astype(np.uint64)
        return np.where(sequence < np.uint64(_MOST_SEQUENCES), sequence, np.uint64(0))

    @property
    def expires(self) -> NDArray[np.float64]:
        """Wall-clock seconds, 0 for never."""
        expires = self._rows["expires"]
        return np.where(np.isnan(expires), 0.0, expires)

    @property
    def is_pinned(self) -> NDArray[np.bool_]:
        """Whether each is pinned."""
        found: NDArray[np.bool_] = (self._rows["flags"] & _PINNED) != 0
        return found

    def parents(self) -> NDArray[np.int64]:
        """Return the place of each block's parent among the records, -1 where it is not there.

        Cost: about 0.3 µs a block.
        """
        if not len(self):
            return np.empty(0, np.int64)
        high, low = self._rows["key"].T.astype(np.uint64)
        wanted_high, wanted_low = self._rows["parent"].T.astype(np.uint64)
        order = np.argsort(wanted_high)  # so that a search looks where the one before it did
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
        places = np.empty_like(found)
        places[order] = found
        return places
