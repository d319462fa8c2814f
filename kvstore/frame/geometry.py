"""Geometry of a frame: sizes and offsets determined by a layout and a block size.

``header | token ids | part checksums | reserved | payload``. A *part* is one checksummed range: all entries that one
owner layer adds to a block. Within a part, entries are planar in units of 64: the codes of 64 entries, then their
scales, so that one copy makes an engine's page of 64 records. docs/format.md, section 4, is normative.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvstore.checks import integer
from kvstore.errors import ConfigError
from kvstore.frame.header import HEADER_BYTES
from kvstore.layout import LayerGroup, Layout

UNIT_ENTRIES = 64  # per planar unit: page size of V4.1 engines (vLLM, FlashMLA)
RESERVED_BYTES = 32
"""Bytes for a future nonce (12) and tag (16) of authenticated encryption, zero so far; then the relative
quantization error as a float32."""

PART_BATCH_BYTES = 4 << 20  # smallest batch: 1 to 2 ms, of which the set-up is a tenth
PART_BATCH_BLOCK_BYTES = 16 << 10  # of a block: the cost of a separate read. docs/ssd.md.


@dataclass(frozen=True, slots=True)
class PartBatch:
    """A batch of parts: parts ``[start, stop)`` of several frames, loaded together."""

    start: int
    stop: int
    layers: tuple[int, ...]  # owner layers of the parts
    bounds: tuple[int, int]  # first and last byte offset of the parts in the largest frame

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in the batch."""
        return self.bounds[1] - self.bounds[0]


class FrameGeometry:
    """Sizes and offsets of the frames of one layout at one block size, a multiple of the layout's alignment."""

    def __init__(self, layout: Layout, block_tokens: int) -> None:
        """Compute all offsets. Raises ``ConfigError`` if a block would contain a fraction of an entry."""
        block_tokens = integer(block_tokens, "block_tokens", 1, 2**32 - 1, ConfigError)
        if block_tokens % layout.alignment:
            raise ConfigError(
                f"block_tokens must be a multiple of the layout's alignment {layout.alignment}, found {block_tokens}"
            )
        self.layout = layout
        self.block_tokens = block_tokens
        self.entries = {
            group.name: block_tokens // group.tokens_per_entry for group in layout.global_groups
        }
        """Entries of a block, by group."""
        owners = sorted({layer for group in layout.global_groups for layer in group.layers})
        self.members = {layer: self._members_of(layer) for layer in owners}
        """Groups of each owner layer, in the order of its part."""
        self.part_count = len(owners)
        self.sums_offset = HEADER_BYTES + 4 * block_tokens
        self.payload_offset = self.sums_offset + 8 * self.part_count + RESERVED_BYTES
        self.part_bounds: list[tuple[int, int]] = []  # start and end, in order of owner layer
        offset = self.payload_offset
        for members in self.members.values():
            size = sum(self.entries[g.name] * g.entry_bytes for g in members)
            self.part_bounds.append((offset, offset + size))
            offset += size
        self.frame_bytes = offset
        self.payload_bytes = offset - self.payload_offset

    def _members_of(self, layer: int) -> tuple[LayerGroup, ...]:
        """Return the groups of an owner layer, grouped by compression ratio."""
        owned = [group for group in self.layout.global_groups if layer in group.layers]
        order = list(dict.fromkeys(group.tokens_per_entry for group in owned))
        return tuple(sorted(owned, key=lambda group: order.index(group.tokens_per_entry)))

    @property
    def whole(self) -> PartBatch:
        """All parts as one batch."""
        bounds = self.part_bounds[0][0], self.part_bounds[-1][1]
        return PartBatch(0, self.part_count, tuple(self.members), bounds)

    def part_batches(self, blocks: int) -> tuple[PartBatch, ...]:
        """Return all parts in batches, in layer order, for a load of ``blocks`` blocks.

        A batch has the fewest layers that reach both ``PART_BATCH_BYTES`` and ``PART_BATCH_BLOCK_BYTES``.
        """
        least = max(PART_BATCH_BLOCK_BYTES, -(-PART_BATCH_BYTES // max(1, blocks)))
        part_batches: list[PartBatch] = []
        first, owners = 0, tuple(self.members)
        for stop, (_, end) in enumerate(self.part_bounds, 1):
            start = self.part_bounds[first][0]
            if end - start >= least or stop == self.part_count:
                part_batches.append(PartBatch(first, stop, owners[first:stop], (start, end)))
                first = stop
        return tuple(part_batches)

    def unit(self, group: LayerGroup) -> int:
        """Return the number of entries of a group in one planar unit."""
        entries = self.entries[group.name]
        return UNIT_ENTRIES if entries % UNIT_ENTRIES == 0 else entries

    def ranges(self) -> Iterator[tuple[int, int, LayerGroup]]:
        """Yield the payload in order: start and end in the frame of entries of one group."""
        offset = self.payload_offset
        for members in self.members.values():
            for _, alike in groupby(members, lambda group: group.tokens_per_entry):
                groups = list(alike)
                unit = self.unit(groups[0])
                for group in groups * (self.entries[groups[0].name] // unit):
                    yield offset, offset + unit * group.entry_bytes, group
                    offset += unit * group.entry_bytes

    def layers_of(self, batch: PartBatch | None = None) -> dict[str, list[int]]:
        """Return the layers of each GLOBAL group, in its order; only those of a batch if given."""
        return {
            group.name: [n for n in group.layers if batch is None or n in batch.layers]
            for group in self.layout.global_groups
        }

    def empty(self, blocks: int, batch: PartBatch | None = None) -> dict[str, NDArray[np.uint8]]:
        """Return uninitialised entries for ``blocks`` blocks, by GLOBAL group, of a batch or all."""
        layers = self.layers_of(batch)
        return {
            group.name: np.empty(
                (len(layers[group.name]), blocks * self.entries[group.name], group.entry_bytes),
                np.uint8,
            )
            for group in self.layout.global_groups
        }
