"""Doing what was decided: a writer thread, jobs in the background, calls that Ctrl-C does not cut in two.

Callers may be interrupted between any two instructions. A lock is entered as itself, which is one
instruction, and never through its condition, which is a call.

Nothing here chooses a block. What a batch evicts, what becomes visible when, and what a job copies,
is the business of the callback that the cache hands over.
"""

from __future__ import annotations

import _thread
import contextvars
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvstore.checks import integer, text
from kvstore.errors import StoreError
from kvstore.identity.block import BlockKey

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.010
"""How long a commit waits for one more block: group commit at 64 blocks, 16 MB or 10 ms without any.
Ten milliseconds after the first would cut a batch in two that takes longer to frame, and two commits
wait for the disk twice. docs/decisions/0009."""
LINGERS = 10
"""How many times as long a commit waits in all, for blocks that come slowly."""
BARRIER_SECONDS = 120.0
"""Deadline of a flush: a disk that takes longer is as good as failed."""


T = TypeVar("T")


@dataclass(slots=True)
class QueuedBlock(Generic[T]):
    """A framed block that waits for its commit."""

    key: BlockKey
    parent: BlockKey
    number: int
    frame: bytearray
    ticket: T
    """What the blocks of one request have in common."""


def _taken() -> threading.Lock:
    """Return a lock that is let go of when something has happened: waited for in one instruction.

    An event is entered through a condition, and whoever is cut off in it holds up who sets it.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True)
class _Barrier:
    done: threading.Lock = field(default_factory=_taken)


class Writer(Generic[T]):
    """The one thread that writes a tier.

    ``commit`` is called in that thread with blocks in the order they were queued, parents before
    children. It may drop blocks; it must not raise for what a medium can do. What it raises all
    the same is logged, kept for ``failure``, and the thread goes on.
    """

    def __init__(
        self,
        commit: Callable[[list[QueuedBlock[T]]], None],
        *,
        commit_blocks: int,
        queue_blocks: int,
    ) -> None:
        self._commit = commit
        self._batch_blocks = commit_blocks
        self._queue_blocks = queue_blocks
        self._items: deque[QueuedBlock[T] | _Barrier] = deque()
        self._queued = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closing = False
        self._has_ended = False
        self.failure: BaseException | None = None
        """The last exception that ``commit`` let through: a bug, not a disk."""
        self._thread = threading.Thread(target=self._run, name="kvstore-writer", daemon=True)
        self._thread.start()

    @property
    def queued_blocks(self) -> int:
        """Blocks that wait."""
        return self._queued

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until one more block fits, at most ``seconds``; say whether it does."""
        limit = min(max(0.0, seconds), BARRIER_SECONDS)
        with self._lock:
            return (
                self._changed.wait_for(
                    lambda: self._is_closing or self._queued < self._queue_blocks, limit
                )
                and not self._is_closing
            )

    @property
    def is_closing(self) -> bool:
        """Say whether nothing is taken any more."""
        return self._is_closing

    def submit(self, block: QueuedBlock[T]) -> bool:
        """Queue a block; say whether it was taken, which it is until the writer closes.

        Callers ask for room first; one caller may overshoot by one block.
        """
        with self._lock:
            if self._is_closing:
                return False
            self._items.append(block)
            self._queued += 1
            self._changed.notify_all()
            return True

    def drain(self) -> None:
        """Return when everything queued before is committed or dropped.

        Raises:
            StoreError: if that takes longer than the deadline.
        """
        barrier = _Barrier()
        with self._lock:
            if self._has_ended:
                return
            self._items.append(barrier)
            self._changed.notify_all()
        if not barrier.done.acquire(timeout=BARRIER_SECONDS):
            msg = f"the writer did not finish within {BARRIER_SECONDS:.0f} s; is the disk stalled?"
            raise StoreError(msg)

    def close(self) -> None:
        """Commit what waits, then stop the thread."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(BARRIER_SECONDS)

    def _next_batch(self) -> list[QueuedBlock[T]] | _Barrier | None:
        """Wait for work: a batch, a barrier, or None at the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._items or self._is_closing)
            if not self._items:
                self._has_ended = True  # known under the lock: nobody waits for an ended thread
                return None
            first = self._items[0]
            if isinstance(first, _Barrier):
                self._items.popleft()
                return first
            limit = time.monotonic() + LINGERS * LINGER_SECONDS
            while self._queued < self._batch_blocks and not self._must_hurry():
                if not self._changed.wait(min(LINGER_SECONDS, limit - time.monotonic())):
                    break
            batch: list[QueuedBlock[T]] = []
            while self._items and len(batch) < self._batch_blocks:
                item = self._items[0]
                if isinstance(item, _Barrier):
                    break
                batch.append(item)
                self._items.popleft()
            return batch

    def _must_hurry(self) -> bool:
        return self._is_closing or isinstance(self._items[-1], _Barrier)

    def _run(self) -> None:
        while (work := self._next_batch()) is not None:
            if isinstance(work, _Barrier):
                work.done.release()
                continue
            try:
                self._commit(work)
            except BaseException as error:  # the thread must live: recorded, and told at flush
                self.failure = error
                logger.exception("a commit of %d blocks failed", len(work))
            with self._lock:
                self._queued -= len(work)
                self._changed.notify_all()


