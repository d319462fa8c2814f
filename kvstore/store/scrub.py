"""The background scrub: verifies every block in turn, at a limited rate, in the owner of a store.

Reads verify their own blocks; the scrub finds, counts and removes damage before a block is needed.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.errors import StoreError
from kvstore.frame.format import Frames
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey
from kvstore.store.context import Context
from kvstore.store.integrity import stored_fault
from kvstore.store.writer import StoreWriter
from kvstore.tier.ssd.capacity import PAGE_HEADER_BYTES
from kvstore.tier.ssd.direct import DirectFile
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.files import DATA_FILE
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import BUSY

logger = logging.getLogger(__name__)

PASS_SECONDS = 3600.0  # least time per pass, so that a small store is not read continuously
RETRY_SECONDS = 60.0  # pause after an error of the whole medium
SAVED_BLOCKS = 4096  # blocks between records of the position, verified again after a kill
STOP_SECONDS = 60.0  # most time that a stop waits for the current block
_BATCH = 64  # records per read transaction, which keeps each short
_FACT = "scrub"


@dataclass(slots=True)
class TokenBucket:
    """A rate limit on average: in t seconds at most ``burst + t * rate`` tokens are taken, plus one amount."""

    rate: float  # tokens per second
    burst: float  # most tokens that idle time accumulates
    now: float  # time of the last call
    level: float = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take ``amount``; return the seconds to wait before the next call."""
        self.level = min(self.burst, self.level + max(0.0, now - self.now) * self.rate) - amount
        self.now = now
        return max(0.0, -self.level / self.rate)


class Scrubber:
    """The scrub of one store: an endless iteration over its keys, in order. ``start`` creates its thread."""

    def __init__(
        self,
        context: Context,
        writer: StoreWriter,
        frames: Frames,
        *,
        bytes_per_second: int,
        keys_root: BlockHash | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """Continue at the recorded position. Raises one of ``MEDIUM_ERRORS``.

        ``clock`` returns seconds. ``wait(seconds)`` returns True, and early, to stop the scrub. They are not the
        context's clocks, which an engine may control.
        """
        self._context = context
        self._writer = writer
        self._ssd: SsdTier = writer.ssd
        self._frames = frames
        self._keys_root = keys_root
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = wait if wait is not None else self._stopped.wait
        self._bytes_per_second = bytes_per_second
        self._bucket = TokenBucket(bytes_per_second, 0.0, clock())
        self._pass_began = clock()
        self._due: deque[tuple[BlockKey, Record]] = deque()
        recorded = self._ssd.fact(_FACT) or b""
        self._last_key = recorded if len(recorded) == KEY_BYTES else b""
        """Key of the last verified block, empty before the first."""
        self._unsaved = 0
        self._passes = 0
        self._direct: DirectFile | None = None
        with suppress(OSError):  # without direct reads, the page cache is used
            self._direct = DirectFile(
                self._ssd.path / DATA_FILE, PAGE_HEADER_BYTES + frames.frame_bytes
            )
        self._thread = threading.Thread(target=self._run, name="kvstore-scrub", daemon=True)

    def start(self) -> None:
        """Start the scrub thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current block and record the position. Idempotent."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        with suppress(*MEDIUM_ERRORS, StoreError):
            self._save()
        if self._direct is not None and not self._thread.is_alive():
            self._direct.close()
            self._direct = None

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    seconds = self.step()
                except MEDIUM_ERRORS as error:
                    message = "the scrub of %s pauses: %s"
                    self._context.metrics.warn_once("scrub", message, self._ssd.path, error)
                    seconds = RETRY_SECONDS
                if seconds and self._wait(seconds):
                    return
        except StoreError:  # the store was closed meanwhile
            return
        except Exception:
            logger.exception("the scrub of %s ended", self._ssd.path)

    def step(self) -> float:
        """Verify the next block; return the seconds until the next step. Raises one of ``MEDIUM_ERRORS``."""
        if not self._due:
            self._due.extend(self._ssd.records_after(self._last_key, _BATCH))
        if not self._due:
            return self._end_pass()
        key, record = self._due.popleft()
        self._check(key, record)
        self._last_key = key
        self._unsaved += 1
        if self._unsaved >= SAVED_BLOCKS:
            self._save()
        return self._bucket.take(record.frame_bytes, self._clock())

    def _end_pass(self) -> float:
        if self._last_key:
            self._passes += 1
            self._last_key = b""
            self._unsaved += 1
            self._save()
        now = self._clock()
        pause = max(0.0, self._pass_began + PASS_SECONDS - now)
        self._pass_began = now + pause
        return max(1.0, pause)

    def _save(self) -> None:
        if self._unsaved:
            self._ssd.set_fact(_FACT, self._last_key)
            self._unsaved = 0

    def _check(self, key: BlockKey, record: Record) -> None:
        fault = self._fault(key, record)
        if fault == BUSY:
            self._due.appendleft((key, record))
            raise OSError(errno.EAGAIN, "the block cannot be read at the moment")
        now = self._ssd.record(key) if fault is not None else record
        if now is not None and now.head_sum != record.head_sum:  # evicted and stored again
            fault = self._fault(key, now)
        with self._context.lock:
            self._context.metrics.scrubbed_blocks += 1
        if fault is not None and now is not None:
            self._remove(key, now, fault)

    def _fault(self, key: BlockKey, record: Record) -> str | None:
        """Return the fault of a block, or None. It is read from the disk, and if that fails, as by a read."""

        def check(frame: memoryview) -> str | None:
            return stored_fault(self._frames, frame, key, record, keys_root=self._keys_root)

        if self._direct is not None and record.page and 0 < record.frame_bytes < 2**32:
            frame = self._direct.read(record.page, PAGE_HEADER_BYTES, record.frame_bytes)
            if frame is not None and check(frame) is None:
                return None
            with suppress(OSError, OverflowError):
                self._direct.forget(record.page, record.frame_bytes)
        return self._ssd.read([key], lambda _, frame: check(frame)).fault

    def _remove(self, key: BlockKey, record: Record, fault: str) -> None:
        """Count a bad block, and remove it and its descendants."""
        path = [key]
        above: Record | None = record
        while above is not None and above.number:
            path.append(above.parent)
            below, above = above.number, self._ssd.record(above.parent)
            if above is not None and above.number != below - 1:
                above = None
        with self._context.lock:
            metrics = self._context.metrics
            metrics.corrupt_blocks[fault] += 1
            message = (
                "block %s in %s is bad (%s): the scrub removes it; further ones are only counted"
            )
            metrics.warn_once(f"scrub {fault}", message, key.hex(), self._ssd.path, fault)
        if above is not None:
            self._writer.discard(b"".join(reversed(path)))

    def stats(self) -> dict[str, Any]:
        """Return the position as plain JSON values; ``share`` is the verified part of this pass (keys are uniform)."""
        key = self._last_key
        return {
            "bytes_per_second": self._bytes_per_second,
            "position": key.hex(),
            "share": int.from_bytes(key[:8].ljust(8, b"\0"), "big") / 2**64,
            "passes": self._passes,
        }
