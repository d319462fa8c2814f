"""The SSD tier: frames in LMDB, one transaction for metadata, payload and age.

It knows keys, records and frames. It knows no index, no policy and no namespace's
meaning. The design and every figure behind it is docs/decisions/0009; docs/format.md, section 5,
is normative for what lies on disk.

Reads: the metadata record carries the payload's place in the file as a hint, and the payload comes
by ``pread`` inside a short read transaction, never through LMDB's map, which would fault it in
4 KiB at a time. LMDB stays the authority: bytes that fail the caller's check are fetched again
through LMDB before they count as bad.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, StoreBusy, StoreError
from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.tier.ssd import btree as tree
from kvstore.tier.ssd import directory
from kvstore.tier.ssd.records import RECORD_BYTES, Record, Records, place_of

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
"""What LMDB puts before an overflow value. Source: LMDB 0.9 page header."""
COMMIT_BYTES = 16 << 20
"""Largest commit: dirty pages are malloc copies, so a transaction is bounded. docs/decisions/0009."""
COMMIT_BLOCKS = 64
"""Blocks per commit; 64 cost 1.14x of raw pwrite and fdatasync. docs/decisions/0009."""
QUEUE_BYTES = 256 << 20
"""Most bytes that wait for their commit. An engine that never waits offers a whole prompt at once:
this is 300,000 tokens of DeepSeek-V4.1, or 11,000 of a small dense model at 23 KB a token."""
DELETES_PER_COMMIT = 256
"""Most deletes per transaction: each is a sync, and these are as many as four commits bring."""
READ_BATCH = 32
"""Blocks per read transaction, so that none pins freed pages for long. docs/decisions/0009."""
MINIMUM_BLOCKS = 8
"""A store that cannot hold this many blocks is refused: it would only evict. docs/decisions/0009."""
_HIGH, _LOW = 0.92, 0.88
"""Watermarks as shares of the cap: uniform values fill 97 % without MapFull. docs/decisions/0009."""
_MIXED_HIGH, _MIXED_LOW = 0.85, 0.81
"""The same where frames differ in size: free space comes in pieces then, 85 % is safe and 90 % fails
in 5 % of commits. docs/decisions/0016."""
_SPARE_COMMITS = 3
"""Pages freed in a transaction come back two later: room for that many full commits."""
_TREE_PAGES_PER_BLOCK = 3
"""Tree pages that writing one block rewrites at most: a leaf each of `pay`, `meta` and `age`."""
_OVERHEAD_PAGES = 32
"""Roots, branches, meta pages and free list."""
_READERS = 512
FORK_SECONDS = 5.0
"""Most time that a fork waits for a call to end; a disk that takes longer is as good as failed."""
CLOSE_SECONDS = 60.0
"""Most time that a close waits for calls inside, as a copy does."""
COPY_SECONDS = 60.0
"""Most time that a compacted copy waits for calls inside the old file to end."""
_HINT_BATCH = 1024
"""Records rewritten per transaction in a compacted copy: with keys in order, some 30 leaves."""
_HINT_BYTES = 256
"""What a record may add to a compacted copy: its share of a leaf (85 to 128 bytes), written twice.
docs/decisions/0018."""
HEADS_SECONDS = 60.0
"""Most time that an opening looks at the values of a store that was not closed; then it goes on, as
every read checks what it gets. docs/decisions/0020."""
READERS_SECONDS = 60.0
"""How often slots of killed readers are cleared, with a write: there are 512 in all, and such a slot
keeps every page that was freed since its reader began."""
BIRTH_SECONDS = 5.0
"""How long ``role="auto"`` waits for a store that another process is just making."""
_LAST_PAGE = 2**63 // PAGE_BYTES - 2**40
"""Offsets of files are signed 64-bit integers; a hint beyond is damage."""

_DATABASES = (b"sys", b"meta", b"pay", b"age")
_SEQUENCE = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Put:
    """One block to write."""

    key: BlockKey
    record: Record
    frame: bytearray


IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])

BUSY = "busy"
"""The fault of a read that met a condition that passes: nothing is known of the block."""

TakeMany = Callable[[int, int, NDArray[np.int64]], int]
"""Reads frames of one size itself: ``take_many(i, file, offsets)`` takes them for blocks from i on, and
returns how many it took before one was not good."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How far a read came: ``count`` good blocks, then ``fault`` (None if all were good)."""

    count: int
    fault: str | None
    frame_bytes: int = 0
    """Of the good blocks, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdOptions:
    """What decides the file: its cap, the frames in it and how it is opened."""

    capacity_bytes: int
    frame_bytes: int
    """Of the largest frame."""
    format_text: str
    """JSON that describes the layout; equal for every open of one store."""
    role: Literal["auto", "owner", "reader"] = "auto"
    preallocate: bool = False
    is_mixed: bool = False
    """Frames differ in size."""


def pages_of(frame_bytes: IntOrArray) -> IntOrArray:
    """Return how many pages LMDB takes for a value of ``frame_bytes``, or for each of some."""
    return -(-(PAGE_HEADER_BYTES + frame_bytes) // PAGE_BYTES)


def usage_of(records: Iterable[Record], frame_bytes: int = 2**32) -> Counter[int]:
    """Return the bytes that the frames of each namespace take in the file, as their records say.

    A record that names more than ``frame_bytes`` is damaged, and counts as that.
    """
    usage: Counter[int] = Counter()
    for record in records:
        usage[record.namespace_id] += pages_of(min(record.frame_bytes, frame_bytes)) * PAGE_BYTES
    return usage


def usage_in(records: Records, frame_bytes: int) -> Counter[int]:
    """Return the same of every record of a store."""
    numbers, which = np.unique(records.namespace_id, return_inverse=True)
    used = np.zeros(len(numbers), np.int64)
    np.add.at(used, which, pages_of(np.minimum(records.frame_bytes, frame_bytes)) * PAGE_BYTES)
    return Counter(dict(zip(numbers.tolist(), used.tolist(), strict=True)))


def commit_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks of the largest commit: 64, or 16 MB, or a 32nd of the cap, or one."""
    size = min(COMMIT_BYTES, capacity_bytes // 32)
    return max(1, min(COMMIT_BLOCKS, size // (pages_of(frame_bytes) * PAGE_BYTES)))


def delete_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks of the largest delete, which dirties no more pages than the largest commit."""
    commit = commit_blocks(capacity_bytes, frame_bytes)
    pages = commit * (pages_of(frame_bytes) + _TREE_PAGES_PER_BLOCK)
    return max(1, min(DELETES_PER_COMMIT, pages // _TREE_PAGES_PER_BLOCK))


def queue_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks that may wait for their commit: 256 MiB, or a quarter of the cap."""
    return max(2, min(QUEUE_BYTES, capacity_bytes // 4) // frame_bytes)


def spare_bytes(capacity_bytes: int, frame_bytes: int) -> int:
    """Return what must stay free above the high watermark for commits to succeed."""
    pages = pages_of(frame_bytes) + _TREE_PAGES_PER_BLOCK
    commit = commit_blocks(capacity_bytes, frame_bytes) * pages * PAGE_BYTES
    return _SPARE_COMMITS * commit + _OVERHEAD_PAGES * PAGE_BYTES


def minimum_capacity(frame_bytes: int) -> int:
    """Return the least cap that holds ``MINIMUM_BLOCKS`` blocks below the high watermark."""
    blocks = MINIMUM_BLOCKS * (pages_of(frame_bytes) + _TREE_PAGES_PER_BLOCK) * PAGE_BYTES
    return blocks + spare_bytes(0, frame_bytes)


class SsdTier:
    """Frames under keys in one directory.

    Threads: any number of readers, one committer at a time. Forked children must reopen.
    """

    name = "ssd"

    def __init__(
        self, path: Path, options: SsdOptions, env: lmdb.Environment, lock_fd: int | None
    ) -> None:
        """Take over an open environment; use ``open_ssd``."""
        self.path = path
        self.options = options
        self.is_owner = lock_fd is not None
        self.capacity_bytes = options.capacity_bytes
        self.commit_blocks = commit_blocks(options.capacity_bytes, options.frame_bytes)
        self._reach_bytes = spare_bytes(options.capacity_bytes, options.frame_bytes)
        """More than a commit adds to the file."""
        self.delete_blocks = delete_blocks(options.capacity_bytes, options.frame_bytes)
        self.queue_blocks = queue_blocks(options.capacity_bytes, options.frame_bytes)
        spare = spare_bytes(options.capacity_bytes, options.frame_bytes)
        high, low = (_MIXED_HIGH, _MIXED_LOW) if options.is_mixed else (_HIGH, _LOW)
        self.high_bytes = min(int(high * self.capacity_bytes), self.capacity_bytes - spare)
        self.low_bytes = max(0, self.high_bytes - int((high - low) * self.capacity_bytes))
        self.usage: Counter[int] = Counter()
        """Bytes that the frames of each namespace take: what changes is counted with its commit,
        from what the owner found in the records."""
        self.emptied: set[int] = set()
        """Namespaces whose last record went since somebody took this note."""
        self._lock_fd = lock_fd
        self._map_lock: int | None = None
        self._open_gates()
        self._is_closed = False
        self._writing = threading.RLock()
        """Held through every write transaction: healing is no other's business."""
        self._is_suspect = False
        """Whether a commit or a sync failed, so that the last committed state may not reach the disk."""
        self._is_damaged = False
        """Whether a write met a page that makes no sense: the next opening is to look at all of them."""
        self._is_lost = False
        """Whether that could not be made up for: another commit might overwrite what is on the disk."""
        self._readers_checked = time.monotonic()
        """When slots of killed readers were last cleared: opening does it."""
        self._attach(env)

    def _open_gates(self) -> None:
        self._scratch = threading.local()
        """What a thread has of its own: a gate, and a buffer."""
        self._gates: weakref.WeakSet[Any] = weakref.WeakSet()
        """A lock for each thread that ever called, held while a call is inside the environment."""
        self._gating = threading.Lock()
        self._was_busy = False
        """Whether a call was inside when this process was forked."""

    def _attach(self, env: lmdb.Environment) -> None:
        """Take over an open environment, and its file."""
        self._env = env
        self._file = os.open(self.path / directory.DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
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
        """Bytes that the largest block takes in the file."""
        return pages_of(self.options.frame_bytes) * PAGE_BYTES

    @staticmethod
    def stored_bytes(frame: bytes | bytearray) -> int:
        """Return the bytes that a frame takes in the file."""
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
        """Bytes up to the highest page ever used: what the file takes on disk."""
        with self._using():
            return (int(self._inside.info()["last_pgno"]) + 1) * PAGE_BYTES

    @property
    def block_count(self) -> int:
        """Blocks in the last committed state."""
        with self._using(), self._begin() as txn:
            return int(txn.stat(self._meta)["entries"])

    # ---- reading -------------------------------------------------------------------------------

    def records(self) -> Records:
        """Return every record that is one, as of now. Touches no payload.

        Cost: about 0.3 µs and 80 bytes a block.
        """
        with self._using(), self._begin(buffers=True) as txn:
            cursor: Any = txn.cursor(self._meta)
            return Records(b"".join(tree.rows(cursor, KEY_BYTES, RECORD_BYTES)))

    def records_after(self, key: bytes, count: int) -> list[tuple[BlockKey, Record]]:
        """Return up to ``count`` records whose keys follow ``key``, in the order of their keys."""
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

    def leading_run(self, path: bytes, now: float) -> int:
        """Return how many leading keys of ``path`` are present and not expired at ``now``.

        Every committed state is closed under prefixes, and a parent lives as long as what hangs on
        it, so a binary search finds the end.
        """
        low, high = 0, len(path) // KEY_BYTES + 1
        with self._using(), self._begin() as txn:
            while high - low > 1:
                middle = (low + high) // 2
                key = path[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]
                data = txn.get(key, db=self._meta)
                record = None if data is None else Record.unpack(data)
                if record is not None and (not record.expires or now < record.expires):
                    low = middle
                else:
                    high = middle
        return low

    def known_run(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading ``keys`` have a record, whatever hangs on what."""
        with self._using(), self._begin() as txn:
            for count, key in enumerate(keys):
                if txn.get(key, db=self._meta) is None:
                    return count
        return len(keys)

    def look(self, keys: Sequence[BlockKey], take: Callable[[BlockKey, memoryview], None]) -> None:
        """Show the frames of ``keys`` that are there, unchecked; ``take`` must not keep them.

        Only the pages of a frame that ``take`` touches are read.
        """
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
        """Read frames in order until one is missing or bad.

        ``take(i, frame)`` is given a private copy of block i, which it must not keep, and returns
        why it is bad, or None. A bad one is read again another way, and taken again. No exception
        of the medium escapes; the fault ``BUSY`` says nothing of the block.

        ``take_many`` is who reads runs of frames of one size, by that size. Where one is not good,
        ``take`` says why, and goes on.
        ``bounds`` are the bytes of a frame that it reads behind the head; without it, all.
        ``is_hinted`` says that ``will_need`` was told of all of them.
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
            return ReadResult(done, BUSY if passes(error) else "io", size)
        return ReadResult(done, None, size)

    def will_need(self, keys: Sequence[BlockKey], bounds: tuple[int, int] | None = None) -> None:
        """Let the disk begin to read frames that ``read`` will be asked for; whatever fails then."""
        with suppress(*MEDIUM_ERRORS), self._using(), self._begin(buffers=True) as txn:
            for key in keys:
                page, size = self._place(txn.get(key, db=self._meta))
                offset = page * PAGE_BYTES + PAGE_HEADER_BYTES
                start, stop = (0, size) if bounds is None else bounds
                if page and start > PAGE_BYTES:  # else the head comes with it
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
            places = [self._place(data) for data in found]
            i = first
            while i < stop:
                page, size = places[i - first]
                if page and size in take_many:
                    run = self._run(places[i - first :])
                    taken = take_many[size](i, self._file, run)
                    i, read = i + taken, read + taken * size
                    if taken == len(run):
                        continue
                    page = places[i - first][0]  # one of the run, that is not good
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
    def _run(places: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Return where leading frames of one size lie, as far as that is known."""
        size = places[0][1]
        pages = [page for page, _ in takewhile(lambda place: place[0] and place[1] == size, places)]
        return np.array(pages, np.int64) * PAGE_BYTES + PAGE_HEADER_BYTES

    def _place(self, data: bytes | memoryview | None) -> tuple[int, int]:
        """Return the page that a record names and the size there; 0 for what no file has."""
        page, size = (0, 0) if data is None else place_of(data)
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
        """Write blocks, new sequences of used ones, and facts, in one durable transaction.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``; then nothing was written.
        """
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
                    # A delete has failed.
                    replaced.extend(self._drop_age(txn, txn.get(item.key, db=self._meta)))
                    txn.put(item.key, record, db=self._meta)
                txn.put(_SEQUENCE.pack(item.record.sequence), item.key, db=self._age)

        self._change(write, buffers=True)
        self.usage.update(usage_of(item.record for item in puts))
        self._uncount(replaced)

    def _uncount(self, gone: Iterable[Record]) -> None:
        """Take records that went out of the usage."""
        less = usage_of(gone, self.options.frame_bytes)
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
        """Delete blocks, deepest first, in small durable transactions: each leaves a closed state.

        Deleting needs free pages itself; where there is no room the transactions shrink to single blocks.
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
        """Delete the row of ``age`` that belongs to a stored record; return that if it is one."""
        record = None if data is None else Record.unpack(data)
        if record is None:
            return []
        txn.delete(_SEQUENCE.pack(record.sequence), db=self._age)
        return [record]

    def lacks_room(self, error: BaseException, blocks: int) -> bool:
        """Say whether a write of ``blocks`` blocks failed for want of space.

        A write that is cut short for that reaches LMDB as an input/output error, so the file system
        is asked for as much.
        """
        code = _code_of(error)
        if code in _NO_ROOM or is_map_full(error):
            return True
        wanted = (blocks + 1) * (self.block_bytes + _TREE_PAGES_PER_BLOCK * PAGE_BYTES)
        return code == errno.EIO and not self._can_grow(wanted)

    def _can_grow(self, wanted: int) -> bool:
        """Say whether the file system gives the file ``wanted`` bytes more; what it gives stays.

        Only an allocation knows quotas. It ends where the cap does, and leaves what is used as it is.
        """
        try:
            with self._writing:  # where the system knows no allocation it is made of writes
                first = self.file_bytes
                wanted = min(wanted, self.capacity_bytes - first)
                if wanted > 0:
                    allocate(self.path / directory.DATA_FILE, first, wanted)
        except lmdb.Error:
            return True
        except OSError as error:
            return error.errno not in _NO_ROOM
        return True

    def may_recover(self, error: BaseException) -> bool:
        """Say whether writing may be tried again after an error, without opening the store anew."""
        return not (self._is_lost or self._is_damaged or isinstance(error, DAMAGE))

    def sync(self) -> None:
        """Make every commit so far survive power loss."""
        with self._writing, self._using():
            self._heal()
            self._clear_readers()
            try:
                self._inside.sync(True)  # noqa: FBT003 - py-lmdb's own positional flag
            except MEDIUM_ERRORS:
                self._is_suspect = True
                raise

    def _change(self, write: Callable[[Any], None], *, buffers: bool = False) -> None:
        """Let ``write`` change the databases in one durable transaction, which returns views if ``buffers``.

        No generator: one that is cut off while it is entered keeps its transaction open.
        """
        with self._writing, self._using():
            self._heal()
            self._clear_readers()
            self._reach()
            try:
                begin: Any = self._inside.begin  # its overloads know no variable for `buffers`
                with begin(write=True, buffers=buffers) as txn:
                    write(txn)
            except lmdb.MapFullError:  # before anything was written
                self._inside.reader_check()  # a killed reader keeps every page freed since it began
                raise
            except MEDIUM_ERRORS as error:
                self._is_suspect = True
                self._is_damaged |= isinstance(error, DAMAGE)
                raise

    def _clear_readers(self) -> None:
        """Clear the slots of killed readers, now and then."""
        now = time.monotonic()
        if now - self._readers_checked >= READERS_SECONDS:
            self._readers_checked = now
            self._inside.reader_check()

    def _reach(self) -> None:
        """Let the file be as long as the next transaction may make it, so that no page is behind its end.

        Inside a transaction LMDB takes for a page whatever number is below the next new one. A changed
        bit that names a new page, which the file does not have yet, would be read through the map
        behind the end of the file: SIGBUS. There it is a hole, which makes no sense and is an error.
        """
        wanted = min(self.file_bytes + self._reach_bytes, self.capacity_bytes)
        if self.disk_bytes < wanted:
            with suppress(OSError):
                os.truncate(self.path / directory.DATA_FILE, wanted // PAGE_BYTES * PAGE_BYTES)

    def _heal(self) -> None:
        """After a commit or a sync that failed: bring the last committed state to the disk.

        A kernel may count pages that it failed to write as written. What was not synced by then, the
        last commit's meta page too, may never reach the disk, and a later sync that succeeds does
        not mean that it did. One commit more overwrites nothing that the state on the disk needs,
        and its sync brings all to the disk; two without a sync between them would. docs/decisions/0017.
        """
        if not self._is_suspect:
            return
        if self._is_lost:
            raise OSError(
                errno.EIO, "an earlier sync failed: nothing is written until it is reopened"
            )
        with self._inside.begin(write=True) as txn:
            txn.put(b"clean", b"0", db=self._sys)  # any change will do
        try:
            self._inside.sync(True)  # noqa: FBT003
        except MEDIUM_ERRORS:
            self._is_lost = True
            raise
        self._is_suspect = False

    # ---- compacting (owner) --------------------------------------------------------------------

    def trim(self) -> None:
        """Cut off what was preallocated beyond the cap and never used."""
        if self.file_bytes <= self.capacity_bytes < self.disk_bytes:
            os.truncate(self.path / directory.DATA_FILE, self.capacity_bytes)

    @property
    def disk_bytes(self) -> int:
        """Length of the data file."""
        return os.fstat(self._file).st_size

    def compact(self) -> None:
        """Give free pages back to the disk: put a compacted copy in place of the data file.

        The copy is checked as an opening checks a file, and knows where each payload lies. A kill
        at any time leaves the old file or the new one. Nothing may be written meanwhile.

        Raises:
            StoreBusy: if another process has the store open.
            StoreError: if it does not fit on the disk or under the cap, or the medium fails. In all
                cases the old file stays and the tier goes on.

        Cost: reads what is in use twice and writes it once. Needs that much space on the disk.
        """
        try:
            self._compact()
        except MEDIUM_ERRORS as error:
            msg = f"{self.path} cannot be compacted: {error}; it stays as it was"
            raise StoreError(msg) from error
        finally:
            directory.sweep(self.path)

    def _compact(self) -> None:
        if self._map_lock is None:
            self._map_lock = directory.open_map_lock(self.path)
        directory.try_alone(self.path, self._map_lock)
        directory.let_in(self._map_lock, is_open=True)
        self.sync()
        live = self.live_bytes
        if live > self.high_bytes:
            msg = (
                f"{live} bytes are in use in {self.path}, more than the {self.high_bytes} that its cap "
                f"of {self.capacity_bytes} allows for: evict or unpin, or give it more ssd_bytes"
            )
            raise StoreError(msg)
        needed = live + self.block_count * _HINT_BYTES + _OVERHEAD_PAGES * PAGE_BYTES
        facts = os.statvfs(self.path)
        free = facts.f_bavail * facts.f_frsize
        if free < needed:
            msg = (
                f"compacting {self.path} needs {needed} bytes free beside it for the copy, "
                f"found {free}: free that much, or evict first"
            )
            raise StoreError(msg)
        folder = directory.new_copy_folder(self.path)
        with self._using():
            state = self._inside.info()["last_txnid"]
        self._write_copy(folder)
        self._exchange(folder, state)
        self.set_fact("clean", b"0")

    def _write_copy(self, folder: Path) -> None:
        with self._using():
            self._inside.copy(str(folder), compact=True)
        lock = directory.try_lock(folder)
        assert lock is not None, "a folder of the owner's own"
        options = replace(self.options, preallocate=False)
        # It is not marked clean, so all values are looked at, however long that takes.
        copy, problem = _try_open(folder, options, lock, heads_seconds=None)
        if copy is None:
            os.close(lock)
            msg = f"the compacted copy of {self.path} is broken ({problem}); the store stays as it was"
            raise StoreError(msg)
        try:
            if copy.block_count != self.block_count:
                msg = (
                    f"the compacted copy of {self.path} has {copy.block_count} blocks, expected "
                    f"{self.block_count}; the store stays as it was"
                )
                raise StoreError(msg)
            copy.find_hints()
        finally:
            copy.close()

    def find_hints(self) -> None:
        """Write into every record where its payload lies now."""
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
            if end:  # a compacted file holds payloads in the order of their keys: look ahead
                size = (len(batch) + 1) * self.block_bytes
                os.posix_fadvise(self._file, end * PAGE_BYTES, size, _WILL_NEED)

    def _exchange(self, folder: Path, state: int) -> None:
        """Go on with the copy in ``folder``, made when ``state`` was the last transaction."""
        assert self._map_lock is not None
        with self._writing, self._alone(COPY_SECONDS) as is_alone:
            if not is_alone or self._env.info()["last_txnid"] != state:
                msg = f"{self.path} was in use while it was compacted; it stays as it was"
                raise StoreError(msg)
            self._env.close()
            os.close(self._file)
            try:
                directory.try_alone(self.path, self._map_lock)
                try:
                    directory.exchange(self.path, folder)
                finally:
                    directory.let_in(self._map_lock, is_open=False)
            finally:
                try:
                    self._attach(_environment(self.path, self.options, is_owner=True))
                except BaseException:
                    self._is_closed = True
                    self._close_locks()
                    raise

    # ---- small facts in `sys` ------------------------------------------------------------------

    def fact(self, name: str) -> bytes | None:
        """Return a small named value."""
        with self._using(), self._begin() as txn:
            data = txn.get(name.encode(), db=self._sys)
        return None if data is None else bytes(data)

    def facts(self, prefix: str) -> dict[str, bytes]:
        """Return all small values whose names start with ``prefix``, by the rest of the name."""
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
        """Store a small named value durably."""
        self.set_facts({name: value})

    def set_facts(self, values: Mapping[str, bytes | None]) -> None:
        """Store small named values durably, all or none; those that are None are removed."""

        def write(txn: Any) -> None:
            for name, value in values.items():
                if value is None:
                    txn.delete(name.encode(), db=self._sys)
                else:
                    txn.put(name.encode(), value, db=self._sys)

        self._change(write)

    # ---- life ----------------------------------------------------------------------------------

    def _using(self) -> Any:
        """Return the gate of this thread, to be held while it is inside: a closed map is a crash.

        A lock as itself, so that nothing can interrupt between taking it and what it guards.
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
        """The environment, for who holds his gate."""
        assert self._using()._is_owned(), "the environment is used outside a gate"  # noqa: SLF001
        if self._is_closed:
            msg = f"the store at {self.path} is closed"
            raise StoreError(msg)
        return self._env

    @contextmanager
    def _alone(self, seconds: float) -> Iterator[bool]:
        """Wait until no call is inside, and let none in; say whether that came about in time."""
        deadline = time.monotonic() + seconds
        with self._gating, ExitStack() as held:
            is_alone = True
            for gate in list(self._gates):
                # As a condition asks it. Who is inside himself would wait for himself.
                is_mine = gate._is_owned()  # noqa: SLF001
                if not is_mine and gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    held.callback(gate.release)
                else:
                    is_alone = False
            yield is_alone

    def _begin(self, *, buffers: bool = False) -> Any:
        """Begin a transaction that reads, for who holds his gate and has none yet.

        Where all slots are taken, those of killed readers are cleared first; where the owner has a
        larger cap by now, as much is mapped here.
        """
        begin: Any = self._inside.begin  # its overloads know no variable for `buffers`
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
        """As a reader: map as much as the owner does now, once no call is inside."""
        with self._alone(COPY_SECONDS) as is_alone:
            if is_alone and not self._is_closed:
                self._env.set_mapsize(0)

    def close(self) -> None:
        """Wait for calls inside, then release the files. Idempotent."""
        if self._is_closed:
            return
        with self._alone(CLOSE_SECONDS):
            self._is_closed = True
        # If not marked as clean, the next opening looks at the heads of all values too.
        if self.is_owner and not (self._is_suspect or self._is_damaged):
            with suppress(lmdb.Error):
                with self._env.begin(write=True) as txn:
                    txn.put(b"clean", b"1", db=self._sys)
                self._env.sync(True)  # noqa: FBT003
                # What `_reach` added goes, still under the owner's lock.
                if not self.options.preallocate:
                    end = (int(self._env.info()["last_pgno"]) + 1) * PAGE_BYTES
                    with suppress(OSError):
                        os.truncate(self.path / directory.DATA_FILE, end)
        self._release()

    def before_fork(self) -> None:
        """Wait until no call is inside, and let none in: a child could not close the environment."""
        self._forking = ExitStack()
        self._was_busy = not self._forking.enter_context(self._alone(FORK_SECONDS))

    def after_fork(self) -> None:
        """In the parent: let calls in again."""
        self._forking.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors, so that no lock outlives the parent.

        The environment stays open until ``forget``: closing it here would clear the parent's
        reader slots for every child, also those that never use the store.
        """
        was_busy = self._was_busy
        self._open_gates()  # the parent's may be held by a thread that is not here
        self._was_busy = was_busy
        self._is_closed = True
        self._close_files()

    def forget(self) -> None:
        """In a forked child: close the inherited environment before opening one's own.

        Raises:
            StoreError: if a call of the parent was inside at the fork; closing would wait for ever.
        """
        if self._was_busy:
            msg = (
                f"the store at {self.path} was busy when this process forked; open it in a new one"
            )
            raise StoreError(msg)
        self._env.close()

    def keep_lock(self) -> None:
        """Leave the lock to whoever opened this tier, who is going to open another."""
        self._lock_fd = None

    def give_up(self) -> None:
        """Release the files of a store that turned out to be broken, not marked as clean."""
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


DAMAGE = (
    *(lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError),
    *(lmdb.PanicError, lmdb.IncompatibleError, lmdb.NotFoundError, lmdb.BadValsizeError),
    *(lmdb.BadTxnError, lmdb.BadDbiError, lmdb.PageFullError, lmdb.CursorFullError),
)
"""What a broken file looks like. All else that LMDB says (no memory, no space, no descriptors) is
about the machine, and no reason to give up a store."""
_PASSING = (*(lmdb.ReadersFullError, lmdb.TlsFullError, lmdb.MapResizedError, lmdb.BadRslotError),)
_PASSING_CODES = frozenset(
    {
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.EBUSY),
        *(errno.ENOLCK, errno.ETIMEDOUT, errno.ESTALE),
    }
)
"""What says something of this moment and nothing of the store: slots, memory, descriptors and locks
that others have, and a server that does not answer."""
MEDIUM_ERRORS = (lmdb.Error, OSError)
"""What a medium can do to us. Everything else is a bug and is not caught as one of these."""


def is_map_full(error: BaseException) -> bool:
    """Say whether a write found no free page in the map: nothing was written, nothing failed."""
    return isinstance(error, lmdb.MapFullError)


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Codes of a full disk, a full quota and a file at its largest size."""
_NOT_KNOWN = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
"""Codes of a file system that takes no space ahead. Source: posix_fallocate(3)."""


def passes(error: BaseException) -> bool:
    """Say whether an error is of this moment: the same call may succeed later, and nothing is bad."""
    return isinstance(error, _PASSING) or _code_of(error) in _PASSING_CODES


def remedy(error: BaseException) -> str:
    """Return in words what helps a reader that an error kept from reading."""
    if passes(error):
        return "try again when others have let go of what is short (readers, memory, descriptors)"
    return "its owner repairs it at its next open"


def _code_of(error: BaseException) -> int:
    """Return the code of the system that an error stands for, 0 for none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, lmdb.DiskError):
        return errno.ENOSPC
    return int(getattr(error, "code", 0))


def allocate(file: Path, first: int, size: int) -> None:
    """Take disk space for bytes ``[first, first + size)`` of a file, without changing any.

    Raises:
        OSError: if it is not given all; a part may be taken then.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # not looked at below the file's length
    if most != resource.RLIM_INFINITY and first + size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, first, size)
    finally:
        os.close(fd)


_WILL_NEED = getattr(os, "POSIX_FADV_WILLNEED", 3)


_PAGE_HEADER = struct.Struct("<QHHI")
"""Number, unused, flags, and for overflow pages how many they are. Source: MDB_page, LMDB 0.9."""
_IS_OVERFLOW = 4
assert _PAGE_HEADER.size == PAGE_HEADER_BYTES


def _page_of(value: memoryview) -> int:
    """Return the number of the page that a value begins, 0 if it lies inside a page of the tree.

    ``value`` is what a transaction returned. LMDB gives a page its number when it is written to, and
    puts the header right before the value, in its copy of the page as in the file.
    """
    address = np.frombuffer(value, np.uint8).__array_interface__["data"][0] - PAGE_HEADER_BYTES
    header = ctypes.string_at(address, PAGE_HEADER_BYTES)
    number, _, flags, pages = _PAGE_HEADER.unpack(header)
    is_ours = flags & _IS_OVERFLOW and pages == pages_of(len(value)) and number < _LAST_PAGE
    return int(number) if is_ours else 0


def open_ssd(path: Path, options: SsdOptions) -> tuple[SsdTier, Path | None]:
    """Open the store at ``path``, creating it if need be.

    Returns the tier, and where a broken store was set aside if there was one.

    Raises:
        ConfigError: for a path or a cap that cannot work.
        LayoutMismatch: if the store is for another layout; it is left untouched.
        StoreBusy: if ``role="owner"`` and another process owns it.
        StoreError: if ``path`` is not a store, or a reader finds it broken.
    """
    least = minimum_capacity(options.frame_bytes)
    if options.capacity_bytes < least:
        msg = (
            f"ssd_bytes is {options.capacity_bytes}, expected at least {least}: room for "
            f"{MINIMUM_BLOCKS} blocks of {pages_of(options.frame_bytes) * PAGE_BYTES} bytes and "
            "the largest commits"
        )
        raise ConfigError(msg)
    try:
        return _open(path, options)
    except lmdb.LockError as error:
        raise _same_number(path) from error
    except MEDIUM_ERRORS as error:
        msg = f"the store at {path} cannot be opened: {error}; {_advice(error, options)}"
        raise StoreError(msg) from error


def _same_number(path: Path) -> StoreBusy:
    """Return the error for the one lock of LMDB that is tried at an opening and can be held.

    Each process that reads holds the byte of its number in the lock file. Source: ``mdb_reader_pid``
    of LMDB 0.9.
    """
    return StoreBusy(
        f"{path} is read by another process with the number {os.getpid()}, as this one has, which happens "
        "in containers; LMDB tells processes by their numbers: let the containers share their process "
        "numbers (Kubernetes: shareProcessNamespace, Docker: --pid), start this process again under "
        "another number, or give each container a store of its own"
    )


def _advice(error: Exception, options: SsdOptions) -> str:
    """Say what a person can do about what kept a store from being opened."""
    if isinstance(error, PermissionError):
        return "give this user write permission there, which readers need too, or use another path"
    if "Cannot allocate memory" in str(error):
        return f"ssd_bytes is {options.capacity_bytes}, more than can be mapped here: choose less"
    return "free what is short or use another path"


def _open(path: Path, options: SsdOptions) -> tuple[SsdTier, Path | None]:
    if options.role == "reader":
        return _open_reader(path, options), None
    directory.prepare(path)
    deadline = time.monotonic() + BIRTH_SECONDS
    while True:
        lock = directory.try_lock(path)
        try:
            if lock is not None:
                return _open_owner(path, options, lock)
            if options.role == "owner":
                raise directory.busy(path)
            return _open_reader(path, options), None
        except (StoreBusy, StoreError):
            # Someone else is just making the store, or making it anew.
            if options.role == "owner" or lock is not None or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _open_reader(path: Path, options: SsdOptions) -> SsdTier:
    directory.require_store(path)
    directory.refuse_links(path)
    directory.claim_format(path, options.format_text)
    env = None
    try:
        while env is None:
            before = (path / directory.DATA_FILE).stat().st_ino
            env = _environment(path, options, is_owner=False)
            if (path / directory.DATA_FILE).stat().st_ino != before:  # compacted just now
                env.close()
                env = None
        problem = _cut_off(path, env)
        if not problem:
            return SsdTier(path, options, env, None)
    except lmdb.LockError as error:
        raise _same_number(path) from error
    except MEDIUM_ERRORS as error:
        if env is not None:
            env.close()
        msg = f"the store at {path} cannot be read: {error}; {remedy(error)}"
        raise StoreError(msg) from error
    env.close()
    msg = f"the store at {path} cannot be read: {problem}; its owner repairs it at its next open"
    raise StoreError(msg)


def _open_owner(path: Path, options: SsdOptions, lock: int) -> tuple[SsdTier, Path | None]:
    try:
        directory.sweep(path)
        _require_room(path, options)
        directory.claim_format(path, options.format_text)
        tier, problem = _try_open(path, options, lock)
        if tier is not None:
            return tier, None
        aside = directory.set_aside(path)
        logger.warning("the store at %s was broken (%s): moved to %s", path, problem, aside)
        os.close(lock)
        fresh = directory.try_lock(path)
        if fresh is None:
            raise directory.busy(path)
        lock = fresh
        directory.claim_format(path, options.format_text)
        tier, problem = _try_open(path, options, lock)
    except BaseException:
        os.close(lock)
        raise
    if tier is None:
        os.close(lock)
        msg = f"no store can be made at {path}: {problem}"
        raise StoreError(msg)
    return tier, aside


def _try_open(
    path: Path,
    options: SsdOptions,
    lock: int,
    *,
    heads_seconds: float | None = HEADS_SECONDS,
) -> tuple[SsdTier | None, str]:
    """Open and check; return the tier, or None and what is wrong with the file."""
    env: lmdb.Environment | None = None
    tier: SsdTier | None = None
    is_good = False
    try:
        trees = _trees(path)  # before LMDB sees the file: it ends the process for less
        if trees.problem:
            return None, trees.problem
        env = _environment(path, options, is_owner=True)
        problem = _cut_off(path, env) or _problem_of_heads(path, env, trees, heads_seconds)
        if problem:
            return None, problem
        directory.sync_names(path)
        tier = SsdTier(path, options, env, lock)
        stored = tier.fact("format")
        if stored is None:
            tier.set_fact("format", options.format_text.encode())
        elif stored.decode(errors="replace") != options.format_text:
            return None, "its database and its VERSION file name different layouts"
        tier.set_fact("clean", b"0")
        if tier.fact("capacity") != str(options.capacity_bytes).encode():
            tier.set_fact("capacity", str(options.capacity_bytes).encode())
        if options.preallocate:
            _preallocate(path, options, tier.file_bytes)
        is_good = True
    except DAMAGE as error:
        return None, str(error)
    finally:
        if not is_good:
            if tier is not None:
                tier.keep_lock()
                tier.give_up()
            elif env is not None:
                env.close()
    return tier, ""


def _environment(path: Path, options: SsdOptions, *, is_owner: bool) -> lmdb.Environment:
    """Open LMDB as docs/decisions/0009 says: never nosync, never writemap, engine 0.9."""
    env = lmdb.open(
        str(path),
        # A reader takes the size that the owner wrote into the file, so the two never differ.
        map_size=options.capacity_bytes // PAGE_BYTES * PAGE_BYTES if is_owner else 0,
        subdir=True,
        readonly=not is_owner,
        create=is_owner,
        max_dbs=8,
        max_readers=_READERS,
        lib_version=0,
        sync=True,
        metasync=False,
        writemap=False,
        map_async=False,
        meminit=True,
        readahead=False,
        lock=True,
        mode=0o600,
        max_spare_txns=0,  # a kept transaction would lose its slot when a forked child reopens
    )
    env.reader_check()  # slots of killed readers: there are 512 in all
    return env


def _trees(path: Path) -> tree.Trees:
    file = path / directory.DATA_FILE
    return tree.look(file) if file.exists() and file.stat().st_size else tree.NO_TREES


def _problem_of_heads(
    path: Path, env: lmdb.Environment, trees: tree.Trees, seconds: float | None
) -> str:
    """Return what is wrong with the values of a store that was not closed, empty if nothing is.

    LMDB believes the head of a value when it frees its pages, and a store in which it met one that
    makes no sense is not marked clean.
    """
    if not env.stat()["entries"] or _is_clean(env):
        return ""
    try:
        return tree.problem_of_heads(path / directory.DATA_FILE, trees.values, seconds)
    except TimeoutError:
        message = (
            "%s was not closed and takes more than %.0f s to look at all values: opened without"
        )
        logger.warning(message, path, seconds)
        return ""


def _cut_off(path: Path, env: lmdb.Environment) -> str:
    """Say whether the end of the file is missing: touching it through the map would be SIGBUS."""
    needed = (int(env.info()["last_pgno"]) + 1) * PAGE_BYTES
    size = (path / directory.DATA_FILE).stat().st_size  # after `needed`: an owner may extend it
    if size >= needed or not env.stat()["entries"]:
        return ""
    return f"{directory.DATA_FILE} has {size} bytes, expected at least {needed}"


def _is_clean(env: lmdb.Environment) -> bool:
    db = env.open_db(b"sys", create=False)
    with env.begin() as txn:
        return bool(txn.get(b"clean", db=db) == b"1")


def _require_room(path: Path, options: SsdOptions) -> None:
    """Raise ``StoreError`` if the disk has no room for what ``preallocate`` is to take."""
    if not options.preallocate:
        return
    taken = 0
    with suppress(FileNotFoundError):
        taken = (path / directory.DATA_FILE).stat().st_blocks * 512  # the unit of stat(2)
    facts = os.statvfs(path)
    wanted, free = options.capacity_bytes - taken, facts.f_bavail * facts.f_frsize
    if wanted > free:
        raise StoreError(_too_large(path, options, f"{wanted} bytes more, found {free} free"))


def _too_large(path: Path, options: SsdOptions, what: str) -> str:
    return (
        f"preallocate: {path / directory.DATA_FILE} is to take the {options.capacity_bytes} bytes of "
        f"ssd_bytes, {what}; nothing was taken: free as much, give less ssd_bytes, or open it without"
    )


def _preallocate(path: Path, options: SsdOptions, used: int) -> None:
    """Take the disk space now, all of it or none, so that a full disk shows at start-up.

    ``used`` bytes of the file hold pages. Skipped where the system knows no allocation.

    Raises:
        StoreError: if a quota or a limit that the free space does not show is in the way.
        OSError: if the medium fails.
    """
    file = path / directory.DATA_FILE
    try:
        allocate(file, used, max(1, options.capacity_bytes - used))
        allocate(file, 0, options.capacity_bytes)  # the holes among the pages too
    except OSError as error:
        os.truncate(file, used)
        if error.errno in _NOT_KNOWN:
            logger.warning("preallocate: %s cannot be given its space now: %s", file, error)
        elif error.errno in _NO_ROOM:
            raise StoreError(
                _too_large(path, options, f"which the system refused: {error.strerror}")
            ) from error
        else:
            raise
