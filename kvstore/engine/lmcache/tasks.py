"""Asynchronous tasks of LMCache's controllers: bounded queues, event fds and results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

T = TypeVar("T")


CLOSE_SECONDS = 120.0
"""Most time that a close waits for its tasks: a disk that takes longer counts as failed, as in a flush."""


class TaskQueue:
    """A thread that runs tasks in order, with a queue of at most ``bound`` tasks.

    A daemon: a disk that hangs keeps neither a close nor the end of the process waiting for ever.
    """

    def __init__(self, name: str, bound: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._bound = bound
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of queued tasks."""
        return self._tasks.qsize()

    def submit(self, task: Callable[[], None]) -> bool:
        """Queue a task, which must not raise; return False if the queue is full or closed."""
        with self._lock:
            if self._is_closed or self.waiting >= self._bound:
                return False
            self._tasks.put(task)
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        """Run the waiting tasks, then stop the thread; return after ``CLOSE_SECONDS`` at most."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.put(None)
        self._thread.join(CLOSE_SECONDS)


class Tasks(Generic[T]):
    """Tasks of one kind: queue, event fd and pending results. Each result is returned once.

    Threads: any.
    """

    def __init__(
        self, queue: TaskQueue, numbers: Iterator[int], note: Callable[[Exception], None]
    ) -> None:
        """``numbers`` yields task ids. ``note`` is called with the exception of a failed task."""
        self._queue = queue
        self._numbers = numbers
        self._note = note
        self._event = create_event_notifier()
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.refused = 0  # tasks for a full or closed queue

    @property
    def event_fd(self) -> int:
        """Fd that is signalled when a task is done."""
        return int(self._event.fileno())

    def submit(self, work: Callable[[], T], failed: Callable[[], T]) -> int:
        """Queue ``work``; return its id. The result of a failed or refused task is ``failed()``."""
        with self._lock:
            number = next(self._numbers)

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # a controller of LMCache waits for this task
                self._note(error)
                result = failed()
            self._finish(number, result)

        if not self._queue.submit(run):
            with self._lock:
                self.refused += 1
            self._finish(number, failed())
        return number

    def _finish(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
            if not self._is_closed:
                self._event.notify()

    def take(self, number: int) -> T | None:
        """Return the result of a task, once; None before it is done and after."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Return the results of all completed tasks, once."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Close the event fd."""
        with self._lock:
            self._is_closed = True
            self._event.close()
