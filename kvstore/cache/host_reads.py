"""Reads into host memory: the leading blocks from device pages, the others from the SSD tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.device_cache import DeviceCache
from kvstore.cache.entries import Entries
from kvstore.cache.match import Match
from kvstore.cache.ssd_reads import Limits, Reading, SsdReads
from kvstore.frame.format import Frames
from kvstore.frame.geometry import PartBatch
from kvstore.identity.chain import Prefix


@dataclass(frozen=True, slots=True)
class HostReading:
    """A read to host entries in progress; ``HostReads.finish`` ends it."""

    prefix: Prefix
    first: int  # block at which the entries start
    in_device: int  # leading blocks in device pages, of those to read
    entries: Mapping[str, NDArray[np.uint8]]
    batch: PartBatch | None
    ssd: Reading | None  # the part on SSD, which starts at ``first``


class HostReads:
    """Reads to host arrays: from SSD first, then from device pages. Threads: any."""

    def __init__(self, frame_format: Frames, ssd: SsdReads, device: DeviceCache) -> None:
        self._format = frame_format
        self._ssd = ssd
        self._device = device

    def read(self, match: Match, timeout: float | None = None) -> Entries:
        """Copy a match's entries to host arrays; a bad block shortens result and match."""
        size = self._format.block_tokens
        hit = match.hit_tokens // size
        entries = self._format.empty(hit)
        limits = Limits.within(timeout)
        done = self.finish(
            self.begin(match.prefix, match.resident_blocks, 0, hit, entries, limits=limits)
        )
        if done < hit:
            match.shrink(done * size)
            done = min(done, match.hit_tokens // size)  # less if a window is needed
            for name, array in entries.items():
                entries[name] = array[:, : done * self._format.entries[name]]
        return Entries(entries, done * size)

    def begin(
        self,
        prefix: Prefix,
        resident: Mapping[str, int],
        first: int,
        stop: int,
        entries: Mapping[str, NDArray[np.uint8]],
        *,
        batch: PartBatch | None = None,
        limits: Limits | None = None,
    ) -> HostReading:
        """Start copying verified blocks ``[first, stop)`` to host entries that start at ``first``.

        ``resident`` maps each tier to its leading blocks. ``batch`` names the layers of the entries.
        """
        on_ssd, ssd = min(stop, resident.get("ssd", 0)), None
        if on_ssd > first:
            target = self._format.entries_target(entries, batch)
            ssd = self._ssd.into(prefix, first, on_ssd, target, batch=batch, limits=limits)
        in_device = min(stop, resident.get("device", 0))
        return HostReading(prefix, first, in_device, entries, batch, ssd)

    def finish(self, reading: HostReading) -> int:
        """Wait for the end of a read; return the block after the last good one."""
        prefix, first, done = reading.prefix, reading.first, reading.first
        if reading.ssd is not None:
            done = self._ssd.finish(reading.ssd)
            if done < first + reading.ssd.task.count:
                return done
        if done < reading.in_device:
            stop, entries = reading.in_device, reading.entries
            done = self._device.read(prefix, done, stop, entries, first, reading.batch)
        return done
