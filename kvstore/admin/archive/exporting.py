"""Export of a store: verified blocks, in the order of their last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvstore.admin.access import InspectedStore, open_for_reading
from kvstore.admin.archive.manifest import MANIFEST, encode_manifest
from kvstore.admin.archive.tar import write_archive, write_member
from kvstore.errors import ConfigError, StoreError
from kvstore.identity.block import BlockKey
from kvstore.store.integrity import stored_fault
from kvstore.store.namespaces import namespace_facts
from kvstore.tier.ssd.capacity import COMMIT_BYTES
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import READ_BATCH
from kvstore.tier.ssd.values import BUSY


def export_store(
    path: Path, file: Path, namespaces: Sequence[int], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the blocks of a store to ``file``, a tar, compressed with zstd if it ends in ``.zst``.

    Every frame is verified; bad blocks and their descendants are left out and counted. The store may be
    in use: blocks evicted meanwhile are counted as vanished. ``file`` is replaced when the new one is
    complete and synced. ``namespaces`` are numbers as in ``stats``, by default all. ``progress(done,
    total)`` is called repeatedly. Returns plain JSON values.

    Raises:
        ConfigError: for an unknown namespace number.
        StoreError: if the store is missing or unreadable, or the file cannot be written.

    Cost: memory of 16 MB of frames and some 300 bytes per block.
    """
    with open_for_reading(path) as store:
        facts = namespace_facts(store.ssd)
        for number in namespaces:
            if number not in facts:
                known = ", ".join(str(n) for n in sorted(facts)) or "none"
                msg = f"--namespace {number} is not in {path}, expected some of: {known}"
                raise ConfigError(msg)
        spaces = {n: facts[n] for n in sorted(set(namespaces) or set(facts))}
        with write_archive(file) as stream:
            write_member(stream, MANIFEST, encode_manifest(store, spaces))
            export = _Export(store, set(spaces) if namespaces else None, stream, progress)
            export.write_blocks()
    return {
        "path": str(path),
        "file": str(file),
        "file_bytes": file.stat().st_size,
        "namespaces": list(spaces),
        **export.result(),
    }


class _Export:
    """One export: the records of its blocks, and the outcome of each."""

    def __init__(
        self,
        store: InspectedStore,
        spaces: set[int] | None,
        stream: IO[bytes],
        progress: Callable[[int, int], None],
    ) -> None:
        self._store = store
        self._stream = stream
        self._progress = progress
        self._records: Mapping[BlockKey, Record] = {
            key: record
            for key, record in store.ssd.records()
            if spaces is None or record.namespace_id in spaces
        }
        self._faults: dict[BlockKey, str] = {}
        self._good: set[BlockKey] = set()

    def write_blocks(self) -> None:
        """Write every block after its parent, and repeated uses as members without content."""
        size = max(1, min(READ_BATCH, COMMIT_BYTES // self._store.frame_format.frame_bytes))
        batch: list[BlockKey] = []
        for key, is_use in self._in_order():
            if not is_use:
                batch.append(key)
            if is_use or len(batch) == size:
                self._write_batch(batch)
            if is_use and key in self._good:
                self._write(key, b"")
        self._write_batch(batch)

    def result(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        reasons = Counter(self._faults.values())
        vanished = reasons.pop("missing", 0)
        return {
            "blocks": len(self._good),
            "bad_blocks": reasons.total(),
            "bad": dict(reasons),
            "vanished_blocks": vanished,
        }

    def _in_order(self) -> Iterator[tuple[BlockKey, bool]]:
        """Yield blocks by their last use, each after its ancestors; True marks a repeated use.

        A block used after a descendant is yielded twice, so that an import restores the recency. Orphans
        become faults.
        """
        records = self._records
        done: set[BlockKey] = set()
        for key in sorted(records, key=lambda key: (records[key].sequence, records[key].number)):
            if key in done:
                yield key, True
                continue
            chain = [key]
            while (record := records[chain[-1]]).number and record.parent not in done:
                above = records.get(record.parent)
                if above is None or above.number != record.number - 1:
                    break
                chain.append(record.parent)
            else:
                done.update(chain)
                yield from ((key, False) for key in reversed(chain))
                continue
            self._faults[key] = "parent"

    def _write_batch(self, batch: list[BlockKey]) -> None:
        for key, data in self._read(batch):
            record = self._records[key]
            if record.number and record.parent not in self._good:
                self._faults[key] = "parent"
            else:
                self._write(key, data)
                self._good.add(key)
        batch.clear()
        self._progress(len(self._good) + len(self._faults), len(self._records))

    def _write(self, key: BlockKey, data: bytes) -> None:
        record = self._records[key]
        write_member(
            *(self._stream, key.hex(), data), is_pinned=record.is_pinned, expires=record.expires
        )

    def _read(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, bytes]]:
        """Return the good frames of ``keys``; the others become faults."""
        store, found, done = self._store, list[tuple[BlockKey, bytes]](), 0
        while done < len(keys):
            first = done

            def take(i: int, frame: memoryview, first: int = first) -> str | None:
                key = keys[first + i]
                fault = stored_fault(
                    *(store.frame_format, frame, key, self._records[key]), keys_root=store.keys_root
                )
                if fault is None:
                    found.append((key, bytes(frame)))
                return fault

            result = store.ssd.read(keys[first:], take)
            done += result.count
            if result.fault == BUSY:
                msg = f"the store at {store.ssd.path} is busy and cannot be read; nothing was exported: try again"
                raise StoreError(msg)
            if result.fault is not None:
                self._faults[keys[done]] = result.fault
                done += 1
        return found
