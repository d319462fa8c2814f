"""The SSD tier: frames in LMDB, with record, payload and recency in one transaction.

It handles keys, records and frames, but no index, no policy and no namespaces. Design and measurements:
docs/decisions/0009. On-disk format: docs/format.md, section 5.

``SsdTier`` has four parts, one section of the class each:
    reading: look-ups of records, and reads of frames with ``pread`` at the page named by the record, inside a
        short read transaction. Reads through LMDB's map would fault it in 4 KiB at a time. A frame that fails the
        caller's check is read again through LMDB before it counts as bad.
    writing: durable transactions, recovery after a failed sync, and the space that a write needs.
    compaction: a verified copy of the data file, which replaces it.
    life cycle: the locks that keep calls out of a closed map, forks and closing.
Capacity is in ``capacity``, opening and verification are in ``opening`` and ``database``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import StoreError
from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.tier.ssd import btree, capacity, files, owner_lock
from kvstore.tier.ssd.capacity import PAGE_BYTES, PAGE_HEADER_BYTES, pages_of
from kvstore.tier.ssd.database import allocate, environment, try_open
from kvstore.tier.ssd.faults import (
    DAMAGE,
    MEDIUM_ERRORS,
    NO_ROOM,
    code_of,
    is_map_full,
    is_transient,
)
from kvstore.tier.ssd.records import RECORD_BYTES, Record, Records, location_of
from kvstore.tier.ssd.values import BUSY, Put, ReadResult, SsdOptions, TakeMany

READ_BATCH = 32  # blocks; a longer transaction would keep freed pages. docs/decisions/0009.
FORK_SECONDS = 5.0  # most wait of a fork for a call in progress; a slower disk counts as failed
CLOSE_SECONDS = 60.0  # most time that a close waits for calls in progress, such as a copy
COPY_SECONDS = 60.0  # most time that a compaction waits for calls that use the old file
READERS_SECONDS = 60.0
"""Interval at which writes clear the slots of killed readers: there are 512 slots, and each keeps every page freed
since its reader began from reuse."""
_HINT_BATCH = 1024  # records rewritten per transaction in a compacted copy: about 30 leaves
_HINT_BYTES = 256
"""Bytes that a record may add to a compacted copy: its leaf share (85 to 128), twice. docs/decisions/0018."""
_LAST_PAGE = 2**63 // PAGE_BYTES - 2**40  # offsets are signed 64-bit; larger pages are damage
_WILL_NEED = getattr(os, "POSIX_FADV_WILLNEED", 3)
_DATABASES = (b"sys", b"meta", b"pay", b"age")
_SEQUENCE = struct.Struct(">Q")


class SsdTier:
    """The SSD tier of one directory: frames by key. Threads: many readers, one writer. A forked child must reopen."""

    name = "ssd"

    def __init__(
        self, path: Path, options: SsdOptions, env: lmdb.Environment, lock_fd: int | None
    ) -> None:
        """Use an open environment. Called by ``opening`` and ``database``."""
        self.path = path
        self.options = options
        self.is_owner = lock_fd is not None
        self.capacity_bytes = options.capacity_bytes
        sizes = options.capacity_bytes, options.frame_bytes
        self.commit_blocks = capacity.commit_blocks(*sizes)
        self._reach_bytes = capacity.spare_bytes(*sizes)  # most bytes added by a commit
        self.delete_blocks = capacity.delete_blocks(*sizes)
        self.queue_blocks = capacity.queue_blocks(*sizes)
        self.high_bytes, self.low_bytes = capacity.watermarks(options)
        self.usage: Counter[int] = Counter()
        """Bytes of each namespace's frames: computed from the records by the owner, updated by each commit."""
        self.emptied: set[int] = set()  # namespaces without records; cleared by the caller
        self._lock_fd = lock_fd
        self._map_lock: int | None = None
        self._open_gates()
        self._is_closed = False
        self._writing = threading.RLock()  # held through every write transaction and its recovery
        self._is_suspect = False  # after a failed commit or sync: the state may not be on disk
        self._is_damaged = False  # after a write found a corrupt page: verified when reopened
        self._is_lost = False  # after a failed recovery: a commit might overwrite the state
        self._readers_checked = time.monotonic()  # last clearing of killed readers' slots
        self._attach(env)

    def _open_gates(self) -> None:
        self._scratch = threading.local()  # the gate and the frame buffer of each thread
        self._gates: weakref.WeakSet[Any] = weakref.WeakSet()
        """One lock per calling thread, held during each of its calls that use the environment."""
        self._gating = threading.Lock()
        self._was_busy = False  # whether a call used the environment when this process was forked

    def _attach(self, env: lmdb.Environment) -> None:
        """Use an open environment, and open its data file."""
        self._env = env
        self._file = os.open(self.path / files.DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._sys, self._meta, self._pay, self._age = (
                *(env.open_db(name, create=self.is_owner) for name in _DATABASES),
            )
        except lmdb.Error:
            os.close(self._file)
            raise

    # ---- capacity ------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes that a block with the largest frame occupies in the file."""
        return pages_of(self.options.frame_bytes) * PAGE_BYTES

    @staticmethod
    def stored_bytes(frame: bytes | bytearray) -> int:
        """Return the bytes that a frame occupies in the file."""
        return pages_of(len(frame)) * PAGE_BYTES

    @property
    def live_bytes(self) -> int:
        """Bytes of all pages in use, trees included."""
        with self._using(), self._begin() as txn:
            stats = [txn.stat(db) for db in (self._sys, self._meta, self._pay, self._age)]
            stats.append(self._inside.stat())
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes up to the highest page ever used: the size on disk."""
        with self._using():
            return (int(self._inside.info()["last_pgno"]) + 1) * PAGE_BYTES

    @property
    def block_count(self) -> int:
        """Number of blocks in the last committed state."""
        with self._using(), self._begin() as txn:
            return int(txn.stat(self._meta)["entries"])

    # ---- reading -------------------------------------------------------------------------------

    def records(self) -> Records:
        """Return all valid records of the last committed state. Cost: 0.3 µs and 80 bytes a block."""
        with self._using(), self._begin(buffers=True) as txn:
            cursor: Any = txn.cursor(self._meta)
            return Records(b"".join(btree.rows(cursor, KEY_BYTES, RECORD_BYTES)))

    def records_after(self, key: bytes, count: int) -> list[tuple[BlockKey, Record]]:
        """Return up to ``count`` records after ``key``, in the order of their keys."""
        found: list[tuple[BlockKey, Record]] = []
        with self._using(), self._begin() as txn:
            cursor = txn.cursor(self._meta)
            more = cursor.set_range(key + b"\0")
            while more and len(found) < count:
                record = Record.unpack(cursor.value())
                if record is not None and len(cursor.key()) == KEY_BYTES:
                    found.append((BlockKey(bytes(cursor.key())), record))
                more = cursor.next()
        return found

    def record(self, key: BlockKey) -> Record | None:
        """Return the record of ``key``, or None."""
        with self._using(), self._begin() as txn:
            data = txn.get(key, db=self._meta)
        return None if data is None else Record.unpack(data)

    def leading_run(self, chain: bytes, now: float) -> int:
        """Return the number of leading keys of ``chain`` that are present and not expired at ``now``.

        Every committed state contains each block's parent, and a parent expires no earlier than its children, so the
        end is found by binary search.
        """
        low, high = 0, len(chain) // KEY_BYTES + 1
        with self._using(), self._begin() as txn:
            while high - low > 1:
                middle = (low + high) // 2
                key = chain[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]
                data = txn.get(key, db=self._meta)
                record = None if data is None else Record.unpack(data)
                if record is not None and (not record.expires or now < record.expires):
                    low = middle
                else:
                    high = middle
        return low

    def known_run(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading ``keys`` with a record, regardless of their parents."""
        with self._using(), self._begin() as txn:
            for count, key in enumerate(keys):
                if txn.get(key, db=self._meta) is None:
                    return count
        return len(keys)

    def visit(self, keys: Sequence[BlockKey], take: Callable[[BlockKey, memoryview], None]) -> None:
        """Call ``take`` with a transient view of each stored frame of ``keys``, unchecked and read on access."""
        for first in range(0, len(keys), READ_BATCH):
            with self._using(), self._begin(buffers=True) as txn:
                for key in keys[first : first + READ_BATCH]:
                    value = txn.get(key, db=self._pay)
                    if value is not None:
                        take(key, memoryview(value))

    def read(
        self,
        keys: Sequence[BlockKey],
        take: Callable[[int, memoryview], str | None],
        take_many: Mapping[int, TakeMany] | None = None,
        *,
        bounds: tuple[int, int] | None = None,
        is_hinted: bool = False,
    ) -> ReadResult:
        """Read frames in order up to the first missing or bad one.

        ``take(i, frame)`` receives a private copy of block i, which it must not keep, and returns its fault, or None.
        A bad frame is read again through LMDB and passed to ``take`` again. Errors of the medium are returned, not
        raised; the fault ``BUSY`` does not concern the block.

        ``take_many`` maps a frame size to a function that reads consecutive frames of that size. At a bad frame
        ``take`` determines the fault, or reading continues.
        ``bounds`` is the range of a frame that is needed besides its head; None for all.
        ``is_hinted`` states that ``will_need`` was called for all keys.
        """
        done = size = 0
        try:
            while done < len(keys):
                if not is_hinted and len(keys) > 1:
                    self.will_need(keys[done : done + READ_BATCH], bounds)
                result = self._read_batch(keys, done, take, take_many or {})
                done, size = result.count, size + result.frame_bytes
                if result.fault is not None:
                    return replace(result, frame_bytes=size)
        except MEDIUM_ERRORS as error:
            return ReadResult(done, BUSY if is_transient(error) else "io", size)
        return ReadResult(done, None, size)

    def will_need(self, keys: Sequence[BlockKey], bounds: tuple[int, int] | None = None) -> None:
        """Start reading the frames of ``keys`` into the page cache. Errors of the medium are ignored."""
        with suppress(*MEDIUM_ERRORS), self._using(), self._begin(buffers=True) as txn:
            for key in keys:
                page, size = self._location(txn.get(key, db=self._meta))
                offset = page * PAGE_BYTES + PAGE_HEADER_BYTES
                start, stop = (0, size) if bounds is None else bounds
                if page and start > PAGE_BYTES:  # otherwise the second advice covers the head
                    os.posix_fadvise(self._file, offset, 1, _WILL_NEED)
                if page:
                    os.posix_fadvise(self._file, offset + start, stop - start, _WILL_NEED)

    def _read_batch(
        self,
        keys: Sequence[BlockKey],
        first: int,
        take: Callable[[int, memoryview], str | None],
        take_many: Mapping[int, TakeMany],
    ) -> ReadResult:
        stop = min(first + READ_BATCH, len(keys))
        buffer, read = self._frame_buffer(), 0
        with self._using(), self._begin(buffers=True) as txn:
            found = [txn.get(key, db=self._meta) for key in keys[first:stop]]
            locations = [self._location(data) for data in found]
            i = first
            while i < stop:
                page, size = locations[i - first]
                if page and size in take_many:
                    run = self._run(locations[i - first :])
                    taken = take_many[size](i, self._file, run)
                    i, read = i + taken, read + taken * size
                    if taken == len(run):
                        continue
                    page = locations[i - first][0]  # the bad frame
                if found[i - first] is None:
                    return ReadResult(i, "missing", read)
                frame = buffer[:size]
                fault = self._read_at(page, frame) or take(i, frame) if page else "unhinted"
                if fault is not None:
                    value = txn.get(keys[i], db=self._pay)
                    if value is None or len(value) > len(buffer):
                        return ReadResult(i, "missing" if value is None else "header", read)
                    frame = buffer[: len(value)]
                    frame[:] = value
                    fault = take(i, frame)
                if fault is not None:
                    return ReadResult(i, fault, read)
                i, read = i + 1, read + len(frame)
        return ReadResult(stop, None, read)

    @staticmethod
    def _run(locations: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Return the offsets of the leading frames of one size whose pages are recorded."""
        size = locations[0][1]
        near = takewhile(lambda at: at[0] and at[1] == size, locations)
        return np.array([page for page, _ in near], np.int64) * PAGE_BYTES + PAGE_HEADER_BYTES

    def _location(self, data: bytes | memoryview | None) -> tuple[int, int]:
        """Return the page and the frame size of a record; page 0 for an impossible location."""
        page, size = (0, 0) if data is None else location_of(data)
        return page if page < _LAST_PAGE and 0 < size <= self.options.frame_bytes else 0, size

    def _read_at(self, page: int, frame: memoryview) -> str | None:
        try:
            count = os.preadv(self._file, [frame], page * PAGE_BYTES + PAGE_HEADER_BYTES)
        except OSError:
            return "io"
        return None if count == len(frame) else "short"

    def frame(self, key: BlockKey) -> bytes | None:
        """Return a copy of a frame as stored, unchecked, or None."""
        with self._using(), self._begin() as txn:
            data = txn.get(key, db=self._pay)
        return None if data is None else bytes(data)

    def _frame_buffer(self) -> memoryview:
        buffer = getattr(self._scratch, "frame", None)
        if buffer is None:
            buffer = self._scratch.frame = memoryview(bytearray(self.options.frame_bytes))
        assert isinstance(buffer, memoryview)
        return buffer

    # ---- writing (owner) -----------------------------------------------------------------------

    def put(
        self,
        puts: Sequence[Put],
        uses: Mapping[BlockKey, int] | None = None,
        facts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write blocks, new ticks of used blocks, and facts, all or none, durably. Raises one of ``MEDIUM_ERRORS``."""
        replaced: list[Record] = []

        def write(txn: Any) -> None:
            for key, sequence in (uses or {}).items():
                self._rewrite(txn, key, sequence=sequence)
            for name, value in (facts or {}).items():
                txn.put(name.encode(), value, db=self._sys)
            for item in puts:
                txn.put(item.key, item.frame, db=self._pay, overwrite=True)
                value = txn.get(item.key, db=self._pay)
                record = item.record.pack(0 if value is None else _page_of(value))
                if not txn.put(item.key, record, db=self._meta, overwrite=False):
                    # An earlier delete of the key has failed.
                    replaced.extend(self._drop_age(txn, txn.get(item.key, db=self._meta)))
                    txn.put(item.key, record, db=self._meta)
                txn.put(_SEQUENCE.pack(item.record.sequence), item.key, db=self._age)

        self._change(write, buffers=True)
        self.usage.update(capacity.usage_of(item.record for item in puts))
        self._uncount(replaced)

    def _uncount(self, gone: Iterable[Record]) -> None:
        """Subtract deleted records from the usage."""
        less = capacity.usage_of(gone, self.options.frame_bytes)
        self.usage.subtract(less)
        for number in less:
            if self.usage[number] <= 0:
                del self.usage[number]
                self.emptied.add(number)

    def amend(self, keys: Iterable[BlockKey], **fields: Any) -> None:
        """Change fields of the records of ``keys`` in one durable transaction."""

        def write(txn: Any) -> None:
            for key in keys:
                self._rewrite(txn, key, **fields)

        self._change(write)

    def _rewrite(self, txn: lmdb.Transaction, key: BlockKey, **fields: Any) -> None:
        data = txn.get(key, db=self._meta)
        old = None if data is None else Record.unpack(data)
        if old is None:
            return
        new = replace(old, **fields)
        if new == old:
            return
        if new.sequence != old.sequence:
            txn.delete(_SEQUENCE.pack(old.sequence), db=self._age)
            txn.put(_SEQUENCE.pack(new.sequence), key, db=self._age)
        txn.put(key, new.pack(), db=self._meta)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, deepest first, in small durable transactions.

        After each one the store contains every block's parent. Deletes need free pages too: if space is lacking,
        transactions shrink to single blocks.
        """
        first, count = 0, self.delete_blocks
        while first < len(keys):
            try:
                self._delete(keys[first : first + count])
            except MEDIUM_ERRORS as error:
                if count == 1 or not self.lacks_room(error, count):
                    raise
                count = max(1, count // 8)
                continue
            first += count

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        gone: list[Record] = []

        def write(txn: Any) -> None:
            for key in keys:
                data = txn.pop(key, db=self._meta)
                if data is not None:
                    gone.extend(self._drop_age(txn, data))
                    txn.delete(key, db=self._pay)

        self._change(write)
        self._uncount(gone)

    def _drop_age(self, txn: lmdb.Transaction, data: bytes | memoryview | None) -> list[Record]:
        """Delete the ``age`` row of a stored record; return the record if it is valid."""
        record = None if data is None else Record.unpack(data)
        if record is None:
            return []
        txn.delete(_SEQUENCE.pack(record.sequence), db=self._age)
        return [record]

    def lacks_room(self, error: BaseException, blocks: int) -> bool:
        """Return whether a write of ``blocks`` blocks failed for lack of space.

        LMDB reports a short write as an input/output error, so the same space is requested from the file system.
        """
        code = code_of(error)
        if code in NO_ROOM or is_map_full(error):
            return True
        wanted = (blocks + 1) * (self.block_bytes + capacity.TREE_PAGES_PER_BLOCK * PAGE_BYTES)
        return code == errno.EIO and not self._can_grow(wanted)

    def _can_grow(self, wanted: int) -> bool:
        """Return whether the file system can extend the file by ``wanted`` bytes; the file remains extended.

        Only an allocation tests quotas. It stops at the cap and does not change pages in use.
        """
        try:
            with self._writing:  # without allocation, the file system extends the file by writing
                first = self.file_bytes
                wanted = min(wanted, self.capacity_bytes - first)
                if wanted > 0:
                    allocate(self.path / files.DATA_FILE, first, wanted)
        except lmdb.Error:
            return True
        except OSError as error:
            return error.errno not in NO_ROOM
        return True

    def may_recover(self, error: BaseException) -> bool:
        """Return whether writing may be retried after an error without reopening the store."""
        return not (self._is_lost or self._is_damaged or isinstance(error, DAMAGE))

    def sync(self) -> None:
        """Make every commit so far durable against power loss."""
        with self._writing, self._using():
            self._heal()
            self._clear_readers()
            try:
                self._inside.sync(True)  # noqa: FBT003 - py-lmdb's own positional flag
            except MEDIUM_ERRORS:
                self._is_suspect = True
                raise

    def _change(self, write: Callable[[Any], None], *, buffers: bool = False) -> None:
        """Call ``write`` in one durable transaction. A context manager interrupted on entry would leave it open."""
        with self._writing, self._using():
            self._heal()
            self._clear_readers()
            self._reach()
            try:
                begin: Any = self._inside.begin  # its overloads accept no variable for `buffers`
                with begin(write=True, buffers=buffers) as txn:
                    write(txn)
            except lmdb.MapFullError:  # before anything was written
                self._inside.reader_check()  # a killed reader prevents reuse of pages freed since it began
                raise
            except MEDIUM_ERRORS as error:
                self._is_suspect = True
                self._is_damaged |= isinstance(error, DAMAGE)
                raise

    def _clear_readers(self) -> None:
        """Clear the slots of killed readers every ``READERS_SECONDS``."""
        now = time.monotonic()
        if now - self._readers_checked >= READERS_SECONDS:
            self._readers_checked = now
            self._inside.reader_check()

    def _reach(self) -> None:
        """Extend the file to the length that the next transaction may need.

        Inside a transaction LMDB accepts any page number below the next new page. A page number beyond the end of the
        file, made by a changed bit, would raise SIGBUS when read through the map. In a file of sufficient length the
        page is a hole, which LMDB reports as corrupt.
        """
        wanted = min(self.file_bytes + self._reach_bytes, self.capacity_bytes)
        if self.disk_bytes < wanted:
            with suppress(OSError):
                os.truncate(self.path / files.DATA_FILE, wanted // PAGE_BYTES * PAGE_BYTES)

    def _heal(self) -> None:
        """After a failed commit or sync, write the last committed state to the disk again.

        A kernel may mark pages as written that it failed to write. Pages not synced at that time, the last meta page
        included, may never reach the disk, even if a later sync succeeds. One more commit overwrites no page that the
        state on the disk needs, and its sync writes everything; two commits without a sync between them could
        overwrite one. docs/decisions/0017.
        """
        if not self._is_suspect:
            return
        if self._is_lost:
            raise OSError(errno.EIO, "an earlier sync failed: reopen the store before writing")
        with self._inside.begin(write=True) as txn:
            txn.put(b"clean", b"0", db=self._sys)  # any change
        try:
            self._inside.sync(True)  # noqa: FBT003
        except MEDIUM_ERRORS:
            self._is_lost = True
            raise
        self._is_suspect = False

    # ---- compacting (owner) --------------------------------------------------------------------

    def trim(self) -> None:
        """Truncate preallocated space beyond the cap that was never used."""
        if self.file_bytes <= self.capacity_bytes < self.disk_bytes:
            os.truncate(self.path / files.DATA_FILE, self.capacity_bytes)

    @property
    def disk_bytes(self) -> int:
        """Length of the data file."""
        return os.fstat(self._file).st_size

    def compact(self) -> None:
        """Return free pages to the disk: replace the data file by a compacted copy.

        The copy is verified as at an opening, and its records name the pages of their payloads. A kill at any time
        leaves the old file or the new one. The caller must prevent writes meanwhile.

        Raises:
            StoreBusy: if another process has the store open.
            StoreError: if the copy does not fit on the disk or under the cap, or the medium fails.
                In all cases the old file stays in use.

        Cost: reads the pages in use twice and writes them once; needs as much free disk space.
        """
        try:
            self._compact()
        except MEDIUM_ERRORS as error:
            msg = f"{self.path} cannot be compacted: {error}; the store was not changed"
            raise StoreError(msg) from error
        finally:
            files.sweep(self.path)

    def _compact(self) -> None:
        if self._map_lock is None:
            self._map_lock = owner_lock.open_map_lock(self.path)
        owner_lock.try_alone(self.path, self._map_lock)
        owner_lock.let_in(self._map_lock, is_open=True)
        self.sync()
        live = self.live_bytes
        if live > self.high_bytes:
            raise StoreError(
                f"{live} bytes are in use in {self.path}, more than the {self.high_bytes} that its cap "
                f"of {self.capacity_bytes} allows for: evict or unpin, or give it more ssd_bytes"
            )
        needed = live + self.block_count * _HINT_BYTES + capacity.OVERHEAD_PAGES * PAGE_BYTES
        facts = os.statvfs(self.path)
        free = facts.f_bavail * facts.f_frsize
        if free < needed:
            raise StoreError(
                f"compacting {self.path} needs {needed} bytes free on the disk for the copy, "
                f"found {free}: free that much, or evict first"
            )
        folder = files.new_copy_folder(self.path)
        with self._using():
            state = self._inside.info()["last_txnid"]
        self._write_copy(folder)
        self._exchange(folder, state)
        self.set_fact("clean", b"0")

    def _write_copy(self, folder: Path) -> None:
        with self._using():
            self._inside.copy(str(folder), compact=True)
        lock = owner_lock.try_lock(folder)
        assert lock is not None, "no other process uses the folder"
        options = replace(self.options, preallocate=False)
        # The copy is not marked clean, so all its values are verified, without a time limit.
        copy, problem = try_open(folder, options, lock, type(self), heads_seconds=None)
        if copy is None:
            os.close(lock)
            msg = f"the compacted copy of {self.path} is broken ({problem}); the store was not changed"
            raise StoreError(msg)
        try:
            if copy.block_count != self.block_count:
                raise StoreError(
                    f"the compacted copy of {self.path} has {copy.block_count} blocks, expected "
                    f"{self.block_count}; the store was not changed"
                )
            copy.find_hints()
        finally:
            copy.close()

    def find_hints(self) -> None:
        """Write the current page of each payload into its record."""
        keys = [key for key, _ in self.records()]
        for first in range(0, len(keys), _HINT_BATCH):
            batch = keys[first : first + _HINT_BATCH]
            pages: list[int] = []

            def write(
                txn: Any, batch: Sequence[BlockKey] = batch, pages: list[int] = pages
            ) -> None:
                for key in batch:
                    value = txn.get(key, db=self._pay)
                    pages.append(0 if value is None else _page_of(value))
                    self._rewrite(txn, key, page=pages[-1])

            self._change(write, buffers=True)
            end = max(pages)
            if end:  # payloads of a compacted file are in key order: read ahead
                size = (len(batch) + 1) * self.block_bytes
                os.posix_fadvise(self._file, end * PAGE_BYTES, size, _WILL_NEED)

    def _exchange(self, folder: Path, state: int) -> None:
        """Replace the data file by the copy in ``folder``, copied at transaction ``state``."""
        assert self._map_lock is not None
        with self._writing, self._alone(COPY_SECONDS) as is_alone:
            if not is_alone or self._env.info()["last_txnid"] != state:
                msg = f"{self.path} was used during its compaction; the store was not changed"
                raise StoreError(msg)
            self._env.close()
            os.close(self._file)
            try:
                owner_lock.try_alone(self.path, self._map_lock)
                try:
                    files.exchange(self.path, folder)
                finally:
                    owner_lock.let_in(self._map_lock, is_open=False)
            finally:
                try:
                    self._attach(environment(self.path, self.options, is_owner=True))
                except BaseException:
                    self._is_closed = True
                    self._close_locks()
                    raise

    # ---- facts: small named values, in `sys` ---------------------------------------------------

    def fact(self, name: str) -> bytes | None:
        """Return a fact, None if there is none."""
        with self._using(), self._begin() as txn:
            data = txn.get(name.encode(), db=self._sys)
        return None if data is None else bytes(data)

    def facts(self, prefix: str) -> dict[str, bytes]:
        """Return all facts whose names start with ``prefix``, by the rest of the name."""
        start = prefix.encode()
        found: dict[str, bytes] = {}
        with self._using(), self._begin() as txn:
            cursor = txn.cursor(self._sys)
            more = cursor.set_range(start)
            while more and bytes(cursor.key()).startswith(start):
                name = bytes(cursor.key()).decode(errors="replace")
                found[name[len(prefix) :]] = bytes(cursor.value())
                more = cursor.next()
        return found

    def set_fact(self, name: str, value: bytes) -> None:
        """Store a fact durably."""
        self.set_facts({name: value})

    def set_facts(self, values: Mapping[str, bytes | None]) -> None:
        """Store facts durably, all or none; a value of None removes the fact."""

        def write(txn: Any) -> None:
            for name, value in values.items():
                if value is None:
                    txn.delete(name.encode(), db=self._sys)
                else:
                    txn.put(name.encode(), value, db=self._sys)

        self._change(write)

    # ---- life cycle ----------------------------------------------------------------------------

    def _using(self) -> Any:
        """Return this thread's gate, a lock held during each use of the environment: a closed map crashes.

        A bare lock, because an interrupt could fall between a context manager's acquire and its block.
        """
        gate = getattr(self._scratch, "gate", None)
        if gate is None:
            with self._gating:
                gate = threading.RLock()
                self._gates.add(gate)
                self._scratch.gate = gate
        return gate

    @property
    def _inside(self) -> lmdb.Environment:
        """The environment, for a thread that holds its gate."""
        assert self._using()._is_owned(), "the environment is used outside a gate"  # noqa: SLF001
        if self._is_closed:
            raise StoreError(f"the store at {self.path} is closed")
        return self._env

    @contextmanager
    def _alone(self, seconds: float) -> Iterator[bool]:
        """Keep calls out of the environment; yield whether all calls in progress ended in time."""
        deadline = time.monotonic() + seconds
        with self._gating, ExitStack() as held:
            is_alone = True
            for gate in list(self._gates):
                # As ``Condition`` tests it. A thread inside would wait for itself.
                is_mine = gate._is_owned()  # noqa: SLF001
                if not is_mine and gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    held.callback(gate.release)
                else:
                    is_alone = False
            yield is_alone

    def _begin(self, *, buffers: bool = False) -> Any:
        """Begin a read transaction, for a thread that holds its gate and has no transaction.

        If all reader slots are in use, those of killed readers are cleared. If the owner has raised the cap, the map
        of this process is enlarged.
        """
        begin: Any = self._inside.begin  # its overloads accept no variable for `buffers`
        try:
            return begin(buffers=buffers)
        except lmdb.ReadersFullError:
            self._env.reader_check()
        except lmdb.MapResizedError:
            gate = self._using()
            gate.release()
            try:
                self._follow_size()
            finally:
                gate.acquire()
        return begin(buffers=buffers)

    def _follow_size(self) -> None:
        """In a reader, enlarge the map to the owner's, once no call uses the environment."""
        with self._alone(COPY_SECONDS) as is_alone:
            if is_alone and not self._is_closed:
                self._env.set_mapsize(0)

    def close(self) -> None:
        """Wait for calls in progress, then release the files. Idempotent."""
        if self._is_closed:
            return
        with self._alone(CLOSE_SECONDS):
            self._is_closed = True
        # Without the mark, the next opening verifies the headers of all values too.
        if self.is_owner and not (self._is_suspect or self._is_damaged):
            with suppress(lmdb.Error):
                with self._env.begin(write=True) as txn:
                    txn.put(b"clean", b"1", db=self._sys)
                self._env.sync(True)  # noqa: FBT003
                # Truncate the extension of `_reach`, still under the owner's lock.
                if not self.options.preallocate:
                    end = (int(self._env.info()["last_pgno"]) + 1) * PAGE_BYTES
                    with suppress(OSError):
                        os.truncate(self.path / files.DATA_FILE, end)
        self._release()

    def before_fork(self) -> None:
        """Keep calls out, because a child cannot close an environment in use."""
        self._forking = ExitStack()
        self._was_busy = not self._forking.enter_context(self._alone(FORK_SECONDS))

    def after_fork(self) -> None:
        """In the parent, allow calls again."""
        self._forking.close()

    def abandon(self) -> None:
        """In a forked child, close the inherited descriptors, so that no lock outlives the parent.

        The environment stays open until ``forget``: closing it would clear the parent's reader slots, in every
        child, even one that never uses the store.
        """
        was_busy = self._was_busy
        self._open_gates()  # a thread that does not exist in the child may hold the parent's gates
        self._was_busy = was_busy
        self._is_closed = True
        self._close_files()

    def forget(self) -> None:
        """In a forked child, close the inherited environment before the store is opened again.

        Raises ``StoreError`` if a call of the parent was in progress at the fork; a close would never return.
        """
        if self._was_busy:
            msg = f"the store at {self.path} was busy when this process forked; open it in a new process"
            raise StoreError(msg)
        self._env.close()

    def keep_lock(self) -> None:
        """Leave the lock to the caller, which opens another tier with it."""
        self._lock_fd = None

    def give_up(self) -> None:
        """Release the files of a broken store without marking it clean."""
        self._is_closed = True
        self._release()

    def _release(self) -> None:
        self._env.close()
        self._close_files()

    def _close_files(self) -> None:
        os.close(self._file)
        self._close_locks()

    def _close_locks(self) -> None:
        for lock in (self._lock_fd, self._map_lock):
            if lock is not None:
                os.close(lock)
        self._lock_fd = self._map_lock = None


_PAGE_HEADER = struct.Struct("<QHHI")
"""Number, unused, flags, and count of overflow pages. Source: MDB_page, LMDB 0.9."""
_IS_OVERFLOW = 4
assert _PAGE_HEADER.size == PAGE_HEADER_BYTES


def _page_of(value: memoryview) -> int:
    """Return the number of the first page of a value, 0 for a value inside a tree page.

    ``value`` is a view returned by a transaction. LMDB numbers a page when it is written, and the header directly
    precedes the value, in LMDB's copy of the page as in the file.
    """
    address = np.frombuffer(value, np.uint8).__array_interface__["data"][0] - PAGE_HEADER_BYTES
    header = ctypes.string_at(address, PAGE_HEADER_BYTES)
    number, _, flags, pages = _PAGE_HEADER.unpack(header)
    is_ours = flags & _IS_OVERFLOW and pages == pages_of(len(value)) and number < _LAST_PAGE
    return int(number) if is_ours else 0
