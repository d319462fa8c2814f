"""The C contract itself: return codes, and outputs untouched on error."""

from __future__ import annotations

import numpy as np
import pytest
from _kvstore_native import lib

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
            "nibbles": native.Rows(base, 48),
            "scales": native.Rows(base + 32, 48),
        }
        self.numbers: dict[str, float] = {
            "rows": 3,
            "row_values": 64,
            "dtype": lib.KVSTORE_F32,
            "entry_format": lib.KVSTORE_NVFP4,
            "global_scale": 1.0,
        }

    def pack(self, rule: int = native.RULES["v41"]) -> tuple[int, int]:
        return native.fp4_pack(**self.planes, **self.numbers, rule=rule)  # type: ignore[arg-type]

    def unpack(self) -> None:
        native.fp4_unpack(**self.planes, **self.numbers)  # type: ignore[arg-type]


def test_a_valid_call_writes_its_rows_and_no_more() -> None:
    call = Call()
    assert call.pack() == (0, 0)
    assert (call.memory[:, 36:] == REDZONE).all()
    assert (call.memory[:, :32] == 0x77).all()
    call.values[:] = 0
    call.unpack()
    assert np.array_equal(call.values, np.full((3, 64), np.float32(6 * 0.171875)))


NUMBERS = {
    "dtype": ("dtype", 3, lib.KVSTORE_ERR_DTYPE),
    "format": ("entry_format", 2, lib.KVSTORE_ERR_FORMAT),
    "negative format": ("entry_format", -1, lib.KVSTORE_ERR_FORMAT),
    "shape": ("row_values", 40, lib.KVSTORE_ERR_SHAPE),
    "huge row": ("row_values", 2**63, lib.KVSTORE_ERR_SHAPE),
    "huge plane": ("rows", 2**62, lib.KVSTORE_ERR_STRIDE),
    "no global scale": ("global_scale", 0.0, lib.KVSTORE_ERR_GLOBAL_SCALE),
    "small global scale": ("global_scale", 2.0**-101, lib.KVSTORE_ERR_GLOBAL_SCALE),
    "infinite global scale": ("global_scale", float("inf"), lib.KVSTORE_ERR_GLOBAL_SCALE),
    "nan global scale": ("global_scale", float("nan"), lib.KVSTORE_ERR_GLOBAL_SCALE),
}


@pytest.mark.parametrize(("name", "value", "code"), NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_a_bad_number_has_its_code_and_writes_nothing(
    direction: str, name: str, value: float, code: int
) -> None:
    call = Call()
    call.numbers[name] = value
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        getattr(call, direction)()
    assert (call.memory == REDZONE).all()
    assert (call.values == 1).all()


@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize("name", ["values", "nibbles", "scales"])
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
        ("nibbles", 31, lib.KVSTORE_ERR_STRIDE),
        ("nibbles", -31, lib.KVSTORE_ERR_STRIDE),
        ("scales", 0, lib.KVSTORE_ERR_STRIDE),
        ("scales", 2**62, lib.KVSTORE_ERR_STRIDE),
        ("scales", -(2**63), lib.KVSTORE_ERR_STRIDE),
        ("nibbles", 49, lib.KVSTORE_ERR_OVERLAP),  # strides differ where the planes meet
    ],
)
def test_a_bad_output_stride_is_refused(name: str, stride: int, code: int) -> None:
    call = Call()
    call.planes[name] = native.Rows(call.planes[name].address, stride)
    with pytest.raises(ValueError, match=f"code {code}\\)"):
        call.pack()
    assert (call.memory == REDZONE).all()


