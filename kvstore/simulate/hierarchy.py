"""Tiers as a user writes them, and what a trace says of them: hits, bytes, endurance, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kvstore.policy.registry import POLICIES
from kvstore.simulate.cost import Cost, Link, first_token_seconds, ttft_report
from kvstore.simulate.sizes import rate_of, seconds_of, size_of
from kvstore.simulate.tiers import Flow, Inclusion, Tier, Write, check_tiers
from kvstore.trace.columns import SECOND, Ints, Trace

DAY, MINUTE = 86400, 60
"""Seconds."""
_WRITES: dict[str, Write] = {"through": "through", "on-evict": "on-evict"}


def tiers_of(
    texts: Sequence[str],
    inclusion: Inclusion,
    distinct_blocks: int,
    block_bytes: Fraction | None = None,
) -> list[Tier]:
    """Return tiers written as ``NAME=SIZE[@RATE][,write=W][,latency=TIME][,policy=P]``.

    W is ``through``, the default where tiers are inclusive, or ``on-evict``.

    Raises:
        ValueError: if one is written differently, or they contradict each other.
    """
    tiers: list[Tier] = []
    for text in texts:
        tier = _tier_of(text, inclusion, distinct_blocks, block_bytes, is_first=not tiers)
        if tier.name in {each.name for each in tiers}:
            msg = f"two tiers are named {tier.name!r}"
            raise ValueError(msg)
        tiers.append(tier)
    check_tiers(tiers, inclusion)
    return tiers


def _tier_of(
    text: str,
    inclusion: Inclusion,
    distinct_blocks: int,
    block_bytes: Fraction | None,
    *,
    is_first: bool,
) -> Tier:
    place, *settings = text.split(",")
    name, _, size = place.partition("=")
    if not name.isidentifier() or not size:
        msg = f"expected a tier such as ssd=1TiB@3GB/s,write=on-evict, found {text!r}"
        raise ValueError(msg)
    size, _, rate = size.partition("@")
    given = dict(setting.partition("=")[::2] for setting in settings)
    unknown = set(given) - {"write", "latency", "policy"}
    if unknown:
        msg = (
            f"tier {name}: expected write=, latency= or policy=, found {', '.join(sorted(unknown))}"
        )
        raise ValueError(msg)
    default: Write = "through" if inclusion == "inclusive" or is_first else "on-evict"
    write = given.get("write", default)
    if write not in _WRITES or (is_first and write != "through"):
        allowed = (
            "through, as nothing is above the first tier" if is_first else "through or on-evict"
        )
        msg = f"tier {name}: expected write={allowed}, found {write!r}"
        raise ValueError(msg)
    policy = given.get("policy")
    if policy is not None and policy not in POLICIES:
        msg = f"tier {name}: no policy named {policy!r}; expected one of {', '.join(POLICIES)}"
        raise ValueError(msg)
    return Tier(
        name,
        size_of(size, distinct_blocks, block_bytes).blocks,
        _WRITES[write],
        rate_of(rate) if rate else None,
        seconds_of(given["latency"]) if "latency" in given else 0.0,
        policy,
    )


def tiers_report(
    trace: Trace,
    tiers: Sequence[Tier],
    flow: Flow,
    first: int,
    token_bytes: Fraction | None = None,
    cost: Cost | None = None,
) -> dict[str, Any]:
    """Return what each tier served, read and wrote from request ``first`` on, and the times.

    Bytes are None where a token's are not known, and rates where all requests came at one time.
    """
    tokens = trace.input_tokens
    reach = np.minimum(np.cumsum(flow.served, axis=1) * trace.block_tokens, tokens[:, None])
    served_tokens = np.diff(reach, axis=1, prepend=0)
    asked_blocks = int(trace.chain_blocks[first:].sum())
    asked_tokens = int(tokens[first:].sum())
    arrival = trace.arrival[first:]
    seconds = int(arrival[-1] - arrival[0]) / SECOND if len(arrival) else 0.0
    block_bytes = None if token_bytes is None else float(token_bytes * trace.block_tokens)
    parts = []
    for number, tier in enumerate(tiers):
        read = flow.served[first:, number]
        written = int(flow.written[first:, number].sum())
        parts.append(
            {
                "name": tier.name,
                "size_blocks": tier.blocks,
                "size_fraction": tier.blocks / trace.distinct_blocks,
                "size_bytes": _times(tier.blocks, block_bytes),
                "write": tier.write,
                "policy": tier.policy,
                "bandwidth": tier.bandwidth,
                "latency_seconds": tier.latency,
                "prefix_hit_ratio": _share(int(read.sum()), asked_blocks),
                "prefix_token_hit_ratio": _share(
                    int(served_tokens[first:, number].sum()), asked_tokens
                ),
                "read_blocks": int(read.sum()),
                "read_bytes": _times(int(read.sum()), block_bytes),
                "read_bytes_per_second": _rate(int(read.sum()), block_bytes, seconds),
                "busiest_minute_bytes_per_second": _rate(
                    _busiest_minute(arrival, read), block_bytes, MINUTE
                ),
                "written_blocks": written,
                "written_bytes": _times(written, block_bytes),
                "written_bytes_per_day": _rate(written, block_bytes, seconds / DAY),
            }
        )
    hits = flow.served.sum(axis=1)[first:]
    found: dict[str, Any] = {
        "tiers": parts,
        "prefix_hit_ratio": _share(int(hits.sum()), asked_blocks),
        "prefix_token_hit_ratio": _share(int(served_tokens[first:].sum()), asked_tokens),
        "requests_with_hit_ratio": _share(int((hits > 0).sum()), len(hits)),
    }
    if cost is not None:
        links = [Link(tier.bandwidth, tier.latency) for tier in tiers]
        times, loaded = first_token_seconds(trace, flow.served, links, cost)
        found |= ttft_report(trace, times, cost, first)
        found["loaded_token_ratio"] = _share(int(loaded[first:].sum()), asked_tokens)
    return found


def _busiest_minute(arrival: Ints, read: Ints) -> int:
    """Return the most blocks read by the requests of one minute of the clock."""
    minutes = arrival // (MINUTE * SECOND)
    return int(np.bincount(minutes - minutes[0], read).max()) if len(minutes) else 0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _times(blocks: int, block_bytes: float | None) -> int | None:
    return None if block_bytes is None else round(blocks * block_bytes)


def _rate(blocks: int, block_bytes: float | None, time: float) -> float | None:
    return None if block_bytes is None or not time else blocks * block_bytes / time
