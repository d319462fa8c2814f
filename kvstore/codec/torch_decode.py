"""FP4 decoding by torch operations, for tensors whose memory the host cannot read.

The only codec module that imports torch, so it is itself imported where it is first needed. It
rounds nothing: a table, made by the C kernel, holds what each scale byte does to each pair of
nibbles, and decoding looks pairs up. So the bits are those of the host on any device.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvstore.codec import native
from kvstore.layout import FORMATS

BYTES = torch.uint8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def unpack(
    nibbles: torch.Tensor, scales: torch.Tensor, entry_format: str, dtype: str, global_scale: float
) -> torch.Tensor:
    """Unpack FP4 on the device of its tensors, which the caller has checked.

    Shapes:
        nibbles uint8 ``[..., n / 2]``; scales uint8 ``[..., n / block]``; result ``[..., n]``.

    Cost: a table of 65,536 pairs per format and dtype, made once per device; 4 bytes of index per
        nibble byte while it runs.
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
    # Row s holds each nibble byte once, so all of its blocks have the scale byte s.
    nibbles = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 256 // block_bytes).reshape(256, -1)
    table = torch.empty(256 * 256, 2, dtype=DTYPES[dtype])
    native.unpack(
        native.Rows(nibbles.ctypes.data, nibbles.strides[0]),
        native.Rows(scales.ctypes.data, scales.strides[0]),
        native.Rows(table.data_ptr(), 512 * table.element_size()),
        rows=256,
        row_values=512,
        dtype=native.DTYPES[dtype],
        entry_format=native.FORMATS[entry_format],
        global_scale=global_scale,
    )
    return table.to(device)
