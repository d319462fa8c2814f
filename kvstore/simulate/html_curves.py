"""Sections of a report page with a chart: hits, gaps, times to first token and window TTLs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstore.output.chart import INLINE, Axis, Mark, Series, chart
from kvstore.output.html import Markup, element, table
from kvstore.simulate.curve import LRU
from kvstore.simulate.html_parts import ROOM, SizeScale, duration, figure, line, size_chart
from kvstore.simulate.optimal import OPTIMAL
from kvstore.simulate.results import Report, RowCost
from kvstore.simulate.run import Row
from kvstore.simulate.window import WindowReport

TIMES = (
    *((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h")),
    *((36_000.0, "10 h"), (864_000.0, "10 d")),
)
"""Times that are labelled below a chart, about a power of ten apart."""
TTFT = {"mean": "mean", "p50": "P50", "p95": "P95"}
"""Fields of the times to first token that are drawn, with their names."""
AnyRow = TypeVar("AnyRow", Row, RowCost)


def policies(rows: Sequence[Row] | Sequence[RowCost]) -> list[str]:
    """Return the policies of some rows, in order."""
    return list(dict.fromkeys(row.policy for row in rows))


def _by_size(rows: Sequence[AnyRow]) -> dict[int, dict[str, AnyRow]]:
    """Return rows by size and policy."""
    found: dict[int, dict[str, AnyRow]] = {}
    for row in rows:
        found.setdefault(row.size_blocks, {})[row.policy] = row
    return dict(sorted(found.items()))


def hits_section(report: Report, sizes: SizeScale) -> Iterator[Markup]:
    """Token hit ratios by size and policy."""
    infinite, advice = report.infinite_cache.ratios.prefix_token_hit_ratio, report.recommendation
    names = policies(report.rows)
    rows = [
        [
            *sizes.cells(blocks),
            *(f"{row[policy].ratios.prefix_token_hit_ratio:.1%}" for policy in names),
        ]
        for blocks, row in _by_size(report.rows).items()
    ]
    whole = ["infinite", *sizes.cells(sizes.blocks)[1:], *[f"{infinite:.1%}"] * len(names)]
    values = table("Token hit ratio by size and policy", [*sizes.header(), *names], [*rows, whole])
    yield element("h3", "Hits by size")
    if not infinite:
        yield element("p", "No block is used twice, so a cache of any size hits nothing.")
        yield values
        return
    lru = "lru without a share" if report.origin.parameters["request_share"] is not None else LRU
    yield element(
        "p",
        f"Tokens of leading hits over all tokens requested. {lru} is exact at every size; optimal knows the "
        "future and is the upper bound of any policy. The vertical dashed lines are the sizes at which "
        f"{lru} reaches 90%, 95% and 99% of an infinite cache's hits, and the knee of its curve.",
    )
    reached = {**advice.sizes, "knee": advice.knee.size_blocks}
    yield figure(
        _hits_chart(report, sizes, names),
        "Token hit ratio by cache size",
        table(
            f"Sizes at which {lru} reaches a share of an infinite cache's hits",
            ["share", *sizes.header()],
            [[name, *sizes.cells(blocks)] for name, blocks in reached.items()],
        ),
        values,
    )


def _hits_chart(report: Report, sizes: SizeScale, names: Sequence[str]) -> str:
    infinite = report.infinite_cache.ratios.prefix_token_hit_ratio
    given = report.origin.parameters
    is_curve = given["semantics"] == "prefix" and given["request_share"] is None
    lines = [_hits_line(report, sizes, name, is_exact=is_curve and name == LRU) for name in names]
    if not (is_curve and LRU in names):
        name = "lru by prefix" if given["request_share"] is None else "lru, no share"
        lines.insert(0, _hits_line(report, sizes, name, is_exact=True))
    text = f"{infinite:.1%}"
    mark = Mark(f"infinite cache {text}", 100 * infinite, is_of_y=True)
    advice = "; ".join(report.recommendation.text)
    description = f"An infinite cache hits {text} of tokens. {advice}. The table has every value."
    title, label, top = "Token hit ratio by cache size", "tokens hit, %", 100 * infinite
    return size_chart(sizes, lines, title, label, description, [*sizes.marks, mark], top)


def _hits_line(report: Report, sizes: SizeScale, name: str, *, is_exact: bool) -> Series:
    """Return the line of a policy: from the exact curve, or through the simulated sizes."""
    if is_exact:
        points = [(p.size_blocks, p.prefix_token_hit_ratio) for p in report.lru_curve]
        points = [point for point in points if point[0] >= sizes.first]
    else:
        rows = [row for row in report.rows if row.policy == name and row.size_blocks]
        points = sorted((row.size_blocks, row.ratios.prefix_token_hit_ratio) for row in rows)
    drawn = [(sizes.value(size), 100 * ratio) for size, ratio in points]
    return line(name, drawn, has_dots=not is_exact, is_dashed=name == OPTIMAL)


def gaps_section(report: Report, sizes: SizeScale) -> Iterator[Markup]:
    """Gains that a larger cache and a better policy leave."""
    gaps = {gap.size_blocks: gap for gap in report.recommendation.gaps}
    yield element("h3", "Capacity gap and policy gap")
    if not gaps:
        needed = "Unknown: needs the optimum and another policy, such as --policy lru,arc,s3fifo,optimal."
        yield element("p", needed)
        return
    yield element(
        "p",
        "Capacity gap: hit ratio of an infinite cache less that of the optimum at this size; only more "
        "space closes it. Policy gap: hit ratio of the optimum less that of the best simulated policy. "
        "Both in points of tokens hit.",
    )
    drawn = [gaps[size] for size in sorted(gaps) if size]
    lines = [
        line("capacity gap", ((sizes.value(g.size_blocks), 100 * g.capacity) for g in drawn)),
        line("policy gap", ((sizes.value(g.size_blocks), 100 * g.policy) for g in drawn)),
    ]
    values = table(
        "Gaps in points of tokens hit",
        [*sizes.header(), "capacity gap", "policy gap"],
        [
            [*sizes.cells(size), f"{100 * gap.capacity:.2f}", f"{100 * gap.policy:.2f}"]
            for size, gap in sorted(gaps.items())
        ],
    )
    if len(drawn) < 2:  # no curve
        yield values
        return
    title = "Capacity gap and policy gap by cache size"
    picture = size_chart(sizes, lines, title, "points of tokens hit", "The table has every value.")
    yield figure(picture, "Gaps by cache size", values)


def first_token_section(
    report: Report, costs: Sequence[RowCost], sizes: SizeScale
) -> Iterator[Markup]:
    """Times to first token by size and policy."""
    names, advised = policies(costs), report.recommendation.policy
    shown = advised if advised in names else names[0]
    without, given = costs[0].first_token.without_cache, report.origin.parameters
    reading = (
        "Reading the cache takes no time here; set its bandwidth with --bandwidth."
        if given["bandwidth"] is None
        else f"The cache is read at {given['bandwidth']}, and only where that is faster than computing."
    )
    yield element("h3", "Time to first token by size")
    yield element(
        "p",
        f"Loading and prefill at {given['prefill_tps']:,.0f} tokens/s, without queue and batch: a lower "
        f"bound, for comparing caches. {reading}",
    )
    rest = [field for field in TTFT if field != "mean"]
    rows = [
        [
            *sizes.cells(size),
            *(f"{row[policy].first_token.ttft_seconds.mean:,.3f}" for policy in names),
            *(f"{getattr(row[shown].first_token.ttft_seconds, field):,.3f}" for field in rest),
        ]
        for size, row in _by_size(costs).items()
    ]
    nothing = [
        "no cache",
        *sizes.cells(0)[1:],
        *[f"{without.mean:,.3f}"] * len(names),
        *(f"{getattr(without, field):,.3f}" for field in rest),
    ]
    values = table(
        f"Time to first token in seconds: mean of each policy, percentiles of {shown}",
        [*sizes.header(), *names, *(f"{TTFT[field]} {shown}" for field in rest)],
        [nothing, *rows],
    )
    if not report.infinite_cache.ratios.prefix_token_hit_ratio:  # every line would be level
        yield values
        return
    picture = _first_token_chart(report, sizes, without.mean)
    yield figure(picture, "Time to first token by cache size, under lru", values)


def _first_token_chart(report: Report, sizes: SizeScale, without: float) -> str:
    points = [
        (sizes.value(point.size_blocks), point.ttft_seconds)
        for point in report.lru_curve
        if point.size_blocks >= sizes.first and point.ttft_seconds is not None
    ]
    lines = [
        line(name, ((size, getattr(times, field)) for size, times in points), has_dots=False)
        for field, name in TTFT.items()
    ]
    mark = Mark(f"mean without a cache {without:,.2f} s", without, is_of_y=True)
    description = f"Mean without a cache: {without:,.2f} s. The table has the simulated sizes."
    title, label = "Time to first token by cache size, under lru", "seconds to first token"
    return size_chart(sizes, lines, title, label, description, [*sizes.marks, mark], without)


def windows_section(report: Report, pool: WindowReport) -> Iterator[Markup]:
    """Replays by window TTL."""
    advice = report.recommendation.window
    yield element("h3", "Window TTL")
    if not report.trace.seconds or advice is None or advice.ttl_seconds is None:
        yield element("p", "All requests have the same arrival time, so all TTLs are equivalent.")
        return
    if not pool.asked.turns:
        yield element("p", "No request has a hit, so none needs a window.")
        return
    tokens, budget = pool.window_tokens, pool.budget_tokens
    bound = "no capacity limit" if budget is None else f"a capacity of {budget:,} tokens"
    yield element(
        "p",
        f"Windows of {tokens:,} tokens in a pool with {bound}, for the hits of an infinite cache. A request "
        f"whose window is not in the pool replays up to {tokens:,} tokens.",
    )
    header = ["TTL", "without replay", "by tokens", "replays", "replayed tokens"]
    values = table(
        "Requests without replay by TTL",
        [*header, "evicted", "expired"],
        [
            [
                "infinite" if p.ttl_seconds is None else duration(p.ttl_seconds),
                f"{p.kept:.1%}",
                f"{p.kept_token_ratio:.1%}",
                *(f"{n:,}" for n in (p.replays, p.replayed_tokens, p.evicted, p.expired)),
            ]
            for p in pool.curve
        ],
    )
    picture = _windows_chart(pool, advice.ttl_seconds, advice.kept)
    yield figure(picture, "Requests without replay by window TTL", values)


def _windows_chart(pool: WindowReport, advised: float, kept: float) -> str:
    points = [(p.ttl_seconds, p) for p in pool.curve if p.ttl_seconds is not None]
    infinite, asked = pool.curve[-1].kept, pool.asked.ttl_seconds
    marks = [Mark(f"advised {duration(advised)}", advised)]
    if asked not in {None, advised}:
        assert asked is not None
        marks.append(Mark(f"asked {duration(asked)}", asked))
    marks.append(Mark(f"infinite TTL {infinite:.1%}", 100 * infinite, is_of_y=True))
    low, high = points[0][0] / ROOM, points[-1][0] * ROOM
    return chart(
        [
            line("requests", ((ttl, 100 * p.kept) for ttl, p in points)),
            line("by tokens of their hit", ((ttl, 100 * p.kept_token_ratio) for ttl, p in points)),
        ],
        title="Requests without replay by window TTL",
        description=f"With a TTL of {duration(advised)}, {kept:.1%} of requests need no replay; with "
        f"an infinite TTL, {infinite:.1%}. The table has every value.",
        x=Axis(
            "TTL, logarithmic",
            is_log=True,
            ends=(low, high),
            ticks=tuple((value, name) for value, name in TIMES if low <= value <= high),
        ),
        y=Axis("without replay, %", ends=(0, 100 * ROOM)),
        marks=marks,
        frame=INLINE,
    )
