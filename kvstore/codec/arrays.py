"""NumPy arrays and torch tensors seen as one thing: rows of numbers in host memory.

It knows no format. torch is never imported here: an object can only be a tensor if the caller has
imported torch already. NumPy has no bfloat16 of its own, so those numbers travel as uint16 bits.
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

    # Any: what an array may hold is checked when it is used, and differs from call to call.
    Array: TypeAlias = NDArray[Any] | torch.Tensor
    DType: TypeAlias = str | type[np.generic] | np.dtype[np.generic] | torch.dtype
    ArrayT = TypeVar("ArrayT", NDArray[Any], torch.Tensor)

STORAGE: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint8": np.uint8,
}
"""Element types that codecs know, and what NumPy holds them in."""
_MAX_WORK = 10_000
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class HostView:
    """Host memory of an array, shared with it: ``data`` has the storage type of ``dtype``."""

    data: NDArray[np.generic]
    dtype: str


def is_tensor(array: object) -> TypeIs[torch.Tensor]:
    """Tell a torch tensor without importing torch."""
    return host.is_tensor(array)


def is_remote(array: object) -> TypeIs[torch.Tensor]:
    """Tell a tensor whose memory the host cannot read."""
    return is_tensor(array) and array.device.type != "cpu"


def same_kind(array: Array, role: str, like: ArrayT) -> ArrayT:
    """Return ``array``, which must be of the same kind as ``like``: NumPy array or torch tensor.

    Raises:
        ValueError: if it is not.
    """
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
        ValueError: if it is none that codecs know.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = text.removeprefix("torch.")
    if name not in STORAGE:
        raise ValueError(f"unknown dtype {text!r}, expected one of {', '.join(STORAGE)}")
    return name


def check_plain(array: object, role: str) -> None:
    """Raise ``ValueError`` for arrays whose memory does not say it all: masked, sparse, without data."""
    found = host.flaw_of(array)
    if found:
        raise ValueError(f"{role} must be a plain NumPy array or torch tensor, found {found}")


def host_view(array: object, role: str, dtypes: Sequence[str]) -> HostView:
    """Return the memory of an array or CPU tensor, without a copy.

    ``role`` names the array in errors; ``dtypes`` are those that it may have.

    Raises:
        ValueError: if it is neither kind of array, is 0-dimensional, or has another dtype.
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


@functools.cache  # NumPy spells a name anew each time, which takes longer than to pack a row
def _numpy_name(dtype: np.dtype[np.generic]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name}, byte-swapped"


def _tensor_memory(tensor: torch.Tensor, name: str) -> NDArray[np.generic]:
    import torch

    plain = tensor.detach().resolve_neg()
    if name != "bfloat16":
        return cast("NDArray[np.generic]", plain.numpy())
    return cast("NDArray[np.generic]", plain.view(torch.int16).numpy().view(np.uint16))


def check_length(array: object, role: str, length: int) -> None:
    """Check that the last axis of an array or tensor holds ``length`` numbers.

    Raises:
        ValueError: if it does not, or if ``array`` is neither kind of array.
    """
    if not (is_tensor(array) or isinstance(array, np.ndarray)):
        raise ValueError(f"{role} must be a NumPy array or a torch tensor, found {_kind(array)}")
    if array.ndim == 0 or array.shape[-1] != length:
        raise ValueError(
            f"{role} must have {length} numbers along the last axis, "
            f"found shape {list(array.shape)}"
        )


def widen_bfloat16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the floats that bfloat16 bits stand for; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return floats rounded to bfloat16 bits, to nearest even. NaN becomes the quiet NaN 0x7FC0."""
    bits = values.view(np.uint32)
    # Half a step less one, plus one where the kept part is odd: a tie goes to the even code.
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def row_contiguous(view: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array itself if the numbers of a row are neighbours in memory, else a copy."""
    return view if has_contiguous_rows(view) else np.ascontiguousarray(view)


def has_contiguous_rows(view: NDArray[np.generic]) -> bool:
    """Tell whether the numbers along the last axis are neighbours in memory."""
    return view.size == 0 or view.shape[-1] == 1 or view.strides[-1] == view.itemsize


def empty_like(array: ArrayT, shape: tuple[int, ...], dtype: str) -> ArrayT:
    """Return a new array or tensor of the same kind, on the same device."""
    if is_tensor(array):
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    return np.empty(shape, numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of that name; for bfloat16 it is the one of ml_dtypes."""
    if dtype != "bfloat16":
        return np.dtype(STORAGE[dtype])
    import ml_dtypes  # only who asks NumPy for bfloat16 pays for it

    bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def check_in(view: NDArray[np.generic], role: str, shape: tuple[int, ...]) -> None:
    """Check that an input can be read row by row.

    Raises:
        ValueError: for another shape, or rows that are not contiguous.
    """
    if view.shape != shape:
        raise ValueError(f"{role} must have shape {list(shape)}, found {list(view.shape)}")
    if not has_contiguous_rows(view):
        raise ValueError(
            f"{role} must be contiguous along its last axis, "
            f"found a stride of {view.strides[-1]} bytes, expected {view.itemsize}"
        )


def check_out(view: NDArray[np.generic], role: str, shape: tuple[int, ...]) -> None:
    """Check that an output can be written row by row.

    Raises:
        ValueError: for another shape, a read-only array, rows that are not contiguous, or an array
            whose rows share memory.
    """
    check_in(view, role, shape)
    if not view.flags.writeable:
        raise ValueError(f"{role} must be writable, found a read-only array")
    if view.size == 0:
        return
    axes = zip(view.strides, view.shape, strict=True)
    extent = view.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in axes if length > 1):
        if stride < extent:
            raise ValueError(
                f"{role} overlaps itself: strides {list(view.strides)} "
                f"are too short for shape {list(view.shape)}"
            )
        extent += stride * (length - 1)


def check_apart(views: Mapping[str, NDArray[np.generic]]) -> None:
    """Check that no two of these arrays share memory. Interleaved rows are apart.

    Raises:
        ValueError: if two do, or if finding out is too much work.
    """
    for (name, view), (other_name, other) in itertools.combinations(views.items(), 2):
        try:
            # Arrays of entries need a handful of steps; the bound stops adversarial strides.
            shared = np.shares_memory(view, other, max_work=_MAX_WORK)  # type: ignore[arg-type]  # stub names two values only
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            raise ValueError(
                f"{name} and {other_name} overlap in memory, expected separate buffers"
            )


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of several arrays that are evenly spaced in each.

    Units:
        Addresses and strides, one per array, are in bytes.
    """

    rows: int
    addresses: tuple[int, ...]
    strides: tuple[int, ...]


def row_runs(*views: NDArray[np.generic]) -> Iterator[Run]:
    """Split arrays with the same leading axes into as few runs of rows as their strides allow.

    A C-ordered array is one run, and so is a slice of its last axis, whatever its leading shape.
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
        yield Run(rows, addresses, strides)
