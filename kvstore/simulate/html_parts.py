"""Parts that the sections of a report page share: the size axis, figures, lists and number texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.output.chart import INLINE, Axis, Mark, Point, Series, chart
from kvstore.output.html import Markup, element, joined
from kvstore.output.sizes import size_text
from kvstore.simulate.results import Report

NONE = "-"
"""Text of an absent value."""
RISES = 0.02
"""Share of the infinite cache's hit ratio that a curve gains before the first drawn size."""
ROOM = 1.15
"""Factor between the last value of a chart and its edge."""
TICKS = 6
"""Most size labels below a chart: as many as fit side by side on a phone."""


@dataclass(frozen=True, slots=True)
class SizeScale:
    """Cache sizes as drawn and named: in bytes if the bytes of a block are known, else in blocks."""

    blocks: int
    """Distinct blocks of the trace."""
    block_bytes: float | None
    first: int
    """The smallest drawn size, in blocks."""
    last: int
    marks: tuple[Mark, ...]
    """Named sizes."""
    asked: Mapping[int, float]
    """Requested shares by size in blocks; whole blocks are slightly less than a share."""

    @classmethod
    def of(cls, report: Report) -> SizeScale:
        """Return the scale that shows every size of a report."""
        trace, advice = report.trace, report.recommendation
        block_bytes = None
        if trace.bytes_per_token is not None:
            block_bytes = trace.bytes_per_token * trace.block_tokens
        infinite = report.infinite_cache.ratios.prefix_token_hit_ratio
        used = [point for point in report.lru_curve if point.size_blocks]
        level = RISES * infinite + (used[0].prefix_token_hit_ratio if used else 0.0)
        flat = [point.size_blocks for point in used if point.prefix_token_hit_ratio <= level]
        rows = [row.size_blocks for row in report.rows if row.size_blocks]
        named = {share: blocks for share, blocks in advice.sizes.items() if blocks}
        if advice.knee.size_blocks:
            named["knee"] = advice.knee.size_blocks
        same: dict[int, list[str]] = {}
        for name, size in named.items():
            same.setdefault(size, []).append(name)
        blocks = trace.distinct_blocks
        start = max(flat, default=1) if infinite else 1  # without reuse the whole curve is flat
        return cls(
            blocks=blocks,
            block_bytes=block_bytes,
            first=max(1, min([start, blocks, *rows, *named.values()])),
            last=max([1, blocks, *rows]),
            marks=tuple(
                Mark(", ".join(names), size * (block_bytes or 1)) for size, names in same.items()
            ),
            asked={row.size_blocks: row.size_fraction for row in report.rows},
        )

    def value(self, blocks: int) -> float:
        """Return a size in the unit of the axis."""
        return blocks * (self.block_bytes or 1)

    def axis(self) -> Axis:
        """Return the axis of a chart."""
        ends = self.value(self.first) / ROOM, self.value(self.last) * ROOM
        unit = "blocks" if self.block_bytes is None else "bytes"
        label = f"cache size, {unit}, logarithmic"
        return Axis(label, is_log=True, ends=ends, ticks=self._ticks(*ends))

    def _ticks(self, low: float, high: float) -> tuple[tuple[float, str], ...]:
        """Return the densest round sizes that fit."""
        if self.block_bytes is None:
            exact = [f * 10.0**power for power in range(16) for f in (1, 2, 5)]
            series = [exact, exact[::3], exact[::6], exact[::9]]
        else:
            exact = [2.0**power for power in range(60)]
            series = [exact, exact[::2], exact[::4], exact[::10]]
        fits = ([v for v in values if low <= v <= high] for values in series)
        values = next((v for v in fits if len(v) <= TICKS), [])
        return tuple((value, self._tick(value)) for value in values)

    def _tick(self, value: float) -> str:
        if self.block_bytes is None:
            return f"{value:,.0f}"
        return size_text(value, digits=1)

    def text(self, blocks: int | None) -> str:
        """Return a size with its unit."""
        if blocks is None:
            return NONE
        if self.block_bytes is None:
            return blocks_text(blocks)
        return size_text(round(blocks * self.block_bytes))

    def header(self) -> list[str]:
        """Return the table columns of a size."""
        return ["size", *([] if self.block_bytes is None else ["blocks"]), "share"]

    def cells(self, blocks: int | None) -> list[str]:
        """Return the table cells of a size."""
        share = NONE
        if blocks is not None and self.blocks:
            share = f"{self.asked.get(blocks, blocks / self.blocks):.1%}"
        count = NONE if blocks is None else f"{blocks:,}"
        return [self.text(blocks), *([] if self.block_bytes is None else [count]), share]


def line(
    name: str,
    points: Iterable[tuple[float, float]],
    *,
    has_dots: bool = True,
    is_dashed: bool = False,
) -> Series:
    """Return points without error bars, joined by a line."""
    drawn = tuple(Point(x, y, y, y) for x, y in points)
    return Series(name, drawn, is_line=True, has_dots=has_dots, is_dashed=is_dashed)


def size_chart(
    sizes: SizeScale,
    lines: Sequence[Series],
    title: str,
    y_label: str,
    description: str,
    marks: Sequence[Mark] = (),
    top: float = 0.0,
) -> str:
    """Return a chart of values by cache size, up to ``top`` or the largest value."""
    top = max(top, *(point.y for each in lines for point in each.points))
    y = Axis(y_label, ends=(0, top * ROOM or 1))
    words = {"title": title, "description": description}
    return chart(lines, x=sizes.axis(), y=y, marks=marks, frame=INLINE, **words)


def figure(picture: str, caption: str, *tables: Markup) -> Markup:
    """Return a chart beside its tables."""
    drawn = element("figure", Markup(picture), element("figcaption", caption))
    return element("div", drawn, element("div", *tables), class_="beside")


def listed(lines: Sequence[str]) -> Markup:
    """Return a bulleted list."""
    return element("ul", *(element("li", each) for each in lines))


def code(command: str) -> Markup:
    """Return a command."""
    # A word is broken only if it is longer than a line, and never after one of its hyphens.
    words = (joined([element("span", word), " "]) for word in command.split(" "))
    return element("pre", element("code", *words))


def blocks_text(count: int) -> str:
    """Return a number of blocks."""
    return f"{count:,} block{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit that gives at least 1."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
