"""FP4 quantization of arrays and tensors: two values a byte, in blocks with one scale byte.

docs/format.md, section 3, is normative for formats and scale rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.checks import number
from kvstore.codec import native, quantized
from kvstore.codec.quantized import Kernel, PackStats

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType

__all__ = ["PackStats", "gather", "pack", "relative_error", "unpack"]


def _kernel(entry_format: str, scale_rule: str | None, global_scale: float) -> Kernel:
    rule = quantized.check_format(entry_format, scale_rule, native.FP4_FORMATS, "FP4")
    global_scale = number(global_scale, "global_scale")
    if not 2.0**-100 <= global_scale <= 2.0**100:
        raise ValueError(f"global_scale must lie in [2**-100, 2**100], found {global_scale!r}")
    if global_scale != 1 and entry_format == "mxfp4":
        raise ValueError(f"mxfp4 has no global scale, expected 1, found {global_scale!r}")
    if global_scale != 1 and rule == "v41":
        raise ValueError(
            f"scale rule 'v41' has no global scale, expected 1, found {global_scale!r}"
        )
    return Kernel(entry_format, rule, global_scale)


def _unpacking_kernel(entry_format: str, global_scale: float) -> Kernel:
    quantized.check_format(entry_format, None, native.FP4_FORMATS, "FP4")
    return _kernel(entry_format, native.UNPACKING_RULES.get(entry_format), global_scale)


def pack(
    values: ArrayT,
    entry_format: str,
    *,
    scale_rule: str | None = None,
    out: tuple[Array, Array] | None = None,
    global_scale: float = 1.0,
    stats: PackStats | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Quantize float32, float16 or bfloat16 values to FP4, and return their nibbles and scales.

    The result has the kind of ``values``: NumPy arrays, or tensors on the same device. It is written to
    ``out=(nibbles, scales)`` if given; rows may be strided, so both can be slices of one array of
    entries, ``entries[..., :n // 2]`` and ``entries[..., n // 2:]``. The default of ``scale_rule`` is the
    format's first in ``layout.SCALE_RULES``. ``global_scale``, for ``nvfp4`` with the rule ``torchao``, is
    the factor of all dequantized values.

    Shapes: values ``[..., n]``; nibbles uint8 ``[..., n / 2]``, value 2i in the low half of byte i;
        scales uint8 ``[..., n / block]``, with blocks of 16 (``nvfp4``) or 32 (``mxfp4``).

    Raises:
        ValueError: naming the value found and the values expected; nothing was written.

    Cost: reads the array in place, or a copy if the last axis is not contiguous. A tensor on another
        device is copied to the host, and its result back: this synchronises.
    """
    kernel = _kernel(entry_format, scale_rule, global_scale)
    return quantized.pack(values, kernel, out=out, stats=stats)


def unpack(
    nibbles: ArrayT,
    scales: Array,
    entry_format: str,
    *,
    dtype: DType = "bfloat16",
    out: Array | None = None,
    global_scale: float = 1.0,
) -> ArrayT:
    """Unpack FP4 to float32, float16 or bfloat16: the exact product, rounded once.

    The result has the kind of ``nibbles``: a NumPy array, or a tensor on the same device. bfloat16 in
    NumPy is the type of ml_dtypes; ``out=`` may also be an array of uint16 for its bits.

    Shapes: nibbles uint8 ``[..., n / 2]``; scales uint8 ``[..., n / block]``; result ``[..., n]``.

    Raises:
        ValueError: naming the value found and the values expected; nothing was written.

    Cost: as :func:`pack`, but tensors of another device are decoded there, by a table lookup.
    """
    kernel = _unpacking_kernel(entry_format, global_scale)
    return quantized.unpack(nibbles, scales, kernel, dtype=dtype, out=out)


def gather(
    nibbles: ArrayT,
    scales: Array,
    index: Array,
    entry_format: str,
    *,
    pages: Array | None = None,
    dtype: DType = "bfloat16",
    out: Array | None = None,
    global_scale: float = 1.0,
) -> ArrayT:
    """Dequantize chosen entries, as sparse attention reads them: row i is entry ``index[i]``.

    ``pages`` is the page table of one prompt in a pool of pages: entry e is entry ``e % m`` of page
    ``pages[e // m]``. Without it, entries are the rows of an array.

    Shapes: nibbles uint8 ``[entries, n / 2]`` or ``[pages of the pool, m, n / 2]``; scales the same
        with ``n / block``; index ``[k]`` and pages, integers; result ``[k, n]``.

    Raises:
        ValueError: naming the value found and the values expected; nothing was written.

    Cost: reads only the chosen entries, in place. Tensors of another device are gathered
        and decoded there.
    """
    kernel = _unpacking_kernel(entry_format, global_scale)
    return quantized.gather(nibbles, scales, index, kernel, pages=pages, dtype=dtype, out=out)


def relative_error(
    values: ArrayT, entry_format: str, *, scale_rule: str | None = None, global_scale: float = 1.0
) -> float:
    """Return the relative root-mean-square error of quantizing values, measured in float64.

    0 for no values or only zeros; NaN if any is NaN or infinite. Cost: a temporary buffer on the host.
    """
    return quantized.relative_error(values, _kernel(entry_format, scale_rule, global_scale))
