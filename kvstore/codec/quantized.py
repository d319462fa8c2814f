"""Quantized formats (FP4, FP8) for arrays and tensors: argument checks and memory around the C kernels.

The last axis is quantized to two planes: the codes of its values, and the scales that they share.
docs/format.md, section 3, is normative for the formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    check_plain,
    dtype_name,
    empty_like,
    host_view,
    is_remote,
    is_tensor,
    row_contiguous,
    row_ranges,
    same_kind,
)
from kvstore.codec.protocol import GroupCodec
from kvstore.errors import brief
from kvstore.layout import FORMATS, SCALE_RULES

if TYPE_CHECKING:
    import torch

    from kvstore.codec.arrays import Array, ArrayT, DType

BYTES = ("uint8",)


@dataclass(slots=True)
class PackStats:
    """Counters of quantization. Calls add to them, so one object can sum over calls."""

    nan_blocks: int = 0
    """Blocks that held a NaN and were stored as all NaN; under ``fp8`` a row is one block."""
    inf_values: int = 0
    """Infinities in the input. Outside NaN blocks they were stored as the largest value."""
    is_measured: bool = False
    """Whether to measure the error, which doubles the cost."""
    squared_error: float = 0.0
    """Sum of the squared differences of values and their dequantized values, in the input dtype."""
    squared_values: float = 0.0
    """Sum of the squares of the values."""

    @property
    def relative_error(self) -> float:
        """Relative root-mean-square error of the values quantized while ``is_measured``.

        0 for no values or only zeros; NaN if any value is NaN or infinite.
        """
        if not math.isfinite(self.squared_values):
            return math.nan
        return math.sqrt(self.squared_error / self.squared_values) if self.squared_values else 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """Quantized format with one of its scale rules: converts rows of numbers to codes and scales, and back.

    Threads: any; a kernel has no state.
    """

    entry_format: str
    scale_rule: str
    global_scale: float = 1.0
    """Factor of every dequantized value, one for all rows."""
    level: str | None = None
    """One of ``native.levels()``; the default one if None."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two planes in errors."""
        return ("nibbles" if self.entry_format in native.FP4_FORMATS else "codes", "scales")

    def prepared(self, dtype: str) -> native.Prepared:
        """Return the C kernels for numbers of a dtype."""
        level = native.default_level() if self.level is None else self.level
        return native.prepare(self.entry_format, self.scale_rule, dtype, self.global_scale, level)

    def unpack_tensors(self, codes: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
        """Dequantize checked tensors on their device, bit for bit as the C kernels do."""
        from kvstore.codec import torch_decode

        if self.entry_format in native.FP8_FORMATS:
            return torch_decode.unpack_fp8(codes, scales, self.entry_format, dtype)
        return torch_decode.unpack(codes, scales, self.entry_format, dtype, self.global_scale)


@dataclass(frozen=True, slots=True)
class QuantizedCodec(GroupCodec):
    """Codec whose entries are the codes of their values, then the scales."""

    kernel: Kernel

    @override
    def encode(
        self, values: ArrayT, out: Array | None = None, stats: PackStats | None = None
    ) -> ArrayT:
        check_length(values, "values", self.values)
        if out is None:
            entries = empty_like(values, (*values.shape[:-1], self.entry_bytes), "uint8")
        else:
            entries = same_kind(out, "out", values)
        check_length(entries, "out", self.entry_bytes)
        pack(values, self.kernel, out=self._planes(entries), stats=stats)
        return entries

    @override
    def decode(self, entries: ArrayT, dtype: DType = "bfloat16") -> ArrayT:
        check_length(entries, "entries", self.entry_bytes)
        return unpack(*self._planes(entries), self.kernel, dtype=dtype)

    def _planes(self, entries: ArrayT) -> tuple[ArrayT, ArrayT]:
        code_bytes = self.group.planes[0]
        return entries[..., :code_bytes], entries[..., code_bytes:]


def check_format(
    entry_format: str, scale_rule: str | None, formats: Mapping[str, int], family: str
) -> str:
    """Return the given scale rule, by default the format's first. Raises ``ValueError`` for unknown names."""
    if not isinstance(entry_format, str) or entry_format not in formats:
        known = ", ".join(formats)
        raise ValueError(f"unknown {family} format {brief(entry_format)}, expected one of {known}")
    rules = SCALE_RULES[entry_format]
    rule = rules[0] if scale_rule is None else scale_rule
    if not isinstance(rule, str) or rule not in rules:
        known = ", ".join(rules)
        raise ValueError(f"{entry_format} has no scale rule {brief(rule)}, expected one of {known}")
    return rule


def plane_shapes(leading: tuple[int, ...], values: int, entry_format: str) -> list[tuple[int, ...]]:
    """Return the shapes of codes and scales of rows of ``values`` values.

    Raises ``ValueError`` if the values do not fill blocks, or rows with a scale have no values.
    """
    block = FORMATS[entry_format].scale_block
    if block == 0 and values == 0:
        msg = f"the last axis must hold at least one value, as {entry_format} stores a scale for each row, found 0 values"
        raise ValueError(msg)
    if block and values % block:
        msg = f"the last axis must be a multiple of the {entry_format} block of {block}, found {values} values"
        raise ValueError(msg)
    return [(*leading, plane) for plane in FORMATS[entry_format].planes(values)]


def pack(
    values: ArrayT,
    kernel: Kernel,
    *,
    out: tuple[Array, Array] | None = None,
    stats: PackStats | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Quantize float32, float16 or bfloat16 values, and return their codes and scales.

    Raises:
        ValueError: naming the value found and the values expected; nothing was written.

    Cost: reads the array in place, or a copy if the last axis is not contiguous. A tensor on another
        device is copied to the host, and its result back: this synchronises.
    """
    given: object = out
    if given is not None and not (isinstance(given, Sequence) and len(given) == 2):
        found = f"{len(given)} items" if isinstance(given, Sequence) else brief(given)
        raise ValueError(f"out must be the pair ({', '.join(kernel.names)}), found {found}")
    measured: object = stats
    if not isinstance(measured, PackStats | None):
        raise ValueError(f"stats must be a PackStats or None, found {brief(measured)}")
    check_plain(values, "values")
    names = [f"out {name}" for name in kernel.names]
    planes = out and (same_kind(out[0], names[0], values), same_kind(out[1], names[1], values))
    if is_remote(values):
        # Only the write path quantizes, and it ends in host memory.
        return _to_device(pack(values.cpu(), kernel, stats=stats), values.device, planes, names)
    source = host_view(values, "values", FLOATS)
    shapes = plane_shapes(source.data.shape[:-1], source.data.shape[-1], kernel.entry_format)
    if planes is None:
        planes = (empty_like(values, shapes[0], "uint8"), empty_like(values, shapes[1], "uint8"))
    targets = [
        _target(plane, name, shape, "uint8")
        for plane, name, shape in zip(planes, names, shapes, strict=True)
    ]
    data = row_contiguous(source.data)
    check_apart({**dict(zip(names, targets, strict=True)), "values": data})
    prepared = kernel.prepared(source.dtype)
    for each in row_ranges(data, *targets):
        rows = [native.Rows(*start) for start in zip(each.addresses, each.strides, strict=True)]
        result = prepared.pack(
            *rows,
            rows=each.rows,
            row_values=data.shape[-1],
            is_measured=stats is not None and stats.is_measured,
        )
        if stats is not None:
            stats.nan_blocks += result.nan_blocks
            stats.inf_values += result.inf_values
            stats.squared_error += result.squared_error
            stats.squared_values += result.squared_values
    return planes


def unpack(
    codes: ArrayT,
    scales: Array,
    kernel: Kernel,
    *,
    dtype: DType = "bfloat16",
    out: Array | None = None,
) -> ArrayT:
    """Dequantize to float32, float16 or bfloat16: the exact product, rounded once.

    Raises as :func:`pack`; tensors of another device are decoded there.
    """
    target_dtype = _float_name(dtype)
    scales = same_kind(scales, kernel.names[1], codes)
    values = None if out is None else same_kind(out, "out", codes)
    if is_remote(codes) or is_remote(scales):
        return _unpack_remote((codes, scales), kernel, target_dtype, values)
    sources = _host_planes((codes, scales), kernel)
    shape = _unpacked_shape(sources[0].shape, sources[1].shape, kernel)
    if values is None:
        values = empty_like(codes, shape, target_dtype)
    target = _target_apart(values, shape, target_dtype, sources, kernel)
    prepared = kernel.prepared(target_dtype)
    for each in row_ranges(*sources, target):
        rows = [native.Rows(*start) for start in zip(each.addresses, each.strides, strict=True)]
        prepared.unpack(*rows, rows=each.rows, row_values=shape[-1])
    return values


def gather(
    codes: ArrayT,
    scales: Array,
    index: Array,
    kernel: Kernel,
    *,
    pages: Array | None = None,
    dtype: DType = "bfloat16",
    out: Array | None = None,
) -> ArrayT:
    """Dequantize chosen entries of an array, or of a pool of pages through a page table.

    Raises as :func:`pack`. Reads the chosen entries only; tensors of another device are gathered there.
    """
    target_dtype = _float_name(dtype)
    scales = same_kind(scales, kernel.names[1], codes)
    values = None if out is None else same_kind(out, "out", codes)
    chosen = _indices(index, "index")
    table = None if pages is None else _indices(pages, "pages")
    _unpacked_shape(tuple(codes.shape), tuple(scales.shape), kernel)
    if codes.ndim != (2 if table is None else 3):
        expected = "[entries, ...]" if table is None else "[pages, entries, ...]"
        raise ValueError(
            f"{kernel.names[0]} must have shape {expected}, found shape {list(codes.shape)}"
        )
    _check_indices(chosen, table, tuple(codes.shape[:-1]))
    if is_remote(codes) or is_remote(scales):
        selected = _rows_of(chosen, table, codes)
        rows = codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])
        planes = rows[0].index_select(0, selected), rows[1].index_select(0, selected)
        return _unpack_remote(planes, kernel, target_dtype, values)
    sources = _host_planes((codes, scales), kernel)
    row_values = sources[0].shape[-1] * 8 // FORMATS[kernel.entry_format].value_bits
    shape = (len(chosen), row_values)
    if values is None:
        values = empty_like(codes, shape, target_dtype)
    target = _target_apart(values, shape, target_dtype, sources, kernel)
    if target.size == 0:
        return values
    pools = [source if table is not None else source[None] for source in sources]
    planes_at = [native.Pool(pool.ctypes.data, *pool.strides[:2]) for pool in pools]
    kernel.prepared(target_dtype).gather(
        planes_at[0],
        planes_at[1],
        chosen.ctypes.data,
        native.Rows(target.ctypes.data, target.strides[0]),
        pages=(pools[0].shape[0], pools[0].shape[1]),
        table=None if table is None else (table.ctypes.data, len(table)),
        rows=len(chosen),
        row_values=row_values,
    )
    return values


def _float_name(dtype: DType) -> str:
    """Return the name of a float dtype. Raises ``ValueError`` for any other dtype."""
    name = dtype_name(dtype)
    if name not in FLOATS:
        raise ValueError(f"dtype must be {' or '.join(FLOATS)}, found {name}")
    return name


def _host_planes(planes: Sequence[Array], kernel: Kernel) -> list[NDArray[np.generic]]:
    """Return codes and scales as host memory with contiguous rows."""
    return [
        row_contiguous(host_view(plane, name, BYTES).data)
        for plane, name in zip(planes, kernel.names, strict=True)
    ]


def _target_apart(
    values: Array,
    shape: tuple[int, ...],
    dtype: str,
    sources: Sequence[NDArray[np.generic]],
    kernel: Kernel,
) -> NDArray[np.generic]:
    """Return the memory of an output; it must not overlap the planes, which may overlap each other."""
    target = _target(values, "out", shape, dtype)
    for source, name in zip(sources, kernel.names, strict=True):
        check_apart({"out": target, name: source})
    return target


def _rows_of(
    chosen: NDArray[np.int64], table: NDArray[np.int64] | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the row numbers of chosen entries in a pool, as a tensor on the pool's device."""
    import torch

    rows = chosen
    if table is not None:
        entries = like.shape[1]
        rows = table[chosen // entries] * entries + chosen % entries
    return torch.from_numpy(rows).to(like.device)


def _indices(array: Array, role: str) -> NDArray[np.int64]:
    """Return a one-dimensional array or tensor of integers as contiguous int64."""
    check_plain(array, role)
    if is_tensor(array):
        array = array.detach().cpu().numpy()
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{role} must be a one-dimensional array of integers")
    return np.ascontiguousarray(array, np.int64)


def _check_indices(
    chosen: NDArray[np.int64], table: NDArray[np.int64] | None, pool: tuple[int, ...]
) -> None:
    known = pool[0] if table is None else len(table) * pool[1]
    bounds = [("index", chosen, known)]
    if table is not None:
        bounds.append(("pages", table, pool[0]))
    for role, array, stop in bounds:
        outside = array[(array < 0) | (array >= stop)]
        if outside.size:
            raise ValueError(f"{role} must lie in [0, {stop}), found {outside[0]}")


def _unpacked_shape(
    codes: tuple[int, ...], scales: tuple[int, ...], kernel: Kernel
) -> tuple[int, ...]:
    """Return the shape of the values in planes of these shapes. Raises ``ValueError`` for a mismatch."""
    values = codes[-1] * 8 // FORMATS[kernel.entry_format].value_bits
    expected = plane_shapes(codes[:-1], values, kernel.entry_format)[1]
    if scales != expected:
        raise ValueError(
            f"scales must have shape {list(expected)} for {kernel.entry_format} {kernel.names[0]} "
            f"of shape {list(codes)}, found {list(scales)}"
        )
    return (*codes[:-1], values)


def relative_error(values: ArrayT, kernel: Kernel) -> float:
    """Return the relative root-mean-square error of quantizing values, as :attr:`PackStats.relative_error`."""
    stats = PackStats(is_measured=True)
    pack(values, kernel, stats=stats)
    return stats.relative_error


def _target(out: Array, role: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """Return the memory of a checked output. NumPy's uint16 may represent bfloat16."""
    if is_remote(out):
        raise ValueError(f"{role} must be on the input's device, cpu, found {out.device}")
    bits = dtype == "bfloat16" and isinstance(out, np.ndarray) and out.dtype == np.uint16
    view = out if bits else host_view(out, role, (dtype,)).data
    check_out(view, role, shape)
    return view


def _to_device(
    planes: Sequence[torch.Tensor],
    device: torch.device,
    out: Sequence[torch.Tensor] | None,
    names: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move quantized planes to a device, into ``out`` if given."""
    if out is None:
        return planes[0].to(device), planes[1].to(device)
    for target, plane, name in zip(out, planes, names, strict=True):
        _check_remote(target, name, plane.shape, plane.dtype, device)
    return out[0].copy_(planes[0]), out[1].copy_(planes[1])


def _check_remote(
    tensor: torch.Tensor, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if not is_tensor(tensor):
        raise ValueError(f"{role} must be a torch tensor, found {type(tensor).__name__}")
    found = (list(tensor.shape), tensor.dtype, tensor.device)
    expected = (list(shape), dtype, device)
    if found != expected:
        raise ValueError(f"{role} must have shape, dtype and device {expected}, found {found}")


def _unpack_remote(
    planes: tuple[torch.Tensor, torch.Tensor], kernel: Kernel, dtype: str, out: torch.Tensor | None
) -> torch.Tensor:
    from kvstore.codec import torch_decode

    codes, scales = planes
    shape = _unpacked_shape(tuple(codes.shape), tuple(scales.shape), kernel)
    for plane, name in zip(planes, kernel.names, strict=True):
        _check_remote(plane, name, plane.shape, torch_decode.BYTES, codes.device)
    if out is not None:
        _check_remote(out, "out", shape, torch_decode.DTYPES[dtype], codes.device)
    values = kernel.unpack_tensors(codes, scales, dtype)
    return values if out is None else out.copy_(values)
