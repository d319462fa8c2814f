"""The error that packing measures: what an independent sum in float64 finds, at every level."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.codec import native, quantized
from kvstore.layout import SCALE_RULES

pytestmark = pytest.mark.usefixtures("level")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = [*native.FP4_FORMATS, *native.FP8_FORMATS]
every_kind = pytest.mark.parametrize("dtype", DTYPES)
every_format = pytest.mark.parametrize("entry_format", FORMATS)


def kernel(entry_format: str) -> quantized.Kernel:
    return quantized.Kernel(entry_format, SCALE_RULES[entry_format][0])


def measured(values: NDArray[np.generic], entry_format: str) -> quantized.PackStats:
    stats = quantized.PackStats(is_measured=True)
    quantized.pack(values, kernel(entry_format), stats=stats)
    return stats


def expected(values: NDArray[np.generic], entry_format: str, dtype: str) -> tuple[float, float]:
    codes, scales = quantized.pack(values, kernel(entry_format))
    unpacked = quantized.unpack(codes, scales, kernel(entry_format), dtype=dtype)
    wide = values.astype(np.float64)
    return float(np.square(unpacked.astype(np.float64) - wide).sum()), float(np.square(wide).sum())


@every_format
@every_kind
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (5, 96), (2, 4096 + 512 + 32), (40, 512)])
def test_both_sums_are_those_of_float64(
    entry_format: str, dtype: str, shape: tuple[int, int]
) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(DTYPES[dtype])
    stats = measured(values, entry_format)
    difference, value = expected(values, entry_format, dtype)
    assert stats.squared_error == pytest.approx(difference, rel=1e-5)
    assert stats.squared_values == pytest.approx(value, rel=1e-5)
    assert stats.relative_error == pytest.approx((difference / value) ** 0.5, rel=1e-5)


@every_format
@every_kind
@pytest.mark.parametrize("power", [-38, -30, -20, -12, 0, 15, 20, 30, 37])
def test_no_magnitude_overflows_or_vanishes(entry_format: str, dtype: str, power: int) -> None:
    values = np.random.default_rng(2).standard_normal((4, 64)) * 10.0**power
    limit = 60_000 if dtype == "float16" else 3e38
    array = np.clip(values, -limit, limit).astype(DTYPES[dtype])
    stats = measured(array, entry_format)
    difference, value = expected(array, entry_format, dtype)
    assert stats.squared_values == pytest.approx(value, rel=1e-5)
    assert stats.squared_error == pytest.approx(difference, rel=1e-5)


@every_kind
def test_one_far_value_is_seen_wherever_it_lies(dtype: str) -> None:
    for place in (0, 15, 16, 31, 511, 512, 4095, 4096, 4671):
        values = np.zeros((1, 4672), DTYPES[dtype])
        values[0, place] = 1.25
        stats = measured(values, "mxfp4")
        assert (stats.squared_error, stats.squared_values) == (0.0625, 1.5625)


@every_format
@every_kind
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_error(entry_format: str, dtype: str, odd: float) -> None:
    values = np.ones((3, 1024), DTYPES[dtype])
    values[1, 517] = odd
    assert np.isnan(measured(values, entry_format).relative_error)


@every_format
def test_zeros_and_nothing_lose_nothing(entry_format: str) -> None:
    assert measured(np.zeros((3, 64), np.float32), entry_format).relative_error == 0
    assert measured(np.zeros((0, 64), np.float32), entry_format).relative_error == 0


@every_format
def test_measuring_changes_no_byte_and_no_count(entry_format: str) -> None:
    values = np.random.default_rng(3).standard_normal((7, 4704)).astype(np.float32)
    values[2, 33], values[5, 4700] = np.nan, np.inf
    plain, stats = quantized.PackStats(), quantized.PackStats(is_measured=True)
    before = quantized.pack(values, kernel(entry_format), stats=plain)
    after = quantized.pack(values, kernel(entry_format), stats=stats)
    assert [plane.tobytes() for plane in before] == [plane.tobytes() for plane in after]
    assert (plain.nan_blocks, plain.inf_values) == (stats.nan_blocks, stats.inf_values) == (1, 1)
    assert plain.squared_values == 0
