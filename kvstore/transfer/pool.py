"""Parallel work on a range of positions: a task, and a pool of threads that execute tasks."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.transfer.interrupts import uninterrupted


class ParallelTask:
    """A task over positions ``[0, count)``. Threads claim consecutive chunks in order.

    ``work(first, stop)`` processes one chunk and returns the position where it ended. A chunk that ends early or
    raises is the last that counts. Chunks start in order, so the end of the leading finished positions is always
    known.

    Threads: any number may help at the same time.
    """

    def __init__(
        self,
        count: int,
        chunk: int,
        work: Callable[[int, int], int],
        *,
        deadline: float = math.inf,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """No chunk starts after ``deadline``, on the clock of ``time.monotonic``, or once cancelled."""
        self._chunk = chunk
        self._work = work
        self._deadline = deadline
        self._is_cancelled = is_cancelled
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._end = self.count = count  # positions from here on are not started and do not count
        self._underway: set[int] = set()
        self._error: BaseException | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks of the whole range."""
        return -(-self.count // self._chunk)

    def help(self) -> None:
        """Process chunks until none is left to start."""
        while (first := self._claim()) is not None:
            stop = min(first + self._chunk, self.count)
            end = first
            try:
                end = self._work(first, stop)
            except BaseException as error:  # the thread must continue: ``finish`` raises it
                self._error = error
            with self._lock:
                self._underway.discard(first)
                if end < stop:
                    self._end = min(self._end, end)
                self._changed.notify_all()

    def _claim(self) -> int | None:
        with self._lock:
            if self._has_begun:
                return None
            first = self._next
            self._next = min(first + self._chunk, self.count)
            self._underway.add(first)
            return first

    @property
    def _has_begun(self) -> bool:
        """Whether no further chunk will start."""
        return (
            self._next >= self._end
            or time.monotonic() >= self._deadline
            or (self._is_cancelled is not None and self._is_cancelled())
        )

    def finish(self, *, leaves: bool = False) -> int:
        """Wait for the chunks in progress; return the end of the leading finished positions.

        With ``leaves`` it returns at the deadline; chunks still in progress then do not count.
        """
        with self._lock:
            seconds = max(0.0, self._deadline - time.monotonic()) if leaves else math.inf
            timeout = seconds if seconds < threading.TIMEOUT_MAX else None
            self._changed.wait_for(lambda: not self._underway and self._has_begun, timeout)
            self._end = min(self._end, self._next, *self._underway)
            if self._error is not None:
                raise self._error
            return self._end


class ThreadPool:
    """Threads that help with parallel tasks, started on first use.

    A caller also works on its own task, so it never waits for a busy thread. A caller that leaves at a deadline does
    not, because a read of the disk may hang.
    """

    def __init__(self, name: str, threads: int) -> None:
        """``threads`` is the number in addition to the callers; 0 for none."""
        self._name = name
        self._threads = threads
        self._waiting: deque[ParallelTask] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._started = 0
        self._is_closing = False

    def begin(self, task: ParallelTask) -> None:
        """Assign idle threads to a task."""
        wanted = min(self._threads, task.chunks)
        with self._lock:
            if self._is_closing:
                return
            while self._started < wanted:
                self._started += 1
                name = f"{self._name}-{self._started}"
                uninterrupted(threading.Thread(target=self._serve, name=name, daemon=True).start)
            self._waiting.extend([task] * wanted)
            self._changed.notify(wanted)

    def finish(self, task: ParallelTask, *, leaves: bool = False) -> int:
        """Help with a task and wait for its end, as ``ParallelTask.finish``.

        With ``leaves`` the caller helps only if the pool has no threads, and a hanging read then delays it.
        """
        if not (leaves and self._threads):
            task.help()
        return task.finish(leaves=leaves)

    def close(self) -> None:
        """Stop the threads after their current tasks."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                task = self._waiting.popleft()
            task.help()
