"""Time to first token after an engine restart, by the cached share of the prompt.

Question: how long until the first token, if an earlier process has stored 0, 50, 90 or 97 % of the prompt?
Method:   three processes per engine and connector. The first has no cache: its time is "none". The second
          stores the first part of each prompt. The third is the restarted engine: it runs each whole prompt
          once. All prompts differ, so memory has no effect. Time is measured from token ids to the first
          token, on a loaded and warmed engine with the store open; medians. Stored parts are whole blocks
          of 128 tokens, so the share is slightly less.
Peers:    the same engine without a cache, and vLLM's own ExampleConnector, which only hits whole prompts: a
          share with more than a block to compute is a miss there.
Bound:    each hit equals the stored part, and each first token that of the engine without a cache; else
          exit 1. (In bfloat16 near ties may be resolved either way: other tokens are only counted.)
Run:      python -m bench.engines.ttft [--quick] [--engines ...] [--lengths ...] [--shares ...] [--runs N] [--json] [--svg FOLDER] [--cold-disk]
          vLLM needs its own environment: make test-engines, or a Python with vLLM as --vllm-python. A full
          measurement needs hours of two cores of an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engines.ttft_engines import Connector, First, Job
from kvstore.cli.demo.process import drop_page_cache
from kvstore.cli.demo.prompt import default_text
from kvstore.cli.terminal import progress, progress_bar
from kvstore.engine import smollm2
from kvstore.output.chart import Axis, Point, Series, chart
from tests.engine.environments import BuildError, environment

BLOCK_TOKENS = 128
ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {1056: 5, 4224: 3, 7680: 3}
"""Prompt lengths with the runs of each case. 97 % of the first two is a whole number of blocks."""
SHARES = (0.0, 0.5, 0.9, 0.97)
QUICK_LENGTHS, QUICK_SHARES = {544: 2}, (0.0, 0.97)
CONNECTORS: Mapping[str, Sequence[Connector]] = {
    "transformers": ("none", "kvstore"),
    "vllm": ("none", "kvstore", "example"),
}
OFFSET_TOKENS = 193
"""Distance of the starts of two prompts: their first blocks differ."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, of which the first ``cached`` tokens are stored before the restart."""

    share: float
    cached: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one engine with one connector for prompts of one length and share."""

    engine: str
    connector: str
    prompt_tokens: int
    share: float
    """Requested share; ``cached_tokens`` are whole blocks."""
    cached_tokens: int
    hit_tokens: tuple[int, ...]
    seconds: float
    """Median."""
    seconds_min: float
    seconds_max: float
    speedup: float
    """Median without a cache over median with it, the same engine and the same prompts."""
    same_tokens: int
    """Runs whose first token is that of the run without a cache."""
    runs: int


def cases(text: Sequence[int], lengths: Mapping[int, int], shares: Sequence[float]) -> list[Case]:
    """Return every case, each with its own prompt. Raises ``SystemExit`` if ``text`` is too short."""
    found: list[Case] = []
    for length, runs in lengths.items():
        for share in shares:
            cached = min(int(length * share), length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            for _ in range(runs):
                start = len(found) * OFFSET_TOKENS
                prompt = tuple(text[start : start + length])
                if len(prompt) < length:
                    sys.exit(f"the text has {len(text):,} tokens, expected {start + length:,}")
                found.append(Case(share, cached, prompt))
    return found


def summarise(
    engine: str,
    connector: str,
    chosen: Sequence[Case],
    found: Sequence[First],
    cold: Sequence[First],
) -> list[Row]:
    """Return a row per length and share, beside the same prompts without a cache."""
    groups: dict[tuple[int, float], list[int]] = {}
    for place, case in enumerate(chosen):
        groups.setdefault((len(case.prompt), case.share), []).append(place)
    rows = []
    for (length, share), places in groups.items():
        seconds = [found[place].seconds for place in places]
        without = statistics.median(cold[place].seconds for place in places)
        rows.append(
            Row(
                engine=engine,
                connector=connector,
                prompt_tokens=length,
                share=share,
                cached_tokens=chosen[places[0]].cached,
                hit_tokens=tuple(found[place].hit_tokens for place in places),
                seconds=statistics.median(seconds),
                seconds_min=min(seconds),
                seconds_max=max(seconds),
                speedup=without / statistics.median(seconds),
                same_tokens=sum(found[place].token == cold[place].token for place in places),
                runs=len(places),
            )
        )
    return rows


def faults(rows: Sequence[Row], dtype: str) -> list[str]:
    """Return the violations of kvstore's bounds."""
    found = []
    for row in rows:
        where = f"{row.engine}, {row.prompt_tokens} tokens, {row.share:.0%} cached"
        if row.connector == "kvstore" and set(row.hit_tokens) != {row.cached_tokens}:
            found.append(f"{where}: hits of {row.hit_tokens}, expected {row.cached_tokens} each")
        if row.connector == "kvstore" and row.same_tokens < row.runs and dtype == "float32":
            found.append(
                f"{where}: {row.same_tokens} of {row.runs} first tokens as without a cache"
            )
    return found


