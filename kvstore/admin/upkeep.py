"""Eviction and compaction of a store that no process owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.admin.access import open_for_writing
from kvstore.output.sizes import size_or_share
from kvstore.store.opening import resolved
from kvstore.tier.ssd.directory import require_store
from kvstore.tier.ssd.files import DATA_FILE
from kvstore.transfer.interrupts import uninterrupted


def evict(path: Path, to: str) -> dict[str, Any]:
    """Evict blocks of a store down to a size, in the order of the tier's own eviction.

    ``to`` is bytes in use, such as ``"4GiB"``, or a share of the cap, such as ``"50%"``. Expired blocks are
    evicted first, then leaves by their last use; pinned blocks and their ancestors stay. Returns plain
    JSON values; ``is_reached`` is true if the store has that size or no block.

    Raises:
        ConfigError: for an invalid ``to``.
        StoreBusy: if a process owns the store.
        StoreError: if the store is missing, or the medium fails.

    Cost: opening the store, and one commit per 64 evicted blocks.
    """
    size_or_share(to, "--to", 0, "ssd_bytes")
    path = resolved(path)
    with open_for_writing(path) as store:
        ssd, side = store.ssd, store.require_writer("evicts")
        target = size_or_share(to, "--to", ssd.capacity_bytes, "ssd_bytes")
        before = ssd.live_bytes
        evicted = side.evict_to(target)
        live, left = ssd.live_bytes, ssd.block_count
        return {
            "path": str(path),
            "target_bytes": target,
            "is_reached": live <= target or not left,
            "evicted_blocks": evicted,
            "evicted_bytes": before - live,
            "blocks": left,
            "live_bytes": live,
            "file_bytes": ssd.file_bytes,
            "capacity_bytes": ssd.capacity_bytes,
        }


def compact(path: Path) -> dict[str, Any]:
    """Return the free pages of a store to the disk. A kill at any time leaves the old file or the new one.

    Returns plain JSON values.

    Raises:
        StoreBusy: if a process owns the store or reads it.
        StoreError: if the store is missing, or the disk has no room for the copy; it stays unchanged.

    Cost: opening the store, two reads and one write of the bytes in use, and disk space for them.
    """
    path = resolved(path)
    require_store(path)
    before = (path / DATA_FILE).stat().st_size
    with open_for_writing(path) as store:
        uninterrupted(store.ssd.compact)
        after = store.ssd.file_bytes
        return {
            "path": str(path),
            "bytes_before": before,
            "bytes_after": after,
            "freed_bytes": before - after,
            "blocks": store.ssd.block_count,
            "live_bytes": store.ssd.live_bytes,
            "capacity_bytes": store.ssd.capacity_bytes,
        }
