"""Options of a simulation, in the blocks and bytes of one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kvstore.policy.registry import POLICIES
from kvstore.simulate.choice import OPTIMAL
from kvstore.simulate.cost import FREE, Cost, Link
from kvstore.simulate.sizes import Size
from kvstore.simulate.tiers import Inclusion, Tier
from kvstore.simulate.window import Windows

Interval = str
"""Counted requests: ``all``, ``last_half``, or a share such as ``last_75%``."""
Semantics = Literal["prefix", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of one simulation.

    Raises:
        ValueError: for an unknown policy, naming the known ones.
    """

    policies: Sequence[str]
    sizes: Sequence[Size]
    interval: Interval = "all"
    semantics: Semantics = "prefix"
    token_bytes: Fraction | None = None
    cost: Cost | None = None
    link: Link = FREE
    """Read cost of the cache of ``sizes``."""
    tiers: Sequence[Tier] = ()
    inclusion: Inclusion = "inclusive"
    windows: Windows | None = None

    def __post_init__(self) -> None:
        """Refuse unknown policies."""
        for policy in self.policies:
            if policy not in {*POLICIES, OPTIMAL}:
                known = ", ".join([*POLICIES, OPTIMAL])
                raise ValueError(f"no policy named {policy!r}; expected one of {known}")

    def size_bytes(self, blocks: int, block_tokens: int) -> int | None:
        """Return a size in bytes, None where the bytes of a token are unknown."""
        return None if self.token_bytes is None else round(blocks * self.token_bytes * block_tokens)
