"""The C kernels as Python calls on addresses. It knows no arrays and no shapes but rows.

The only codec module that loads ``_kvstore_native``, and the only place where its return codes
become exceptions. What each call does is written in native/include/kvstore_native.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from _kvstore_native import ffi, lib

VERSION = 2
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
FP4_FORMATS: Mapping[str, int] = {"nvfp4": lib.KVSTORE_NVFP4, "mxfp4": lib.KVSTORE_MXFP4}
FP8_FORMATS: Mapping[str, int] = {"mxfp8": lib.KVSTORE_MXFP8, "fp8": lib.KVSTORE_FP8}
RULES: Mapping[str, int] = {
    "v41": lib.KVSTORE_RULE_V41,
    "torchao": lib.KVSTORE_RULE_TORCHAO,
    "floor": lib.KVSTORE_RULE_FLOOR,
    "even": lib.KVSTORE_RULE_EVEN,
    "rceil": lib.KVSTORE_RULE_RCEIL,
    "amax": lib.KVSTORE_RULE_AMAX,
}

_MESSAGES: Mapping[int, str] = {
    lib.KVSTORE_ERR_DTYPE: f"unknown element type, expected one of {', '.join(DTYPES)}",
    lib.KVSTORE_ERR_FORMAT: (
        f"unknown format, expected one of {', '.join(FP4_FORMATS)} for FP4, "
        f"{', '.join(FP8_FORMATS)} for FP8"
    ),
    lib.KVSTORE_ERR_RULE: "the format has no such scale rule",
    lib.KVSTORE_ERR_GLOBAL_SCALE: (
        "global_scale must lie in [2**-100, 2**100], and be 1 for mxfp4 and for the rule v41"
    ),
    lib.KVSTORE_ERR_SHAPE: "a row must hold a whole number of blocks, and a row of fp8 a value",
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


def _check(code: int, family: str) -> None:
    if code != lib.KVSTORE_OK:
        raise ValueError(f"{family}: {_MESSAGES.get(code, f'unknown code {code}')} (code {code})")


def fp4_pack(
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
    stats = ffi.new("struct kvstore_pack_stats *")
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
    _check(code, "fp4")
    return stats.nan_blocks, stats.inf_values


def fp4_unpack(
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
    """Unpack rows. Raises and threads as :func:`fp4_pack`."""
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
    _check(code, "fp4")


def fp8_pack(
    values: Rows,
    codes: Rows,
    scales: Rows,
    *,
    rows: int,
    row_values: int,
    dtype: int,
    entry_format: int,
    rule: int,
) -> tuple[int, int]:
    """Pack rows. Returns, raises and threads as :func:`fp4_pack`; a row of FP8 is one block."""
    stats = ffi.new("struct kvstore_pack_stats *")
    code = lib.kvstore_fp8_pack(
        ffi.cast("void *", values.address),
        dtype,
        rows,
        row_values,
        values.stride,
        entry_format,
        rule,
        ffi.cast("uint8_t *", codes.address),
        codes.stride,
        ffi.cast("uint8_t *", scales.address),
        scales.stride,
        stats,
    )
    _check(code, "fp8")
    return stats.nan_blocks, stats.inf_values


def fp8_unpack(
    codes: Rows,
    scales: Rows,
    values: Rows,
    *,
    rows: int,
    row_values: int,
    dtype: int,
    entry_format: int,
) -> None:
    """Unpack rows. Raises and threads as :func:`fp4_pack`."""
    code = lib.kvstore_fp8_unpack(
        ffi.cast("uint8_t *", codes.address),
        codes.stride,
        ffi.cast("uint8_t *", scales.address),
        scales.stride,
        rows,
        row_values,
        entry_format,
        ffi.cast("void *", values.address),
        dtype,
        values.stride,
    )
    _check(code, "fp8")
