"""Window KV as a share of persisted bytes, at the turn lengths of recorded traffic.

Question: DeepSeek-V4.1 persists a quarter of V4's global KV and no window KV, "an eighth" in all. A store of
          windows writes two snapshots per turn of any length. At which traffic are 7/8 saved, and how much
          would windows add to V4.1?
Method:   a turn is one request. Its new tokens are those of blocks in no earlier prompt; an answer counts in
          the prompt that contains it. In a trace of lengths only, reuse is unknown, so prompt and answer are
          new. A request without new tokens is no turn: its snapshots exist. Bytes are those of ``kvstore
          footprint``.
Bound:    the saving depends only on the mean of new tokens per turn.
Run:      python -m bench.simulate.turns FOLDER [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

import kvstore
from kvstore.cli.terminal import write_table
from kvstore.footprint.cost import persistent_bytes, saving_turn
from kvstore.output.chart import Axis, Mark, Point, Series, chart
from kvstore.trace.columns import Ints, Trace
from kvstore.trace.reading import read

HERE, BEFORE = "deepseek-v4.1-flash", "deepseek-v4-flash"


@dataclass(frozen=True, slots=True)
class Row:
    """The turns of one trace, and bytes a token."""

    trace: str
    turns: int
    mean: float
    median: float
    p90: float
    short_share: float
    """Share of turns up to the mean length at which 7/8 are saved."""
    without: float
    with_windows: float
    before: float
    """V4-Flash, with windows."""

    @property
    def saved(self) -> float:
        """Share of V4's bytes that V4.1 without windows does not write."""
        return 1 - self.without / self.before


def new_tokens(trace: Trace) -> Ints:
    """Return the new tokens of each request, ``[requests]``."""
    if not trace.references:
        return trace.input_tokens + trace.output_tokens
    request = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    first_use = np.empty(trace.distinct_blocks, np.int64)
    # Assigned from the end, so that the first use remains.
    first_use[trace.blocks[::-1]] = request[::-1]
    counts: Ints = np.bincount(first_use, minlength=len(trace)) * trace.block_tokens
    # The last block of a prompt may be partial.
    return np.minimum(counts, trace.input_tokens)


def measure(path: Path, longest: float) -> Row:
    """Return the turns of one trace."""
    trace = read(path)
    turns = new_tokens(trace)
    turns = turns[turns > 0]
    mean = Fraction(int(turns.sum()), len(turns))
    here, before = kvstore.layout(HERE), kvstore.layout(BEFORE)
    return Row(
        path.name.removesuffix(".zst").removesuffix(".gz"),
        len(turns),
        float(mean),
        float(np.median(turns)),
        float(np.quantile(turns, 0.9)),
        float((turns <= longest).mean()),
        float(here.bytes_per_token),
        float(persistent_bytes(here, mean)),
        float(persistent_bytes(before, mean)),
    )


def mixes(rows: list[Row], longest: float) -> list[tuple[str, str, float]]:
    """Return pairs of traces, and the share of the first one's turns at which 7/8 are saved."""
    ordered = sorted(rows, key=lambda row: row.mean)
    return [
        (short.trace, long.trace, (long.mean - longest) / (long.mean - short.mean))
        for short, long in itertools.combinations(ordered, 2)
        if short.mean <= longest < long.mean
    ]


def draw(rows: list[Row], longest: float) -> str:
    """Return the saving by mean turn length, as SVG."""
    here, before = kvstore.layout(HERE), kvstore.layout(BEFORE)
    curve = []
    for turn in np.geomspace(10, 20_000, 60):
        kept = persistent_bytes(before, Fraction(int(turn)))
        saved = 100 * float(1 - here.bytes_per_token / kept)
        curve.append(Point(int(turn), saved, saved, saved))
    shares = [(row.mean, 100 * row.saved) for row in rows]
    points = [Point(mean, saved, saved, saved) for mean, saved in shares]
    return chart(
        [
            Series("by length", tuple(curve), is_line=True, has_dots=False),
            Series("traces", tuple(points)),
        ],
        title="What V4.1 without windows saves of V4 with two a turn",
        x=Axis("new tokens a turn, mean", is_log=True),
        y=Axis("% of bytes saved", ends=(70, 100)),
        marks=(Mark(f"7/8 at {longest:,.0f}", longest), Mark("7/8", 87.5, is_of_y=True)),
        description="Short turns save more than 7/8, long ones less.",
    )


def main() -> None:
    """Measure every trace of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder of traces")
    parser.add_argument("--plot", type=Path, help="SVG file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = [path for path in sorted(options.traces.iterdir()) if path.suffix in (".zst", ".gz")]
    # Archives of raw logs repeat sessions of the other files.
    paths = [path for path in paths if ".tar" not in path.suffixes]
    if not paths:
        parser.error(f"{options.traces} has no traces: expected .zst or .gz files")
    turn = saving_turn(kvstore.layout(HERE), kvstore.layout(BEFORE))
    assert turn is not None
    longest = float(turn)
    rows = [measure(path, longest) for path in paths]
    if options.plot is not None:
        options.plot.write_text(draw(rows, longest))
    found = mixes(rows, longest)
    if options.json:
        print(
            json.dumps(
                {
                    "seven_eighths_turn": longest,
                    "traces": [{**asdict(row), "saved": row.saved} for row in rows],
                    "mixes": found,
                }
            )
        )
        return
    write_table(
        ("trace", "turns", "mean", "median", "p90", "short", "B/token", "windows", "V4", "saved"),
        [
            (
                row.trace,
                f"{row.turns:,}",
                f"{row.mean:,.0f}",
                f"{row.median:,.0f}",
                f"{row.p90:,.0f}",
                f"{row.short_share:.0%}",
                f"{row.without:,.0f}",
                f"{row.with_windows:,.0f}",
                f"{row.before:,.0f}",
                f"{row.saved:.1%}",
            )
            for row in rows
        ],
    )
    print(
        f"7/8 are saved at a mean of {longest:,.0f} new tokens a turn; short: turns of no more. "
        "windows, V4: bytes a token with two snapshots a turn"
    )
    for short, long, share in found:
        print(f"{share:6.1%} of turns from {short}, the others from {long}: 7/8")


if __name__ == "__main__":
    main()
