"""Values of the SSD tier's interface: its options, a block to write, and the result of a read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import BlockKey
from kvstore.tier.ssd.records import Record

BUSY = "busy"  # the fault of a read with a transient error; it does not concern the block

TakeMany = Callable[[int, int, NDArray[np.int64]], int]
"""``take_many(i, file, offsets)`` reads frames of one size, of blocks from i on; returns the number of good ones."""


@dataclass(frozen=True, slots=True)
class Put:
    """One block to write."""

    key: BlockKey
    record: Record
    frame: bytearray


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read: the number of good blocks, then the fault (None if all were good)."""

    count: int
    fault: str | None
    frame_bytes: int = 0  # total size of the good blocks' frames


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdOptions:
    """Options of an opening: the cap of the file, its frames, and the role."""

    capacity_bytes: int
    frame_bytes: int  # size of the largest frame
    format_text: str  # format of the store as JSON, equal for every opening of one store
    role: Literal["auto", "owner", "reader"] = "auto"
    preallocate: bool = False
    is_mixed: bool = False  # whether frames differ in size
