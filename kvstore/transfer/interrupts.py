"""Calls that Ctrl-C does not leave half done, and waits that it may interrupt anywhere.

A signal may interrupt the main thread between any two instructions. Code of this package enters an ``RLock`` directly,
which is one instruction, and not its condition, which is a call.
"""

from __future__ import annotations

import _thread
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.errors import StoreError

T = TypeVar("T")

BARRIER_SECONDS = 120.0  # deadline of a flush. A disk that takes longer counts as failed.


def taken_lock() -> threading.Lock:
    """Return an acquired lock, to be released once by another thread: an event to wait for.

    An acquire is one instruction. A ``threading.Event`` enters a condition: a thread interrupted inside it blocks the
    thread that sets the event.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


def wait_released(lock: threading.Lock, subject: str, media: str) -> None:
    """Wait until ``lock`` is released. Raises ``StoreError`` after ``BARRIER_SECONDS``."""
    if not lock.acquire(timeout=BARRIER_SECONDS):
        msg = f"{subject} did not finish within {BARRIER_SECONDS:.0f} s; is the {media} stalled?"
        raise StoreError(msg)


class _Call(Generic[T]):
    """A call made once by its own thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self._running = taken_lock()
        self.results: list[T] = []  # the returned value, if the call returned
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Start a thread that makes the call.

        ``Thread.start`` is called in that thread, which no signal interrupts: a caller interrupted inside it could
        block the new thread for ever. It names the thread, also for logs.
        """
        try:
            _thread.start_new_thread(self._start, ())
        except RuntimeError:  # during interpreter shutdown, or no thread can be started
            self.run()

    def _start(self) -> None:
        try:
            threading.Thread(target=self.run, name="kvstore-call", daemon=True).start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._claim.acquire(blocking=False):
            try:
                self.results.append(self._work())
            except BaseException as error:  # raised by the waiting caller
                self.error = error
            finally:
                self._running.release()

    def wait(self) -> None:
        """Wait for the end of the call."""
        with self._running:
            pass

    def cancel(self) -> None:
        """Cancel the call, or wait for its end if it has started."""
        if not self._claim.acquire(blocking=False):
            self.wait()


def uninterrupted(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return the result of ``work``, which Ctrl-C cannot leave half done.

    Signals raise only in the main thread, so another thread does the main thread's work. The first Ctrl-C is raised
    after ``work`` and the ``undo`` of its result have ended. A second one is raised at once; the work continues to its
    end in the background.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    call = _Call(functools.partial(contextvars.copy_context().run, work))
    try:
        call.begin()
        call.wait()
    except BaseException:
        call.cancel()
        if undo is not None and call.results:
            uninterrupted(functools.partial(undo, call.results[0]))
        raise
    if call.error is not None:
        raise call.error
    return call.results[0]
