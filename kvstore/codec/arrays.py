"""Common view of NumPy arrays and torch tensors: rows of numbers in host memory.

It does not import torch: without torch no object is a tensor. bfloat16, which NumPy lacks, is uint16 bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codec import host

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

    # Any: element types differ between calls and are checked at use.
    Array: TypeAlias = NDArray[Any] | torch.Tensor
    DType: TypeAlias = str | type[np.generic] | np.dtype[np.generic] | torch.dtype
    ArrayT = TypeVar("ArrayT", NDArray[Any], torch.Tensor)

STORAGE: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint8": np.uint8,
}
"""NumPy storage types of the element types that codecs support."""
_MAX_WORK = 10_000
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class HostView:
    """Host memory of an array, shared with it; ``data`` has the storage type of ``dtype``."""

    data: NDArray[np.generic]
    dtype: str


def is_tensor(array: object) -> TypeIs[torch.Tensor]:
    """Return whether an object is a torch tensor, without importing torch."""
    return host.is_tensor(array)


def is_remote(array: object) -> TypeIs[torch.Tensor]:
    """Return whether an object is a tensor in memory that the host cannot read."""
    return is_tensor(array) and array.device.type != "cpu"


def same_kind(array: Array, role: str, like: ArrayT) -> ArrayT:
    """Return ``array``. Raises ``ValueError`` unless its kind, array or tensor, is that of ``like``."""
    found, expected = _kind(array), _kind(like)
    if found != expected:
        raise ValueError(f"{role} must be {expected} like the input, found {found}")
    return cast("ArrayT", array)


def _kind(array: object) -> str:
    if is_tensor(array):
        return "a torch tensor"
    return "a NumPy array" if isinstance(array, np.ndarray) else type(array).__name__


def dtype_name(dtype: DType) -> str:
    """Return the name of a dtype given as a name, a NumPy dtype or type, or a torch dtype.

    Raises:
        ValueError: for a dtype that codecs do not support.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = text.removeprefix("torch.")
    if name not in STORAGE:
        raise ValueError(f"unknown dtype {text!r}, expected one of {', '.join(STORAGE)}")
    return name


def check_plain(array: object, role: str) -> None:
    """Raise ``ValueError`` for masked arrays, sparse tensors and tensors without data."""
    found = host.flaw_of(array)
    if found:
        raise ValueError(f"{role} must be a plain NumPy array or torch tensor, found {found}")


def host_view(array: object, role: str, dtypes: Sequence[str]) -> HostView:
    """Return the memory of an array or CPU tensor, without a copy.

    ``role`` names the array in errors; ``dtypes`` are the accepted ones. Raises ``ValueError`` if
    it is neither kind of array, is 0-dimensional, or has another dtype.
    """
    check_plain(array, role)
    if is_tensor(array):
        name = str(array.dtype).removeprefix("torch.")
        data = _tensor_memory(array, name) if name in dtypes else None
    elif isinstance(array, np.ndarray):
        name = _numpy_name(array.dtype)
        data = array.view(STORAGE[name]) if name in dtypes else None
    else:
        raise ValueError(f"{role} must be a NumPy array or a torch tensor, found {_kind(array)}")
    if data is None:
        raise ValueError(f"{role} must have dtype {' or '.join(dtypes)}, found {name}")
    if data.ndim == 0:
        raise ValueError(f"{role} must have at least one axis, found a scalar")
    return HostView(data, name)


@functools.cache  # NumPy builds the name each time, which takes longer than quantizing a row
def _numpy_name(dtype: np.dtype[np.generic]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name}, byte-swapped"


def _tensor_memory(tensor: torch.Tensor, name: str) -> NDArray[np.generic]:
    import torch

    plain = tensor.detach().resolve_neg()
    if name != "bfloat16":
        return cast("NDArray[np.generic]", plain.numpy())
    return cast("NDArray[np.generic]", plain.view(torch.int16).numpy().view(np.uint16))


