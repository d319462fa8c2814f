"""Charts as SVG text: points with error bars, joined to lines or not; bars. They know no measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
NAMES, LABELS, ROW = 170, 130, 26
"""Of bars: room for names at the left, for labels at the right, and the height of a row."""
CROWDED = 40
"""A label goes to the left of its point if the next point to the right is nearer than this."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Told apart by colour-blind readers as well. Source: the palette of Okabe and Ito."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured value; ``low`` and ``high`` end its error bar."""

    x: float
    y: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour."""

    name: str
    points: tuple[Point, ...]
    is_line: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One value with a name, and what stands at the end of its bar."""

    name: str
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to places on the page: linear, or by their logarithm."""

    first: float
    last: float
    start: float
    stop: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, in units of the page."""
        first, last, value = (
            (math.log10(number) for number in (self.first, self.last, value))
            if self.is_log
            else (self.first, self.last, value)
        )
        return self.start + (value - first) / (last - first) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values to label: powers of ten with 2 and 5 between, or equal steps."""
        if self.is_log:
            low, high = math.floor(math.log10(self.first)), math.ceil(math.log10(self.last))
            found = [f * 10.0**power for power in range(low, high + 1) for f in (1, 2, 5)]
        else:
            rough = (self.last - self.first) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
            begin = math.ceil(self.first / step)
            found = [n * step for n in range(begin, math.floor(self.last / step) + 1)]
        return [value for value in found if self.first <= value <= self.last]


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    is_log: bool = False,
    x_names: Sequence[str] = (),
) -> str:
    """Return a whole SVG file. ``is_log`` is for the values on the y axis, all positive then.

    ``x_names`` are what x = 1, 2, ... stand for, where they are no numbers.

    Raises:
        ValueError: if there is no point at all.
    """
    points = [point for one in series for point in one.points]
    if not points:
        msg = "a chart needs at least one point, found none"
        raise ValueError(msg)
    x = Scale(*_range([p.x for p in points], 0.06), LEFT, WIDTH - RIGHT)
    ends = [value for p in points for value in (p.low, p.high)]
    low, high = (min(ends) / 1.3, max(ends) * 1.3) if is_log else _range(ends, 0.06)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log)
    body = [_text(LEFT, 22, title, "font-weight='bold'"), *_axes(x, y, x_label, y_label, x_names)]
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        # Labels of every other series hang below their points: those of two rarely meet then.
        body += _series(one, colour, x, y, label_drop=14 if number % 2 else -6)
        top = TOP + 14 + 20 * number
        body.append(f"<circle cx='{WIDTH - RIGHT + 22}' cy='{top - 4}' r='4' fill='{colour}'/>")
        body.append(_text(WIDTH - RIGHT + 32, top, one.name))
    return _page(HEIGHT, body)


def bars(rows: Sequence[Bar], *, title: str, x_label: str) -> str:
    """Return a whole SVG file: a bar for each row, from the top down, on a logarithmic scale.

    Raises:
        ValueError: if there is no row, or a value is not positive: it has no logarithm.
    """
    if not rows or min(row.value for row in rows) <= 0:
        msg = f"bars on a logarithmic scale need positive values, found {[r.value for r in rows]}"
        raise ValueError(msg)
    # Whole decades, one more below if the smallest value had no bar to speak of.
    first = 10.0 ** math.floor(math.log10(min(row.value for row in rows) / 2))
    last = 10.0 ** math.ceil(math.log10(max(row.value for row in rows)))
    x = Scale(first, max(last, 10 * first), NAMES, WIDTH - LABELS, is_log=True)
    bottom = TOP + ROW * len(rows)
    body = [_text(NAMES, 22, title, "font-weight='bold'")]
    for value in x.ticks():
        if math.log10(value).is_integer():
            at = x.place(value)
            body.append(_line(at, TOP, at, bottom, "#e4e4e4"))
            body.append(_text(at, bottom + 18, f"{value:,.12g}", "text-anchor='middle'"))
    for number, row in enumerate(rows):
        top, end = TOP + ROW * number, x.place(row.value)
        box = f"x='{NAMES}' y='{top + 4}' width='{end - NAMES:.1f}' height='{ROW - 8}'"
        body.append(f"<rect {box} fill='{COLOURS[0]}'/>")
        body.append(_text(NAMES - 8, top + ROW - 9, row.name, "text-anchor='end'"))
        body.append(_text(end + 6, top + ROW - 9, row.label))
    body.append(_text((NAMES + WIDTH - LABELS) / 2, bottom + 40, x_label, "text-anchor='middle'"))
    return _page(bottom + BOTTOM, body)


def _page(height: int, body: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' "
        f"height='{height}' font-family='sans-serif' font-size='12' fill='#222'>"
    )
    frame = f"<rect width='{WIDTH}' height='{height}' fill='#fff'/>"
    return "\n".join([head, frame, *body, "</svg>", ""])


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return low - room, high + room


def _text(x: float, y: float, text: str, more: str = "") -> str:
    # XML has no place for control characters, escaped or not.
    shown = escape("".join(each if each.isprintable() else "?" for each in text))
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{shown}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'/>"


def _axes(x: Scale, y: Scale, x_label: str, y_label: str, x_names: Sequence[str]) -> list[str]:
    drawn = []
    named = [(float(value), name) for value, name in enumerate(x_names, 1)]
    named = named or [(value, f"{value:,g}") for value in x.ticks()]
    for number, (value, name) in enumerate(named):
        at = x.place(value)
        # Names are longer than numbers: those of neighbours stand in two lines.
        below = HEIGHT - BOTTOM + 18 + (14 if x_names and number % 2 else 0)
        drawn.append(_line(at, TOP, at, HEIGHT - BOTTOM, "#e4e4e4"))
        drawn.append(_text(at, below, name, "text-anchor='middle'"))
    for value in y.ticks():
        at = y.place(value)
        drawn.append(_line(LEFT, at, WIDTH - RIGHT, at, "#e4e4e4"))
        drawn.append(_text(LEFT - 6, at + 4, f"{value:g}", "text-anchor='end'"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "text-anchor='middle'"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turn = f"text-anchor='middle' transform='rotate(-90 16 {middle:.1f})'"
    return [*drawn, _text(16, middle, y_label, turn)]


def _series(series: Series, colour: str, x: Scale, y: Scale, label_drop: int) -> list[str]:
    drawn = []
    if series.is_line:
        path = " ".join(f"{x.place(p.x):.1f},{y.place(p.y):.1f}" for p in series.points)
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colour}'/>")
    for point in series.points:
        at_x, at_y = x.place(point.x), y.place(point.y)
        drawn.append(_line(at_x, y.place(point.low), at_x, y.place(point.high), colour))
        drawn.append(f"<circle cx='{at_x:.1f}' cy='{at_y:.1f}' r='4' fill='{colour}'/>")
        if point.label:
            ahead = (x.place(other.x) - at_x for other in series.points)
            is_crowded = any(0 < gap < CROWDED for gap in ahead)
            side, anchor = (-6, "end") if is_crowded else (6, "start")
            style = f"fill='{colour}' text-anchor='{anchor}'"
            drawn.append(_text(at_x + side, at_y + label_drop, point.label, style))
    return drawn
