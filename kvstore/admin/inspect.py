"""Reports on a store of any layout: sizes and namespaces, one block, verification of all blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.admin.access import InspectedStore, open_for_reading
from kvstore.identity.block import BlockKey
from kvstore.store.integrity import stored_fault
from kvstore.store.metrics import Metrics, histogram
from kvstore.store.namespaces import namespace_facts
from kvstore.tier.ssd.capacity import PAGE_BYTES, pages_of, usage_of
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, is_transient
from kvstore.tier.ssd.owner_lock import owner_pid
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier

CHAIN_SHOWN = 16
"""Ancestors that ``inspect`` lists; others are counted."""


def store_stats(path: Path) -> dict[str, Any]:
    """Return sizes and counts of a store as plain JSON values."""
    with open_for_reading(path) as store:
        ssd, block_tokens = store.ssd, store.frame_format.block_tokens
        facts = namespace_facts(ssd)
        records, packing = [record for _, record in ssd.records()], Metrics()
        for record in records:
            packing.note_form(record)
        blocks = len(records)
        tokens, live = blocks * block_tokens, ssd.live_bytes
        return {
            "path": str(path),
            "layout": (ssd.fact("layout") or b"").decode(errors="replace"),
            "fingerprint": store.form.layout.fingerprint,
            "owner_pid": owner_pid(path),
            "block_tokens": block_tokens,
            "blocks": blocks,
            "tokens": tokens,
            "live_bytes": live,
            "file_bytes": ssd.file_bytes,
            "capacity_bytes": store.capacity_bytes or None,
            "ssd_formats": dict(store.form.ssd_formats),
            "packed_blocks": packing.packed_blocks,
            "lossless_blocks": packing.lossless_blocks,
            "compressed_blocks": packing.compressed_blocks,
            "block_errors": histogram(packing.block_errors),
            "bytes_per_token": float(store.form.layout.bytes_per_token),
            "ssd_bytes_per_token": live / tokens if tokens else None,
            "namespaces": _namespaces(store, records, facts),
        }


def _namespaces(
    store: InspectedStore, records: Sequence[Record], before: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return identity, usage and quota of each namespace that has a name or blocks.

    ``before`` are the names read before ``records``; the owner may have removed some since.
    """
    blocks = Counter(record.namespace_id for record in records)
    facts, usage = namespace_facts(store.ssd), usage_of(records)
    facts = {**{n: dict(before[n]) for n in blocks.keys() & before.keys()}, **facts}
    return [
        {
            "model": "?",
            "quota": None,
            **facts.get(number, {}),
            "id": number,
            "blocks": blocks[number],
            "tokens": blocks[number] * store.frame_format.block_tokens,
            "bytes": usage[number],
        }
        for number in sorted(facts.keys() | blocks.keys())
    ]


def inspect_block(path: Path, prefix: str) -> dict[str, Any]:
    """Return one block's record, header and ancestors as plain JSON values.

    ``prefix`` is the start of its key in hex. Raises ``ValueError`` unless it matches exactly one block.
    """
    with open_for_reading(path) as store:
        facts = namespace_facts(store.ssd)
        records = dict(store.ssd.records())
        key = _find(store.ssd.path, records, prefix)
        record = records[key]
        frame = store.ssd.frame(key)
        first, size = record.number, store.frame_format.block_tokens
        spaces = _namespaces(store, list(records.values()), facts)
        return {
            "key": key.hex(),
            "number": record.number,
            "tokens": [first * size, (first + 1) * size],
            "namespace": next(space for space in spaces if space["id"] == record.namespace_id),
            "sequence": record.sequence,
            "page": record.page,
            "expires": record.expires if 0 < record.expires < math.inf else None,
            "is_pinned": record.is_pinned,
            "frame_bytes": record.frame_bytes,
            "bytes": pages_of(record.frame_bytes) * PAGE_BYTES,
            "is_packed": record.is_packed,
            "is_compressed": record.is_compressed,
            "error": record.error if math.isfinite(record.error) else None,
            "header": None if frame is None else _header(store, memoryview(frame)),
            "fault": _fault(store, key, record, {}),
            **_ancestors(store.ssd, record),
        }


