"""Chosen entries of an array, or of a pool through a page table: the rows that unpack gives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from _kvstore_native import ffi, lib
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.codec import native, quantized
from kvstore.layout import FORMATS

pytestmark = pytest.mark.usefixtures("level")

every_format = pytest.mark.parametrize("entry_format", [*native.FP4_FORMATS])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


def random_planes(
    shape: tuple[int, ...], values: int, entry_format: str, seed: int = 0
) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    planes = FORMATS[entry_format].planes(values)
    return [rng.integers(0, 256, (*shape, plane), np.uint8) for plane in planes]


def bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)


@every_format
@every_dtype
@pytest.mark.parametrize("values", [32, 96, 512])
def test_rows_of_an_array_are_those_of_unpack(entry_format: str, dtype: str, values: int) -> None:
    codes, scales = random_planes((200,), values, entry_format)
    index = np.random.default_rng(1).integers(0, 200, 333)
    found = fp4.gather(codes, scales, index, entry_format, dtype=dtype)
    expected = fp4.unpack(codes, scales, entry_format, dtype=dtype)[index]
    assert np.array_equal(bits(found), bits(expected))


@every_format
@every_dtype
def test_entries_of_pages_are_found_through_the_table(entry_format: str, dtype: str) -> None:
    # Entries as in device pages: the codes of an entry, then its scales.
    code_bytes, scale_bytes = FORMATS[entry_format].planes(64)
    pool = np.random.default_rng(2).integers(0, 256, (9, 5, code_bytes + scale_bytes), np.uint8)
    codes, scales = pool[..., :code_bytes], pool[..., code_bytes:]
    pages = np.array([7, 0, 3, 3], np.int32)
    index = np.array([0, 4, 5, 19, 10, 15, 15, 9], np.uint64)
    found = fp4.gather(codes, scales, index, entry_format, pages=pages, dtype=dtype)
    whole = fp4.unpack(codes, scales, entry_format, dtype=dtype)
    expected = [whole[pages[e // 5], e % 5] for e in index.astype(int)]
    assert np.array_equal(bits(found), bits(np.stack(expected)))


@given(st.data())
def test_any_strides_and_indices(data: st.DataObject) -> None:
    entry_format = data.draw(st.sampled_from([*native.FP4_FORMATS]))
    pages, entries = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    step, gap = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 7))
    code_bytes, scale_bytes = FORMATS[entry_format].planes(32 * data.draw(st.integers(1, 3)))
    memory = np.random.default_rng(3).integers(
        0, 256, (pages * step, entries, gap + code_bytes + scale_bytes), np.uint8
    )
    pool = memory[
        :: data.draw(st.sampled_from([step, -step])), :: data.draw(st.sampled_from([1, -1]))
    ]
    codes, scales = pool[..., gap : gap + code_bytes], pool[..., gap + code_bytes :]
    table = np.array(data.draw(st.lists(st.integers(0, pages - 1), min_size=1, max_size=5)))
    stop = len(table) * entries
    index = np.array(data.draw(st.lists(st.integers(0, stop - 1), max_size=9)), np.int64)
    out = np.full((len(index), 2 * code_bytes + 3), 0.5, np.float32)
    fp4.gather(codes, scales, index, entry_format, pages=table, dtype="float32", out=out[:, 1:-2])
    whole = fp4.unpack(codes, scales, entry_format, dtype="float32")
    expected = whole[table[index // entries], index % entries]
    assert np.array_equal(bits(out[:, 1:-2]), bits(expected))
    assert (out[:, [0, -2, -1]] == 0.5).all()


@every_format
def test_tensors_give_tensors(entry_format: str) -> None:
    codes, scales = random_planes((3, 4), 64, entry_format)
    index, pages = np.array([1, 6, 6]), np.array([2, 1])
    expected = fp4.gather(codes, scales, index, entry_format, pages=pages, dtype="float16")
    c, s, i, p = (torch.from_numpy(array) for array in (codes, scales, index, pages))
    found = fp4.gather(c, s, i, entry_format, pages=p, dtype=torch.float16)
    assert np.array_equal(bits(found.numpy()), bits(expected))
    out = torch.empty(3, 64, dtype=torch.float16)
    assert fp4.gather(c, s, i, entry_format, pages=p, dtype="float16", out=out) is out
    assert torch.equal(out.view(torch.int16), found.view(torch.int16))


def test_on_a_device_the_same_rows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = map(torch.from_numpy, random_planes((3, 4), 64, "nvfp4"))
    index, pages = torch.tensor([1, 6, 6, 0]), torch.tensor([2, 1])
    expected = fp4.gather(codes, scales, index, "nvfp4", pages=pages, dtype="float32")
    rows = fp4.gather(codes[0], scales[0], index % 4, "nvfp4", dtype="float32")
    monkeypatch.setattr(quantized, "is_remote", lambda array: True)
    found = fp4.gather(codes, scales, index, "nvfp4", pages=pages, dtype="float32")
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    found = fp4.gather(codes[0], scales[0], index % 4, "nvfp4", dtype="float32")
    assert torch.equal(found.view(torch.int32), rows.view(torch.int32))


def test_nothing_chosen_is_nothing() -> None:
    codes, scales = random_planes((4,), 32, "nvfp4")
    assert fp4.gather(codes, scales, np.empty(0, np.int64), "nvfp4").shape == (0, 32)
    assert fp4.gather(codes[:0], scales[:0], np.empty(0, np.int64), "nvfp4").shape == (0, 32)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "index too large": ({"index": [0, 12]}, r"index must lie in [0, 12), found 12"),
    "negative index": ({"index": [-1]}, r"index must lie in [0, 12), found -1"),
    "fraction": ({"index": [0.5]}, "index must be a one-dimensional array of integers"),
    "two axes": ({"index": [[0]]}, "index must be a one-dimensional array of integers"),
    "page too large": ({"pages": [0, 3]}, r"pages must lie in [0, 3), found 3"),
    "negative page": ({"pages": [-1, 0]}, r"pages must lie in [0, 3), found -1"),
    "no page": ({"pages": []}, "pages must be a one-dimensional array of integers"),
    "dtype": ({"dtype": "uint8"}, "dtype must be float32 or float16 or bfloat16, found uint8"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_say_what_was_found(change: dict[str, Any], message: str) -> None:
    codes, scales = random_planes((3, 4), 32, "nvfp4")
    call: dict[str, Any] = {"index": [0], "pages": [0, 1, 2], "dtype": "float32"} | change
    index, pages = np.array(call.pop("index")), np.array(call.pop("pages"))
    out = np.full((len(index), 32), 0.5, np.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        fp4.gather(codes, scales, index, "nvfp4", pages=pages, out=out, **call)
    assert (out == 0.5).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes, scales = random_planes((3, 4), 32, "nvfp4")
    one = np.array([0])
    with pytest.raises(ValueError, match=re.escape("nibbles must have shape [entries, ...]")):
        fp4.gather(codes, scales, one, "nvfp4")
    with pytest.raises(
        ValueError, match=re.escape("nibbles must have shape [pages, entries, ...]")
    ):
        fp4.gather(codes[0], scales[0], one, "nvfp4", pages=one)
    with pytest.raises(ValueError, match="scales must have shape"):
        fp4.gather(codes, scales[:2], one, "nvfp4", pages=one)
    overlapping = np.zeros((4, 64), np.uint8)
    with pytest.raises(ValueError, match="out and nibbles overlap in memory"):
        fp4.gather(
            overlapping[:, :16],
            scales[0],
            one,
            "nvfp4",
            dtype="bfloat16",
            out=overlapping.view(np.uint16)[:1],
        )


def c_gather(**change: Any) -> int:
    """Call C itself with 3 pages of 4 entries of 32 values; what Python refuses before it."""
    codes, scales = random_planes((3, 4), 32, "nvfp4")
    index, table = np.array([5, 0], np.int64), np.array([1, 0], np.int64)
    values = np.full((2, 32), 0.5, np.float32)
    entries: dict[str, Any] = {
        "codes": ffi.cast("uint8_t *", codes.ctypes.data),
        "scales": ffi.cast("uint8_t *", scales.ctypes.data),
        "code_page_stride": 64,
        "code_stride": 16,
        "scale_page_stride": 8,
        "scale_stride": 2,
        "pool_pages": 3,
        "page_entries": 4,
        "table": ffi.cast("int64_t *", table.ctypes.data),
        "table_pages": 2,
    }
    call: dict[str, Any] = {
        "values": ffi.cast("void *", values.ctypes.data),
        "stride": 128,
        "row_values": 32,
    }
    for name, value in change.items():
        if name == "index":
            index[:] = value
        elif name == "table":
            table[:] = value
        elif name == "into_codes":
            call["values"] = ffi.cast("void *", codes.ctypes.data + value)
        else:
            (call if name in call else entries)[name] = value
    code: int = lib.kvstore_gather(
        native.prepare("nvfp4", "v41", "float32", 1.0, native.default_level())._pointer,
        ffi.new("struct kvstore_entries *", entries),
        ffi.cast("int64_t *", index.ctypes.data),
        2,
        call["row_values"],
        call["values"],
        call["stride"],
    )
    assert (values == 0.5).all() == (code != lib.KVSTORE_OK)
    return code


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "OK"),
        ({"table": [2, 2]}, "OK"),
        ({"table": [3, 0]}, "ERR_INDEX"),
        ({"table": [0, -1]}, "ERR_INDEX"),
        ({"index": [8, 0]}, "ERR_INDEX"),
        ({"index": [0, -1]}, "ERR_INDEX"),
        ({"table": [0, 0], "table_pages": 1, "index": [4, 0]}, "ERR_INDEX"),
        ({"pool_pages": 0}, "ERR_INDEX"),
        ({"page_entries": 0}, "ERR_INDEX"),
        ({"values": ffi.NULL}, "ERR_NULL"),
        ({"codes": ffi.NULL}, "ERR_NULL"),
        ({"stride": 127}, "ERR_STRIDE"),
        ({"code_page_stride": 2**62}, "ERR_STRIDE"),
        ({"page_entries": 2**61}, "ERR_STRIDE"),
        ({"row_values": 40}, "ERR_SHAPE"),
        ({"into_codes": 0}, "ERR_OVERLAP"),
        ({"into_codes": 191}, "ERR_OVERLAP"),
        ({"into_codes": -255}, "ERR_OVERLAP"),
    ],
)
def test_c_refuses_what_it_cannot_do(change: dict[str, Any], name: str) -> None:
    assert c_gather(**change) == getattr(lib, f"KVSTORE_{name}")
