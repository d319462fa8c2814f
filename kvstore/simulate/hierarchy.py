"""Tiers of a simulation: parser of the command line, and report of hits, bytes, writes and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from kvstore.output.sizes import rate_of, seconds_of, size_of
from kvstore.policy.registry import POLICIES
from kvstore.simulate.cost import FirstToken, Link, first_token_seconds, share, ttft_report
from kvstore.simulate.json_form import INLINE, INTERVAL, OPTIONAL
from kvstore.simulate.run import Interval, SimulateOptions, first_counted
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
    """Parse tiers of the form ``NAME=SIZE[@RATE][,write=W][,latency=TIME][,policy=P]``.

    W is ``through`` (default of inclusive tiers) or ``on-evict``. Raises ``ValueError`` for another
    form, or tiers that contradict each other.
    """
    tiers: list[Tier] = []
    for text in texts:
        tier = _tier_of(text, inclusion, distinct_blocks, block_bytes, is_first=not tiers)
        if tier.name in {each.name for each in tiers}:
            raise ValueError(f"two tiers are named {tier.name!r}")
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
    head, *settings = text.split(",")
    name, _, size = head.partition("=")
    if not name.isidentifier() or not size:
        raise ValueError(f"expected a tier such as ssd=1TiB@3GB/s,write=on-evict, found {text!r}")
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
            "through, as no tier is above the first one" if is_first else "through or on-evict"
        )
        raise ValueError(f"tier {name}: expected write={allowed}, found {write!r}")
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


@dataclass(frozen=True, slots=True)
class TierUse:
    """Traffic of one tier. Bytes are None if a token's are unknown, rates also if no time passes."""

    name: str
    size_blocks: int
    size_fraction: float
    size_bytes: int | None
    write: Write
    policy: str | None
    bandwidth: float | None
    latency_seconds: float
    prefix_hit_ratio: float
    prefix_token_hit_ratio: float
    read_blocks: int
    read_bytes: int | None
    read_bytes_per_second: float | None
    busiest_minute_bytes_per_second: float | None
    written_blocks: int
    written_bytes: int | None
    written_bytes_per_day: float | None


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Traffic of all tiers under one policy."""

    policy: str
    inclusion: Inclusion
    interval: Interval = field(metadata=INTERVAL)
    tiers: Sequence[TierUse]
    prefix_hit_ratio: float
    prefix_token_hit_ratio: float
    requests_with_hit_ratio: float
    first_token: FirstToken | None = field(metadata=INLINE | OPTIONAL)
    """None where costs are unknown."""
    loaded_token_ratio: float | None = field(metadata=OPTIONAL)
    """Tokens loaded over tokens requested; tiers that are too slow are not read."""


def hierarchy_report(trace: Trace, flow: Flow, options: SimulateOptions, policy: str) -> Hierarchy:
    """Return the hits, bytes, rates and times of ``options.tiers`` in the counted interval."""
    first, tokens = first_counted(trace, options.interval), trace.input_tokens
    reach = np.minimum(np.cumsum(flow.served, axis=1) * trace.block_tokens, tokens[:, None])
    served_tokens = np.diff(reach, axis=1, prepend=0)[first:].sum(axis=0)
    blocks, asked_tokens = int(trace.chain_blocks[first:].sum()), int(tokens[first:].sum())
    arrival = trace.arrival[first:]
    seconds = int(arrival[-1] - arrival[0]) / SECOND if len(arrival) else 0.0
    block_bytes = None
    if options.token_bytes is not None:
        block_bytes = float(options.token_bytes * trace.block_tokens)
    tiers = []
    for number, tier in enumerate(options.tiers):
        reads = flow.served[first:, number]
        read, written = int(reads.sum()), int(flow.written[first:, number].sum())
        busiest = _busiest_minute(arrival, reads)
        tiers.append(
            TierUse(
                name=tier.name,
                size_blocks=tier.blocks,
                size_fraction=tier.blocks / trace.distinct_blocks,
                size_bytes=_times(tier.blocks, block_bytes),
                write=tier.write,
                policy=tier.policy,
                bandwidth=tier.bandwidth,
                latency_seconds=tier.latency,
                prefix_hit_ratio=share(read, blocks),
                prefix_token_hit_ratio=share(int(served_tokens[number]), asked_tokens),
                read_blocks=read,
                read_bytes=_times(read, block_bytes),
                read_bytes_per_second=_rate(read, block_bytes, seconds),
                busiest_minute_bytes_per_second=_rate(busiest, block_bytes, MINUTE),
                written_blocks=written,
                written_bytes=_times(written, block_bytes),
                written_bytes_per_day=_rate(written, block_bytes, seconds / DAY),
            )
        )
    first_token = loaded_ratio = None
    if options.cost is not None:
        links = [Link(tier.bandwidth, tier.latency) for tier in options.tiers]
        times, loaded = first_token_seconds(trace, flow.served, links, options.cost)
        first_token = ttft_report(trace, times, options.cost, first)
        loaded_ratio = share(int(loaded[first:].sum()), asked_tokens)
    hits = flow.served.sum(axis=1)[first:]
    return Hierarchy(
        policy=policy,
        inclusion=options.inclusion,
        interval=options.interval,
        tiers=tiers,
        prefix_hit_ratio=share(int(hits.sum()), blocks),
        prefix_token_hit_ratio=share(int(served_tokens.sum()), asked_tokens),
        requests_with_hit_ratio=share(int((hits > 0).sum()), len(hits)),
        first_token=first_token,
        loaded_token_ratio=loaded_ratio,
    )


def _busiest_minute(arrival: Ints, reads: Ints) -> int:
    """Return the most blocks read by the requests of one minute of the trace."""
    minutes = arrival // (MINUTE * SECOND)
    return int(np.bincount(minutes - minutes[0], reads).max()) if len(minutes) else 0


def _times(blocks: int, block_bytes: float | None) -> int | None:
    return None if block_bytes is None else round(blocks * block_bytes)


def _rate(blocks: int, block_bytes: float | None, time: float) -> float | None:
    return None if block_bytes is None or not time else blocks * block_bytes / time
