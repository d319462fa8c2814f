"""``kvstore simulate`` and ``kvstore policies``."""

from __future__ import annotations

import csv
import io
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvstore.cli.parameters import BlockSize, Files, Flag, FormatOption, Json, Unchained
from kvstore.cli.terminal import OK, progress, write_json, write_line, write_table
from kvstore.distribution import VERSION

if TYPE_CHECKING:
    from kvstore.simulate.cost import ModelBytes
    from kvstore.simulate.report import Question
    from kvstore.simulate.run import Each, Simulation
    from kvstore.simulate.window import Windows
    from kvstore.trace.columns import Trace

SIZES = "1%,5%,10%,25%,50%"
CURVE_SIZES = "0.5%,1%,2%,5%,10%,15%,20%,25%,30%,50%,75%,100%"
"""Sizes of a whole curve: dense where caches are small and curves are steep."""

Texts = Annotated[tuple[str, ...], Parameter(negative="")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What was asked for, as it was written; what a result depends on."""

    policy: str
    size: str
    warmup: float
    semantics: Literal["prefix", "flat"]
    format: str
    block_size: int
    unchained: Literal["refuse", "rekey"]
    tier: tuple[str, ...]
    exclusive: bool
    request_share: float | None
    model: str | None
    bytes_per_token: float | None
    prefill_tps: float | None
    bandwidth: str | None
    window_tokens: int | None
    window_ttl: str | None
    window_bytes: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as JSON has them."""
        return {**asdict(self), "tier": list(self.tier)}


def simulate(
    traces: Files,
    /,
    *,
    policy: str = "lru,arc,s3fifo,optimal",
    size: str | None = None,
    curve: Flag = False,
    warmup: float = 0.0,
    semantics: Literal["prefix", "flat"] = "prefix",
    format_: FormatOption = "auto",
    block_size: BlockSize = 0,
    unchained: Unchained = "refuse",
    tier: Texts = (),
    exclusive: Annotated[bool, Parameter(negative="--inclusive")] = False,
    request_share: float | None = None,
    model: str | None = None,
    bytes_per_token: float | None = None,
    prefill_tps: float | None = None,
    bandwidth: str | None = None,
    window_tokens: int | None = None,
    window_ttl: str | None = None,
    window_bytes: str | None = None,
    jobs: int = 1,
    seed: int = 0,
    csv_file: Annotated[Path | None, Parameter(name="--csv")] = None,
    html: Path | None = None,
    as_json: Json = False,
) -> int:
    """Tell what caches of these sizes, policies and tiers would have hit on recorded traces.

    A block counts as hit only if all before it are there too, as an engine needs it. "optimal" is the
    bound: it knows the future and may decline to store.

    Parameters
    ----------
    traces
        Files or directories; - is standard input. Plain, gzip, zstd or tar.
    policy
        Names, with commas between them; kvstore policies lists them.
    size
        Sizes, with commas between them: a share of all distinct blocks such as 5%, blocks such as
        20000b, or bytes such as 64GiB. Default: 1%,5%,10%,25%,50%.
    curve
        Twelve sizes from 0.5% to 100% instead.
    warmup
        Share of the requests that warm the cache up and are not counted.
    semantics
        prefix, or flat: single blocks without an order between them, as other simulators have it.
    tier
        A tier, the fastest first; give it once for each: NAME=SIZE[@RATE], such as
        device=64GiB@200GB/s or ssd=1TiB@3GB/s,write=on-evict. More settings: latency=100us, policy=arc.
    exclusive
        Keep a block in one tier alone; --inclusive lets the lower ones keep it too.
    request_share
        Share of the cache, and of each tier, that one request may take: what is longer keeps its head.
        By default a request may take all, as in other simulators.
    model
        A preset's name or the path of a config.json, for bytes and windows.
    bytes_per_token
        What a cached token takes instead.
    prefill_tps
        Tokens that the engine computes a second, for times to first token.
    bandwidth
        How fast the cache of --size is read, such as 3GB/s. By default reading costs nothing.
    window_tokens
        W of a window pool, where the model does not tell.
    window_ttl
        How long a window is kept, such as 300s.
    window_bytes
        What the window pool holds: bytes such as 2GiB, or a share of all prompts' windows such as 10%.
    jobs
        Processes, at most one for each processor. The result is the same for any number.
    seed
        Written into the result. Nothing here is drawn.
    csv_file
        A file for the rows, written whole or not at all.
    html
        A file for a page with charts, for browsers of any size. It needs no network. Written whole or
        not at all.
    as_json
        Print an object, or an array with one for each of several traces, instead of tables.
    """
    from kvstore.simulate.hints import hint_lines
    from kvstore.trace.reading import Options, read
    from kvstore.trace.source import sha256_of

    if curve and size is not None:
        msg = f"--curve has sizes of its own, found --size {size} beside it"
        raise ValueError(msg)
    if jobs < 1:
        msg = f"--jobs must be at least 1, found {jobs}"
        raise ValueError(msg)
    given = _Given(
        policy=policy,
        size=(CURVE_SIZES if curve else SIZES) if size is None else size,
        warmup=warmup,
        semantics=semantics,
        format=format_,
        block_size=block_size,
        unchained=unchained,
        tier=tier,
        exclusive=exclusive,
        request_share=request_share,
        model=model,
        bytes_per_token=bytes_per_token,
        prefill_tps=prefill_tps,
        bandwidth=bandwidth,
        window_tokens=window_tokens,
        window_ttl=window_ttl,
        window_bytes=window_bytes,
    )
    _check(given)
    options = Options(block_tokens=block_size, unchained=unchained, form=format_)
    results = []
    for path in traces:
        progress()(f"reading {path}")
        digest = sha256_of(path)
        found = _report(read(path, options), given, jobs)
        found["trace"]["sha256"] = digest
        found["parameters"], found["seed"] = given.as_dict(), seed
        advice = found["recommendation"]
        advice["command"] = _advised(path, given, advice)
        found["command"], found["version"] = _command(path, given, {}), VERSION
        results.append(found)
    # All traces are read and simulated by now: a bad one leaves nothing half written.
    if csv_file is not None:
        _write_csv(csv_file, results)
    if html is not None:
        _write_page(html, results)
    if as_json:
        write_json(results[0] if len(results) == 1 else results)
        return OK
    for found in results:
        _write_simulation(found)
        write_line("Worth knowing:")
        for line in hint_lines(found["hints"]):
            write_line(f"- {line}")
        write_line("Recommendation:")
        for line in found["recommendation"]["text"]:
            write_line(f"- {line}")
        write_line(f"- again: {found['recommendation']['command']}")
    return OK


def _check(given: _Given) -> None:
    """Refuse what no trace could make right, before one is read.

    Numbers below 2**-60 are no more than rounding, and their quotients are not finite.
    """
    from kvstore.trace.fields import shown

    for name, number in (
        ("--block-size", given.block_size or None),
        ("--bytes-per-token", given.bytes_per_token),
        ("--prefill-tps", given.prefill_tps),
        ("--window-tokens", given.window_tokens),
    ):
        if number is not None and not 2**-60 <= number < 2**60:  # NaN is not
            msg = f"{name} must be above 0 and below 2**60, found {shown(number)}"
            raise ValueError(msg)
    for name, text in (("--policy", given.policy), ("--size", given.size)):
        if not _names(text):
            msg = f"{name} names nothing, found {text!r}"
            raise ValueError(msg)
    if given.request_share is not None and not 0 < given.request_share <= 1:
        msg = f"--request-share must be above 0 and at most 1, found {given.request_share}"
        raise ValueError(msg)
    if given.model is not None and given.bytes_per_token is not None:
        msg = f"--model {given.model} has bytes of its own, found --bytes-per-token beside it"
        raise ValueError(msg)
    if given.prefill_tps is not None and given.model is None and given.bytes_per_token is None:
        msg = (
            "--prefill-tps weighs loading against computing: give --model or --bytes-per-token too"
        )
        raise ValueError(msg)
    if given.bandwidth is not None and given.prefill_tps is None:
        msg = "--bandwidth is for times to first token: give --prefill-tps too"
        raise ValueError(msg)


def _report(trace: Trace, given: _Given, jobs: int) -> dict[str, Any]:
    from kvstore.simulate.report import report
    from kvstore.simulate.run import Simulation

    simulation = Simulation(trace, given.request_share)
    question = _question(simulation, given)
    with _spread(simulation, jobs) as each:
        return report(simulation, question, each=each, progress=progress())


def _question(simulation: Simulation, given: _Given) -> Question:
    """Return what is asked, in the blocks and bytes of one trace."""
    from kvstore.simulate.cost import Cost, Link, ModelBytes, bytes_of_model
    from kvstore.simulate.hierarchy import tiers_of
    from kvstore.simulate.report import Question
    from kvstore.simulate.run import window_of
    from kvstore.simulate.sizes import rate_of, size_of
    from kvstore.simulate.tiers import Inclusion

    trace = simulation.trace
    sized: ModelBytes | None = None
    if given.model is not None:
        sized = bytes_of_model(given.model)
    elif given.bytes_per_token is not None:
        sized = ModelBytes(Fraction(given.bytes_per_token))
    token_bytes = None if sized is None else sized.token_bytes
    block_bytes = None if token_bytes is None else token_bytes * trace.block_tokens
    inclusion: Inclusion = "exclusive" if given.exclusive else "inclusive"
    cost = None
    if given.prefill_tps is not None and token_bytes is not None:
        cost = Cost(token_bytes, given.prefill_tps)
    return Question(
        policies=_names(given.policy),
        sizes=[size_of(each, trace.distinct_blocks, block_bytes) for each in _names(given.size)],
        window=window_of(given.warmup),
        semantics=given.semantics,
        token_bytes=token_bytes,
        cost=cost,
        link=Link(None if given.bandwidth is None else rate_of(given.bandwidth), 0.0),
        tiers=tiers_of(given.tier, inclusion, trace.distinct_blocks, block_bytes),
        inclusion=inclusion,
        windows=_windows(trace, given, sized),
    )


def _windows(trace: Trace, given: _Given, sized: ModelBytes | None) -> Windows | None:
    """Return the window pool that is asked for: if an option names one, or the model has windows."""
    from kvstore.simulate.sizes import seconds_of, size_of
    from kvstore.simulate.window import Windows, all_window_tokens

    tokens = given.window_tokens or (sized.window_tokens if sized is not None else 0)
    if not tokens:
        if given.window_ttl is not None or given.window_bytes is not None:
            msg = "a window pool needs --window-tokens, or a --model with windows"
            raise ValueError(msg)
        return None
    budget = None
    if given.window_bytes is not None:
        row_bytes = sized.window_token_bytes if sized is not None else None
        if given.window_bytes.endswith("b"):
            msg = f"expected --window-bytes as 2GiB or 10%, found {given.window_bytes!r}"
            raise ValueError(msg)
        whole = all_window_tokens(trace, tokens)
        budget = size_of(given.window_bytes, whole, row_bytes or None).blocks
    ttl = 300.0 if given.window_ttl is None else seconds_of(given.window_ttl)
    return Windows(tokens, ttl, budget)


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _advised(path: Path, given: _Given, advice: Mapping[str, Any]) -> str:
    """Return the command whose row shows what is recommended: prefixes, as the decision is about them."""
    changed = {"policy": advice["policy"], "semantics": "prefix"}
    if advice["choice"] is not None:
        changed["size"] = f"{advice['choice']['size_blocks']}b"
    if "window" in advice:
        changed["window_ttl"] = f"{advice['window']['ttl_seconds']:g}s"
    return _command(path, given, changed)


def _command(path: Path, given: _Given, changed: Mapping[str, str]) -> str:
    """Return the command that asks for this, but for what is changed."""
    words = ["kvstore", "simulate", str(path)]
    defaults = {"warmup": 0.0, "semantics": "prefix", "format": "auto", "block_size": 0}
    defaults |= {"unchained": "refuse"}
    for name, asked in given.as_dict().items():
        value = changed.get(name, asked)
        if name not in {"tier", "exclusive"} and value != defaults.get(name):
            words += [f"--{name.replace('_', '-')}", str(value).removesuffix(".0")]
    for tier in given.tier:
        words += ["--tier", tier]
    if given.tier and given.exclusive:
        words.append("--exclusive")
    return shlex.join(words)


# ---- processes ---------------------------------------------------------------------------------

_simulation: Simulation | None = None
"""What a process of the pool simulates; its parent's, from before the fork."""


def _begin(simulation: Simulation) -> None:
    global _simulation  # noqa: PLW0603 - one of each process, set once
    _simulation = simulation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its pool


def _call(function: Callable[[Simulation, Any], Any], task: Any) -> Any:
    assert _simulation is not None
    return function(_simulation, task)


@contextmanager
def _spread(simulation: Simulation, jobs: int) -> Iterator[Each]:
    """Give what calls a function on each of many tasks, in ``jobs`` processes."""
    from kvstore.simulate.run import in_turn

    if jobs == 1:
        yield in_turn(simulation)
        return
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context

    simulation.prepare()  # once, and not in each process
    with ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1),
        mp_context=get_context("fork"),
        initializer=_begin,
        initargs=(simulation,),
    ) as pool:
        yield lambda function, tasks: pool.map(partial(_call, function), tasks)


