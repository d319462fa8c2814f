"""FP8 quantization of arrays and tensors by the name of the format, as ``kvstore.fp4`` does for FP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.codec import native, quantized
from kvstore.codec.quantized import Kernel, PackStats

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType

__all__ = ["PackStats", "pack", "relative_error", "unpack"]


def _kernel(entry_format: str, scale_rule: str | None = None) -> Kernel:
    rule = quantized.check_format(entry_format, scale_rule, native.FP8_FORMATS, "FP8")
    return Kernel(entry_format, rule)


def pack(
    values: ArrayT, entry_format: str, *, scale_rule: str | None = None, **options: Any
) -> tuple[ArrayT, ArrayT]:
    return quantized.pack(values, _kernel(entry_format, scale_rule), **options)


def unpack(
    codes: ArrayT,
    scales: Array,
    entry_format: str,
    *,
    dtype: DType = "bfloat16",
    out: Array | None = None,
) -> ArrayT:
    return quantized.unpack(codes, scales, _kernel(entry_format), dtype=dtype, out=out)


def relative_error(values: ArrayT, entry_format: str, *, scale_rule: str | None = None) -> float:
    return quantized.relative_error(values, _kernel(entry_format, scale_rule))
