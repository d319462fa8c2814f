"""Targets and sources of payloads: address tables of the memory that contains the entries of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.codec import codec_for, native
from kvstore.codec.arrays import FLOATS, check_apart, check_in, check_out, host_view
from kvstore.codec.quantized import QuantizedCodec
from kvstore.codec.raw import RawCodec
from kvstore.frame.geometry import FrameGeometry, PartBatch

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array

_ADDRESS = native.SEGMENT_FIELDS.index("address")
_BYTES = ("uint8",)


@dataclass(frozen=True, slots=True)
class AddressTable:
    """Address table of a target or source of blocks. Threads: any number may scatter, each to its own blocks."""

    blocks: int  # number of whole blocks that fit
    table: NDArray[np.int64]  # of block 0, in order; columns are ``native.SEGMENT_FIELDS``
    steps: NDArray[np.int64]  # by segment, bytes from its address in one block to that in the next
    parts: Sequence[native.Part]
    kept: object  # owners of the memory that the table points to
    first_part: int = 0  # number of the first part in the table
    is_shifted: bool = False  # ``steps`` are byte distances from block 0, by block

    def segments(self, block: int) -> NDArray[np.int64]:
        """Return the table of one block. Raises ``ValueError`` if there is no such block."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"expected a block in [0, {self.blocks}), found number {block}")
        table = self.table.copy()
        table[:, _ADDRESS] += self.steps[block] if self.is_shifted else block * self.steps
        return table

    def reader(
        self, shape: native.FrameShape, *, any_parent: bool = False, checks_first: bool = False
    ) -> native.FrameReader:
        """Return a reader of frames of one shape into this target."""
        return native.FrameReader(
            *(shape, self.parts, self.table, self.steps, self.blocks),
            first_part=self.first_part,
            is_shifted=self.is_shifted,
            any_parent=any_parent,
            checks_first=checks_first,
        )

    def take(self, frame: memoryview, sums: Sequence[int], block: int) -> bool:
        """Copy the parts of a frame to a block; return whether their checksums are in ``sums``."""
        stop = self.first_part + len(self.parts)
        return native.read_parts(
            frame, self.parts, sums[self.first_part : stop], self.segments(block)
        )


def source_of(geometry: FrameGeometry, entries: Mapping[str, NDArray[np.uint8]]) -> AddressTable:
    """Return a source of entries; see ``FrameFormat.entries_source``."""
    return _address_table(geometry, entries, {}, None, is_output=False)


def target_of(
    geometry: FrameGeometry,
    entries: Mapping[str, NDArray[np.uint8]],
    values: Mapping[str, Array],
    batch: PartBatch | None = None,
) -> AddressTable:
    """Return a target of numbers for the groups in ``values``, of entries for others: ``FrameFormat.mixed_target``."""
    return _address_table(geometry, entries, values, batch, is_output=True)


def block_at_zero(geometry: FrameGeometry) -> AddressTable:
    """Return the table of one block of a layout of one group and layer, in memory at address 0."""
    (group,) = geometry.layout.global_groups
    (_,) = group.layers
    block = np.empty((1, geometry.entries[group.name], group.entry_bytes), np.uint8)
    source = source_of(geometry, {group.name: block})
    source.table[:, _ADDRESS] -= _address(block)
    return source


def separate_blocks(
    one: AddressTable, blocks: Sequence[NDArray[np.uint8]], payload_bytes: int, *, is_output: bool
) -> AddressTable:
    """Return a target or source of blocks in separate arrays; ``one`` is :func:`block_at_zero`."""
    views = [host_view(block, f"block {n}", _BYTES).data for n, block in enumerate(blocks)]
    for number, view in enumerate(views):
        (check_out if is_output else check_in)(view, f"block {number}", (payload_bytes,))
    starts = np.array([_address(view) for view in views], np.int64)
    table = one.table.copy()
    table[:, _ADDRESS] += starts[0]
    return replace(
        one,
        blocks=len(views),
        table=table,
        steps=starts - starts[0],
        kept=views,
        is_shifted=True,
    )


def _address(view: NDArray[np.generic]) -> int:
    return int(view.__array_interface__["data"][0])


def _address_table(
    geometry: FrameGeometry,
    entries: Mapping[str, NDArray[np.uint8]],
    values: Mapping[str, Array],
    batch: PartBatch | None,
    *,
    is_output: bool,
) -> AddressTable:
    codecs: dict[str, native.Prepared] = {}
    views: dict[str, NDArray[np.generic]] = {}
    layers = geometry.layers_of(batch)
    for group in geometry.layout.global_groups:
        if not layers[group.name]:
            continue
        role, length = f"group {group.name!r}", group.entry_bytes
        dtypes: Sequence[str] = _BYTES
        array: Array = entries[group.name] if group.name not in values else values[group.name]
        if group.name in values:
            codec, length = codec_for(group), group.values
            dtypes = (codec.dtype,) if isinstance(codec, RawCodec) else FLOATS
            if isinstance(codec, QuantizedCodec):
                found = host_view(array, role, FLOATS).dtype
                codecs[group.name] = codec.kernel.prepared(found)
        count = geometry.entries[group.name]
        view = _by_block(host_view(array, role, dtypes).data, count)
        expected = (view.shape[0], len(layers[group.name]), count, length)
        (check_out if is_output else check_in)(view, role, expected)
        views[group.name] = view
    if is_output:
        check_apart(views)
    return _table(geometry, views, codecs, layers, batch or geometry.whole)


def _by_block(view: NDArray[np.generic], count: int) -> NDArray[np.generic]:
    """Return ``[layers, n, length]`` as ``[blocks, layers, entries, length]``, unless it has that shape."""
    if view.ndim != 3:
        return view
    layers, whole, length = view.shape[0], view.shape[1] // count, view.shape[2]
    cut = view[:, : whole * count].reshape(layers, whole, count, length)
    return cut.transpose(1, 0, 2, 3)  # splitting one axis keeps it a view


def _table(
    geometry: FrameGeometry,
    views: Mapping[str, NDArray[np.generic]],
    codecs: Mapping[str, native.Prepared],
    layers: Mapping[str, list[int]],
    batch: PartBatch,
) -> AddressTable:
    rows: list[tuple[int, ...]] = []
    steps: list[int] = []
    parts: list[native.Part] = []
    addresses = {name: _address(view) for name, view in views.items()}
    numbered = list(zip(geometry.members.items(), geometry.part_bounds, strict=True))
    for (layer, members), bounds in numbered[batch.start : batch.stop]:
        first = len(rows)
        for group in members:
            view, codec = views[group.name], codecs.get(group.name)
            unit = geometry.unit(group)
            units = geometry.entries[group.name] // unit
            address = addresses[group.name] + layers[group.name].index(layer) * view.strides[1]
            for length in (group.values,) if codec else group.planes:
                kernel = codec.address if codec else 0
                rows.append((kernel, units, unit, length, address, view.strides[2]))
                steps.append(view.strides[0])
                address += length
        parts.append(native.Part(*bounds, first, len(rows)))
    return AddressTable(
        min(view.shape[0] for view in views.values()),
        np.array(rows, np.int64),
        np.array(steps, np.int64),
        tuple(parts),
        (tuple(views.values()), tuple(codecs.values())),
        batch.start,
    )
