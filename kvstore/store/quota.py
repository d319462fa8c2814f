"""Quotas: the most bytes that all generations of one namespace may take, enforced by eviction."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import StoreError
from kvstore.identity.block import BlockHash
from kvstore.store.context import Context
from kvstore.store.eviction import Eviction, Limit
from kvstore.store.failures import WriteFailures
from kvstore.store.namespaces import Lineage, Namespaces
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier

QUOTA_SLACK = 0.04
"""Share of a quota that eviction frees beyond need: the distance of the tier's watermarks."""


@dataclass(eq=False)
class Quotas:
    """Sets quotas and states them as limits.

    Threads: any; ``limits`` in the writer thread.
    """

    context: Context
    ssd: SsdTier
    namespaces: Namespaces
    eviction: Eviction
    failures: WriteFailures
    changing: threading.RLock
    """The writer's lock of changes."""

    def limits(self, numbers: Iterable[int]) -> Iterator[tuple[Lineage, Limit]]:
        """Yield the lineages of some namespaces that have a quota, each with its limit."""
        for lineage in self.namespaces.lineages(numbers):
            if lineage.quota is not None:
                yield lineage, self._limit(lineage, lineage.quota)

    def _limit(self, lineage: Lineage, quota: int) -> Limit:
        usage, low = self.ssd.usage, quota - int(QUOTA_SLACK * quota)
        return Limit(lambda: sum(usage[n] for n in lineage.numbers), quota, low, lineage, "quota")

    def set(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> None:
        """Record the quota of a namespace and evict the blocks that are over it.

        It stays in force until another is set, also after a restart.

        Raises:
            StoreError: if it cannot be recorded, and then the old one stays in force; or if the
                blocks that are over cannot be deleted now.
        """
        with self.context.lock:
            number = self.namespaces.acquire(root, namespace)
        try:
            with self.changing:
                self.namespaces.set_quota(number, quota)
                self.eviction.free(self._limit(self.namespaces.lineage(number), quota))
        except MEDIUM_ERRORS as error:
            self.failures.note(error)
            msg = f"the quota of {quota} bytes cannot be recorded in {self.ssd.path}: {error}"
            raise StoreError(msg) from error
        finally:
            with self.context.lock:
                self.namespaces.release(number)
