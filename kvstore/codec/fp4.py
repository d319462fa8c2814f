"""FP4 for arrays and tensors: checks, shapes and memory around the C kernels.

The last axis is packed, in blocks that share one scale. The formats and their rules are normative
in docs/format.md, section 3; :mod:`kvstore.codec.numpy_reference` is the same in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codec import native
from kvstore.codec.arrays import (
    FLOATS,
    check_apart,
    check_length,
    check_out,
    dtype_name,
    empty_like,
    host_view,
    is_remote,
    is_tensor,
    row_contiguous,
    row_runs,
    same_kind,
    widen_bfloat16,
)
from kvstore.codec.protocol import Codec
from kvstore.layout import FORMATS, SCALE_RULES, LayerGroup

if TYPE_CHECKING:
    import torch

    from kvstore.codec.arrays import Array, ArrayT, DType

BYTES = ("uint8",)
PLANES = ("nibbles", "scales")


@dataclass(slots=True)
class PackStats:
    """What :func:`pack` met. It adds to both counts, so one object can sum over calls."""

    nan_blocks: int = 0
    """Blocks that held a NaN and were stored as all NaN."""
    inf_values: int = 0
    """Infinities in the input. Outside a NaN block they were stored as the largest value."""


@dataclass(frozen=True, slots=True)
class Fp4Codec(Codec):
    """Entries are their nibbles, then their scales. The global scale is 1."""

    group: LayerGroup

    @property
    @override
    def values(self) -> int:
        return self.group.values

    @property
    @override
    def entry_bytes(self) -> int:
        return self.group.entry_bytes

    @override
    def encode(self, values: ArrayT, out: Array | None = None) -> ArrayT:
        check_length(values, "values", self.values)
        if out is None:
            entries = empty_like(values, (*values.shape[:-1], self.entry_bytes), "uint8")
        else:
            entries = same_kind(out, "out", values)
        check_length(entries, "out", self.entry_bytes)
        planes = self._planes(entries)
        pack(values, self.group.entry_format, scale_rule=self.group.scale_rule, out=planes)
        return entries

    @override
    def decode(self, entries: ArrayT, dtype: DType = "bfloat16") -> ArrayT:
        check_length(entries, "entries", self.entry_bytes)
        return unpack(*self._planes(entries), self.group.entry_format, dtype=dtype)

    def _planes(self, entries: ArrayT) -> tuple[ArrayT, ArrayT]:
        nibble_bytes = self.group.planes[0]
        return entries[..., :nibble_bytes], entries[..., nibble_bytes:]


def check_format(entry_format: str, scale_rule: str | None = None) -> str:
    """Return the scale rule to use: the one given, or the default of the format.

    Raises:
        ValueError: for a format that is not FP4, or a rule that is not the format's.
    """
    if entry_format not in native.FORMATS:
        known = ", ".join(native.FORMATS)
        raise ValueError(f"unknown FP4 format {entry_format!r}, expected one of {known}")
    rules = SCALE_RULES[entry_format]
    rule = rules[0] if scale_rule is None else scale_rule
    if rule not in rules:
        known = ", ".join(rules)
        raise ValueError(f"{entry_format} has no scale rule {rule!r}, expected one of {known}")
    return rule


def _check_global_scale(global_scale: float, entry_format: str, scale_rule: str) -> None:
    if not 2.0**-100 <= global_scale <= 2.0**100:
        raise ValueError(f"global_scale must lie in [2**-100, 2**100], found {global_scale!r}")
    if global_scale != 1 and (entry_format == "mxfp4" or scale_rule == "v41"):
        name = f"{entry_format} has" if entry_format == "mxfp4" else "scale rule 'v41' has"
        raise ValueError(f"{name} no global scale, expected 1, found {global_scale!r}")


def _planes(leading: tuple[int, ...], values: int, entry_format: str) -> list[tuple[int, ...]]:
    """Shapes of nibbles and scales. Raises ``ValueError`` if the values do not fill blocks."""
    block = FORMATS[entry_format].scale_block
    if values % block:
        raise ValueError(
            f"the last axis must be a multiple of the {entry_format} block of {block}, "
            f"found {values} values"
        )
    return [(*leading, plane) for plane in FORMATS[entry_format].planes(values)]


def pack(
    values: ArrayT,
    entry_format: str,
    *,
    scale_rule: str | None = None,
    out: tuple[Array, Array] | None = None,
    global_scale: float = 1.0,
    stats: PackStats | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Pack float32, float16 or bfloat16 values to FP4, and return their nibbles and scales.

    The result is of the same kind as ``values``: NumPy arrays, or tensors on the same device. With
    ``out=(nibbles, scales)`` it is written there and returned; rows may be strided, so both can be
    slices of one array of entries, ``entries[..., :n // 2]`` and ``entries[..., n // 2:]``.

    ``scale_rule`` is the format's first in ``layout.SCALE_RULES`` unless given. ``global_scale``,
    for ``nvfp4`` with the rule ``torchao``, is what decoding multiplies by.

    Shapes:
        values ``[..., n]``; nibbles uint8 ``[..., n / 2]``, value 2i in the low half of byte i;
        scales uint8 ``[..., n / block]``, with blocks of 16 (``nvfp4``) or 32 (``mxfp4``).

    Raises:
        ValueError: naming what was found and what was expected; nothing was written then.

    Cost: reads the array where it lies, unless the last axis is not contiguous: then one copy. A
        tensor on another device is copied to the host, and its result back: this synchronises.
    """
    rule = check_format(entry_format, scale_rule)
    _check_global_scale(global_scale, entry_format, rule)
    if out is not None and len(out) != 2:
        raise ValueError(f"out must be the pair (nibbles, scales), found {len(out)} items")
    planes = out and (
        same_kind(out[0], "out nibbles", values),
        same_kind(out[1], "out scales", values),
    )
    if is_remote(values):
        # Packing belongs to the write path, which ends in host memory anyway.
        packed = pack(
            values.cpu(), entry_format, scale_rule=rule, global_scale=global_scale, stats=stats
        )
        return _to_device(packed, values.device, planes)
    source = host_view(values, "values", FLOATS)
    shapes = _planes(source.data.shape[:-1], source.data.shape[-1], entry_format)
    if planes is None:
        planes = (empty_like(values, shapes[0], "uint8"), empty_like(values, shapes[1], "uint8"))
    targets = [
        _target(plane, f"out {name}", shape, "uint8")
        for plane, name, shape in zip(planes, PLANES, shapes, strict=True)
    ]
    data = row_contiguous(source.data)
    check_apart({"out nibbles": targets[0], "out scales": targets[1], "values": data})
    for run in row_runs(data, *targets):
        rows = [native.Rows(*place) for place in zip(run.addresses, run.strides, strict=True)]
        nan_blocks, inf_values = native.pack(
            *rows,
            rows=run.rows,
            row_values=data.shape[-1],
            dtype=native.DTYPES[source.dtype],
            entry_format=native.FORMATS[entry_format],
            rule=native.RULES[rule],
            global_scale=global_scale,
        )
        if stats is not None:
            stats.nan_blocks += nan_blocks
            stats.inf_values += inf_values
    return planes


