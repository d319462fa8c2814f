"""Verification that a stored frame is intact and belongs to its key and record.

A read compares a block with the tokens of its request; this verification uses the tokens in the frame.
"""

from __future__ import annotations

from kvstore.frame.format import Frames
from kvstore.frame.header import head_sum
from kvstore.identity.block import BlockHash, BlockKey, block_key
from kvstore.identity.hash import block_hashes
from kvstore.tier.ssd.records import Record


def frame_fault(
    frames: Frames, frame: memoryview, key: BlockKey, *, keys_root: BlockHash | None
) -> str | None:
    """Return the fault of a frame that should be the block under ``key``, None for an intact one.

    ``keys_root`` is the root of hashes that do not depend on the parent (callers' own keys), None if they do. Token
    ids do not determine the hash of a block with an image, so the hash in the frame is used.
    """
    form = frames.form_of(frame)
    header = form.header(frame)
    if header is None:
        return "header"
    if not form.is_payload_intact(frame):
        return "checksum"
    above = header.parent_hash if keys_root is None else keys_root
    is_derived = header.has_images or (
        block_hashes(above, form.tokens(frame), frames.block_tokens) == [header.block_hash]
    )
    return None if block_key(header.block_hash) == key and is_derived else "identity"


def stored_fault(
    frames: Frames, frame: memoryview, key: BlockKey, record: Record, *, keys_root: BlockHash | None
) -> str | None:
    """Return the fault of a stored frame, or None; its parent is not read. Cost: one pass over the frame."""
    header = frames.form_of(frame).header(frame)
    if header is None or head_sum(frame) != record.head_sum:
        return "header"  # another block's, or truncated: the payload is not read
    fault = frame_fault(frames, frame, key, keys_root=keys_root)
    if fault is not None:
        return fault
    if (header.number, header.namespace_id) != (record.number, record.namespace_id):
        return "identity"
    return None if block_key(header.parent_hash) == record.parent else "parent"
