"""Verification of the B+ trees of an LMDB file without LMDB, and a fast iteration over the rows of a leaf.

LMDB trusts its own pages: one changed bit in a tree, a free list or a meta page can abort the process or make
the file impossible to open, so the owner verifies the file first. Verified are both meta pages, the format of
every tree page, the order of keys, the counters of every database, and that each page belongs to exactly one
tree, value or free list. Values are not read: each read verifies its own. After an unclean shutdown the headers
of values are verified too, because LMDB trusts them when it frees pages.

Source of the layout: LMDB 0.9, data version 1, 64-bit. Cost: one read of 4 KiB per tree page and one bit per page
of the file, about 0.2 µs a block.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from _kvstore_native import ffi, lib
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _kvstore_native import Tree, TreeLevel, TreeWalk

PAGE_BYTES = 4096
_META = struct.Struct("<QHHHH IIQQ 48s48s QQ")
"""Number, padding, flags, and two fields unused in a meta page; magic, version, address, map size;
the records of the free lists and of the main database; last page, transaction."""
_RECORD = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, page counts, entries, root
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = 8
_INTEGER_KEYS = 8  # flag of the database of free lists, keyed by transaction
_METAS = 2
_NOWHERE = 2**64 - 1  # root of an empty database
_DEEPEST = 32
_WINDOW = 16
"""Pages of one read ahead, if two of them are needed: reading 64 KiB costs about as much as one more read
(0.8 GB/s, 20,000 reads a second)."""
_DATABASES = 64  # most databases that are verified; a store has four

_VALUE = np.dtype([("page", "<u8"), ("pages", "<u8")])
_HEAD = np.dtype([("page", "<u8"), ("padding", "<u2"), ("flags", "<u2"), ("pages", "<u4")])
"""Header of a value with pages of its own. Source: MDB_page, LMDB 0.9."""
_OVERFLOW = 4  # flag of the first page of such a value
_HEAD_BATCH = 1024  # headers read at a time

_COMPLAINTS: Mapping[int, str] = {
    lib.KVSTORE_TREE_CUT: "page {page} is beyond the end of the file",
    lib.KVSTORE_TREE_USE: "page {page} names a page that does not exist or is used twice",
    lib.KVSTORE_TREE_KIND: "page {page} is no tree page of this depth",
    lib.KVSTORE_TREE_FORM: "page {page} has nodes outside its bounds",
    lib.KVSTORE_TREE_ORDER: "page {page} has keys out of order",
    lib.KVSTORE_TREE_NODE: "page {page} has a node of another kind",
    lib.KVSTORE_TREE_LIST: "page {page} has an inconsistent free list",
    lib.KVSTORE_TREE_COUNTERS: "database {name} differs from its record at page {page}",
}


class _BrokenError(Exception):
    """The damage found in a file."""


def _demand(holds: object, complaint: str) -> None:
    if not holds:
        raise _BrokenError(complaint)


@dataclass(frozen=True, slots=True)
class Trees:
    """The result of a verification."""

    problem: str  # the problem found, empty for none
    values: NDArray[np.void]  # ``page`` and ``pages`` of each value that has pages of its own


NO_TREES = Trees("", np.empty(0, _VALUE))  # the result for a file that does not exist yet


def check(file: Path) -> Trees:
    """Verify the trees of ``file``, to which no process writes. Raises ``OSError`` if it cannot be read."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Trees("", _check_file(fd))
    except _BrokenError as problem:
        return Trees(str(problem), np.empty(0, _VALUE))
    finally:
        os.close(fd)


