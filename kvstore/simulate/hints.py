"""What is worth knowing of a trace beside its curves: long requests, rare blocks, big prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.simulate.run import Simulation
from kvstore.trace.columns import SECOND
from kvstore.trace.info import weighted

PREFIXES = 5
"""Prefixes that are named."""


def hints(simulation: Simulation, found: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return facts that explain a simulation. ``first`` is the first request that is counted."""
    trace, paths, links = simulation.trace, simulation.chains, simulation.links
    uses = np.bincount(paths.refs, minlength=paths.segments)
    counted = links.later >= first
    gaps = (trace.arrival[links.later] - trace.arrival[links.earlier])[counted] / SECOND
    lengths = trace.chain_blocks[first:]
    return {
        "top_prefixes": _top_prefixes(simulation, uses),
        "reuse_seconds": weighted(gaps, links.blocks[counted]),
        "once_only": float(paths.blocks[uses == 1].sum() / trace.distinct_blocks),
        "longer_than_cache": [
            {"size_blocks": size, "requests": int((lengths > size).sum())}
            for size in sorted({row["size_blocks"] for row in found["rows"]})
        ],
        "stranded": [
            {
                "policy": row["policy"],
                "size_blocks": row["size_blocks"],
                "block_ratio": row["block_hit_ratio"] - row["prefix_hit_ratio"],
            }
            for row in found["rows"]
            if row["block_hit_ratio"] > row["prefix_hit_ratio"]
        ],
    }


def _top_prefixes(simulation: Simulation, uses: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Return the stretches of prompts whose reuse saves most tokens, with where each ends."""
    trace, paths = simulation.trace, simulation.chains
    saved = (uses - 1) * paths.blocks * trace.block_tokens
    top = np.argsort(-saved, kind="stable")[:PREFIXES]
    first_use = np.full(paths.segments, -1, np.int64)
    request = np.repeat(np.arange(len(trace)), np.diff(paths.offsets))
    first_use[paths.refs[::-1]] = request[::-1]
    return [
        {
            "first_request": int(first_use[segment]),
            "start_token": int(paths.starts[segment]) * trace.block_tokens,
            "stop_token": int(paths.stops[segment]) * trace.block_tokens,
            "requests": int(uses[segment]),
            "reused_tokens": int(saved[segment]),
        }
        for segment in top.tolist()
        if saved[segment] > 0
    ]


def hint_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the hints as sentences."""
    said = [f"{found['once_only']:.1%} of blocks are used once"]
    gaps = found["reuse_seconds"]
    if gaps is not None:
        times = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in gaps.items())
        said.append(f"blocks are used again after {times}")
    said.extend(
        f"{each['requests']:,} requests are longer than {each['size_blocks']:,} blocks"
        for each in found["longer_than_cache"]
        if each["requests"]
    )
    said.extend(
        f"tokens {each['start_token']:,} to {each['stop_token']:,} of request "
        f"{each['first_request']:,} come in {each['requests']:,} requests: "
        f"{each['reused_tokens']:,} tokens that need not be computed"
        for each in found["top_prefixes"]
    )
    said.extend(
        f"{each['policy']} at {each['size_blocks']:,} blocks: {each['block_ratio']:.1%} of blocks hit "
        "behind a gap, where no engine can use them"
        for each in found["stranded"]
    )
    return said
