"""A trace under one policy at one size: the hit of each request, and hit ratios."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from kvstore.index import plan
from kvstore.output.sizes import Size
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.cost import (
    FREE,
    Cost,
    FirstToken,
    Link,
    first_token_seconds,
    share,
    ttft_report,
)
from kvstore.simulate.curve import LRU, Curve, lru_curve, summed
from kvstore.simulate.flat import flat_policy, simulate_flat
from kvstore.simulate.json_form import INLINE, INTERVAL
from kvstore.simulate.optimal import OPTIMAL, optimal_hits
from kvstore.simulate.tiers import Inclusion, Tier
from kvstore.simulate.trace_index import ChainLists, simulate_policy
from kvstore.simulate.window import Windows
from kvstore.trace.chains import chains_of, links_of
from kvstore.trace.columns import Ints, Trace

Interval = str
"""Counted requests: ``all``, ``last_half``, or a share such as ``last_75%``."""
Semantics = Literal["prefix", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of one simulation. Raises ``ValueError`` for an unknown policy, naming the known ones."""

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


@dataclass(frozen=True, slots=True)
class Ratios:
    """Hit ratios of a cache over some requests."""

    prefix_hit_ratio: float
    """Blocks of leading hits over all blocks requested."""
    prefix_token_hit_ratio: float
    """Tokens of leading hits over all tokens requested."""
    block_hit_ratio: float
    """All blocks hit over all requested, including hits behind a gap, which no engine can use."""
    requests_with_hit_ratio: float
    """Requests with at least one hit over all requests."""


@dataclass(frozen=True, slots=True)
class Row:
    """Hit ratios of one policy at one size."""

    trace: str
    policy: str
    size_blocks: int
    size_fraction: float
    ratios: Ratios = field(metadata=INLINE)
    interval: Interval = field(metadata=INTERVAL)


class Simulation:
    """A trace, split into segments once and simulated any number of times.

    ``request_share`` is the largest share of a cache, and of each tier, for one request. The exact LRU
    curve, the infinite cache and the optimum ignore it.

    Raises:
        TraceError: if the trace has no block ids, or unchained ones.
        ValueError: if the share is not above 0 and at most 1.
    """

    def __init__(self, trace: Trace, request_share: float | None = None) -> None:
        if request_share is not None and not 0 < request_share <= 1:
            msg = f"expected a share for one request above 0 and at most 1, found {request_share}"
            raise ValueError(msg)
        self.trace = trace
        self.request_share = request_share
        self.chains = chains_of(trace)
        self.links = links_of(self.chains)

    @cached_property
    def chain_lists(self) -> ChainLists:
        """The chains as Python lists."""
        return ChainLists(self.chains)

    @cached_property
    def curve(self) -> Curve:
        """LRU at every size."""
        return lru_curve(self.links, self.trace.chain_blocks)

    def infinite_cache_hits(self) -> Ints:
        """Return the hit of each request in an infinite cache, in blocks."""
        return summed(self.links.blocks, self.links)

    def hits(self, policy: str, capacity: int) -> Ints:
        """Return the hit of each request, in blocks. Raises ``ValueError`` for an unknown policy.

        LRU is read from its curve, and a cache as large as the trace from the infinite cache. Both equal the
        run of the policy, request by request (``tests/simulate``).
        """
        if policy == OPTIMAL:
            return optimal_hits(self.links, capacity)
        made, room = make_policy(policy), self.room(capacity)
        is_bounded = room < min(capacity, int(self.trace.chain_blocks.max(initial=0)))
        if capacity >= self.trace.distinct_blocks and not is_bounded:
            return self.infinite_cache_hits()
        if policy == LRU and not is_bounded:
            return self.curve.hits(capacity)
        return np.array(simulate_policy(self.chain_lists, made, capacity, room=room), np.int64)

    def room(self, capacity: int) -> int:
        """Return the most blocks of one request that a cache of ``capacity`` blocks takes."""
        return plan.request_blocks(capacity, self.request_share)

    def ratios(self, hits: Ints, first: int = 0, blocks: Ints | None = None) -> Ratios:
        """Return the hit ratios of requests from ``first`` on. ``blocks`` are all hits, by default ``hits``."""
        trace, leading = self.trace, hits[first:]
        tokens = trace.input_tokens[first:]
        served = np.minimum(leading * trace.block_tokens, tokens)
        requested = int(trace.chain_blocks[first:].sum())
        every = leading if blocks is None else blocks[first:]
        return Ratios(
            prefix_hit_ratio=share(int(leading.sum()), requested),
            prefix_token_hit_ratio=share(int(served.sum()), int(tokens.sum())),
            block_hit_ratio=share(int(every.sum()), requested),
            requests_with_hit_ratio=share(int((every > 0).sum()), len(leading)),
        )

    def row(
        self, policy: str, size: Size, interval: Interval = "all", semantics: Semantics = "prefix"
    ) -> Row:
        """Simulate one policy at one size."""
        return self.run(policy, size, interval, semantics)[0]

    def run(
        self, policy: str, size: Size, interval: Interval = "all", semantics: Semantics = "prefix"
    ) -> tuple[Row, Ints]:
        """Simulate one policy at one size; return the row, and the hit of each request in blocks."""
        blocks = None
        if semantics == "flat":
            if policy == OPTIMAL:
                msg = "optimal is a bound on prefixes; expected a policy with flat semantics"
                raise ValueError(msg)
            made, room = flat_policy(policy, size.blocks), self.room(size.blocks)
            leading, found = simulate_flat(self.trace, made, size.blocks, room=room)
            hits, blocks = np.array(leading, np.int64), np.array(found, np.int64)
        else:
            hits = self.hits(policy, size.blocks)
        ratios = self.ratios(hits, first_counted(self.trace, interval), blocks)
        return Row(self.trace.name, policy, size.blocks, size.fraction, ratios, interval), hits

    def first_token(self, hits: Ints, options: SimulateOptions) -> FirstToken | None:
        """Return times to first token with these hits, None where ``options`` have no cost."""
        if options.cost is None:
            return None
        seconds, _ = first_token_seconds(self.trace, hits[:, None], [options.link], options.cost)
        first = first_counted(self.trace, options.interval)
        return ttft_report(self.trace, seconds, options.cost, first)


def interval_of(warmup: float) -> Interval:
    """Return the interval after a warm-up of this share. Raises ``ValueError`` outside [0, 1)."""
    if not 0 <= warmup < 1:
        msg = f"the warm-up is a share of the requests, from 0 to below 1, found {warmup}"
        raise ValueError(msg)
    named = {0.0: "all", 0.5: "last_half"}
    return named.get(warmup) or f"last_{float(100 - 100 * Fraction(str(warmup))):g}%"


def first_counted(trace: Trace, interval: Interval) -> int:
    """Return the first request of an interval; the requests before it warm the cache up."""
    named = {"all": "100", "last_half": "50"}
    percent = named.get(interval) or re.sub(r"last_(.*)%", r"\1", interval)
    return int(len(trace) * (100 - Fraction(percent)) / 100)


Each = Callable[[Callable[[Simulation, Any], Any], Iterable[Any]], Iterable[Any]]
"""Call a function on the simulation and each task, and yield the results in order."""


def in_turn(simulation: Simulation) -> Each:
    """Run tasks one after the other."""
    return lambda function, tasks: map(partial(function, simulation), tasks)
