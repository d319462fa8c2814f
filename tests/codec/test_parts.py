"""Sums, and parts that are verified by the pass that hands them out. xxhash is the reference."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.codec import native
from kvstore.layout import FORMATS

pytestmark = pytest.mark.usefixtures("level")

GUARD = 0xA5
Piece = tuple[int, int, int, int, int, int]


def random_bytes(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def read(part: NDArray[np.uint8], pieces: Sequence[Piece], total: int | None = None) -> bool:
    """Read all of some memory as one part, by default with its own sum."""
    table = np.array(pieces, np.int64).reshape(-1, 6)
    right = xxhash.xxh3_64_intdigest(part.data) if total is None else total
    return native.read_parts(part, [native.Part(0, part.size, 0, len(table))], [right], table)


# ---- sums --------------------------------------------------------------------------------------


def test_a_sum_is_that_of_xxhash_at_every_length_and_address() -> None:
    data = random_bytes(2200)
    for length in range(2101):
        view = data.data[length % 67 :][:length]
        assert native.xxh3_64(view) == xxhash.xxh3_64_intdigest(view), length


@pytest.mark.parametrize("length", [10_239, 10_240, 10_241, 65_536, 1_000_003, 16_777_216])
def test_a_sum_is_that_of_xxhash_of_large_inputs(length: int) -> None:
    view = random_bytes(length + 1).data[1:]
    assert native.xxh3_64(view) == xxhash.xxh3_64_intdigest(view)


@given(st.lists(st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 1024, 2048]))), st.data())
def test_a_part_has_one_sum_however_it_is_cut(lengths: list[int], data: st.DataObject) -> None:
    part = random_bytes(sum(lengths), len(lengths))
    memory = np.full(part.size + 64, GUARD, np.uint8)
    offset = data.draw(st.integers(0, 32))
    starts = itertools.accumulate(lengths, initial=memory.ctypes.data + offset)
    pieces = [(0, 1, 1, n, at, n) for n, at in zip(lengths, starts, strict=False)]
    assert read(part, pieces)
    assert np.array_equal(memory[offset:][: part.size], part)
    assert (memory[:offset] == GUARD).all()
    assert (memory[offset + part.size :] == GUARD).all()


# ---- copies ------------------------------------------------------------------------------------


@given(
    units=st.integers(1, 3),
    rows=st.integers(1, 70),
    shape=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=3),
    is_backwards=st.booleans(),
)
def test_rows_go_to_their_places_and_nothing_beside_them(
    units: int, rows: int, shape: list[tuple[int, int]], is_backwards: bool
) -> None:
    """Planes of equally many units take turns, as in a payload."""
    part = random_bytes(units * rows * sum(length for length, _ in shape))
    memories = [np.full((units * rows, length + gap), GUARD, np.uint8) for length, gap in shape]
    targets = [memory[::-1] if is_backwards else memory for memory in memories]
    pieces = [
        (0, units, rows, length, target.ctypes.data, target.strides[0])
        for target, (length, _) in zip(targets, shape, strict=True)
    ]
    assert read(part, pieces)
    turns = part.reshape(units, -1)
    at = 0
    for target, (length, _) in zip(targets, shape, strict=True):
        expected = turns[:, at : at + rows * length].reshape(-1, length)
        assert np.array_equal(target[:, :length], expected)
        assert (target[:, length:] == GUARD).all()
        at += rows * length


def test_every_flipped_bit_of_a_part_is_seen_and_its_neighbours_are_left_alone() -> None:
    for length, rows in ((13, 3), (64, 5), (300, 1)):
        part = random_bytes(rows * length)
        total = xxhash.xxh3_64_intdigest(part.data)
        memory = np.full((rows + 2, length + 3), GUARD, np.uint8)
        target = memory[1:]
        pieces = [(0, 1, rows, length, target.ctypes.data, target.strides[0])]
        for bit in range(8 * part.size):
            part[bit // 8] ^= 1 << bit % 8
            assert not read(part, pieces, total), f"bit {bit} went unseen"
            part[bit // 8] ^= 1 << bit % 8
        assert read(part, pieces, total)
        for bit in range(64):
            assert not read(part, pieces, total ^ 1 << bit)
        assert (memory[[0, -1]] == GUARD).all()
        assert (memory[:, length:] == GUARD).all()


@pytest.mark.parametrize("offset", [0, 1, 16])
def test_a_target_past_the_cache_holds_the_same(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STREAMED_BYTES", 0)
    part = random_bytes(3 * 4096 + 65)
    memory = np.full(part.size + 64, GUARD, np.uint8)
    assert read(part, [(0, 1, 1, part.size, memory.ctypes.data + offset, 0)])
    assert np.array_equal(memory[offset:][: part.size], part)
    assert (memory[offset + part.size :] == GUARD).all()


@pytest.mark.parametrize(("length", "at"), [(64, 640), (100, 730), (4096, 2048), (4096, 4095)])
def test_a_byte_that_changes_meanwhile_is_not_handed_out(length: int, at: int) -> None:
    """Whoever reads a byte twice, to copy it and to sum it, hands out a wrong one here soon."""
    part = random_bytes(4096 // length * length)
    rows, right = part.size // length, int(part[at])
    original = part.copy()
    target = np.zeros((rows, length + 16), np.uint8)
    pieces = [(0, 1, rows, length, target.ctypes.data, target.strides[0])]
    total, is_done = xxhash.xxh3_64_intdigest(part.data), threading.Event()

    def change() -> None:
        while not is_done.is_set():
            for _ in range(100):
                part[at] = right ^ 0xFF
                part[at] = right

    other = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        found = 0
        for _ in range(3000):
            if read(part, pieces, total):
                found += 1
                assert np.array_equal(target[:, :length].reshape(-1), original)
    finally:
        is_done.set()
        other.join()
        sys.setswitchinterval(interval)
    assert found > 0
    assert read(original, pieces, total)


# ---- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 12])
@pytest.mark.parametrize("dtype", [*native.DTYPES])
@pytest.mark.parametrize("entry_format", [*native.FP4_FORMATS, *native.FP8_FORMATS])
def test_what_is_unpacked_is_what_unpack_unpacks(entry_format: str, dtype: str, gap: int) -> None:
    units, rows, values = 2, 33, 256
    codes, scales = FORMATS[entry_format].planes(values)
    part = random_bytes(units * rows * (codes + scales))
    made = native.prepare(
        entry_format, native.UNPACKING_RULES[entry_format], dtype, 1.0, native.default_level()
    )
    row_bytes = values * (4 if dtype == "float32" else 2)
    target, expected = (np.full((units * rows, row_bytes + gap), GUARD, np.uint8) for _ in "ab")
    for unit in range(units):
        start = part.ctypes.data + unit * rows * (codes + scales)
        made.unpack(
            native.Rows(start, codes),
            native.Rows(start + rows * codes, scales),
            native.Rows(expected[unit * rows :].ctypes.data, row_bytes + gap),
            rows=rows,
            row_values=values,
        )
    piece = (made.address, units, rows, values, target.ctypes.data, row_bytes + gap)
    assert read(part, [piece])
    assert np.array_equal(target, expected)
    total = xxhash.xxh3_64_intdigest(part.data)
    for at in (
        0,
        rows * codes - 1,
        rows * codes,
        part.size - 1,
    ):  # codes and scales, first and last
        part[at] ^= 0x10
        assert not read(part, [piece], total), f"byte {at} went unseen"
        part[at] ^= 0x10
    assert (target[:, row_bytes:] == GUARD).all()


# ---- bad arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [(-1, 8, 0, 1), (0, 25, 0, 1), (9, 8, 0, 1), (0, 8, 0, 2), (0, 8, -1, 1), (0, 8, 1, 0)]
)
def test_a_part_outside_memory_or_table_is_refused(part: tuple[int, int, int, int]) -> None:
    memory, target = np.zeros(24, np.uint8), np.full(24, GUARD, np.uint8)
    table = np.array([(0, 1, 1, 8, target.ctypes.data, 8)], np.int64)
    with pytest.raises(ValueError, match="lies outside 24 bytes or 1 segments"):
        native.read_parts(memory, [native.Part(*part)], [0], table)
    assert (target == GUARD).all()


def test_pieces_that_are_not_the_part_are_refused() -> None:
    part, target = random_bytes(24), np.full(24, GUARD, np.uint8)
    for length in (23, 25):
        with pytest.raises(ValueError, match="code -5"):
            read(part, [(0, 1, 1, length, target.ctypes.data, length)])
    with pytest.raises(ValueError, match="overlap|shares memory"):
        read(part, [(0, 1, 1, 24, part.ctypes.data, 24)])
    with pytest.raises(ValueError, match="shares memory"):
        read(part, [(0, 1, 1, 12, target.ctypes.data + at, 12) for at in (0, 11)])
    with pytest.raises(ValueError, match="stride is shorter"):
        read(part, [(0, 1, 2, 12, target.ctypes.data, 11)])
    with pytest.raises(ValueError, match="address 0"):
        read(part, [(0, 1, 1, 24, 0, 24)])
    assert (target == GUARD).all()
