"""Opening of a store of any layout by its path, for reading or writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.blocks.keys import keys_root
from kvstore.errors import ConfigError, StoreBusy, StoreError
from kvstore.frame.at_rest import Packing, frames_of
from kvstore.frame.format import Frames
from kvstore.identity.block import BlockHash
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.open_store import OpenStore
from kvstore.store.opening import take_over
from kvstore.store.registry import is_open_here
from kvstore.store.secret import secret_of
from kvstore.store.store_format import StoreFormat, parse_format
from kvstore.tier.ssd.capacity import minimum_capacity
from kvstore.tier.ssd.directory import require_store
from kvstore.tier.ssd.faults import MEDIUM_ERRORS, remedy
from kvstore.tier.ssd.opening import open_ssd
from kvstore.tier.ssd.owner_lock import busy, owner_pid
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions
from kvstore.tier.ssd.version_file import read_format
from kvstore.transfer.interrupts import uninterrupted


@dataclass(frozen=True, slots=True)
class InspectedStore:
    """A store opened for reading: its tier, and the format that its VERSION file records."""

    ssd: SsdTier
    form: StoreFormat
    frame_format: Frames
    secret: bytes | None

    @property
    def keys_root(self) -> BlockHash | None:
        """Root of callers' own keys, None if the store hashes tokens."""
        return keys_root(self.secret) if self.form.key_bytes else None

    @property
    def capacity_bytes(self) -> int:
        """The cap that its last owner recorded, 0 if unknown."""
        text = self.ssd.fact("capacity") or b""
        return int(text) if text.isdigit() and len(text) < 20 else 0


def parse_frames(text: str) -> tuple[StoreFormat, Frames]:
    """Parse the text of a VERSION file: store format and frames. Raises ``StoreError`` if it is damaged."""
    form = parse_format(text)
    packing = Packing(form.ssd_formats) if form.ssd_formats else None
    try:
        return form, frames_of(form.layout, form.block_tokens, packing)
    except ConfigError as error:
        raise StoreError(f"the store's VERSION file is damaged: {error}") from error


def _options(text: str, form: StoreFormat, frame_format: Frames) -> SsdOptions:
    return SsdOptions(
        capacity_bytes=minimum_capacity(frame_format.frame_bytes),
        frame_bytes=frame_format.frame_bytes,
        format_text=text,
        is_mixed=bool(form.ssd_formats),
        role="reader",
    )


@contextmanager
def _closing(close: Callable[[], object]) -> Iterator[None]:
    """Close at the end, also after Ctrl-C just before."""
    try:
        yield
    finally:
        try:
            uninterrupted(close)
        except BaseException:
            uninterrupted(close)
            raise


@contextmanager
def open_for_reading(path: Path) -> Iterator[InspectedStore]:
    """Open the store at ``path`` as a reader. Raises ``StoreError`` if it is missing or unreadable."""
    require_store(path)
    text = read_format(path)
    form, frame_format = parse_frames(text)
    options, secret = _options(text, form, frame_format), secret_of(path, text)
    ssd = uninterrupted(lambda: open_ssd(path, options)[0], SsdTier.close)
    with _closing(ssd.close):
        try:
            yield InspectedStore(ssd, form, frame_format, secret)
        except MEDIUM_ERRORS as error:
            msg = f"the store at {path} cannot be read: {error}; {remedy(error)}"
            raise StoreError(msg) from error


@contextmanager
def open_for_writing(
    path: Path,
    *,
    index: PrefixIndex | None = None,
    capacity_bytes: int | None = None,
    format_text: str | None = None,
) -> Iterator[OpenStore]:
    """Open the store at ``path`` as its owner.

    The default of ``capacity_bytes`` is the recorded cap. With ``format_text`` the store must have that
    format, and is created if missing. ``index`` is an empty index, which receives the blocks.

    Raises:
        StoreBusy: if a process owns it, or this one has it open.
        LayoutMismatch: if it has another format; it is left untouched.
        StoreError: if it is missing, or was broken and moved aside.
    """
    if format_text is None:
        require_store(path)
    if is_open_here(path):
        raise StoreBusy(f"{path} is open in this process; close it first")
    if owner_pid(path) is not None:
        raise busy(path)
    text = read_format(path) if format_text is None else format_text
    form, frame_format = parse_frames(text)
    options = _options(text, form, frame_format)
    secret_of(path, text)  # raises if the secret is lost
    if capacity_bytes is None:
        with open_for_reading(path) as seen:
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
    store = uninterrupted(lambda: take_over(path, options, build), OpenStore.close)
    with _closing(store.close):
        if store.metrics.quarantined_stores:
            msg = f"the store at {path} was broken: it was moved aside and replaced by an empty one"
            raise StoreError(msg)
        yield store
