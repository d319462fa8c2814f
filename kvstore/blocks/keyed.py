"""Blocks under keys of their callers: the owned tier of a prefix cache, asked by key.

Each block is the end of a chain of parents. Blocks without parents are chains of one, so that
leaf-first eviction is plain LRU; with parents it takes a tree from its leaves.
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
from kvstore.frame.format import FrameFormat, Header, Places
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.index.prefix_tree import KeyedIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.open_store import OpenStore
from kvstore.store.writer import OwnedSsd
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import BUSY

Bytes = NDArray[np.uint8]
"""A block's bytes, uint8 ``[block_bytes]``."""


@dataclass(slots=True)
class _Pin:
    """A key that callers protect."""

    segment: Segment
    """What ends with its block; dead once a bad block was discarded."""
    count: int


class KeyedBlocks(OpenStore):
    """The state behind every opening of one store of keyed blocks.

    Invariants:
        A key has one block and one parent: who comes second finds it there.
    """

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
        self._putting = threading.Lock()
        """Held from the look whether keys are known until they are queued. Before any other."""
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

    # ---- where a block is; the caller holds the context's lock ---------------------------------

    def _parent(self, key: BlockKey) -> BlockKey | None:
        """Return the key of a block's parent, empty for a root's child, None if it is unknown."""
        found = self._index.parents.get(key)
        if found is not None or self.owned is None:
            return found
        queued = self.owned.queued_parent(key)
        return BlockKey(b"") if queued == self.keys_root[:KEY_BYTES] else queued

    def _path(self, key: BlockKey) -> bytes:
        """Return the keys from the root to a known block, end to end."""
        keys: list[BlockKey] = []
        above: BlockKey | None = key
        while above:
            keys.append(above)
            above = self._parent(above)
        return b"".join(reversed(keys))

    def _segment(self, key: BlockKey) -> Segment:
        """Return the segment that ends with a stored block."""
        return self._index.settle(self._index.match(self._path(key)))

    def _use(self, owned: OwnedSsd, keys: Sequence[BlockKey]) -> list[Segment]:
        """Make stored blocks recent; return segments that together cover them."""
        tick = self.context.next_sequence()
        parents = {self._index.parents[key] for key in keys}
        segments = []
        for key in dict.fromkeys(keys):
            if key not in parents:  # what hangs on a block protects it
                segment = self._segment(key)
                self._index.touch(segment, tick)
                owned.note_use(key, tick)
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
        """Queue blocks that are not known yet; say of each whether it is stored or queued now."""
        if self.owned is None:
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
                at = self._put_chain(self.owned, blocks, source, parents, at, deadline)
            with self.context.lock:
                known = [self._parent(block.key) is not None for block in blocks]
        finally:
            self._putting.release()
        return known

    def _put_chain(
        self,
        owned: OwnedSsd,
        blocks: Sequence[NamedBlock],
        source: Places,
        parents: Sequence[NamedBlock | None],
        at: int,
        deadline: float,
    ) -> int:
        """Queue the blocks from ``at`` on that form a chain of new ones; return where it ends."""
        with self.context.lock:
            if self._parent(blocks[at].key) is not None:
                self.metrics.present_blocks += 1
                if blocks[at].key in self._index.parents:
                    self._use(owned, [blocks[at].key])
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
            # The path of an unknown parent is that parent alone, which the owner does not have either.
            above = b"" if parent is None else self._path(parent.key)
        below = self.keys_root if parent is None else parent.hash
        chain = KeyChain(self.keys_root, above, below, blocks[at:stop])

        def encode(header: Header) -> bytearray:
            number = at + header.number - chain.first
            return self.format.encode(header, blocks[number].words, source, number)

        owned.store(
            *(chain, KEYS_NAMESPACE, encode, chain.first),
            wait=deadline - time.monotonic(),
            ttl=None,
            is_pinned=False,
        )
        return stop

    # ---- reading -------------------------------------------------------------------------------

    def get(self, blocks: Sequence[NamedBlock], targets: Sequence[Bytes]) -> list[bool]:
        """Copy blocks to ``targets``, verified, each wholly or not at all; say which came."""
        with self._reading(blocks) as wanted:
            return self._read(blocks, targets, wanted)

    @contextmanager
    def _reading(self, blocks: Sequence[NamedBlock]) -> Iterator[list[int]]:
        """Protect what is there of ``blocks`` while it is read; yields their places."""
        owned = self.owned
        if owned is None:
            yield list(range(len(blocks)))
            return
        with self.context.lock:
            wanted = [i for i, block in enumerate(blocks) if block.key in self._index.parents]
            segments = self._use(owned, [blocks[i].key for i in wanted])
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
        asked = [blocks[place] for place in wanted]
        target = self._frames.apart_target([targets[place] for place in wanted])
        # Checked before they are copied: a caller's buffer holds the block, or what it held.
        reader = self._frames.reader(target, any_parent=True, checks_first=True)
        done = 0

        def take(i: int, frame: memoryview) -> str | None:
            block = asked[done + i]
            fault = self.format.form_of(frame).fault(frame, block.hash, None, block.words)
            return fault or self.format.scatter(frame, target, done + i)

        def take_many(i: int, file: int, offsets: NDArray[np.int64]) -> int:
            assert reader is not None
            some = asked[done + i : done + i + len(offsets)]
            # No parent is asked for: any hash may stand in its place.
            hashes = self.keys_root + b"".join([block.hash for block in some])
            ids = np.concatenate([block.words for block in some])
            return reader.read(file, offsets, hashes, ids, done + i)

        takers = {} if reader is None else {self._frames.frame_bytes: take_many}
        began = time.perf_counter()
        while done < len(asked):
            keys = [block.key for block in asked[done:]]
            result = self.ssd.read(keys, take, takers)
            for place in wanted[done : done + result.count]:
                good[place] = True
            done += result.count
            if result.fault is not None:
                bad.append((asked[done], result.fault))
                done += 1
        for block, found in bad:  # now: what hangs on them was served, and goes with them
            self._discard(block, found)
        return self._counted(good, time.perf_counter() - began)

    def _counted(self, good: list[bool], seconds: float) -> list[bool]:
        """Count what was asked for, and return it."""
        count = sum(good)
        with self.context.lock:
            self.metrics.lookups += 1
            self.metrics.hit_blocks += count
            self.metrics.missed_blocks += len(good) - count
            self.metrics.read_bytes += count * self.format.frame_bytes
            self.metrics.read_seconds += seconds
        return good

    def _discard(self, block: NamedBlock, fault: str) -> None:
        """Count a bad block and, as the owner, remove it and all that hangs on it."""
        if self.owned is None and fault == "missing":
            return  # never there, or evicted by the owner
        if fault == BUSY:
            self.context.count_passing(self.ssd.path)
            return
        with self.context.lock:
            self.metrics.corrupt_blocks[fault] += 1
            message = "block %s in %s is unusable (%s): a miss, and counted from here on"
            name = block.key.hex()
            self.metrics.say_once(f"corrupt {fault}", message, name, self.ssd.path, fault)
            if self.owned is None or block.key not in self._index.parents:
                return
            path = self._path(block.key)
        self.owned.discard(path)

    def exists(self, blocks: Sequence[NamedBlock]) -> int:
        """Return how many leading blocks are stored. Leaves no trace."""
        keys = [block.key for block in blocks]
        if self.owned is None:
            try:
                return self.ssd.known_run(keys)
            except MEDIUM_ERRORS as error:
                self.note_failed_look(error)
                return 0
        with self.context.lock:
            parents = self._index.parents
            return next((i for i, key in enumerate(keys) if key not in parents), len(keys))

    def listing(self) -> list[tuple[BlockKey, bytes]]:
        """Return the key of each stored block: the tier's, and its caller's."""
        found: list[tuple[BlockKey, bytes]] = []

        def take(key: BlockKey, frame: memoryview) -> None:
            form = self.format.form_of(frame)
            if form.header(frame) is not None:  # else a read will find it bad
                found.append((key, key_of(form.tokens(frame))))

        try:
            self.ssd.look([key for key, _ in self.ssd.records()], take)
        except MEDIUM_ERRORS as error:
            msg = f"the store at {self.ssd.path} cannot be read: {error}"
            raise StoreError(msg) from error
        return found

    # ---- protecting and removing ---------------------------------------------------------------

    def pin(self, blocks: Sequence[NamedBlock]) -> list[bool]:
        """Protect stored blocks, and what they hang on; say which are stored."""
        owned = self.owner("pins")
        with self.context.lock:
            pinned = [block.key in self._index.parents for block in blocks]
            self._use(
                owned, [b.key for b, is_there in zip(blocks, pinned, strict=True) if is_there]
            )
            for block, is_there in zip(blocks, pinned, strict=True):
                if is_there:
                    self._pin(block.key)
            return pinned

    def _pin(self, key: BlockKey) -> None:
        held = self._pins.get(key)
        if held is None or not held.segment.is_live:
            segment = self._segment(key)
            self._index.pin(segment)
            self._pins[key] = _Pin(segment, 1 + (held.count if held is not None else 0))
        else:
            held.count += 1

    def unpin(self, blocks: Sequence[NamedBlock]) -> None:
        """Give back one pin of each block; one that has none is left alone."""
        self.owner("unpins")
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
        """Remove blocks and all that hangs on them, unless pinned; return how many went."""
        owned = self.owner("deletes")
        with self.context.lock:
            is_waiting = any(owned.queued_parent(block.key) is not None for block in blocks)
        if is_waiting:
            owned.flush()
        count = 0
        for block in blocks:
            with self.context.lock:
                if block.key not in self._index.parents:
                    continue
                path = self._path(block.key)
            count += owned.discard(path, force=False)
        return count

    def clear(self) -> int:
        """Remove every block, pinned or not; return how many went."""
        return self.owner("clears").clear(self.keys_root)

    # ---- telling -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        try:
            ssd = self._ssd_sizes()
        except MEDIUM_ERRORS as error:
            msg = f"the store at {self.ssd.path} cannot be read: {error}"
            raise StoreError(msg) from error
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
    """Say whether a block hangs on the one before it in the batch."""
    parent = parents[number]
    return parent is not None and parent.hash == blocks[number - 1].hash
