"""The state shared by all scopes of one open store: its tiers and one object per task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvstore.cache.device_cache import DeviceCache
from kvstore.cache.host_reads import HostReads
from kvstore.cache.jobs import Jobs
from kvstore.cache.leases import Leases
from kvstore.cache.lookups import Lookups
from kvstore.cache.ssd_reads import SsdReads
from kvstore.cache.windows import Windows
from kvstore.cache.writes import Writes
from kvstore.errors import ConfigError, StoreError
from kvstore.frame.format import Frames
from kvstore.identity.block import BlockHash
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.guarded import Guarded
from kvstore.policy.lru import Lru
from kvstore.policy.protocol import Policy
from kvstore.store.generations import Generations
from kvstore.store.namespaces import namespace_facts
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

logger = logging.getLogger(__name__)


class SharedTiers(OpenStore):
    """One open store of token prefixes: lookups, leases, reads, writes, windows and statistics."""

    def __init__(
        self,
        *,
        frame_format: Frames,
        ssd: SsdTier,
        window: WindowPool,
        open_device: Callable[[], DeviceTier],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        secret: bytes | None = None,
        scrub_bytes_per_second: int = 0,
        request_share: float = 1.0,
        read_threads: int = 1,
        policy: Policy[Segment] | None = None,
    ) -> None:
        """Take over an open tier. ``policy`` orders its eviction; None is LRU."""
        self.layout = frame_format.layout
        self.block_tokens = frame_format.block_tokens
        self.secret = secret  # secret of the root hashes, if the store has one
        self.window = window
        self._policy_alarm = ""  # why LRU replaces the given policy, after it failed
        super().__init__(
            frame_format=frame_format,
            ssd=ssd,
            index=PrefixIndex(
                Lru[Segment]() if policy is None else Guarded(policy, self._policy_failed)
            ),
            clock=clock,
            wall_clock=wall_clock,
            scrub_bytes_per_second=scrub_bytes_per_second,
            request_share=request_share,
        )
        if window.capacity_bytes and window.is_too_small:
            logger.warning("%s", self._window_alarm())
        self.generations = Generations(self)
        self.ssd_reads = SsdReads(self, read_threads)
        self.device = DeviceCache(self.context, frame_format, self.ssd_reads, open_device)
        self.leases = Leases(self.context, self.writer, self.device, window)
        self.lookups = Lookups(self, frame_format, self.leases, window)
        self.reads = HostReads(frame_format, self.ssd_reads, self.device)
        self.writes = Writes(self)
        self.windows = Windows(self.context, window, self.block_tokens)
        self.jobs = Jobs(self.context, frame_format, self.reads, self.writes, self.leases)

    def _policy_failed(self, error: Exception) -> None:
        """Count and log that LRU replaces the policy. The caller holds the lock."""
        self.metrics.policy_errors += 1
        self._policy_alarm = (
            f"the eviction policy of {self.ssd.path} failed: {error!r}; LRU replaces it "
            "until the store is reopened"
        )
        self.metrics.warn_once("policy", "%s", self._policy_alarm)

    @override
    def _alarms(self, ssd: Mapping[str, Any]) -> list[str]:
        found = super()._alarms(ssd)
        if self._policy_alarm:
            found.append(self._policy_alarm)
        window = self.window  # a pool of 0 bytes is no alarm until it refuses a window
        if window.is_too_small and (window.capacity_bytes or window.refused):
            found.append(self._window_alarm())
        return found

    def _window_alarm(self) -> str:
        least = self.window.snapshot_bytes
        return (
            f"the window pool of {self.ssd.path} has {self.window.capacity_bytes} bytes, less than the "
            f"{least} of one snapshot of {self.layout.model}: no window is kept, and a lookup that "
            f"needs one finds nothing; give at least {least} window_bytes for each sequence to be found"
        )

    @override
    def _give_up_leases(self) -> None:
        self.lookups.expire()

    @override
    def _finish_background(self, *, is_last: bool) -> None:
        """Wait until saves started before have offered their blocks; stop all threads if ``is_last``."""
        if is_last:
            self.jobs.close()
            self.ssd_reads.close()
        else:
            self.jobs.drain()

    def set_quota(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> None:
        """Limit a namespace's bytes on SSD; with 0 it stores nothing. No effect in a reader.

        Raises:
            ConfigError: if the quota is above 0 and below one block.
            StoreError: if it cannot be recorded.
        """
        if 0 < quota < self.ssd.block_bytes:
            raise ConfigError(
                f"ssd_quota is {quota}, expected at least the {self.ssd.block_bytes} bytes of one block, "
                "or 0 for a namespace that stores nothing"
            )
        if self.writer is not None:
            self.writer.set_quota(root, namespace, quota)

    def clear(self, root: BlockHash) -> int:
        """Remove every block and window of one namespace; return the number of blocks on SSD."""
        count = self.require_writer("clears").clear(root)
        with self.context.lock:
            self.window.clear(root)
            self.device.clear(root)
        return count

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        with self.context.lock:
            self._give_up_leases()
        try:
            sizes = self._ssd_sizes()
            named = namespace_facts(self.ssd) if self.writer is None else {}
        except MEDIUM_ERRORS as error:
            raise StoreError(f"the store at {self.ssd.path} cannot be read: {error}") from error
        tokens, live = sizes["blocks"] * self.block_tokens, sizes["live_bytes"]
        ssd = {**sizes, "tokens": tokens, "bytes_per_token": live / tokens if tokens else None}
        with self.context.lock:
            return {
                "path": str(self.ssd.path),
                "role": "owner" if self.is_owner else "reader",
                "layout": self.layout.model,
                "block_tokens": self.block_tokens,
                "bytes_per_token": float(self.layout.bytes_per_token),
                "tiers": {"ssd": ssd}
                | ({"device": self.device.stats()} if self.device.is_open else {}),
                "window": self.window.stats(),
                "scrub": self._scrub_stats(),
                "index": {"segments": self.writer.index.segments if self.writer is not None else 0},
                "namespaces": [
                    {"id": number, "quota": None, **entry}
                    for number, entry in sorted(named.items())
                ]
                if self.writer is None
                else self.writer.namespace_counts(),
                "counters": self.metrics.as_dict(),
                "alarms": [*self.metrics.alarms, *self._alarms(ssd)],
            }
