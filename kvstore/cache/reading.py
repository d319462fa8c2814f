"""Verified blocks of a prefix out of the SSD tier, several runs at a time.

A load of a long prefix is cut into runs. Threads take them in order, so that the disk always has
the next ones to read while the last ones are checked and copied. Whatever is bad, late or cancelled
ends what counts; runs behind it may have been copied in vain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.frame.format import Frames, Wave
from kvstore.identity.chain import Prefix
from kvstore.store.context import Context
from kvstore.tier.ssd.tier import READ_BATCH, SsdTier
from kvstore.transfer.pool import ParallelTask, ThreadPool

RUN_BYTES = 16 << 20
"""Most bytes of a run, if a block fits: blocks of 3 MB come 15 % faster than one at a time, and smaller
runs let more threads share a load. docs/ssd.md."""
RUNS_AHEAD = 2
"""Runs that the disk is told of before their turn, for each thread: one that is being read and one
that is not kept waiting."""
FEW_BLOCKS = 4
"""From here on blocks are read together: setting that up takes as long as to read three one by one."""

Take = Callable[[int, memoryview], str | None]
"""Given the number of a block and a copy of its frame, whose head is right, hand the payload out; say
what is wrong with it, or None."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a read ends early."""

    deadline: float = math.inf
    """Of ``time.monotonic``. No run is begun after it."""
    is_cancelled: Callable[[], bool] | None = None
    may_leave: bool = True
    """Whether a run that is underway at the deadline, on a disk that hangs perhaps, may be left to
    itself: it will still write to where it was asked to."""

    @classmethod
    def within(cls, seconds: float | None, *, may_leave: bool = True) -> Limits:
        """Return limits that end so many seconds from now, or never."""
        if seconds is None:
            return cls()
        return cls(time.monotonic() + seconds, may_leave=may_leave)

    @property
    def leaves(self) -> bool:
        """Say whether the caller is back by a deadline, whatever the disk does."""
        return self.may_leave and self.deadline < math.inf

    @property
    def is_late(self) -> bool:
        """Say whether the deadline is past."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, slots=True)
class Reading:
    """A read underway; ``Reads.finish`` ends it."""

    prefix: Prefix
    first: int
    errand: ParallelTask
    limits: Limits
    began: float
    faults: dict[int, str]
    """What was wrong, by block. Those behind the first are not known to be more than its consequence."""


class Reads:
    """How prefixes are read from one SSD tier.

    Threads: any.
    """

    def __init__(
        self,
        context: Context,
        frame_format: Frames,
        ssd: SsdTier,
        discard: Callable[[Prefix, int, str], None],
        threads: int,
    ) -> None:
        """``discard`` is told of each bad block; ``threads`` read at once, their callers included."""
        self._context = context
        self._format = frame_format
        self._ssd = ssd
        self._discard = discard
        self._crew = ThreadPool("kvstore-read", threads - 1)
        self._runs_ahead = RUNS_AHEAD * threads

    def close(self) -> None:
        """Let the threads go."""
        self._crew.close()

    def into(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        target: Any,
        *,
        wave: Wave | None = None,
        limits: Limits | None = None,
    ) -> Reading:
        """Begin to read blocks ``[first, stop)`` into a target of the frames that begins there.

        ``wave`` is the one that the target was made for, if it was.
        """
        few = stop - first < FEW_BLOCKS and wave is None
        spare = {} if few else {s: [r] for s, r in self._format.readers(target).items()}

        def take(number: int, frame: memoryview) -> str | None:
            return self._format.scatter(frame, target, number - first)

        def take_many(size: int, start: int, i: int, file: int, offsets: NDArray[np.int64]) -> int:
            number = start + i
            # Of each kind as many as there are threads that read here.
            reader = spare[size].pop() if spare[size] else self._format.readers(target)[size]
            hashes = prefix.run_of_hashes(number, len(offsets))
            ids = prefix.run_of_ids(number, len(offsets))
            done = reader.read(file, offsets, hashes, ids, number - first)
            spare[size].append(reader)
            return done

        is_part = wave is not None and wave != self._format.whole
        bounds = wave.bounds if wave is not None and is_part else None
        takers = {size: partial(take_many, size) for size in spare}
        return self._begin(prefix, first, stop, take, takers, bounds, limits)

    def each(
        self, prefix: Prefix, first: int, stop: int, take: Take, *, limits: Limits | None = None
    ) -> Reading:
        """Begin to read blocks ``[first, stop)`` and give each to ``take``, in any order."""
        return self._begin(prefix, first, stop, take, {}, None, limits)

    def _begin(
        self,
        prefix: Prefix,
        first: int,
        stop: int,
        take: Take,
        takers: Mapping[int, Callable[[int, int, int, NDArray[np.int64]], int]],
        bounds: tuple[int, int] | None,
        limits: Limits | None,
    ) -> Reading:
        """Begin a read; ``takers`` by size are ``TakeMany`` behind the number of a run's first block."""
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
            many = {size: partial(taker, start) for size, taker in takers.items()}
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

        errand = ParallelTask(
            *(stop - first, run, work),
            deadline=limits.deadline,
            is_cancelled=limits.is_cancelled,
        )
        reading = Reading(prefix, first, errand, limits, time.perf_counter(), faults)
        if errand.chunks > 1:
            ssd.will_need(keys[:ahead], bounds)
        if errand.chunks > 1 or limits.leaves:
            self._crew.begin(errand)
        return reading

    def finish(self, reading: Reading) -> int:
        """Wait for the end of a read; return the block where the good ones ended.

        The first bad block is discarded. Where the limits allow it, blocks behind the returned one may
        still be copied for a while, to where they were asked for.
        """
        leaves = reading.limits.leaves
        done = reading.first + self._crew.finish(reading.errand, leaves=leaves)
        with self._context.lock:
            metrics = self._context.metrics
            metrics.read_seconds += time.perf_counter() - reading.began
            late = reading.first + reading.errand.count - done
            if late and done not in reading.faults and reading.limits.is_late:
                metrics.late_blocks += late
                message = (
                    "%d blocks were not read from %s in time: recomputed and counted from here on"
                )
                metrics.say_once("late", message, late, self._ssd.path)
        if done in reading.faults:
            self._discard(reading.prefix, done, reading.faults[done])
        return done
