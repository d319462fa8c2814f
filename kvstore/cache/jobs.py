"""Saves out of an engine's pages and loads into them, in background threads.

It knows prefixes, pages and tiers. What it copies was decided by a lookup, or by the engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.entries import Stored
from kvstore.cache.match import Hold
from kvstore.cache.reading import Limits
from kvstore.frame.format import Frames, Wave
from kvstore.identity.chain import Prefix
from kvstore.layout import LayerGroup, Layout
from kvstore.store.context import Context
from kvstore.transfer.interrupts import BARRIER_SECONDS, unharmed
from kvstore.transfer.job import Job
from kvstore.transfer.tasks import TaskThread

if TYPE_CHECKING:
    from kvstore.tier.paged import PagedEntries

STAGING_BYTES = 64 << 20
"""Most host memory that a job takes at a time, if one block fits: above the sizes at which larger
copies gain nothing, far below what an engine leaves free."""
POLL_SECONDS = 0.02
"""How often one that waits for an event looks whether it was cancelled: soon enough for a request that
is over, too seldom to cost anything."""
QUEUED_JOBS = 256
"""Most jobs that wait for a thread. One holds references and no copies; vLLM runs at most 256
requests at a time by default, so one of each fits."""


class DeviceEvent(Protocol):
    """Something that a device reaches, such as ``torch.cuda.Event``."""

    def synchronize(self) -> object:
        """Return when it was reached."""
        ...


Event = threading.Event | DeviceEvent
"""What must have happened before an engine's pages may be read, or written."""


def await_event(event: Event | None, job: Job | None = None, deadline: float = math.inf) -> bool:
    """Wait until an engine is through with its pages; say whether it is, within the deadline.

    A job that is cancelled does not wait on, unless a device is to be reached: that cannot be left.
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


class Tiers(Protocol):
    """What jobs need of the tiers."""

    context: Context
    format: Frames

    @property
    def is_owner(self) -> bool:
        """Say whether this process writes."""
        ...

    def known_blocks(self, prefix: Prefix, /) -> int:
        """Return how many leading blocks are stored or queued."""
        ...

    def store(
        self,
        prefix: Prefix,
        namespace: Mapping[str, Any],
        entries: Mapping[str, NDArray[np.uint8]],
        start: int,
        *,
        wait: float,
        ttl: float | None,
        is_pinned: bool,
    ) -> Stored:
        """Queue blocks."""
        ...

    def begin_read(
        self,
        prefix: Prefix,
        resident: Mapping[str, int],
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        /,
        *,
        wave: Wave | None = None,
        limits: Limits | None = None,
    ) -> Callable[[], int]:
        """Begin to copy verified blocks to host entries; return what waits and says where it ended."""
        ...

    def release(self, hold: Hold, /) -> None:
        """Give back what a hold pins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Blocks of tokens ``[start, len(prefix.hashes) * block_tokens)`` on their way out of pages."""

    prefix: Prefix
    namespace: Mapping[str, Any]
    source: PagedEntries
    start: int
    after: Event | None
    wait: float
    ttl: float | None
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Entries of tokens ``[start, stop)`` on their way into pages, pinned by ``hold``."""

    prefix: Prefix
    resident: Mapping[str, int]
    target: PagedEntries
    start: int
    stop: int
    """Where a block ends, as every hit does."""
    hold: Hold
    after: Event | None = None
    """What the pages wait for: until then they are another's."""
    deadline: float = math.inf
    """Of ``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a load reads at a time: blocks ``[first, stop)`` of a wave."""

    wave: Wave
    first: int
    stop: int


