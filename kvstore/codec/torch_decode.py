"""Dequantization with torch operations, for tensors in memory that the host cannot read.

The only codec module that imports torch; callers import it at first use. Byte scales: lookup in a table
that the C kernel makes, of all pairs of scale byte and code byte. Float scales: the exact product in
float64, rounded once. The bits equal those of the host on any device.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codec import native
from kvstore.layout import FORMATS

BYTES = torch.uint8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BITS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
_QUIET_NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def unpack(
    nibbles: torch.Tensor, scales: torch.Tensor, entry_format: str, dtype: str, global_scale: float
) -> torch.Tensor:
    """Dequantize FP4 on the device of its tensors, which the caller has checked.

    Shapes: nibbles uint8 ``[..., n / 2]``; scales uint8 ``[..., n / block]``; result ``[..., n]``.
    Cost: a table of 65,536 pairs per format and dtype, made once per device; temporarily 4 bytes of
        index per nibble byte.
    """
    table = _pairs(entry_format, dtype, global_scale, nibbles.device)
    block_bytes = FORMATS[entry_format].scale_block // 2
    blocks = nibbles.reshape(*scales.shape, block_bytes)
    index = scales.to(torch.int32).unsqueeze(-1) * 256 + blocks
    pairs = table.index_select(0, index.flatten())
    return pairs.reshape(*nibbles.shape[:-1], 2 * nibbles.shape[-1])


@functools.lru_cache(maxsize=32)
def _pairs(
    entry_format: str, dtype: str, global_scale: float, device: torch.device
) -> torch.Tensor:
    """Values of ``[scale byte * 256 + nibble byte]``: two, low half first."""
    block_bytes = FORMATS[entry_format].scale_block // 2
    # Row s has each nibble byte once; all of its blocks have the scale byte s.
    nibbles = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 256 // block_bytes).reshape(256, -1)
    values = _decoded(nibbles, scales, entry_format, dtype, 512, global_scale)
    return values.reshape(-1, 2).to(device)


def unpack_fp8(
    codes: torch.Tensor, scales: torch.Tensor, entry_format: str, dtype: str
) -> torch.Tensor:
    """Dequantize FP8 on the device of its tensors, which the caller has checked.

    Shapes: codes uint8 ``[..., n]``; scales uint8 ``[..., n / 32]`` or ``[..., 4]``;
        result ``[..., n]``.
    Cost: a table per dtype, made once per device: 65,536 values for ``mxfp8``, 256 for ``fp8``.
        Temporarily 4 bytes of index a value; for ``fp8`` also about 30 bytes of wider numbers.
    """
    if FORMATS[entry_format].scale_block:
        table = _mxfp8_values(dtype, codes.device)
        blocks = codes.reshape(*scales.shape, FORMATS[entry_format].scale_block)
        index = scales.to(torch.int32).unsqueeze(-1) * 256 + blocks
        return table.index_select(0, index.flatten()).reshape(codes.shape)
    low, second, third, high = scales.to(torch.int32).unbind(-1)
    bits = low | second << 8 | third << 16 | high << 24
    factors = bits.view(torch.float32).to(torch.float64).unsqueeze(-1)
    elements = _e4m3_values(codes.device).index_select(0, codes.flatten().to(torch.int32))
    return _narrow(elements.reshape(codes.shape) * factors, dtype)  # exact: 4 and 24 bits


@functools.lru_cache(maxsize=32)
def _mxfp8_values(dtype: str, device: torch.device) -> torch.Tensor:
    """Values of ``[scale byte * 256 + code]``."""
    block = FORMATS["mxfp8"].scale_block
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 256 // block).reshape(256, -1)
    return _decoded(codes, scales, "mxfp8", dtype, 256).flatten().to(device)


@functools.lru_cache(maxsize=32)
def _e4m3_values(device: torch.device) -> torch.Tensor:
    """Values of the codes, as float64."""
    codes = np.arange(256, dtype=np.uint8)[None]
    one = np.array([[0, 0, 0x80, 0x3F]], np.uint8)  # 1 as a little-endian float32
    return _decoded(codes, one, "fp8", "float32", 256).flatten().to(torch.float64).to(device)


def _decoded(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    entry_format: str,
    dtype: str,
    row_values: int,
    global_scale: float = 1.0,
) -> torch.Tensor:
    """Return rows of codes dequantized by the C kernel."""
    table = torch.empty((len(codes), row_values), dtype=DTYPES[dtype])
    rule = native.UNPACKING_RULES[entry_format]
    native.prepare(entry_format, rule, dtype, global_scale, native.default_level()).unpack(
        native.Rows(codes.ctypes.data, codes.strides[0]),
        native.Rows(scales.ctypes.data, scales.strides[0]),
        native.Rows(table.data_ptr(), table.stride(0) * table.element_size()),
        rows=len(codes),
        row_values=row_values,
    )
    return table


def _narrow(exact: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return float64 rounded once to ``dtype``, ties to even; every NaN is the quiet one."""
    wide = exact.to(torch.float32)
    if dtype != "float32":
        # torch converts float64 to 16 bits through float32, which rounds twice. Rounding to odd avoids
        # that: an inexact even float32 is replaced by its odd neighbour beyond the exact value.
        bits = wide.view(torch.int32)
        back = wide.to(torch.float64)
        is_even = (exact != back) & (bits & 1 == 0) & exact.isfinite()
        step = torch.where(exact.abs() > back.abs(), 1, -1).to(torch.int32)
        wide = torch.where(is_even, bits + step, bits).view(torch.float32)
    narrow = wide.to(DTYPES[dtype])
    narrow.view(_BITS[dtype]).masked_fill_(exact.isnan(), _QUIET_NAN[dtype])
    return narrow
