"""Cost of simulated tiers and windows, and accuracy of window TTLs.

Question: how many CPU seconds do three tiers take, and how many replays does a TTL avoid?
Method:   one process, CPU seconds of the simulation alone, tiers of 1, 5 and 20 % of the distinct blocks;
          windows of 128 tokens without a budget, relative to an infinite TTL.
Bound:    shares of the gaps between calls of the same sessions, and of reuse weighted by tokens, as
          measured on the traces themselves.
Run:      python -m bench.simulate.tiers --traces FOLDER
          FOLDER has weka_claude_code_48.jsonl.zst and mooncake_conversation.jsonl.zst.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kvstore.simulate.run import Simulation
from kvstore.simulate.tiers import Inclusion, Tier, Write, simulate_tiers
from kvstore.simulate.window import Windows, window_report
from kvstore.trace.reading import Options, read

SHARES = (0.01, 0.05, 0.2)
GAPS = {30: 0.699, 60: 0.824, 120: 0.893, 300: 0.949, 600: 0.970, 1800: 0.988}
"""Share of the gaps between calls of one session of all Weka traces, by seconds."""
REUSE = {60: 0.187, 120: 0.459, 300: 0.757, 600: 0.929, 1800: 0.991}
"""Share of reused tokens of mooncake_conversation, by seconds since their last use."""


def tiers(path: Path) -> None:
    trace = read(path)
    kinds: tuple[tuple[Inclusion, Write], ...] = (
        ("inclusive", "through"),
        ("inclusive", "on-evict"),
        ("exclusive", "on-evict"),
    )
    for inclusion, write in kinds:
        made = [
            Tier(f"t{i}", int(share * trace.distinct_blocks), write if i else "through")
            for i, share in enumerate(SHARES)
        ]
        before = time.process_time()
        flow = simulate_tiers(trace, made, inclusion)
        spent = time.process_time() - before
        hit = flow.served.sum() / trace.references
        print(f"{trace.name}, {inclusion}, {write}: {spent:.1f} s of CPU, {hit:.4f} of blocks hit")


def windows(path: Path, block_tokens: int, measured: dict[int, float], key: str) -> None:
    simulation = Simulation(read(path, Options(block_tokens=block_tokens)))
    found = window_report(
        simulation.trace, simulation.infinite_cache_hits(), Windows(128, 300.0), 0, tuple(measured)
    )
    *points, infinite = found.curve
    for point in points:
        assert point.ttl_seconds is not None
        kept = getattr(point, key)
        share = kept / getattr(infinite, key)
        gap = measured[int(point.ttl_seconds)]
        print(
            f"{simulation.trace.name}, {point.ttl_seconds:g} s: {kept:.3f} kept, "
            f"{share:.3f} of what any would keep; measured on the trace: {gap:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    folder = parser.parse_args().traces
    weka, chat = (
        folder / "weka_claude_code_48.jsonl.zst",
        folder / "mooncake_conversation.jsonl.zst",
    )
    tiers(weka)
    windows(weka, 64, GAPS, "kept")
    windows(chat, 512, REUSE, "kept_token_ratio")


if __name__ == "__main__":
    main()
