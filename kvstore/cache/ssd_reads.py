"""Reads of verified blocks from the SSD tier, by several threads.

A read of a long prefix is split into runs, which threads process in order, so that the disk reads the next runs while
previous ones are verified and copied. The first bad, late or cancelled block ends the result; later runs may have
been copied in vain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.frame.geometry import PartBatch
from kvstore.identity.chain import Prefix
from kvstore.index.prefix_tree import GONE, NEVER
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import READ_BATCH
from kvstore.tier.ssd.values import BUSY
from kvstore.transfer.pool import ParallelTask, ThreadPool

RUN_BYTES = 16 << 20
"""Most bytes of a run, if a block fits: 15 % faster for blocks of 3 MB than single blocks, and small enough for
several threads to share a load. docs/ssd.md."""
RUNS_AHEAD = 2  # runs hinted to the kernel ahead of each thread: one in progress and one waiting
FEW_BLOCKS = 4  # fewest blocks read as a run: its setup costs as much as three blocks

Take = Callable[[int, memoryview], str | None]
"""Copies the payload of block ``number`` from a frame with a verified head; returns its fault or None."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Conditions that end a read early."""

    deadline: float = math.inf  # by ``time.monotonic``. No run begins after it.
    is_cancelled: Callable[[], bool] | None = None
    may_leave: bool = True
    """Whether the caller may return at the deadline while a run is in progress, for example on a hanging disk. That run
    still writes to its target."""

    @classmethod
    def within(cls, seconds: float | None, *, may_leave: bool = True) -> Limits:
        """Return limits that end ``seconds`` from now; None for never."""
        if seconds is None:
            return cls()
        return cls(time.monotonic() + seconds, may_leave=may_leave)

    @property
    def leaves(self) -> bool:
        """Whether the caller returns at the deadline even if the disk hangs."""
        return self.may_leave and self.deadline < math.inf

    @property
    def is_late(self) -> bool:
        """Whether the deadline is past."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, slots=True)
class Reading:
    """A read in progress; ``SsdReads.finish`` ends it."""

    prefix: Prefix
    first: int
    task: ParallelTask
    limits: Limits
    began: float
    faults: dict[int, str]  # by block number; only the first is certain, others may follow from it


class SsdReads:
    """Reads of prefixes from one SSD tier. Threads: any."""

    def __init__(self, store: OpenStore, threads: int) -> None:
        """``threads`` share a read, including the caller."""
        self._store = store
        self._context = store.context
        self._format = store.format
        self._ssd = store.ssd
        self._pool = ThreadPool("kvstore-read", threads - 1)
        self._runs_ahead = RUNS_AHEAD * threads

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._ssd.path

    def into(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        target: Any,
        *,
        batch: PartBatch | None = None,
        limits: Limits | None = None,
    ) -> Reading:
        """Start reading blocks ``[first, stop)`` into a target from ``first`` on, of the layers of ``batch``."""
        few = stop - first < FEW_BLOCKS and batch is None
        spare = {} if few else {s: [r] for s, r in self._format.readers(target).items()}

        def take(number: int, frame: memoryview) -> str | None:
            return self._format.scatter(frame, target, number - first)

        def take_many(size: int, start: int, i: int, file: int, offsets: NDArray[np.int64]) -> int:
            number = start + i
            # One reader per thread: a reader processes one run at a time.
            reader = spare[size].pop() if spare[size] else self._format.readers(target)[size]
            hashes = prefix.run_of_hashes(number, len(offsets))
            ids = prefix.run_of_ids(number, len(offsets))
            done = reader.read(file, offsets, hashes, ids, number - first)
            spare[size].append(reader)
            return done

        is_part = batch is not None and batch != self._format.whole
        bounds = batch.bounds if batch is not None and is_part else None
        takers = {size: partial(take_many, size) for size in spare}
        return self.each(prefix, first, stop, take, takers, bounds=bounds, limits=limits)

    def each(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        take: Take,
        takers: Mapping[int, Callable[[int, int, int, NDArray[np.int64]], int]] | None = None,
        *,
        bounds: tuple[int, int] | None = None,
        limits: Limits | None = None,
    ) -> Reading:
        """Start reading blocks ``[first, stop)`` and pass each to ``take``, in any order.

        ``takers`` copy runs of frames of one size, by size: see ``TakeMany``. ``bounds`` are the bytes to read of a
        frame, None for all.
        """
        ssd, limits, faults = self._ssd, limits or Limits(), dict[int, str]()
        each = self._format.frame_bytes if bounds is None else max(1, bounds[1] - bounds[0])
        run = max(1, min(READ_BATCH, RUN_BYTES // each))
        ahead = self._runs_ahead * run
        keys, metrics = prefix.keys(first, stop), self._context.metrics

        def take_right(start: int, i: int, frame: memoryview) -> str | None:
            n = start + i
            expected = (prefix.hashes[n], prefix.parent_hash(n), prefix.block_ids(n))
            return self._format.form_of(frame).head_fault(frame, *expected) or take(n, frame)

        def work(at: int, until: int) -> int:
            start = first + at
            many = {size: partial(taker, start) for size, taker in (takers or {}).items()}
            if len(keys) > run:
                ssd.will_need(keys[at + ahead : until + ahead], bounds)
            result = ssd.read(
                *(keys[at:until], partial(take_right, start), many),
                bounds=bounds,
                is_hinted=len(keys) > run,
            )
            with self._context.lock:
                whole = bounds is None
                metrics.read_bytes += result.frame_bytes if whole else result.count * each
            if result.fault is not None:
                faults[start + result.count] = result.fault
            return at + result.count

        task = ParallelTask(
            *(stop - first, run, work),
            deadline=limits.deadline,
            is_cancelled=limits.is_cancelled,
        )
        reading = Reading(prefix, first, task, limits, time.perf_counter(), faults)
        if task.chunks > 1:
            ssd.will_need(keys[:ahead], bounds)
        if task.chunks > 1 or limits.leaves:
            self._pool.begin(task)
        return reading

    def finish(self, reading: Reading) -> int:
        """Wait for the end of a read; return the block after the last good one.

        The first bad block is discarded. If the limits allow leaving, later blocks may still be copied to their target
        for some time.
        """
        leaves = reading.limits.leaves
        done = reading.first + self._pool.finish(reading.task, leaves=leaves)
        with self._context.lock:
            metrics = self._context.metrics
            metrics.read_seconds += time.perf_counter() - reading.began
            late = reading.first + reading.task.count - done
            if late and done not in reading.faults and reading.limits.is_late:
                metrics.late_blocks += late
                message = "%d blocks were not read from %s in time: the hit ends before them; further ones are only counted"
                metrics.warn_once("late", message, late, self._ssd.path)
        if done in reading.faults:
            self._discard(reading.prefix, done, reading.faults[done])
        return done

    def _discard(self, prefix: Prefix, number: int, fault: str) -> None:
        """Count a bad block. The owner also removes it and its descendants."""
        if fault == BUSY:
            self._context.count_transient_error(self.path)
            return
        with self._context.lock:
            self._context.metrics.corrupt_blocks[fault] += 1
            message = "block %d of a prefix in %s is unusable (%s): the hit ends before it; further ones are only counted"
            self._context.metrics.warn_once(f"corrupt {fault}", message, number, self.path, fault)
        if self._store.writer is not None:
            self._store.writer.discard(prefix.head(number + 1))

    def expiry(self, prefix: Prefix, blocks: int) -> float:
        """Return the expiry of the medium's copy of the first ``blocks`` blocks; ``GONE`` without one."""
        if self._store.writer is not None:
            position = self._store.writer.index.match(prefix.head(blocks))
            return position.segment.expires if position.depth == blocks else GONE
        try:
            record = self._ssd.record(prefix.key(blocks - 1))
        except MEDIUM_ERRORS:
            record = None
        return GONE if record is None else record.expires or NEVER