def run_job(python: Path, job: Job, folder: Path, advance: Callable[[int], None]) -> list[First]:
    """Run a job in its own process; ``advance`` is called with the number of finished prompts.

    Raises ``SystemExit`` with the end of the process's output if it failed.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    results, log = place / "job.results", place / "log"
    results.touch()
    command = [str(python), "-m", "bench.engines.ttft_engines", str(place / "job.json")]
    # The engine's Python need not have kvstore installed: its workers find this checkout.
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                advance(results.read_text(encoding="utf-8").count("\n"))
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    lines = results.read_text(encoding="utf-8").splitlines()
    if process.returncode != 0 or len(lines) != len(job.prompts):
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        sys.exit(
            f"{job.engine} with connector {job.connector} ended with exit status "
            f"{process.returncode} after {len(lines)} of {len(job.prompts)} prompts:\n{tail}"
        )
    return [First(**json.loads(line)) for line in lines]


def measure(
    engine: str,
    chosen: Sequence[Case],
    job: Callable[..., Job],
    run: Callable[[Job], list[First]],
    *,
    is_cold_disk: bool = False,
) -> list[Row]:
    """Measure one engine with every connector it has."""
    whole = [case.prompt for case in chosen]
    # One token more than the hit: the last token of a prompt is always computed.
    parts = [case.prompt[: case.cached + 1] for case in chosen if case.cached]
    cold = run(job(engine, "none", whole))
    rows = summarise(engine, "none", chosen, cold, cold)
    for connector in CONNECTORS[engine]:
        if connector == "none":
            continue
        storing = job(engine, connector, parts)
        run(storing)
        if is_cold_disk:
            drop_page_cache(Path(storing.store))
        rows += summarise(engine, connector, chosen, run(job(engine, connector, whole)), cold)
    return rows


def python_of(engine: str, given: Path | None) -> Path:
    """Return the Python with an engine. Raises ``SystemExit`` with the command that installs one."""
    if engine == "transformers":
        return Path(sys.executable)
    try:
        python = given if given is not None else environment(engine) / "bin" / "python"
    except BuildError as fault:
        sys.exit(f"{fault}; name a Python that can import {engine}: --{engine}-python")
    if not python.exists():
        sys.exit(
            f"{python} does not exist; run: make test-engines ENGINES={engine}, or name a Python that "
            f"can import {engine}: --{engine}-python"
        )
    return python


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, its header first."""
    lines = [
        f"{'engine':13} {'connector':9} {'prompt':>6} {'asked':>5} {'cached':>6} {'hit':>6} "
        f"{'TTFT':>9}  {'from':>8} {'to':>8} {'sooner':>8}  same token".rstrip()
    ]
    for row in rows:
        hit = statistics.median_low(row.hit_tokens)
        lines.append(
            f"{row.engine:13} {row.connector:9} {row.prompt_tokens:6} {row.share:5.0%} "
            f"{row.cached_tokens:6} {hit:6} {row.seconds:7.3f} s  {row.seconds_min:8.3f} "
            f"{row.seconds_max:8.3f} {row.speedup:6.1f} x  {row.same_tokens} of {row.runs}"
        )
    return lines