# ---- tables ------------------------------------------------------------------------------------


def _write_csv(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    from kvstore.trace.source import created

    rows = [row for found in results for row in found["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with created(path) as stream:
        stream.write(text.getvalue().encode())


def _write_page(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    from kvstore.output.files import PUBLIC, written
    from kvstore.simulate.html_report import simulation_page

    text = simulation_page(results)
    with written(path, PUBLIC) as stream:
        stream.write(text.encode())


def _write_simulation(found: Mapping[str, Any]) -> None:
    """Print the rows of one trace and its ceilings, with the sizes that its LRU curve speaks for."""
    name = found["trace"]["name"]
    rows = [
        [row["policy"], f"{row['size_blocks']:,}", *(f"{row[s]:.2%}" for s in _SHARES.values())]
        for row in found["rows"]
    ]
    blocks = found["ceiling"]["size_blocks"]
    for window, ceiling in found["ceilings"].items():
        whole = {"size_fraction": 1.0, **ceiling}
        label = "ceiling" if window == "all" else f"ceiling, {window.replace('_', ' ')}"
        rows.append([label, f"{blocks:,}", *(f"{whole[s]:.2%}" for s in _SHARES.values())])
    write_line(f"{name}: what was hit, as a share of what was asked")
    write_table(["policy", "blocks", *_SHARES], rows)
    advice = found["recommendation"]
    if (choice := advice["choice"]) is not None:
        size = "" if choice["size_bytes"] is None else f", {_bytes(choice['size_bytes'])}"
        chosen = [
            (
                choice["policy"],
                f"{choice['size_blocks']:,}{size}",
                f"{choice['prefix_token_hit_ratio']:.2%}",
            )
        ]
        chosen += [(name, "the same", f"{ratio:.2%}") for name, ratio in choice["others"].items()]
        write_table(["recommended first", "blocks", "tokens hit"], chosen)
    sizes = [
        (f"{share} of the ceiling", f"{blocks:,}" if blocks is not None else "-")
        for share, blocks in advice["sizes"].items()
    ]
    sizes.append(("knee of the curve", f"{advice['knee']['size_blocks']:,}"))
    bound = "" if found["parameters"]["request_share"] is None else " without a share"
    write_table([f"LRU reaches{bound}", "with blocks"], sizes)
    if advice["gaps"]:
        gaps = [
            (f"{gap['size_blocks']:,}", f"{gap['capacity']:.2%}", f"{gap['policy']:.2%}")
            for gap in advice["gaps"]
        ]
        write_table(["blocks", "capacity gap", "policy gap"], gaps)
    if "costs" in found:
        write_line("Seconds to the first token: prefill and loading only, no queue")
        rows = [
            [cost["policy"], f"{cost['size_blocks']:,}", *_seconds(cost["ttft_seconds"])]
            for cost in found["costs"]
        ]
        rows.append(["no cache", "0", *_seconds(found["costs"][0]["without_cache"])])
        write_table(["policy", "blocks", *_TIMES], rows)
    for tiers in found.get("hierarchies", ()):
        _write_tiers(tiers)
    if "window_pool" in found:
        _write_windows(found["window_pool"])


def _write_tiers(found: Mapping[str, Any]) -> None:
    write_line(f"{found['policy']}, {found['inclusion']} tiers")
    rows = [
        [
            tier["name"],
            f"{tier['size_blocks']:,}",
            f"{tier['prefix_token_hit_ratio']:.2%}",
            *(f"{tier[n]:,}" for n in ("read_blocks", "written_blocks")),
        ]
        for tier in found["tiers"]
    ]
    rows.append(["all", "", f"{found['prefix_token_hit_ratio']:.2%}", "", ""])
    write_table(["tier", "blocks", "tokens hit", "blocks read", "written"], rows)
    if found["tiers"][0]["read_bytes"] is not None:
        rows = [
            [tier["name"], *(_bytes(tier[n]) for n in _FLOWS.values())] for tier in found["tiers"]
        ]
        write_table(["tier", *_FLOWS], rows)
    if "ttft_seconds" in found:
        write_line("Seconds to the first token: prefill and loading only, no queue")
        parts = {"with these tiers": "ttft_seconds", "without a cache": "without_cache"}
        times = [[label, *_seconds(found[name])] for label, name in parts.items()]
        write_table(["", *_TIMES], times)


def _write_windows(pool: Mapping[str, Any]) -> None:
    write_line(
        f"Windows of {pool['window_tokens']} tokens, for hits that no tier loses: by time to live"
    )
    rows = [
        [
            "no end" if point["ttl_seconds"] is None else f"{point['ttl_seconds']:g} s",
            f"{point['kept']:.2%}",
            *(f"{point[n]:,}" for n in ("replays", "replayed_tokens", "evicted", "expired")),
        ]
        for point in pool["curve"]
    ]
    write_table(["TTL", "turns kept", "replays", "tokens again", "evicted", "expired"], rows)


def _seconds(times: Mapping[str, float]) -> list[str]:
    return [f"{times[name]:.3f}" for name in _TIMES]


def _bytes(size: float | None) -> str:
    from kvstore.simulate.sizes import bytes_text

    return "-" if size is None else bytes_text(size)


_FLOWS = {
    "read": "read_bytes",
    "in the busiest minute, /s": "busiest_minute_bytes_per_second",
    "bandwidth, /s": "bandwidth",
    "written": "written_bytes",
    "a day": "written_bytes_per_day",
}
_TIMES = ("mean", "p50", "p95", "p99")
_SHARES = {
    "size": "size_fraction",
    "tokens": "prefix_token_hit_ratio",
    "prefix": "prefix_hit_ratio",
    "any block": "block_hit_ratio",
    "requests": "requests_with_hit_ratio",
}
"""Columns of a simulation, and the field that each shows."""


def policies(*, as_json: Json = False) -> int:
    """List the eviction policies.

    Parameters
    ----------
    as_json
        Print an array instead of a table.
    """
    from kvstore.policy.registry import POLICIES
    from kvstore.simulate.choice import OPTIMAL
    from kvstore.simulate.optimal import SUMMARY

    found: list[dict[str, Any]] = [
        {
            "policy": name,
            "summary": entry.summary,
            "parameters": entry.parameters,
            "source": entry.source,
            "online": True,
        }
        for name, entry in POLICIES.items()
    ]
    bound = {"policy": OPTIMAL, "summary": SUMMARY, "parameters": {}, "source": "Belady 1966"}
    found.append({**bound, "online": False})
    if as_json:
        write_json(found)
    else:
        write_table(
            ["policy", "what goes", "parameters", "source"],
            [(row["policy"], row["summary"], _settings(row), row["source"]) for row in found],
            labels=4,
        )
    return OK


def _settings(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in row["parameters"].items()
    )
