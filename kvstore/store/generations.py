"""The newest generation of weights of each lineage of namespaces, as recorded in the store.

A record outlives the blocks of its lineage; otherwise a restart or an archive could restore blocks of old weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import ConfigError, StoreError
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier

LAST_GENERATION = 2**63 - 1
"""Largest recorded generation. Callers may use times, up to 2**64 - 1; half is 292 years of nanoseconds."""
SHARE = 64  # largest part of a store's cap that all records may use (1/64). They are never evicted.
RECORD_BYTES = 192  # bytes per record: 100, in leaves that random keys leave half empty at worst


def recorded(ssd: SsdTier, lineage: str) -> int:
    """Return the recorded generation of a lineage, 0 if there is none.

    Raises:
        StoreError: if the record is damaged.
        lmdb.Error, OSError: one of ``MEDIUM_ERRORS``.
    """
    text = ssd.fact(f"generation:{lineage}") or b"0"
    if not text.isdigit() or len(text) > 20 or int(text) >= 2**64:
        raise StoreError(
            f"the generation recorded in {ssd.path} is {text[:40]!r}, expected an integer "
            "in [0, 2**64); use another path or remove the directory"
        )
    return int(text)


def record(ssd: SsdTier, newest: Mapping[str, int]) -> None:
    """Record the generations of some lineages durably, all or none.

    Raises:
        StoreError: if the store would record more lineages than its size allows.
        lmdb.Error, OSError: one of ``MEDIUM_ERRORS``.
    """
    names = {f"generation:{lineage}": str(value).encode() for lineage, value in newest.items()}
    if any(ssd.fact(name) is None for name in names):
        most = ssd.capacity_bytes // SHARE // RECORD_BYTES
        known = ssd.facts("generation:").keys()
        if len(known | newest.keys()) > most:
            raise StoreError(
                f"{ssd.path} records the generations of {len(known)} namespaces, expected at most "
                f"{most} for its {ssd.capacity_bytes} bytes: give the generation with the namespace "
                "instead, or name the new weights in its weights field"
            )
    ssd.set_facts(names)


class Generations:
    """The newest generation of each lineage, as recorded and as begun in this process.

    A lineage is all generations of one namespace, named by the root of generation 0 in hex. Threads: any.
    """

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._lock = store.context.lock
        self._newest: dict[str, int] = {}  # by lineage, without those at 0, which are most

    def current(self, lineage: str, given: int) -> int:
        """Return the newer of the given and the recorded generation. Raises ``StoreError`` if it cannot be read."""
        path = self._store.ssd.path
        with self._lock:
            known = self._newest.get(lineage)
        if known is None or not self._store.is_owner:  # another process may have begun a newer one
            try:
                known = recorded(self._store.ssd, lineage)
            except MEDIUM_ERRORS as error:
                msg = f"the generation recorded in {path} cannot be read: {error}"
                raise StoreError(msg) from error
        with self._lock:
            known = max(known, self._newest.get(lineage, 0))
            if known:
                self._newest[lineage] = known
        return max(given, known)

    def is_current(self, lineage: str, generation: int) -> bool:
        """Return whether this process has seen no newer generation of a lineage."""
        return self._newest.get(lineage, 0) <= generation

    def record(self, lineage: str, generation: int) -> None:
        """Record a generation durably.

        Raises:
            ConfigError: if it exceeds ``LAST_GENERATION``.
            StoreBusy: in a reader.
            StoreError: if the medium fails; then the old one stays in force.
        """
        ssd = self._store.require_writer("bumps the generation").ssd
        if generation > LAST_GENERATION:
            raise ConfigError(
                f"the namespace's generation is {generation - 1}, and no later one is recorded than "
                f"{LAST_GENERATION}: name the new weights in its weights field"
            )
        try:
            record(ssd, {lineage: generation})
        except MEDIUM_ERRORS as error:
            msg = f"the generation {generation} cannot be recorded in {ssd.path}: {error}"
            raise StoreError(msg) from error
        with self._lock:
            self._newest[lineage] = max(generation, self._newest.get(lineage, 0))
