"""SVG charts: points with error bars, lines and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
NAMES, LABELS, ROW = 170, 130, 26
"""Bar charts: width of names at the left and of labels at the right, and height of a row."""
CROWDED = 40
"""Distance to the next point to the right below which a label is left of its point."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Distinguishable by colour-blind readers. Source: the palette of Okabe and Ito."""
INK, PAPER, GRID = "#222", "#fff", "#e4e4e4"
LETTER = 6.4
"""Average width of a letter at font size 12: slightly above that of common sans-serif fonts."""
LINE = 16
"""Line height."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Size of a chart and the margins of its plot."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    is_inline: bool = False
    """Part of an HTML page that gives a heading and colours; the legend is below the plot."""


ALONE = Frame(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM)
"""Separate file, with the legend at the right."""
INLINE = Frame(400, 270, 52, 14, 10, 44, is_inline=True)
"""Part of a page; readable when a phone of 360 pixels shrinks it to 320."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of a chart."""

    label: str
    is_log: bool = False
    ends: tuple[float, float] | None = None
    """First and last value; by default those of the points, with a margin."""
    ticks: tuple[tuple[float, str], ...] = ()
    """Values and their labels; by default round numbers."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Named value of an axis, drawn as a dashed line across the plot."""

    name: str
    value: float
    is_of_y: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """Measured value; ``low`` and ``high`` are the ends of its error bar."""

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
    has_dots: bool = True
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """Named value, with a label at the end of its bar."""

    name: str
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Map from values to page coordinates, linear or logarithmic."""

    first: float
    last: float
    start: float
    stop: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """Return the coordinate of a value."""
        first, last, value = (
            (math.log10(number) for number in (self.first, self.last, value))
            if self.is_log
            else (self.first, self.last, value)
        )
        return self.start + (value - first) / (last - first) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values to label: 1, 2 and 5 times powers of ten, or equal steps."""
        if self.is_log:
            low, high = math.floor(math.log10(self.first)), math.ceil(math.log10(self.last))
            found = [f * 10.0**power for power in range(low, high + 1) for f in (1, 2, 5)]
        else:
            rough = (self.last - self.first) / 6
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
            begin = math.ceil(self.first / step)
            found = [n * step for n in range(begin, math.floor(self.last / step) + 1)]
        return [value for value in found if self.first <= value <= self.last]


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    frame: Frame = ALONE,
    description: str = "",
) -> str:
    """Return an SVG file. Raises ``ValueError`` without points. Values on a logarithmic axis are positive.

    ``description`` is the text alternative of the chart. A page may set the colours of texts, of classes
    ``mark`` and ``grid``, and of ``series-0``, ``series-1``, ...
    """
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError("a chart needs at least one point, found none")
    upright = [mark for mark in marks if not mark.is_of_y]
    level = [mark for mark in marks if mark.is_of_y]
    left, right, bottom = frame.left, frame.width - frame.right, frame.height - frame.bottom
    across = _scale(x, [*(p.x for p in points), *(m.value for m in upright)], left, right)
    names = _in_rows([(across.position(m.value), m.name) for m in upright], left, right)
    top = frame.top + LINE * (1 + max((row for *_, row in names), default=-1))
    ends = [value for p in points for value in (p.low, p.high)]
    up = _scale(y, [*ends, *(m.value for m in level)], bottom, top)
    body = _axes(across, up, x, y, frame)
    for mark, (at, row) in zip(sorted(upright, key=_value), names, strict=True):
        middle = across.position(mark.value)
        body.append(_line(middle, top, middle, bottom, INK, "class='mark' stroke-dasharray='2 3'"))
        body.append(_text(at, top - 5 - LINE * row, mark.name, "text-anchor='middle'"))
    # Lines may run behind the name, so it has an outline in the paper's colour.
    halo = f"class='mark' stroke='{PAPER}' stroke-width='4' paint-order='stroke'"
    for mark in level:
        level_y = up.position(mark.value)
        body.append(
            _line(left, level_y, right, level_y, INK, "class='mark' stroke-dasharray='2 3'")
        )
        body.append(_text(left + 4, level_y - 5, mark.name, halo))
    for number, one in enumerate(series):
        # Labels of every other series are below their points, so they rarely overlap.
        body += _series(one, number, across, up, label_drop=14 if number % 2 else -6)
    if not frame.is_inline:
        body.append(_text(left, 22, title, "font-weight='bold'"))
    keys, height = _keys(series, frame)
    return _page(frame.width, height, [*body, *keys], title, description, frame.is_inline)