def check_length(array: object, role: str, length: int) -> None:
    """Raise ``ValueError`` unless ``array`` is an array or tensor with ``length`` numbers in its last axis."""
    if not (is_tensor(array) or isinstance(array, np.ndarray)):
        raise ValueError(f"{role} must be a NumPy array or a torch tensor, found {_kind(array)}")
    if array.ndim == 0 or array.shape[-1] != length:
        msg = f"{role} must have {length} numbers along the last axis, found shape {list(array.shape)}"
        raise ValueError(msg)


def widen_bfloat16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the floats of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return floats rounded to bfloat16 bits, to nearest even. NaN becomes the quiet NaN 0x7FC0."""
    bits = values.view(np.uint32)
    # Half a step less one, plus one where the kept part is odd: a tie goes to the even code.
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def row_contiguous(view: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array itself if its rows are contiguous, else a copy."""
    return view if has_contiguous_rows(view) else np.ascontiguousarray(view)


def has_contiguous_rows(view: NDArray[np.generic]) -> bool:
    """Return whether the last axis is contiguous."""
    return view.size == 0 or view.shape[-1] == 1 or view.strides[-1] == view.itemsize


def empty_like(array: ArrayT, shape: tuple[int, ...], dtype: str) -> ArrayT:
    """Return a new array or tensor of the kind of ``array``, on its device."""
    if is_tensor(array):
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    return np.empty(shape, numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of a name; ml_dtypes has the one of bfloat16."""
    if dtype != "bfloat16":
        return np.dtype(STORAGE[dtype])
    import ml_dtypes  # imported only for bfloat16 of NumPy

    bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def check_in(view: NDArray[np.generic], role: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` for an input of another shape, or with rows that are not contiguous."""
    if view.shape != shape:
        raise ValueError(f"{role} must have shape {list(shape)}, found {list(view.shape)}")
    if not has_contiguous_rows(view):
        msg = f"{role} must be contiguous along its last axis, found a stride of {view.strides[-1]} bytes, expected {view.itemsize}"
        raise ValueError(msg)


def check_out(view: NDArray[np.generic], role: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` as :func:`check_in`, and for an output that is read-only or overlaps itself."""
    check_in(view, role, shape)
    if not view.flags.writeable:
        raise ValueError(f"{role} must be writable, found a read-only array")
    if view.size == 0:
        return
    axes = zip(view.strides, view.shape, strict=True)
    extent = view.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in axes if length > 1):
        if stride < extent:
            msg = f"{role} overlaps itself: strides {list(view.strides)} are too short for shape {list(view.shape)}"
            raise ValueError(msg)
        extent += stride * (length - 1)


def check_apart(views: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise ``ValueError`` if two arrays share memory, or the check exceeds its bound.

    Interleaved rows do not share memory.
    """
    for (name, view), (other_name, other) in itertools.combinations(views.items(), 2):
        try:
            # Arrays of entries need few steps; the bound stops adversarial strides.
            shared = np.shares_memory(view, other, max_work=_MAX_WORK)  # type: ignore[arg-type]  # stub names two values only
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            raise ValueError(
                f"{name} and {other_name} overlap in memory, expected separate buffers"
            )


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows that are evenly spaced in each of several arrays; addresses and strides, one per array, in bytes."""

    rows: int
    addresses: tuple[int, ...]
    strides: tuple[int, ...]


def row_ranges(*views: NDArray[np.generic]) -> Iterator[RowRange]:
    """Split arrays with equal leading axes into the fewest ranges of evenly spaced rows.

    A C-ordered array is one range, and so is a slice of its last axis, whatever its leading shape.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis, length in enumerate(views[0].shape[:-1]):
        strides = tuple(view.strides[axis] for view in views)
        if length == 1:
            continue
        if axes and axes[-1][1] == tuple(stride * length for stride in strides):
            axes[-1] = (axes[-1][0] * length, strides)
        else:
            axes.append((length, strides))
    rows, strides = axes.pop() if axes else (1, (0,) * len(views))
    bases = [view.__array_interface__["data"][0] for view in views]
    for index in itertools.product(*(range(length) for length, _ in axes)):
        steps = [
            sum(i * axis_strides[array] for i, (_, axis_strides) in zip(index, axes, strict=True))
            for array in range(len(views))
        ]
        addresses = tuple(base + step for base, step in zip(bases, steps, strict=True))
        yield RowRange(rows, addresses, strides)
