"""Whether the trees of a database file hold together, found out without LMDB and without a value.

LMDB believes its own pages. One changed bit in a tree, a free list or a meta page can end the
process by an assertion, or make a file that no opening accepts, so the owner looks first. Values are
not touched: reads check those. What is checked: both meta pages, the form of every tree page, the
order of keys, the counters of every database, and that trees, values and free lists share out all
pages, each one once.

Source of the layout: LMDB 0.9, data version 1, on 64 bits. Cost: one read of 4 KiB per tree page,
about 10 µs a block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
_HEAD = struct.Struct("<QHHHH")
"""Of a page: its number, padding, flags, and where its free space begins and ends."""
_META = struct.Struct("<IIQQ")
"""Magic, version, address, map size; then the records of two databases, last page, transaction."""
_RECORD = struct.Struct("<IHHQQQQQ")
"""Of a database: padding, flags, depth, branch, leaf and overflow pages, entries, root."""
_TAIL = struct.Struct("<QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _META_PAGE = 1, 2, 8
_BIG, _DATABASE = 1, 2
"""Flags of a node: its value lies in pages of its own; its value is the record of a database."""
_INTEGER_KEYS = 8
"""Flag of a database: the free lists' one, by transaction."""
_EMPTY = 2**64 - 1
_NOWHERE = 2**40
"""A page beyond any file: numbers up to it can be added without overflow."""
_METAS = 2
_DEEPEST = 32


class _BrokenError(Exception):
    """What is wrong, in words."""


def _demand(holds: object, complaint: str) -> None:
    if not holds:
        raise _BrokenError(complaint)


def problem_of(file: Path) -> str:
    """Return what is wrong with the trees of ``file``, empty if nothing is.

    Raises:
        OSError: if the file cannot be read.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _Walk(fd).check()
    except _BrokenError as problem:
        return str(problem)
    finally:
        os.close(fd)
    return ""


@dataclass(frozen=True, slots=True)
class _Database:
    """The record of one database."""

    name: str
    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


def _database(name: str, data: bytes, at: int = 0) -> _Database:
    return _Database(name, *_RECORD.unpack_from(data, at))


@dataclass(frozen=True, slots=True)
class _Page:
    """One tree page: its bytes, and for each node where it is, its first word, flags and key size."""

    number: int
    data: bytes
    is_leaf: bool
    at: NDArray[np.int64]
    word: NDArray[np.int64]
    flags: NDArray[np.int64]
    key_bytes: NDArray[np.int64]

    def key(self, node: int) -> bytes:
        start = self.at[node] + 8
        return self.data[start : start + self.key_bytes[node]]

    def keys(self) -> list[bytes]:
        return [self.key(node) for node in range(len(self.at))]


def _gather(data: bytes, at: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return ``width`` bytes from each place."""
    found: NDArray[np.uint8] = np.frombuffer(data, np.uint8)[at[:, None] + np.arange(width)]
    return found


