"""A thread that runs background tasks from a bounded queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvstore.transfer.interrupts import BARRIER_SECONDS, taken_lock, wait_released


class TaskThread:
    """A thread that runs tasks in the order of submission, at most ``bound`` queued."""

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
        """Number of queued tasks."""
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> bool:
        """Queue a task, which must not raise; return whether it was accepted."""
        with self._lock:
            if self._is_closing or len(self._tasks) >= self._bound:
                return False
            self._tasks.append(task)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Run the queued tasks, then stop the thread."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(BARRIER_SECONDS)

    def drain(self) -> None:
        """Wait until every task queued before is done. Raises ``StoreError`` after ``BARRIER_SECONDS``."""
        mark = taken_lock()
        with self._lock:
            if self._is_closing:
                return
            self._tasks.append(mark.release)
            self._changed.notify_all()
        wait_released(mark, "jobs", "disk or the device")

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._tasks or self._is_closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
