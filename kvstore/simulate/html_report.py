"""What ``kvstore simulate`` found as one page of HTML: words first, then charts, tables, parameters.

The page is a picture of the report's JSON: it works nothing out but where a value is drawn, and the
same report gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.output.chart import INLINE, Axis, Mark, Point, Series, chart
from kvstore.output.html import Markup, element, joined, page, table
from kvstore.output.sizes import size_text
from kvstore.simulate.choice import OPTIMAL
from kvstore.simulate.hints import hint_lines

Found = Mapping[str, Any]
NONE = "-"
"""Stands where there is no value."""
RISES = 0.02
"""Share of the ceiling by which a curve rises from its smallest size to the first one drawn."""
ROOM = 1.15
"""Factor between the last value of a chart and its edge."""
TICKS = 6
"""Sizes that are named below a chart: as many as stand beside each other on a phone."""
TIMES = (
    *((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h")),
    *((36_000.0, "10 h"), (864_000.0, "10 d")),
)
"""Times that are named below a chart, about a power of ten apart."""
TTFT = {"mean": "mean", "p50": "P50", "p95": "P95"}
"""Times to first token that are drawn, and what they are called."""


def simulation_page(results: Sequence[Found]) -> str:
    """Return a page with a part for each simulated trace.

    ``results`` are what ``kvstore simulate --json`` prints, one of each trace.
    """
    names = [result["trace"]["name"] for result in results]
    title = f"Cache simulation: {', '.join(names)}"
    links = [
        element("li", element("a", name, href=f"#trace-{number}"))
        for number, name in enumerate(names, 1)
    ]
    return page(
        title,
        element("h1", "What a cache will hit"),
        element("p", _made_by(results[0]), class_="soft"),
        *([element("nav", element("ul", *links), aria_label="Traces")] if len(names) > 1 else []),
        *(_trace(result, number) for number, result in enumerate(results, 1)),
    )


def _made_by(found: Found) -> str:
    return f"kvstore {found['version']}, kvstore simulate. This file needs no network and runs no script."


def _trace(found: Found, number: int) -> Markup:
    trace = found["trace"]
    sizes = _Sizes.of(found)
    parts = [
        element("h2", trace["name"], id=f"trace-{number}"),
        element("p", _facts(found), class_="soft"),
        *_recommendation(found, sizes),
        *_hits(found, sizes),
        *_gaps(found, sizes),
        *(_first_token(found, sizes) if "costs" in found else ()),
        *(_tiers(found, sizes) if "hierarchies" in found else ()),
        *(_windows(found) if "window_pool" in found else ()),
        element("h3", "Worth knowing"),
        _listed(hint_lines(found["hints"])),
        *_not_asked(found),
        *_again(found),
    ]
    return element("article", *parts, aria_labelledby=f"trace-{number}")


def _facts(found: Found) -> str:
    trace = found["trace"]
    window = found["ceiling"]["window"].replace("_", " ")
    counted = "" if window == "all" else f" Counted: the {window} of the requests."
    return (
        f"{trace['requests']:,} requests over {_duration(trace['seconds'])}, "
        f"{trace['block_references']:,} references to {trace['distinct_blocks']:,} blocks of "
        f"{trace['block_tokens']:,} tokens.{counted}"
    )


# ---- sizes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a cache as they are drawn and named: in bytes where a block's are known."""

    blocks: int
    """All of the trace."""
    block_bytes: float | None
    first: int
    """The smallest size that is drawn, in blocks."""
    last: int
    marks: tuple[Mark, ...]
    """Sizes that have a name."""
    asked: Mapping[int, float]
    """Shares as they were asked for, of sizes in whole blocks, which are a little less."""

    @classmethod
    def of(cls, found: Found) -> _Sizes:
        trace, advice = found["trace"], found["recommendation"]
        each = trace["bytes_per_token"]
        block_bytes = None if each is None else each * trace["block_tokens"]
        ceiling = found["ceiling"]["prefix_token_hit_ratio"]
        used = [point for point in found["lru_curve"] if point["size_blocks"]]
        level = RISES * ceiling + (used[0]["prefix_token_hit_ratio"] if used else 0.0)
        flat = [point["size_blocks"] for point in used if point["prefix_token_hit_ratio"] <= level]
        rows = [row["size_blocks"] for row in found["rows"] if row["size_blocks"]]
        named = {share: blocks for share, blocks in advice["sizes"].items() if blocks}
        if advice["knee"]["size_blocks"]:
            named["knee"] = advice["knee"]["size_blocks"]
        same: dict[int, list[str]] = {}
        for name, size in named.items():
            same.setdefault(size, []).append(name)
        blocks = trace["distinct_blocks"]
        # Where nothing is hit twice the whole curve is flat.
        start = max(flat, default=1) if ceiling else 1
        return cls(
            blocks=blocks,
            block_bytes=block_bytes,
            first=max(1, min([start, blocks, *rows, *named.values()])),
            last=max([1, blocks, *rows]),
            marks=tuple(
                Mark(", ".join(names), size * (block_bytes or 1)) for size, names in same.items()
            ),
            asked={row["size_blocks"]: row["size_fraction"] for row in found["rows"]},
        )

    def place(self, blocks: int) -> float:
        return blocks * (self.block_bytes or 1)

    def axis(self) -> Axis:
        ends = self.place(self.first) / ROOM, self.place(self.last) * ROOM
        unit = "blocks" if self.block_bytes is None else "bytes"
        return Axis(
            f"size of the cache, {unit}, logarithmic",
            is_log=True,
            ends=ends,
            ticks=self._ticks(*ends),
        )

    def _ticks(self, low: float, high: float) -> tuple[tuple[float, str], ...]:
        """Return the densest round sizes that have room."""
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
        """Return a size in the unit in which it is bought."""
        if blocks is None:
            return NONE
        if self.block_bytes is None:
            return _blocks(blocks)
        return size_text(round(blocks * self.block_bytes))

    def header(self) -> list[str]:
        return ["size", *([] if self.block_bytes is None else ["blocks"]), "share"]

    def cells(self, blocks: int | None) -> list[str]:
        share = NONE
        if blocks is not None and self.blocks:
            share = _percent(self.asked.get(blocks, blocks / self.blocks))
        count = NONE if blocks is None else f"{blocks:,}"
        return [self.text(blocks), *([] if self.block_bytes is None else [count]), share]


