"""Report as an HTML page: recommendation, charts, tables and parameters; the same bytes for the same report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.output.html import Markup, element, page, table
from kvstore.output.sizes import size_text
from kvstore.simulate.curve import LRU
from kvstore.simulate.hierarchy import Hierarchy, TierUse
from kvstore.simulate.html_curves import (
    TTFT,
    first_token_section,
    gaps_section,
    hits_section,
    windows_section,
)
from kvstore.simulate.html_parts import NONE, SizeScale, blocks_text, code, duration, listed
from kvstore.simulate.recommendation import Choice
from kvstore.simulate.results import Report
from kvstore.simulate.sentences import hint_lines


def simulation_page(reports: Sequence[Report]) -> str:
    """Return a page with one article per report."""
    names = [report.trace.name for report in reports]
    links = [
        element("li", element("a", name, href=f"#trace-{number}"))
        for number, name in enumerate(names, 1)
    ]
    made_by = (
        f"kvstore {reports[0].origin.version}, kvstore simulate. Works offline, without scripts."
    )
    return page(
        f"Cache simulation: {', '.join(names)}",
        element("h1", "Cache simulation"),
        element("p", made_by, class_="soft"),
        *([element("nav", element("ul", *links), aria_label="Traces")] if len(names) > 1 else []),
        *(_article(report, number) for number, report in enumerate(reports, 1)),
    )


def _article(report: Report, number: int) -> Markup:
    sizes, hierarchies = SizeScale.of(report), report.hierarchies
    parts = [
        element("h2", report.trace.name, id=f"trace-{number}"),
        element("p", _facts(report), class_="soft"),
        *_recommendation(report, sizes),
        *hits_section(report, sizes),
        *gaps_section(report, sizes),
        *(first_token_section(report, report.costs, sizes) if report.costs is not None else ()),
        *(_tiers(hierarchies, sizes) if hierarchies is not None else ()),
        *(windows_section(report, report.window_pool) if report.window_pool is not None else ()),
        element("h3", "Hints"),
        listed(hint_lines(report.hints)),
        *_not_simulated(report),
        *_reproduce(report),
    ]
    return element("article", *parts, aria_labelledby=f"trace-{number}")


def _facts(report: Report) -> str:
    trace, interval = report.trace, report.infinite_cache.interval.replace("_", " ")
    counted = "" if interval == "all" else f" Counted: the {interval} of the requests."
    return (
        f"{trace.requests:,} requests over {duration(trace.seconds)}, "
        f"{trace.block_references:,} references to {trace.distinct_blocks:,} blocks of "
        f"{trace.block_tokens:,} tokens.{counted}"
    )


def _recommendation(report: Report, sizes: SizeScale) -> Iterator[Markup]:
    advice, choice = report.recommendation, report.recommendation.choice
    infinite, knee = report.infinite_cache.ratios.prefix_token_hit_ratio, advice.knee
    least = None if choice is None else choice.size_blocks
    tiles = [
        ("Policy", advice.policy, _gain(choice)),
        (f"Size of {advice.policy}", sizes.text(least), _reached(choice, sizes)),
        (
            "Knee of the curve",
            sizes.text(knee.size_blocks or None),
            f"{knee.share_of_infinite_cache:.1%} of an infinite cache's hits",
        ),
        ("Infinite cache", f"{infinite:.1%}", "of tokens hit"),
    ]
    pool, window = report.window_pool, advice.window
    if pool is not None and window is not None and report.trace.seconds and pool.asked.turns:
        assert window.ttl_seconds is not None, "the infinite TTL is not advised"
        kept = f"{window.kept:.1%} of turns need no replay"
        tiles.append(("Window TTL", duration(window.ttl_seconds), kept))
    yield element("h3", "Recommendation")
    boxes = (
        element(
            "div", element("dt", name), element("dd", value), element("dd", more, class_="small")
        )
        for name, value, more in tiles
    )
    yield element("dl", *boxes, class_="figures")
    yield listed(advice.text)
    yield element("p", "Command that simulates this policy and size:")
    yield code(advice.command)


def _reached(choice: Choice | None, sizes: SizeScale) -> str:
    if choice is None:
        return "no block is used twice"
    share = f"{choice.size_blocks / sizes.blocks:.1%}"
    hits = f"{choice.share_of_infinite_cache:.1%}"
    return f"{hits} of an infinite cache's hits, {share} of all blocks"


def _gain(choice: Choice | None) -> str:
    if choice is None:
        return "no block is used twice"
    mine, others = choice.prefix_token_hit_ratio, choice.others
    if not others:
        return "no other policy was simulated"
    name = LRU if LRU in others else max(others, key=lambda each: others[each])
    return f"{name}: {100 * (others[name] - mine):+.1f} points at this size"


def _tiers(hierarchies: Sequence[Hierarchy], sizes: SizeScale) -> Iterator[Markup]:
    yield element("h3", "Tiers")
    if not hierarchies:
        yield element("p", "The optimum cannot run in tiers: simulate another policy.")
        return
    inclusion = {
        "inclusive": "Inclusive: a lower tier keeps blocks that move up.",
        "exclusive": "Exclusive: a block is in one tier only.",
    }[hierarchies[0].inclusion]
    yield element(
        "p",
        f"{inclusion} Hits are shares of all tokens requested. A day is a day of trace time. Compare the "
        "reads of the busiest minute with the bandwidth.",
    )
    yield _tier_summary(hierarchies)
    for each in hierarchies:
        yield _tier_table(each, sizes)


def _tier_summary(hierarchies: Sequence[Hierarchy]) -> Markup:
    rows = [[each.policy, f"{each.prefix_token_hit_ratio:.1%}"] for each in hierarchies]
    header, caption = ["policy", "tokens hit"], "All tiers together"
    spent = [each.first_token for each in hierarchies if each.first_token is not None]
    if spent:
        header += TTFT.values()
        caption += ", and time to first token in seconds"
        rows.append(["no cache", f"{0:.1%}"])
        times = [*(each.ttft_seconds for each in spent), spent[0].without_cache]
        for row, each in zip(rows, times, strict=True):
            row.extend(f"{getattr(each, field):,.3f}" for field in TTFT)
    return table(caption, header, rows)


def _tier_table(found: Hierarchy, sizes: SizeScale) -> Markup:
    header = ["tier", "size", "write", "tokens hit", "read", "written"]
    if sizes.block_bytes is not None:
        header += ["written per day", "busiest minute, /s", "bandwidth, /s"]
    rows = [_tier_cells(tier, sizes) for tier in found.tiers]
    total = ["all", "", "", f"{found.prefix_token_hit_ratio:.1%}"]
    rows.append(total + [""] * (len(header) - len(total)))
    return table(f"{found.policy}, {found.inclusion} tiers", header, rows)


def _tier_cells(tier: TierUse, sizes: SizeScale) -> list[str]:
    cells = [tier.name, sizes.text(tier.size_blocks), tier.write]
    cells.append(f"{tier.prefix_token_hit_ratio:.1%}")
    if sizes.block_bytes is None:
        return [*cells, blocks_text(tier.read_blocks), blocks_text(tier.written_blocks)]
    amounts = (
        *(tier.read_bytes, tier.written_bytes, tier.written_bytes_per_day),
        *(tier.busiest_minute_bytes_per_second, tier.bandwidth),
    )
    return [*cells, *(NONE if each is None else size_text(each) for each in amounts)]


def _not_simulated(report: Report) -> Iterator[Markup]:
    """Options that extend the report."""
    absent = {
        "Bytes: --model NAME or --bytes-per-token N": report.trace.bytes_per_token,
        "Times to first token: --prefill-tps N, with the bytes of a token": report.costs,
        "Tiers: --tier device=64GiB@200GB/s --tier ssd=1TiB@3GB/s": report.hierarchies,
        "Windows: --window-tokens N, or a --model with windows": report.window_pool,
    }
    missing = [text for text, value in absent.items() if value is None]
    if missing:
        yield element("h3", "Not simulated")
        yield listed(missing)


def _reproduce(report: Report) -> Iterator[Markup]:
    origin, trace = report.origin, report.trace
    given = {
        f"--{name.replace('_', '-')}": ", ".join(value) if isinstance(value, list) else str(value)
        for name, value in origin.parameters.items()
        if value not in (None, [], False)
    }
    facts = {
        "trace": trace.name,
        "sha256": trace.sha256 or "none: read from a stream",
        "kvstore": origin.version,
        "schema": str(report.schema),
        "seed": str(origin.seed),
    }
    yield element("h3", "How to reproduce")
    yield code(origin.command)
    yield table("Inputs of this report", (), [*facts.items(), *given.items()], class_="words")
