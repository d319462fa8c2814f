"""A background job: a save or a load on a caller's memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.checks import integer, text
from kvstore.errors import StoreError
from kvstore.transfer.interrupts import BARRIER_SECONDS

logger = logging.getLogger(__name__)

Part = tuple[str, int]
"""A group and one of its layers."""


class Job:
    """A save or a load on the caller's memory that continues in the background.

    Its results are final once ``done``. A failure shortens the results and raises nothing here.

    Threads: any thread may read, wait and cancel.
    """

    def __init__(self, parts: Collection[Part] = ()) -> None:
        """``parts`` are the groups and layers that ``wait_group`` accepts."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._parts = frozenset(parts)
        self._ready: set[Part] = set()
        self._is_copying = False
        self._is_done = False
        self.is_cancelled = False
        self.loaded_tokens = 0
        """Number of tokens, from the load's ``start``, whose entries are in the caller's memory."""
        self.failed_blocks: tuple[int, ...] = ()
        """Numbers of the blocks that were requested but not loaded."""
        self.stored: Any = None
        """The ``Stored`` of a save; None for a load, and for a save that never ran."""
        self.error: BaseException | None = None
        """The exception of the work: a programming error, not a disk error. It is logged."""

    @property
    def done(self) -> bool:
        """Whether the job has ended and no longer accesses the caller's memory."""
        return self._is_done

    def wait(self, timeout: float = BARRIER_SECONDS) -> bool:
        """Wait at most ``timeout`` seconds; return whether the job is done."""
        with self._lock:
            return self._changed.wait_for(lambda: self._is_done, timeout)

    def wait_group(self, group: str, layer: int, timeout: float = BARRIER_SECONDS) -> bool:
        """Wait until all requested entries of one layer are loaded; return whether they are.

        False if the job was cancelled, loaded less, or is not done after ``timeout`` seconds.

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
        """Cancel the job; return after the last copy that accesses the caller's memory.

        It waits for a copy in progress, but not for the job's turn or for space in a queue: the job may be ``done``
        later, without accessing the caller's memory until then.

        Raises:
            StoreError: after ``BARRIER_SECONDS``; the memory is still in use then.
        """
        with self._changed:
            self.is_cancelled = True
            is_free = self._changed.wait_for(lambda: not self._is_copying, BARRIER_SECONDS)
        if not is_free:
            msg = f"a job did not stop within {BARRIER_SECONDS:.0f} s; is the disk or the device stalled?"
            raise StoreError(msg)

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Mark a copy in progress; yield whether the caller's memory may be accessed. For the work."""
        with self._changed:
            self._is_copying = not self.is_cancelled
        try:
            yield self._is_copying
        finally:
            with self._changed:
                self._is_copying = False
                self._changed.notify_all()

    def mark_ready(self, group: str, layer: int) -> None:
        """Record that one layer is loaded. For the work."""
        with self._lock:
            self._ready.add((group, layer))
            self._changed.notify_all()

    def run(self, work: Callable[[Job], None]) -> None:
        """Call ``work``, record its exception, and end the job. For the thread that runs it."""
        try:
            work(self)
        except BaseException as error:  # the thread must continue: the job reports it
            self.error = error
            logger.exception("a background job failed")
        self.finish()

    def finish(self) -> None:
        """End the job. For a queue that refuses it."""
        with self._lock:
            self._is_done = True
            self._changed.notify_all()
