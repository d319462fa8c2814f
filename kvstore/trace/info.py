"""Statistics of a trace: size, reuse, and time between uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.trace.chains import Chains, Links, chains_of, links_of
from kvstore.trace.columns import SECOND, UNKNOWN, Ints, Trace

PERCENTILES = (50, 90, 99)


def info(trace: Trace) -> dict[str, Any]:
    """Return the statistics of a trace; those of blocks are None if it has lengths only.

    Raises ``TraceError`` if its block ids name blocks and not prefixes.
    """
    facts: dict[str, Any] = {
        "trace": trace.name,
        "requests": len(trace),
        "sessions": len(np.unique(trace.sessions[trace.sessions != UNKNOWN])) or None,
        "seconds": int(trace.arrival[-1]) / SECOND if len(trace) else 0.0,
        "reordered_requests": trace.reordered,
        "input_tokens": int(trace.input_tokens.sum()),
        "output_tokens": int(trace.output_tokens.sum()),
        "block_tokens": trace.block_tokens or None,
        "block_references": trace.references,
        "distinct_blocks": trace.distinct_blocks,
    }
    if not trace.references:
        names = ("segments", "path_blocks", "once_only", "reuse_seconds", "ceiling")
        return facts | dict.fromkeys(names)
    chains = chains_of(trace)
    return facts | _reuse(trace, chains, links_of(chains))


def _reuse(trace: Trace, chains: Chains, links: Links) -> dict[str, Any]:
    uses = np.bincount(chains.refs, minlength=chains.segments)
    lengths = trace.chain_blocks
    reused = int(links.blocks.sum())
    gaps = trace.arrival[links.later] - trace.arrival[links.earlier]
    served = np.bincount(links.later, links.blocks, len(trace)).astype(np.int64)
    tokens = np.minimum(served * trace.block_tokens, trace.input_tokens)
    return {
        "segments": chains.segments,
        "segment_references": len(chains.refs),
        "path_blocks": {"median": float(np.median(lengths)), "max": int(lengths.max())},
        "has_partial_blocks": bool((lengths * trace.block_tokens > trace.input_tokens).any()),
        "once_only": float(chains.blocks[uses == 1].sum() / trace.distinct_blocks),
        "reuse_seconds": weighted(gaps / SECOND, links.blocks),
        "ceiling": {
            "prefix_hit_ratio": reused / trace.references,
            "prefix_token_hit_ratio": int(tokens.sum()) / max(1, int(trace.input_tokens.sum())),
        },
    }


def weighted(values: NDArray[np.float64], weights: Ints) -> dict[str, float] | None:
    """Return weighted percentiles; None without values."""
    if not len(values):
        return None
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    at = np.searchsorted(total, np.array(PERCENTILES) * int(total[-1]) / 100)
    return {
        f"p{percent}": float(values[order[number]])
        for percent, number in zip(PERCENTILES, at, strict=True)
    }