def pictures(rows: Sequence[Row]) -> dict[int, str]:
    """Return a chart for each prompt length: time by share, a line for each engine and connector."""
    drawn = {}
    for length in sorted({row.prompt_tokens for row in rows}):
        lines: dict[str, list[Point]] = {}
        for row in rows:
            if row.prompt_tokens == length:
                point = Point(100 * row.share, row.seconds, row.seconds_min, row.seconds_max)
                lines.setdefault(f"{row.engine}, {row.connector}", []).append(point)
        drawn[length] = chart(
            [Series(name, tuple(points), is_line=True) for name, points in lines.items()],
            title=f"Time to first token of {length:,} tokens, after a restart",
            x=Axis("% of the prompt stored before"),
            y=Axis("seconds (median, least, most)", is_log=True),
        )
    return drawn


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=CONNECTORS, default=["transformers"])
    parser.add_argument("--quick", action="store_true", help="short prompts only, as a smoke test")
    parser.add_argument(
        "--lengths", nargs="+", type=int, choices=LENGTHS, help="only these prompts"
    )
    parser.add_argument(
        "--shares", nargs="+", type=float, choices=SHARES, help="only these parts cached"
    )
    parser.add_argument("--runs", type=int, help="prompts of each case; default: 5 or 3")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: the faster one here"
    )
    parser.add_argument("--vllm-python", type=Path, help="a Python that can import vLLM")
    parser.add_argument(
        "--cold-disk", action="store_true", help="drop the store from the page cache"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path, help="write the charts to this folder")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and print a row per engine, connector, length and share."""
    chosen = options()
    pythons = {engine: python_of(engine, chosen.vllm_python) for engine in chosen.engines}
    lengths: Mapping[int, int] = QUICK_LENGTHS if chosen.quick else LENGTHS
    if chosen.lengths:
        lengths = {length: LENGTHS[length] for length in chosen.lengths}
    if chosen.runs:
        lengths = dict.fromkeys(lengths, chosen.runs)
    shares = chosen.shares or (QUICK_SHARES if chosen.quick else SHARES)
    dtype = chosen.dtype or smollm2.fastest_dtype()
    model = smollm2.prepare(progress())
    every = cases(encode(model), lengths, shares)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-ttft-") as name:
        for engine, python in pythons.items():
            job = job_maker(model, dtype, Path(name), max(lengths) + 1)
            with progress_bar(engine) as advance:
                run = runner(python, Path(name), advance, prompts_of(engine, every))
                rows += measure(engine, every, job, run, is_cold_disk=chosen.cold_disk)
    report(rows, dtype, chosen)


def encode(model: Path) -> list[int]:
    """Return the tokens of the help topics of CPython."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return [int(token) for token in tokenizer(default_text())["input_ids"]]


def job_maker(model: Path, dtype: str, folder: Path, max_tokens: int) -> Callable[..., Job]:
    """Return a function that makes jobs of an engine, a connector and prompts."""

    def make(engine: str, connector: Connector, prompts: Sequence[Sequence[int]]) -> Job:
        return Job(
            engine=engine,
            connector=connector,
            model=str(model),
            dtype=dtype,
            store=str(folder / f"{engine}-{connector}"),
            prompts=prompts,
            max_tokens=max_tokens,
        )

    return make


def prompts_of(engine: str, chosen: Sequence[Case]) -> int:
    """Return the number of prompts that all processes of an engine run."""
    stores = len(CONNECTORS[engine]) - 1
    return len(chosen) * (1 + stores) + stores * sum(bool(case.cached) for case in chosen)


def runner(
    python: Path, folder: Path, advance: Callable[[int, int], None], total: int
) -> Callable[[Job], list[First]]:
    """Return a function that runs jobs in turn, under one progress bar."""
    done = 0

    def run(job: Job) -> list[First]:
        nonlocal done
        found = run_job(python, job, folder, lambda count: advance(done + count, total))
        done += len(found)
        return found

    return run


def report(rows: Sequence[Row], dtype: str, chosen: argparse.Namespace) -> None:
    """Print the rows, draw them, and exit 1 for a violated bound."""
    if chosen.svg is not None:
        chosen.svg.mkdir(parents=True, exist_ok=True)
        for length, picture in pictures(rows).items():
            (chosen.svg / f"ttft-{length}.svg").write_text(picture, encoding="utf-8")
    if chosen.json:
        settings: dict[str, Any] = {"dtype": dtype, "page_cache": not chosen.cold_disk}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{smollm2.NAME} in {dtype}, page cache {'dropped' if chosen.cold_disk else 'warm'}")
        print("\n".join(table(rows)))
    wrong = faults(rows, dtype)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
