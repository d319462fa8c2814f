"""Host memory of arrays, tensors and buffers of an engine, without importing torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_tensor(array: object) -> bool:
    """Return whether an object is a torch tensor, without importing torch."""
    # While another thread imports torch, ``torch.Tensor`` may not exist yet.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(kind, type) and isinstance(array, kind)


def on_host(array: Any) -> NDArray[Any] | None:
    """Return an array or tensor as a host array, None for others. Copies only from another device."""
    if flaw_of(array):
        return None
    if is_tensor(array):
        array = array.detach().cpu().numpy()
    return array if isinstance(array, np.ndarray) else None


def flaw_of(array: object) -> str:
    """Return why the memory of an array or tensor is not its data (masked, sparse, meta), or empty."""
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array"
    if is_tensor(array):
        tensor: Any = array
        if str(tensor.layout) != "torch.strided":
            return f"a tensor with layout {str(tensor.layout).removeprefix('torch.')}"
        if tensor.device.type == "meta":
            return "a tensor of the meta device, which has no data"
    return ""


def host_bytes(buffer: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of an array, tensor or buffer; None for others. Copies all but contiguous host memory."""
    if isinstance(buffer, bytes | bytearray | memoryview):
        return np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
    if flaw_of(buffer):
        return None
    if is_tensor(buffer):
        flat = buffer.detach().cpu().contiguous().reshape(-1)
        return np.asarray(flat.view(sys.modules["torch"].uint8).numpy())
    if not isinstance(buffer, np.ndarray) or buffer.dtype.hasobject:
        return None
    return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)


def writable_bytes(buffer: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of a contiguous, writable host buffer, shared with it; None for others."""
    if is_tensor(buffer):
        is_plain = buffer.device.type == "cpu" and not flaw_of(buffer) and buffer.is_contiguous()
        return host_bytes(buffer) if is_plain else None
    if isinstance(buffer, np.ndarray):
        is_plain = buffer.flags.c_contiguous and buffer.flags.writeable
        return host_bytes(buffer) if is_plain else None
    if isinstance(buffer, bytearray | memoryview):
        array = host_bytes(buffer)
        return array if array is not None and array.flags.writeable else None
    return None
