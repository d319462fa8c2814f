"""Quotas as eviction limits: the most bytes for all generations of one namespace."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.store.eviction import Limit
from kvstore.store.namespaces import Lineage

QUOTA_SLACK = 0.04  # share of a quota freed in addition: the distance of the watermarks


def quota_limit(lineage: Lineage, usage: Mapping[int, int]) -> Limit | None:
    """Return the limit of a lineage, None without a quota. ``usage`` is in bytes by namespace number."""
    quota = lineage.quota
    if quota is None:
        return None
    low = quota - int(QUOTA_SLACK * quota)
    return Limit(lambda: sum(usage[n] for n in lineage.numbers), quota, low, lineage, "quota")