def unpack(
    nibbles: ArrayT,
    scales: Array,
    entry_format: str,
    *,
    dtype: DType = "bfloat16",
    out: Array | None = None,
    global_scale: float = 1.0,
) -> ArrayT:
    """Unpack FP4 to float32, float16 or bfloat16: the exact product, rounded once.

    The result is of the same kind as ``nibbles``: a NumPy array, or a tensor on the same device. In
    NumPy, bfloat16 is the type of ml_dtypes; ``out=`` may also be an array of uint16 for its bits.

    Shapes:
        nibbles uint8 ``[..., n / 2]``; scales uint8 ``[..., n / block]``; result ``[..., n]``.

    Raises:
        ValueError: naming what was found and what was expected; nothing was written then.

    Cost: as :func:`pack`, but tensors of another device are decoded there, by a table lookup.
    """
    check_format(entry_format)
    _check_global_scale(global_scale, entry_format, "")
    target_dtype = dtype_name(dtype)
    if target_dtype not in FLOATS:
        raise ValueError(f"dtype must be {' or '.join(FLOATS)}, found {target_dtype}")
    scales = same_kind(scales, "scales", nibbles)
    values = None if out is None else same_kind(out, "out", nibbles)
    if is_remote(nibbles) or is_remote(scales):
        return _unpack_remote((nibbles, scales), entry_format, target_dtype, values, global_scale)
    sources = [
        row_contiguous(host_view(nibbles, "nibbles", BYTES).data),
        row_contiguous(host_view(scales, "scales", BYTES).data),
    ]
    shape = unpacked_shape(sources[0].shape, sources[1].shape, entry_format)
    if values is None:
        values = empty_like(nibbles, shape, target_dtype)
    target = _target(values, "out", shape, target_dtype)
    check_apart({"out": target, "nibbles": sources[0]})
    check_apart({"out": target, "scales": sources[1]})
    for run in row_runs(*sources, target):
        rows = [native.Rows(*place) for place in zip(run.addresses, run.strides, strict=True)]
        native.unpack(
            *rows,
            rows=run.rows,
            row_values=shape[-1],
            dtype=native.DTYPES[target_dtype],
            entry_format=native.FORMATS[entry_format],
            global_scale=global_scale,
        )
    return values


