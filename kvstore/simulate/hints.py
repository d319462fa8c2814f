"""Hints of a report: facts that explain its curves, such as long requests and large prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.simulate.run import Row, Simulation
from kvstore.trace.columns import SECOND
from kvstore.trace.info import weighted

PREFIXES = 5
"""Prefixes that are named."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A range of prompt tokens that several requests share."""

    first_request: int
    start_token: int
    stop_token: int
    requests: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class LongRequests:
    """Number of requests longer than a cache."""

    size_blocks: int
    requests: int


@dataclass(frozen=True, slots=True)
class Stranded:
    """Share of blocks hit behind a gap, where no engine can use them."""

    policy: str
    size_blocks: int
    block_ratio: float


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts about a trace and its rows."""

    top_prefixes: Sequence[Prefix]
    """The prompt ranges whose reuse saves most tokens."""
    reuse_seconds: Mapping[str, float] | None
    """Percentiles of the time between two uses of a block; None without reuse."""
    once_only: float
    """Share of the blocks that are used once."""
    longer_than_cache: Sequence[LongRequests]
    stranded: Sequence[Stranded]


def hints(simulation: Simulation, rows: Sequence[Row], first: int) -> Hints:
    """Return the hints of a simulation. ``first`` is the first counted request."""
    trace, chains, links = simulation.trace, simulation.chains, simulation.links
    uses = np.bincount(chains.refs, minlength=chains.segments)
    counted = links.later >= first
    gaps = (trace.arrival[links.later] - trace.arrival[links.earlier])[counted] / SECOND
    lengths = trace.chain_blocks[first:]
    sizes = sorted({row.size_blocks for row in rows})
    ratios = [(row, row.ratios.block_hit_ratio - row.ratios.prefix_hit_ratio) for row in rows]
    return Hints(
        top_prefixes=_top_prefixes(simulation, uses),
        reuse_seconds=weighted(gaps, links.blocks[counted]),
        once_only=float(chains.blocks[uses == 1].sum() / trace.distinct_blocks),
        longer_than_cache=[LongRequests(size, int((lengths > size).sum())) for size in sizes],
        stranded=[Stranded(row.policy, row.size_blocks, gap) for row, gap in ratios if gap > 0],
    )


def _top_prefixes(simulation: Simulation, uses: np.ndarray[Any, Any]) -> list[Prefix]:
    trace, chains = simulation.trace, simulation.chains
    saved = (uses - 1) * chains.blocks * trace.block_tokens
    top = np.argsort(-saved, kind="stable")[:PREFIXES]
    first_use = np.full(chains.segments, -1, np.int64)
    request = np.repeat(np.arange(len(trace)), np.diff(chains.offsets))
    first_use[chains.refs[::-1]] = request[::-1]
    return [
        Prefix(
            first_request=int(first_use[segment]),
            start_token=int(chains.starts[segment]) * trace.block_tokens,
            stop_token=int(chains.stops[segment]) * trace.block_tokens,
            requests=int(uses[segment]),
            reused_tokens=int(saved[segment]),
        )
        for segment in top.tolist()
        if saved[segment] > 0
    ]
