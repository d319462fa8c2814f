"""The commit queue of a tier: framed blocks that one writer thread commits in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.identity.block import BlockKey
from kvstore.transfer.interrupts import BARRIER_SECONDS, taken_lock, wait_released

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.010
"""Time that a commit waits for one more block: a group commit at 64 blocks, 16 MB, or 10 ms without a new block.
Counted from the first block, 10 ms would split a batch that takes longer to frame, and its two commits would wait for
the disk twice. docs/decisions/0009."""
LINGERS = 10  # most multiples of ``LINGER_SECONDS`` that a commit waits in all

T = TypeVar("T")


@dataclass(slots=True)
class QueuedBlock(Generic[T]):
    """A framed block waiting for its commit."""

    key: BlockKey
    parent: BlockKey
    number: int
    frame: bytearray
    request: T  # state shared by the blocks of one request


class CommitQueue(Generic[T]):
    """A bounded queue of blocks and the thread that commits them, the only writer of the tier.

    The thread calls ``commit`` with blocks in queue order, parents before children. ``commit`` may drop blocks, and
    handles errors of the medium itself. Any other exception is logged and recorded in ``failure``, and the thread
    continues.
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
        self._items: deque[QueuedBlock[T] | threading.Lock] = deque()
        """Blocks, and locks to release when everything before them is committed."""
        self._queued = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closing = False
        self._has_ended = False
        self.failure: BaseException | None = None  # raised by ``commit``; not a disk error
        self._thread = threading.Thread(target=self._run, name="kvstore-writer", daemon=True)
        self._thread.start()

    @property
    def queued_blocks(self) -> int:
        """Number of blocks waiting for their commit."""
        return self._queued

    def wait_for_room(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until one more block fits; return whether it does."""
        limit = min(max(0.0, seconds), BARRIER_SECONDS)
        with self._lock:
            has_room = self._changed.wait_for(
                lambda: self._is_closing or self._queued < self._queue_blocks, limit
            )
            return has_room and not self._is_closing

    @property
    def is_closing(self) -> bool:
        """Whether the thread accepts no more blocks."""
        return self._is_closing

    def submit(self, block: QueuedBlock[T]) -> bool:
        """Queue a block; return False when closing. Each caller waits for space first; it may exceed it by one."""
        with self._lock:
            if self._is_closing:
                return False
            self._items.append(block)
            self._queued += 1
            self._changed.notify_all()
            return True

    def drain(self) -> None:
        """Wait until blocks queued before are committed or dropped. Raises ``StoreError`` after ``BARRIER_SECONDS``."""
        mark = taken_lock()
        with self._lock:
            if self._has_ended:
                return
            self._items.append(mark)
            self._changed.notify_all()
        wait_released(mark, "the writer", "disk")

    def close(self) -> None:
        """Commit the queued blocks, then stop the thread."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(BARRIER_SECONDS)

    def _next_batch(self) -> list[QueuedBlock[T]] | threading.Lock | None:
        """Wait for work. Return a batch, a lock to release, or None after the queue has closed."""
        with self._lock:
            self._changed.wait_for(lambda: self._items or self._is_closing)
            if not self._items:
                self._has_ended = True  # set under the lock: no thread waits for an ended thread
                return None
            first = self._items[0]
            if not isinstance(first, QueuedBlock):
                self._items.popleft()
                return first
            limit = time.monotonic() + LINGERS * LINGER_SECONDS
            while self._queued < self._batch_blocks and not self._must_hurry():
                if not self._changed.wait(min(LINGER_SECONDS, limit - time.monotonic())):
                    break
            batch: list[QueuedBlock[T]] = []
            while self._items and len(batch) < self._batch_blocks:
                item = self._items[0]
                if not isinstance(item, QueuedBlock):
                    break
                batch.append(item)
                self._items.popleft()
            return batch

    def _must_hurry(self) -> bool:
        return self._is_closing or not isinstance(self._items[-1], QueuedBlock)

    def _run(self) -> None:
        while (work := self._next_batch()) is not None:
            if not isinstance(work, list):
                work.release()
                continue
            try:
                self._commit(work)
            except BaseException as error:  # the thread must continue: a flush reports it
                self.failure = error
                logger.exception("a commit of %d blocks failed", len(work))
            with self._lock:
                self._queued -= len(work)
                self._changed.notify_all()
