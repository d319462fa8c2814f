"""The policy to use and the size to give it: one decision about a trace, each part of it simulated.

A size alone says nothing: what another policy reaches with LRU's size is another share, and a gain
that holds on average over sizes may hold at none that anybody would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvstore.simulate.run import Simulation
    from kvstore.trace.columns import Ints

LRU = "lru"
"""What every policy is compared with: its exact curve says for any size what it hits."""
OPTIMAL = "optimal"
"""Name of the bound. It is no policy of a tier: it knows the future."""
SHARES = (0.90, 0.95, 0.99)
"""Shares of the ceiling that a report names a size for. The first is what a policy is chosen for."""
WORTH_CHANGING = 0.01
"""Gain over LRU, with the same size, from which another policy is recommended. With the size that has
90 % of the ceiling none gains it on public traces; with 1 % of all blocks S3-FIFO gains 0.024 on
mooncake_conversation, and what leads changes with the size."""
STEPS = 100
"""A size is found to this part of what LRU needs: no rounded percent of it changes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy with a size, what it hits, and what the others hit with the same size.

    Hits are those of prefixes, whatever the rows count: what an engine can use.
    """

    policy: str
    size_blocks: int
    """The smallest found with which the policy has ``SHARES[0]`` of the ceiling."""
    share_of_ceiling: float
    """Blocks that it hits, as a share of those that no size and no policy exceeds."""
    prefix_token_hit_ratio: float
    others: Mapping[str, float]
    """``prefix_token_hit_ratio`` of LRU and of each policy that was asked for, at ``size_blocks``."""
    lru_size_blocks: int
    """The smallest size with which LRU has the same share."""

    @property
    def gain_over_lru(self) -> float:
        """Share of the tokens that the policy hits more than LRU with the same size."""
        return self.prefix_token_hit_ratio - self.others.get(LRU, self.prefix_token_hit_ratio)


def smallest(sizes: Ints, hits: Ints, share: float) -> int:
    """Return the smallest size, in blocks, that has a share of the most hits, exactly."""
    wanted = int(np.ceil(share * int(hits[-1])))
    at = int(np.searchsorted(hits, wanted))
    if at == 0:
        return int(sizes[0])
    rise, run = int(hits[at] - hits[at - 1]), int(sizes[at] - sizes[at - 1])
    return int(sizes[at - 1]) + -(-(wanted - int(hits[at - 1])) * run // rise)


def choose(
    simulation: Simulation,
    policies: Sequence[str],
    first: int = 0,
    progress: Callable[[str], object] = lambda _: None,
) -> Choice | None:
    """Return what to use of LRU and some policies; None where nothing is used twice.

    Of those that hit ``WORTH_CHANGING`` more than LRU with the size that they need, the one that needs
    least; LRU if there is none. Requests from ``first`` on are counted.

    Cost: a run of each policy, and some eight more of each that needs less than LRU.
    """
    search = _Search(simulation, first, progress)
    if not search.most:
        return None
    asked = [policy for policy in dict.fromkeys(policies) if policy not in {LRU, OPTIMAL}]
    lru_size = search.size_of_lru()
    sizes = {LRU: lru_size}
    for policy in asked:
        size = search.size(policy, lru_size)
        if search.tokens(policy, size) - search.tokens(LRU, size) >= WORTH_CHANGING:
            sizes[policy] = size
    chosen = min(sizes, key=lambda policy: (sizes[policy], policy != LRU))
    size = sizes[chosen]
    return Choice(
        policy=chosen,
        size_blocks=size,
        share_of_ceiling=search.blocks(chosen, size) / search.most,
        prefix_token_hit_ratio=search.tokens(chosen, size),
        others={name: search.tokens(name, size) for name in (LRU, *asked) if name != chosen},
        lru_size_blocks=lru_size,
    )


class _Search:
    """Sizes with which policies have a share of the ceiling. Each run is done once."""

    def __init__(
        self, simulation: Simulation, first: int, progress: Callable[[str], object]
    ) -> None:
        self._simulation = simulation
        self._first = first
        self._progress = progress
        self._known: dict[tuple[str, int], tuple[int, float]] = {}
        self.most = int(simulation.infinite_cache_hits()[self._first :].sum())
        """Blocks that a cache without bounds hits."""

    def _run(self, policy: str, size: int) -> tuple[int, float]:
        found = self._known.get((policy, size))
        if found is None:
            self._progress(f"{self._simulation.trace.name}: {policy}, {size:,} blocks")
            hits = self._simulation.hits(policy, size)
            ratios = self._simulation.ratios_from(hits, self._first)
            tokens = ratios.prefix_token_hit_ratio
            found = self._known[policy, size] = int(hits[self._first :].sum()), tokens
        return found

    def blocks(self, policy: str, size: int) -> int:
        """Return the blocks that a policy hits."""
        return self._run(policy, size)[0]

    def tokens(self, policy: str, size: int) -> float:
        """Return the share of the tokens that a policy hits."""
        return self._run(policy, size)[1]

    def reaches(self, policy: str, size: int) -> bool:
        """Say whether a policy has the share of the ceiling with a size."""
        return self.blocks(policy, size) >= math.ceil(SHARES[0] * self.most)

    def size_of_lru(self) -> int:
        """Return LRU's size: exact by its curve, or found by runs where requests have a bound."""
        share, trace = self._simulation.request_share, self._simulation.trace
        exact = smallest(*self._simulation.curve.points(self._first), SHARES[0])
        if share is None or self.reaches(LRU, exact):
            return exact
        # There every request fits its share, so all is hit that can be.
        longest = int(trace.chain_blocks.max())
        enough = max(trace.distinct_blocks, math.ceil(longest / Fraction(str(share))))
        return self.size(LRU, enough, exact)

    def size(self, policy: str, enough: int, short: int = 0) -> int:
        """Return a size that reaches the share and is close to one that does not; at most ``enough``.

        More may hit less under policies that are no stacks, so there may be smaller ones still. Where
        next to ``enough`` does not reach it, nothing less is looked at.
        """
        step = max(1, enough // STEPS)
        middle = enough - step
        while enough - short > step:
            if self.reaches(policy, middle):
                enough = middle
            else:
                short = middle
            middle = (short + enough) // 2
        return enough
