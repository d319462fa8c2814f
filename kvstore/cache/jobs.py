"""Background saves from an engine's pages and loads into them; a lookup or the engine has chosen the blocks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.entries import Stored, StoreOptions
from kvstore.cache.host_reads import HostReads
from kvstore.cache.leases import Leases
from kvstore.cache.match import PinSet
from kvstore.cache.ssd_reads import Limits
from kvstore.cache.writes import Writes
from kvstore.frame.format import Frames
from kvstore.frame.geometry import PartBatch
from kvstore.identity.chain import Prefix
from kvstore.layout import LayerGroup, Layout
from kvstore.store.context import Context
from kvstore.transfer.interrupts import BARRIER_SECONDS, uninterrupted
from kvstore.transfer.job import Job
from kvstore.transfer.tasks import TaskThread

if TYPE_CHECKING:
    from kvstore.tier.engine_copy import PagedEntries

STAGING_BYTES = 64 << 20
"""Most host memory of a job, if one block fits: larger copies are not faster, and engines leave far more free."""
POLL_SECONDS = 0.02  # interval at which a wait for an event checks for cancellation
QUEUED_JOBS = 256  # most jobs in a thread's queue: vLLM runs 256 requests by default


class DeviceEvent(Protocol):
    """An event of a device, such as ``torch.cuda.Event``."""

    def synchronize(self) -> object:
        """Wait until the device has reached the event."""
        ...


Event = threading.Event | DeviceEvent
"""An event after which an engine's pages may be read or written."""


