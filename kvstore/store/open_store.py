"""An open store as every kind of cache stands on it: one tier, its owner's side, and who may call.

Whatever a cache is asked by, tokens or keys, this is the part that does not differ.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.errors import StoreBusy, StoreError
from kvstore.frame.format import Frames
from kvstore.identity.block import BlockHash
from kvstore.index.prefix_tree import PrefixIndex
from kvstore.store.context import Context
from kvstore.store.scrub import Scrubber
from kvstore.store.writer import OwnedSsd
from kvstore.tier.ssd.faults import passes
from kvstore.tier.ssd.tier import SsdTier

logger = logging.getLogger(__name__)


class OpenStore:
    """A store directory that this process has open.

    ``owned`` is None in a reader; then the medium itself says what is stored.
    ``scrub_bytes_per_second`` is the rate of the background scrub, 0 for none.

    Threads: every public method may be called from any thread of the process that opened it.
    """

    def __init__(
        self,
        *,
        frame_format: Frames,
        ssd: SsdTier,
        index: PrefixIndex,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        keys_root: BlockHash | None = None,
        scrub_bytes_per_second: int = 0,
        request_share: float = 1.0,
    ) -> None:
        """Take over an open tier; as its owner, fill ``index`` from its records.

        ``keys_root`` is the root of the keys that callers bring, None if they bring none.
        ``request_share`` is the part of the tier that one request may take.
        """
        self.format = frame_format
        self.context = Context(clock, wall_clock)
        self.metrics = self.context.metrics
        self.ssd = ssd
        self.owned: OwnedSsd | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._keys_root = keys_root
        self._scrub_rate = scrub_bytes_per_second
        self._scrubber: Scrubber | None = None
        self._why_large = ""
        """Why the file is larger than its cap, if it is."""
        if ssd.is_owner:
            self.owned = OwnedSsd(
                *(self.context, ssd, frame_format, index, self._give_up_leases),
                request_share=request_share,
            )

    def _give_up_leases(self) -> None:
        """Give up what only time protects, before anything is evicted."""

    def _finish_background(self, *, is_last: bool) -> None:
        """Let work in the background that offers blocks come to its end."""

    @property
    def is_closed(self) -> bool:
        """Say whether it was closed, or left behind by a fork."""
        return self._is_closed

    @property
    def is_owner(self) -> bool:
        """Say whether this process writes."""
        return self.owned is not None

    def start(self) -> None:
        """Begin what an owner does all the time, once the store is in order."""
        self._keep_to_cap()
        if self.owned is not None and self._scrub_rate:
            self._scrubber = Scrubber(
                self.context,
                self.owned,
                self.format,
                bytes_per_second=self._scrub_rate,
                keys_root=self._keys_root,
            )
            self._scrubber.start()

    def _keep_to_cap(self) -> None:
        """As the owner of a store that was larger before: evict, and give the disk its space back.

        Where the file cannot shrink (somebody reads it, the disk is too full for a copy) it is
        logged, and an alarm from then on; the file is filled again and grows no further.

        Raises:
            StoreError: if the medium fails while blocks are evicted.

        Cost: nothing under an old cap; else that of :meth:`SsdTier.compact`.
        """
        ssd = self.ssd
        if self.owned is None:
            return
        if ssd.live_bytes > ssd.high_bytes:
            self.owned.evict_to(ssd.low_bytes)
        ssd.trim()
        if ssd.file_bytes <= ssd.capacity_bytes:
            return
        try:
            ssd.compact()
        except (StoreBusy, StoreError) as error:
            self._why_large = str(error)
            logger.warning("%s", self._size_alarm(ssd.file_bytes, ssd.capacity_bytes))

    def _size_alarm(self, file_bytes: int, capacity_bytes: int) -> str:
        return (
            f"the file of {self.ssd.path} takes {file_bytes} bytes, more than ssd_bytes "
            f"{capacity_bytes}, and was not compacted when it was opened: {self._why_large}"
        )

    def guard(self) -> None:
        """Raise ``StoreError`` in a forked child or after ``close``."""
        if os.getpid() != self._pid:
            msg = f"the store at {self.ssd.path} was opened by process {self._pid}; open it again after a fork"
            raise StoreError(msg)
        if self._is_closed:
            msg = f"the store at {self.ssd.path} is closed"
            raise StoreError(msg)

    def owner(self, wish: str) -> OwnedSsd:
        """Return the writing side, or raise ``StoreBusy`` naming what only an owner does."""
        if self.owned is None:
            msg = f"the store at {self.ssd.path} is open as a reader; only its owner {wish}"
            raise StoreBusy(msg)
        return self.owned

    def note_failed_look(self, error: BaseException) -> None:
        """Count a look at records that failed, and so was a miss."""
        if passes(error):
            self.context.count_passing(self.ssd.path)
        else:
            with self.context.lock:
                self.metrics.corrupt_blocks["io"] += 1

    def flush(self) -> None:
        """Return when every block accepted before survives power loss."""
        self._finish_background(is_last=False)
        if self.owned is not None:
            self.owned.flush()

    def close(self) -> None:
        """Flush, stop the writer and let go of the files. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._scrubber is not None:
            self._scrubber.stop()
        try:
            self._finish_background(is_last=True)
            if self.owned is not None:
                self.owned.close()
        finally:
            self.ssd.close()

    def abandon(self) -> None:
        """In a forked child: drop the inherited files so that the child can open its own."""
        self._is_closed = True
        self.context.abandon()
        self.ssd.abandon()

    def _scrub_stats(self) -> dict[str, Any] | None:
        """Return where the scrub is, None if there is none."""
        return None if self._scrubber is None else self._scrubber.stats()

    def _ssd_sizes(self) -> dict[str, Any]:
        """Return how full the tier is, as plain JSON values."""
        return {
            "blocks": self.ssd.block_count,
            "live_bytes": self.ssd.live_bytes,
            "file_bytes": self.ssd.file_bytes,
            "capacity_bytes": self.ssd.capacity_bytes,
            "queued_blocks": self.owned.queued_blocks if self.owned is not None else 0,
            "is_read_only": self.owned is None or self.owned.is_read_only,
        }

    def _alarms(self, ssd: Mapping[str, Any]) -> list[str]:
        found = [] if self.owned is None else self.owned.alarms
        if self._why_large and ssd["file_bytes"] > ssd["capacity_bytes"]:
            found.append(self._size_alarm(ssd["file_bytes"], ssd["capacity_bytes"]))
        return found