class Jobs:
    """The background of one open store: a thread for saves and one for loads, made when first used.

    Two, so that a load that a request waits for never queues behind saves that nobody waits for.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._block_tokens = tiers.format.block_tokens
        self._chunk = max(1, STAGING_BYTES // tiers.format.payload_bytes)
        self._threads: dict[str, TaskThread] = {}
        self._lock = threading.Lock()
        self._is_closing = False

    def _submit(self, name: str, task: Callable[[], None]) -> bool:
        """Give a task to the thread of that name; say whether it was taken."""
        with self._lock:
            if self._is_closing:  # also for a caller that was asked in before: no thread is made
                return False
            if name not in self._threads:
                unharmed(lambda: self._make_thread(name))
            return self._threads[name].submit(task)

    def _make_thread(self, name: str) -> None:
        self._threads[name] = TaskThread(f"kvstore-{name}", QUEUED_JOBS)

    def save(self, save: Save) -> Job:
        """Start a save. One that comes too late, or finds the queue full, is dropped and counted."""
        job = Job()
        if not self._submit("save", lambda: job.run(lambda job: self._save(job, save))):
            count = len(save.prefix.hashes) - save.start // self._block_tokens
            self._tiers.context.count_drop("closed" if self._is_closing else "queue_full", count)
            job.stored = Stored(save.start, 0, count)
            job.finish()
        return job

    def load(self, load: Load) -> Job:
        """Start a load. One that comes too late, or finds the queue full, delivers nothing."""
        groups = self._tiers.format.layout.global_groups
        job = Job([(group.name, layer) for group in groups for layer in group.layers])
        if not self._submit("load", lambda: job.run(lambda job: self._load(job, load))):
            self._tiers.release(load.hold)
            self._conclude(job, load, load.start)
            job.finish()
        return job

    def drain(self) -> None:
        """Return when every save begun before has offered its blocks."""
        if "save" in self._threads:
            self._threads["save"].drain()

    def close(self) -> None:
        """Finish what waits and stop the threads."""
        with self._lock:
            self._is_closing = True
        for thread in self._threads.values():
            thread.close()

    def _save(self, job: Job, save: Save) -> None:
        size, stop = self._block_tokens, len(save.prefix.hashes)
        first = save.start // size
        if job.is_cancelled or not await_event(save.after, job):
            if not job.is_cancelled:
                self._tiers.context.count_drop("not_written", stop - first)
            job.stored = Stored(save.start, 0, stop - first)
            return
        known = min(stop, self._tiers.known_blocks(save.prefix))
        if known < first or not self._tiers.is_owner:  # refused whatever the entries: copy none
            job.stored = self._store(save, save.prefix, {})
            return
        at = begin = max(first, known)  # what is there already is not copied out of the pages
        end, present = at * size, begin - first
        while not job.is_cancelled:
            until = min(stop, at + self._chunk)
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
        self,
        save: Save,
        prefix: Prefix,
        entries: Mapping[str, NDArray[np.uint8]],
        start: int | None = None,
    ) -> Stored:
        return self._tiers.store(
            prefix,
            save.namespace,
            entries,
            save.start if start is None else start,
            wait=save.wait,
            ttl=save.ttl,
            is_pinned=save.is_pinned and len(prefix.hashes) == len(save.prefix.hashes),
        )

    def _load(self, job: Job, load: Load) -> None:
        """Bring wave after wave, each of all blocks: while one piece is copied the next one is read.

        A block that turns out bad ends what counts, also where earlier waves had it. With a deadline
        there is one wave, of all layers, so that what came in time is of use. The first piece is read
        while the pages are not ours yet, and copied when they are.
        """
        size, frames = self._block_tokens, self._tiers.format
        first, end = load.start // size, load.stop // size
        waves = frames.waves(end - first) if load.deadline == math.inf else (frames.whole,)
        pieces = [piece for wave in waves for piece in self._pieces(wave, first, end)]
        sizes = [(piece.stop - piece.first) * piece.wave.block_bytes for piece in pieces]
        most = max(sizes, default=0)
        stages = [_Stage(frames, most) for _ in pieces[:2]]
        limits = Limits(load.deadline, lambda: job.is_cancelled)
        done, underway = load.start, None
        try:
            for number, piece in enumerate([*pieces, None]):
                begun = None
                if piece is not None and piece.first < end and not job.is_cancelled:
                    stop = min(piece.stop, end)
                    room = stages[number % 2].room(piece.wave, stop - piece.first)
                    wait = self._tiers.begin_read(
                        *(load.prefix, load.resident, piece.first, stop, room),
                        wave=piece.wave,
                        limits=limits,
                    )
                    begun = piece, room, wait
                if underway is not None:
                    before, room, wait = underway
                    have = wait()
                    end = min(end, have) if have < before.stop else end
                    until = min(have, end) * size
                    if self._copy(job, load, before, room, until) and before.wave is waves[-1]:
                        done = max(done, until)
                elif not await_event(load.after, job, load.deadline):
                    end = first
                underway = begun
        finally:
            self._tiers.release(load.hold)
            self._conclude(job, load, done)

    def _pieces(self, wave: Wave, first: int, stop: int) -> list[_Piece]:
        """Cut blocks ``[first, stop)`` of a wave into pieces that each fit into half of the memory."""
        step = max(1, STAGING_BYTES // 2 // max(1, wave.block_bytes))
        return [_Piece(wave, at, min(stop, at + step)) for at in range(first, stop, step)]

    def _copy(
        self,
        job: Job,
        load: Load,
        piece: _Piece,
        entries: Mapping[str, NDArray[np.uint8]],
        until: int,
    ) -> bool:
        """Copy a piece's tokens below ``until`` layer by layer; say whether all of them were."""
        base = piece.first * self._block_tokens
        begin = max(load.start, base)
        if until <= begin:
            return False
        is_last = until == load.stop
        for layer, group, row in _in_order(self._tiers.format.layout, piece.wave):
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


class _Stage:
    """Host memory that pieces of a load pass through, one after the other."""

    def __init__(self, frames: Frames, size: int) -> None:
        self._frames = frames
        self._memory = np.empty(size, np.uint8)

    def room(self, wave: Wave, blocks: int) -> dict[str, NDArray[np.uint8]]:
        """Return room for the entries of some blocks of a wave; it takes the place of the last one."""
        found, at = {}, 0
        for name, shape in self._frames.empty(0, wave).items():
            layers, _, entry_bytes = shape.shape
            rows = blocks * self._frames.entries[name]
            size = layers * rows * entry_bytes
            found[name] = self._memory[at : at + size].reshape(layers, rows, entry_bytes)
            at += size
        return found


def _in_order(layout: Layout, wave: Wave) -> list[tuple[int, LayerGroup, int]]:
    """Return the layers of a wave with their groups, and their rows in the group's entries, in order."""
    return sorted(
        (
            (layer, group, row)
            for group in layout.global_groups
            for row, layer in enumerate(n for n in group.layers if n in wave.layers)
        ),
        key=lambda found: found[0],
    )
