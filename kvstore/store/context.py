"""What the parts of one open store have in common: a lock, counters, clocks, and logical time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.store.metrics import Metrics

_WHY = {
    "closed": "the store is being closed",
    "no_parent": "the blocks before them are not stored",
    "no_room": "all else in the tier is in use, pinned, or an ancestor of theirs",
    "not_written": "the engine did not finish writing its pages in time",
    "queue_full": "the queue was full",
    "quota": "the quota of their namespace is in use, by what is pinned or an ancestor of theirs",
    "request_share": "one request takes no more of the tier than request_share; its head is stored",
    "reader": "this process only reads the store",
    "write_error": "the disk failed",
}
"""Reasons for dropping blocks, in words. The keys are those of the counter."""


class Context:
    """State that every part of a cache shares.

    The lock guards memory only: no disk, device or hook is waited for while it is held.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.metrics = Metrics()
        self.clock = clock
        """Seconds for leases and windows, from no particular start."""
        self.wall_clock = wall_clock
        """Seconds that mean the same after a restart: for blocks with a time to live."""
        self.sequence = 0

    def abandon(self) -> None:
        """In a forked child: take a new lock; the old one may be held by a thread left behind."""
        self.lock = threading.RLock()

    def next_sequence(self) -> int:
        """Return a new logical time. The caller holds the lock."""
        self.sequence += 1
        return self.sequence

    def count_drop(self, reason: str, count: int) -> None:
        """Count blocks that were not stored, and say so the first time."""
        if count:
            with self.lock:
                self.metrics.dropped_blocks[reason] += count
                message = "%d blocks were not stored: %s; further ones are only counted"
                self.metrics.say_once(reason, message, count, _WHY[reason])

    def count_passing(self, path: Path) -> None:
        """Count a read that met a condition that passes, and say so the first time."""
        with self.lock:
            self.metrics.passing_errors += 1
            message = "%s could not be read for a moment: a miss, and counted from here on"
            self.metrics.say_once("passing", message, path)
