"""Savings and cost of compressing a real model's keys and values at rest.

Question: how many bytes does zstd save of bfloat16 keys and values split into byte planes, and how fast is
          it, relative to other splits, to zstd alone, to NVFP4, and to memcpy?
Method:   SmolLM2-135M-Instruct on texts of CPython (bench/codec/quality.py); its keys and values, computed in
          float32 and rounded to bfloat16, in blocks of 128 tokens. "split" rows compress one group of a
          block, all layers in one call, including the NumPy time of the split. "frame" rows convert entries
          to a frame and back, with all checksums, as a store does. Speeds are bytes of bfloat16 per second
          of the thread's CPU time, to reduce the effect of other load; medians over blocks and rounds.
          Ratios are medians of pairs with a memcpy of as many bytes.
Peers:    zstd of the unsplit bytes; NVFP4 of the same block, which is lossy; the uncompressed frame.
Bound:    memcpy. Lossless results must equal their source, else exit 1.
Run:      python -m bench.ssd.at_rest [--blocks 8] [--rounds 5] [--json]
          Takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from transformers import DynamicCache

import kvstore
from bench.codec.quality import corpus
from bench.paired import paired
from kvstore.cli.terminal import progress
from kvstore.codec.zstd import HUFFMAN
from kvstore.engine import smollm2
from kvstore.engine.transformers import TransformersAdapter, model_layout
from kvstore.frame.at_rest import Packing, frames_of
from kvstore.frame.format import Frames
from kvstore.frame.header import Header
from kvstore.identity.block import BlockHash
from kvstore.layout import Layout

BLOCK = 128
LEVELS = (-1, 1, 3, 6)
Numbers = NDArray[np.uint16]
"""Of one group of a block: ``[layers, tokens, values]``."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to store keys, values or both of a block."""

    section: str
    what: str
    of: str
    saved: float
    """Share of the bytes of bfloat16, over all blocks."""
    write_gb_per_s: float
    read_gb_per_s: float
    write_ratio: float
    """Of the speed of memcpy, as ``read_ratio``."""
    read_ratio: float


@dataclass(frozen=True, slots=True)
class Layers:
    """Saving in the top bytes of single layers, as a share of all bytes."""

    of: str
    least: float
    middle: float
    most: float


@dataclass(frozen=True, slots=True)
class Split:
    """Split of numbers into compressed and uncompressed bytes, and its inverse."""

    name: str
    apart: Callable[[Numbers], tuple[Bytes, Bytes]]
    together: Callable[[Bytes, Bytes, tuple[int, ...]], Numbers]


def halves(numbers: Numbers) -> tuple[Bytes, Bytes]:
    pairs = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 2)
    return pairs[:, 1].copy(), pairs[:, 0].copy()


def whole(high: Bytes, low: Bytes, shape: tuple[int, ...]) -> Numbers:
    pairs = np.empty((len(high), 2), np.uint8)
    pairs[:, 1], pairs[:, 0] = high, low
    return pairs.view(np.uint16).reshape(shape)


def rotated(numbers: Numbers, bits: int) -> Numbers:
    return (numbers << np.uint16(bits)) | (numbers >> np.uint16(16 - bits))


