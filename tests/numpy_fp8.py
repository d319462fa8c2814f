"""NumPy reference of FP8, independent of the C code. Slow; tests compare both byte for byte.

The C code divides and rounds bits; this module divides elements by powers of two only. For any other
scale it counts thresholds: a code is the number of midpoints, times the scale, that a magnitude has
passed. These products are exact in float64, so only the roundings of the definition occur.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.numpy_fp4 import (
    E4M3,
    E4M3_BYTES,
    E8M0_BYTES,
    QuantizedPlanes,
    even_of,
    nearest_code,
)

LARGEST = np.finfo(np.float32).max
LEAST = np.float32(2.0**-149)
BLOCK = 32
"""Values that share a scale in ``mxfp8``."""


def mxfp8_scale(amax: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the E8M0 code of each block: 127 plus the exponent of 2^ceil(log2(amax / 448)).

    Source: docs/format.md, section 3.
    """
    fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction * 2**exponent
    # amax in [1, 2) * 2**(exponent - 1); the largest element, 448, is 1.75 * 2**8.
    code = np.clip(127 + exponent - 1 - 8 + (fraction > 1.75 / 2), 0, 254)
    code = np.where(amax == 0, 0, code)
    return np.where(np.isinf(amax), 254, code).astype(np.uint8)


def fp8_scale(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each row; no row holds a NaN.

    Source: docs/format.md, section 3.
    """
    is_infinite = np.isinf(rows)
    amax = np.abs(np.where(is_infinite, np.float32(0), rows)).max(axis=-1, initial=0)
    amax = np.where((amax == 0) & is_infinite.any(axis=-1), LARGEST, amax)
    with np.errstate(under="ignore"):
        scale = amax / np.float32(448)
    return np.where(amax > 0, np.maximum(scale, LEAST), np.float32(0))


def nearest_multiple(
    magnitudes: NDArray[np.float64], factors: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the code whose value times its factor is nearest, ties to the even code."""
    exceeded = np.zeros(magnitudes.shape, np.int64)
    reached = np.zeros(magnitudes.shape, np.int64)
    for midpoint in (E4M3[:-1] + E4M3[1:]) / 2:
        exceeded += magnitudes > midpoint * factors
        reached += magnitudes >= midpoint * factors
    return even_of(exceeded, reached)


def pack(values: NDArray[np.float32] | NDArray[np.float16], entry_format: str) -> QuantizedPlanes:
    """Quantize the last axis.

    Shapes:
        values ``[..., n]``; codes ``[..., n]``; scales ``[..., n / 32]`` or ``[..., 4]``.
    """
    wide = values.astype(np.float32)
    infinities = int(np.isinf(wide).sum())
    is_mx = entry_format == "mxfp8"
    length = BLOCK if is_mx else wide.shape[-1]
    scale_bytes = wide.shape[-1] // BLOCK if is_mx else 4
    blocks = wide.reshape(wide.size // length, length)
    is_nan: NDArray[np.bool_] = np.any(np.isnan(blocks), axis=-1)
    clean = np.where(is_nan[:, None], np.float32(0), blocks)
    magnitudes = np.abs(clean).astype(np.float64)
    if is_mx:
        scales = mxfp8_scale(np.abs(clean).max(axis=-1))
        codes = nearest_code(magnitudes / np.exp2(scales.astype(np.float64) - 127)[:, None], E4M3)
        scales = np.where(is_nan, 0xFF, scales)
    else:
        factors = fp8_scale(clean)
        codes = nearest_multiple(magnitudes, factors.astype(np.float64)[:, None])
        factors[is_nan] = np.nan
        scales = factors.astype("<f4").view(np.uint8)
    codes += 0x80 * np.signbit(blocks)
    codes[is_nan] = 0
    return QuantizedPlanes(
        codes=codes.astype(np.uint8).reshape(values.shape),
        scales=scales.astype(np.uint8).reshape(*values.shape[:-1], scale_bytes),
        nan_blocks=int(is_nan.sum()),
        inf_values=infinities,
    )


def unpack(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], entry_format: str
) -> NDArray[np.float64]:
    """Return the exact values, NaN for a NaN code or scale.

    Shapes:
        codes ``[..., n]``; scales ``[..., n / 32]`` or ``[..., 4]``; result ``[..., n]``.
    """
    elements = E4M3_BYTES[codes]
    if entry_format == "mxfp8":
        return np.asarray(elements * np.repeat(E8M0_BYTES[scales], BLOCK, axis=-1), np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN, and zero times infinity
        factors = np.ascontiguousarray(scales).view("<f4").astype(np.float64)
        return np.asarray(elements * factors, np.float64)
