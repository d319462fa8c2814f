"""Tables of ``kvstore simulate``."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cli.terminal import write_line, write_table
from kvstore.output.sizes import size_text
from kvstore.simulate.cost import FirstToken, Seconds
from kvstore.simulate.hierarchy import Hierarchy
from kvstore.simulate.recommendation import Recommendation
from kvstore.simulate.results import Report, RowCost
from kvstore.simulate.run import Ratios
from kvstore.simulate.sentences import hint_lines
from kvstore.simulate.window import WindowReport

_TIMES = ("mean", "p50", "p95", "p99")
_TIMES_TITLE = "Time to first token in seconds: prefill and loading only, no queue"


def write_report(report: Report) -> None:
    """Print rows, costs, tiers, window pool, hints and recommendation of a report."""
    _write_rows(report)
    advice = report.recommendation
    _write_recommended(advice, is_bounded=report.origin.parameters["request_share"] is not None)
    if report.costs is not None:
        _write_costs(report.costs)
    for each in report.hierarchies or ():
        _write_tiers(each)
    if report.window_pool is not None:
        _write_windows(report.window_pool)
    for title, lines in (
        ("Hints:", hint_lines(report.hints)),
        ("Recommendation:", [*advice.text, f"command: {advice.command}"]),
    ):
        write_line(title)
        for line in lines:
            write_line(f"- {line}")


def _write_rows(report: Report) -> None:
    rows = [
        [row.policy, f"{row.size_blocks:,}", *_shares(row.size_fraction, row.ratios)]
        for row in report.rows
    ]
    for interval, ratios in report.infinite_cache_of.items():
        label = "infinite cache" if interval == "all" else "its last half"
        rows.append([label, f"{report.infinite_cache.size_blocks:,}", *_shares(1.0, ratios)])
    write_line(f"{report.trace.name}: hit ratios by policy and size")
    columns = ["policy", "blocks", "size", "tokens", "prefix", "any block", "requests"]
    write_table(columns, rows)


def _shares(size: float, ratios: Ratios) -> list[str]:
    shares = (
        size,
        ratios.prefix_token_hit_ratio,
        ratios.prefix_hit_ratio,
        ratios.block_hit_ratio,
        ratios.requests_with_hit_ratio,
    )
    return [f"{each:.2%}" for each in shares]


def _write_recommended(advice: Recommendation, *, is_bounded: bool) -> None:
    """Print the choice, and sizes of the LRU curve. ``is_bounded``: requests have a share."""
    if (choice := advice.choice) is not None:
        size = "" if choice.size_bytes is None else f", {_bytes(choice.size_bytes)}"
        count = f"{choice.size_blocks:,}{size}"
        chosen = [(choice.policy, count, f"{choice.prefix_token_hit_ratio:.2%}")]
        chosen += [(name, "the same", f"{ratio:.2%}") for name, ratio in choice.others.items()]
        write_table(["recommended first", "blocks", "tokens hit"], chosen)
    sizes = [
        (f"{share} of infinite cache", f"{blocks:,}" if blocks is not None else "-")
        for share, blocks in advice.sizes.items()
    ]
    sizes.append(("knee of the curve", f"{advice.knee.size_blocks:,}"))
    write_table([f"LRU reaches{' without a share' if is_bounded else ''}", "with blocks"], sizes)
    if advice.gaps:
        gaps = [
            (f"{gap.size_blocks:,}", f"{gap.capacity:.2%}", f"{gap.policy:.2%}")
            for gap in advice.gaps
        ]
        write_table(["blocks", "capacity gap", "policy gap"], gaps)


def _write_costs(costs: Sequence[RowCost]) -> None:
    write_line(_TIMES_TITLE)
    rows = [
        [cost.policy, f"{cost.size_blocks:,}", *_seconds(cost.first_token.ttft_seconds)]
        for cost in costs
    ]
    rows.append(["no cache", "0", *_seconds(costs[0].first_token.without_cache)])
    write_table(["policy", "blocks", *_TIMES], rows)


def _write_tiers(found: Hierarchy) -> None:
    write_line(f"{found.policy}, {found.inclusion} tiers")
    rows = [
        [
            tier.name,
            f"{tier.size_blocks:,}",
            f"{tier.prefix_token_hit_ratio:.2%}",
            f"{tier.read_blocks:,}",
            f"{tier.written_blocks:,}",
        ]
        for tier in found.tiers
    ]
    rows.append(["all", "", f"{found.prefix_token_hit_ratio:.2%}", "", ""])
    write_table(["tier", "blocks", "tokens hit", "blocks read", "written"], rows)
    if found.tiers[0].read_bytes is not None:
        columns = ["tier", "read", "busiest minute, /s", "bandwidth, /s", "written", "per day"]
        rows = [
            [
                tier.name,
                _bytes(tier.read_bytes),
                _bytes(tier.busiest_minute_bytes_per_second),
                _bytes(tier.bandwidth),
                _bytes(tier.written_bytes),
                _bytes(tier.written_bytes_per_day),
            ]
            for tier in found.tiers
        ]
        write_table(columns, rows)
    if found.first_token is not None:
        _write_times(found.first_token)


def _write_times(times: FirstToken) -> None:
    write_line(_TIMES_TITLE)
    parts = {"with these tiers": times.ttft_seconds, "without a cache": times.without_cache}
    write_table(["", *_TIMES], [[label, *_seconds(each)] for label, each in parts.items()])


def _write_windows(pool: WindowReport) -> None:
    write_line(f"Windows of {pool.window_tokens} tokens by TTL, with the hits of an infinite cache")
    rows = [
        [
            "infinite" if point.ttl_seconds is None else f"{point.ttl_seconds:g} s",
            f"{point.kept:.2%}",
            f"{point.replays:,}",
            f"{point.replayed_tokens:,}",
            f"{point.evicted:,}",
            f"{point.expired:,}",
        ]
        for point in pool.curve
    ]
    columns = ["TTL", "without replay", "replays", "replayed tokens", "evicted", "expired"]
    write_table(columns, rows)


def _seconds(times: Seconds) -> list[str]:
    return [f"{each:.3f}" for each in (times.mean, times.p50, times.p95, times.p99)]


def _bytes(size: float | None) -> str:
    return "-" if size is None else size_text(size)