def across(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def by_channel(numbers: Numbers) -> Numbers:
    """Transpose, so that a channel's numbers of consecutive tokens are adjacent."""
    return numbers.transpose(0, 2, 1)


def differences(numbers: Numbers) -> Numbers:
    """Return differences of bits along the last axis."""
    found = numbers.copy()
    found[..., 1:] -= numbers[..., :-1]
    return found


SPLITS = (
    Split(
        "as it is",
        lambda x: (np.ascontiguousarray(x).view(np.uint8).reshape(-1), np.empty(0, np.uint8)),
        lambda high, _, shape: high.view(np.uint16).reshape(shape),
    ),
    Split("top byte", halves, whole),
    Split(
        "exponent",
        lambda x: halves(rotated(x, 1)),
        lambda high, low, shape: rotated(whole(high, low, shape), 15),
    ),
    Split(
        "top byte, by channel",
        lambda x: halves(by_channel(x)),
        lambda high, low, shape: by_channel(whole(high, low, across(shape))),
    ),
    Split(
        "top byte of differences, by channel",
        lambda x: halves(differences(by_channel(x))),
        lambda high, low, shape: by_channel(
            np.cumsum(whole(high, low, across(shape)), axis=2, dtype=np.uint16)
        ),
    ),
)


def compressors() -> Iterator[tuple[str, zstandard.ZstdCompressor]]:
    """Yield zstd at its levels, and as a store uses it."""
    for level in LEVELS:
        yield f"zstd {level}", zstandard.ZstdCompressor(level=level)
    yield "zstd, Huffman only", zstandard.ZstdCompressor(compression_params=HUFFMAN)


Blocks = Sequence[Mapping[str, Bytes]]
"""Entries of blocks, by group."""


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measured(
    identity: tuple[str, str, str],
    write: Callable[[int], int],
    read: Callable[[int], object],
    sources: Sequence[Bytes],
    rounds: int,
) -> Row:
    """Return a row of ``write(block)``, which returns bytes, and ``read(block)``, over all blocks."""
    sizes = [write(block) for block in range(len(sources))]
    speeds: dict[str, list[float]] = {"write": [], "read": []}
    ratios: dict[str, list[float]] = {"write": [], "read": []}
    for block, source in enumerate(sources):
        room = np.empty_like(source)
        for name, work in (("write", write), ("read", read)):
            mine, copy = paired(
                partial(seconds, partial(work, block)),
                partial(seconds, partial(np.copyto, room, source)),
                rounds,
            )
            speeds[name] += [source.nbytes / found / 1e9 for found in mine]
            ratios[name] += [theirs / found for found, theirs in zip(mine, copy, strict=True)]
    return Row(
        *identity,
        saved=1 - sum(sizes) / sum(source.nbytes for source in sources),
        write_gb_per_s=median(speeds["write"]),
        read_gb_per_s=median(speeds["read"]),
        write_ratio=median(ratios["write"]),
        read_ratio=median(ratios["read"]),
    )


def split_row(
    split: Split,
    packer: tuple[str, zstandard.ZstdCompressor],
    name: str,
    blocks: Blocks,
    rounds: int,
) -> Row:
    """Measure one split of one group through one compressor."""
    numbers = [block[name].view(np.uint16) for block in blocks]
    unpacker = zstandard.ZstdDecompressor()
    stored: dict[int, tuple[bytes, Bytes]] = {}

    def write(block: int) -> int:
        high, low = split.apart(numbers[block])
        stored[block] = packer[1].compress(high.data), low
        return len(stored[block][0]) + low.nbytes

    def read(block: int) -> Numbers:
        high, low = stored[block]
        return split.together(
            np.frombuffer(unpacker.decompress(high), np.uint8), low, numbers[block].shape
        )

    for block, source in enumerate(numbers):
        write(block)
        if not np.array_equal(read(block), source):
            sys.exit(f"{split.name}, {packer[0]}: other numbers returned: a bug of this benchmark")
    what = f"{split.name}: {packer[0]}"
    return measured(("split", what, name), write, read, [block[name] for block in blocks], rounds)


FORMS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    "zstd K": {"k": "zstd"},
    "zstd V": {"v": "zstd"},
    "zstd K+V": {"k": "zstd", "v": "zstd"},
    "zstd K, nvfp4 V": {"k": "zstd", "v": "nvfp4"},
    "nvfp4 V": {"v": "nvfp4"},
    "nvfp4 K+V": {"k": "nvfp4", "v": "nvfp4"},
}


def frame_row(
    name: str, formats: Mapping[str, str], layout: Layout, blocks: Blocks, rounds: int
) -> Row:
    """Measure conversion of blocks to frames and back."""
    frames: Frames = frames_of(layout, BLOCK, Packing(formats) if formats else None)
    header = Header(
        block_tokens=BLOCK,
        number=0,
        namespace_id=1,
        payload_bytes=frames.payload_bytes,
        block_hash=BlockHash(bytes(32)),
        parent_hash=BlockHash(bytes(32)),
        sequence=1,
    )
    tokens, room = np.zeros(BLOCK, np.uint32), frames.empty(1)
    target = frames.entries_target(room)
    inputs = [frames.entries_source(block) for block in blocks]
    stored: dict[int, bytearray] = {}
    head = frames.form_of(b"").payload_offset

    def write(block: int) -> int:
        stored[block] = frames.encode(header, tokens, inputs[block], 0)
        return len(stored[block]) - head

    def read(block: int) -> None:
        frame = memoryview(stored[block])
        form = frames.form_of(frame)
        fault = form.head_fault(frame, header.block_hash, header.parent_hash, tokens)
        if fault or frames.scatter(frame, target, 0):
            sys.exit(f"{name}: a new frame is invalid: a bug of kvstore")

    for block, entries in enumerate(blocks):
        write(block)
        read(block)
        for group, array in entries.items():
            if formats.get(group, "zstd") == "zstd" and not np.array_equal(array, room[group]):
                sys.exit(f"{name}: other {group} returned than stored: a bug of kvstore")
    sources = [np.concatenate([array.ravel() for array in block.values()]) for block in blocks]
    return measured(("frame", name, "k+v"), write, read, sources, rounds)


