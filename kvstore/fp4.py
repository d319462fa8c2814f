"""FP4 packing for NumPy arrays and torch tensors: the public module.

``nibbles, scales = pack(values, "nvfp4")`` and ``values = unpack(nibbles, scales, "nvfp4")``. The
bytes are normative in docs/format.md, section 3.
"""

from __future__ import annotations

from kvstore.codec.fp4 import PackStats, pack, relative_error, unpack

__all__ = ["PackStats", "pack", "relative_error", "unpack"]
