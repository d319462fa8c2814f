"""Import of an archive into a store. Archives are not trusted: every block is verified."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.admin.access import open_for_writing
from kvstore.admin.archive.manifest import Manifest, read_manifest
from kvstore.admin.archive.tar import ArchiveDamage, Member, Members, read_archive
from kvstore.errors import StoreError
from kvstore.frame.header import Header
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey, block_key
from kvstore.index.prefix_tree import KeyedIndex, Segment
from kvstore.output.sizes import size_bytes
from kvstore.policy.lru import Lru
from kvstore.store import generations
from kvstore.store.integrity import frame_fault
from kvstore.store.open_store import OpenStore
from kvstore.store.opening import resolved
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import READ_BATCH
from kvstore.transfer.interrupts import BARRIER_SECONDS

SEEN_BLOCKS = 1 << 16
"""Blocks whose hashes are cached for their children, some 200 bytes each; older ones are read back."""
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """Identity of a block in the target or its write queue."""

    hash: BlockHash
    number: int
    root: BlockHash


@dataclass(slots=True)
class _Run:
    """Run of blocks with one expiry and one pin, stored by one call: a ``Chain``."""

    root: BlockHash
    space: int
    above: bytes
    """Concatenated keys of the ancestors."""
    parent: BlockHash
    expires: int
    is_pinned: bool
    headers: list[Header] = field(default_factory=list)
    frames: list[bytearray] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Number of the first block."""
        return len(self.above) // KEY_BYTES

    @property
    def chain(self) -> bytes:
        """Keys of all blocks from the root on."""
        return self.above + b"".join(block_key(header.block_hash) for header in self.headers)

    def key(self, number: int) -> BlockKey:
        """Return the key of a block or an ancestor."""
        if number < self.first:
            return BlockKey(self.above[number * KEY_BYTES : (number + 1) * KEY_BYTES])
        return block_key(self.hash_of(number))

    def hash_of(self, number: int) -> BlockHash:
        """Return the hash of one of the blocks."""
        return self.headers[number - self.first].block_hash

    def parent_hash(self, number: int) -> BlockHash:
        """Return the parent hash of one of the blocks."""
        return self.hash_of(number - 1) if number > self.first else self.parent

    def has_images(self, number: int) -> bool:
        """Return whether one of the blocks has image tokens."""
        return self.headers[number - self.first].has_images

    def continues(self, header: Header, member: Member) -> bool:
        """Return whether a block is the next of the run."""
        last = self.headers[-1]
        alike = (self.space, self.expires, self.is_pinned)
        return (
            header.number == last.number + 1
            and header.parent_hash == last.block_hash
            and alike == (header.namespace_id, member.seconds, member.is_pinned)
        )


