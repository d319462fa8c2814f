"""Every 16-bit number, every scale byte and every nibble, against definitions in other words.

Packing in C rounds bits; the NumPy reference counts thresholds. Unpacking is compared with exact
fractions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.codec import native
from kvstore.layout import FORMATS, SCALE_RULES
from tests import numpy_fp4

pytestmark = pytest.mark.usefixtures("level")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RULES = [(name, rule) for name in native.FP4_FORMATS for rule in SCALE_RULES[name]]
GLOBAL_SCALES = {"torchao": [1.0, 0.37, 2.0**-9, 3.0e4]}

every_dtype = pytest.mark.parametrize("dtype", [*DTYPES])
every_rule = pytest.mark.parametrize(("entry_format", "rule"), RULES)


def patterns(dtype: str) -> NDArray[np.uint16]:
    return np.arange(65536, dtype=np.uint32).astype(np.uint16)


def in_blocks(bits: NDArray[np.uint16], block: int) -> NDArray[np.uint16]:
    return np.pad(bits, (0, -len(bits) % block)).reshape(-1, block)


def assert_packs_as_the_reference(
    bits: NDArray[np.uint16] | NDArray[np.float32], dtype: str, entry_format: str, rule: str
) -> None:
    """Compare bytes and counts of blocks given as bit patterns."""
    values = bits if dtype == "float32" else bits.view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    for global_scale in GLOBAL_SCALES.get(rule, [1.0]):
        stats = fp4.PackStats()
        nibbles, scales = fp4.pack(
            values, entry_format, scale_rule=rule, global_scale=global_scale, stats=stats
        )
        expected = numpy_fp4.pack(wide, entry_format, rule, global_scale)
        assert np.array_equal(scales, expected.scales)
        assert np.array_equal(nibbles, expected.codes)
        assert stats == fp4.PackStats(expected.nan_blocks, expected.inf_values)


@every_dtype
@every_rule
def test_every_pattern_as_the_largest_of_its_block(
    dtype: str, entry_format: str, rule: str
) -> None:
    block = FORMATS[entry_format].scale_block
    bits = patterns(dtype)
    # Magnitudes order as their bits do: element k is a k-th of the bits of the largest.
    shares = np.arange(block, dtype=np.uint32)
    smaller = ((bits & 0x7FFF).astype(np.uint32)[:, None] * shares // (block - 1)).astype(np.uint16)
    blocks: NDArray[np.uint16] = smaller | ((shares % 2) << 15).astype(np.uint16)
    blocks[np.arange(65536), np.arange(65536) % block] = bits
    assert_packs_as_the_reference(blocks, dtype, entry_format, rule)


@every_dtype
@every_rule
def test_every_pattern_as_an_element_under_many_scales(
    dtype: str, entry_format: str, rule: str
) -> None:
    block = FORMATS[entry_format].scale_block
    bits = patterns(dtype)
    magnitudes = bits & 0x7FFF
    # Bits of the largest element: every exponent and mantissa there is, 1 in 167 of them.
    for amax in range(64, 0x7C00 if dtype == "float16" else 0x7F80, 167):
        reach = 0x1800 if dtype == "float16" else 0x0300  # below 1/64 of amax all codes are 0
        inside = bits[(magnitudes <= amax) & (magnitudes + reach > amax)]
        blocks = in_blocks(inside[:: 4 if dtype == "float16" else 1], block - 1)
        largest = np.full((len(blocks), 1), amax, np.uint16)
        assert_packs_as_the_reference(np.hstack([largest, blocks]), dtype, entry_format, rule)


@every_dtype
@every_rule
@pytest.mark.parametrize("finite", [True, False])
def test_every_pattern_in_random_company(
    dtype: str, entry_format: str, rule: str, finite: bool
) -> None:
    rng = np.random.default_rng(1)
    bits = patterns(dtype)
    if finite:
        with np.errstate(invalid="ignore"):
            bits = bits[np.isfinite(bits.view(DTYPES[dtype]).astype(np.float32))]
    blocks = in_blocks(rng.permutation(bits), FORMATS[entry_format].scale_block)
    assert_packs_as_the_reference(blocks, dtype, entry_format, rule)
    # In order, so that a block holds neighbours and all of it counts.
    assert_packs_as_the_reference(
        in_blocks(bits, FORMATS[entry_format].scale_block), dtype, entry_format, rule
    )


@every_rule
def test_float32_near_every_threshold_under_every_scale(entry_format: str, rule: str) -> None:
    block = FORMATS[entry_format].scale_block
    codes = np.arange(0xFF if entry_format == "mxfp4" else 0x7F).astype(np.uint8)
    scales = numpy_fp4.scale_value(codes, entry_format)
    # Magnitudes on and beside the midpoints, in both signs, then the largest.
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1.5, 3.0])
    for largest in (6.0, 5.5, 4.5, 7.0):
        with np.errstate(over="ignore"):
            centres = (scales[:, None] * midpoints).astype(np.float32)
        for step in (-1, 0, 1):
            ulps = (centres.view(np.int32) + step).clip(0, 0x7F7FFFFF).astype(np.int32)
            blocks = np.zeros((len(scales), block), np.float32)
            blocks[:, : len(midpoints)] = ulps.view(np.float32)
            blocks[:, 1::2] *= -1
            blocks[:, 15] = np.minimum(scales * largest, np.finfo(np.float32).max)
            assert_packs_as_the_reference(blocks, "float32", entry_format, rule)


@every_rule
def test_random_float32_bits(entry_format: str, rule: str) -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, (4096, 64), np.uint32)
    # Most blocks of such bits hold a NaN; in the other half no exponent is the largest.
    bits[::2] &= 0xBFFFFFFF
    assert_packs_as_the_reference(bits.view(np.float32), "float32", entry_format, rule)


# Unpacking, as exact fractions.

E2M1 = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
NARROW = {  # precision in bits, exponent of the least normal number, quiet NaN
    "float32": (24, -126, 0x7FC00000),
    "float16": (11, -14, 0x7E00),
    "bfloat16": (8, -126, 0x7FC0),
}
LARGEST = {"float32": 128, "float16": 16, "bfloat16": 128}
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def scale_fraction(entry_format: str, byte: int) -> Fraction | None:
    if entry_format == "mxfp4":
        return None if byte == 255 else Fraction(2) ** (byte - 127)
    exponent, fraction = byte >> 3 & 15, byte & 7
    if (exponent, fraction) == (15, 7):
        return None
    magnitude = (
        Fraction(8 + fraction) * Fraction(2) ** (exponent - 10)
        if exponent
        else Fraction(fraction, 512)
    )
    return -magnitude if byte & 0x80 else magnitude


def rounded_bits(value: Fraction, negative: bool, dtype: str) -> int:
    """Bits of a fraction rounded once; Python's round() takes ties to the even number."""
    precision, least, _ = NARROW[dtype]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), least)
    quantum = Fraction(2) ** (exponent - precision + 1)
    nearest = round(size / quantum) * quantum
    number = float("inf") if nearest >= Fraction(2) ** LARGEST[dtype] else float(nearest)
    number = -number if negative else number
    if dtype == "float16":
        return int(struct.unpack("<H", struct.pack("<e", number))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", number))[0])
    return bits if dtype == "float32" else bits >> 16


def expected_bits(entry_format: str, byte: int, dtype: str, g: Fraction) -> Iterator[int]:
    scale = scale_fraction(entry_format, byte)
    for code in range(16):
        if scale is None:
            yield NARROW[dtype][2]
            continue
        negative = bool(code & 8) != (entry_format == "nvfp4" and byte >= 0x80)
        yield rounded_bits(E2M1[code & 7] * scale * g, negative, dtype)


@pytest.mark.parametrize("dtype", [*NARROW])
@pytest.mark.parametrize(
    ("entry_format", "global_scale"),
    [("mxfp4", 1.0), ("nvfp4", 1.0), ("nvfp4", 0.37), ("nvfp4", 2.0**-14), ("nvfp4", 2.0**99)],
)
def test_every_scale_byte_times_every_nibble_is_the_exact_product_rounded_once(
    entry_format: str, global_scale: float, dtype: str
) -> None:
    if dtype == "float16" and global_scale == 2.0**99:
        global_scale = 3.1e-5  # products that are subnormal halves
    block = FORMATS[entry_format].scale_block
    row = np.resize(np.arange(0, 16, 2) + 16 * np.arange(1, 16, 2), block // 2).astype(np.uint8)
    scales = np.arange(256).astype(np.uint8)[:, None]
    out = np.empty((256, block), "uint16" if dtype == "bfloat16" else dtype)
    fp4.unpack(
        np.tile(row, (256, 1)),
        scales,
        entry_format,
        dtype=dtype,
        out=out,
        global_scale=global_scale,
    )
    g = Fraction(float(np.float32(global_scale)))
    expected = [list(expected_bits(entry_format, byte, dtype, g)) for byte in range(256)]
    assert np.array_equal(out.view(BITS[dtype])[:, :16], np.array(expected, BITS[dtype]))
    assert np.array_equal(out.view(BITS[dtype])[:, 16:], out.view(BITS[dtype])[:, : block - 16])
    reference = numpy_fp4.unpack(np.tile(row, (256, 1)), scales, entry_format, global_scale)
    assert np.array_equal(numpy_fp4.narrow(reference, dtype), out.view(BITS[dtype]))


@pytest.mark.parametrize(("entry_format", "rule"), [r for r in RULES if r[1] != "rceil"])
def test_packing_what_was_unpacked_gives_the_same_bytes(entry_format: str, rule: str) -> None:
    # Not so under rceil: a block may fit a smaller scale without loss.
    rng = np.random.default_rng(3)
    values = rng.standard_normal((512, 64)).astype(np.float32)
    packed = fp4.pack(values, entry_format, scale_rule=rule)
    decoded = fp4.unpack(*packed, entry_format, dtype="float32")
    again = fp4.pack(decoded, entry_format, scale_rule=rule)
    assert packed[0].tobytes() == again[0].tobytes()
    assert packed[1].tobytes() == again[1].tobytes()
