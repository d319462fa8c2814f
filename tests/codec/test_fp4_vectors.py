"""Literal vectors: what each number becomes is written here, not computed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.layout import SCALE_RULES
from tests import numpy_fp4

pytestmark = pytest.mark.usefixtures("level")

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fp4.json").read_text())
TINY = 2.0**-149
F32_MAX = float(np.finfo(np.float32).max)
INF = math.inf


def f32_after(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(INF)))


def f32_before(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def packed_block(values: list[float], entry_format: str, rule: str) -> tuple[list[int], list[int]]:
    """Nibbles one by one, and scales, of values padded with zeros to one block.

    Every dtype that holds the values has to agree.
    """
    block = np.zeros({"nvfp4": 16, "mxfp4": 32}[entry_format], np.float32)
    block[: len(values)] = values
    nibbles, scales = fp4.pack(block, entry_format, scale_rule=rule)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            narrow = block.astype(dtype)
        if np.array_equal(narrow.astype(np.float32), block, equal_nan=True):
            again = fp4.pack(narrow, entry_format, scale_rule=rule)
            assert all(map(np.array_equal, again, (nibbles, scales)))
    return [code for byte in nibbles.tolist() for code in (byte & 15, byte >> 4)], scales.tolist()


ELEMENTS = [
    (0.0, 0), (TINY, 0), (0.24999999, 0), (0.25, 0),
    (f32_after(0.25), 1), (0.5, 1), (0.74999994, 1),
    (0.75, 2), (1.0, 2), (1.2499999, 2), (1.25, 2),
    (f32_after(1.25), 3), (1.5, 3), (1.7499999, 3),
    (1.75, 4), (1.7500001, 4), (2.0, 4), (2.4999998, 4), (2.5, 4),
    (f32_after(2.5), 5), (3.0, 5), (3.4999998, 5),
    (3.5, 6), (3.5000002, 6), (4.0, 6), (4.9999995, 6), (5.0, 6),
    (f32_after(5.0), 7), (6.0, 7), (6.0000005, 7), (7.0, 7),
]  # fmt: skip
"""Magnitude of an element after division by its scale, and its code."""


@pytest.mark.parametrize(("value", "code"), ELEMENTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_element_takes_the_nearest_code_and_ties_the_even_one(
    value: float, code: int, sign: int
) -> None:
    # The second element, 6, makes the scale 1 under the rule floor, even beside values below 8.
    nibbles, scales = packed_block([sign * value, 6.0], "mxfp4", "floor")
    assert scales == [127]
    assert nibbles[:2] == [code + (8 if sign < 0 else 0), 7]
    if value <= 6:
        nibbles, scales = packed_block([sign * value, 6.0], "nvfp4", "v41")
        assert scales == [0x38]
        assert nibbles[:2] == [code + (8 if sign < 0 else 0), 7]


@pytest.mark.parametrize("value", [1e9, INF])
@pytest.mark.parametrize("rule", SCALE_RULES["nvfp4"])
def test_what_no_scale_can_reach_saturates(value: float, rule: str) -> None:
    nibbles, scales = packed_block([value, -value, 1.0], "nvfp4", rule)
    assert (nibbles[:3], scales) == ([7, 15, 0], [0x7E])


MX_SCALES = [
    # amax, then the scale byte and the nibble of amax under floor, even and rceil
    (0.0, (0, 0, 0), (0, 0, 0)),
    (TINY, (0, 0, 0), (0, 0, 0)),
    (2.0**-125, (0, 0, 0), (6, 6, 6)),
    (2.0**-124, (1, 1, 1), (6, 6, 6)),
    (1.0, (125, 125, 125), (6, 6, 6)),
    (1.25, (125, 125, 125), (6, 6, 6)),
    (1.5, (125, 125, 125), (7, 7, 7)),
    (f32_after(1.5), (125, 125, 126), (7, 7, 5)),
    (f32_before(1.75), (125, 125, 126), (7, 7, 5)),
    (1.75, (125, 126, 126), (7, 6, 6)),
    (f32_before(2.0), (125, 126, 126), (7, 6, 6)),
    (6.0, (127, 127, 127), (7, 7, 7)),
    (f32_after(6.0), (127, 127, 128), (7, 7, 5)),
    (7.0, (127, 128, 128), (7, 6, 6)),
    (7.5, (127, 128, 128), (7, 6, 6)),
    (8.0, (128, 128, 128), (6, 6, 6)),
    (F32_MAX, (252, 253, 253), (7, 6, 6)),
    (INF, (253, 253, 254), (7, 7, 7)),
    (math.nan, (255, 255, 255), (0, 0, 0)),
]


@pytest.mark.parametrize(("amax", "scales", "codes"), MX_SCALES)
@pytest.mark.parametrize(("column", "rule"), [*enumerate(SCALE_RULES["mxfp4"])])
def test_mxfp4_scale_of_one_amax(
    amax: float, scales: tuple[int, ...], codes: tuple[int, ...], column: int, rule: str
) -> None:
    nibbles, found = packed_block([0.0, amax], "mxfp4", rule)
    assert found == [scales[column]]
    assert nibbles == [0, codes[column], *[0] * 30]


NV_SCALES = [
    # amax, then the scale code under v41 and torchao
    (0.0, 0x01, 0x08),
    (6 * 2.0**-10, 0x01, 0x08),
    (6 * 2.0**-9, 0x01, 0x08),
    (6 * 2.0**-7, 0x04, 0x08),
    (6 * 2.0**-6, 0x08, 0x08),
    (1.0, 0x23, 0x23),
    (3.0, 0x30, 0x30),
    (6.0, 0x38, 0x38),
    (6.375, 0x38, 0x38),  # a tie, to the even code
    (6.38, 0x39, 0x39),
    (2688.0, 0x7E, 0x7E),
    (2700.0, 0x7E, 0x7E),
    (1e9, 0x7E, 0x7E),
    (INF, 0x7E, 0x7E),
    (math.nan, 0x7F, 0x7F),
]


@pytest.mark.parametrize(("amax", "v41", "torchao"), NV_SCALES)
def test_nvfp4_scale_of_one_amax(amax: float, v41: int, torchao: int) -> None:
    assert packed_block([0.0, -amax], "nvfp4", "v41")[1] == [v41]
    assert packed_block([0.0, -amax], "nvfp4", "torchao")[1] == [torchao]


def test_byte_0_of_an_mxfp4_scale_means_2_to_the_minus_127() -> None:
    nibbles = np.full(16, 0x72, np.uint8)  # 1 and 6
    values = fp4.unpack(nibbles, np.zeros(1, np.uint8), "mxfp4", dtype="float32")
    assert values[:2].tolist() == [2.0**-127, 6 * 2.0**-127]
    repacked = fp4.pack(values, "mxfp4", scale_rule="floor")
    assert (repacked[0].tolist(), repacked[1].tolist()) == (nibbles.tolist(), [0])


def test_v41_divides_by_its_scale() -> None:
    # In these cases the quotient is a tie, and the product with the rounded reciprocal is not.
    for case in GOLDEN["division"]:
        amax, value = case["amax"], case["value"]
        nibbles, scales = packed_block([amax, value], "nvfp4", "v41")
        assert (scales, nibbles[1]) == ([case["scale"]], case["divided"])
        nibbles, scales = packed_block([amax, value], "nvfp4", "torchao")
        assert (scales, nibbles[1]) == ([case["scale"]], case["multiplied"])
        assert case["divided"] != case["multiplied"]


def test_torchao_divides_by_6_and_then_by_the_global_scale() -> None:
    block = np.zeros(16, np.float32)
    block[3] = float.fromhex("0x1.2deb86p-4")
    _, scales = fp4.pack(block, "nvfp4", scale_rule="torchao", global_scale=0.37)
    assert scales.tolist() == [0x11]  # divided by their product it is a tie, which takes 0x10


@pytest.mark.parametrize("case", GOLDEN["vectors"], ids=lambda case: case["name"])
def test_golden_vectors_stay_what_they_are(case: dict[str, object]) -> None:
    values = np.array([float(text) for text in str(case["values"]).split()], np.float32)
    entry_format, rule = str(case["format"]), str(case["rule"])
    scale = float(str(case["global_scale"]))
    nibbles, scales = fp4.pack(values, entry_format, scale_rule=rule, global_scale=scale)
    assert (nibbles.tobytes().hex(), scales.tobytes().hex()) == (case["nibbles"], case["scales"])
    reference = numpy_fp4.pack(values, entry_format, rule, scale)
    assert reference.codes.tobytes() == nibbles.tobytes()
    assert reference.scales.tobytes() == scales.tobytes()
    decoded = np.empty(values.shape, np.uint16)
    fp4.unpack(nibbles, scales, entry_format, out=decoded, global_scale=scale)
    assert decoded.astype(">u2").tobytes().hex() == case["bfloat16"]


def all_patterns(dtype: type[np.generic]) -> NDArray[np.float32]:
    values = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_elements_equal_ml_dtypes_for_every_16_bit_number_below_8(dtype: type[np.generic]) -> None:
    with np.errstate(invalid="ignore"):
        values = all_patterns(dtype)
    values = values[np.abs(values) < 8]
    blocks = np.full((len(values), 32), 6, np.float32)  # 6 makes the scale 1 under floor
    blocks[:, 0] = values
    nibbles, scales = fp4.pack(blocks, "mxfp4", scale_rule="floor")
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert (scales == 127).all()
    assert np.array_equal(nibbles[:, 0] & 15, expected)


def test_where_ml_dtypes_has_a_zero_for_a_nan_kvstore_has_a_nan_block() -> None:
    nan = np.array([np.nan, -np.nan], np.float32)
    assert nan.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist() == [8, 0]
    assert packed_block([*nan.tolist(), 6.0], "mxfp4", "floor") == ([0] * 32, [0xFF])
    assert packed_block([*nan.tolist(), 6.0], "nvfp4", "v41") == ([0] * 16, [0x7F])


def test_beyond_6_ml_dtypes_and_kvstore_saturate() -> None:
    values = np.array([7.5, 1e9, INF, -INF], np.float32)
    assert values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist() == [7, 7, 7, 15]
    assert packed_block([7.5], "mxfp4", "floor")[0][0] == 7
    assert packed_block([INF, -INF], "mxfp4", "floor")[0][:2] == [7, 15]
