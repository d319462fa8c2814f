"""Whether a stored frame is the block that its key and record say: what a check of a store asks.

A read knows the tokens that it asks for; a check does not, and takes them from the frame.
"""

from __future__ import annotations

from kvstore.frame.format import Frames
from kvstore.frame.header import Header, head_sum
from kvstore.identity.block import BlockHash, BlockKey, block_key
from kvstore.identity.hash import block_hashes
from kvstore.tier.ssd.records import Record


def frame_fault(
    frames: Frames, frame: memoryview, key: BlockKey, *, keys_root: BlockHash | None
) -> str | None:
    """Return why a frame is not an intact block under ``key``, or None.

    ``keys_root`` is what keys of callers are hashed under, whatever the parent; None where a hash
    depends on that.
    The hash of a block that an image touches does not follow from its token ids, and is taken as
    the frame says it.
    """
    form = frames.form_of(frame)
    header = form.header(frame)
    if header is None:
        return "header"
    if not form.is_payload_intact(frame):
        return "checksum"
    ids = form.tokens(frame)
    above = header.parent_hash if keys_root is None else keys_root
    is_derived = header.has_images or block_hashes(above, ids, frames.block_tokens) == [
        header.block_hash
    ]
    return None if block_key(header.block_hash) == key and is_derived else "identity"


def record_fault(header: Header, frame: memoryview, record: Record) -> str | None:
    """Return in what an intact frame and its record differ, or None."""
    if head_sum(frame) != record.head_sum:
        return "header"
    if (header.number, header.namespace_id) != (record.number, record.namespace_id):
        return "identity"
    return None if block_key(header.parent_hash) == record.parent else "parent"


def stored_fault(
    frames: Frames, frame: memoryview, key: BlockKey, record: Record, *, keys_root: BlockHash | None
) -> str | None:
    """Return what is wrong with a stored frame, or None. Its parent is not looked for.

    Cost: one pass over the payload, and one SHA-256 of the token ids.
    """
    header = frames.form_of(frame).header(frame)
    if header is None:
        return "header"
    fault = record_fault(header, frame, record)
    if fault == "header":  # another block's frame, or one cut short: not worth a look inside
        return fault
    return frame_fault(frames, frame, key, keys_root=keys_root) or fault
