"""Speed of quantising, dequantising and hashing relative to memcpy.

Question: what share of memcpy's speed do the C kernels reach on one core?
Method:   every call is paired with a memcpy of the same run, in changing order; the result is the median
          of the pairs' ratios. Speed is bytes read and written per second. "plain" writes the output to the
          cache, "past" with non-temporal stores, as unpack does from half of the last-level cache on.
Peers:    NumPy, torch, ml_dtypes (casts elements only, without scales), and torchao if installed. References
          other than memcpy: OpenSSL's SHA-256 of as many bytes for hashes; for entries chosen at random a
          copy of the quantized entries, or in the cache an unpack of as many in order; the same work
          unverified for verified reads; the package xxhash for checksums.
Bound:    memcpy. Each result must equal the portable kernel's, else exit 1.
Run:      python -m bench.codec [--pairs 31] [--mib 64] [--levels ...] [--no-peers] [--json] [--svg FILE]
          Needs an idle machine; about ten minutes with 64 MiB and all peers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.cli.terminal import progress_bar
from kvstore.codec import native
from kvstore.identity.block import BlockHash
from kvstore.identity.hash import block_hashes
from kvstore.layout import FORMATS, SCALE_RULES
from kvstore.output.chart import Axis, Point, Series, chart
from tests import numpy_fp4

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
FP4 = ("mxfp4", "nvfp4")
PEER_PAIRS, PEER_MIB = 3, 8
"""Size for peers, which are up to a thousand times slower, at a speed that does not depend on the size."""
PEERS = 16
"""Number of peers, with torchao."""
SWEEP_KIB = tuple(1 << power for power in range(4, 17))
NEVER, ALWAYS = 1 << 62, 0
"""Output size from which unpack uses non-temporal stores."""
GATHERED, GATHERED_VALUES = 2048, 512
"""Entries that four queries of DeepSeek-V4.1 choose, of its size."""
FAR_BYTES, NEAR_BYTES = 256 << 20, 256 << 10
HASHED_TOKENS, BLOCK_TOKENS = 1 << 20, 128


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel or peer at one size."""

    work: str
    by: str
    """``portable``, ``avx2``, ..., or the name of a peer."""
    wide_bytes: int
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    """Speeds: median and quartiles over pairs."""
    low: float
    high: float


Work = Callable[[], Any]


def seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def paired(work: Work, moved: int, copy: Work, copied: int, pairs: int) -> dict[str, float]:
    """Return the speeds of a call and of a memcpy, and the ratios of the pairs."""
    work()
    copy()
    mine: list[float] = []
    theirs: list[float] = []
    for number in range(pairs):
        for one, found in [(work, mine), (copy, theirs)][:: 1 if number % 2 else -1]:
            found.append(seconds(one))
    ratios = [moved / a / (copied / b) for a, b in zip(mine, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4) if pairs > 1 else (ratios[0],) * 3
    return {
        "gb_per_s": moved / median(mine) / 1e9,
        "memcpy_gb_per_s": copied / median(theirs) / 1e9,
        "ratio": median(ratios),
        "low": low,
        "high": high,
    }


class Buffers:
    """Numbers of one dtype with room for their codes and scales, and a pair of buffers to copy."""

    def __init__(self, entry_format: str, dtype: str, wide_bytes: int) -> None:
        count = wide_bytes // np.dtype(numpy_dtype(dtype)).itemsize
        normal = np.random.default_rng(0).standard_normal(count, np.float32)
        self.values = normal.astype(numpy_dtype(dtype))
        planes = FORMATS[entry_format].planes(count)
        self.codes, self.scales = (np.zeros(plane, np.uint8) for plane in planes)
        self.source, self.target = np.ones(wide_bytes, np.uint8), np.zeros(wide_bytes, np.uint8)
        self.moved = wide_bytes + self.codes.nbytes + self.scales.nbytes

    def copy(self) -> None:
        """Copy as many bytes as the wide side has."""
        np.copyto(self.target, self.source)

    def rows(self) -> tuple[native.Rows, native.Rows, native.Rows]:
        """Return values, codes and scales as one row each."""
        arrays = (self.values, self.codes, self.scales)
        values, codes, scales = (native.Rows(array.ctypes.data, 0) for array in arrays)
        return values, codes, scales


def numpy_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def kernels(level: str, wide_bytes: int) -> Iterator[tuple[str, Work, Buffers]]:
    """Yield every pack and unpack of a level, after a check of their results."""
    for entry_format, dtype in itertools.product(FP4, DTYPES):
        buffers = Buffers(entry_format, dtype, wide_bytes)
        values, codes, scales = buffers.rows()
        shape: dict[str, Any] = {"rows": 1, "row_values": len(buffers.values)}
        for rule in SCALE_RULES[entry_format]:
            check(entry_format, rule, dtype, level)
            pack = native.prepare(entry_format, rule, dtype, 1.0, level).pack
            work = f"pack {dtype} -> {entry_format} {rule}"
            yield work, partial(pack, values, codes, scales, **shape), buffers
        rule = SCALE_RULES[entry_format][0]
        for name, streamed in (("plain", NEVER), ("past", ALWAYS)):
            unpack = native.prepare(entry_format, rule, dtype, 1.0, level, streamed).unpack
            work = f"unpack {entry_format} -> {dtype} {name}"
            yield work, partial(unpack, codes, scales, values, **shape), buffers


def check(entry_format: str, rule: str, dtype: str, level: str) -> None:
    """Exit unless a level packs and unpacks to the bytes of the portable one."""
    bits = np.random.default_rng(1).integers(0, 256, 1 << 18, np.uint8)
    buffers = [Buffers(entry_format, dtype, 1 << 18) for _ in range(2)]
    for one, name in zip(buffers, ("portable", level), strict=True):
        one.values.view(np.uint8)[:] = bits
        made = native.prepare(entry_format, rule, dtype, 1.0, name, ALWAYS)
        values, codes, scales = one.rows()
        made.pack(values, codes, scales, rows=1, row_values=len(one.values))
        made.unpack(codes, scales, values, rows=1, row_values=len(one.values))
    a, b = buffers
    same = np.array_equal(a.values.view(np.uint8), b.values.view(np.uint8))
    if not (same and np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)):
        sys.exit(f"{level} differs from portable: {entry_format} {rule} {dtype}")


def peers(wide_bytes: int) -> Iterator[tuple[str, str, Work, Buffers]]:
    """Yield the peers' rows for the same work."""
    import torch

    torch.set_num_threads(1)
    for entry_format, dtype in [("mxfp4", "float32"), ("nvfp4", "float32"), ("nvfp4", "bfloat16")]:
        rule = SCALE_RULES[entry_format][0]
        buffers = Buffers(entry_format, dtype, wide_bytes)
        fp4.pack(buffers.values, entry_format, out=(buffers.codes, buffers.scales))
        block = FORMATS[entry_format].scale_block
        rows = buffers.values.astype(np.float32).reshape(-1, block)
        codes = buffers.codes.reshape(len(rows), -1)
        scales = buffers.scales.reshape(len(rows), -1)
        tensors = torch.from_numpy(codes), torch.from_numpy(scales)
        wide = torch.from_numpy(rows).to(getattr(torch, dtype))
        found: dict[tuple[str, str], Work] = {}
        pack = f"pack {dtype} -> {entry_format} {rule}"
        unpack = f"unpack {entry_format} -> {dtype} plain"
        if dtype == "float32":
            found[pack, "numpy"] = partial(numpy_fp4.pack, rows, entry_format, rule, 1.0)
            found[unpack, "numpy"] = partial(numpy_unpack, codes, scales, entry_format)
            found[pack, "ml_dtypes, no scales"] = partial(rows.astype, ml_dtypes.float4_e2m1fn)
        unpack_in_torch = partial(torch_unpack, *tensors, entry_format=entry_format, dtype=dtype)
        found[unpack, "torch eager"] = unpack_in_torch
        found[unpack, "torch.compile"] = partial(
            torch.compile(torch_unpack), *tensors, entry_format=entry_format, dtype=dtype
        )
        if entry_format == "nvfp4":
            found[pack, "torch eager"] = partial(torch_pack, wide)
            found[pack, "torch.compile"] = partial(torch.compile(torch_pack), wide)
        if importlib.util.find_spec("torchao") is not None:
            found[pack, "torchao"] = torchao_pack(wide.reshape(-1, 512), entry_format)
        for (work, name), call in found.items():
            yield work, name, call, buffers


