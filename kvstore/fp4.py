"""FP4 quantization of NumPy arrays and torch tensors: the public module.

``nibbles, scales = pack(values, "nvfp4")`` and ``values = unpack(nibbles, scales, "nvfp4")``, or
``gather(nibbles, scales, index, "nvfp4")`` for some rows. The bytes are normative in docs/format.md, section 3.
"""

from __future__ import annotations

from kvstore.codec.fp4 import PackStats, gather, pack, relative_error, unpack

__all__ = ["PackStats", "gather", "pack", "relative_error", "unpack"]