def bars(rows: Sequence[Bar], *, title: str, x_label: str) -> str:
    """Return an SVG file with one bar per row, on a logarithmic scale.

    Raises ``ValueError`` without rows, or for a value that is not positive.
    """
    if not rows or min(row.value for row in rows) <= 0:
        msg = f"bars on a logarithmic scale need positive values, found {[r.value for r in rows]}"
        raise ValueError(msg)
    # Whole decades, with one more if the smallest value would have almost no bar.
    first = 10.0 ** math.floor(math.log10(min(row.value for row in rows) / 2))
    last = 10.0 ** math.ceil(math.log10(max(row.value for row in rows)))
    x = Scale(first, max(last, 10 * first), NAMES, WIDTH - LABELS, is_log=True)
    bottom = TOP + ROW * len(rows)
    body = [_text(NAMES, 22, title, "font-weight='bold'")]
    for value in x.ticks():
        if math.log10(value).is_integer():
            at = x.position(value)
            body.append(_line(at, TOP, at, bottom, GRID, "class='grid'"))
            body.append(_text(at, bottom + 18, f"{value:,.12g}", "text-anchor='middle'"))
    for number, row in enumerate(rows):
        top, end = TOP + ROW * number, x.position(row.value)
        box = f"x='{NAMES}' y='{top + 4}' width='{end - NAMES:.1f}' height='{ROW - 8}'"
        body.append(f"<rect {box} fill='{COLOURS[0]}'/>")
        body.append(_text(NAMES - 8, top + ROW - 9, row.name, "text-anchor='end'"))
        body.append(_text(end + 6, top + ROW - 9, row.label))
    body.append(_text((NAMES + WIDTH - LABELS) / 2, bottom + 40, x_label, "text-anchor='middle'"))
    return _page(WIDTH, bottom + BOTTOM, body, title)


def escaped(text: str) -> str:
    """Return a text escaped for XML and HTML, between tags or in quotes."""
    # XML forbids control characters, escaped or not.
    return escape("".join(each if each.isprintable() else "?" for each in text))


def _page(
    width: int,
    height: int,
    body: Sequence[str],
    title: str,
    description: str = "",
    is_inline: bool = False,  # noqa: FBT001, FBT002 - one of a frame's
) -> str:
    size = "" if is_inline else f"width='{width}' height='{height}' "
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {size}role='img' "
        f"font-family='sans-serif' font-size='12' fill='{INK}'>"
    )
    words = [f"<title>{escaped(title)}</title>"]
    words += [f"<desc>{escaped(description)}</desc>"] if description else []
    paper = [] if is_inline else [f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"]
    return "\n".join([head, *words, *paper, *body, "</svg>", ""])


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float) -> Scale:
    if axis.ends is not None:
        return Scale(*axis.ends, start, stop, axis.is_log)
    if axis.is_log:
        return Scale(min(values) / 1.3, max(values) * 1.3, start, stop, is_log=True)
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    return Scale(low - room, high + room, start, stop)


def _value(mark: Mark) -> float:
    return mark.value