Part = tuple[str, int]
"""A group and one of its layers."""


class Job:
    """Work on a caller's memory that goes on in the background.

    Results are final once ``done``. Whatever goes wrong shortens them; nothing is raised here.

    Threads: any thread may ask, wait and cancel.
    """

    def __init__(self, parts: Collection[Part] = ()) -> None:
        """``parts`` are the groups and layers that ``wait_group`` may ask for."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._parts = frozenset(parts)
        self._ready: set[Part] = set()
        self._is_copying = False
        self._is_done = False
        self.is_cancelled = False
        self.loaded_tokens = 0
        """Tokens ``[0, loaded_tokens)`` are where the caller wanted them, from its ``start`` on."""
        self.failed_blocks: tuple[int, ...] = ()
        """Numbers of the blocks that were wanted and are not there."""
        self.stored: Any = None
        """The ``Stored`` of a save; None for a load, and for a save that never ran."""
        self.error: BaseException | None = None
        """What the work let through: a bug, not a disk. It is logged."""

    @property
    def done(self) -> bool:
        """Say whether nothing touches the caller's memory any more."""
        return self._is_done

    def wait(self, timeout: float = BARRIER_SECONDS) -> bool:
        """Wait at most ``timeout`` seconds; say whether the job is done."""
        with self._lock:
            return self._changed.wait_for(lambda: self._is_done, timeout)

    def wait_group(self, group: str, layer: int, timeout: float = BARRIER_SECONDS) -> bool:
        """Wait until one layer's entries of everything wanted are in place; say whether they are.

        False if the job was cancelled, fell short, or takes longer than ``timeout`` seconds.

        Raises:
            ValueError: for a layer that the job does not load.
        """
        part = (text(group, "group"), integer(layer, "layer"))
        if part not in self._parts:
            msg = f"this job loads no layer {layer} of group {group!r}, expected one of {sorted(self._parts)}"
            raise ValueError(msg)
        with self._lock:
            self._changed.wait_for(lambda: self._is_done or part in self._ready, timeout)
            return part in self._ready

    def cancel(self) -> None:
        """Stop as soon as possible; return after the last copy that touches the caller's memory.

        It waits for a copy that is under way, and neither for the job's turn nor for room in a queue:
        the job may be ``done`` later, and touches nothing on its way there.

        Raises:
            StoreError: if that takes longer than the deadline; then the memory is still in use.
        """
        with self._changed:
            self.is_cancelled = True
            is_free = self._changed.wait_for(lambda: not self._is_copying, BARRIER_SECONDS)
        if not is_free:
            msg = f"a job did not stop within {BARRIER_SECONDS:.0f} s; is the disk or the device stalled?"
            raise StoreError(msg)

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Say whether the caller's memory may be touched in this block. For the work itself."""
        with self._changed:
            self._is_copying = not self.is_cancelled
        try:
            yield self._is_copying
        finally:
            with self._changed:
                self._is_copying = False
                self._changed.notify_all()

    def mark_ready(self, group: str, layer: int) -> None:
        """Note that one layer is in place. For the work itself."""
        with self._lock:
            self._ready.add((group, layer))
            self._changed.notify_all()

    def run(self, work: Callable[[Job], None]) -> None:
        """Do the work, and note what it let through and that it has ended. For whoever runs it."""
        try:
            work(self)
        except BaseException as error:  # its thread must live: recorded, and told by the job
            self.error = error
            logger.exception("a background job failed")
        self.finish()

    def finish(self) -> None:
        """Note that the work has ended. For whoever refuses it."""
        with self._lock:
            self._is_done = True
            self._changed.notify_all()


