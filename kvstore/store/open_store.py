"""A store opened by this process: the base of prefix caches and block stores."""

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
from kvstore.store.writer import StoreWriter
from kvstore.tier.ssd.faults import is_transient
from kvstore.tier.ssd.tier import SsdTier

logger = logging.getLogger(__name__)


class OpenStore:
    """A store directory opened by this process, as its owner or as a reader.

    ``writer`` is None in a reader, which looks up blocks on the medium instead of in the index.

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
        """Take over an open tier; in its owner, fill ``index`` from its records.

        ``keys_root`` is the root of callers' own keys, None in a store of tokens. ``scrub_bytes_per_second`` is the
        rate of the background scrub, 0 for none. ``request_share`` is the share of the tier that one request may use.
        """
        self.format = frame_format
        self.context = Context(clock, wall_clock)
        self.metrics = self.context.metrics
        self.ssd = ssd
        self.writer: StoreWriter | None = None
        self._pid = os.getpid()
        self.is_closed = False  # whether the store was closed, or inherited by a fork
        self._keys_root = keys_root
        self._scrub_rate = scrub_bytes_per_second
        self._scrubber: Scrubber | None = None
        self._compaction_error = ""  # why a file above its cap was not compacted at opening
        if ssd.is_owner:
            self.writer = StoreWriter(
                *(self.context, ssd, frame_format, index, self._give_up_leases),
                request_share=request_share,
            )

    def _give_up_leases(self) -> None:
        """Release expired leases. Called before each eviction, under the context's lock."""

    def _finish_background(self, *, is_last: bool) -> None:
        """Wait for background saves, which store blocks; ``is_last`` also stops their threads."""

    @property
    def is_owner(self) -> bool:
        """Whether this process owns the store."""
        return self.writer is not None

    def start(self) -> None:
        """In the owner, reduce the file below its cap and start the scrub."""
        self._fit_to_cap()
        if self.writer is not None and self._scrub_rate:
            self._scrubber = Scrubber(
                *(self.context, self.writer, self.format),
                bytes_per_second=self._scrub_rate,
                keys_root=self._keys_root,
            )
            self._scrubber.start()

    def _fit_to_cap(self) -> None:
        """Evict and compact, if the store was opened with a smaller cap than before.

        If the file cannot be compacted (it has readers, or the disk lacks space for a copy), an alarm is logged and
        remains in the stats. Blocks fill the file again, and it does not grow. Raises ``StoreError`` if the medium
        fails during the eviction. Cost: none without a smaller cap; otherwise that of :meth:`SsdTier.compact`.
        """
        ssd = self.ssd
        if self.writer is None:
            return
        if ssd.live_bytes > ssd.high_bytes:
            self.writer.evict_to(ssd.low_bytes)
        ssd.trim()
        if ssd.file_bytes <= ssd.capacity_bytes:
            return
        try:
            ssd.compact()
        except (StoreBusy, StoreError) as error:
            self._compaction_error = str(error)
            for alarm in self._size_alarms(ssd.file_bytes):
                logger.warning("%s", alarm)

    def _size_alarms(self, file_bytes: int) -> list[str]:
        """Return the alarm of a file larger than its cap, else empty."""
        if not self._compaction_error or file_bytes <= self.ssd.capacity_bytes:
            return []
        found = f"the file of {self.ssd.path} has {file_bytes} bytes, more than ssd_bytes"
        why = f"and was not compacted at the opening: {self._compaction_error}"
        return [f"{found} {self.ssd.capacity_bytes}, {why}"]

    def check_open(self) -> None:
        """Raise ``StoreError`` in a forked child or after ``close``."""
        if os.getpid() != self._pid:
            msg = f"the store at {self.ssd.path} was opened by process {self._pid}; open it again after a fork"
            raise StoreError(msg)
        if self.is_closed:
            raise StoreError(f"the store at {self.ssd.path} is closed")

    def require_writer(self, action: str) -> StoreWriter:
        """Return the writer; in a reader, raise ``StoreBusy`` with the ``action`` that needs an owner."""
        if self.writer is None:
            msg = f"the store at {self.ssd.path} is open as a reader; only its owner {action}"
            raise StoreBusy(msg)
        return self.writer

    def count_failed_lookup(self, error: BaseException) -> None:
        """Count a failed lookup on the medium, which was a miss."""
        if is_transient(error):
            self.context.count_transient_error(self.ssd.path)
        else:
            with self.context.lock:
                self.metrics.corrupt_blocks["io"] += 1

    def flush(self) -> None:
        """Wait until every block accepted before is durable against power loss."""
        self._finish_background(is_last=False)
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Flush, stop the writer and close the files. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._scrubber is not None:
            self._scrubber.stop()
        try:
            self._finish_background(is_last=True)
            if self.writer is not None:
                self.writer.close()
        finally:
            self.ssd.close()

    def abandon(self) -> None:
        """In a forked child: drop the inherited files so that the child can open its own."""
        self.is_closed = True
        self.context.abandon()
        self.ssd.abandon()

    def _scrub_stats(self) -> dict[str, Any] | None:
        """Return the position of the scrub, None without one."""
        return None if self._scrubber is None else self._scrubber.stats()

    def _ssd_sizes(self) -> dict[str, Any]:
        """Return the sizes of the tier as plain JSON values."""
        return {
            "blocks": self.ssd.block_count,
            "live_bytes": self.ssd.live_bytes,
            "file_bytes": self.ssd.file_bytes,
            "capacity_bytes": self.ssd.capacity_bytes,
            "queued_blocks": self.writer.queue.queued_blocks if self.writer is not None else 0,
            "is_read_only": self.writer is None or self.writer.is_read_only,
        }

    def _alarms(self, ssd: Mapping[str, Any]) -> list[str]:
        """Return the alarms of the writer and of the file size; ``ssd`` is the result of ``_ssd_sizes``."""
        found = [] if self.writer is None else self.writer.alarms
        return found + self._size_alarms(ssd["file_bytes"])
