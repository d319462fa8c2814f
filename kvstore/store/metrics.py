"""Counters: plain integers that only grow.

They know no tokens and no keys. They start at zero when a store is opened and are never reset
while it is open.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

ALARM_STORED_BLOCKS = 256
"""Blocks stored without one hit before the alarm: 32,768 tokens at 128 a block, far more than any
set-up phase, few enough to be noticed in the first minutes of traffic."""
ALARM_LOOKUPS = 64
"""Lookups of at least one block without one hit before the alarm."""


ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Upper bounds of the histogram of errors. FP8 loses about 0.03, NVFP4 0.09, MXFP4 0.11 of a normal
distribution; what lies above 0.2 has outliers. docs/quality.md."""


def error_bucket(error: float) -> str:
    """Return the bucket of a relative error: ``"<=0.1"``, ``">0.5"``, or ``"nan"``."""
    if math.isnan(error):
        return "nan"
    above = (f"<={bound:g}" for bound in ERROR_BOUNDS if error <= bound)
    return next(above, f">{ERROR_BOUNDS[-1]:g}")


def histogram(buckets: Mapping[str, int]) -> dict[str, int]:
    """Return counts by bucket, in the order of the bounds, without empty ones."""
    order = [*(f"<={bound:g}" for bound in ERROR_BOUNDS), f">{ERROR_BOUNDS[-1]:g}", "nan"]
    return {name: buckets[name] for name in order if buckets.get(name)}


@dataclass(slots=True)
class Metrics:
    """What one cache did. Guarded by the cache's lock."""

    lookups: int = 0
    query_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    """By tier; the sum over tiers is the total, because each hit token is counted for one tier."""
    hit_blocks: int = 0
    """Blocks that were asked for by key and handed out."""
    missed_blocks: int = 0
    """Blocks that were asked for by key and not there, or bad."""
    window_hits: int = 0
    replay_requests: int = 0
    replayed_tokens: int = 0
    stored_blocks: int = 0
    packed_blocks: int = 0
    """Blocks that were packed at rest."""
    lossless_blocks: int = 0
    """Blocks that were not, because that would have lost more than the error budget."""
    block_errors: Counter[str] = field(default_factory=Counter)
    """Blocks of both kinds by what packing loses, see ``error_bucket``."""
    compressed_blocks: int = 0
    """Blocks that are compressed at rest, packed ones too."""
    present_blocks: int = 0
    """Blocks offered that were already there: the first writer won."""
    dropped_blocks: Counter[str] = field(default_factory=Counter)
    """By reason: queue_full, no_parent, no_room, quota, request_share, not_written, write_error, reader,
    closed."""
    corrupt_blocks: Counter[str] = field(default_factory=Counter)
    """By what failed: header, identity, tokens, checksum, parent, missing, io."""
    late_blocks: int = 0
    """Blocks of hits that were not read because a deadline came first."""
    scrubbed_blocks: int = 0
    """Blocks that the background scrub read."""
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    """By tier."""
    quota_evicted_blocks: int = 0
    """Those of them that went from the SSD tier because their namespace was at its quota."""
    expired_leases: int = 0
    shared_opens: int = 0
    passing_errors: int = 0
    """Reads that met a condition that passes: no slot, memory or descriptor free. Each was a miss."""
    write_errors: int = 0
    policy_errors: int = 0
    """Eviction policies that raised, or named nothing that may go; LRU took over each time."""
    quarantined_stores: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    prefill_tokens: float = 0
    prefill_seconds: float = 0.0
    block_lookups_without_hit: int = 0
    _said: set[str] = field(default_factory=set)

    def note_form(self, error: float, *, is_packed: bool, is_compressed: bool) -> None:
        """Count a stored block. One that was never to be packed has no error and does not count."""
        self.compressed_blocks += is_compressed
        if is_packed or error:
            self.packed_blocks += is_packed
            self.lossless_blocks += not is_packed
            self.block_errors[error_bucket(error)] += 1

    @property
    def total_hit_tokens(self) -> int:
        """Hit tokens over all tiers."""
        return sum(self.hit_tokens.values())

    def say_once(self, topic: str, message: str, *args: object) -> None:
        """Log a warning the first time a topic comes up; counters tell the rest."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message, *args)

    @property
    def alarms(self) -> list[str]:
        """Sentences about what looks wrong as a whole, empty when nothing does."""
        found = []
        if (
            self.stored_blocks >= ALARM_STORED_BLOCKS
            and self.block_lookups_without_hit >= ALARM_LOOKUPS
            and not self.total_hit_tokens
        ):
            found.append(
                f"{self.stored_blocks} blocks stored and {self.block_lookups_without_hit} lookups "
                "without one hit: compare the namespaces of writer and reader"
            )
        return found

    def check_alarms(self) -> None:
        """Log each alarm once."""
        for sentence in self.alarms:
            self.say_once("zero-hits", "%s", sentence)

    def as_dict(self) -> dict[str, object]:
        """Return the counters as plain JSON values."""
        return {
            "lookups": self.lookups,
            "query_tokens": self.query_tokens,
            "hit_tokens": {**self.hit_tokens, "total": self.total_hit_tokens},
            "hit_blocks": self.hit_blocks,
            "missed_blocks": self.missed_blocks,
            "window_hits": self.window_hits,
            "replay_requests": self.replay_requests,
            "replayed_tokens": self.replayed_tokens,
            "stored_blocks": self.stored_blocks,
            "packed_blocks": self.packed_blocks,
            "lossless_blocks": self.lossless_blocks,
            "compressed_blocks": self.compressed_blocks,
            "block_errors": histogram(self.block_errors),
            "present_blocks": self.present_blocks,
            "dropped_blocks": {**self.dropped_blocks, "total": self.dropped_blocks.total()},
            "corrupt_blocks": {**self.corrupt_blocks, "total": self.corrupt_blocks.total()},
            "late_blocks": self.late_blocks,
            "scrubbed_blocks": self.scrubbed_blocks,
            "evicted_blocks": dict(self.evicted_blocks),
            "quota_evicted_blocks": self.quota_evicted_blocks,
            "expired_leases": self.expired_leases,
            "shared_opens": self.shared_opens,
            "passing_errors": self.passing_errors,
            "write_errors": self.write_errors,
            "policy_errors": self.policy_errors,
            "quarantined_stores": self.quarantined_stores,
            "read_bytes": self.read_bytes,
            "read_seconds": round(self.read_seconds, 6),
        }