def _pages_in(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return page numbers as stored, what no file has cut to what none has either."""
    found: NDArray[np.int64] = np.minimum(data.reshape(-1).view("<u8"), _NOWHERE).astype(np.int64)
    return found


class _Walk:
    """One look at one file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size

    def check(self) -> None:
        metas = [self._meta(number) for number in range(_METAS)]
        free, main, last, self._transaction = max(metas, key=lambda meta: meta[3])
        self._pages = last + 1
        _demand(
            _METAS <= self._pages <= self._size // PAGE_BYTES,
            f"{self._pages} pages are in use, but the file has {self._size} bytes",
        )
        self._changes = np.zeros(self._pages + 1, np.int64)
        """By page: how many uses begin there, less those that end; summed up, its uses."""
        for page in self._tree(free):
            self._free_lists(page)
        named: list[_Database] = []
        for page in self._tree(main):
            named += self._named(page)
        for database in named:
            for page in self._tree(database):
                _demand(not (page.flags & ~_BIG).any(), f"{page.number}: a node of another kind")
        uses = np.cumsum(self._changes)[_METAS : self._pages]
        _demand((uses == 1).all(), "pages are used twice, or by nothing")

    def _meta(self, number: int) -> tuple[_Database, _Database, int, int]:
        data = self._read(number)
        found, _, flags, _, _ = _HEAD.unpack_from(data)
        magic, version, _, map_bytes = _META.unpack_from(data, 16)
        at = 16 + _META.size
        free, main = _database("free", data, at), _database("main", data, at + _RECORD.size)
        last, transaction = _TAIL.unpack_from(data, at + 2 * _RECORD.size)
        _demand(
            (found, flags, magic, version, free.pad)
            == (number, _META_PAGE, _MAGIC, _VERSION, PAGE_BYTES)
            and map_bytes % PAGE_BYTES == 0
            and map_bytes < 2**47
            and (free.flags, main.flags, main.pad) == (_INTEGER_KEYS, 0, 0)
            and transaction % _METAS == (number if transaction else 0),
            f"meta page {number} makes no sense",
        )
        return free, main, last, transaction

    def _read(self, number: int, count: int = 1) -> bytes:
        data = os.pread(self._fd, count * PAGE_BYTES, number * PAGE_BYTES)
        _demand(len(data) == count * PAGE_BYTES, f"page {number} lies behind the end of the file")
        return data

    def _use(self, first: NDArray[np.int64], count: NDArray[np.int64] | int) -> None:
        """Note the use of pages."""
        last = first + count
        is_inside = (first >= _METAS) & (last > first) & (last <= self._pages)
        _demand(is_inside.all(), "a page is named that is none")
        np.add.at(self._changes, first, 1)
        np.add.at(self._changes, last, -1)

    def _tree(self, database: _Database) -> Iterator[_Page]:
        """Yield the leaves of a tree in order, checking all of it and its counters."""
        branches = leaves = overflow = entries = depth = 0
        level = [] if database.root == _EMPTY else [database.root]
        while level:
            depth += 1
            _demand(depth <= _DEEPEST, f"database {database.name} is too deep")
            self._use(np.array([min(n, _NOWHERE) for n in level], np.int64), 1)
            below: list[int] = []
            last = b""
            for number in level:
                page = self._page(number)
                last = self._in_order(database, page, last)
                if page.is_leaf:
                    leaves, entries = leaves + 1, entries + len(page.at)
                    overflow += self._values(page)
                    yield page
                else:
                    branches += 1
                    below += (page.word | page.flags << 32).tolist()
            _demand(bool(leaves) != bool(below), f"database {database.name} is lopsided")
            level = below
        found = (depth, branches, leaves, overflow, entries)
        stated = (
            *(database.depth, database.branches, database.leaves),
            *(database.overflow, database.entries),
        )
        _demand(found == stated, f"database {database.name} has {found}, expected {stated}")

    def _page(self, number: int) -> _Page:
        data = self._read(number)
        found, _, flags, lower, upper = _HEAD.unpack_from(data)
        where = f"page {number}"
        _demand(found == number and flags in (_BRANCH, _LEAF), f"{where} is no tree page")
        _demand(
            _HEAD.size < lower <= upper <= PAGE_BYTES and lower % 2 == 0, f"{where} has no form"
        )
        words = np.frombuffer(data, "<u2").astype(np.int64)
        at = words[8 : lower // 2]
        _demand(
            (at >= upper).all() and (at <= PAGE_BYTES - 8).all() and not (at % 2).any(),
            f"{where} has nodes elsewhere",
        )
        low, high, kind, key_bytes = (words[at // 2 + n] for n in range(4))
        page = _Page(number, data, flags == _LEAF, at, low | high << 16, kind, key_bytes)
        ends = at + 8 + key_bytes
        if page.is_leaf:
            ends = ends + np.where(kind & _BIG, 8, page.word)
        _demand((ends <= PAGE_BYTES).all(), f"{where} has a node that is too long")
        return page

    def _in_order(self, database: _Database, page: _Page, last: bytes) -> bytes:
        """Check that keys ascend, in a page and from one to the next; return its last."""
        is_free = database.name == "free"
        skipped = 0 if page.is_leaf else 1  # a branch's first is whatever is less than its second
        at, sizes = page.at[skipped:] + 8, page.key_bytes[skipped:]
        if not len(at):
            return last
        width = int(sizes[0])
        if width in (8, 16) and (sizes == width).all():  # nearly all pages: many keys at a time
            words = _gather(page.data, at, width).view("<u8" if is_free else ">u8")
            high, low = words[:, 0], words[:, -1]
            rises = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
            keys = [page.key(skipped), page.key(len(page.at) - 1)]
        else:
            keys = [page.key(n) for n in range(skipped, len(page.at))]
            rises = np.array([a < b for a, b in pairwise(keys)])
        if is_free:  # native integers: the last byte counts most
            keys = [key[::-1] for key in keys]
        _demand(rises.all() and last < keys[0], f"page {page.number}: order")
        return keys[-1]

    def _values(self, page: _Page) -> int:
        """Note the pages of the values that have some; return how many those are."""
        is_big = (page.flags & _BIG) > 0
        if not is_big.any():
            return 0
        places = (page.at + 8 + page.key_bytes)[is_big]
        first = _pages_in(_gather(page.data, places, 8))
        counts = (15 + page.word[is_big]) // PAGE_BYTES + 1
        self._use(first, counts)
        return int(counts.sum())

    def _named(self, page: _Page) -> list[_Database]:
        found = []
        for at, size, flags, key in zip(page.at, page.word, page.flags, page.keys(), strict=True):
            _demand(flags == _DATABASE and size == _RECORD.size, f"page {page.number}: no database")
            database = _database(repr(key), page.data, at + 8 + len(key))
            _demand(not database.flags and not database.pad, f"database {key!r} is of another kind")
            found.append(database)
        return found

    def _free_lists(self, page: _Page) -> None:
        for at, size, flags, key in zip(page.at, page.word, page.flags, page.keys(), strict=True):
            start = at + 8 + len(key)
            _demand(
                len(key) == 8 and 0 < int.from_bytes(key, "little") <= self._transaction,
                f"page {page.number}: a free list of no transaction",
            )
            if flags == _BIG:
                (first,) = _pages_in(_gather(page.data, np.array([start]), 8))
                data = self._read(int(first), int(15 + size) // PAGE_BYTES + 1)
                data = data[16 : 16 + size]
            else:
                _demand(flags == 0, f"page {page.number}: no free list")
                data = page.data[start : start + size]
            _demand(len(data) >= 8 and len(data) % 8 == 0, f"page {page.number}: a cut free list")
            numbers = _pages_in(np.frombuffer(data, np.uint8))
            count, free = int(numbers[0]), numbers[1:]
            _demand(
                count == len(free) and (free[1:] < free[:-1]).all(),
                f"page {page.number}: a free list that does not hold together",
            )
            self._use(free, 1)