def numpy_unpack(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], entry_format: str
) -> NDArray[np.float32]:
    """Unpack in NumPy: a table of the pairs of each byte, times the scales."""
    pairs = np.array([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)], np.float32)
    factors = numpy_fp4.scale_value(scales, entry_format).astype(np.float32)
    found: NDArray[np.float32] = pairs[codes].reshape(len(codes), -1) * factors
    return found


def torch_unpack(
    codes: torch.Tensor, scales: torch.Tensor, *, entry_format: str, dtype: str
) -> torch.Tensor:
    """Unpack in torch: elements by code, times the scales."""
    import torch

    elements = torch.tensor(E2M1, dtype=torch.float32)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    if entry_format == "nvfp4":
        factors = scales.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        factors = torch.exp2(scales.to(torch.float32) - 127)
    return (elements[pairs.to(torch.int64)] * factors).to(getattr(torch, dtype))


def torch_pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 16 to NVFP4 in torch, by the boundaries between elements."""
    import torch

    wide = values.to(torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6).to(torch.float8_e4m3fn)
    quotients = wide / scales.to(torch.float32)
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(quotients.abs(), limits) | (quotients < 0).to(torch.int64) << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales


def torchao_pack(values: torch.Tensor, entry_format: str) -> Work:
    """Return torchao's packer, a prototype whose module may change."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    if entry_format == "mxfp4":
        return partial(to_mx, values, torch.float4_e2m1fn_x2, 32)
    return partial(nvfp4_quantize, values, 16)


