"""Waiting for another thread with a deadline.

A signal may interrupt the main thread between any two instructions. Code of this package enters an
``RLock`` itself, which is one instruction, and not its condition, which is a call.
"""

from __future__ import annotations

import threading

from kvstore.errors import StoreError

BARRIER_SECONDS = 120.0
"""Deadline of a flush. A disk that takes longer counts as failed."""


def taken_lock() -> threading.Lock:
    """Return an acquired lock, which another thread releases once: an event that is waited for.

    An acquire is one instruction. A ``threading.Event`` enters a condition: a thread that is
    interrupted inside it blocks the thread that sets the event.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


def wait_released(lock: threading.Lock, subject: str, media: str) -> None:
    """Wait until ``lock`` is released.

    Raises:
        StoreError: after ``BARRIER_SECONDS``, naming the ``subject`` and the ``media`` it waits for.
    """
    if not lock.acquire(timeout=BARRIER_SECONDS):
        msg = f"{subject} did not finish within {BARRIER_SECONDS:.0f} s; is the {media} stalled?"
        raise StoreError(msg)
