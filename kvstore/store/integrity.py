"""Checks that a stored frame is intact and the block of its key and record.

A read compares a block with the tokens of its request. These checks take the tokens from the frame.
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
    """Return why a frame is not an intact block under ``key``, or None.

    ``keys_root`` is the root of hashes that do not depend on the parent (callers' own keys), None
    where hashes depend on it. The hash of a block that an image touches does not follow from its
    token ids; the frame's own hash is taken instead.
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
    """Return the fault of a stored frame, or None. Its parent is not looked up.

    Cost: one pass over the payload, and one SHA-256 of the token ids.
    """
    header = frames.form_of(frame).header(frame)
    if header is None or head_sum(frame) != record.head_sum:
        return "header"  # of another block, or truncated: the payload is not read
    fault = frame_fault(frames, frame, key, keys_root=keys_root)
    if fault is not None:
        return fault
    if (header.number, header.namespace_id) != (record.number, record.namespace_id):
        return "identity"
    return None if block_key(header.parent_hash) == record.parent else "parent"
