"""Sizes in the data file: pages of a frame, the largest commits, and the eviction watermarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.tier.ssd.records import Record, Records
from kvstore.tier.ssd.values import SsdOptions

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16  # header of an overflow value in LMDB 0.9 (its page header)
COMMIT_BYTES = 16 << 20
"""Largest commit. LMDB keeps a heap copy of each dirty page, so a transaction is bounded. docs/decisions/0009."""
COMMIT_BLOCKS = 64
"""Blocks of the largest commit: 64 take 1.14x of raw pwrite and fdatasync. docs/decisions/0009."""
QUEUE_BYTES = 256 << 20
"""Most bytes that wait for their commit. An engine that does not wait offers a whole prompt at once: this is
300,000 tokens of DeepSeek-V4.1, or 11,000 of a small dense model at 23 KB a token."""
DELETES_PER_COMMIT = 256  # most deletes per transaction (one sync); four commits cause as many
MINIMUM_BLOCKS = 8  # a smaller store would evict all the time. docs/decisions/0009.
_HIGH, _LOW = 0.92, 0.88  # of the cap: 97 % fills without MapFull. docs/decisions/0009.
_MIXED_HIGH, _MIXED_LOW = 0.85, 0.81
"""The same for frames of different sizes, which fragment the free space: 85 % is safe, at 90 % 5 % of commits
fail. docs/decisions/0016."""
_SPARE_COMMITS = 3  # full commits; freed pages are reusable two transactions later
TREE_PAGES_PER_BLOCK = 3  # rewritten at most: one leaf each of `pay`, `meta`, `age`
OVERHEAD_PAGES = 32  # roots, branches, meta pages and free list

IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])


def pages_of(frame_bytes: IntOrArray) -> IntOrArray:
    """Return the pages that LMDB uses for a value of ``frame_bytes``, or for each value of an array."""
    return -(-(PAGE_HEADER_BYTES + frame_bytes) // PAGE_BYTES)


def usage_of(records: Iterable[Record], frame_bytes: int = 2**32) -> Counter[int]:
    """Return the bytes of each namespace's frames in the file, by records; damaged sizes count as ``frame_bytes``."""
    usage: Counter[int] = Counter()
    for record in records:
        usage[record.namespace_id] += pages_of(min(record.frame_bytes, frame_bytes)) * PAGE_BYTES
    return usage


def usage_in(records: Records, frame_bytes: int) -> Counter[int]:
    """Return ``usage_of`` for all records of a store."""
    numbers, which = np.unique(records.namespace_id, return_inverse=True)
    used = np.zeros(len(numbers), np.int64)
    np.add.at(used, which, pages_of(np.minimum(records.frame_bytes, frame_bytes)) * PAGE_BYTES)
    return Counter(dict(zip(numbers.tolist(), used.tolist(), strict=True)))


def commit_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks of the largest commit: 64, or 16 MB, or a 32nd of the cap, but at least one."""
    size = min(COMMIT_BYTES, capacity_bytes // 32)
    return max(1, min(COMMIT_BLOCKS, size // (pages_of(frame_bytes) * PAGE_BYTES)))


def delete_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks of the largest delete, which dirties no more pages than the largest commit."""
    commit = commit_blocks(capacity_bytes, frame_bytes)
    pages = commit * (pages_of(frame_bytes) + TREE_PAGES_PER_BLOCK)
    return max(1, min(DELETES_PER_COMMIT, pages // TREE_PAGES_PER_BLOCK))


def queue_blocks(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the blocks that may wait for their commit: 256 MiB, or a quarter of the cap."""
    return max(2, min(QUEUE_BYTES, capacity_bytes // 4) // frame_bytes)


def spare_bytes(capacity_bytes: int, frame_bytes: int) -> int:
    """Return the bytes that must be free above the high watermark for commits to succeed."""
    pages = pages_of(frame_bytes) + TREE_PAGES_PER_BLOCK
    commit = commit_blocks(capacity_bytes, frame_bytes) * pages * PAGE_BYTES
    return _SPARE_COMMITS * commit + OVERHEAD_PAGES * PAGE_BYTES


def watermarks(options: SsdOptions) -> tuple[int, int]:
    """Return the bytes above which eviction starts, and the bytes at which it stops."""
    capacity = options.capacity_bytes
    high, low = (_MIXED_HIGH, _MIXED_LOW) if options.is_mixed else (_HIGH, _LOW)
    begins = min(int(high * capacity), capacity - spare_bytes(capacity, options.frame_bytes))
    return begins, max(0, begins - int((high - low) * capacity))


def minimum_capacity(frame_bytes: int) -> int:
    """Return the smallest cap that leaves room for ``MINIMUM_BLOCKS`` blocks below the high watermark."""
    blocks = MINIMUM_BLOCKS * (pages_of(frame_bytes) + TREE_PAGES_PER_BLOCK) * PAGE_BYTES
    return blocks + spare_bytes(0, frame_bytes)
