"""Counters of one open store: zero at its opening, without tokens and keys."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.tier.ssd.records import Record

logger = logging.getLogger(__name__)

ALARM_STORED_BLOCKS = 256
"""Blocks stored without a hit before the alarm: 32,768 tokens at 128 a block, more than a set-up phase stores, and few
enough for an alarm in the first minutes of traffic."""
ALARM_LOOKUPS = 64  # lookups of at least one block without a hit before the alarm

_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Upper bounds of the error histogram. FP8 loses about 0.03, NVFP4 0.09, MXFP4 0.11 of a normal distribution; blocks
above 0.2 have outliers. docs/quality.md."""
_BUCKETS = {f"<={bound:g}": bound for bound in _BOUNDS} | {f">{_BOUNDS[-1]:g}": math.inf}


def error_bucket(error: float) -> str:
    """Return the bucket of a relative error: ``"<=0.1"``, ``">0.5"``, or ``"nan"``."""
    return next((name for name, bound in _BUCKETS.items() if error <= bound), "nan")


def histogram(buckets: Mapping[str, int]) -> dict[str, int]:
    """Return counts by bucket, in the order of the bounds, without empty ones."""
    return {name: buckets[name] for name in (*_BUCKETS, "nan") if buckets.get(name)}


@dataclass(slots=True)
class Metrics:
    """The counters of one store, named as in its stats. Guarded by the context's lock."""

    lookups: int = 0
    query_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    """By tier. Each hit token is counted for one tier."""
    hit_blocks: int = 0  # blocks requested by key and returned
    missed_blocks: int = 0  # blocks requested by key that are missing or corrupt
    window_hits: int = 0
    replay_requests: int = 0
    replayed_tokens: int = 0
    stored_blocks: int = 0
    packed_blocks: int = 0  # blocks quantized at rest
    lossless_blocks: int = 0  # blocks not quantized because their error would exceed the budget
    compressed_blocks: int = 0  # blocks compressed at rest, quantized or not
    block_errors: Counter[str] = field(default_factory=Counter)
    """Quantized and lossless blocks by quantization error, see ``error_bucket``."""
    present_blocks: int = 0  # offered blocks that were stored already: the first writer wins
    dropped_blocks: Counter[str] = field(default_factory=Counter)
    """By reason: those of ``Context.count_drop``, and orphan."""
    corrupt_blocks: Counter[str] = field(default_factory=Counter)
    """By fault: header, identity, tokens, checksum, parent, missing, io."""
    late_blocks: int = 0  # blocks of hits that were not read before a deadline
    scrubbed_blocks: int = 0  # blocks read by the background scrub
    evicted_blocks: Counter[str] = field(default_factory=Counter)  # by tier
    quota_evicted_blocks: int = 0  # evicted from SSD because their namespace reached its quota
    expired_leases: int = 0
    shared_opens: int = 0
    passing_errors: int = 0  # reads without a free slot, memory or descriptor: misses
    write_errors: int = 0
    policy_errors: int = 0  # policies that raised or chose an invalid victim, replaced by LRU
    quarantined_stores: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    # The last four are not counters and not in the stats.
    prefill_tokens: float = 0
    prefill_seconds: float = 0.0
    block_lookups_without_hit: int = 0
    _warned: set[str] = field(default_factory=set)

    def note_form(self, record: Record) -> None:
        """Count a stored block by its form at rest. Without quantization it has no error."""
        self.compressed_blocks += record.is_compressed
        if record.is_packed or record.error:
            self.packed_blocks += record.is_packed
            self.lossless_blocks += not record.is_packed
            self.block_errors[error_bucket(record.error)] += 1

    @property
    def total_hit_tokens(self) -> int:
        """Hit tokens of all tiers."""
        return self.hit_tokens.total()

    def warn_once(self, topic: str, message: str, *args: object) -> None:
        """Log a warning the first time that a topic occurs."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *args)

    @property
    def alarms(self) -> list[str]:
        """The alarm of a store without hits, else empty."""
        stored, lookups = self.stored_blocks, self.block_lookups_without_hit
        if stored < ALARM_STORED_BLOCKS or lookups < ALARM_LOOKUPS or self.total_hit_tokens:
            return []
        found = f"{stored} blocks stored and {lookups} lookups without one hit"
        return [f"{found}: compare the namespaces of writer and reader"]

    def check_alarms(self) -> None:
        """Log the alarm once."""
        for sentence in self.alarms:
            self.warn_once("zero-hits", "%s", sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as plain JSON values."""
        found = {each.name: getattr(self, each.name) for each in fields(self)[:-4]}
        for name in ("hit_tokens", "dropped_blocks", "corrupt_blocks"):
            found[name] = {**found[name], "total": found[name].total()}
        return found | {
            "block_errors": histogram(self.block_errors),
            "evicted_blocks": dict(self.evicted_blocks),
            "read_seconds": round(self.read_seconds, 6),
        }