def real_blocks(count: int) -> tuple[Layout, Blocks]:
    """Return blocks of real entries, half of reference prose and half of source code."""
    loaded = smollm2.load(smollm2.prepare(progress()), "float32")
    tokens = corpus(lambda text: loaded.tokenizer(text)["input_ids"], count)
    layout = model_layout(loaded.model, dtype="bf16")
    half = count // 2 * BLOCK
    blocks: list[dict[str, Bytes]] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-at-rest-") as folder,
        kvstore.PrefixCache.open(
            folder, layout=layout, namespace=loaded.namespace, device_bytes=0
        ) as cache,
    ):
        adapter = TransformersAdapter(loaded.model, cache)
        for part in (tokens[:half], tokens[-half:]):
            past = DynamicCache()
            with torch.inference_mode():
                ids = torch.from_numpy(part)[None]
                loaded.model(input_ids=ids, cache=past, use_cache=True, logits_to_keep=1)
            entries = adapter.capture(past)
            blocks += [
                {name: array[:, at : at + BLOCK].copy() for name, array in entries.items()}
                for at in range(0, half, BLOCK)
            ]
    return layout, blocks


def of_layers(name: str, blocks: Blocks) -> Layers:
    """Return the savings of the layers of a group, each compressed separately."""
    packer = zstandard.ZstdCompressor(compression_params=HUFFMAN)
    shares = []
    for layer in range(len(blocks[0][name])):
        saved = kept = 0
        for block in blocks:
            high, _ = halves(block[name][layer].view(np.uint16))
            saved += len(high) - len(packer.compress(high.data))
            kept += 2 * len(high)
        shares.append(saved / kept)
    return Layers(name, min(shares), median(shares), max(shares))


def table(rows: Sequence[Row], layers: Sequence[Layers]) -> Iterator[str]:
    """Yield the lines of the report."""
    columns = "GB/s written   read   of memcpy"
    yield f"{'':61}{'of':>4}{'saved':>8}   {columns}"
    for row in rows:
        yield (
            f"{row.section:6} {row.what:55}{row.of:>4} {row.saved:7.1%} {row.write_gb_per_s:14.2f} "
            f"{row.read_gb_per_s:6.2f}   {row.write_ratio:.3f} {row.read_ratio:.3f}"
        )
    for found in layers:
        yield f"layers of {found.of}: {found.least:.1%} to {found.most:.1%}, median {found.middle:.1%}"


def main() -> None:
    """Measure all ways, then print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=8, help="blocks of 128 tokens, from 2 on")
    parser.add_argument("--rounds", type=int, default=5, help="pairs for each block")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    layout, blocks = real_blocks(max(2, chosen.blocks))
    rows = [
        split_row(split, packer, name, blocks, chosen.rounds)
        for name in ("k", "v")
        for split in SPLITS
        for packer in compressors()
    ]
    rows += [
        frame_row(name, formats, layout, blocks, chosen.rounds) for name, formats in FORMS.items()
    ]
    layers = [of_layers(name, blocks) for name in ("k", "v")]
    if chosen.json:
        facts = {"model": smollm2.NAME, "zstd": zstandard.ZSTD_VERSION, "blocks": len(blocks)}
        found = {"rows": [asdict(row) for row in rows], "layers": [asdict(one) for one in layers]}
        print(json.dumps({**facts, **found}))
    else:
        print("\n".join(table(rows, layers)))


if __name__ == "__main__":
    main()
