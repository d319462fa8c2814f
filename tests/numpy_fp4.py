"""NumPy reference of FP4, independent of the C code. Slow; tests compare both byte for byte.

The C code rounds bits; this module counts thresholds. A code is the number of midpoints between
neighbouring values that a magnitude has passed, where a midpoint before an odd code must be
exceeded and one before an even code need only be reached: that is round to nearest, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitude of each element code; bit 3 is the sign."""
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)[:0x7F]
"""Value of each scale code of NVFP4 up to the largest, 448 at 0x7E. Code 0x7F is NaN."""
E4M3_BYTES = np.concatenate([np.append(E4M3, np.nan), -np.append(E4M3, np.nan)])
"""Value of each E4M3 byte."""
E8M0_BYTES = np.append(2.0 ** np.arange(-127, 128), np.nan)
"""Value of each E8M0 byte."""
BLOCK = {"nvfp4": 16, "mxfp4": 32}
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}


@dataclass(frozen=True, slots=True)
class QuantizedPlanes:
    """Quantized planes, and counters of the input."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    nan_blocks: int
    inf_values: int


def nearest_code(magnitudes: NDArray[np.float64], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the code of the value in ``table`` nearest to each magnitude, ties to the even code.

    Magnitudes beyond the table take its last code.
    """
    midpoints = (table[:-1] + table[1:]) / 2
    exceeded = np.searchsorted(midpoints, magnitudes, side="left")
    reached = np.searchsorted(midpoints, magnitudes, side="right")
    return even_of(exceeded, reached)


def even_of(exceeded: NDArray[np.int64], reached: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the even one of two counts that differ by one on a midpoint and nowhere else."""
    return np.where(exceeded % 2 == 0, exceeded, reached)


def nvfp4_scale(
    amax: NDArray[np.float32], scale_rule: str, global_scale: np.float32
) -> NDArray[np.uint8]:
    """Return the E4M3 code of each block, from its largest magnitude.

    Source: docs/format.md, section 3.
    """
    if scale_rule == "v41":
        # Exact: amax is compared with 6 times each midpoint, so nothing is divided or rounded.
        least = np.maximum(amax.astype(np.float64), 6 * E4M3[1])
        return nearest_code(least, 6 * E4M3).astype(np.uint8)
    scale = amax / np.float32(6) / global_scale
    return nearest_code(np.maximum(scale, np.float32(2.0**-6)).astype(np.float64), E4M3).astype(
        np.uint8
    )


def mxfp4_scale(amax: NDArray[np.float32], scale_rule: str) -> NDArray[np.uint8]:
    """Return the E8M0 code of each block: 127 plus the exponent of its power of two.

    Source: docs/format.md, section 3.
    """
    fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction * 2**exponent
    # amax in [1, 2) * 2**(exponent - 1); the largest element, 6, is 1.5 * 2**2.
    floor = exponent - 1 - 2
    rises = {
        "floor": np.zeros(amax.shape, bool),
        "even": fraction >= 1.75 / 2,
        "rceil": fraction > 1.5 / 2,
    }[scale_rule]
    code = np.clip(127 + floor + rises, 0, 254)
    code = np.where(amax == 0, 0, code)
    # An infinite block counts as the power of two after the largest float; rceil goes to the top.
    return np.where(np.isinf(amax), 254 if scale_rule == "rceil" else 253, code).astype(np.uint8)


def pack(
    values: NDArray[np.float32] | NDArray[np.float16],
    entry_format: str,
    scale_rule: str,
    global_scale: float = 1.0,
) -> QuantizedPlanes:
    """Quantize the last axis.

    Shapes:
        values ``[..., n]``; nibbles ``[..., n / 2]``; scales ``[..., n / block]``.
    """
    block = BLOCK[entry_format]
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], values.shape[-1] // block, block)
    is_nan: NDArray[np.bool_] = np.any(np.isnan(blocks), axis=-1)
    magnitudes = np.abs(np.where(is_nan[..., None], np.float32(0), blocks))
    amax = magnitudes.max(axis=-1, initial=0)
    g = np.float32(global_scale)
    with np.errstate(over="ignore", under="ignore"):
        if entry_format == "nvfp4":
            scales = nvfp4_scale(amax, scale_rule, g)
        else:
            scales = mxfp4_scale(amax, scale_rule)
        if scale_rule == "torchao":
            # By name: the reciprocal and the product are floats, each rounded.
            reciprocal = np.float32(1) / g / E4M3[scales].astype(np.float32)
            scaled = (magnitudes * reciprocal[..., None]).astype(np.float64)
        else:
            # The quotient by a power of two is exact; by an E4M3 scale it cannot round onto a
            # midpoint, because a midpoint times a scale has 7 bits and is itself a float.
            scaled = magnitudes.astype(np.float64) / scale_value(scales, entry_format)[..., None]
    codes = nearest_code(scaled, E2M1) + 8 * np.signbit(blocks)
    codes[is_nan] = 0
    scales[is_nan] = NAN_SCALE[entry_format]
    codes = codes.reshape(values.shape)
    return QuantizedPlanes(
        codes=(codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8),
        scales=scales,
        nan_blocks=int(is_nan.sum()),
        inf_values=int(np.isinf(blocks).sum()),
    )


def scale_value(scales: NDArray[np.uint8], entry_format: str) -> NDArray[np.float64]:
    """Return the value of each scale byte, NaN included."""
    return (E8M0_BYTES if entry_format == "mxfp4" else E4M3_BYTES)[scales]


def unpack(
    nibbles: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    entry_format: str,
    global_scale: float = 1.0,
) -> NDArray[np.float64]:
    """Return the exact values, NaN for a NaN block.

    Shapes:
        nibbles ``[..., n / 2]``; scales ``[..., n / block]``; result ``[..., n]``.
    """
    codes = np.stack([nibbles & 0xF, nibbles >> 4], axis=-1)
    elements = np.concatenate([E2M1, -E2M1])[codes]
    blocks = elements.reshape(*scales.shape, BLOCK[entry_format])
    factors = scale_value(scales, entry_format) * np.float64(np.float32(global_scale))
    return (blocks * factors[..., None]).reshape(*nibbles.shape[:-1], 2 * nibbles.shape[-1])


def narrow(values: NDArray[np.float64], dtype: str) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """Return the bits of exact values rounded once to ``dtype``, ties to even; NaN is quiet.

    Values of bfloat16 come as their bits too, because NumPy has no such type.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == "float32":
            wide = values.astype(np.float32).view(np.uint32)
            return np.where(np.isnan(values), np.uint32(0x7FC00000), wide)
        if dtype == "float16":
            half = values.astype(np.float16).view(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7E00), half)
        # A step of bfloat16 is 2**-7 of the power of two below, and never less than 2**-133.
        exponent = np.frexp(np.where(np.isfinite(values), values, 0))[1]
        step = np.exp2(np.maximum(exponent - 8, -133))
        rounded = (np.rint(values / step) * step).astype(np.float32).view(np.uint32) >> 16
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
