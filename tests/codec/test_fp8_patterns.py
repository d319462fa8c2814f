"""Every 16-bit number, every scale byte and every code, against definitions in other words.

Packing in C divides and rounds bits; the NumPy reference counts thresholds. Unpacking is compared
with exact products in float64.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.codec import native, torch_decode
from tests import fp8, numpy_fp4
from tests import numpy_fp8 as reference

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = [*native.FP8_FORMATS]
TARGETS = ["float32", "float16", "bfloat16"]
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
F32_MAX = np.finfo(np.float32).max
CODES = np.arange(256).astype(np.uint8)
with np.errstate(invalid="ignore"):
    ELEMENTS = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
"""What each code means, according to ml_dtypes."""

every_dtype = pytest.mark.parametrize("dtype", [*DTYPES])
every_format = pytest.mark.parametrize("entry_format", FORMATS)
every_target = pytest.mark.parametrize("target", TARGETS)


def patterns() -> NDArray[np.uint16]:
    return np.arange(65536, dtype=np.uint32).astype(np.uint16)


def in_rows(bits: NDArray[np.uint16], length: int) -> NDArray[np.uint16]:
    return np.pad(bits, (0, -len(bits) % length)).reshape(-1, length)


def assert_packs_as_the_reference(
    bits: NDArray[np.uint16] | NDArray[np.float32], dtype: str, entry_format: str
) -> None:
    """Compare bytes and counts of rows given as bit patterns."""
    values = bits if dtype == "float32" else bits.view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    stats = fp8.PackStats()
    codes, scales = fp8.pack(values, entry_format, stats=stats)
    expected = reference.pack(wide, entry_format)
    assert np.array_equal(scales, expected.scales)
    assert np.array_equal(codes, expected.codes)
    assert stats == fp8.PackStats(expected.nan_blocks, expected.inf_values)


@every_dtype
@every_format
def test_every_pattern_as_the_largest_of_its_row(dtype: str, entry_format: str) -> None:
    length = 32 if entry_format == "mxfp8" else 8
    bits = patterns()
    # Magnitudes order as their bits do: element k is a k-th of the bits of the largest.
    shares = np.arange(length, dtype=np.uint32)
    smaller = ((bits & 0x7FFF).astype(np.uint32)[:, None] * shares // (length - 1)).astype(
        np.uint16
    )
    rows: NDArray[np.uint16] = smaller | ((shares % 2) << 15).astype(np.uint16)
    rows[np.arange(65536), np.arange(65536) % length] = bits
    assert_packs_as_the_reference(rows, dtype, entry_format)


@every_dtype
@every_format
def test_every_pattern_as_an_element_under_many_scales(dtype: str, entry_format: str) -> None:
    bits = patterns()
    magnitudes = bits & 0x7FFF
    # Bits of the largest element, from the least subnormal to the last finite number.
    last = 0x7BFF if dtype == "float16" else 0x7F7F
    for amax in [1, 2, 3, 127, *range(223, last, 613), last]:
        inside = bits[magnitudes <= amax]
        if entry_format == "mxfp8":
            rows = in_rows(inside[amax % 3 :: 3], 31)
            rows = np.hstack([np.full((len(rows), 1), amax, np.uint16), rows])
        else:
            rows = np.append(inside, np.uint16(amax))[None]
        assert_packs_as_the_reference(rows, dtype, entry_format)


@every_dtype
@every_format
@pytest.mark.parametrize("finite", [True, False])
def test_every_pattern_in_random_company(dtype: str, entry_format: str, finite: bool) -> None:
    bits = patterns()
    if finite:
        with np.errstate(invalid="ignore"):
            bits = bits[np.isfinite(bits.view(DTYPES[dtype]).astype(np.float32))]
    for rows in (np.random.default_rng(1).permutation(bits), bits):  # in order: neighbours
        assert_packs_as_the_reference(in_rows(rows, 32), dtype, entry_format)


def scales_to_try() -> NDArray[np.float32]:
    """Floats of every kind as scales: powers of two, odd ones, subnormal and huge ones."""
    random = np.random.default_rng(4).integers(0, 119 + 127, 150) << 23
    random |= np.random.default_rng(5).integers(0, 1 << 23, 150)
    known = [2.0**e for e in range(-149, 120, 8)] + [3 * 2.0**-149, 1 / 3, 1.0000001, F32_MAX / 448]
    return np.concatenate([random.astype(np.uint32).view(np.float32), np.array(known, np.float32)])


MIDPOINTS = (ELEMENTS[:0x7E] + ELEMENTS[1:0x7F]) / 2


@every_format
def test_float32_near_every_threshold_under_many_scales(entry_format: str) -> None:
    if entry_format == "mxfp8":
        scales = (2.0 ** np.arange(-127.0, 120)).astype(np.float32)
    else:
        scales = scales_to_try()
    # Magnitudes on and beside the midpoints, in both signs, with a largest that gives the scale.
    centres = (scales[:, None].astype(np.float64) * MIDPOINTS).astype(np.float32)
    largest = np.minimum(scales[:, None] * np.float64(448), F32_MAX).astype(np.float32)
    for step in (-1, 0, 1):
        ulps = (centres.view(np.int32) + step).clip(0, 0x7F7FFFFF).astype(np.int32)
        near = np.minimum(ulps.view(np.float32), largest) * np.array([1, -1] * 63, np.float32)
        if entry_format == "mxfp8":
            near = np.pad(near, ((0, 0), (0, 29))).reshape(-1, 31)
            top = np.repeat(largest, 5, axis=0)
            rows = np.hstack([near, top])
            expected = np.repeat(np.log2(scales) + 127, 5)
            assert np.array_equal(fp8.pack(rows, "mxfp8")[1][:, 0], expected.astype(np.uint8))
        else:
            rows = np.hstack([near, largest])
        assert_packs_as_the_reference(rows, "float32", entry_format)


def test_an_element_of_fp8_is_the_exact_quotient_rounded_once() -> None:
    """Dividing in float32 first would round some quotients onto a tie and then the wrong way."""
    scales = scales_to_try()
    scales = scales[scales > 2.0**-100]
    centres = (scales[:, None].astype(np.float64) * MIDPOINTS).astype(np.float32)
    rows = np.hstack([centres, scales[:, None] * np.float32(448)])
    codes, found = fp8.pack(rows, "fp8")
    factors = found.view("<f4")
    with np.errstate(invalid="ignore"):
        divided = np.minimum(rows / factors, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (codes != divided).sum() > 100
    assert np.array_equal(codes, reference.pack(rows, "fp8").codes)
    # And the code is the nearest: no other is closer to the exact quotient.
    exact = rows[..., None].astype(np.float64)
    distances = np.abs(exact - ELEMENTS[:0x7F] * factors[..., None].astype(np.float64))
    assert np.array_equal(np.abs(distances.min(-1)), np.take_along_axis(
        distances, codes[..., None].astype(np.int64), -1)[..., 0])  # fmt: skip


@every_format
def test_random_float32_bits(entry_format: str) -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, (4096, 64), np.uint32)
    # Most rows of such bits hold a NaN; in the other half no exponent is the largest.
    bits[::2] &= 0xBFFFFFFF
    assert_packs_as_the_reference(bits.view(np.float32), "float32", entry_format)


def test_the_scale_of_fp8_is_the_float32_quotient_for_every_exponent_and_many_fractions() -> None:
    fractions = np.r_[0:0x800000:70001, 0x7FFFFF, 1, 0x600000, 0x600001]
    bits = (np.arange(255)[:, None] << 23) | fractions
    amax = bits.astype(np.uint32).view(np.float32).reshape(-1, 1)
    found = fp8.pack(amax, "fp8")[1].view("<f4")
    with np.errstate(under="ignore"):
        quotient = amax / np.float32(448)
    least = np.where(amax > 0, np.float32(2.0**-149), np.float32(0))
    assert np.array_equal(found, np.maximum(quotient, least))


def test_the_scale_of_mxfp8_is_the_least_power_of_two_that_does_not_saturate() -> None:
    fractions = np.r_[0:0x800000:70001, 0x7FFFFF, 1, 0x5FFFFF, 0x600000, 0x600001]
    bits = (np.arange(255)[:, None] << 23) | fractions
    amax = bits.astype(np.uint32).view(np.float32).reshape(-1)
    rows = np.zeros((len(amax), 32), np.float32)
    rows[:, 7] = amax
    codes, scales = fp8.pack(rows, "mxfp8")
    scale = 2.0 ** (scales[:, 0].astype(np.float64) - 127)
    assert (amax <= 448 * scale).all()
    assert ((amax > 224 * scale) | (scales[:, 0] == 0)).all()
    largest = amax > 448 * scale * 0.97
    assert (codes[largest, 7] == 0x7E).all()


# Unpacking, as exact products.


def expected_bits(exact: NDArray[np.float64], target: str) -> NDArray[np.generic]:
    """Bits of float64 numbers rounded once, by rint to the step of each; NaN is the quiet one."""
    nan = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[target]
    precision, least = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[target]
    exponent = np.frexp(np.where(np.isfinite(exact), exact, 0))[1]
    step = np.exp2(np.maximum(exponent - precision, least).astype(np.float64))
    rounded = np.where(np.isfinite(exact), np.rint(exact / step) * step, exact)
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "float16":
            bits: NDArray[np.generic] = rounded.astype(np.float16).view(np.uint16)
        else:
            wide = rounded.astype(np.float32).view(np.uint32)
            bits = wide if target == "float32" else (wide >> 16).astype(np.uint16)
    return np.where(np.isnan(exact), np.array(nan, BITS[target]), bits)


def assert_unpacks_exactly(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    factors: NDArray[np.float64],
    entry_format: str,
    target: str,
) -> None:
    """Compare kernel, reference and torch operations with code times factor, rounded once."""
    with np.errstate(invalid="ignore"):
        expected = expected_bits(ELEMENTS[codes] * factors, target)
    out = np.empty(codes.shape, "uint16" if target == "bfloat16" else target)
    fp8.unpack(codes, scales, entry_format, dtype=target, out=out)
    assert np.array_equal(out.view(BITS[target]), expected)
    exact = reference.unpack(codes, scales, entry_format)
    assert np.array_equal(numpy_fp4.narrow(exact, target), expected)
    by_torch = torch_decode.unpack_fp8(
        torch.from_numpy(codes), torch.from_numpy(scales), entry_format, target
    )
    assert by_torch.view(torch.uint8).numpy().tobytes() == expected.tobytes()


@every_target
def test_every_mxfp8_scale_byte_times_every_code(target: str) -> None:
    codes = np.tile(CODES, (256, 1))
    scales = np.tile(CODES[:, None], (1, 8))
    factors = np.append(2.0 ** np.arange(-127, 128), np.nan)[:, None]
    assert_unpacks_exactly(codes, scales, factors, "mxfp8", target)


@every_target
def test_every_kind_of_fp8_scale_times_every_code(target: str) -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 2000, np.uint32)
    odd = np.array([0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
                    0x7FFFFFFF], np.uint32)  # fmt: skip
    bits = np.concatenate([odd, odd | 0x80000000, np.arange(256, dtype=np.uint32) << 24, bits])
    scales = bits.astype("<u4").view(np.uint8).reshape(-1, 4)
    with np.errstate(invalid="ignore"):
        factors = bits.view(np.float32).astype(np.float64)[:, None]
    codes = np.tile(CODES, (len(bits), 1))
    assert_unpacks_exactly(codes, scales, factors, "fp8", target)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_a_product_is_not_rounded_to_float32_first(target: str) -> None:
    # Products of 28 bits that a float32 would put on a tie of the target, from either side.
    precision = {"float16": 11, "bfloat16": 8}[target]
    kept = np.arange(1 << (precision - 1), 1 << precision, dtype=np.int64)[:, None]
    tie = (2 * kept + 1) << (28 - precision - 1)
    near = (tie + np.array([*range(-7, 0), *range(1, 8)])).flatten()
    significands = near[near % 15 == 0] // 15
    significands = significands[(significands >= 1 << 23) & (significands < 1 << 24)]
    assert len(significands) > 50
    factors = np.ldexp(significands.astype(np.float64), -23)
    codes = np.full((len(factors), 1), 0x3F, np.uint8)  # 1.875, which is 15 eighths
    twice = expected_bits((1.875 * factors).astype(np.float32).astype(np.float64), target)
    assert (twice != expected_bits(1.875 * factors, target)).sum() > 20
    scales = factors.astype("<f4").view(np.uint8).reshape(-1, 4)
    assert_unpacks_exactly(codes, scales, factors[:, None], "fp8", target)
    assert_unpacks_exactly(codes ^ np.uint8(0x80), scales, factors[:, None], "fp8", target)
