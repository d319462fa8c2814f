"""kvstore's SSD tier as a store of flat blocks: what it costs without tokens, prompts and an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.ssd_store import BLOCK_TOKENS, Payloads, tier_options
from kvstore import LayerGroup, Layout
from kvstore.block import BlockHash, BlockKey
from kvstore.frame import FrameFormat, Header, head_sum
from kvstore.tier.ssd import Put, Record, open_ssd

Block = NDArray[np.uint8]


def flat_layout(block_bytes: int) -> Layout:
    """Return a layout whose block is that many bytes in one part."""
    group = LayerGroup(
        name="block",
        layers=(0,),
        values=block_bytes,
        entry_format="u8",
        tokens_per_entry=BLOCK_TOKENS,
    )
    return Layout(model="flat", groups=(group,))


class FlatTier:
    """Blocks by key in a tier; head and payload are checked on the way out, in one pass."""

    def __init__(self, folder: Path, block_bytes: int, capacity: int) -> None:
        layout = flat_layout(block_bytes)
        self._form = FrameFormat(layout, BLOCK_TOKENS)
        self._tier, _ = open_ssd(folder / "tier", tier_options(layout, self._form, capacity))
        self._payloads = Payloads(self._form)
        self._tokens = np.zeros(BLOCK_TOKENS, np.uint32)
        self._sequence = self._tier.block_count
        self._block_bytes = block_bytes

    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Frame a batch and write it in one durable transaction."""
        self._tier.put([self._framed(key, b) for key, b in zip(keys, blocks, strict=True)])

    def _framed(self, key: bytes, block: Block) -> Put:
        self._sequence += 1
        header = Header(
            block_tokens=BLOCK_TOKENS,
            number=0,
            namespace_id=1,
            payload_bytes=self._block_bytes,
            block_hash=_hash_of(key),
            parent_hash=_hash_of(b""),
            sequence=self._sequence,
        )
        entries = {"block": block.reshape(1, 1, -1)}
        frame = self._form.encode(header, self._tokens, entries, 0)
        record = Record(
            parent=BlockKey(bytes(16)),
            number=0,
            namespace_id=1,
            sequence=self._sequence,
            frame_bytes=len(frame),
            head_sum=head_sum(frame),
        )
        return Put(BlockKey(key), record, frame)

    def get(self, keys: Sequence[bytes], out: Block) -> None:
        """Copy verified blocks into the rows of ``out``. Raises if one is missing or bad."""
        copy = self._payloads.taker(out)

        def take(at: int, frame: memoryview) -> str | None:
            found = self._form.head_fault(frame, _hash_of(keys[at]), None, self._tokens)
            return found or copy(at, frame)

        result = self._tier.read([BlockKey(key) for key in keys], take)
        if result.fault is not None:
            raise RuntimeError(f"block {result.count} of {len(keys)} is {result.fault}")

    def close(self) -> None:
        """Record where payloads lie, and let go of the files."""
        self._tier.sync()
        self._tier.close()


def _hash_of(key: bytes) -> BlockHash:
    return BlockHash(key.ljust(32, b"\0"))
