"""Looking into a store from outside: what is in it, one block, and whether every block is good.

It opens a store as a reader, whatever its layout, and changes nothing. ``owned`` is for those who do.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.blocks.keys import keys_root
from kvstore.errors import ConfigError, StoreBusy, StoreError
from kvstore.frame.at_rest import Packing, frames_of
from kvstore.frame.format import Frames
from kvstore.identity.block import BlockHash, BlockKey
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.integrity import stored_fault
from kvstore.store.metrics import Metrics, histogram
from kvstore.store.namespaces import namespace_facts
from kvstore.store.open_store import OpenStore
from kvstore.store.opening import take_over
from kvstore.store.registry import is_open_here
from kvstore.store.secret import secret_of
from kvstore.store.store_format import StoreFormat, parse_format
from kvstore.tier.ssd.capacity import PAGE_BYTES, minimum_capacity, pages_of, usage_of
from kvstore.tier.ssd.directory import require_store
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, passes, remedy
from kvstore.tier.ssd.opening import open_ssd
from kvstore.tier.ssd.owner_lock import busy, owner_pid
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions
from kvstore.tier.ssd.version_file import read_format
from kvstore.transfer.interrupts import unharmed

CHAIN_SHOWN = 16
"""Ancestors that ``inspect`` lists; the rest is counted."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store opened to be looked at."""

    ssd: SsdTier
    form: StoreFormat
    frame_format: Frames
    secret: bytes | None

    @property
    def keys_root(self) -> BlockHash | None:
        """The root of the keys that its callers bring, None if they bring none."""
        return keys_root(self.secret) if self.form.key_bytes else None

    @property
    def capacity_bytes(self) -> int:
        """The cap that its last owner gave it, 0 if that is not known."""
        text = self.ssd.fact("capacity") or b""
        return int(text) if text.isdigit() and len(text) < 20 else 0


def _described(text: str) -> tuple[StoreFormat, SsdOptions, Frames]:
    """Return what a store is for, and how it is read. Raises ``StoreError``."""
    form, frame_format = parse_frames(text)
    options = SsdOptions(
        capacity_bytes=minimum_capacity(frame_format.frame_bytes),
        frame_bytes=frame_format.frame_bytes,
        format_text=text,
        is_mixed=bool(form.ssd_formats),
        role="reader",
    )
    return form, options, frame_format


def parse_frames(text: str) -> tuple[StoreFormat, Frames]:
    """Return what the text in a ``VERSION`` file says: a format, and its frames.

    Raises:
        StoreError: if the text is damaged.
    """
    form = parse_format(text)
    packing = Packing(form.ssd_formats) if form.ssd_formats else None
    try:
        return form, frames_of(form.layout, form.block_tokens, packing)
    except ConfigError as error:
        msg = f"the store's VERSION file is damaged: {error}"
        raise StoreError(msg) from error


@contextmanager
def opened(path: Path) -> Iterator[OpenedStore]:
    """Open the store at ``path`` as a reader.

    Raises:
        StoreError: if there is none, or it cannot be read.
    """
    require_store(path)
    text = read_format(path)
    form, options, frame_format = _described(text)
    secret = secret_of(path, text)
    ssd = unharmed(lambda: open_ssd(path, options)[0], SsdTier.close)
    try:
        yield OpenedStore(ssd, form, frame_format, secret)
    except MEDIUM_ERRORS as error:
        msg = f"the store at {path} cannot be read: {error}; {remedy(error)}"
        raise StoreError(msg) from error
    finally:
        try:
            unharmed(ssd.close)
        except BaseException:
            unharmed(ssd.close)  # Ctrl-C may have come before it began
            raise


