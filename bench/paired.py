"""Paired measurements: ratios of two speeds of the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Timed = Callable[[], float]
"""Runs some work and returns the seconds of its measured part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure and its reference."""

    section: str
    what: str
    of: str = ""
    """The layout or the trace."""
    value: float
    """Median over pairs, in ``unit``."""
    unit: str
    beside: str = ""
    bound: float | None = None
    """Median of the reference, in ``unit``."""
    ratio: float | None = None
    """Speeds: median and quartiles over pairs."""
    low: float | None = None
    high: float | None = None
    bar: float | None = None
    """Minimum of the ratio; without a reference, maximum of the value."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Return whether the bar is met; None without a bar."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.ratio is None else self.ratio >= self.bar


def seconds(work: Callable[[], Any]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def paired(
    mine: Timed, theirs: Timed, pairs: int, advance: Callable[[int, int], None] | None = None
) -> tuple[list[float], list[float]]:
    """Run both once unmeasured, then ``pairs`` times in changing order."""
    mine()
    theirs()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append((mine, theirs)[which]())
        if advance is not None:
            advance(number + 1, pairs)
    return found


def speeds(mine: Sequence[float], theirs: Sequence[float], moved: int) -> dict[str, Any]:
    """Return the fields of a row in GB/s, for ``moved`` bytes in the seconds of each side.

    The ratio is the median of the pairs' ratios, not the ratio of the medians.
    """
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    low, _, high = (
        quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    )
    return {
        "value": moved / median(mine) / 1e9,
        "unit": "GB/s",
        "bound": moved / median(theirs) / 1e9,
        "ratio": median(ratios),
        "low": low,
        "high": high,
    }