class _Import:
    """One import: target store, current run, and counts."""

    def __init__(self, manifest: Manifest, store: OpenStore, index: KeyedIndex) -> None:
        self._manifest = manifest
        self._store = store
        self._writer = store.require_writer("imports")
        self._index = index
        self._run: _Run | None = None
        self._seen: dict[BlockKey, _Seen] = {}
        self.refused: Counter[str] = Counter()
        self.expired = 0
        self.blocks = 0

    def take(self, member: Member, members: Members) -> None:
        """Store the block of one member, or count the reason for refusing it."""
        if not member.is_file or _NAME.fullmatch(member.name) is None:
            self.refused["name" if member.is_file else "type"] += 1
            return
        key = BlockKey(bytes.fromhex(member.name))
        if not member.size:
            self._use(key)
            return
        self.blocks += 1
        if member.size > self._manifest.frames.frame_bytes:
            self.refused["size"] += 1
            return
        frame = members.read(member)
        if 0 < member.seconds <= time.time():
            self.expired += 1
            return
        fault = self._fault(key, frame, member)
        if fault is not None:
            self.refused[fault] += 1

    def _fault(self, key: BlockKey, frame: bytearray, member: Member) -> str | None:
        """Add a block to the run, or return the reason for refusing it."""
        manifest = self._manifest
        fault = frame_fault(manifest.frames, memoryview(frame), key, keys_root=manifest.keys_root)
        if fault is not None:
            return fault
        header = manifest.frames.form_of(frame).header(memoryview(frame))
        assert header is not None
        root = manifest.roots.get(header.namespace_id)
        if root is None:
            return "namespace"
        if self._run is not None and len(self._run.headers) >= self._store.ssd.commit_blocks:
            self.finish()
        if self._run is None or not self._run.continues(header, member):
            self.finish()
            above = self._above(header, root)
            if isinstance(above, str):
                return above
            self._run = _Run(
                *(root, header.namespace_id, above, header.parent_hash),
                *(member.seconds, member.is_pinned),
            )
        self._run.headers.append(header)
        self._run.frames.append(frame)
        self._seen.pop(key, None)
        self._seen[key] = _Seen(header.block_hash, header.number, root)
        if len(self._seen) > SEEN_BLOCKS:
            del self._seen[next(iter(self._seen))]
        return None

    def _above(self, header: Header, root: BlockHash) -> bytes | str:
        """Return the keys of a block's ancestors, or a fault if its parent is missing."""
        if not header.number:
            return b"" if header.parent_hash == root else "identity"
        key = block_key(header.parent_hash)
        chain = self._chain(key, root)
        parent = None if chain is None else self._seen.get(key) or self._stored(key)
        if chain is None or parent is None:
            return "parent"
        expected = _Seen(header.parent_hash, header.number - 1, root)
        return (
            chain if parent == expected and len(chain) == header.number * KEY_BYTES else "identity"
        )

    def _chain(self, key: BlockKey, root: BlockHash) -> bytes | None:
        """Return the keys from the root to a stored or queued block, None for others."""
        keys: list[BlockKey] = []
        above: BlockKey | None = key
        with self._store.context.lock:
            while above:
                keys.append(above)
                below = above
                above = self._index.parents.get(below)
                if above is None:
                    above = self._writer.queued_parent(below)
                    if above == root[:KEY_BYTES]:
                        break
        return None if above is None else b"".join(reversed(keys))

    def _stored(self, key: BlockKey) -> _Seen | None:
        """Read the identity of a stored block, None if it is not stored."""
        self._writer.flush()
        record, frame = self._store.ssd.record(key), self._store.ssd.frame(key)
        if record is None or frame is None:
            return None
        header = self._manifest.frames.form_of(frame).header(memoryview(frame))
        root = self._writer.namespaces.root(record.namespace_id)
        if header is None or root is None:
            return None
        return _Seen(header.block_hash, header.number, root)

    def finish(self) -> None:
        """Queue the current run for storing."""
        run, self._run = self._run, None
        if run is None:
            return

        def encode(header: Header) -> bytearray:
            frame = run.frames[header.number - run.first]
            self._manifest.frames.form_of(frame).renumber(frame, header.namespace_id)
            return frame

        self._writer.store(
            *(run, self._manifest.spaces[run.space], encode, run.first),
            wait=BARRIER_SECONDS,
            ttl=run.expires - time.time() if run.expires else None,
            is_pinned=run.is_pinned,
        )

    def _use(self, key: BlockKey) -> None:
        """Make an earlier block the most recently used one."""
        self.finish()
        context = self._store.context
        with context.lock:
            is_queued = self._writer.queued_parent(key) is not None
        if is_queued:
            self._writer.flush()
        with context.lock:
            if key not in self._index.parents:
                return
            chain = self._chain(key, BlockHash(b""))  # it is stored, and so are its ancestors
            assert chain is not None
            segment = self._index.split_at(self._index.match(chain))
            tick = context.next_tick()
            self._index.touch(segment, tick)
            self._writer.note_use(key, tick)

    def keep_generations(self) -> None:
        """Record the newer generations of the archive."""
        ssd = self._store.ssd
        newer = {
            line: newest
            for line, newest in self._manifest.generations.items()
            if generations.recorded(ssd, line) < newest
        }
        if newer:
            generations.record(ssd, newer)

    def result(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        metrics, ssd = self._store.metrics, self._store.ssd
        return {
            "archive_blocks": self.blocks,
            "imported_blocks": metrics.stored_blocks,
            "present_blocks": metrics.present_blocks,
            "expired_blocks": self.expired,
            "refused_members": self.refused.total(),
            "refused": dict(self.refused),
            "dropped_blocks": metrics.dropped_blocks.total(),
            "dropped": dict(metrics.dropped_blocks),
            "evicted_blocks": metrics.evicted_blocks["ssd"],
            "blocks": ssd.block_count,
            "live_bytes": ssd.live_bytes,
            "capacity_bytes": ssd.capacity_bytes,
        }


def import_store(
    file: Path, path: Path, ssd_bytes: str, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Store the blocks of an archive in the store at ``path``, which is created if missing.

    Each block is verified; one that is corrupt, has another name than its key, or has no parent in the
    store is refused and counted. Present blocks stay. Imported blocks are more recent than present ones,
    in the archive's order; a cap that is too small evicts the least recently used. Damage ends the
    import; blocks before it stay, and ``damage`` has the reason. ``progress(done, total)`` counts bytes.

    Raises:
        ConfigError: for an invalid size.
        LayoutMismatch: if the store at ``path`` has another format; it is left untouched.
        StoreBusy: if a process owns it.
        StoreError: if ``file`` is no archive, or the medium fails.
        OSError: if ``file`` cannot be read.

    Cost: memory of the write queue (256 MiB at most) and some 200 bytes per block of the target.
    """
    path = resolved(path)
    capacity, total = size_bytes(ssd_bytes, "--ssd-bytes"), file.stat().st_size
    damage: str | None = None
    with read_archive(file) as (stream, position):
        members = Members(stream)
        walk = iter(members)
        try:
            manifest = read_manifest(file, members, next(walk, None), path)
        except ArchiveDamage as error:
            raise StoreError(f"{file} is not an archive of a store: {error}") from error
        index = KeyedIndex(Lru[Segment]())
        with open_for_writing(
            path, index=index, capacity_bytes=capacity, format_text=manifest.text
        ) as store:
            work = _Import(manifest, store, index)
            try:
                if store.ssd.fact("layout") is None:
                    store.ssd.set_fact("layout", manifest.layout.encode(errors="replace")[:1024])
                work.keep_generations()
                try:
                    for count, member in enumerate(walk):
                        work.take(member, members)
                        if not count % READ_BATCH:
                            progress(position(), total)
                except ArchiveDamage as error:
                    damage = str(error)
                work.finish()
                store.flush()
                result = work.result()
            except MEDIUM_ERRORS as error:
                msg = f"the import into {path} stopped: {error}; the blocks stored so far stay"
                raise StoreError(msg) from error
    progress(total, total)
    return {"file": str(file), "path": str(path), "damage": damage, **result}
