"""The C kernels as Python calls on addresses. It knows no arrays and no shapes but rows.

The only codec module that loads ``_kvstore_native``, and the only place where its return codes
become exceptions. What each call does is written in native/include/kvstore_native.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from _kvstore_native import ffi, lib

VERSION = 1
"""Contract version that this module was written for."""

if lib.kvstore_native_version() != VERSION:
    raise ImportError(
        f"_kvstore_native has contract version {lib.kvstore_native_version()}, expected {VERSION}; "
        "it was built from another kvstore: reinstall the package"
    )

DTYPES: Mapping[str, int] = {
    "float32": lib.KVSTORE_F32,
    "float16": lib.KVSTORE_F16,
    "bfloat16": lib.KVSTORE_BF16,
}
FORMATS: Mapping[str, int] = {"nvfp4": lib.KVSTORE_NVFP4, "mxfp4": lib.KVSTORE_MXFP4}
RULES: Mapping[str, int] = {
    "v41": lib.KVSTORE_RULE_V41,
    "torchao": lib.KVSTORE_RULE_TORCHAO,
    "floor": lib.KVSTORE_RULE_FLOOR,
    "even": lib.KVSTORE_RULE_EVEN,
    "rceil": lib.KVSTORE_RULE_RCEIL,
}

_MESSAGES: Mapping[int, str] = {
    lib.KVSTORE_ERR_DTYPE: f"unknown element type, expected one of {', '.join(DTYPES)}",
    lib.KVSTORE_ERR_FORMAT: f"unknown format, expected one of {', '.join(FORMATS)}",
    lib.KVSTORE_ERR_RULE: "the format has no such scale rule",
    lib.KVSTORE_ERR_GLOBAL_SCALE: (
        "global_scale must lie in [2**-100, 2**100], and be 1 for mxfp4 and for the rule v41"
    ),
    lib.KVSTORE_ERR_SHAPE: "a row must hold a whole number of blocks",
    lib.KVSTORE_ERR_NULL: "a buffer that is not empty has the address 0",
    lib.KVSTORE_ERR_STRIDE: "rows of an output overlap: its stride is shorter than a row",
    lib.KVSTORE_ERR_OVERLAP: "an output shares memory with another buffer",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one buffer lie.

    Units:
        ``stride`` is the distance in bytes from one row to the next; it may be negative.
    """

    address: int
    stride: int


def _check(code: int) -> None:
    if code != lib.KVSTORE_OK:
        raise ValueError(f"fp4: {_MESSAGES.get(code, f'unknown code {code}')} (code {code})")


def pack(
    values: Rows,
    nibbles: Rows,
    scales: Rows,
    *,
    rows: int,
    row_values: int,
    dtype: int,
    entry_format: int,
    rule: int,
    global_scale: float,
) -> tuple[int, int]:
    """Pack rows, and return how many NaN blocks and how many infinities they held.

    Raises:
        ValueError: for any code but KVSTORE_OK; nothing was written then.

    Threads: the GIL is released; the buffers must stay alive and unshared until it returns.
    """
    stats = ffi.new("struct kvstore_fp4_stats *")
    code = lib.kvstore_fp4_pack(
        ffi.cast("void *", values.address),
        dtype,
        rows,
        row_values,
        values.stride,
        entry_format,
        rule,
        global_scale,
        ffi.cast("uint8_t *", nibbles.address),
        nibbles.stride,
        ffi.cast("uint8_t *", scales.address),
        scales.stride,
        stats,
    )
    _check(code)
    return stats.nan_blocks, stats.inf_values


def unpack(
    nibbles: Rows,
    scales: Rows,
    values: Rows,
    *,
    rows: int,
    row_values: int,
    dtype: int,
    entry_format: int,
    global_scale: float,
) -> None:
    """Unpack rows. Raises and threads as :func:`pack`."""
    code = lib.kvstore_fp4_unpack(
        ffi.cast("uint8_t *", nibbles.address),
        nibbles.stride,
        ffi.cast("uint8_t *", scales.address),
        scales.stride,
        rows,
        row_values,
        entry_format,
        global_scale,
        ffi.cast("void *", values.address),
        dtype,
        values.stride,
    )
    _check(code)
