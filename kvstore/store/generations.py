"""The generation of its weights that each line of namespaces is at, as a store records it.

A record outlives the blocks of its line: without it, an archive or a restart would bring back blocks
of old weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import StoreError
from kvstore.tier.ssd.tier import SsdTier

LAST_GENERATION = 2**63 - 1
"""Largest generation that is recorded. Callers may number as they like up to 2**64 - 1, by time for
instance; half of that is 292 years of nanoseconds, and whoever is there can count on."""
SHARE = 64
"""What all records may take: this part of a store's cap. They are never evicted."""
LINE_BYTES = 192
"""What a record takes: 100 bytes, in leaves that random keys fill to a half at worst."""


def recorded(ssd: SsdTier, line: str) -> int:
    """Return the recorded generation of a line, 0 if none is.

    Raises:
        StoreError: if what is recorded makes no sense.
        lmdb.Error, OSError: one of ``MEDIUM_ERRORS``.
    """
    text = ssd.fact(f"generation:{line}") or b"0"
    if not text.isdigit() or len(text) > 20 or int(text) >= 2**64:
        msg = (
            f"the generation recorded in {ssd.path} is {text[:40]!r}, expected an integer "
            "in [0, 2**64); use another path or remove the directory"
        )
        raise StoreError(msg)
    return int(text)


def record(ssd: SsdTier, newest: Mapping[str, int]) -> None:
    """Record the generations of some lines durably, all or none.

    Raises:
        StoreError: if there would be more lines than a store of this size records.
        lmdb.Error, OSError: one of ``MEDIUM_ERRORS``.
    """
    names = {f"generation:{line}": str(value).encode() for line, value in newest.items()}
    if any(ssd.fact(name) is None for name in names):
        most = ssd.capacity_bytes // SHARE // LINE_BYTES
        lines = ssd.facts("generation:").keys()
        if len(lines | newest.keys()) > most:
            msg = (
                f"{ssd.path} records the generations of {len(lines)} namespaces, the most for its "
                f"{ssd.capacity_bytes} bytes is {most}: give the generation with the namespace "
                "instead, or name the new weights in its weights field"
            )
            raise StoreError(msg)
    ssd.set_facts(names)
