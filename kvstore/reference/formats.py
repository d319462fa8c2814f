"""Encoding of values to the bytes of an entry or a window row, and decoding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore import fp4
from kvstore.reference.ops import straight_through

_FP4 = ("nvfp4", "mxfp4")
"""Formats encoded by ``kvstore.fp4``. The others are implemented here."""
_EXPONENT_BIAS = 127  # of binary32 and of UE8M0
_E4M3_MAX = 448.0

Entries = Mapping[str, NDArray[np.uint8]]
"""Global entries as in the public API: by group, uint8 ``[layers, n, entry_bytes]``."""


def pack(group: kvstore.LayerGroup, values: Tensor) -> NDArray[np.uint8]:
    """Return values as bytes of their group's format.

    Shapes:
        values ``[..., width]``, the width of an entry; returns uint8 ``[..., group.entry_bytes]``.
    """
    values = values.detach()
    if group.entry_format in _FP4:
        values = values.to(torch.float32)  # the input format of fp4.pack
        planes = fp4.pack(values, group.entry_format, scale_rule=group.scale_rule)
        return torch.cat(planes, dim=-1).numpy()
    return _TO_BYTES[group.entry_format](values)


def unpack(group: kvstore.LayerGroup, stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return the values of a group's bytes.

    Shapes:
        stored uint8 ``[..., group.entry_bytes]``; returns ``[..., width]``.
    """
    if group.entry_format in _FP4:
        nibbles, scales = np.split(stored, [group.planes[0]], axis=-1)
        values = fp4.unpack(nibbles, scales, group.entry_format, dtype="float32")
        # Binary32 represents every FP4 value times its scale exactly.
        return torch.from_numpy(values).to(dtype)
    return _TO_VALUES[group.entry_format](stored, dtype)


def rounded(group: kvstore.LayerGroup, values: Tensor) -> Tensor:
    """Return values rounded to their format, to equal restored ones. Gradients are unchanged.

    Shapes:
        ``[..., width]`` in and out.
    """
    return straight_through(values, unpack(group, pack(group, values), values.dtype))


def pack_mxfp8(values: Tensor) -> NDArray[np.uint8]:
    """Return values as MXFP8: E4M3 codes, then a power of two for every 32 of them.

    Shapes:
        values ``[..., width]``, width a multiple of 32; returns uint8 ``[..., width * 33 // 32]``.
    """
    blocks = values.to(torch.float32).reshape(*values.shape[:-1], -1, 32)
    # The least power of two with which the largest of 32 values fits E4M3: none saturates.
    mantissas, exponents = torch.frexp(blocks.abs().amax(-1, keepdim=True) / _E4M3_MAX)
    exponents = (exponents - (mantissas == 0.5).int()).clamp(-_EXPONENT_BIAS + 1, _EXPONENT_BIAS)
    codes = torch.ldexp(blocks, -exponents).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    scales = (exponents + _EXPONENT_BIAS).to(torch.uint8).squeeze(-1)
    return torch.cat((codes, scales), dim=-1).numpy()


def unpack_mxfp8(stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return the values of the bytes that ``pack_mxfp8`` returned. Shapes: as there."""
    width = stored.shape[-1] * 32 // 33
    codes, scales = torch.from_numpy(np.array(stored)).tensor_split([width], dim=-1)
    values = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    blocks = torch.ldexp(values.reshape(*scales.shape, 32), exponents[..., None])
    return blocks.flatten(-2).to(dtype)


def _bf16_to_bytes(values: Tensor) -> NDArray[np.uint8]:
    return _exact_to_bytes(values.to(torch.bfloat16))


def _bf16_to_values(stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return _exact_to_values(stored, torch.bfloat16).to(dtype)


def _exact_to_bytes(values: Tensor) -> NDArray[np.uint8]:
    return values.contiguous().view(torch.uint8).numpy()


def _exact_to_values(stored: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(stored)).view(dtype)


# By entry format; "u8" are the model's own floats.
_TO_BYTES = {"u8": _exact_to_bytes, "bf16": _bf16_to_bytes, "mxfp8": pack_mxfp8}
_TO_VALUES = {"u8": _exact_to_values, "bf16": _bf16_to_values, "mxfp8": unpack_mxfp8}
