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
        "lru": Entry(Lru, "the least recently used block", "Mattson et al. 1970"),
        "arc": Entry(
            Arc,
            "from two LRU lists, used once and again, balanced by ghosts",
            "Megiddo, Modha, FAST 2003",
        ),
        "s3fifo": Entry(
            S3Fifo, "from a small queue of new blocks, then a main queue", "Yang et al., SOSP 2023"
        ),
        "sieve": Entry(
            Sieve, "the next block not used since the hand passed it", "Zhang et al., NSDI 2024"
        ),
        "clock": Entry(Clock, "the oldest block; a used one stays another round", "Corbato 1968"),
        "fifo": Entry(Fifo, "the oldest block", "-"),
        "lfu": Entry(Lfu, "the least frequently used block", "-"),
        "2q": Entry(
            TwoQ, "from a FIFO of new blocks; LRU for returning ones", "Johnson, Shasha, VLDB 1994"
        ),
        "slru": Entry(
            Slru, "from four LRU lists; a hit promotes by one", "Huang et al., SOSP 2013"
        ),
        "gdsf": Entry(
            Gdsf, "the lowest sum of uses and cache age at the last use", "Cherkasova, HPL-98-69"
        ),
        "cost": Entry(
            Cost, "as gdsf, weighted by recomputation cost", "after Marconi, arXiv 2411.19379"
        ),
        "ttl": Entry(Ttl, "the block that expires first, then by last use", "-"),
    }
)
"""Used by the tiers and by the simulator."""


def make_policy(name: str) -> Policy[Any]:
    """Return a new policy. Raises ``ValueError`` for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"no policy named {name!r}; expected one of {', '.join(POLICIES)}")
    return POLICIES[name].make()