def _in_rows(
    labels: Sequence[tuple[float, str]], left: float, right: float
) -> list[tuple[float, int]]:
    """Return the centre and the row of each label, so that no two overlap.

    Labels are ordered by position, within ``left`` and ``right``, in the lowest row with room.
    """
    placed: list[tuple[float, int]] = []
    ends: list[float] = []
    for at, text in sorted(labels):
        half = len(text) * LETTER / 2
        middle = max(left + half, min(at, right - half))
        row = next((n for n, end in enumerate(ends) if end <= middle - half), len(ends))
        ends[row : row + 1] = [middle + half + LETTER]
        placed.append((middle, row))
    return placed


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escaped(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{colour}' {more}/>"


def _axes(across: Scale, up: Scale, x: Axis, y: Axis, frame: Frame) -> list[str]:
    drawn = []
    top, bottom, right = up.stop, frame.height - frame.bottom, frame.width - frame.right
    ticks = x.ticks or tuple((value, f"{value:,g}") for value in across.ticks())
    # Labels that would overlap are in two rows.
    labels = _in_rows([(across.position(value), name) for value, name in ticks], 0, frame.width)
    for (value, name), (_, row) in zip(ticks, labels, strict=True):
        at = across.position(value)
        drawn.append(_line(at, top, at, bottom, GRID, "class='grid'"))
        drawn.append(_text(at, bottom + 18 + 14 * row, name, "text-anchor='middle'"))
    for value, name in y.ticks or tuple((value, f"{value:g}") for value in up.ticks()):
        at = up.position(value)
        drawn.append(_line(frame.left, at, right, at, GRID, "class='grid'"))
        drawn.append(_text(frame.left - 6, at + 4, name, "text-anchor='end'"))
    centre, middle = (frame.left + right) / 2, (top + bottom) / 2
    drawn.append(_text(centre, frame.height - 10, x.label, "text-anchor='middle'"))
    turn = f"text-anchor='middle' transform='rotate(-90 14 {middle:.1f})'"
    return [*drawn, _text(14, middle, y.label, turn)]


def _keys(series: Sequence[Series], frame: Frame) -> tuple[list[str], int]:
    """Return the legend, and the height of a chart with it."""
    drawn = []
    at, base = float(frame.left), frame.height + 10
    for number, one in enumerate(series):
        if frame.is_inline:
            length = 22 + len(one.name) * LETTER
            if at > frame.left and at + length > frame.width:
                at, base = float(frame.left), base + LINE
            x, y, at = at + 6, base, at + length + LETTER
        else:
            x, y = frame.width - frame.right + 22, frame.top + 14 + 20 * number
        sample = _dot(x, y - 4) if one.has_dots else ""
        if one.is_line and (frame.is_inline or not one.has_dots):
            sample += _line(x - 8, y - 4, x + 8, y - 4, "currentColor", _dash(one, number))
        drawn.append(_coloured(number, [sample]))
        drawn.append(_text(x + 12, y, one.name))
    return drawn, base + LINE - 6 if frame.is_inline else frame.height


def _coloured(number: int, drawn: Sequence[str]) -> str:
    of = number % len(COLOURS)
    return f"<g class='series-{of}' color='{COLOURS[of]}'>{''.join(drawn)}</g>"


def _dot(x: float, y: float) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='currentColor'/>"


def _dash(series: Series, number: int) -> str:
    """Return the dash style of a line: dashed on request, or if its colour is used again."""
    return "stroke-dasharray='6 4'" if series.is_dashed or number >= len(COLOURS) else ""


def _series(series: Series, number: int, x: Scale, y: Scale, label_drop: int) -> list[str]:
    drawn = []
    if series.is_line:
        coordinates = " ".join(
            f"{x.position(p.x):.1f},{y.position(p.y):.1f}" for p in series.points
        )
        style = f"fill='none' stroke='currentColor' stroke-width='1.5' {_dash(series, number)}"
        drawn.append(f"<polyline points='{coordinates}' {style}/>")
    for point in series.points if series.has_dots else ():
        at_x, at_y = x.position(point.x), y.position(point.y)
        if point.low < point.high:
            low, high = y.position(point.low), y.position(point.high)
            drawn.append(_line(at_x, low, at_x, high, "currentColor"))
        drawn.append(_dot(at_x, at_y))
        if point.label:
            ahead = (x.position(other.x) - at_x for other in series.points)
            is_crowded = any(0 < gap < CROWDED for gap in ahead)
            side, anchor = (-6, "end") if is_crowded else (6, "start")
            style = f"fill='currentColor' text-anchor='{anchor}'"
            drawn.append(_text(at_x + side, at_y + label_drop, point.label, style))
    return [_coloured(number, drawn)]
