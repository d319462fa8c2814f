"""Figures of two checkouts of the project, in interleaved pairs.

Question: does a change reduce a speed?
Method:   one benchmark in both checkouts, alternating in changing order, each run in its own process. A pair's
          ratio is the speed after over the speed before: for seconds and for ratios of times before / after,
          for GB/s after / before. Reported are the median over pairs and its 95 % interval (order statistics).
Bound:    the checkout before; 1.0 is no change.
Run:      python -m bench.versions --before FOLDER [--pairs 9] [--json] -- bench.codec --no-peers --json
Needs:    a second checkout with its extension built, and an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.cli.terminal import write_table

NAMES = ("section", "bar", "work", "what", "by", "of", "beside")
"""Keys of a row that name its figure."""
VALUES = {"value": "ratio", "found": "ratio", "gb_per_s": "GB/s"}
"""Key of the figure, and its unit where the row has none."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure before and after, and the ratio of speeds."""

    name: str
    before: float
    after: float
    unit: str
    ratio: float
    low: float
    high: float
    pairs: int


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return an interval of the median with a probability of at least 95 %, from 6 values on."""
    ordered, count = sorted(ratios), len(ratios)
    outside, depth = 0.0, 0
    while depth < count // 2 and (outside + 2 * comb(count, depth) / 2**count) <= 0.05:
        outside += 2 * comb(count, depth) / 2**count
        depth += 1
    depth = max(depth - 1, 0)
    return ordered[depth], ordered[count - 1 - depth]


def figures(folder: Path, command: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Run a bench in a checkout; return its figures and their units, by name."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        rows = json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(
            f"{folder}: {' '.join(command)} printed no JSON; its exit status is {done.returncode}"
        )
    found = {}
    for row in rows["rows"] if isinstance(rows, dict) else rows:
        name = " ".join(row[key] for key in NAMES if isinstance(row.get(key), str) and row[key])
        value, unit = next((row[key], unit) for key, unit in VALUES.items() if key in row)
        found[name] = (float(value), str(row.get("unit", unit)))
    return found


def faster(before: float, after: float, unit: str) -> float:
    """Return the speed after over the speed before."""
    if "/s" in unit:
        return after / before
    return before / after


def compare(before: Path, after: Path, command: Sequence[str], pairs: int) -> list[Change]:
    """Run a bench in both checkouts in turn, and compare each figure."""
    runs: list[tuple[Any, Any]] = []
    for number in range(pairs):
        order = (before, after) if number % 2 else (after, before)
        done = {folder: figures(folder, command) for folder in order}
        runs.append((done[before], done[after]))
        print(f"pair {number + 1} of {pairs}", file=sys.stderr)
    changes = []
    for name, (_, unit) in runs[0][0].items():
        values = [(old[name][0], new[name][0]) for old, new in runs if name in old and name in new]
        if len(values) < pairs or not all(a > 0 and b > 0 for a, b in values):
            continue  # exact figures (counts of differences) are no speeds
        ratios = [faster(a, b, unit) for a, b in values]
        low, high = interval(ratios)
        changes.append(
            Change(
                name=name,
                before=median(a for a, _ in values),
                after=median(b for _, b in values),
                unit=unit,
                ratio=median(ratios),
                low=low,
                high=high,
                pairs=pairs,
            )
        )
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs="+", help="a bench and its arguments, after --")
    options = parser.parse_args()
    if not (options.before / "bench").is_dir():
        sys.exit(f"{options.before} has no folder bench: give a checkout of this project")
    changes = compare(options.before.resolve(), ROOT, options.command, options.pairs)
    if options.json:
        print(json.dumps([asdict(change) for change in changes], indent=2))
        return
    write_table(
        ("figure", "before", "after", "unit", "ratio", "95 %"),
        [
            (
                c.name,
                f"{c.before:.4g}",
                f"{c.after:.4g}",
                c.unit,
                f"{c.ratio:.3f}",
                f"{c.low:.3f}-{c.high:.3f}",
            )
            for c in changes
        ],
    )


if __name__ == "__main__":
    main()
