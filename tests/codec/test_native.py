"""The C contract itself: return codes, and outputs untouched on error."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from _kvstore_native import lib

import kvstore
from kvstore.codec import native
from kvstore.layout import SCALE_RULES

REDZONE = 0xA5


class Call:
    """A valid pack or unpack of 3 rows of 64 NVFP4 values, to be spoiled one argument at a time."""

    def __init__(self) -> None:
        self.values = np.ones((3, 64), np.float32)
        self.memory = np.full((3, 48), REDZONE, np.uint8)
        base = self.memory.ctypes.data
        self.planes = {
            "values": native.Rows(self.values.ctypes.data, 256),
            "codes": native.Rows(base, 48),
            "scales": native.Rows(base + 32, 48),
        }
        self.numbers = {"rows": 3, "row_values": 64}
        self.codec = prepared("nvfp4", "v41")

    def pack(self) -> native.PackResult:
        return self.codec.pack(**self.planes, **self.numbers)  # type: ignore[arg-type]  # named, both

    def unpack(self) -> None:
        self.codec.unpack(**self.planes, **self.numbers)  # type: ignore[arg-type]  # named, both


def prepared(entry_format: str, rule: str, global_scale: float = 1.0) -> native.Prepared:
    return native.prepare(entry_format, rule, "float32", global_scale, native.default_level())


def test_a_valid_call_writes_its_rows_and_no_more() -> None:
    call = Call()
    assert call.pack() == native.PackResult(0, 0, 0.0, 0.0)
    assert (call.memory[:, 36:] == REDZONE).all()
    assert (call.memory[:, :32] == 0x77).all()
    call.values[:] = 0
    call.unpack()
    assert np.array_equal(call.values, np.full((3, 64), np.float32(6 * 0.171875)))


NUMBERS = {
    "shape": ("row_values", 40, lib.KVSTORE_ERR_SHAPE),
    "huge row": ("row_values", 2**63, lib.KVSTORE_ERR_SHAPE),
    "huge plane": ("rows", 2**62, lib.KVSTORE_ERR_STRIDE),
}


@pytest.mark.parametrize(("name", "value", "code"), NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_a_bad_number_has_its_code_and_writes_nothing(
    direction: str, name: str, value: int, code: int
) -> None:
    call = Call()
    call.numbers[name] = value
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        getattr(call, direction)()
    assert (call.memory == REDZONE).all()
    assert (call.values == 1).all()


@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize("name", ["values", "codes", "scales"])
def test_a_null_plane_is_refused_unless_it_is_empty(direction: str, name: str) -> None:
    call = Call()
    call.planes[name] = native.Rows(0, 48)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_NULL}\\)"):
        getattr(call, direction)()
    for empty in ("rows", "row_values"):
        call.numbers[empty] = 0
        getattr(call, direction)()
        assert (call.memory == REDZONE).all()


@pytest.mark.parametrize(
    ("name", "stride", "code"),
    [
        ("codes", 31, lib.KVSTORE_ERR_STRIDE),
        ("codes", -31, lib.KVSTORE_ERR_STRIDE),
        ("scales", 0, lib.KVSTORE_ERR_STRIDE),
        ("scales", 2**62, lib.KVSTORE_ERR_STRIDE),
        ("scales", -(2**63), lib.KVSTORE_ERR_STRIDE),
        ("codes", 49, lib.KVSTORE_ERR_OVERLAP),  # strides differ where the planes meet
    ],
)
def test_a_bad_output_stride_is_refused(name: str, stride: int, code: int) -> None:
    call = Call()
    call.planes[name] = native.Rows(call.planes[name].address, stride)
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        call.pack()
    assert (call.memory == REDZONE).all()


@pytest.mark.parametrize(
    ("offset", "fine"),
    [
        *((31, False), (32, True), (44, True), (45, False), (-4, True), (-3, False)),
        *((79, False), (80, True), (-52, True), (-51, False)),  # a row further on, or back
    ],
)
def test_interleaved_planes_may_touch_but_not_share_a_byte(offset: int, fine: bool) -> None:
    memory = np.full(300, REDZONE, np.uint8)
    call = Call()
    base = memory.ctypes.data + 100
    call.planes["codes"] = native.Rows(base, 48)
    call.planes["scales"] = native.Rows(base + offset, 48)
    if fine:
        call.pack()
        assert (memory != REDZONE).sum() == 3 * 36
        return
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_OVERLAP}\\)"):
        call.pack()
    assert (memory == REDZONE).all()


@pytest.mark.parametrize("name", ["codes", "scales"])
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_values_may_not_share_memory_with_a_plane(direction: str, name: str) -> None:
    call = Call()
    call.planes[name] = native.Rows(call.values.ctypes.data + 700, 48)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_OVERLAP}\\)"):
        getattr(call, direction)()
    assert (call.values == 1).all()


@pytest.mark.parametrize("rule", [*native.RULES])
@pytest.mark.parametrize("entry_format", [*SCALE_RULES])
def test_a_rule_belongs_to_one_format(entry_format: str, rule: str) -> None:
    if rule in SCALE_RULES[entry_format]:
        prepared(entry_format, rule)
        return
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_RULE}\\)"):
        prepared(entry_format, rule)


@pytest.mark.parametrize(
    ("rule", "global_scale"),
    [
        *(("torchao", value) for value in (0.0, -1.0, 2.0**-101, math.inf, math.nan)),
        *((rule, 2.0) for rule in native.RULES if rule != "torchao"),
    ],
)
def test_a_global_scale_needs_its_rule_and_bounds(rule: str, global_scale: float) -> None:
    entry_format = next(name for name, rules in SCALE_RULES.items() if rule in rules)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_GLOBAL_SCALE}\\)"):
        prepared(entry_format, rule, global_scale)


def test_levels_are_named_and_one_can_be_chosen() -> None:
    assert native.levels()[0] == "portable"
    assert set(native.levels()) <= set(native.LEVELS)
    assert native.choose_level("") == native.levels()[-1]
    assert native.choose_level("portable") == "portable"
    with pytest.raises(kvstore.ConfigError, match="KVSTORE_LEVEL=mmx: expected one of portable"):
        native.choose_level("mmx")


def test_a_level_that_is_missing_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LEVELS", {**native.LEVELS, "later": 99})
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_LEVEL}\\)"):
        native.prepare("nvfp4", "v41", "float32", 1.0, "later")


def test_a_level_of_the_environment_is_the_one_that_runs() -> None:
    script = "from kvstore.codec import native; print(native.default_level())"
    environ = {**os.environ, native.LEVEL_VARIABLE: "portable"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout == "portable\n"


def test_every_rule_and_format_of_the_layout_has_a_kernel() -> None:
    assert [*native.FP4_FORMATS, *native.FP8_FORMATS] == [*SCALE_RULES]
    rules = [rule for rules in SCALE_RULES.values() for rule in rules]
    assert [*native.RULES] == [*dict.fromkeys(rules)]


class Fp8Call:
    """A valid pack or unpack of 3 rows of 64 FP8 values, to be spoiled one argument at a time."""

    def __init__(self, entry_format: str = "fp8") -> None:
        self.values = np.ones((3, 64), np.float32)
        self.memory = np.full((3, 80), REDZONE, np.uint8)
        base = self.memory.ctypes.data
        self.planes = {
            "values": native.Rows(self.values.ctypes.data, 256),
            "codes": native.Rows(base, 80),
            "scales": native.Rows(base + 64, 80),
        }
        self.numbers = {"rows": 3, "row_values": 64}
        self.codec = prepared(entry_format, SCALE_RULES[entry_format][0])

    def pack(self) -> native.PackResult:
        return self.codec.pack(**self.planes, **self.numbers)  # type: ignore[arg-type]  # named, both

    def unpack(self) -> None:
        self.codec.unpack(**self.planes, **self.numbers)  # type: ignore[arg-type]  # named, both


@pytest.mark.parametrize(("entry_format", "scale_bytes"), [("mxfp8", 2), ("fp8", 4)])
def test_a_valid_fp8_call_writes_its_rows_and_no_more(entry_format: str, scale_bytes: int) -> None:
    call = Fp8Call(entry_format)
    assert call.pack() == native.PackResult(0, 0, 0.0, 0.0)
    assert (call.memory[:, 64 + scale_bytes :] == REDZONE).all()
    assert (call.memory[:, :64] == {"mxfp8": 0x78, "fp8": 0x7E}[entry_format]).all()
    call.values[:] = 0
    call.unpack()
    assert (call.values == 1).all()


FP8_NUMBERS = {
    "shape": ("mxfp8", "row_values", 40, lib.KVSTORE_ERR_SHAPE),
    "no value": ("fp8", "row_values", 0, lib.KVSTORE_ERR_SHAPE),
    "huge row": ("fp8", "row_values", 2**63, lib.KVSTORE_ERR_SHAPE),
    "huge plane": ("fp8", "rows", 2**62, lib.KVSTORE_ERR_STRIDE),
}


@pytest.mark.parametrize("case", FP8_NUMBERS.values(), ids=FP8_NUMBERS.keys())
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_a_bad_fp8_number_has_its_code_and_writes_nothing(
    direction: str, case: tuple[str, str, int, int]
) -> None:
    entry_format, name, value, code = case
    call = Fp8Call(entry_format)
    call.numbers[name] = value
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        getattr(call, direction)()
    assert (call.memory == REDZONE).all()
    assert (call.values == 1).all()


@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize("name", ["values", "codes", "scales"])
def test_a_null_fp8_plane_is_refused_unless_there_are_no_rows(direction: str, name: str) -> None:
    call = Fp8Call()
    call.planes[name] = native.Rows(0, 80)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_NULL}\\)"):
        getattr(call, direction)()
    call.numbers["rows"] = 0
    getattr(call, direction)()
    assert (call.memory == REDZONE).all()


@pytest.mark.parametrize(
    ("entry_format", "offset", "stride", "code"),
    [
        ("fp8", 64, 3, lib.KVSTORE_ERR_STRIDE),
        ("mxfp8", 64, 1, lib.KVSTORE_ERR_STRIDE),
        ("fp8", 63, 80, lib.KVSTORE_ERR_OVERLAP),
        ("fp8", 77, 80, lib.KVSTORE_ERR_OVERLAP),  # the fourth byte is the next row's first code
        ("mxfp8", 79, 80, lib.KVSTORE_ERR_OVERLAP),
    ],
)
def test_fp8_scales_count_with_all_their_bytes(
    entry_format: str, offset: int, stride: int, code: int
) -> None:
    call = Fp8Call(entry_format)
    call.planes["scales"] = native.Rows(call.memory.ctypes.data + offset, stride)
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        call.pack()
    assert (call.memory == REDZONE).all()
    call = Fp8Call(entry_format)
    call.planes["scales"] = native.Rows(call.values.ctypes.data + 767, 80)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_OVERLAP}\\)"):
        call.unpack()