def await_event(event: Event | None, job: Job | None = None, deadline: float = math.inf) -> bool:
    """Wait for an event; return whether it occurred within the deadline and ``BARRIER_SECONDS``.

    Cancelling ``job`` ends the wait, except for a device event, whose wait cannot be interrupted.
    """
    if isinstance(event, threading.Event):
        for _ in range(math.ceil(BARRIER_SECONDS / POLL_SECONDS)):
            if event.wait(POLL_SECONDS) or (job is not None and job.is_cancelled):
                break
            if time.monotonic() >= deadline:
                break
        return event.is_set()
    if event is not None:
        event.synchronize()
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save of tokens ``[start, len(prefix.hashes) * block_tokens)`` from pages."""

    prefix: Prefix
    source: PagedEntries
    start: int
    after: Event | None
    options: StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load of entries of tokens ``[start, stop)`` into pages; ``pins`` protect the blocks."""

    prefix: Prefix
    resident: Mapping[str, int]
    target: PagedEntries
    start: int
    stop: int  # a block boundary, like the end of every hit
    pins: PinSet
    after: Event | None = None  # event before which the pages must not be written
    deadline: float = math.inf  # on the clock of ``time.monotonic``


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One step of a load: blocks ``[first, stop)`` of the layers of a batch."""

    batch: PartBatch
    first: int
    stop: int


class Jobs:
    """Background jobs of one open store, on one thread for saves and one for loads, which never wait for saves."""

    def __init__(
        self,
        context: Context,
        frame_format: Frames,
        reads: HostReads,
        writes: Writes,
        leases: Leases,
    ) -> None:
        self._context = context
        self._format = frame_format
        self._reads = reads
        self._writes = writes
        self._leases = leases
        self._block_tokens = frame_format.block_tokens
        self._save_blocks = max(1, STAGING_BYTES // frame_format.payload_bytes)
        self._threads: dict[str, TaskThread] = {}
        self._lock = threading.Lock()
        self._is_closing = False

    def _submit(self, name: str, task: Callable[[], None]) -> bool:
        """Queue a task for the named thread; return whether there was space."""
        with self._lock:
            if self._is_closing:
                return False
            if name not in self._threads:
                uninterrupted(partial(self._make_thread, name))
            return self._threads[name].submit(task)

    def _make_thread(self, name: str) -> None:
        self._threads[name] = TaskThread(f"kvstore-{name}", QUEUED_JOBS)

    def save(self, save: Save) -> Job:
        """Start a save. After ``close``, or with a full queue, it is dropped and counted."""
        job = Job()
        if not self._submit("save", partial(job.run, partial(self._save, save=save))):
            count = len(save.prefix.hashes) - save.start // self._block_tokens
            self._context.count_drop("closed" if self._is_closing else "queue_full", count)
            job.stored = Stored(save.start, 0, count)
            job.finish()
        return job

    def load(self, load: Load) -> Job:
        """Start a load. After ``close``, or with a full queue, it loads nothing."""
        groups = self._format.layout.global_groups
        job = Job([(group.name, layer) for group in groups for layer in group.layers])
        if not self._submit("load", partial(job.run, partial(self._load, load=load))):
            self._leases.release(load.pins)
            self._conclude(job, load, load.start)
            job.finish()
        return job

    def drain(self) -> None:
        """Wait until every save started before has offered its blocks."""
        if "save" in self._threads:
            self._threads["save"].drain()

    def close(self) -> None:
        """Finish queued jobs and stop the threads."""
        with self._lock:
            self._is_closing = True
        for thread in self._threads.values():
            thread.close()

    def _save(self, job: Job, save: Save) -> None:
        size, stop = self._block_tokens, len(save.prefix.hashes)
        first = save.start // size
        if job.is_cancelled or not await_event(save.after, job):
            if not job.is_cancelled:
                self._context.count_drop("not_written", stop - first)
            job.stored = Stored(save.start, 0, stop - first)
            return
        known = min(stop, self._writes.known_blocks(save.prefix))
        if (
            known < first or not self._writes.is_owner
        ):  # refused for any entries, so none are copied
            job.stored = self._store(save, save.prefix, {}, save.start)
            return
        at = begin = max(first, known)  # known blocks are not copied from the pages
        end, present = at * size, begin - first
        while not job.is_cancelled:
            until = min(stop, at + self._save_blocks)
            with job.copying() as may_copy:
                if not may_copy:
                    break
                entries = save.source.gather(at * size, until * size)
            part = self._store(save, save.prefix.cut(until), entries, at * size)
            end, at, present = part.end, until, present + part.present
            if part.dropped or at == stop:
                break
        job.stored = Stored(end, present, stop - end // size)

    def _store(
        self, save: Save, prefix: Prefix, entries: Mapping[str, NDArray[np.uint8]], start: int
    ) -> Stored:
        is_last = len(prefix.hashes) == len(save.prefix.hashes)
        is_pinned = save.options.is_pinned and is_last
        return self._writes.store(
            prefix, entries, start, replace(save.options, is_pinned=is_pinned)
        )

    def _load(self, job: Job, load: Load) -> None:
        """Load all blocks of one batch after another; a chunk is read while the previous one is copied.

        A bad block ends the result, even if earlier batches had read it. With a deadline there is one batch of all
        layers, so that the blocks loaded in time are usable. The first chunk is read before ``after`` occurs and
        copied then.
        """
        size = self._block_tokens
        first, end = load.start // size, load.stop // size
        is_timed = load.deadline < math.inf
        part_batches = (self._format.whole,) if is_timed else self._format.part_batches(end - first)
        chunks = [chunk for batch in part_batches for chunk in _chunks(batch, first, end)]
        most = max(
            ((chunk.stop - chunk.first) * chunk.batch.block_bytes for chunk in chunks), default=0
        )
        stages = [_Stage(self._format, most) for _ in chunks[:2]]
        limits = Limits(load.deadline, lambda: job.is_cancelled)
        done, underway = load.start, None
        try:
            for number, chunk in enumerate([*chunks, None]):
                begun = None
                if chunk is not None and chunk.first < end and not job.is_cancelled:
                    stop = min(chunk.stop, end)
                    room = stages[number % 2].room(chunk.batch, stop - chunk.first)
                    reading = self._reads.begin(
                        *(load.prefix, load.resident, chunk.first, stop, room),
                        batch=chunk.batch,
                        limits=limits,
                    )
                    begun = chunk, reading
                if underway is not None:
                    before, reading = underway
                    have = self._reads.finish(reading)
                    end = min(end, have) if have < before.stop else end
                    until = min(have, end) * size
                    is_copied = self._copy(job, load, before, reading.entries, until)
                    if is_copied and before.batch is part_batches[-1]:
                        done = max(done, until)
                elif not await_event(load.after, job, load.deadline):
                    end = first
                underway = begun
        finally:
            self._leases.release(load.pins)
            self._conclude(job, load, done)

    def _copy(
        self,
        job: Job,
        load: Load,
        chunk: _Chunk,
        entries: Mapping[str, NDArray[np.uint8]],
        until: int,
    ) -> bool:
        """Copy a chunk's tokens below ``until`` layer by layer; return whether all were copied."""
        base = chunk.first * self._block_tokens
        begin = max(load.start, base)
        if until <= begin:
            return False
        is_last = until == load.stop
        for layer, group, row in _in_order(self._format.layout, chunk.batch):
            ratio = group.tokens_per_entry
            rows = entries[group.name][row, (begin - base) // ratio : (until - base) // ratio]
            with job.copying() as may_copy:
                if not may_copy:
                    return False
                load.target.scatter(group, group.layers.index(layer), begin // ratio, rows)
            if is_last:
                job.mark_ready(group.name, layer)
        return True

    def _conclude(self, job: Job, load: Load, done: int) -> None:
        size = self._block_tokens
        job.loaded_tokens = done
        job.failed_blocks = tuple(range(done // size, load.stop // size))


def _chunks(batch: PartBatch, first: int, stop: int) -> list[_Chunk]:
    """Cut blocks ``[first, stop)`` of a batch into chunks of at most half the staging memory."""
    step = max(1, STAGING_BYTES // 2 // max(1, batch.block_bytes))
    return [_Chunk(batch, at, min(stop, at + step)) for at in range(first, stop, step)]


class _Stage:
    """A host buffer used by one chunk of a load after another."""

    def __init__(self, frames: Frames, size: int) -> None:
        self._frames = frames
        self._memory = np.empty(size, np.uint8)

    def room(self, batch: PartBatch, blocks: int) -> dict[str, NDArray[np.uint8]]:
        """Return arrays for entries of some blocks of a batch; they reuse the last call's memory."""
        found, at = {}, 0
        for name, shape in self._frames.empty(0, batch).items():
            layers, _, entry_bytes = shape.shape
            rows = blocks * self._frames.entries[name]
            size = layers * rows * entry_bytes
            found[name] = self._memory[at : at + size].reshape(layers, rows, entry_bytes)
            at += size
        return found


def _in_order(layout: Layout, batch: PartBatch) -> list[tuple[int, LayerGroup, int]]:
    """Return ``(layer, group, row in the group's entries)`` of a batch's layers, in layer order."""
    return sorted(
        (
            (layer, group, row)
            for group in layout.global_groups
            for row, layer in enumerate(n for n in group.layers if n in batch.layers)
        ),
        key=lambda found: found[0],
    )