@pytest.mark.parametrize(
    ("offset", "fine"), [(31, False), (32, True), (44, True), (45, False), (-4, True), (-3, False)]
)
def test_interleaved_planes_may_touch_but_not_share_a_byte(offset: int, fine: bool) -> None:
    memory = np.full(300, REDZONE, np.uint8)
    call = Call()
    base = memory.ctypes.data + 100
    call.planes["nibbles"] = native.Rows(base, 48)
    call.planes["scales"] = native.Rows(base + offset, 48)
    if fine:
        call.pack()
        assert (memory != REDZONE).sum() == 3 * 36
        return
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_OVERLAP}\\)"):
        call.pack()
    assert (memory == REDZONE).all()


@pytest.mark.parametrize("name", ["nibbles", "scales"])
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_values_may_not_share_memory_with_a_plane(direction: str, name: str) -> None:
    call = Call()
    call.planes[name] = native.Rows(call.values.ctypes.data + 700, 48)
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_OVERLAP}\\)"):
        getattr(call, direction)()
    assert (call.values == 1).all()


@pytest.mark.parametrize("rule", [-1, *range(6), 6])
@pytest.mark.parametrize("entry_format", [*native.FP4_FORMATS])
def test_a_rule_belongs_to_one_format(entry_format: str, rule: int) -> None:
    call = Call()
    call.numbers["entry_format"] = native.FP4_FORMATS[entry_format]
    if rule in [native.RULES[name] for name in SCALE_RULES[entry_format]]:
        call.pack(rule)
        return
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_RULE}\\)"):
        call.pack(rule)


@pytest.mark.parametrize(("entry_format", "rule"), [("nvfp4", "v41"), ("mxfp4", "floor")])
def test_a_global_scale_needs_a_rule_that_has_one(entry_format: str, rule: str) -> None:
    call = Call()
    call.numbers |= {"entry_format": native.FP4_FORMATS[entry_format], "global_scale": 2.0}
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_GLOBAL_SCALE}\\)"):
        call.pack(native.RULES[rule])


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
        self.numbers = {
            "rows": 3,
            "row_values": 64,
            "dtype": lib.KVSTORE_F32,
            "entry_format": native.FP8_FORMATS[entry_format],
        }
        self.rule = native.RULES[SCALE_RULES[entry_format][0]]

    def pack(self) -> tuple[int, int]:
        return native.fp8_pack(**self.planes, **self.numbers, rule=self.rule)  # type: ignore[arg-type]

    def unpack(self) -> None:
        native.fp8_unpack(**self.planes, **self.numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(("entry_format", "scale_bytes"), [("mxfp8", 2), ("fp8", 4)])
def test_a_valid_fp8_call_writes_its_rows_and_no_more(entry_format: str, scale_bytes: int) -> None:
    call = Fp8Call(entry_format)
    assert call.pack() == (0, 0)
    assert (call.memory[:, 64 + scale_bytes :] == REDZONE).all()
    assert (call.memory[:, :64] == {"mxfp8": 0x78, "fp8": 0x7E}[entry_format]).all()
    call.values[:] = 0
    call.unpack()
    assert (call.values == 1).all()


FP8_NUMBERS = {
    "dtype": ("fp8", "dtype", 3, lib.KVSTORE_ERR_DTYPE),
    "format": ("fp8", "entry_format", 4, lib.KVSTORE_ERR_FORMAT),
    "fp4 format": ("mxfp8", "entry_format", lib.KVSTORE_MXFP4, lib.KVSTORE_ERR_FORMAT),
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
    with pytest.raises(ValueError, match=f"fp8: .* \\(code {code}\\)"):
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


@pytest.mark.parametrize("rule", [-1, *range(6), 6])
@pytest.mark.parametrize("entry_format", [*native.FP8_FORMATS])
def test_an_fp8_rule_belongs_to_one_format(entry_format: str, rule: int) -> None:
    call = Fp8Call(entry_format)
    is_its_own = rule == call.rule
    call.rule = rule
    if is_its_own:
        call.pack()
        return
    with pytest.raises(ValueError, match=f"code {lib.KVSTORE_ERR_RULE}\\)"):
        call.pack()
    assert (call.memory == REDZONE).all()