def _header(store: InspectedStore, frame: memoryview) -> dict[str, Any] | None:
    header = store.frame_format.form_of(frame).header(frame)
    if header is None:
        return None
    return {
        "block_hash": header.block_hash.hex(),
        "parent_hash": header.parent_hash.hex(),
        "block_tokens": header.block_tokens,
        "payload_bytes": header.payload_bytes,
        "has_images": header.has_images,
        "sequence": header.sequence,
    }


def _ancestors(ssd: SsdTier, record: Record) -> dict[str, Any]:
    """Return the nearest ancestors of a block, the number of all, and whether the chain is complete."""
    chain: list[dict[str, Any]] = []
    depth = 0
    above: Record | None = record
    while above is not None and above.number:
        parent_key, below = above.parent, above.number
        above = ssd.record(parent_key)
        if above is not None and above.number != below - 1:
            above = None  # a damaged record; following it might never end
        depth += 1
        if len(chain) < CHAIN_SHOWN:
            number = above.number if above is not None else None
            chain.append({"key": parent_key.hex(), "number": number})
    is_whole = above is not None and above.number == 0
    return {"parents": chain, "parent_count": depth, "chain_is_whole": is_whole}


def _find(path: Path, keys: Iterable[BlockKey], prefix: str) -> BlockKey:
    wanted = prefix.lower()
    found = [key for key in keys if key.hex().startswith(wanted)]
    if len(found) != 1:
        some = ", ".join(key.hex() for key in found[:3])
        msg = f"no block in {path} has a key that starts with {prefix!r}; list them without a key"
        if found:
            msg = f"{len(found)} blocks in {path} have keys that start with {prefix!r}: {some}; give more digits"
        raise ValueError(msg)
    return found[0]


def list_blocks(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return the most recently used blocks, newest first."""
    with open_for_reading(path) as store:
        newest = sorted(store.ssd.records(), key=lambda item: item[1].sequence, reverse=True)
        return [
            {
                "key": key.hex(),
                "number": record.number,
                "namespace_id": record.namespace_id,
                "sequence": record.sequence,
                "parent": record.parent.hex() if record.number else None,
            }
            for key, record in newest[:limit]
        ]


def verify_store(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Check every block's checksums, identity and parent; return the bad ones.

    ``progress(done, total)`` is called repeatedly. Raises ``StoreError`` if the store is unreadable.
    """
    bad: list[dict[str, Any]] = []
    with open_for_reading(path) as store:
        records = dict(store.ssd.records())
        for done, (key, record) in enumerate(records.items()):
            if not done % 64:
                progress(done, len(records))
            fault = _fault(store, key, record, records)
            if fault is not None:
                bad.append({"key": key.hex(), "number": record.number, "fault": fault})
        progress(len(records), len(records))
    return {"path": str(path), "blocks": len(records), "bad_blocks": len(bad), "bad": bad}


def _fault(
    store: InspectedStore, key: BlockKey, record: Record, records: dict[BlockKey, Record]
) -> str | None:
    """Return the fault of a stored block, None if it is intact.

    ``records`` are all records, for the check of the parent; empty to look it up.
    """
    try:
        data = store.ssd.frame(key)
    except MEDIUM_ERRORS as error:
        if is_transient(error):
            raise
        return "io"
    if data is None:
        return "missing"
    frame = memoryview(data)
    fault = stored_fault(store.frame_format, frame, key, record, keys_root=store.keys_root)
    parent = records.get(record.parent) if records else store.ssd.record(record.parent)
    has_parent = parent is not None and parent.number == record.number - 1
    return fault or ("parent" if record.number and not has_parent else None)
