"""FP8 for arrays and tensors: one E4M3 byte a value, with a scale for 32 values or for a row.

``mxfp8`` has one E8M0 byte for each 32 values, ``fp8`` one float32 for each row. Both are
normative in docs/format.md, section 3; :mod:`kvstore.codec.numpy_reference_fp8` is the same in
NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.codec import native, quantized
from kvstore.codec.quantized import Kernel, PackStats

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType

__all__ = ["PackStats", "pack", "relative_error", "unpack"]


def _kernel(entry_format: str, scale_rule: str | None = None) -> Kernel:
    rule = quantized.check_format(entry_format, scale_rule, native.FP8_FORMATS, "FP8")
    return Kernel(entry_format, rule)


def pack(
    values: ArrayT,
    entry_format: str,
    *,
    scale_rule: str | None = None,
    out: tuple[Array, Array] | None = None,
    stats: PackStats | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Pack float32, float16 or bfloat16 values to FP8, and return their codes and scales.

    The result is of the same kind as ``values``: NumPy arrays, or tensors on the same device. With
    ``out=(codes, scales)`` it is written there and returned; rows may be strided, so both can be
    slices of one array of entries, ``entries[..., :n]`` and ``entries[..., n:]``.

    Shapes:
        values ``[..., n]``; codes uint8 ``[..., n]``; scales uint8 ``[..., n / 32]`` (``mxfp8``) or
        ``[..., 4]`` (``fp8``: the bytes of a little-endian float32).

    Raises:
        ValueError: naming what was found and what was expected; nothing was written then.

    Cost: reads the array twice where it lies, unless the last axis is not contiguous: then one
        copy. A tensor on another device is copied to the host, and its result back: this
        synchronises.
    """
    return quantized.pack(values, _kernel(entry_format, scale_rule), out=out, stats=stats)


def unpack(
    codes: ArrayT,
    scales: Array,
    entry_format: str,
    *,
    dtype: DType = "bfloat16",
    out: Array | None = None,
) -> ArrayT:
    """Unpack FP8 to float32, float16 or bfloat16: the exact product, rounded once.

    The result is of the same kind as ``codes``: a NumPy array, or a tensor on the same device. In
    NumPy, bfloat16 is the type of ml_dtypes, which the caller must have imported; without it, pass
    ``out=`` an array of uint16 to get the bits, or ask for float32.

    Shapes:
        codes uint8 ``[..., n]``; scales uint8 ``[..., n / 32]`` or ``[..., 4]``; result
        ``[..., n]``.

    Raises:
        ValueError: naming what was found and what was expected; nothing was written then.

    Cost: as :func:`pack`, but tensors of another device are decoded there.
    """
    return quantized.unpack(codes, scales, _kernel(entry_format), dtype=dtype, out=out)


def relative_error(values: ArrayT, entry_format: str, *, scale_rule: str | None = None) -> float:
    """Return the relative root-mean-square error of packing values and unpacking them.

    0 for no values or only zeros; NaN if any value is NaN or infinite.

    Cost: packs, unpacks and compares in float64 on the host: about 30 bytes a value.
    """
    return quantized.relative_error(values, _kernel(entry_format, scale_rule))
