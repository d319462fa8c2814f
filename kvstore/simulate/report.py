"""Everything that ``kvstore simulate`` says of one trace, as plain JSON values.

``docs/simulate.md`` explains each part. The same trace and question give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from kvstore.simulate.choice import LRU, OPTIMAL
from kvstore.simulate.cost import FREE, Cost, Link
from kvstore.simulate.hierarchy import tiers_report
from kvstore.simulate.hints import hints
from kvstore.simulate.run import (
    Each,
    Semantics,
    Simulation,
    Window,
    first_counted,
    in_turn,
    simulate,
    times,
)
from kvstore.simulate.sizes import Size, bytes_text
from kvstore.simulate.tiers import Flow, Inclusion, Tier, simulate_tiers
from kvstore.simulate.window import Windows, window_report
from kvstore.trace.columns import SECOND

SCHEMA = 1
"""Version of what a report holds. A key may be added; one that changes or goes raises it."""
WINDOW_SHARE = 0.95
"""What the recommended time to live keeps from replay, as a share of what one without end keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a trace."""

    policies: Sequence[str]
    sizes: Sequence[Size]
    window: Window = "all"
    semantics: Semantics = "prefix"
    token_bytes: Fraction | None = None
    cost: Cost | None = None
    link: Link = FREE
    """How the cache of ``sizes`` is read."""
    tiers: Sequence[Tier] = ()
    inclusion: Inclusion = "inclusive"
    windows: Windows | None = None


def report(
    simulation: Simulation,
    question: Question,
    *,
    each: Each | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Answer a question about a trace.

    Raises:
        ValueError: naming an unknown policy and those there are.
    """
    trace, window = simulation.trace, question.window
    first = first_counted(trace, window)
    spread = each or in_turn(simulation)
    found = simulate(
        simulation,
        question.policies,
        question.sizes,
        window=window,
        semantics=question.semantics,
        cost=question.cost,
        link=question.link,
        each=spread,
        progress=progress,
    )
    _price_curve(simulation, question, found["lru_curve"])
    choice = found["recommendation"]["choice"]
    if choice is not None:
        choice["size_bytes"] = _bytes(question, simulation, choice["size_blocks"])
    ceiling = simulation.infinite_cache_hits()
    found["ceilings"] = {
        name: asdict(simulation.ratios(ceiling, name)) for name in ("all", "last_half")
    }
    if question.tiers:
        found["hierarchies"] = _hierarchies(simulation, question, spread, progress)
    if question.windows is not None:
        # What is on SSD stays for days: the pool is asked about hits that nothing evicts.
        windows = window_report(trace, ceiling, question.windows, first)
        if question.cost is not None:
            windows["replay_seconds"] = windows["replayed_tokens"] / question.cost.prefill_tps
        found["window_pool"] = windows
        found["recommendation"]["window"] = _window_advice(windows)
    found["hints"] = hints(simulation, found, first)
    found["recommendation"]["text"] = sentences(simulation, question, found)
    return {
        "schema": SCHEMA,
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "seconds": int(trace.arrival[-1] - trace.arrival[0]) / SECOND if len(trace) else 0.0,
            "block_tokens": trace.block_tokens,
            "block_references": trace.references,
            "distinct_blocks": trace.distinct_blocks,
            "bytes_per_token": None
            if question.token_bytes is None
            else float(question.token_bytes),
        },
        **found,
    }


def _price_curve(
    simulation: Simulation, question: Question, points: Sequence[dict[str, Any]]
) -> None:
    """Add bytes, and mean times to first token, to the points of the LRU curve."""
    for point in points:
        point["size_bytes"] = _bytes(question, simulation, point["size_blocks"])
        if question.cost is not None:
            hits = simulation.curve.hits(point["size_blocks"])
            spent = times(simulation, hits, question.window, question.cost, question.link)
            point["ttft_seconds"] = spent["ttft_seconds"]


def _hierarchies(
    simulation: Simulation, question: Question, each: Each, progress: Callable[[str], object]
) -> list[dict[str, Any]]:
    trace, first = simulation.trace, first_counted(simulation.trace, question.window)
    policies = [policy for policy in question.policies if policy != OPTIMAL]
    tasks = [(policy, tuple(question.tiers), question.inclusion) for policy in policies]
    found = []
    for policy, flow in zip(policies, each(_flow, tasks), strict=True):
        progress(f"{trace.name}: {policy}, {len(question.tiers)} tiers")
        parts = tiers_report(
            trace, question.tiers, flow, first, question.token_bytes, question.cost
        )
        name = {"policy": policy, "inclusion": question.inclusion, "window": question.window}
        found.append(name | parts)
    return found


