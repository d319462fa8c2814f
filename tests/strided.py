"""Arrays of any offset and stride in a buffer whose every other byte is watched."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

REDZONE = 0xA5
"""What bytes hold that nobody may write."""


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> tuple[int, list[int]]:
    """Offset and strides of an array whose rows are contiguous and apart, and may run backwards."""
    strides = [itemsize]
    extent = itemsize * shape[-1]
    for length in reversed(shape[:-1]):
        stride = extent + draw(st.integers(0, 7))
        strides.insert(0, stride * draw(st.sampled_from([1, -1])))
        extent += stride * max(length - 1, 0)
    return draw(st.integers(0, 7)), strides


def place(
    shape: tuple[int, ...], dtype: type[np.generic], where: tuple[int, list[int]]
) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    """A buffer full of red zone, and an unaligned, strided array in it."""
    offset, strides = where
    steps = [stride * max(length - 1, 0) for stride, length in zip(strides, shape, strict=True)]
    buffer = np.full(offset + sum(map(abs, steps)) + strides[-1] + 16, REDZONE, np.uint8)
    first = offset - sum(step for step in steps if step < 0)
    return buffer, np.ndarray(shape, dtype, buffer, first, strides)


def rest_of(buffer: NDArray[np.uint8], view: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Bytes of a buffer outside of a view."""
    copy = buffer.copy()
    start = view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    inside = np.ndarray((*view.shape, view.itemsize), np.uint8, copy, start, (*view.strides, 1))
    inside[...] = REDZONE
    return copy
