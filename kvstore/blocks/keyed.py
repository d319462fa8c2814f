"""An open store of blocks under callers' keys: look-up, storing, reading, pins and deletion by key.

Each block is the end of a chain of parents, of one block if it has no parent. Eviction removes leaves first, which
without parents is plain LRU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.blocks.keys import KEYS_NAMESPACE, KeyChain, NamedBlock, key_of
from kvstore.errors import StoreError
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import Header
from kvstore.frame.targets import AddressTable
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.index.prefix_tree import KeyedIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.open_store import OpenStore
from kvstore.store.writer import StoreWriter
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import BUSY

Bytes = NDArray[np.uint8]  # a block's bytes, uint8 ``[block_bytes]``


@dataclass(slots=True)
class _Pin:
    """The pins of one key."""

    segment: Segment  # ends with its block; not live after a discard as bad
    count: int


class KeyedBlocks(OpenStore):
    """An open store of blocks under callers' keys. The first ``put`` determines the block and the parent of a key."""

    def __init__(
        self,
        *,
        frame_format: FrameFormat,
        ssd: SsdTier,
        keys_root: BlockHash,
        on_removed: Callable[[BlockKey], object] | None = None,
        scrub_bytes_per_second: int = 0,
        request_share: float = 1.0,
    ) -> None:
        self._frames = frame_format
        self.keys_root = keys_root
        self._index = KeyedIndex(Lru[Segment](), on_removed)
        self._pins: dict[BlockKey, _Pin] = {}
        self._putting = threading.Lock()  # from look-up to queuing; acquired before other locks
        super().__init__(
            frame_format=frame_format,
            ssd=ssd,
            index=self._index,
            keys_root=keys_root,
            clock=time.monotonic,
            wall_clock=time.time,
            scrub_bytes_per_second=scrub_bytes_per_second,
            request_share=request_share,
        )

    # ---- look-up; the caller holds the context's lock -------------------------------------------

    def _parent(self, key: BlockKey) -> BlockKey | None:
        """Return the key of a block's parent, empty for a child of the root, None for an unknown block."""
        found = self._index.parents.get(key)
        if found is not None or self.writer is None:
            return found
        queued = self.writer.queued_parent(key)
        return BlockKey(b"") if queued == self.keys_root[:KEY_BYTES] else queued

    def _chain(self, key: BlockKey) -> bytes:
        """Return the concatenated keys from the root to a known block."""
        keys: list[BlockKey] = []
        above: BlockKey | None = key
        while above:
            keys.append(above)
            above = self._parent(above)
        return b"".join(reversed(keys))

    def _segment(self, key: BlockKey) -> Segment:
        """Return the segment that ends with a stored block."""
        return self._index.split_at(self._index.match(self._chain(key)))

    def _use(self, writer: StoreWriter, keys: Sequence[BlockKey]) -> list[Segment]:
        """Mark stored blocks as used; return segments that together cover them."""
        tick = self.context.next_tick()
        parents = {self._index.parents[key] for key in keys}
        segments = []
        for key in dict.fromkeys(keys):
            if key not in parents:  # a child protects its parent
                segment = self._segment(key)
                self._index.touch(segment, tick)
                writer.note_use(key, tick)
                segments.append(segment)
        return segments

    # ---- storing -------------------------------------------------------------------------------

    def put(
        self,
        blocks: Sequence[NamedBlock],
        sources: Sequence[Bytes],
        parents: Sequence[NamedBlock | None],
        wait: float,
    ) -> list[bool]:
        """Queue new blocks; return for each block whether it is now stored or queued."""
        if self.writer is None:
            self.context.count_drop("reader", len(blocks))
            return [False] * len(blocks)
        if not blocks:
            return []
        deadline = time.monotonic() + wait
        source = self._frames.apart_source(sources)
        if not self._putting.acquire(timeout=max(0.0, min(wait, threading.TIMEOUT_MAX))):
            self.context.count_drop("queue_full", len(blocks))
            return [False] * len(blocks)
        try:
            at = 0
            while at < len(blocks):
                at = self._put_chain(self.writer, blocks, source, parents, at, deadline)
            with self.context.lock:
                known = [self._parent(block.key) is not None for block in blocks]
        finally:
            self._putting.release()
        return known

    def _put_chain(
        self,
        writer: StoreWriter,
        blocks: Sequence[NamedBlock],
        source: AddressTable,
        parents: Sequence[NamedBlock | None],
        at: int,
        deadline: float,
    ) -> int:
        """Queue the new blocks from ``at`` on that form a chain; return its end."""
        with self.context.lock:
            if self._parent(blocks[at].key) is not None:
                self.metrics.present_blocks += 1
                if blocks[at].key in self._index.parents:
                    self._use(writer, [blocks[at].key])
                return at + 1
            parent = parents[at]
            seen = {blocks[at].key}
            stop = at + 1
            while stop < len(blocks) and _is_next(blocks, parents, stop):
                key = blocks[stop].key
                if key in seen or self._parent(key) is not None:
                    break
                seen.add(key)
                stop += 1
            # The chain of an unknown parent is its key alone, which is unknown to the writer too.
            above = b"" if parent is None else self._chain(parent.key)
        below = self.keys_root if parent is None else parent.hash
        chain = KeyChain(self.keys_root, above, below, blocks[at:stop])

        def encode(header: Header) -> bytearray:
            number = at + header.number - chain.first
            return self.format.encode(header, blocks[number].words, source, number)

        writer.store(
            *(chain, KEYS_NAMESPACE, encode, chain.first),
            wait=deadline - time.monotonic(),
            ttl=None,
            is_pinned=False,
        )
        return stop

    # ---- reading -------------------------------------------------------------------------------

    def get(self, blocks: Sequence[NamedBlock], targets: Sequence[Bytes]) -> list[bool]:
        """Copy blocks to ``targets``, verified, each completely or not at all; return which were copied."""
        with self._reading(blocks) as wanted:
            return self._read(blocks, targets, wanted)

    @contextmanager
    def _reading(self, blocks: Sequence[NamedBlock]) -> Iterator[list[int]]:
        """Pin the stored blocks of ``blocks`` during a read; yield their positions."""
        writer = self.writer
        if writer is None:
            yield list(range(len(blocks)))
            return
        with self.context.lock:
            wanted = [i for i, block in enumerate(blocks) if block.key in self._index.parents]
            segments = self._use(writer, [blocks[i].key for i in wanted])
            for segment in segments:
                self._index.pin(segment)
        try:
            yield wanted
        finally:
            with self.context.lock:
                for segment in segments:
                    self._index.unpin(segment)

    def _read(
        self, blocks: Sequence[NamedBlock], targets: Sequence[Bytes], wanted: Sequence[int]
    ) -> list[bool]:
        good = [False] * len(blocks)
        bad: list[tuple[NamedBlock, str]] = []
        if not wanted:
            return self._counted(good, 0.0)
        asked = [blocks[i] for i in wanted]
        target = self._frames.apart_target([targets[i] for i in wanted])
        # Verified before the copy: a target contains the block or is unchanged.
        reader = self._frames.reader(target, any_parent=True, checks_first=True)
        done = 0

        def take(i: int, frame: memoryview) -> str | None:
            block = asked[done + i]
            fault = self.format.form_of(frame).fault(frame, block.hash, None, block.words)
            return fault or self.format.scatter(frame, target, done + i)

        def take_many(i: int, file: int, offsets: NDArray[np.int64]) -> int:
            assert reader is not None
            some = asked[done + i : done + i + len(offsets)]
            # The parent is not compared, so any hash serves as the first one's.
            hashes = self.keys_root + b"".join([block.hash for block in some])
            ids = np.concatenate([block.words for block in some])
            return reader.read(file, offsets, hashes, ids, done + i)

        takers = {} if reader is None else {self._frames.frame_bytes: take_many}
        began = time.perf_counter()
        while done < len(asked):
            keys = [block.key for block in asked[done:]]
            result = self.ssd.read(keys, take, takers)
            for i in wanted[done : done + result.count]:
                good[i] = True
            done += result.count
            if result.fault is not None:
                bad.append((asked[done], result.fault))
                done += 1
        for block, found in bad:  # after the read: their descendants are deleted with them
            self._discard(block, found)
        return self._counted(good, time.perf_counter() - began)

    def _counted(self, good: list[bool], seconds: float) -> list[bool]:
        """Count a read, and return its result."""
        count = sum(good)
        with self.context.lock:
            self.metrics.lookups += 1
            self.metrics.hit_blocks += count
            self.metrics.missed_blocks += len(good) - count
            self.metrics.read_bytes += count * self.format.frame_bytes
            self.metrics.read_seconds += seconds
        return good

    def _discard(self, block: NamedBlock, fault: str) -> None:
        """Count a bad block; in the owner, delete it and its descendants."""
        if self.writer is None and fault == "missing":
            return  # never stored, or evicted by the owner
        if fault == BUSY:
            self.context.count_transient_error(self.ssd.path)
            return
        with self.context.lock:
            self.metrics.corrupt_blocks[fault] += 1
            message = "block %s in %s is unusable (%s): a miss, and counted from here on"
            name = block.key.hex()
            self.metrics.warn_once(f"corrupt {fault}", message, name, self.ssd.path, fault)
            if self.writer is None or block.key not in self._index.parents:
                return
            chain = self._chain(block.key)
        self.writer.discard(chain)

    def exists(self, blocks: Sequence[NamedBlock]) -> int:
        """Return the number of leading blocks that are stored. Neither counts nor marks them as used."""
        keys = [block.key for block in blocks]
        if self.writer is None:
            try:
                return self.ssd.known_run(keys)
            except MEDIUM_ERRORS as error:
                self.count_failed_lookup(error)
                return 0
        with self.context.lock:
            parents = self._index.parents
            return next((i for i, key in enumerate(keys) if key not in parents), len(keys))

    def listing(self) -> list[tuple[BlockKey, bytes]]:
        """Return the block key and the caller's key of each stored block."""
        found: list[tuple[BlockKey, bytes]] = []

        def take(key: BlockKey, frame: memoryview) -> None:
            form = self.format.form_of(frame)
            if form.header(frame) is not None:  # otherwise a read reports it as bad
                found.append((key, key_of(form.tokens(frame))))

        try:
            self.ssd.visit([key for key, _ in self.ssd.records()], take)
        except MEDIUM_ERRORS as error:
            raise StoreError(f"the store at {self.ssd.path} cannot be read: {error}") from error
        return found

    # ---- pins and deletion ---------------------------------------------------------------------

    def pin(self, blocks: Sequence[NamedBlock]) -> list[bool]:
        """Pin stored blocks, and with them their ancestors; return which are stored."""
        writer = self.require_writer("pins")
        with self.context.lock:
            stored = [block.key in self._index.parents for block in blocks]
            keys = [block.key for block, is_stored in zip(blocks, stored, strict=True) if is_stored]
            self._use(writer, keys)
            for key in keys:
                self._pin(key)
            return stored

    def _pin(self, key: BlockKey) -> None:
        held = self._pins.get(key)
        if held is None or not held.segment.is_live:
            segment = self._segment(key)
            self._index.pin(segment)
            self._pins[key] = _Pin(segment, 1 + (held.count if held is not None else 0))
        else:
            held.count += 1

    def unpin(self, blocks: Sequence[NamedBlock]) -> None:
        """Release one pin of each block. Blocks without a pin are ignored."""
        self.require_writer("unpins")
        with self.context.lock:
            for block in blocks:
                held = self._pins.get(block.key)
                if held is None:
                    continue
                held.count -= 1
                if not held.count:
                    del self._pins[block.key]
                    if held.segment.is_live:
                        self._index.unpin(held.segment)

    def delete(self, blocks: Sequence[NamedBlock]) -> int:
        """Delete unpinned blocks and their descendants; return the number deleted."""
        writer = self.require_writer("deletes")
        with self.context.lock:
            is_waiting = any(writer.queued_parent(block.key) is not None for block in blocks)
        if is_waiting:
            writer.flush()
        count = 0
        for block in blocks:
            with self.context.lock:
                if block.key not in self._index.parents:
                    continue
                chain = self._chain(block.key)
            count += writer.discard(chain, force=False)
        return count

    def clear(self) -> int:
        """Delete every block, pinned or not; return the number deleted."""
        return self.require_writer("clears").clear(self.keys_root)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        try:
            ssd = self._ssd_sizes()
        except MEDIUM_ERRORS as error:
            raise StoreError(f"the store at {self.ssd.path} cannot be read: {error}") from error
        with self.context.lock:
            return {
                "path": str(self.ssd.path),
                "role": "owner" if self.is_owner else "reader",
                "block_bytes": self.format.payload_bytes,
                "tiers": {"ssd": ssd},
                "pinned_keys": len(self._pins),
                "scrub": self._scrub_stats(),
                "counters": self.metrics.as_dict(),
                "alarms": self._alarms(ssd),
            }


def _is_next(
    blocks: Sequence[NamedBlock], parents: Sequence[NamedBlock | None], number: int
) -> bool:
    """Return whether a block is a child of the one before it in the batch."""
    parent = parents[number]
    return parent is not None and parent.hash == blocks[number - 1].hash
