"""FP4 rows wherever they may lie: planes apart, side by side, at rest in a frame, or in the way.

What is right is what one plain, contiguous call gives; every byte around an output is watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvstore
from kvstore import fp4
from kvstore.codec import native
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import Header
from kvstore.identity.block import BlockHash
from kvstore.layout import FORMATS, SCALE_RULES
from tests.builders import random_entries, random_tokens
from tests.strided import REDZONE, place, rest_of, strided

pytestmark = pytest.mark.usefixtures("level")

Bytes = NDArray[np.uint8]

RULES = [(name, rule) for name in native.FP4_FORMATS for rule in SCALE_RULES[name]]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = 64
"""Entries of a unit at rest. docs/format.md, section 4."""


@dataclass(frozen=True)
class Laid:
    """Two planes of ``[units, rows]`` entries in one buffer that is red everywhere else."""

    buffer: Bytes
    codes: Bytes
    scales: Bytes

    def is_red_around(self) -> bool:
        beside = [rest_of(self.buffer, plane) == REDZONE for plane in (self.codes, self.scales)]
        return bool((beside[0] | beside[1]).all())


@st.composite
def laid(draw: st.DrawFn, entry_format: str, values: int) -> Laid:
    """Planes apart, entries that end with their scales, or units of 64 entries at rest."""
    widths = FORMATS[entry_format].planes(values)
    kind = draw(st.sampled_from(["apart", "entries", "at rest"]))
    gaps = [draw(st.integers(0, 7)) for _ in range(4)]
    units = draw(st.integers(1, 3))
    rows = UNIT if kind == "at rest" else draw(st.integers(1, 7))
    count = units * rows
    if kind == "apart":
        steps = [width + gap for width, gap in zip(widths, gaps, strict=False)]
        starts = (gaps[2], gaps[2] + count * steps[0] + gaps[3])
        unit_steps = [rows * step for step in steps]
    elif kind == "entries":
        steps = [sum(widths) + gaps[0] + gaps[1]] * 2
        starts = (gaps[2], gaps[2] + widths[0] + gaps[0])
        unit_steps = [rows * step for step in steps]
    else:  # other groups of the layer may lie between the planes and behind them
        steps = list(widths)
        starts = (gaps[2], gaps[2] + rows * widths[0] + gaps[0])
        unit_steps = [rows * sum(widths) + gaps[0] + gaps[1]] * 2
    buffer = np.full(starts[1] + units * sum(unit_steps) + 16, REDZONE, np.uint8)
    codes, scales = (
        np.ndarray((units, rows, width), np.uint8, buffer, start, (unit_step, step, 1))
        for width, start, unit_step, step in zip(widths, starts, unit_steps, steps, strict=True)
    )
    if draw(st.booleans()):
        codes, scales = codes[::-1], scales[::-1]
    if draw(st.booleans()):
        codes, scales = codes[:, ::-1], scales[:, ::-1]
    return Laid(buffer, codes, scales)


@given(data=st.data(), rule=st.sampled_from(RULES), dtype=st.sampled_from([*DTYPES]))
@settings(max_examples=100)
def test_rows_of_every_layout_are_those_of_a_plain_call(
    data: st.DataObject, rule: tuple[str, str], dtype: str
) -> None:
    entry_format, scale_rule = rule
    values = FORMATS[entry_format].scale_block * data.draw(st.integers(1, 7))
    found = data.draw(laid(entry_format, values))
    shape = (*found.codes.shape[:2], values)
    plain = np.random.default_rng(values).standard_normal(shape).astype(DTYPES[dtype])
    special = data.draw(st.sampled_from([0.0, np.nan, np.inf, -np.inf]))
    plain.reshape(-1)[data.draw(st.integers(0, plain.size - 1))] = special
    expected_stats, stats = fp4.PackStats(), fp4.PackStats()
    expected = fp4.pack(plain, entry_format, scale_rule=scale_rule, stats=expected_stats)
    _, source = place(shape, DTYPES[dtype], data.draw(strided(shape, plain.itemsize)))
    source[...] = plain

    out = (found.codes, found.scales)
    fp4.pack(source, entry_format, scale_rule=scale_rule, out=out, stats=stats)

    assert np.array_equal(found.codes, expected[0])
    assert np.array_equal(found.scales, expected[1])
    assert found.is_red_around()
    assert stats == expected_stats
    assert stats == fp4.PackStats(int(np.isnan(special)), int(np.isinf(special)))

    buffer, target = place(shape, DTYPES[dtype], data.draw(strided(shape, plain.itemsize)))
    fp4.unpack(found.codes, found.scales, entry_format, dtype=dtype, out=target)
    unpacked = fp4.unpack(*expected, entry_format, dtype=dtype)
    assert np.ascontiguousarray(target).tobytes() == unpacked.tobytes()
    assert (rest_of(buffer, target) == REDZONE).all()

    units, rows = shape[:2]
    table = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=4))
    chosen = data.draw(st.lists(st.integers(0, len(table) * rows - 1), min_size=1, max_size=20))
    buffer, target = place(
        (len(chosen), values),
        DTYPES[dtype],
        data.draw(strided((len(chosen), values), plain.itemsize)),
    )
    fp4.gather(
        found.codes,
        found.scales,
        np.array(chosen),
        entry_format,
        pages=np.array(table),
        dtype=dtype,
        out=target,
    )
    picked = [unpacked[table[entry // rows], entry % rows] for entry in chosen]
    assert np.ascontiguousarray(target).tobytes() == np.stack(picked).tobytes()
    assert (rest_of(buffer, target) == REDZONE).all()


@pytest.mark.parametrize("spaced", ["values", "codes", "scales"])
@pytest.mark.parametrize(("entry_format", "rule"), RULES)
def test_rows_are_apart_where_only_one_plane_has_gaps(
    entry_format: str, rule: str, spaced: str
) -> None:
    # Rows that follow each other in all planes are one long row; these are not.
    plain = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    widths = FORMATS[entry_format].planes(96)
    source, codes, scales = (
        place((5, width), dtype, (0, [itemsize * width + 4 * (name == spaced), itemsize]))[1]
        for name, width, dtype, itemsize in (
            ("values", 96, np.float32, 4),
            ("codes", widths[0], np.uint8, 1),
            ("scales", widths[1], np.uint8, 1),
        )
    )
    source[...] = plain
    fp4.pack(source, entry_format, scale_rule=rule, out=(codes, scales))
    expected = fp4.pack(plain, entry_format, scale_rule=rule)
    assert np.array_equal(codes, expected[0])
    assert np.array_equal(scales, expected[1])
    fp4.unpack(codes, scales, entry_format, dtype="float32", out=source)
    assert np.array_equal(source, fp4.unpack(*expected, entry_format, dtype="float32"))


def test_the_frame_of_a_block_is_packed_and_unpacked_where_it_lies() -> None:
    layout = kvstore.layout("deepseek-v4.1-flash")
    frames = FrameFormat(layout, 128)
    rng = np.random.default_rng(0)
    numbers = {
        group.name: rng.standard_normal((len(group.layers), 128, group.values)).astype(np.float32)
        for group in layout.global_groups
        if group.name in {"main_r1", "index_r1"}
    }
    entries = random_entries(layout, 128, rng)
    formats = {"main_r1": "nvfp4", "index_r1": "mxfp4"}
    for name, values in numbers.items():
        entries[name] = np.concatenate(fp4.pack(values, formats[name]), axis=-1)
    header = Header(
        block_tokens=128,
        number=0,
        namespace_id=1,
        payload_bytes=frames.payload_bytes,
        block_hash=BlockHash(bytes(32)),
        parent_hash=BlockHash(bytes(32)),
        sequence=1,
    )
    frame = frames.encode(header, random_tokens(128, rng), frames.entries_source(entries), 0)
    start, stop = frames.part_bounds[-1]  # of layer 20: two units of 64 entries in two groups
    at_rest = np.frombuffer(frame, np.uint8)[start:stop].reshape(2, 22_784)
    blank = np.full_like(at_rest, REDZONE)
    first = 0
    for name, values in numbers.items():
        widths = FORMATS[formats[name]].planes(values.shape[-1])
        bounds = [first, first + UNIT * widths[0], first + UNIT * sum(widths)]
        planes, room = (
            [
                units[:, low:high].reshape(2, UNIT, width)
                for low, high, width in zip(bounds, bounds[1:], widths, strict=False)
            ]
            for units in (at_rest, blank)
        )
        fp4.pack(values.reshape(2, UNIT, -1), formats[name], out=(room[0], room[1]))
        codes, scales = np.split(entries[name], [widths[0]], axis=-1)
        expected = fp4.unpack(codes, scales, formats[name], dtype="float32").reshape(2, UNIT, -1)
        found = fp4.unpack(planes[0], planes[1], formats[name], dtype="float32")
        assert np.array_equal(found, expected)
        index, pages = np.array([127, 0, 64, 63, 1]), np.array([1, 0])
        found = fp4.gather(planes[0], planes[1], index, formats[name], pages=pages, dtype="float32")
        assert np.array_equal(found, expected[pages[index // UNIT], index % UNIT])
        first = bounds[-1]
    assert first == 22_784
    assert np.array_equal(blank, at_rest)


@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize(
    ("entry_format", "global_scale"), [("nvfp4", 1.0), ("nvfp4", 0.37), ("mxfp4", 1.0)]
)
def test_rows_written_past_the_cache_are_those_written_through_it(
    entry_format: str, global_scale: float, dtype: str
) -> None:
    rule = native.UNPACKING_RULES[entry_format]
    level = native.default_level()
    through, past = (
        native.prepare(entry_format, rule, dtype, global_scale, level, streamed_bytes)
        for streamed_bytes in (2**62, 0)
    )
    values = 3 * 32 + FORMATS[entry_format].scale_block
    widths = FORMATS[entry_format].planes(values)
    row_bytes = values * np.dtype(DTYPES[dtype]).itemsize
    planes = [np.random.default_rng(0).integers(0, 256, (5, width), np.uint8) for width in widths]
    rows = [native.Rows(plane.ctypes.data, plane.shape[1]) for plane in planes]
    for offset in (0, 1, 2, 4, 8, 16, 24, 32, 48):
        for stride in (row_bytes, row_bytes + 8, row_bytes + 32):
            written = []
            for codec in (through, past):
                memory = np.full(5 * stride + 192, REDZONE, np.uint8)
                start = -memory.ctypes.data % 64 + offset
                out = native.Rows(memory.ctypes.data + start, stride)
                codec.unpack(rows[0], rows[1], out, rows=5, row_values=values)
                view = memory[start : start + 5 * stride].reshape(5, stride)
                written.append(view[:, :row_bytes].copy())
                view[:, :row_bytes] = REDZONE
                assert (memory == REDZONE).all()
            assert np.array_equal(written[0], written[1])


# What overlaps is refused, by C itself.


def places(rows: native.Rows, base: int, count: int, width: int) -> NDArray[np.int64]:
    """Where each byte of each row lies in the buffer at ``base``, as ``[count, width]``."""
    found: NDArray[np.int64] = (
        rows.address - base + np.arange(count)[:, None] * rows.stride + np.arange(width)
    )
    return found


def spans_meet(a: NDArray[np.int64], b: NDArray[np.int64]) -> bool:
    return bool(a.min() <= b.max() and b.min() <= a.max())


@given(data=st.data(), rule=st.sampled_from(RULES), dtype=st.sampled_from([*DTYPES]))
@settings(max_examples=200)
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_rows_that_share_a_byte_are_refused_and_others_are_right(
    direction: str, data: st.DataObject, rule: tuple[str, str], dtype: str
) -> None:
    entry_format, scale_rule = rule
    count = data.draw(st.integers(1, 4))
    values = 32 * data.draw(st.integers(1, 2))
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    widths = [values * itemsize, *FORMATS[entry_format].planes(values)]
    # Rows side by side or planes apart, as close as they can be; then something is moved a little.
    sides, step = data.draw(st.sampled_from([((0, 256, 288), 292), ((0, 1200, 1400), 300)]))
    sign = data.draw(st.sampled_from([1, -1]))
    moved = st.sampled_from([0, 0, 0, 0, 1, -1, 4, -16])
    turned = st.sampled_from([1, 1, 1, 1, -1, 0])
    codec = native.prepare(entry_format, scale_rule, dtype, 1.0, native.default_level())
    memory = np.random.default_rng(0).integers(0, 0x3C, 6000, np.uint8)  # no NaN in any dtype
    base = memory.ctypes.data
    planes = [
        native.Rows(
            base + 2500 + side + data.draw(moved),
            sign * data.draw(turned) * (step + data.draw(moved)),
        )
        for side in sides
    ]
    touched = [places(rows, base, count, width) for rows, width in zip(planes, widths, strict=True)]
    uses = np.zeros((3, memory.size), np.int64)
    for plane, where in enumerate(touched):
        np.add.at(uses[plane], where, 1)
    outputs = [1, 2] if direction == "pack" else [0]
    pairs = [(0, 1), (0, 2)] + [(1, 2)] * (direction == "pack")
    is_shared = (uses[outputs] > 1).any() or any(
        ((uses[i] > 0) & (uses[j] > 0)).any() for i, j in pairs
    )

    # The same rows, one after the other in buffers of their own.
    plain = [memory[where] for where in touched]
    apart = [native.Rows(array.ctypes.data, array.shape[1]) for array in plain]
    before = memory.copy()
    expected = memory.copy()
    try:
        run(codec, direction, planes, count, values)
    except ValueError:
        assert np.array_equal(memory, before)
        # Refused in vain are only planes whose rows lie between each other's.
        assert is_shared or any(spans_meet(touched[i], touched[j]) for i, j in pairs)
        return
    assert not is_shared
    run(codec, direction, apart, count, values)
    for array, where in zip(plain, touched, strict=True):
        expected[where] = array
    assert np.array_equal(memory, expected)


def run(
    codec: native.Prepared, direction: str, planes: Sequence[native.Rows], rows: int, values: int
) -> None:
    if direction == "pack":
        codec.pack(*planes, rows=rows, row_values=values)
    else:
        codec.unpack(planes[1], planes[2], planes[0], rows=rows, row_values=values)
