"""kvstore's SSD tier as a store of flat blocks, without prompts and an index.

Blocks are the chain of one long prompt, in the order of their numbers, with token ids of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.ssd.keys import key_of, number_of
from bench.ssd.store import BLOCK_TOKENS, contiguous, tier_options
from kvstore import LayerGroup, Layout
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import Header, head_sum
from kvstore.identity.block import BlockHash, BlockKey
from kvstore.tier.ssd.opening import open_ssd
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.values import Put

Block = NDArray[np.uint8]


def flat_layout(block_bytes: int) -> Layout:
    """Return a layout with blocks of this many bytes in one part."""
    group = LayerGroup(
        name="block",
        layers=(0,),
        values=block_bytes,
        entry_format="u8",
        tokens_per_entry=BLOCK_TOKENS,
    )
    return Layout(model="flat", groups=(group,))


class FlatTier:
    """Blocks by key in a tier; reads verify head and payload in one pass."""

    def __init__(self, folder: Path, block_bytes: int, capacity: int) -> None:
        layout = flat_layout(block_bytes)
        self._form = FrameFormat(layout, BLOCK_TOKENS)
        self._tier, _ = open_ssd(folder / "tier", tier_options(layout, self._form, capacity))
        self._tokens = np.zeros(BLOCK_TOKENS, np.uint32)

    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Frame a batch and write it in one durable transaction."""
        self._tier.put([self._framed(key, b) for key, b in zip(keys, blocks, strict=True)])

    def _framed(self, key: bytes, block: Block) -> Put:
        number = number_of(key)
        header = Header(
            block_tokens=BLOCK_TOKENS,
            number=number,
            namespace_id=1,
            payload_bytes=self._form.payload_bytes,
            block_hash=_hash_of(number),
            parent_hash=_hash_of(number - 1),
            sequence=1 + number,
        )
        frame = bytearray(self._form.frame_bytes)
        frame[self._form.payload_offset :] = block.data
        self._form.seal(frame, header)
        record = Record(
            parent=BlockKey(_hash_of(number - 1)[: len(key)]),
            number=number,
            namespace_id=1,
            sequence=1 + number,
            frame_bytes=len(frame),
            head_sum=head_sum(frame),
        )
        return Put(BlockKey(key), record, frame)

    def get(self, keys: Sequence[bytes], out: Block) -> None:
        """Copy verified blocks into the rows of ``out``, consecutive ones together. Raises for bad ones."""
        places = contiguous(self._form, out)
        numbers = [number_of(key) for key in keys]
        first = numbers[0]
        is_run = len(keys) > 1 and numbers == list(range(first, first + len(numbers)))
        reader = self._form.reader(places) if is_run else None

        def take(at: int, frame: memoryview) -> str | None:
            found = self._form.head_fault(frame, _hash_of(numbers[at]), None, self._tokens)
            return found or self._form.scatter(frame, places, at)

        def take_many(at: int, file: int, offsets: NDArray[np.int64]) -> int:
            assert reader is not None
            stop = first + at + len(offsets)
            hashes = b"".join([_hash_of(number) for number in range(first + at - 1, stop)])
            ids = np.zeros(len(offsets) * BLOCK_TOKENS, np.uint32)
            return reader.read(file, offsets, hashes, ids, at)

        wanted = [BlockKey(key) for key in keys]
        result = self._tier.read(
            wanted, take, {self._form.frame_bytes: take_many} if reader else None
        )
        if result.fault is not None:
            raise RuntimeError(f"block {result.count} of {len(keys)} is {result.fault}")

    def close(self) -> None:
        """Close the files."""
        self._tier.close()


def _hash_of(number: int) -> BlockHash:
    """Return a substitute for a block's hash: its key and zeros; only zeros before the first block."""
    return BlockHash(key_of(number).ljust(32, b"\0") if number >= 0 else bytes(32))
