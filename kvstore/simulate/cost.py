"""Costs: bytes and compute time per token, and times to first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import layout
from kvstore.trace.columns import Ints, Trace

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of a model's cache."""

    token_bytes: Fraction
    """Of global KV per token."""
    window_tokens: int = 0
    """W; 0 for a model without windows."""
    window_token_bytes: Fraction = Fraction(0)
    """Of window KV per token."""


def bytes_of_model(name: str) -> ModelBytes:
    """Return the bytes of a model, given as a preset's name or the path of a Hugging Face config.

    Raises ``ConfigError`` for an unknown name, or an unsupported model.
    """
    found = layout(name)
    window = sum((group.bytes_per_token for group in found.window_groups), Fraction(0))
    return ModelBytes(found.bytes_per_token, found.window_tokens, window)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a token: bytes to load, and compute speed."""

    token_bytes: Fraction
    prefill_tps: float
    """Tokens that the engine computes per second."""

    @property
    def break_even(self) -> float:
        """Bytes per second above which loading a token is faster than computing it."""
        return float(self.token_bytes) * self.prefill_tps


@dataclass(frozen=True, slots=True)
class Link:
    """Read cost of one tier."""

    bandwidth: float | None
    """Bytes per second; None for no cost."""
    latency: float
    """Seconds before the first byte, once per request."""


FREE = Link(None, 0.0)
"""No read cost."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Mean and percentiles of a time, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Times to first token, with a cache and without one."""

    ttft_seconds: Seconds
    without_cache: Seconds
    saved_seconds: float


def first_token_seconds(
    trace: Trace, served: Ints, links: Sequence[Link], cost: Cost
) -> tuple[NDArray[np.float64], Ints]:
    """Return each request's time to first token, and the tokens that it loads, [requests].

    ``served`` are the blocks that each request hits in each tier, [requests, tiers], in prefix order. A
    request loads from the tiers in order while that is faster, and computes the rest. Only prefill and
    loading count: one speed, no queue.
    """
    tokens = trace.input_tokens
    loaded = np.zeros(len(trace), np.int64)
    best = tokens / cost.prefill_tps
    blocks, spent = np.zeros(len(trace), np.int64), np.zeros(len(trace))
    for tier, link in enumerate(links):
        here = served[:, tier]
        blocks = blocks + here
        if link.bandwidth is not None:
            size = float(cost.token_bytes * trace.block_tokens)
            spent = spent + here * (size / link.bandwidth)
        spent = spent + np.where(here > 0, link.latency, 0.0)
        reached = np.minimum(blocks * trace.block_tokens, tokens)
        seconds = spent + (tokens - reached) / cost.prefill_tps
        is_better = seconds < best
        best = np.where(is_better, seconds, best)
        loaded = np.where(is_better, reached, loaded)
    return best, loaded


def ttft_report(trace: Trace, seconds: NDArray[np.float64], cost: Cost, first: int) -> FirstToken:
    """Return the times to first token of the requests from ``first`` on."""
    without = trace.input_tokens[first:] / cost.prefill_tps
    counted = seconds[first:]
    saved = float(without.sum() - counted.sum())
    return FirstToken(_spread(counted), _spread(without), saved)


def _spread(seconds: NDArray[np.float64]) -> Seconds:
    if not len(seconds):
        return Seconds(0.0, 0.0, 0.0, 0.0)
    percentiles = np.percentile(seconds, PERCENTILES, method="inverted_cdf")
    return Seconds(float(seconds.mean()), *(float(each) for each in percentiles))


def share(part: int, whole: int) -> float:
    """Return a ratio, 0 of nothing."""
    return part / whole if whole else 0.0