def _policies(rows: Sequence[Found]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _by_size(rows: Sequence[Found]) -> dict[int, dict[str, Any]]:
    """Return rows by size and then by policy."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["size_blocks"], {})[row["policy"]] = row
    return dict(sorted(found.items()))


# ---- parts of a page ---------------------------------------------------------------------------


def _recommendation(found: Found, sizes: _Sizes) -> Iterator[Markup]:
    advice, ceiling = found["recommendation"], found["ceiling"]
    choice, knee = advice["choice"], advice["knee"]
    least = None if choice is None else choice["size_blocks"]
    tiles = [
        ("Policy", advice["policy"], _gain(choice)),
        (f"Size of {advice['policy']}", sizes.text(least), _reached(choice, sizes)),
        (
            "Knee of the curve",
            sizes.text(knee["size_blocks"] or None),
            f"{_percent(knee['share_of_ceiling'])} of the ceiling",
        ),
        ("Ceiling", _percent(ceiling["prefix_token_hit_ratio"]), "of tokens, at any size"),
    ]
    if "window" in advice and found["trace"]["seconds"] and found["window_pool"]["turns"]:
        window = advice["window"]
        kept = f"keeps {_percent(window['kept'])} of turns"
        tiles.append(("Window TTL", _duration(window["ttl_seconds"]), kept))
    yield element("h3", "Recommendation")
    yield element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element("dd", value),
                element("dd", more, class_="small"),
            )
            for name, value, more in tiles
        ),
        class_="figures",
    )
    yield _listed(advice["text"])
    yield element("p", "The command that shows this policy with this size again:")
    yield _code(advice["command"])


def _reached(choice: Found | None, sizes: _Sizes) -> str:
    if choice is None:
        return "nothing is used twice"
    share = _percent(choice["size_blocks"] / sizes.blocks)
    return f"{_percent(choice['share_of_ceiling'])} of the ceiling, {share} of all blocks"


def _gain(choice: Found | None) -> str:
    if choice is None:
        return "nothing is used twice"
    mine, others = choice["prefix_token_hit_ratio"], choice["others"]
    if not others:
        return "no other was asked for"
    name = "lru" if "lru" in others else max(others, key=lambda each: others[each])
    return f"{name}: {100 * (others[name] - mine):+.1f} points with this size"


def _hits(found: Found, sizes: _Sizes) -> Iterator[Markup]:
    ceiling, advice = found["ceiling"]["prefix_token_hit_ratio"], found["recommendation"]
    policies = _policies(found["rows"])
    rows = [
        [
            *sizes.cells(blocks),
            *(_percent(row[policy]["prefix_token_hit_ratio"]) for policy in policies),
        ]
        for blocks, row in _by_size(found["rows"]).items()
    ]
    whole = ["ceiling", *sizes.cells(sizes.blocks)[1:], *[_percent(ceiling)] * len(policies)]
    values = table("Tokens hit, by size and policy", [*sizes.header(), *policies], [*rows, whole])
    yield element("h3", "Hits by size")
    if not ceiling:
        yield element("p", "Nothing is used twice, so a cache of any size hits nothing.")
        yield values
        return
    bound = "" if found["parameters"]["request_share"] is None else " without a share"
    yield element(
        "p",
        f"Tokens of leading hits, as a share of all tokens asked for. lru{bound} is exact at every size; "
        "optimal knows the future and bounds any policy. The upright dashed lines are the sizes with "
        f"which lru{bound} reaches 90%, 95% and 99% of the ceiling, and the knee, beyond which space gains less.",
    )
    reached = {**advice["sizes"], "knee": advice["knee"]["size_blocks"]}
    yield _beside(
        _figure(_hits_chart(found, sizes, policies), "Tokens hit against size"),
        table(
            f"Sizes with which lru{bound} reaches a share of the ceiling",
            ["reached", *sizes.header()],
            [[name, *sizes.cells(blocks)] for name, blocks in reached.items()],
        ),
        values,
    )


def _hits_chart(found: Found, sizes: _Sizes, policies: Sequence[str]) -> str:
    ceiling = found["ceiling"]["prefix_token_hit_ratio"]
    given = found["parameters"]
    is_curve = given["semantics"] == "prefix" and given["request_share"] is None
    lines = [
        _line(found, sizes, policy, is_exact=is_curve and policy == "lru") for policy in policies
    ]
    if not (is_curve and "lru" in policies):
        name = "lru by prefix" if given["request_share"] is None else "lru, no share"
        lines.insert(0, _line(found, sizes, name, is_exact=True))
    return chart(
        lines,
        title="Tokens hit, by size of the cache",
        description=f"The ceiling is {_percent(ceiling)}. "
        f"{'; '.join(found['recommendation']['text'])}. Every dot is in the table.",
        x=sizes.axis(),
        y=Axis("tokens hit, %", ends=(0, 100 * ceiling * ROOM)),
        marks=[*sizes.marks, Mark(f"ceiling {_percent(ceiling)}", 100 * ceiling, is_of_y=True)],
        frame=INLINE,
    )


def _line(found: Found, sizes: _Sizes, name: str, *, is_exact: bool) -> Series:
    """Return the line of a policy: of all sizes, or of those that were simulated."""
    if is_exact:
        points = [p for p in found["lru_curve"] if p["size_blocks"] >= sizes.first]
    else:
        rows = [row for row in found["rows"] if row["policy"] == name and row["size_blocks"]]
        points = sorted(rows, key=lambda row: int(row["size_blocks"]))
    return Series(
        name,
        tuple(
            _point(sizes.place(point["size_blocks"]), 100 * point["prefix_token_hit_ratio"])
            for point in points
        ),
        is_line=True,
        has_dots=not is_exact,
        is_dashed=name == OPTIMAL,
    )


def _gaps(found: Found, sizes: _Sizes) -> Iterator[Markup]:
    gaps = {gap["size_blocks"]: gap for gap in found["recommendation"]["gaps"]}
    yield element("h3", "What space and what a policy could still gain")
    if not gaps:
        yield element(
            "p",
            "Not known: it takes the bound and a policy to compare with it, such as "
            "--policy lru,arc,s3fifo,optimal.",
        )
        return
    yield element(
        "p",
        "The capacity gap is what lies between the ceiling and the best any policy could do in this size: "
        "only more space gains it. The policy gap is what lies between that and the best policy simulated. "
        "In points of tokens hit.",
    )
    drawn = [gaps[size] for size in sorted(gaps) if size]
    lines = [
        Series(
            f"{name} gap",
            tuple(_point(sizes.place(gap["size_blocks"]), 100 * gap[name]) for gap in drawn),
            is_line=True,
        )
        for name in ("capacity", "policy")
    ]
    values = table(
        "Gaps, in points of tokens hit", [*sizes.header(), "capacity gap", "policy gap"],
        [
            [*sizes.cells(size), f"{100 * gap['capacity']:.2f}", f"{100 * gap['policy']:.2f}"]
            for size, gap in sorted(gaps.items())
        ],
    )  # fmt: skip
    if len(drawn) < 2:  # one point is no curve
        yield values
        return
    highest = max(point.y for line in lines for point in line.points)
    picture = chart(
        lines,
        title="Capacity gap and policy gap, by size of the cache",
        description="The table has every value.",
        x=sizes.axis(),
        y=Axis("points of tokens hit", ends=(0, highest * ROOM or 1)),
        frame=INLINE,
    )
    yield _beside(_figure(picture, "What more space and a better policy could gain"), values)


def _first_token(found: Found, sizes: _Sizes) -> Iterator[Markup]:
    policies = _policies(found["costs"])
    advised = found["recommendation"]["policy"]
    shown = advised if advised in policies else policies[0]
    without = found["costs"][0]["without_cache"]
    given = found["parameters"]
    reading = (
        "Reading the cache costs nothing here; --bandwidth says what it costs."
        if given["bandwidth"] is None
        else f"The cache is read at {given['bandwidth']}, and only where that is faster than computing."
    )
    yield element("h3", "Cost against time to first token")
    yield element(
        "p",
        f"Loading and prefill at {given['prefill_tps']:,.0f} tokens/s, with no queue and no batch: a floor, "
        f"and good for comparing caches. {reading}",
    )
    rest = [field for field in TTFT if field != "mean"]
    rows = [
        [
            *sizes.cells(size),
            *(f"{row[policy]['ttft_seconds']['mean']:,.3f}" for policy in policies),
            *(f"{row[shown]['ttft_seconds'][field]:,.3f}" for field in rest),
        ]
        for size, row in _by_size(found["costs"]).items()
    ]
    nothing = [
        "no cache",
        *sizes.cells(0)[1:],
        *[f"{without['mean']:,.3f}"] * len(policies),
        *(f"{without[field]:,.3f}" for field in rest),
    ]
    values = table(
        f"Seconds to the first token: the mean of each policy, and more of {shown}",
        [*sizes.header(), *policies, *(f"{TTFT[field]} {shown}" for field in rest)],
        [nothing, *rows],
    )
    if not found["ceiling"]["prefix_token_hit_ratio"]:  # every line would be level
        yield values
        return
    caption = "Time to first token against bytes of cache, under lru"
    yield _beside(_figure(_first_token_chart(found, sizes, without["mean"]), caption), values)


def _first_token_chart(found: Found, sizes: _Sizes, without: float) -> str:
    points = [p for p in found["lru_curve"] if p["size_blocks"] >= sizes.first]
    lines = [
        Series(
            name,
            tuple(_point(sizes.place(p["size_blocks"]), p["ttft_seconds"][field]) for p in points),
            is_line=True,
            has_dots=False,
        )
        for field, name in TTFT.items()
    ]
    highest = max([without, *(point.y for line in lines for point in line.points)])
    name = f"mean without a cache {_seconds(without)}"
    return chart(
        lines,
        title="Seconds to the first token, by size of the cache, under lru",
        description=f"Without a cache: {_seconds(without)} on average. "
        "The table has the simulated sizes.",
        x=sizes.axis(),
        y=Axis("seconds to first token", ends=(0, highest * ROOM or 1)),
        marks=[*sizes.marks, Mark(name, without, is_of_y=True)],
        frame=INLINE,
    )


def _tiers(found: Found, sizes: _Sizes) -> Iterator[Markup]:
    hierarchies = found["hierarchies"]
    yield element("h3", "Tiers")
    if not hierarchies:
        yield element("p", "The bound runs in no tier: simulate a policy beside it.")
        return
    inclusion = {
        "inclusive": "A lower tier keeps what rises.",
        "exclusive": "A block is in one tier alone.",
    }[hierarchies[0]["inclusion"]]
    yield element(
        "p",
        f"{hierarchies[0]['inclusion'].capitalize()}: {inclusion} Hits are shares of all tokens asked for. "
        "A day is one of the trace's own time; what is read in the busiest minute is to be held against "
        "the bandwidth.",
    )
    yield _tier_summary(hierarchies)
    for each in hierarchies:
        yield _tier_table(each, sizes)


def _tier_summary(hierarchies: Sequence[Found]) -> Markup:
    rows = [[each["policy"], _percent(each["prefix_token_hit_ratio"])] for each in hierarchies]
    header, caption = ["policy", "tokens hit"], "All tiers together"
    if "ttft_seconds" in hierarchies[0]:
        header += TTFT.values()
        caption += ", and seconds to the first token"
        rows.append(["no cache", _percent(0)])
        times = [each["ttft_seconds"] for each in hierarchies]
        for row, spent in zip(rows, [*times, hierarchies[0]["without_cache"]], strict=True):
            row.extend(f"{spent[field]:,.3f}" for field in TTFT)
    return table(caption, header, rows)


def _tier_table(found: Found, sizes: _Sizes) -> Markup:
    unit = "blocks" if sizes.block_bytes is None else "bytes"
    header = ["tier", "size", "write", "tokens hit", "read", "written"]
    if sizes.block_bytes is not None:
        header += ["written a day", "busiest minute, /s", "bandwidth, /s"]
    rows = []
    for tier in found["tiers"]:
        cells = [
            tier["name"],
            sizes.text(tier["size_blocks"]),
            tier["write"],
            _percent(tier["prefix_token_hit_ratio"]),
            _amount(tier, "read", unit),
            _amount(tier, "written", unit),
        ]
        if sizes.block_bytes is not None:
            rates = ("written_bytes_per_day", "busiest_minute_bytes_per_second", "bandwidth")
            cells += [NONE if tier[n] is None else size_text(tier[n]) for n in rates]
        rows.append(cells)
    total = ["all", "", "", _percent(found["prefix_token_hit_ratio"])]
    rows.append(total + [""] * (len(header) - len(total)))
    return table(f"{found['policy']}, {found['inclusion']} tiers", header, rows)


def _amount(tier: Found, name: str, unit: str) -> str:
    value = tier[f"{name}_{unit}"]
    return _blocks(value) if unit == "blocks" else size_text(value)


def _windows(found: Found) -> Iterator[Markup]:
    pool, advice = found["window_pool"], found["recommendation"]["window"]
    yield element("h3", "How long windows should be kept")
    if not found["trace"]["seconds"]:
        yield element(
            "p", "All requests came at one time, so no time to live can be told from another."
        )
        return
    if not pool["turns"]:
        yield element("p", "No turn hits anything, so none needs a window.")
        return
    tokens, budget = pool["window_tokens"], pool["budget_tokens"]
    bound = "no bound on their bytes" if budget is None else f"room for {budget:,} tokens"
    yield element(
        "p",
        f"Windows of {tokens:,} tokens, with {bound}, for hits that no tier loses. A turn whose window is "
        f"gone runs up to {tokens:,} tokens again and loses nothing else.",
    )
    *ends, without_end = pool["curve"]
    asked, chosen = pool["ttl_seconds"], advice["ttl_seconds"]
    marks = [Mark(f"advised {_duration(chosen)}", chosen)]
    if asked not in {None, chosen}:
        marks.append(Mark(f"asked {_duration(asked)}", asked))
    kept = without_end["kept"]
    marks.append(Mark(f"without end {_percent(kept)}", 100 * kept, is_of_y=True))
    low, high = ends[0]["ttl_seconds"] / ROOM, ends[-1]["ttl_seconds"] * ROOM
    picture = chart(
        [
            Series(
                name, tuple(_point(p["ttl_seconds"], 100 * p[field]) for p in ends), is_line=True
            )
            for name, field in (("turns", "kept"), ("by tokens of their hit", "kept_token_ratio"))
        ],
        title="Turns kept from replay, by time to live of a window",
        description=f"{_duration(chosen)} keep {_percent(advice['kept'])} of turns, and windows without "
        f"end {_percent(kept)}. The table has every value.",
        x=Axis(
            "time to live, logarithmic",
            is_log=True,
            ends=(low, high),
            ticks=tuple((value, name) for value, name in TIMES if low <= value <= high),
        ),
        y=Axis("kept from replay, %", ends=(0, 100 * ROOM)),
        marks=marks,
        frame=INLINE,
    )
    rows = [
        [
            "without end" if p["ttl_seconds"] is None else _duration(p["ttl_seconds"]),
            _percent(p["kept"]),
            _percent(p["kept_token_ratio"]),
            *(f"{p[field]:,}" for field in ("replays", "replayed_tokens", "evicted", "expired")),
        ]
        for p in pool["curve"]
    ]
    header = ["TTL", "turns kept", "by tokens", "replays", "tokens again", "evicted", "expired"]
    yield _beside(
        _figure(picture, "Turns kept from replay against time to live"),
        table("Windows, by time to live", header, rows),
    )


def _not_asked(found: Found) -> Iterator[Markup]:
    """Say what else could be asked of the trace, and how."""
    missing = [
        text
        for is_missing, text in (
            (
                found["trace"]["bytes_per_token"] is None,
                "Bytes: --model NAME or --bytes-per-token N",
            ),
            (
                "costs" not in found,
                "Times to first token: --prefill-tps N, with the bytes of a token",
            ),
            (
                "hierarchies" not in found,
                "Tiers: --tier device=64GiB@200GB/s --tier ssd=1TiB@3GB/s",
            ),
            ("window_pool" not in found, "Windows: --window-tokens N, or a --model with windows"),
        )
        if is_missing
    ]
    if missing:
        yield element("h3", "Not asked")
        yield _listed(missing)


def _again(found: Found) -> Iterator[Markup]:
    given = {
        f"--{name.replace('_', '-')}": ", ".join(value) if isinstance(value, list) else str(value)
        for name, value in found["parameters"].items()
        if value not in (None, [], False)
    }
    facts = {
        "trace": found["trace"]["name"],
        "sha256": found["trace"]["sha256"] or "none: it was read from a stream",
        "kvstore": found["version"],
        "schema": str(found["schema"]),
        "seed": str(found["seed"]),
    }
    yield element("h3", "How to make this again")
    yield _code(found["command"])
    yield table("What this depends on", (), [*facts.items(), *given.items()], class_="words")


# ---- pieces ------------------------------------------------------------------------------------


def _point(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _figure(picture: str, caption: str) -> Markup:
    return element("figure", Markup(picture), element("figcaption", caption))


def _beside(figure: Markup, *tables: Markup) -> Markup:
    return element("div", figure, element("div", *tables), class_="beside")


def _listed(lines: Sequence[str]) -> Markup:
    return element("ul", *(element("li", line) for line in lines))


def _code(command: str) -> Markup:
    # A word is broken only if it is longer than a line, and never after one of its hyphens.
    words = (joined([element("span", word), " "]) for word in command.split(" "))
    return element("pre", element("code", *words))


def _blocks(count: int) -> str:
    return f"{count:,} block{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s"


def _duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has one."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
