"""Literal vectors: what each number becomes is written here, not computed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.codec import native
from tests import fp8
from tests import numpy_fp8 as reference

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fp8.json").read_text())
TINY = 2.0**-149
F32_MAX = float(np.finfo(np.float32).max)
INF = math.inf
every_format = pytest.mark.parametrize("entry_format", [*native.FP8_FORMATS])


def f32_after(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(INF)))


def f32_before(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def packed_row(values: list[float], entry_format: str) -> tuple[list[int], float]:
    """Codes, and the scale as the number in the plane: a byte of mxfp8, a float of fp8."""
    row = np.zeros(32, np.float32)
    row[: len(values)] = values
    codes, scales = fp8.pack(row, entry_format)
    scale = scales if entry_format == "mxfp8" else scales.view("<f4")
    assert scale.shape == (1,)
    return codes.tolist(), float(scale[0])


ELEMENTS = [
    (0.0, 0), (TINY, 0), (2.0**-10, 0), (f32_after(2.0**-10), 1), (2.0**-9, 1),
    (3 * 2.0**-10, 2), (f32_before(3 * 2.0**-10), 1), (2.5 * 2.0**-9, 2), (6.5 * 2.0**-9, 6),
    (f32_before(7.5 * 2.0**-9), 7), (7.5 * 2.0**-9, 8), (2.0**-6, 8), (1.0625 * 2.0**-6, 8),
    (1.0, 0x38), (1.0625, 0x38), (f32_after(1.0625), 0x39), (1.125, 0x39), (1.1875, 0x3A),
    (f32_before(1.1875), 0x39), (1.9375, 0x40), (2.0, 0x40), (240.0, 0x77), (248.0, 0x78),
    (256.0, 0x78), (272.0, 0x78), (f32_after(272.0), 0x79), (416.0, 0x7D),
    (f32_before(432.0), 0x7D), (432.0, 0x7E), (448.0, 0x7E),
]  # fmt: skip
"""Magnitude of an element after division by its scale, and its code."""


@pytest.mark.parametrize(("value", "code"), ELEMENTS)
@pytest.mark.parametrize("sign", [1, -1])
@every_format
def test_an_element_takes_the_nearest_code_and_ties_the_even_one(
    entry_format: str, value: float, code: int, sign: int
) -> None:
    codes, scale = packed_row([sign * value, 448.0], entry_format)  # 448 makes the scale 1
    assert scale == {"mxfp8": 127, "fp8": 1.0}[entry_format]
    assert codes[:2] == [code + (0x80 if sign < 0 else 0), 0x7E]


MXFP8_SCALES = [
    # amax, the scale byte, and the code of amax
    (0.0, 0, 0),
    (TINY, 0, 0),
    (2.0**-136, 0, 1),
    (448 * 2.0**-127, 0, 0x7E),
    (f32_after(448 * 2.0**-127), 1, 0x76),
    (1.0, 119, 0x78),
    (1.5, 119, 0x7C),
    (1.75, 119, 0x7E),
    (f32_after(1.75), 120, 0x76),
    (f32_before(2.0), 120, 0x78),
    (448.0, 127, 0x7E),
    (f32_after(448.0), 128, 0x76),
    (512.0, 128, 0x78),
    (F32_MAX, 247, 0x78),
    (INF, 254, 0x7E),
    (math.nan, 255, 0),
]


@pytest.mark.parametrize(("amax", "scale", "code"), MXFP8_SCALES)
@pytest.mark.parametrize("sign", [1, -1])
def test_mxfp8_scale_of_one_amax(amax: float, scale: int, code: int, sign: int) -> None:
    sign_bit = 0x80 if sign < 0 and not math.isnan(amax) else 0
    assert packed_row([0.0, sign * amax], "mxfp8") == ([0, code + sign_bit, *[0] * 30], scale)


FP8_SCALES = [
    # amax, the scale, and the code of amax
    (0.0, 0.0, 0),
    (TINY, TINY, 0x38),  # the quotient rounds to 0, but the row is not zero
    (224 * TINY, TINY, 0x76),
    (225 * TINY, TINY, 0x76),
    (448 * TINY, TINY, 0x7E),
    (464 * TINY, TINY, 0x7E),
    (671 * TINY, TINY, 0x7E),  # a subnormal scale is coarse: this saturates
    (672 * TINY, 2 * TINY, 0x7A),  # 1.5 and then 336, both ties
    (448 * 2.0**-126, 2.0**-126, 0x7E),
    (1.0, 0.0022321429569274187, 0x7E),
    (448.0, 1.0, 0x7E),
    (f32_after(448.0), f32_after(1.0), 0x7E),
    (F32_MAX, 2396745 * 2.0**98, 0x7E),
    (INF, 2396745 * 2.0**98, 0x7E),
]


@pytest.mark.parametrize(("amax", "scale", "code"), FP8_SCALES)
@pytest.mark.parametrize("sign", [1, -1])
def test_fp8_scale_of_one_amax(amax: float, scale: float, code: int, sign: int) -> None:
    sign_bit = 0x80 if sign < 0 else 0
    assert packed_row([0.0, sign * amax], "fp8") == ([0, code + sign_bit, *[0] * 30], scale)


def test_the_largest_float_divided_by_448_is_a_float_and_comes_back() -> None:
    codes, scales = fp8.pack(np.array([F32_MAX, -F32_MAX], np.float32), "fp8")
    assert fp8.unpack(codes, scales, "fp8", dtype="float32").tolist() == [F32_MAX, -F32_MAX]


def test_nan_in_a_row_of_fp8_is_the_scale_7fc00000() -> None:
    codes, scales = fp8.pack(np.array([1.0, -math.nan, -INF], np.float32), "fp8")
    assert (codes.tobytes().hex(), scales.tobytes().hex()) == ("000000", "0000c07f")


def test_byte_0_of_an_mxfp8_scale_means_2_to_the_minus_127() -> None:
    codes = np.array([0x38, 0x7E, *[0] * 30], np.uint8)
    values = fp8.unpack(codes, np.zeros(1, np.uint8), "mxfp8", dtype="float32")
    assert values[:2].tolist() == [2.0**-127, 448 * 2.0**-127]


@pytest.mark.parametrize("case", GOLDEN["division"])
def test_fp8_rounds_the_exact_quotient(case: dict[str, float | int | str]) -> None:
    row = np.array([case["amax"], case["value"]], np.float32)
    codes, scales = fp8.pack(row, "fp8")
    assert (codes.tolist(), scales.tobytes().hex()) == ([0x7E, case["exact"]], case["scale"])
    in_float32 = (row / scales.view("<f4")).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert in_float32[1] == case["divided_in_float32"] != case["exact"]


@pytest.mark.parametrize("case", GOLDEN["vectors"], ids=lambda case: case["name"])
def test_golden_vectors_stay_what_they_are(case: dict[str, str]) -> None:
    values = np.array([float(text) for text in case["values"].split()], np.float32)
    codes, scales = fp8.pack(values, case["format"])
    assert (codes.tobytes().hex(), scales.tobytes().hex()) == (case["codes"], case["scales"])
    expected = reference.pack(values, case["format"])
    assert expected.codes.tobytes() == codes.tobytes()
    assert expected.scales.tobytes() == scales.tobytes()
    decoded = np.empty(values.shape, np.uint16)
    fp8.unpack(codes, scales, case["format"], out=decoded)
    assert decoded.astype(">u2").tobytes().hex() == case["bfloat16"]


# ml_dtypes as an outside judge of the element cast.


def all_patterns(dtype: type[np.generic]) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        values = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
        return values.astype(np.float32)


@every_format
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_elements_equal_ml_dtypes_for_every_16_bit_number_up_to_448(
    dtype: type[np.generic], entry_format: str
) -> None:
    values = all_patterns(dtype)
    values = values[np.abs(values) <= 448]
    rows = np.full((len(values), 32), 448, np.float32)  # 448 makes the scale 1
    rows[:, 0] = values
    codes, scales = fp8.pack(rows, entry_format)
    one = {"mxfp8": "7f", "fp8": "0000803f"}[entry_format]
    assert scales.tobytes().hex() == one * len(values)
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes[:, 0], expected)


def test_where_ml_dtypes_has_nan_above_464_kvstore_saturates() -> None:
    # Magnitudes up to 671 scales exist where the scale itself is the least float.
    multiples = np.arange(1, 672, dtype=np.float32)
    codes, scales = fp8.pack((multiples * np.float32(TINY))[:, None], "fp8")
    assert (scales == [1, 0, 0, 0]).all()
    theirs = multiples.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    differ = codes[:, 0] != theirs
    assert np.array_equal(differ, multiples > 464)
    assert (theirs[differ] == 0x7F).all()
    assert (codes[differ, 0] == 0x7E).all()
    infinite = np.array([INF, -INF, 448.0], np.float32)
    assert infinite.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist() == [0x7F, 0xFF, 0x7E]
    assert fp8.pack(infinite, "fp8")[0].tolist() == [0x7E, 0xFE, 0x7E]


def test_every_code_means_what_ml_dtypes_says() -> None:
    codes = np.arange(256).astype(np.uint8)
    one = np.array([0, 0, 0x80, 0x3F], np.uint8)
    found = fp8.unpack(codes, one, "fp8", dtype="float32")
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found)[codes % 0x80 < 0x7F], codes[codes % 0x80 < 0x7F] > 0x7F)
