"""The background scrub: every block is read and checked in turn, at a rate, as long as a store is owned.

A read checks what it hands out, so wrong bytes never leave. What the scrub adds is that damage is
found, counted and removed before somebody counts on the block.
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
from kvstore.store.writer import OwnedSsd
from kvstore.tier.ssd.capacity import PAGE_HEADER_BYTES
from kvstore.tier.ssd.direct import DirectFile
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.files import DATA_FILE
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import BUSY

logger = logging.getLogger(__name__)

PASS_SECONDS = 3600.0
"""Least time from the start of one pass to the next: a small store is not read over and over."""
RETRY_SECONDS = 60.0
"""How long it rests after the medium failed as a whole."""
SAVED_BLOCKS = 4096
"""Blocks after which the place is written down; a kill repeats at most these. At the end it is too."""
STOP_SECONDS = 60.0
"""Deadline of a stop: it ends with the block at hand."""
_BATCH = 64
"""Records looked up at a time, so that no read transaction is long."""
_FACT = "scrub"


@dataclass(slots=True)
class TokenBucket:
    """A rate, kept on average: what was taken too early is waited for.

    Invariants:
        In any span of t seconds at most ``burst + t * rate`` plus one taking goes through.
    """

    rate: float
    """Tokens a second."""
    burst: float
    """Most tokens that an idle time saves up."""
    now: float
    """When it was last asked."""
    level: float = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take ``amount``; return the seconds to wait before anything more is taken."""
        self.level = min(self.burst, self.level + max(0.0, now - self.now) * self.rate) - amount
        self.now = now
        return max(0.0, -self.level / self.rate)


class Scrubber:
    """The scrub of one owned store: a walk over its keys, in their order, round and round.

    Threads: ``step`` by one at a time; ``start`` makes that one.
    """

    def __init__(
        self,
        context: Context,
        owned: OwnedSsd,
        frames: Frames,
        *,
        bytes_per_second: int,
        keys_root: BlockHash | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """Go on where the last owner stopped.

        ``clock`` gives seconds; ``wait(seconds)`` returns early, and True, when it is to stop. They
        are not the cache's own, which an engine may drive by hand.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``.
        """
        self._context = context
        self._owned = owned
        self._ssd: SsdTier = owned.ssd
        self._frames = frames
        self._keys_root = keys_root
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = wait if wait is not None else self._stopped.wait
        self._bytes_per_second = bytes_per_second
        self._bucket = TokenBucket(bytes_per_second, 0.0, clock())
        self._pass_began = clock()
        self._due: deque[tuple[BlockKey, Record]] = deque()
        place = self._ssd.fact(_FACT) or b""
        self._place = place if len(place) == KEY_BYTES else b""
        """Key of the last block that was checked, empty before the first."""
        self._unsaved = 0
        self._passes = 0
        self._direct: DirectFile | None = None
        with suppress(OSError):  # no direct reads here: then through the cache
            self._direct = DirectFile(
                self._ssd.path / DATA_FILE, PAGE_HEADER_BYTES + frames.frame_bytes
            )
        self._thread = threading.Thread(target=self._run, name="kvstore-scrub", daemon=True)

    def start(self) -> None:
        """Begin to walk in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End with the block at hand, and write down the place. Idempotent."""
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
                    self._context.metrics.say_once(
                        "scrub", "the scrub of %s rests: %s", self._ssd.path, error
                    )
                    seconds = RETRY_SECONDS
                if seconds and self._wait(seconds):
                    return
        except StoreError:  # closed under it
            return
        except Exception:
            logger.exception("the scrub of %s ended", self._ssd.path)

    def step(self) -> float:
        """Check the next block; return the seconds to wait until the one after it.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``, if the records cannot be read.
        """
        if not self._due:
            self._due.extend(self._ssd.records_after(self._place, _BATCH))
        if not self._due:
            return self._end_pass()
        key, record = self._due.popleft()
        self._check(key, record)
        self._place = key
        self._unsaved += 1
        if self._unsaved >= SAVED_BLOCKS:
            self._save()
        return self._bucket.take(record.frame_bytes, self._clock())

    def _end_pass(self) -> float:
        if self._place:
            self._passes += 1
            self._place = b""
            self._unsaved += 1
            self._save()
        now = self._clock()
        rest = max(0.0, self._pass_began + PASS_SECONDS - now)
        self._pass_began = now + rest
        return max(1.0, rest)

    def _save(self) -> None:
        if self._unsaved:
            self._ssd.set_fact(_FACT, self._place)
            self._unsaved = 0

    def _check(self, key: BlockKey, record: Record) -> None:
        fault = self._fault(key, record)
        if fault == BUSY:
            self._due.appendleft((key, record))
            raise OSError(errno.EAGAIN, "it cannot be read just now")
        now = self._ssd.record(key) if fault is not None else record
        if (
            now is not None and now.head_sum != record.head_sum
        ):  # evicted and stored again meanwhile
            fault = self._fault(key, now)
        with self._context.lock:
            self._context.metrics.scrubbed_blocks += 1
        if fault is not None and now is not None:
            self._remove(key, now, fault)

    def _fault(self, key: BlockKey, record: Record) -> str | None:
        """Return what is wrong with a block, or None: first as the disk has it, then as a read would."""

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
        """Count a bad block, and remove it and all that hangs on it, as a read does."""
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
            message = "block %s in %s is bad (%s): the scrub removes it; counted from here on"
            metrics.say_once(f"scrub {fault}", message, key.hex(), self._ssd.path, fault)
        if above is not None:
            self._owned.discard(b"".join(reversed(path)))

    def stats(self) -> dict[str, Any]:
        """Return where it is as plain JSON values.

        ``share`` is the part of this pass that is done: keys are evenly spread.
        """
        place = self._place
        return {
            "bytes_per_second": self._bytes_per_second,
            "position": place.hex(),
            "share": int.from_bytes(place[:8].ljust(8, b"\0"), "big") / 2**64,
            "passes": self._passes,
        }
