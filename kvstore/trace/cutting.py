"""Traces derived from others: first requests, sampled sessions, merged traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.trace.columns import SECOND, UNKNOWN, Trace, ends


def head(trace: Trace, requests: int) -> Trace:
    """Return the first requests of a trace."""
    return trace.take(np.arange(min(requests, len(trace))))


def sample(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Return a random share of the sessions, each whole, and of the requests without a session.

    Most reuse is within a session. Raises ``ValueError`` for a share outside (0, 1], or if it draws nothing.
    """
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and at most 1, found {share}")
    draw = np.random.default_rng(seed)
    chosen = draw.random(int(trace.sessions.max(initial=UNKNOWN)) + 1) < share
    singly = draw.random(len(trace)) < share
    known = trace.sessions != UNKNOWN
    taken = singly & ~known
    taken[known] = chosen[trace.sessions[known]]
    if not taken.any():
        msg = f"a share of {share} drew none of {len(trace):,} requests; use a larger one"
        raise ValueError(msg)
    return trace.take(np.flatnonzero(taken))


def merged(traces: Sequence[Trace], spread: float = 0.0, seed: int = 0) -> Trace:
    """Return several traces as one, in the order of arrival. Their blocks count as different.

    With ``spread``, each trace starts at a time drawn uniformly from that many seconds. Raises
    ``ValueError`` if their block sizes differ.
    """
    sizes = {trace.block_tokens for trace in traces if trace.block_tokens}
    if len(sizes) > 1 or not traces:
        msg = f"expected traces with one block size, found {sorted(sizes) or 'no trace'}"
        raise ValueError(msg)
    starts = np.random.default_rng(seed).uniform(0, spread * SECOND, len(traces))
    arrival = np.concatenate(
        [trace.arrival + int(start) for trace, start in zip(traces, starts, strict=True)]
    )
    order = np.argsort(arrival, kind="stable")
    first_block = ends([trace.distinct_blocks for trace in traces])
    first_session = ends([int(trace.sessions.max(initial=UNKNOWN)) + 1 for trace in traces])
    offsets = ends(np.concatenate([trace.chain_blocks for trace in traces]))
    whole = Trace(
        name="+".join(trace.name for trace in traces),
        block_tokens=max(sizes, default=0),
        arrival=arrival,
        input_tokens=np.concatenate([trace.input_tokens for trace in traces]),
        output_tokens=np.concatenate([trace.output_tokens for trace in traces]),
        sessions=np.concatenate(
            [
                np.where(trace.sessions == UNKNOWN, UNKNOWN, trace.sessions + first)
                for trace, first in zip(traces, first_session[:-1], strict=True)
            ]
        ).astype(np.int32),
        offsets=offsets,
        blocks=np.concatenate(
            [
                trace.blocks + np.int32(first)
                for trace, first in zip(traces, first_block[:-1], strict=True)
            ]
        ),
        distinct_blocks=int(first_block[-1]),
    )
    return whole.take(order)
