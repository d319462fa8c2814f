"""Values to the bytes of an entry and back. It knows formats, and no layer and no sequence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore import fp4

_EXPONENT_BIAS = 127
"""Of binary32 and of UE8M0."""
_E4M3_MAX = 448.0


def pack_entries(group: kvstore.LayerGroup, values: Tensor) -> NDArray[np.uint8]:
    """Return FP4 entries: the nibbles, then the scales. The codec takes binary32, so values are cast.

    Shapes:
        values ``[n, group.values]``; returns uint8 ``[n, group.entry_bytes]``.
    """
    values = values.detach().to(torch.float32)
    planes = fp4.pack(values, group.entry_format, scale_rule=group.scale_rule)
    return torch.cat(planes, dim=-1).numpy()


def unpack_entries(
    group: kvstore.LayerGroup, entries: NDArray[np.uint8], dtype: torch.dtype
) -> Tensor:
    """Return what FP4 entries stand for. Binary32 holds every FP4 value times its scale exactly.

    Shapes:
        entries uint8 ``[n, group.entry_bytes]``; returns ``[n, group.values]``.
    """
    nibbles, scales = np.split(entries, [group.planes[0]], axis=-1)
    values = fp4.unpack(nibbles, scales, group.entry_format, dtype="float32")
    return torch.from_numpy(values).to(dtype)


def round_mxfp4(values: Tensor, rule: str) -> Tensor:
    """Return the nearest values on the MXFP4 grid.

    Shapes:
        values ``[..., width]``, width a multiple of 32; returns the same.
    """
    planes = fp4.pack(values.detach().to(torch.float32), "mxfp4", scale_rule=rule)
    return fp4.unpack(*planes, "mxfp4", dtype="float32").to(values.dtype)


def _exact_to_bytes(rows: Tensor) -> NDArray[np.uint8]:
    return rows.contiguous().view(torch.uint8).numpy()


def _exact_to_rows(stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(stored)).view(dtype)


def pack_mxfp8(rows: Tensor) -> NDArray[np.uint8]:
    """Return rows as MXFP8: E4M3 codes, then a power of two for each 32 of them.

    Shapes:
        rows ``[..., width]``, width a multiple of 32; returns uint8 ``[..., width * 33 // 32]``.
    """
    blocks = rows.to(torch.float32).reshape(*rows.shape[:-1], -1, 32)
    # The least power of two that keeps the largest value of 32 within E4M3: no row saturates.
    mantissas, exponents = torch.frexp(blocks.abs().amax(-1, keepdim=True) / _E4M3_MAX)
    exponents = (exponents - (mantissas == 0.5).int()).clamp(-_EXPONENT_BIAS + 1, _EXPONENT_BIAS)
    codes = torch.ldexp(blocks, -exponents).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    scales = (exponents + _EXPONENT_BIAS).to(torch.uint8).squeeze(-1)
    return torch.cat((codes, scales), dim=-1).numpy()


def unpack_mxfp8(stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return what ``pack_mxfp8`` kept. Shapes: as there."""
    width = stored.shape[-1] * 32 // 33
    codes, scales = torch.from_numpy(np.array(stored)).tensor_split([width], dim=-1)
    values = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    blocks = torch.ldexp(values.reshape(*scales.shape, 32), exponents[..., None])
    return blocks.flatten(-2).to(dtype)


_TO_BYTES = {"u8": _exact_to_bytes, "mxfp8": pack_mxfp8}
_TO_ROWS = {"u8": _exact_to_rows, "mxfp8": unpack_mxfp8}


def pack_rows(group: kvstore.LayerGroup, rows: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of window rows.

    Shapes:
        rows ``[..., head_dim]``; returns uint8 ``[..., group.entry_bytes]``.
    """
    return _TO_BYTES[group.entry_format](rows.detach())


def unpack_rows(group: kvstore.LayerGroup, stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return window rows from their bytes: what the engine keeps after ``pack_rows`` as well.

    Shapes:
        stored uint8 ``[..., group.entry_bytes]``; returns ``[..., head_dim]``.
    """
    return _TO_ROWS[group.entry_format](stored, dtype)


Entries = Mapping[str, NDArray[np.uint8]]
"""Global entries as the public contract has them: by group, uint8 ``[layers, n, entry_bytes]``."""
