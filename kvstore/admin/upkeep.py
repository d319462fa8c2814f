"""Maintenance of a store that no process owns: eviction and compaction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvstore.admin.access import open_for_writing
from kvstore.errors import ConfigError
from kvstore.output.sizes import size_bytes
from kvstore.store.opening import resolved
from kvstore.tier.ssd import directory
from kvstore.transfer.threads import unharmed

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def target_bytes(to: str, capacity_bytes: int) -> int:
    """Return a size given as text such as ``"4GiB"``, or as a share of the cap such as ``"50%"``.

    Raises:
        ConfigError: if it is neither.
    """
    share = _SHARE.fullmatch(to)
    if share is None:
        try:
            return size_bytes(to, "--to")
        except ConfigError as error:
            msg = f"{error}, or a share of ssd_bytes such as '50%'"
            raise ConfigError(msg) from error
    if float(share[1]) > 100:
        msg = f"--to must be at most 100% of ssd_bytes, found {to!r}"
        raise ConfigError(msg)
    return int(capacity_bytes * float(share[1]) / 100)


def evict(path: Path, to: str) -> dict[str, Any]:
    """Evict blocks of a store down to a size, in the order of the tier's own eviction.

    ``to`` is bytes in use, as ``target_bytes`` reads it. Expired blocks are evicted first, then
    leaves by their last use; pinned blocks and their ancestors stay. Returns plain JSON values;
    ``is_reached`` is true if the store has that size or no block.

    Raises:
        ConfigError: if ``to`` is no size.
        StoreBusy: if a process owns the store.
        StoreError: if there is none, or the medium fails.

    Cost: as opening the store, and one commit for 64 evicted blocks.
    """
    target_bytes(to, 0)
    path = resolved(path)
    with open_for_writing(path) as store:
        ssd, side = store.ssd, store.owner("evicts")
        target = target_bytes(to, ssd.capacity_bytes)
        before = ssd.live_bytes
        gone = side.evict_to(target)
        live, left = ssd.live_bytes, ssd.block_count
        return {
            "path": str(path),
            "target_bytes": target,
            "is_reached": live <= target or not left,
            "evicted_blocks": gone,
            "evicted_bytes": before - live,
            "blocks": left,
            "live_bytes": live,
            "file_bytes": ssd.file_bytes,
            "capacity_bytes": ssd.capacity_bytes,
        }


def compact(path: Path) -> dict[str, Any]:
    """Return the free pages of a store to the disk. Returns plain JSON values.

    A kill at any time leaves the old file or the new one.

    Raises:
        StoreBusy: if a process owns the store or reads it.
        StoreError: if there is none, or the disk has no room for its copy; it stays as it was.

    Cost: as opening the store; reads the bytes in use twice, writes them once, needs that much space.
    """
    path = resolved(path)
    directory.require_store(path)
    before = (path / directory.DATA_FILE).stat().st_size
    with open_for_writing(path) as store:
        unharmed(store.ssd.compact)
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
