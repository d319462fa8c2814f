"""Saves out of an engine's pages and loads into them, in background threads.

It knows prefixes, pages and tiers. What it copies was decided by a lookup, or by the engine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.context import Context
from kvstore.cache.entries import Stored
from kvstore.cache.match import Hold
from kvstore.cache.prefix import Prefix
from kvstore.frame import Frames
from kvstore.transfer import BARRIER_SECONDS, Job, TaskThread

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
"""What must have happened before an engine's pages may be read."""


def await_event(event: Event | None, job: Job | None = None) -> bool:
    """Wait until an engine has written its pages; say whether it has, within the deadline.

    A job that is cancelled does not wait on, unless a device is to be reached: that cannot be left.
    """
    if isinstance(event, threading.Event):
        for _ in range(math.ceil(BARRIER_SECONDS / POLL_SECONDS)):
            if event.wait(POLL_SECONDS) or (job is not None and job.is_cancelled):
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

    def read_blocks(
        self,
        prefix: Prefix,
        resident: Mapping[str, int],
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        /,
    ) -> int:
        """Copy verified blocks to host entries; return where that ended."""
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
    hold: Hold


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
                self._threads[name] = TaskThread(f"kvstore-{name}", QUEUED_JOBS)
            return self._threads[name].submit(task)

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
        end = at * size
        while not job.is_cancelled:
            until = min(stop, at + self._chunk)
            entries = save.source.gather(at * size, until * size)
            part = self._store(save, save.prefix.cut(until), entries, at * size)
            end, at = part.end, until
            if part.dropped or at == stop:
                break
        job.stored = Stored(end, begin - first, stop - end // size)

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
        size = self._block_tokens
        at, stop, done = load.start // size, load.stop // size, load.start
        try:
            while at < stop and not job.is_cancelled:
                until = min(stop, at + self._chunk)
                entries = self._tiers.format.empty(until - at)
                have = self._tiers.read_blocks(load.prefix, load.resident, at, until, entries)
                begin, end = max(load.start, at * size), have * size
                if begin < end and self._copy(job, load, entries, at * size, begin, end):
                    done = end
                at = until if have == until else stop
        finally:
            self._tiers.release(load.hold)
            self._conclude(job, load, done)

    def _copy(
        self,
        job: Job,
        load: Load,
        entries: Mapping[str, NDArray[np.uint8]],
        base: int,
        begin: int,
        end: int,
    ) -> bool:
        """Copy tokens ``[begin, end)`` layer by layer; say whether all of them were.

        ``entries`` start at token ``base``.
        """
        groups = self._tiers.format.layout.global_groups
        order = sorted(
            (layer, number, position)
            for number, group in enumerate(groups)
            for position, layer in enumerate(group.layers)
        )
        for layer, number, position in order:
            if job.is_cancelled:
                return False
            group = groups[number]
            ratio = group.tokens_per_entry
            rows = entries[group.name][position, (begin - base) // ratio : (end - base) // ratio]
            load.target.scatter(group, position, begin // ratio, rows)
            if end == load.stop:
                job.mark_ready(group.name, layer)
        return True

    def _conclude(self, job: Job, load: Load, done: int) -> None:
        size = self._block_tokens
        job.loaded_tokens = done
        job.failed_blocks = tuple(range(done // size, load.stop // size))