E2M1 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def hash_row(pairs: int) -> Row:
    """Return the speed of the block hashes of a prompt, relative to OpenSSL."""
    tokens = np.random.default_rng(2).integers(0, 1 << 17, HASHED_TOKENS, np.uint32)
    hashed = 4 * HASHED_TOKENS + 44 * (HASHED_TOKENS // BLOCK_TOKENS)
    data, root = bytes(hashed), BlockHash(bytes(32))
    found = paired(
        lambda: block_hashes(root, tokens, BLOCK_TOKENS),
        hashed,
        lambda: hashlib.sha256(data).digest(),
        hashed,
        pairs,
    )
    return Row(f"hash {HASHED_TOKENS:,} tokens, beside SHA-256", "chain", hashed, **found)


def gather_rows(level: str, pairs: int) -> list[Row]:
    """Return the speed of dequantising selected entries of 512 values: far apart, and in the cache.

    References: a copy of as many other entries; in the cache an unpack of as many consecutive entries.
    """
    code_bytes, scale_bytes = FORMATS["nvfp4"].planes(GATHERED_VALUES)
    entry_bytes = code_bytes + scale_bytes
    made = native.prepare("nvfp4", SCALE_RULES["nvfp4"][0], "bfloat16", 1.0, level)

    def gathered(name: str, pool_bytes: int) -> Row:
        rng = np.random.default_rng(3)
        entries = rng.integers(0, 256, (pool_bytes // entry_bytes, entry_bytes), np.uint8)
        count = min(GATHERED, len(entries))
        order = rng.permutation(len(entries)).astype(np.int64)
        # New entries for every call: those of the previous one are in the cache.
        batches = itertools.cycle(order[: len(order) // count * count].reshape(-1, count))
        out = np.zeros((count, 2 * GATHERED_VALUES), np.uint8)
        copied = np.zeros((count, entry_bytes), np.uint8)
        places = entries.ctypes.data, entries.ctypes.data + code_bytes
        target = native.Rows(out.ctypes.data, out.strides[0])
        codes, scales = (native.Pool(place, 0, entry_bytes) for place in places)
        row_codes, row_scales = (native.Rows(place, entry_bytes) for place in places)

        def gather() -> None:
            made.gather(
                codes,
                scales,
                next(batches).ctypes.data,
                target,
                pages=(1, len(entries)),
                table=None,
                rows=count,
                row_values=GATHERED_VALUES,
            )

        def unpack() -> None:
            made.unpack(row_codes, row_scales, target, rows=count, row_values=GATHERED_VALUES)

        def copy() -> None:
            np.take(entries, next(batches), axis=0, out=copied, mode="clip")

        bound = copy if pool_bytes == FAR_BYTES else unpack
        found = paired(gather, out.nbytes, bound, out.nbytes, pairs)
        return Row(f"gather nvfp4 -> bfloat16 {name}", level, pool_bytes, **found)

    return [gathered("far apart", FAR_BYTES), gathered("in the cache", NEAR_BYTES)]


def verified_rows(level: str, size: int, pairs: int) -> list[Row]:
    """Return the speed of checksums, and of verified copies and unpacks relative to unverified ones.

    Entries are those of ``gather_rows``, all codes and then all scales.
    """
    rng = np.random.default_rng(4)

    def verified(work: str, part: NDArray[np.uint8], piece: tuple[int, ...], bound: Work) -> Row:
        table = np.array([piece], np.int64)
        parts, sums = [native.Part(0, part.size, 0, 1)], [xxhash.xxh3_64_intdigest(part.data)]
        moved = part.nbytes + size

        def read() -> None:
            if not native.read_parts(part, parts, sums, table, level):
                sys.exit(f"{level} has another checksum than xxhash: {work}")

        return Row(work, level, size, **paired(read, moved, bound, moved, pairs))

    data, out = rng.integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
    found = paired(
        lambda: native.xxh3_64(data.data, level),
        size,
        lambda: xxhash.xxh3_64_intdigest(data.data),
        size,
        pairs,
    )
    copy = (0, 1, 1, size, out.ctypes.data, size)
    rows = [
        Row("xxh3_64, beside xxhash", level, size, **found),
        verified("verify + copy, beside copy", data, copy, lambda: np.copyto(out, data)),
    ]
    for dtype in ("bfloat16", "float32"):
        made = native.prepare("nvfp4", SCALE_RULES["nvfp4"][0], dtype, 1.0, level)
        row_bytes = GATHERED_VALUES * np.dtype(numpy_dtype(dtype)).itemsize
        count = size // row_bytes
        codes, scales = (count * plane for plane in FORMATS["nvfp4"].planes(GATHERED_VALUES))
        part = rng.integers(0, 256, codes + scales, np.uint8)
        unpack = partial(
            made.unpack,
            native.Rows(part.ctypes.data, codes // count),
            native.Rows(part.ctypes.data + codes, scales // count),
            native.Rows(out.ctypes.data, row_bytes),
            rows=count,
            row_values=GATHERED_VALUES,
        )
        piece = (made.address, 1, count, GATHERED_VALUES, out.ctypes.data, row_bytes)
        rows.append(verified(f"verify + unpack nvfp4 -> {dtype}", part, piece, unpack))
    return rows


def measure(
    levels: Sequence[str], wide_bytes: int, pairs: int, *, with_peers: bool
) -> tuple[list[Row], list[Row]]:
    """Return the table, and the rows of the sweep over sizes."""
    small = min(wide_bytes, PEER_MIB << 20)
    rows, sweep = [hash_row(pairs)], []
    each = len(DTYPES) * sum(len(SCALE_RULES[entry_format]) + 2 for entry_format in FP4)
    total = each * len(levels)
    with progress_bar("kernels") as advance:
        for level in levels:
            is_slow = level == "portable"
            size = small if is_slow else wide_bytes
            for work, call, buffers in kernels(level, size):
                found = paired(
                    call, buffers.moved, buffers.copy, 2 * size, PEER_PAIRS if is_slow else pairs
                )
                rows.append(Row(work, level, size, **found))
                advance(len(rows) - 1, total)
    for level in levels:
        is_slow = level == "portable"
        rows += gather_rows(level, PEER_PAIRS if is_slow else pairs)
        rows += verified_rows(
            level, small if is_slow else wide_bytes, PEER_PAIRS if is_slow else pairs
        )
    with progress_bar("peers") as advance:
        for number, (work, name, call, buffers) in enumerate(peers(small) if with_peers else ()):
            found = paired(call, buffers.moved, buffers.copy, 2 * small, PEER_PAIRS)
            rows.append(Row(work, name, small, **found))
            advance(number + 1, PEERS)
    with progress_bar("sizes") as advance:
        for number, kib in enumerate(SWEEP_KIB):
            for entry_format, dtype in (("nvfp4", "bfloat16"), ("mxfp4", "float32")):
                sweep += swept(entry_format, dtype, kib << 10, pairs)
            advance(number + 1, len(SWEEP_KIB))
    return rows, sweep


def swept(entry_format: str, dtype: str, wide_bytes: int, pairs: int) -> list[Row]:
    """Return pack and unpack at a size as callers see them, with Python and the default level."""
    buffers = Buffers(entry_format, dtype, wide_bytes)
    out = (buffers.codes, buffers.scales)
    calls: dict[str, Work] = {
        f"pack {dtype} -> {entry_format}": lambda: fp4.pack(buffers.values, entry_format, out=out),
        f"unpack {entry_format} -> {dtype}": lambda: fp4.unpack(
            *out, entry_format, dtype=dtype, out=buffers.values
        ),
    }
    return [
        Row(
            work,
            native.default_level(),
            wide_bytes,
            **paired(call, buffers.moved, buffers.copy, 2 * wide_bytes, pairs),
        )
        for work, call in calls.items()
    ]


def picture(sweep: Sequence[Row]) -> str:
    """Return the chart of speed against size."""
    lines: dict[str, list[Point]] = {}
    for row in sweep:
        x = float(np.log2(row.wide_bytes / 1024))
        speed = row.gb_per_s
        lines.setdefault(row.work, []).append(Point(x, speed, speed, speed))
    first = sweep[0].work
    lines["memcpy"] = [
        Point(float(np.log2(row.wide_bytes / 1024)), *(row.memcpy_gb_per_s,) * 3)
        for row in sweep
        if row.work == first
    ]
    series = [Series(name, tuple(points), is_line=True) for name, points in lines.items()]
    return chart(
        series,
        title=f"FP4 on one core, level {native.default_level()}",
        x=Axis("size of the wide side, 2^x KiB"),
        y=Axis("GB/s, read and written"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument(
        "--levels", nargs="+", choices=native.levels(), default=list(native.levels())
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path)
    chosen = parser.parse_args()
    rows, sweep = measure(
        chosen.levels, chosen.mib << 20, chosen.pairs, with_peers=not chosen.no_peers
    )
    if chosen.svg is not None:
        chosen.svg.write_text(picture(sweep), encoding="utf-8")
    if chosen.json:
        print(json.dumps({"rows": [asdict(r) for r in rows], "sweep": [asdict(r) for r in sweep]}))
        return
    print(f"{'work':42} {'by':22} {'MiB':>5} {'GB/s':>7} {'memcpy':>7}  {'ratio':>6} quartiles")
    for row in rows:
        print(
            f"{row.work:42} {row.by:22} {row.wide_bytes / 2**20:5.0f} {row.gb_per_s:7.2f} "
            f"{row.memcpy_gb_per_s:7.2f}  {row.ratio:6.3f} {row.low:.3f} {row.high:.3f}"
        )