def _flow(simulation: Simulation, task: tuple[str, Sequence[Tier], Inclusion]) -> Flow:
    policy, tiers, inclusion = task
    return simulate_tiers(simulation.trace, tiers, inclusion, policy, simulation.request_share)


def _bytes(question: Question, simulation: Simulation, blocks: int) -> int | None:
    if question.token_bytes is None:
        return None
    return round(blocks * question.token_bytes * simulation.trace.block_tokens)


# ---- in words ----------------------------------------------------------------------------------


def sentences(simulation: Simulation, question: Question, found: dict[str, Any]) -> list[str]:
    """Return the recommendation in plain words, one sentence each."""
    advice = found["recommendation"]
    choice = advice["choice"]
    if choice is None:
        said = ["nothing is used twice, so no cache of any size hits anything"]
    else:
        said = _choice_sentences(question, simulation, choice)
        bound = " without --request-share" if simulation.request_share is not None else ""
        said += [
            f"with {gain['size_blocks']:,} blocks {gain['policy']} hits "
            f"{100 * gain['gain_over_lru']:.1f} points more than lru"
            for gain in advice["gains"]
        ]
        said += [
            f"lru{bound} has {share} of the ceiling with {_amount(question, simulation, blocks)}"
            for share, blocks in list(advice["sizes"].items())[1:]
        ]
    if "window_pool" in found:
        said.append(_window_sentence(advice["window"]))
    if question.cost is not None:
        rate = bytes_text(question.cost.break_even)
        said.append(f"loading is faster than computing from {rate}/s on")
    for tiers in found.get("hierarchies", ()):
        if tiers["policy"] == advice["policy"]:
            said.extend(_tier_sentences(tiers))
    return said


def _choice_sentences(
    question: Question, simulation: Simulation, choice: dict[str, Any]
) -> list[str]:
    """Return what to use, and how the other policies compare with the same size."""
    policy, mine = choice["policy"], choice["prefix_token_hit_ratio"]
    use = (
        f"use {policy} with {_amount(question, simulation, choice['size_blocks'])}: it hits {mine:.1%} "
        f"of tokens, and {choice['share_of_ceiling']:.1%} of the blocks that a cache without bounds hits"
    )
    others = ", ".join(
        f"{name} {100 * (ratio - mine):+.1f} points" for name, ratio in choice["others"].items()
    )
    if policy == LRU:
        return [use, *([f"other policies with that size: {others}"] if others else [])]
    needed = _amount(question, simulation, choice["lru_size_blocks"])
    return [use, f"lru needs {needed} for that share; with the size of {policy}: {others}"]


def _amount(question: Question, simulation: Simulation, blocks: int) -> str:
    share = f"{blocks / simulation.trace.distinct_blocks:.1%} of all blocks"
    size = _bytes(question, simulation, blocks)
    count = f"{blocks:,} blocks"
    return f"{count}, {share}" if size is None else f"{bytes_text(size)} of SSD ({count}, {share})"


def _window_advice(pool: dict[str, Any]) -> dict[str, Any]:
    """Return the shortest time to live of the curve that keeps nearly what one without end does."""
    *points, without_end = pool["curve"]
    enough = (point for point in points if point["kept"] >= WINDOW_SHARE * without_end["kept"])
    chosen = next(enough, points[-1])
    return {
        "ttl_seconds": chosen["ttl_seconds"],
        "kept": chosen["kept"],
        "kept_without_end": without_end["kept"],
    }


def _window_sentence(advice: dict[str, Any]) -> str:
    kept, most = f"{advice['kept']:.0%}", f"{advice['kept_without_end']:.0%}"
    bound = "" if kept == most else f", of {most} that any would"
    return f"a window TTL of {advice['ttl_seconds']:g} s keeps {kept} of turns from replay{bound}"


def _tier_sentences(found: dict[str, Any]) -> list[str]:
    total = f"{found['prefix_token_hit_ratio']:.1%} of tokens"
    parts = ", ".join(
        f"{tier['prefix_token_hit_ratio']:.1%} from {tier['name']}" for tier in found["tiers"]
    )
    said = [f"with these tiers under {found['policy']}: {total} hit, {parts}"]
    said.extend(
        f"{found['policy']} writes {bytes_text(tier['written_bytes_per_day'])} a day to ssd"
        for tier in found["tiers"]
        if tier["name"] == "ssd" and tier["written_bytes_per_day"] is not None
    )
    if "ttft_seconds" in found:
        mean, without = found["ttft_seconds"]["mean"], found["without_cache"]["mean"]
        said.append(
            f"{found['policy']}: first token after {mean:.2f} s on average instead of {without:.2f} s "
            "(prefill only, no queue)"
        )
    return said