@contextmanager
def owned(
    path: Path,
    *,
    index: PrefixIndex | None = None,
    capacity_bytes: int | None = None,
    format_text: str | None = None,
) -> Iterator[OpenStore]:
    """Own the store at ``path``, whatever its layout, while the context lasts.

    Without ``capacity_bytes`` its cap stays what it was. With ``format_text`` it must be for that,
    and is made if there is none. ``index`` is an empty one to fill.

    Raises:
        StoreBusy: if a process owns it, named, or this one has it open.
        LayoutMismatch: if it is for something else; it is left untouched.
        StoreError: if there is none, or it is broken; then it was moved aside.
    """
    if format_text is None:
        require_store(path)
    if is_open_here(path):
        msg = f"{path} is open in this process; close it first"
        raise StoreBusy(msg)
    if owner_pid(path) is not None:
        raise busy(path)
    text = read_format(path) if format_text is None else format_text
    _, options, frame_format = _described(text)
    secret_of(path, text)  # no block goes in or out of a store whose secret is lost
    if capacity_bytes is None:
        with opened(path) as seen:
            capacity_bytes = max(seen.capacity_bytes, options.capacity_bytes)

    def build(ssd: SsdTier) -> OpenStore:
        return OpenStore(
            frame_format=frame_format,
            ssd=ssd,
            index=PrefixIndex(Lru[Segment]()) if index is None else index,
            clock=time.monotonic,
            wall_clock=time.time,
        )

    options = replace(options, role="owner", capacity_bytes=capacity_bytes)
    store = unharmed(lambda: take_over(path, options, build), OpenStore.close)
    try:
        if store.metrics.quarantined_stores:
            msg = f"the store at {path} was broken: it was moved aside, and an empty one took its place"
            raise StoreError(msg)
        yield store
    finally:
        try:
            unharmed(store.close)
        except BaseException:
            unharmed(store.close)  # Ctrl-C may have come before it began
            raise


def store_stats(path: Path) -> dict[str, Any]:
    """Return sizes and counts of a store as plain JSON values."""
    with opened(path) as store:
        ssd, block_tokens = store.ssd, store.frame_format.block_tokens
        facts = namespace_facts(ssd)
        records, packing = [record for _, record in ssd.records()], Metrics()
        for record in records:
            packing.note_form(
                record.error, is_packed=record.is_packed, is_compressed=record.is_compressed
            )
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
    store: OpenedStore, records: Sequence[Record], before: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each namespace that is named or has blocks: who it is, and what it holds and may hold.

    ``before`` are those that were named before ``records`` were read: an owner may have evicted the
    last of their blocks, and their names, since.
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
    """Return one block's record, header and parent chain as plain JSON values.

    ``prefix`` is the start of its key in hex; it must name one block.

    Raises:
        ValueError: if it names none or several.
    """
    with opened(path) as store:
        facts = namespace_facts(store.ssd)
        records = dict(store.ssd.records())
        key = _find(store.ssd.path, records, prefix)
        record = records[key]
        frame = store.ssd.frame(key)
        chain: list[dict[str, Any]] = []
        depth = 0
        above: Record | None = record
        while above is not None and above.number:
            parent_key, below = above.parent, above.number
            above = store.ssd.record(parent_key)
            if above is not None and above.number != below - 1:
                above = None  # a damaged record; following it might never end
            depth += 1
            if len(chain) < CHAIN_SHOWN:
                number = above.number if above is not None else None
                chain.append({"key": parent_key.hex(), "number": number})
        header = (
            None if frame is None else store.frame_format.form_of(frame).header(memoryview(frame))
        )
        spaces = _namespaces(store, list(records.values()), facts)
        return {
            "key": key.hex(),
            "number": record.number,
            "tokens": [
                record.number * store.frame_format.block_tokens,
                (record.number + 1) * store.frame_format.block_tokens,
            ],
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
            "header": None
            if header is None
            else {
                "block_hash": header.block_hash.hex(),
                "parent_hash": header.parent_hash.hex(),
                "block_tokens": header.block_tokens,
                "payload_bytes": header.payload_bytes,
                "has_images": header.has_images,
                "sequence": header.sequence,
            },
            "fault": _fault(store, key, record, {}),
            "parents": chain,
            "parent_count": depth,
            "chain_is_whole": above is not None and above.number == 0,
        }


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
    with opened(path) as store:
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

    ``progress(done, total)`` is called now and then.

    Raises:
        StoreError: if the store as a whole cannot be read.
    """
    bad: list[dict[str, Any]] = []
    with opened(path) as store:
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
    store: OpenedStore, key: BlockKey, record: Record, records: dict[BlockKey, Record]
) -> str | None:
    """Return what is wrong with a stored block, or None.

    ``records`` are all records, for the check of the parent; empty to look it up.
    """
    try:
        data = store.ssd.frame(key)
    except MEDIUM_ERRORS as error:
        if passes(error):
            raise
        return "io"
    if data is None:
        return "missing"
    frame = memoryview(data)
    fault = stored_fault(store.frame_format, frame, key, record, keys_root=store.keys_root)
    parent = records.get(record.parent) if records else store.ssd.record(record.parent)
    has_parent = parent is not None and parent.number == record.number - 1
    return fault or ("parent" if record.number and not has_parent else None)
