"""What a codec is: the values of one layer group's entries, to bytes and back.

It knows one entry format. It knows no tokens, no blocks and no tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType


class Codec(Protocol):
    """Turns entries of ``values`` numbers into ``entry_bytes`` bytes, and back.

    Results are of the same kind as the input: NumPy arrays, or tensors on the same device.

    Threads: a codec keeps no state; any number of calls at a time.
    """

    @property
    def values(self) -> int:
        """Numbers in one entry."""
        ...

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        ...

    def encode(self, values: ArrayT, out: Array | None = None) -> ArrayT:
        """Return entries as bytes, or write them to ``out`` and return it.

        Without ``out`` the result of a raw codec shares memory with ``values`` where it can.

        Shapes:
            values ``[..., self.values]``; result uint8 ``[..., self.entry_bytes]``.

        Raises:
            ValueError: for another shape, or a dtype that the format cannot take.
        """
        ...

    def decode(self, entries: ArrayT, dtype: DType = "bfloat16") -> ArrayT:
        """Return the numbers of entries, rounded once to ``dtype``.

        The result of a raw codec shares memory with ``entries`` if ``dtype`` is its own and it can.

        Shapes:
            entries uint8 ``[..., self.entry_bytes]``; result ``[..., self.values]``.

        Raises:
            ValueError: for another shape or dtype of ``entries``, or an unknown ``dtype``.
        """
        ...