class TaskThread:
    """One thread that runs tasks in the order they came, with a bounded queue."""

    def __init__(self, name: str, bound: int) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._bound = bound
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Tasks that wait."""
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> bool:
        """Queue a task, which must not raise; say whether it was taken."""
        with self._lock:
            if self._is_closing or len(self._tasks) >= self._bound:
                return False
            self._tasks.append(task)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Run what waits, then stop the thread."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(BARRIER_SECONDS)

    def drain(self) -> None:
        """Return when every task queued before is done.

        Raises:
            StoreError: if that takes longer than the deadline.
        """
        mark = _taken()
        with self._lock:
            if self._is_closing:
                return
            self._tasks.append(mark.release)
            self._changed.notify_all()
        if not mark.acquire(timeout=BARRIER_SECONDS):
            msg = f"jobs did not finish within {BARRIER_SECONDS:.0f} s; is the disk or the device stalled?"
            raise StoreError(msg)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._tasks or self._is_closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()


class Errand:
    """A list of places ``[0, count)`` that whoever comes along works through, run by run, in order.

    ``work(first, stop)`` does one run and returns where it ended; a run that ends early, or raises,
    is the last that counts. Runs are begun in order, so what is done from the start on without a gap
    is known at any time.

    Threads: any number may help at once.
    """

    def __init__(
        self,
        count: int,
        run: int,
        work: Callable[[int, int], int],
        *,
        deadline: float = math.inf,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """``deadline`` is of ``time.monotonic``. Past it, or once cancelled, no run is begun."""
        self._run = run
        self._work = work
        self._deadline = deadline
        self._is_cancelled = is_cancelled
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._end = self.count = count
        """No place from here on is begun or counts."""
        self._underway: set[int] = set()
        self._error: BaseException | None = None

    @property
    def runs(self) -> int:
        """How many runs there are in all."""
        return -(-self.count // self._run)

    def help(self) -> None:
        """Do runs until none is left to begin."""
        while (first := self._take()) is not None:
            end = first
            try:
                end = self._work(first, min(first + self._run, self.count))
            except BaseException as error:  # its thread must live: raised by ``finish``
                self._error = error
            with self._lock:
                self._underway.discard(first)
                if end < min(first + self._run, self.count):
                    self._end = min(self._end, end)
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._lock:
            if self._has_begun:
                return None
            first = self._next
            self._next = min(first + self._run, self.count)
            self._underway.add(first)
            return first

    @property
    def _has_begun(self) -> bool:
        """Whether every run is begun that will be."""
        return (
            self._next >= self._end
            or time.monotonic() >= self._deadline
            or (self._is_cancelled is not None and self._is_cancelled())
        )

    def finish(self, *, leaves: bool = False) -> int:
        """Wait for what is underway; return up to where all is done.

        Who ``leaves`` does so at the deadline; runs that are underway then do not count.
        """
        with self._lock:
            seconds = max(0.0, self._deadline - time.monotonic()) if leaves else math.inf
            timeout = seconds if seconds < threading.TIMEOUT_MAX else None
            self._changed.wait_for(lambda: not self._underway and self._has_begun, timeout)
            self._end = min(self._end, self._next, *self._underway)
            if self._error is not None:
                raise self._error
            return self._end


class Crew:
    """Threads that help with errands, made when first asked.

    Who has an errand works on it too, so nobody waits for a thread that is busy; only who leaves at a
    deadline does not, as a disk may hang.
    """

    def __init__(self, name: str, threads: int) -> None:
        """``threads`` besides their callers' own; 0 for none."""
        self._name = name
        self._threads = threads
        self._waiting: deque[Errand] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._started = 0
        self._is_closing = False

    def begin(self, errand: Errand) -> None:
        """Let threads begin with an errand; how many come depends on who is free."""
        wanted = min(self._threads, errand.runs)
        with self._lock:
            if self._is_closing:
                return
            while self._started < wanted:
                self._started += 1
                name = f"{self._name}-{self._started}"
                unharmed(threading.Thread(target=self._serve, name=name, daemon=True).start)
            self._waiting.extend([errand] * wanted)
            self._changed.notify(wanted)

    def finish(self, errand: Errand, *, leaves: bool = False) -> int:
        """Help with an errand and wait for its end; who ``leaves`` at its deadline does not help.

        Where there are no threads, who leaves helps too, and is held up by a run that hangs.
        """
        if not (leaves and self._threads):
            errand.help()
        return errand.finish(leaves=leaves)

    def close(self) -> None:
        """Let the threads end when they are through with what they do."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                errand = self._waiting.popleft()
            errand.help()


class _Call(Generic[T]):
    """A call that a thread of its own makes, once."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self._running = _taken()
        self.results: list[T] = []
        """What it returned, if it did."""
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Let a thread make the call.

        Not by ``Thread.start``, in which whoever is cut off may hold up the thread for ever: that is
        called where no signal comes. It gives the thread its name, in logs too.
        """
        try:
            _thread.start_new_thread(self._start, ())
        except RuntimeError:  # at the end of the interpreter, or for want of threads
            self.run()

    def _start(self) -> None:
        try:
            threading.Thread(target=self.run, name="kvstore-call", daemon=True).start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        """Make the call, unless it is called off."""
        if self._claim.acquire(blocking=False):
            try:
                self.results.append(self._work())
            except BaseException as error:  # raised where the call is waited for
                self.error = error
            finally:
                self._running.release()

    def wait(self) -> None:
        """Wait for its end."""
        with self._running:
            pass

    def settle(self) -> None:
        """Call it off, or wait for its end if it has begun."""
        if not self._claim.acquire(blocking=False):
            self.wait()


def unharmed(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return what ``work`` returns, with nothing half done if Ctrl-C comes meanwhile.

    Signals raise in the main thread alone, so there it is done by another one. The first Ctrl-C waits
    for its end, and for ``undo`` of its result, before it is raised; a second one leaves at once, and
    the work goes on to its end.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    call = _Call(functools.partial(contextvars.copy_context().run, work))
    try:
        call.begin()
        call.wait()
    except BaseException:
        call.settle()
        if undo is not None and call.results:
            unharmed(functools.partial(undo, call.results[0]))
        raise
    if call.error is not None:
        raise call.error
    return call.results[0]
