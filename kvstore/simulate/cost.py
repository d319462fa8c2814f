"""Bytes and seconds: what a token takes, what computing it costs, and what loading it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import layout
from kvstore.trace.columns import Ints, Trace

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a model caches, in bytes."""

    token_bytes: Fraction
    """Of global KV, a token."""
    window_tokens: int = 0
    """W, 0 for a model without windows."""
    window_token_bytes: Fraction = Fraction(0)
    """Of window KV, a token."""


def bytes_of_model(name: str) -> ModelBytes:
    """Return the bytes of a model: a preset's name, or the path of a Hugging Face config.

    Raises:
        ConfigError: if there is none of that name, or its cache cannot be described.
    """
    found = layout(name)
    window = sum((group.bytes_per_token for group in found.window_groups), Fraction(0))
    return ModelBytes(found.bytes_per_token, found.window_tokens, window)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token costs to compute and to load."""

    token_bytes: Fraction
    prefill_tps: float
    """Tokens that the engine computes a second."""

    @property
    def break_even(self) -> float:
        """Bytes a second above which loading a token is faster than computing it."""
        return float(self.token_bytes) * self.prefill_tps


@dataclass(frozen=True, slots=True)
class Link:
    """What reading from one place costs."""

    bandwidth: float | None
    """Bytes a second; None where reading costs nothing."""
    latency: float
    """Seconds before the first byte, once a request."""


FREE = Link(None, 0.0)
"""Reading at no cost."""


def first_token_seconds(
    trace: Trace, served: Ints, links: Sequence[Link], cost: Cost
) -> tuple[NDArray[np.float64], Ints]:
    """Return each request's time to its first token, and the tokens that it loads, [requests].

    ``served`` are the blocks that each request finds in each place, [requests, places], in prefix
    order. A request loads the places in a row that make it fastest, and computes the rest: none at
    all where loading is slower. Prefill alone is counted, at one speed, with no queue before it.
    """
    tokens = trace.input_tokens
    loaded = np.zeros(len(trace), np.int64)
    best = tokens / cost.prefill_tps
    blocks, spent = np.zeros(len(trace), np.int64), np.zeros(len(trace))
    for place, link in enumerate(links):
        here = served[:, place]
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


def ttft_report(trace: Trace, seconds: NDArray[np.float64], cost: Cost, first: int) -> Any:
    """Return mean and percentiles of times to first token, with a cache and without one."""
    without = trace.input_tokens[first:] / cost.prefill_tps
    counted = seconds[first:]
    return {
        "ttft_seconds": _spread(counted),
        "without_cache": _spread(without),
        "saved_seconds": float(without.sum() - counted.sum()),
    }


def _spread(seconds: NDArray[np.float64]) -> dict[str, float]:
    if not len(seconds):
        return dict.fromkeys(["mean", *(f"p{percent}" for percent in PERCENTILES)], 0.0)
    places = np.percentile(seconds, PERCENTILES, method="inverted_cdf")
    named = {f"p{percent}": float(s) for percent, s in zip(PERCENTILES, places, strict=True)}
    return {"mean": float(seconds.mean()), **named}