def problem_of_heads(file: Path, values: NDArray[np.void], seconds: float | None) -> str:
    """Return the damage found in the headers of ``values`` in ``file``, empty for none.

    Raises ``OSError`` if the file cannot be read; ``TimeoutError`` after ``seconds``. Cost: reads
    16 bytes of each value, in the order of the file.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    values = values[np.argsort(values["page"])]
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, len(values), _HEAD_BATCH):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            batch = values[first : first + _HEAD_BATCH]
            offsets = (batch["page"] * PAGE_BYTES).tolist()
            for offset in offsets:
                os.posix_fadvise(fd, offset, _HEAD.itemsize, os.POSIX_FADV_WILLNEED)
            data = b"".join([os.pread(fd, _HEAD.itemsize, offset) for offset in offsets])
            if len(data) != len(batch) * _HEAD.itemsize:
                return "a value is beyond the end of the file"
            found = np.frombuffer(data, _HEAD)
            bad = found["page"] != batch["page"]
            bad |= (found["pages"] != batch["pages"]) | (found["flags"] != _OVERFLOW)
            if bad.any():
                return f"page {batch['page'][bad][0]} is not the head of a value"
    finally:
        os.close(fd)
    return ""


def rows(cursor: Any, key_bytes: int, value_bytes: int) -> Iterator[bytes]:
    """Yield concatenated keys and values of the given sizes, one leaf at a time; rows of other sizes are skipped.

    ``cursor`` is an LMDB cursor of a transaction that returns views; LMDB finds the leaves of its snapshot.
    A leaf that cannot be parsed is read row by row through LMDB.
    """
    level: TreeLevel = ffi.new("struct kvstore_tree_level *")
    count = ffi.new("size_t *")
    data = bytearray(PAGE_BYTES)
    target = ffi.from_buffer("uint8_t[]", data, require_writable=True)
    more = cursor.first()
    while more:
        value = cursor.value()
        is_one = len(value) == value_bytes
        if is_one and not lib.kvstore_leaf_rows(
            level, ffi.from_buffer("uint8_t[]", value), key_bytes, value_bytes, target, count
        ):
            yield bytes(memoryview(data)[: count[0]])
            more = cursor.set_range(bytes(ffi.buffer(level.key, level.key_bytes)) + b"\0")
            continue
        if is_one and len(cursor.key()) == key_bytes:
            yield bytes(cursor.key()) + bytes(value)
        more = cursor.next()


class _Meta(NamedTuple):
    """The content of a meta page."""

    free: Tree
    main: Tree
    last_page: int
    transaction: int


def _check_file(fd: int) -> NDArray[np.void]:
    """Verify the trees of a file; return the pages of their values. Raises ``_BrokenError``."""
    free, main, last_page, transaction = max(
        (_meta(fd, number) for number in range(_METAS)), key=lambda meta: meta.transaction
    )
    pages, size = last_page + 1, os.fstat(fd).st_size
    _demand(
        _METAS <= pages <= size // PAGE_BYTES,
        f"{pages} pages are in use, but the file has {size} bytes",
    )
    used = np.zeros(pages // 8 + 1, np.uint8)
    named = ffi.new("struct kvstore_tree[]", _DATABASES)
    walk: TreeWalk = ffi.new("struct kvstore_tree_walk *")
    walk.file, walk.pages, walk.transaction = fd, pages, transaction
    walk.used = ffi.from_buffer("uint8_t[]", used, require_writable=True)
    walk.named, walk.named_room = named, _DATABASES
    values = [
        _check_tree(walk, free, lib.KVSTORE_TREE_FREE, "of free lists"),
        _check_tree(walk, main, lib.KVSTORE_TREE_NAMED, "of databases"),
    ]
    values += [
        _check_tree(walk, named[number], lib.KVSTORE_TREE_VALUES, str(number))
        for number in range(walk.named_count)
    ]
    _demand(walk.used_pages == pages - _METAS, "pages belong to no tree")
    return np.concatenate(values)


def _check_tree(walk: TreeWalk, tree: Tree, kind: int, name: str) -> NDArray[np.void]:
    """Verify one tree, level by level; return the pages of its values."""
    _demand(
        tree.depth <= _DEEPEST and (tree.depth == 0) == (tree.root == _NOWHERE),
        f"database {name} has depth {tree.depth}, and its root is page {tree.root}",
    )
    below = np.array([tree.root] if tree.depth else [], np.uint64)
    values = np.empty(min(tree.entries, tree.overflow, walk.pages), _VALUE)
    walk.values = ffi.from_buffer("struct kvstore_tree_value[]", values, require_writable=True)
    walk.value_room = len(values)
    branches = leaves = entries = 0
    for depth in range(tree.depth):
        pages, is_leaf = below, depth == tree.depth - 1
        room = 0 if is_leaf else min(tree.branches + tree.leaves, walk.pages)
        below = np.empty(room, np.uint64)
        walk.below = ffi.from_buffer("uint64_t[]", below, require_writable=True)
        walk.below_room = room
        _read_ahead(walk.file, pages)
        fault = lib.kvstore_check_level(
            walk, ffi.from_buffer("uint64_t[]", pages), len(pages), kind, is_leaf
        )
        if fault == lib.KVSTORE_TREE_READ:
            raise OSError(ffi.errno, os.strerror(ffi.errno))
        if fault:
            raise _BrokenError(_COMPLAINTS[fault].format(page=walk.page, name=name))
        below = below[: walk.below_count]
        branches, leaves = branches + len(pages) * (not is_leaf), len(pages) * is_leaf
        entries = walk.entries
    values = values[: walk.value_count]
    found = (branches, leaves, int(values["pages"].sum()), entries)
    stated = (tree.branches, tree.leaves, tree.overflow, tree.entries)
    _demand(found == stated, f"database {name} has {found}, expected {stated}")
    return values


def _read_ahead(fd: int, pages: NDArray[np.uint64]) -> None:
    """Read ahead the pages of the next level in file order, neighbouring pages in one read."""
    pages = np.sort(pages)
    begins = np.flatnonzero(np.diff(pages // _WINDOW, prepend=_NOWHERE))
    firsts, lasts = pages[begins], pages[np.append(begins[1:], len(pages)) - 1]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        if last < 2**63 // PAGE_BYTES:
            size = (last - first + 1) * PAGE_BYTES
            os.posix_fadvise(fd, first * PAGE_BYTES, size, os.POSIX_FADV_WILLNEED)


def _meta(fd: int, number: int) -> _Meta:
    data = os.pread(fd, _META.size, number * PAGE_BYTES)
    _demand(len(data) == _META.size, f"page {number} is beyond the end of the file")
    found, _, flags, _, _, magic, version, _, map_bytes, free, main, last, transaction = (
        _META.unpack(data)
    )
    page_bytes, free_flags, *_ = _RECORD.unpack(free)
    main_pad, main_flags, *_ = _RECORD.unpack(main)
    _demand(
        (found, flags, magic, version, page_bytes)
        == (number, _META_PAGE, _MAGIC, _VERSION, PAGE_BYTES)
        and map_bytes % PAGE_BYTES == 0
        and map_bytes < 2**47
        and (free_flags, main_flags, main_pad) == (_INTEGER_KEYS, 0, 0)
        and transaction % _METAS == (number if transaction else 0),
        f"meta page {number} is corrupt",
    )
    return _Meta(_tree(free), _tree(main), last, transaction)


def _tree(record: bytes) -> Tree:
    """Return the record of a database as a C struct."""
    tree = ffi.new("struct kvstore_tree *")
    ffi.memmove(tree, record, _RECORD.size)
    found: Tree = tree[0]
    return found
