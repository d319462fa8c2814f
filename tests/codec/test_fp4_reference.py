"""The NumPy reference that the kernels are compared with, beside the words of docs/format.md.

The reference counts midpoints; here distances are compared, and scales are sought among all there
are. Everything in float64, which holds each number exactly that decides.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.layout import SCALE_RULES
from tests import numpy_fp4

Numbers = NDArray[np.float64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3: Numbers = np.arange(127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
POWERS = 2.0 ** np.arange(-127, 128)

every_dtype = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])


def magnitudes(dtype: type[np.generic]) -> NDArray[np.float32]:
    """All finite ones of 16 bits, in order."""
    with np.errstate(invalid="ignore"):
        found = np.arange(0x8000).astype(np.uint16).view(dtype).astype(np.float32)
    return found[np.isfinite(found)]


def nearest(numbers: Numbers, table: Numbers) -> NDArray[np.int64]:
    """The code of the nearest value, and of two that are equally near the even one."""
    distance = np.abs(np.minimum(numbers, table[-1])[:, None] - table)
    is_nearest = distance == distance.min(axis=1, keepdims=True)
    even_first = np.where(np.arange(len(table)) % 2 == 0, 2, 1)
    found: NDArray[np.int64] = (is_nearest * even_first).argmax(axis=1)
    return found


@every_dtype
def test_v41_takes_the_scale_that_is_nearest_to_a_sixth_of_amax(dtype: type[np.generic]) -> None:
    amax = magnitudes(dtype)
    found = numpy_fp4.nvfp4_scale(amax, "v41", np.float32(1))
    least = np.maximum(amax.astype(np.float64), 6 * 2.0**-9)
    assert np.array_equal(found, nearest(least, 6 * E4M3))


@every_dtype
@pytest.mark.parametrize("rule", SCALE_RULES["mxfp4"])
def test_mx_rules_take_the_power_that_they_are_defined_by(
    rule: str, dtype: type[np.generic]
) -> None:
    amax = magnitudes(dtype)
    wide = amax.astype(np.float64)[:, None]
    if rule == "rceil":  # the least scale of which six reach amax
        expected = (wide > 6 * POWERS).sum(axis=1)
    else:  # the largest scale of which four, or three and a half, do not exceed it
        expected = (wide >= (4 if rule == "floor" else 3.5) * POWERS).sum(axis=1) - 1
    found = numpy_fp4.mxfp4_scale(amax, rule)
    assert np.array_equal(found, np.maximum(expected, 0))


@every_dtype
@pytest.mark.parametrize(
    ("entry_format", "rule", "largest"),
    [
        *(("nvfp4", "v41", 6 * E4M3[code]) for code in (0x01, 0x07, 0x0B, 0x38, 0x3D, 0x55, 0x7E)),
        *(("mxfp4", "floor", 6 * POWERS[code]) for code in (0, 1, 100, 127, 130, 141)),
    ],
)
def test_an_element_is_the_nearest_multiple_of_its_scale(
    entry_format: str, rule: str, largest: float, dtype: type[np.generic]
) -> None:
    block = numpy_fp4.BLOCK[entry_format]
    numbers = magnitudes(dtype)
    numbers = numbers[numbers <= largest]
    blocks = np.full((len(numbers), block), np.float32(largest))
    blocks[:, 1] = numbers
    packed = numpy_fp4.pack(blocks, entry_format, rule)
    scale = numpy_fp4.scale_value(packed.scales, entry_format)[0, 0]
    assert scale == largest / 6
    assert np.array_equal(packed.codes[:, 0] >> 4, nearest(numbers.astype(float), scale * E2M1))