def unpacked_shape(
    nibbles: tuple[int, ...], scales: tuple[int, ...], entry_format: str
) -> tuple[int, ...]:
    """Return the shape of the values that planes of these shapes hold.

    Raises:
        ValueError: if the two do not belong together.
    """
    shapes = _planes(nibbles[:-1], 2 * nibbles[-1], entry_format)
    if scales != shapes[1]:
        raise ValueError(
            f"scales must have shape {list(shapes[1])} for {entry_format} nibbles of shape "
            f"{list(nibbles)}, found {list(scales)}"
        )
    return (*nibbles[:-1], 2 * nibbles[-1])


def relative_error(
    values: ArrayT, entry_format: str, *, scale_rule: str | None = None, global_scale: float = 1.0
) -> float:
    """Return the relative root-mean-square error of packing values and unpacking them.

    0 for no values or only zeros; NaN if any value is NaN or infinite.

    Cost: packs, unpacks and compares in float64 on the host: about 30 bytes a value.
    """
    if is_remote(values):
        values = values.cpu()
    source = host_view(values, "values", FLOATS)
    exact = widen_bfloat16(source.data) if source.dtype == "bfloat16" else source.data
    wide = exact.astype(np.float64)
    packed = pack(values, entry_format, scale_rule=scale_rule, global_scale=global_scale)
    nibbles = host_view(packed[0], "nibbles", BYTES).data
    scales = host_view(packed[1], "scales", BYTES).data
    decoded = np.empty(wide.shape, np.float32)
    unpack(nibbles, scales, entry_format, dtype="float32", out=decoded, global_scale=global_scale)
    with np.errstate(invalid="ignore"):
        error = float(np.square(decoded - wide).sum())
        power = float(np.square(wide).sum())
    return math.sqrt(error / power) if power else 0.0


def _target(out: Array, role: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """Memory of a checked output. NumPy's uint16 may stand for bfloat16."""
    if is_remote(out):
        raise ValueError(f"{role} must be on the input's device, cpu, found {out.device}")
    bits = dtype == "bfloat16" and isinstance(out, np.ndarray) and out.dtype == np.uint16
    view = out if bits else host_view(out, role, (dtype,)).data
    check_out(view, role, shape)
    return view


def _to_device(
    packed: Sequence[torch.Tensor],
    device: torch.device,
    out: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move packed planes to a device, into ``out`` if that is given."""
    if out is None:
        return packed[0].to(device), packed[1].to(device)
    for target, plane, name in zip(out, packed, PLANES, strict=True):
        _check_remote(target, f"out {name}", plane.shape, plane.dtype, device)
    return out[0].copy_(packed[0]), out[1].copy_(packed[1])


def _check_remote(
    tensor: torch.Tensor,
    role: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if not is_tensor(tensor):
        raise ValueError(f"{role} must be a torch tensor, found {type(tensor).__name__}")
    found = (list(tensor.shape), tensor.dtype, tensor.device)
    expected = (list(shape), dtype, device)
    if found != expected:
        raise ValueError(f"{role} must have shape, dtype and device {expected}, found {found}")


def _unpack_remote(
    planes: tuple[torch.Tensor, torch.Tensor],
    entry_format: str,
    dtype: str,
    out: torch.Tensor | None,
    global_scale: float,
) -> torch.Tensor:
    from kvstore.codec import torch_decode

    nibbles, scales = planes
    shape = unpacked_shape(tuple(nibbles.shape), tuple(scales.shape), entry_format)
    _check_remote(nibbles, "nibbles", nibbles.shape, torch_decode.BYTES, nibbles.device)
    _check_remote(scales, "scales", scales.shape, torch_decode.BYTES, nibbles.device)
    if out is not None:
        _check_remote(out, "out", shape, torch_decode.DTYPES[dtype], nibbles.device)
    values = torch_decode.unpack(nibbles, scales, entry_format, dtype, global_scale)
    return values if out is None else out.copy_(values)
