"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvstore.policy.fifo import Clock, Fifo, Sieve
from kvstore.policy.frequency import Cost, Gdsf, Lfu
from kvstore.policy.lru import Lru, Ttl
from kvstore.policy.protocol import Policy
from kvstore.policy.queues import Arc, S3Fifo, Slru, TwoQ


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy with its summary and source."""

    make: type[Policy[Any]]
    summary: str
    source: str

    @property
    def parameters(self) -> dict[str, float]:
        """The constants of its class and its bases, as published."""
        return {
            name.lower(): value
            for kind in reversed(self.make.__mro__)
            for name, value in vars(kind).items()
            if name.isupper()
        }


POLICIES: Mapping[str, Entry] = MappingProxyType(
    {
        "lru": Entry(Lru, "evicts the least recently used", "Mattson et al. 1970"),
        "arc": Entry(
            Arc, "two LRU lists, balanced by returning blocks", "Megiddo, Modha, FAST 2003"
        ),
        "s3fifo": Entry(
            S3Fifo, "queues for new blocks and for used ones", "Yang et al., SOSP 2023"
        ),
        "sieve": Entry(Sieve, "a hand evicts the unused in order", "Zhang et al., NSDI 2024"),
        "clock": Entry(Clock, "first in first out; a use gives another round", "Corbato 1968"),
        "fifo": Entry(Fifo, "evicts the first stored", "-"),
        "lfu": Entry(Lfu, "evicts the least often used", "-"),
        "2q": Entry(
            TwoQ, "FIFO for new blocks, LRU for returning ones", "Johnson, Shasha, VLDB 1994"
        ),
        "slru": Entry(Slru, "four LRU lists; a use promotes by one", "Huang et al., SOSP 2013"),
        "gdsf": Entry(Gdsf, "uses, plus the age at the last one", "Cherkasova, HPL-98-69"),
        "cost": Entry(
            Cost, "gdsf, weighted by recomputation cost", "after Marconi, arXiv 2411.19379"
        ),
        "ttl": Entry(Ttl, "evicts what expires first, then by last use", "-"),
    }
)
"""Used by the tiers and by the simulator."""


def make_policy(name: str) -> Policy[Any]:
    """Return a new policy. Raises ``ValueError`` for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"no policy named {name!r}; expected one of {', '.join(POLICIES)}")
    return POLICIES[name].make()
