"""The policies by name."""

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
    """A policy as a user sees it."""

    make: type[Policy[Any]]
    summary: str
    source: str

    @property
    def parameters(self) -> dict[str, float]:
        """The constants of its class and of those it is made of, as published."""
        return {
            name.lower(): value
            for kind in reversed(self.make.__mro__)
            for name, value in vars(kind).items()
            if name.isupper()
        }


POLICIES: Mapping[str, Entry] = MappingProxyType(
    {
        "lru": Entry(Lru, "what was used least recently goes", "Mattson et al. 1970"),
        "arc": Entry(
            Arc,
            "two LRU lists, used once and used again, balanced by what comes back",
            "Megiddo, Modha, FAST 2003",
        ),
        "s3fifo": Entry(
            S3Fifo,
            "a small queue for the new, a main one for what was used twice",
            "Yang et al., SOSP 2023",
        ),
        "sieve": Entry(
            Sieve, "a hand passes the queue and takes what was not used", "Zhang et al., NSDI 2024"
        ),
        "clock": Entry(
            Clock, "first in first out, but what was used goes round again", "Corbato 1968"
        ),
        "fifo": Entry(Fifo, "what was stored first goes", "-"),
        "lfu": Entry(Lfu, "what was used least often goes", "-"),
        "2q": Entry(
            TwoQ,
            "a queue for the new, LRU for what comes back after it",
            "Johnson, Shasha, VLDB 1994",
        ),
        "slru": Entry(
            Slru,
            "four LRU lists; a use lifts by one, what overflows sinks by one",
            "Huang et al., SOSP 2013",
        ),
        "gdsf": Entry(
            Gdsf, "uses and the age of the cache at the last one", "Cherkasova, HPL-98-69"
        ),
        "cost": Entry(
            Cost,
            "gdsf, with blocks worth what recomputing them at their depth costs",
            "after Marconi, arXiv 2411.19379",
        ),
        "ttl": Entry(Ttl, "what expires first goes, then what was used least recently", "-"),
    }
)
"""Each is one class, in the tiers and in the simulator."""


def make_policy(name: str) -> Policy[Any]:
    """Return a new policy.

    Raises:
        ValueError: naming the policies there are.
    """
    if name not in POLICIES:
        msg = f"no policy named {name!r}; expected one of {', '.join(POLICIES)}"
        raise ValueError(msg)
    return POLICIES[name].make()
