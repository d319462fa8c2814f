"""Report of a simulated trace: one frozen value, equal for equal traces and options. See ``docs/simulate.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.simulate.cost import FirstToken, Seconds
from kvstore.simulate.hierarchy import Hierarchy
from kvstore.simulate.hints import Hints
from kvstore.simulate.json_form import CEILING, CEILINGS, INLINE, INTERVAL, OPTIONAL
from kvstore.simulate.recommendation import Recommendation
from kvstore.simulate.run import (
    Interval,
    Ratios,
    Row,
)
from kvstore.simulate.window import WindowReport

SCHEMA = 1
"""Version of the JSON form. A new key does not raise it; a changed or removed key does."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """The trace of a report."""

    name: str
    requests: int
    seconds: float
    block_tokens: int
    block_references: int
    distinct_blocks: int
    bytes_per_token: float | None
    sha256: str | None = None
    """Digest of its file; None of a stream."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Times to first token of one policy at one size."""

    policy: str
    size_blocks: int
    size_bytes: int | None
    first_token: FirstToken = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class InfiniteCache:
    """Hit ratios of an infinite cache, which no size and no policy exceeds."""

    size_blocks: int
    ratios: Ratios = field(metadata=INLINE)
    interval: Interval = field(metadata=INTERVAL)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the exact LRU curve."""

    size_blocks: int
    size_fraction: float
    prefix_hit_ratio: float
    prefix_token_hit_ratio: float
    size_bytes: int | None
    ttft_seconds: Seconds | None = field(metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Origin:
    """Inputs that repeat a report: parameters, seed, command and version."""

    parameters: Mapping[str, Any]
    seed: int
    command: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of simulating one trace."""

    schema: int = SCHEMA
    trace: TraceFacts
    rows: Sequence[Row]
    """One for each policy and size."""
    costs: Sequence[RowCost] | None = field(metadata=OPTIONAL)
    """Of each row; None where costs are unknown."""
    infinite_cache: InfiniteCache = field(metadata=CEILING)
    lru_curve: Sequence[CurvePoint]
    recommendation: Recommendation
    infinite_cache_of: Mapping[Interval, Ratios] = field(metadata=CEILINGS)
    """Of the whole trace and of its last half."""
    hierarchies: Sequence[Hierarchy] | None = field(metadata=OPTIONAL)
    """Of each policy; None without tiers."""
    window_pool: WindowReport | None = field(metadata=OPTIONAL)
    hints: Hints
    origin: Origin = field(default=Origin({}, 0, "", ""), metadata=INLINE)
