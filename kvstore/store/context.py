"""State shared by all parts of one open store: a lock, counters, clocks and ticks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.store.metrics import Metrics

DROP_REASONS = {
    "closed": "the store is being closed",
    "no_parent": "their parent is not stored",
    "no_room": "all other blocks of the tier are queued, pinned or their ancestors",
    "not_written": "the engine did not finish writing its pages in time",
    "queue_full": "the queue is full",
    "quota": "the blocks of their namespace, which is at its quota, are pinned, queued or of the same prompt",
    "request_share": "a request is longer than its share of the tier; its first blocks are stored",
    "reader": "this process only reads the store",
    "write_error": "a write to the disk failed",
}
"""Counter keys of dropped blocks, with their log texts."""


class Context:
    """The shared state of one open store. No thread waits for a disk, a device or a hook while holding the lock."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.metrics = Metrics()
        self.clock = clock  # monotonic seconds, for leases and windows
        self.wall_clock = wall_clock  # wall-clock seconds, for blocks with a time to live
        self.tick = 0  # the newest tick returned

    def abandon(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self.lock = threading.RLock()

    def next_tick(self) -> int:
        """Return a new tick. The caller holds the lock."""
        self.tick += 1
        return self.tick

    def count_drop(self, reason: str, count: int) -> None:
        """Count blocks that were not stored, and log the first of each reason."""
        if count:
            with self.lock:
                self.metrics.dropped_blocks[reason] += count
                message = "%d blocks were not stored: %s; further ones are only counted"
                self.metrics.warn_once(reason, message, count, DROP_REASONS[reason])

    def count_transient_error(self, path: Path) -> None:
        """Count a read that failed with a transient error, and log the first."""
        with self.lock:
            self.metrics.passing_errors += 1
            message = "%s could not be read for a moment: a miss; further ones are only counted"
            self.metrics.warn_once("passing", message, path)
