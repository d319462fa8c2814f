"""Codec of the unquantized formats f32, f16, bf16 and u8: encoding reinterprets bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvstore.codec.arrays import (
    FLOATS,
    STORAGE,
    check_length,
    dtype_name,
    host_view,
    is_remote,
    is_tensor,
    narrow_bfloat16,
    numpy_dtype,
    row_contiguous,
    same_kind,
    widen_bfloat16,
)
from kvstore.codec.protocol import GroupCodec
from kvstore.layout import DTYPE_FORMATS

if TYPE_CHECKING:
    from kvstore.codec.arrays import Array, ArrayT, DType

DTYPES = {entry_format: dtype for dtype, entry_format in DTYPE_FORMATS.items()}
"""Element type of each raw format."""


@dataclass(frozen=True, slots=True)
class RawCodec(GroupCodec):
    """Codec whose entries are the numbers' own bytes, in the machine's byte order."""

    @property
    def dtype(self) -> str:
        """Element type of the format; ``encode`` accepts no other."""
        return DTYPES[self.group.entry_format]

    @override
    def encode(self, values: ArrayT, out: Array | None = None) -> ArrayT:
        _check(values, "values", self.dtype, self.values)
        entries = _reinterpret(values, "uint8")
        if out is None:
            return entries
        target = same_kind(out, "out", entries)
        _check(target, "out", "uint8", self.entry_bytes)
        if target.shape != entries.shape:
            msg = f"out must have shape {list(entries.shape)}, found {list(target.shape)}"
            raise ValueError(msg)
        target[...] = entries
        return target

    @override
    def decode(self, entries: ArrayT, dtype: DType = "bfloat16") -> ArrayT:
        _check(entries, "entries", "uint8", self.entry_bytes)
        target = dtype_name(dtype)
        if (self.dtype == "uint8") != (target == "uint8"):
            expected = "uint8" if self.dtype == "uint8" else " or ".join(FLOATS)
            msg = f"{self.group.entry_format} entries decode to {expected}, found dtype {target}"
            raise ValueError(msg)
        return _convert(_reinterpret(entries, self.dtype), self.dtype, target)


def _check(array: Array, role: str, dtype: str, length: int) -> None:
    """Check the element type and the last axis. Raises ``ValueError`` with found and expected."""
    check_length(array, role, length)
    if is_remote(array):
        found = str(array.dtype).removeprefix("torch.")
        if found != dtype:
            raise ValueError(f"{role} must have dtype {dtype}, found {found}")
    else:
        host_view(array, role, (dtype,))


def _reinterpret(array: ArrayT, dtype: str) -> ArrayT:
    """Return the same bytes as another element type: a view where alignment allows it, else a copy."""
    if is_tensor(array):
        import torch

        target: torch.dtype = getattr(torch, dtype)
        size = target.itemsize
        offsets = [array.data_ptr(), array.storage_offset() * array.element_size()]
        offsets += [stride * array.element_size() for stride in array.stride()[:-1]]
        if array.stride(-1) != 1 or any(offset % size for offset in offsets):
            array = array.clone(memory_format=torch.contiguous_format)
        return array.view(target)
    return row_contiguous(array).view(numpy_dtype(dtype))


def _convert(array: ArrayT, found: str, target: str) -> ArrayT:
    """Convert between float types with one rounding: float32 represents every f16 and bf16 number."""
    if found == target:
        return array
    if is_tensor(array):
        import torch

        return array.to(getattr(torch, target))
    wide = widen_bfloat16(array.view(np.uint16)) if found == "bfloat16" else array
    if target == "bfloat16":
        return narrow_bfloat16(wide.astype(np.float32)).view(numpy_dtype(target))
    with np.errstate(over="ignore"):  # values beyond float16 become infinite
        return wide.astype(STORAGE[target])
