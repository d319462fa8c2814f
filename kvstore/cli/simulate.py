"""Commands ``kvstore simulate`` and ``kvstore policies``."""

from __future__ import annotations

import csv
import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvstore.cli.parameters import Files, Flag, Json
from kvstore.cli.simulate_options import DEFAULTS, SimulateArguments
from kvstore.cli.terminal import OK, progress, write_json, write_table
from kvstore.distribution import VERSION

if TYPE_CHECKING:
    from kvstore.simulate.results import Report
    from kvstore.simulate.run import Each, Simulation
    from kvstore.trace.reading import Options

CURVE_SIZES = "0.5%,1%,2%,5%,10%,15%,20%,25%,30%,50%,75%,100%"
"""Sizes of a whole curve: dense at small sizes, where curves are steep."""


def simulate(
    traces: Files,
    /,
    *,
    options: SimulateArguments = DEFAULTS,
    curve: Flag = False,
    jobs: int = 1,
    seed: int = 0,
    csv_file: Annotated[Path | None, Parameter(name="--csv")] = None,
    html: Path | None = None,
    as_json: Json = False,
) -> int:
    """Simulate caches of given sizes, policies and tiers on recorded traces, and recommend one.

    Parameters
    ----------
    traces
        Files or directories; - is standard input. Plain, gzip, zstd or tar.
    curve
        Simulate twelve sizes from 0.5% to 100% instead of --size.
    jobs
        Number of processes, at most one per processor. The result does not depend on it.
    seed
        Recorded in the result. The simulation draws no random numbers.
    csv_file
        File for the rows as CSV, written atomically.
    html
        File for an HTML page with charts, written atomically. The page needs no network.
    """
    from kvstore.trace.reading import Options

    if curve and options.size is not None:
        raise ValueError(f"--curve sets the sizes itself; leave out --size {options.size}")
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, found {jobs}")
    if curve:
        options = replace(options, size=CURVE_SIZES)
    options.check()
    reading = Options(
        block_tokens=options.block_size, unchained=options.unchained, form=options.format
    )
    reports = [_report(path, reading, options, jobs, seed) for path in traces]
    # After all traces are simulated: an invalid one leaves no partial output.
    _write_files(reports, csv_file, html)
    if as_json:
        from kvstore.simulate.json_form import as_dict

        found = as_dict(reports)
        write_json(found[0] if len(found) == 1 else found)
        return OK
    from kvstore.cli.simulate_tables import write_report

    for report in reports:
        write_report(report)
    return OK


def _report(
    path: Path, reading: Options, options: SimulateArguments, jobs: int, seed: int
) -> Report:
    """Read and simulate one trace."""
    from kvstore.simulate.report import make_report
    from kvstore.simulate.results import Origin
    from kvstore.simulate.run import Simulation
    from kvstore.trace.reading import read
    from kvstore.trace.source import sha256_of

    progress()(f"reading {path}")
    digest = sha256_of(path)
    trace = read(path, reading)
    simulation = Simulation(trace, options.request_share)
    with _spread(simulation, jobs) as each:
        found = make_report(simulation, options.for_trace(trace), each=each, progress=progress())
    command = options.recommended_command(path, found)
    return replace(
        found,
        trace=replace(found.trace, sha256=digest),
        recommendation=replace(found.recommendation, command=command),
        origin=Origin(options.as_dict(), seed, options.command(path), VERSION),
    )


def _write_files(reports: Sequence[Report], csv_file: Path | None, html: Path | None) -> None:
    if csv_file is not None:
        from kvstore.simulate.json_form import as_dict
        from kvstore.trace.source import created

        rows = as_dict([row for report in reports for row in report.rows])
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with created(csv_file) as stream:
            stream.write(text.getvalue().encode())
    if html is not None:
        from kvstore.output.files import PUBLIC, written
        from kvstore.simulate.html_report import simulation_page

        page = simulation_page(reports).encode()
        with written(html, PUBLIC) as stream:
            stream.write(page)


_simulation: Simulation | None = None
"""Simulation of a worker process, inherited from its parent by fork."""


def _begin(simulation: Simulation) -> None:
    global _simulation  # noqa: PLW0603 - one per process, set once
    _simulation = simulation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its pool


def _call(function: Callable[[Simulation, Any], Any], task: Any) -> Any:
    assert _simulation is not None
    return function(_simulation, task)


@contextmanager
def _spread(simulation: Simulation, jobs: int) -> Iterator[Each | None]:
    """Yield a function that runs tasks in ``jobs`` processes; None for one process."""
    if jobs == 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context

    _ = simulation.chain_lists, simulation.curve  # computed once, not in each process
    with ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1),
        mp_context=get_context("fork"),
        initializer=_begin,
        initargs=(simulation,),
    ) as pool:
        yield lambda function, tasks: pool.map(partial(_call, function), tasks)


def policies(*, as_json: Json = False) -> int:
    """List the eviction policies."""
    from kvstore.policy.registry import POLICIES
    from kvstore.simulate.optimal import OPTIMAL, SUMMARY

    keys = ("policy", "summary", "parameters", "source", "online")
    rows: list[tuple[str, str, Mapping[str, float], str, bool]] = [
        (name, entry.summary, entry.parameters, entry.source, True)
        for name, entry in POLICIES.items()
    ]
    rows.append((OPTIMAL, SUMMARY, {}, "Belady 1966", False))
    if as_json:
        write_json([dict(zip(keys, row, strict=True)) for row in rows])
        return OK
    cells = [
        (
            name,
            summary,
            ", ".join(f"{key.replace('_', ' ')} {n}" for key, n in given.items()),
            source,
        )
        for name, summary, given, source, _ in rows
    ]
    write_table(["policy", "evicts first", "parameters", "source"], cells, labels=4)
    return OK
