"""Sentences of a report: its recommendation and its hints."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.output.sizes import size_text
from kvstore.simulate.curve import LRU
from kvstore.simulate.hierarchy import Hierarchy
from kvstore.simulate.hints import Hints
from kvstore.simulate.recommendation import Choice
from kvstore.simulate.results import Report
from kvstore.simulate.run import SimulateOptions


def recommendation_lines(
    report: Report, options: SimulateOptions, *, is_bounded: bool
) -> Iterator[str]:
    """Yield the recommendation. ``is_bounded``: a share limits each request."""
    advice = report.recommendation
    if advice.choice is None:
        yield "no block is used twice: a cache of any size hits nothing"
    else:
        yield from _choice(report, options, advice.choice)
        for gain in advice.gains:
            points = f"{100 * gain.gain_over_lru:.1f} points of tokens"
            yield f"with {gain.size_blocks:,} blocks, {gain.policy} hits {points} more than lru"
        lru = "lru without --request-share" if is_bounded else LRU
        for share, blocks in list(advice.sizes.items())[1:]:
            assert blocks is not None, "something is reused"
            yield f"{lru} needs {_amount(report, options, blocks)} for {share} of an infinite cache's hits"
    if advice.window is not None:
        kept, most = f"{advice.window.kept:.0%}", f"{advice.window.kept_without_end:.0%}"
        bound = "" if kept == most else f" (infinite TTL: {most})"
        ttl = f"{advice.window.ttl_seconds:g} s"
        yield f"with a window TTL of {ttl}, {kept} of turns need no replay{bound}"
    if options.cost is not None:
        rate = size_text(options.cost.break_even)
        yield f"loading is faster than computing above {rate}/s"
    for each in report.hierarchies or ():
        if each.policy == advice.policy:
            yield from _tiers(each)


def _choice(report: Report, options: SimulateOptions, choice: Choice) -> Iterator[str]:
    """Yield the choice, and the other policies at its size."""
    policy, mine = choice.policy, choice.prefix_token_hit_ratio
    yield (
        f"use {policy} with {_amount(report, options, choice.size_blocks)}: {mine:.1%} of tokens hit, "
        f"{choice.share_of_infinite_cache:.1%} of the blocks that an infinite cache hits"
    )
    others = ", ".join(
        f"{name} {100 * (ratio - mine):+.1f} points" for name, ratio in choice.others.items()
    )
    if policy != LRU:
        needed = _amount(report, options, choice.lru_size_blocks)
        yield f"lru needs {needed} for the same share; at the size of {policy}: {others}"
    elif others:
        yield f"other policies at this size: {others}"


def _amount(report: Report, options: SimulateOptions, blocks: int) -> str:
    share = f"{blocks / report.trace.distinct_blocks:.1%} of all blocks"
    size = options.size_bytes(blocks, report.trace.block_tokens)
    count = f"{blocks:,} blocks"
    return f"{count}, {share}" if size is None else f"{size_text(size)} of SSD ({count}, {share})"


def _tiers(found: Hierarchy) -> Iterator[str]:
    parts = ", ".join(f"{tier.prefix_token_hit_ratio:.1%} from {tier.name}" for tier in found.tiers)
    total = f"{found.prefix_token_hit_ratio:.1%} of tokens hit"
    yield f"tiers under {found.policy}: {total}, {parts}"
    for tier in found.tiers:
        if tier.name == "ssd" and tier.written_bytes_per_day is not None:
            yield f"{found.policy} writes {size_text(tier.written_bytes_per_day)} per day to ssd"
    if found.first_token is not None:
        mean = found.first_token.ttft_seconds.mean
        without = found.first_token.without_cache.mean
        yield (
            f"{found.policy}: mean time to first token {mean:.2f} s instead of {without:.2f} s "
            "(prefill and loading, no queue)"
        )


def hint_lines(found: Hints) -> list[str]:
    """Return the hints."""
    lines = [f"{found.once_only:.1%} of blocks are used once"]
    if found.reuse_seconds is not None:
        times = ", ".join(f"{name} {each:,.0f} s" for name, each in found.reuse_seconds.items())
        lines.append(f"time between two uses of a block: {times}")
    lines.extend(
        f"{each.requests:,} requests are longer than {each.size_blocks:,} blocks"
        for each in found.longer_than_cache
        if each.requests
    )
    lines.extend(
        f"tokens {each.start_token:,} to {each.stop_token:,} of request {each.first_request:,} occur in "
        f"{each.requests:,} requests: {each.reused_tokens:,} tokens need not be computed"
        for each in found.top_prefixes
    )
    lines.extend(
        f"{each.policy} at {each.size_blocks:,} blocks: {each.block_ratio:.1%} of blocks hit behind a "
        "gap, where no engine can use them"
        for each in found.stranded
    )
    return lines
