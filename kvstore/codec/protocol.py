"""Codec protocol: encodes the values of one layer group's entries to bytes and decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from kvstore.layout import LayerGroup

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType


class Codec(Protocol):
    """Encoder and decoder of entries: ``values`` numbers are ``entry_bytes`` bytes.

    Results have the kind of the input: NumPy arrays, or tensors on the same device.

    Threads: any; a codec has no state.
    """

    @property
    def values(self) -> int:
        """Numbers in one entry."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""

    def encode(self, values: ArrayT, out: Array | None = None) -> ArrayT:
        """Return entries as bytes, or write them to ``out`` and return it.

        Without ``out`` a raw codec returns a view of ``values`` where possible.

        Shapes: values ``[..., self.values]``; result uint8 ``[..., self.entry_bytes]``.

        Raises:
            ValueError: for another shape, or a dtype that the format does not accept.
        """

    def decode(self, entries: ArrayT, dtype: DType = "bfloat16") -> ArrayT:
        """Return the numbers of entries, rounded once to ``dtype``.

        A raw codec returns a view of ``entries`` where possible if ``dtype`` is its own.

        Shapes: entries uint8 ``[..., self.entry_bytes]``; result ``[..., self.values]``.

        Raises:
            ValueError: for another shape or dtype of ``entries``, or an unknown ``dtype``.
        """


@dataclass(frozen=True, slots=True)
class GroupCodec(Codec):
    """Codec of one layer group."""

    group: LayerGroup

    @property
    @override
    def values(self) -> int:
        return self.group.values

    @property
    @override
    def entry_bytes(self) -> int:
        return self.group.entry_bytes
