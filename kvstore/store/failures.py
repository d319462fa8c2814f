"""Write failures of one store: counting, logging, and suspension of writing after several in a row."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from kvstore.store.context import Context
from kvstore.tier.ssd.faults import is_transient
from kvstore.tier.ssd.tier import SsdTier

logger = logging.getLogger(__name__)

WRITE_ERRORS_TO_READ_ONLY = 3  # consecutive failures that stop writing. docs/decisions/0009.
RETRY_SECONDS = 30.0
"""Time until a commit is retried: that of a lease. On a disk that never recovers, each retry costs the framing of one
commit. After damage to the file, writing stops until the store is reopened."""


@dataclass(eq=False)
class WriteFailures:
    """Counts consecutive write failures and decides whether writing is stopped. Threads: any."""

    context: Context
    ssd: SsdTier
    count: int = 0  # consecutive failures of the medium
    stopped_until: float = -math.inf  # next retry by the context's clock; infinity: when reopened

    @property
    def is_stopped(self) -> bool:
        """Whether writing is stopped now."""
        return self.context.clock() < self.stopped_until

    def note(self, error: BaseException) -> None:
        """Count a failed write; stop writing after ``WRITE_ERRORS_TO_READ_ONLY`` in a row."""
        metrics, path, now = self.context.metrics, self.ssd.path, self.context.clock()
        # A reader, a full disk, or a lack of slots or descriptors is not a failure of the medium.
        is_external = is_transient(error) or self.ssd.lacks_room(error, 1)
        with self.context.lock:
            metrics.write_errors += 1
            self.count += not is_external
            metrics.warn_once("write", "a write to %s failed: %s", path, error)
            if is_external or self.count < WRITE_ERRORS_TO_READ_ONLY or now < self.stopped_until:
                return
            was_stopped = self.stopped_until > -math.inf
            may_recover = self.ssd.may_recover(error)
            self.stopped_until = now + RETRY_SECONDS if may_recover else math.inf
            if not was_stopped:
                message = "%d consecutive writes to %s failed (%s): nothing is stored until %s"
                logger.error(message, self.count, path, error, self._end)

    def note_success(self) -> None:
        """Reset the count and resume writing."""
        self.count = 0
        if self.stopped_until > -math.inf:
            self.stopped_until = -math.inf
            logger.warning("writes to %s work again: blocks are stored", self.ssd.path)

    @property
    def alarms(self) -> list[str]:
        """The alarm of a store whose writing is stopped, else empty."""
        alarm = f"writes to {self.ssd.path} failed: nothing is stored until {self._end}"
        return [alarm] if self.is_stopped else []

    @property
    def _end(self) -> str:
        if self.stopped_until == math.inf:
            return "it is reopened"
        return f"a write succeeds; one is tried every {RETRY_SECONDS:.0f} s"
