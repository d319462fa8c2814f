"""Peers of the SSD tier, with the same blocks, batches, syncs and checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from bench.ssd.peers import PEERS
from bench.ssd.store import BLOCK_TOKENS, COLD_SHARE, RUN_BLOCKS, Advance, forget_pages
from kvstore.output.chart import Axis, Point, Series, chart

ROOT = Path(__file__).resolve().parents[2]
BATCH_BLOCKS = 64
"""Blocks that become durable together. Source: COMMIT_BLOCKS of the tier."""
ROUNDS = 3
"""Most rounds, each with one write and read of every store; the samples of all rounds count."""
PHASES = {"store": "durable store", "warm": "warm load", "cold": "cold load"}


class MissingPeer(Exception):  # noqa: N818 - reported, not an error
    """A peer whose module, named in the text, cannot be imported."""


class Contender:
    """Peer in its own process."""

    def __init__(self, name: str, python: Path, log: Path) -> None:
        # The peer's Python need not have kvstore installed: it finds this checkout.
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.name = name
        self._log = log
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "bench.ssd.peers", name],
                cwd=ROOT,
                env=environ,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def do(self, job: str, **fields: Any) -> dict[str, Any]:
        """Run a job in the peer and return its result.

        Raises:
            MissingPeer: if its Python cannot import it.
            RuntimeError: with the end of its output, if it failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": job, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise RuntimeError(f"{self.name} failed at {job}:\n" + "\n".join(lines[-15:]))
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise MissingPeer(answer["missing"])
        return answer

    def end(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.communicate()


@dataclass(slots=True)
class Samples:
    """Figures of one peer. Seconds are per batch, per run of blocks, per block."""

    sync: str = ""
    missing: str = ""
    batches: list[float] = field(default_factory=list)
    """Storing a batch."""
    runs: dict[str, list[float]] = field(default_factory=lambda: {"warm": [], "cold": []})
    singles: dict[str, list[float]] = field(default_factory=lambda: {"warm": [], "cold": []})
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer in all phases. Speeds are payload bytes; percentiles are over all rounds."""

    peer: str
    sync: str
    """How a batch becomes durable, or the package to install for a missing peer."""
    gb_per_s: dict[str, float]
    """By phase: batches of 64 blocks when storing, runs of 32 when loading."""
    low_gb_per_s: dict[str, float]
    """Of the slower quarter of batches or runs."""
    high_gb_per_s: dict[str, float]
    p50_us: dict[str, float]
    """Of a batch when storing, of a single block when loading."""
    p99_us: dict[str, float]
    bytes_per_token: float


def compare(
    names: Sequence[str],
    pythons: Mapping[str, Path],
    blocks: int,
    block_bytes: int,
    rounds: int,
    folder: Path,
    advance: Advance,
) -> tuple[list[PeerRow], str]:
    """Measure peers and return a row for each, with how the page cache was dropped."""
    samples = {name: Samples() for name in names}
    peers = {
        name: Contender(name, pythons[name], folder / f"{at}.log") for at, name in enumerate(names)
    }
    how = ""
    try:
        for number in range(rounds):
            # The order of the peers changes with the round, first and neighbours included.
            turned = [*names[number % len(names) :], *names[: number % len(names)]]
            order = turned[:: -1 if number % 2 else 1]
            how = _round(number, order, peers, samples, (blocks, block_bytes), folder) or how
            advance(number + 1, rounds)
    finally:
        for peer in peers.values():
            peer.end()
    rows = [_row(name, found, blocks, block_bytes) for name, found in samples.items()]
    return rows, how


def _round(
    number: int,
    order: Sequence[str],
    peers: Mapping[str, Contender],
    samples: Mapping[str, Samples],
    size: tuple[int, int],
    folder: Path,
) -> str:
    blocks, block_bytes = size
    places = {name: folder / f"round-{at}" for at, name in enumerate(order)}
    how = ""
    for name in order:
        if samples[name].missing:
            continue
        places[name].mkdir()
        shape = {"blocks": blocks, "block_bytes": block_bytes, "batch": BATCH_BLOCKS}
        try:
            found = peers[name].do("prepare", folder=str(places[name]), **shape)
        except MissingPeer as error:
            samples[name].missing = str(error)
            continue
        samples[name].sync = found["sync"]
        samples[name].batches += peers[name].do("store")["seconds"]
    present = [name for name in order if not samples[name].missing]
    rng = np.random.default_rng(number)
    runs, singles = chosen(blocks, 1.0, rng)
    for name in present:
        peers[name].do("release")  # reads from files, not from unwritten memory
        peers[name].do("acquire")
        peers[name].do("load", runs=[*runs, *singles])  # warms the page cache
        _load(peers[name], samples[name], "warm", runs, singles)
    runs, singles = chosen(blocks, COLD_SHARE, rng)
    for name in present:
        peers[name].do("release")
        how = forget_pages(places[name])
        peers[name].do("acquire")
        _load(peers[name], samples[name], "cold", runs, singles)
        samples[name].disk_bytes = peers[name].do("close")["disk_bytes"]
    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)
    os.sync()  # not in the first batch of the next round
    return how


def _load(
    peer: Contender,
    samples: Samples,
    phase: str,
    runs: Sequence[Sequence[int]],
    singles: Sequence[Sequence[int]],
) -> None:
    samples.runs[phase] += peer.do("load", runs=runs)["seconds"]
    samples.singles[phase] += peer.do("load", runs=singles)["seconds"]


def chosen(
    blocks: int, share: float, rng: np.random.Generator
) -> tuple[list[list[int]], list[list[int]]]:
    """Choose at most a share of the blocks: half as whole runs in random order, half one by one.

    Single blocks are spread over the store and in no run, so neither half warms the other.
    """
    run = min(RUN_BLOCKS, max(1, blocks // 2))
    half = max(1, int(share * blocks / run / 2))
    starts = rng.permutation(blocks // run)[:half] * run
    runs = [list(range(start, start + run)) for start in starts.tolist()]
    others = np.setdiff1d(np.arange(blocks), np.asarray(runs))
    return runs, [[number] for number in rng.permutation(others)[: half * run].tolist()]


def _row(name: str, found: Samples, blocks: int, block_bytes: int) -> PeerRow:
    if found.missing:
        sync = f"missing {found.missing}: {PEERS[name].pip}"
        return PeerRow(
            peer=name,
            sync=sync,
            gb_per_s={},
            low_gb_per_s={},
            high_gb_per_s={},
            p50_us={},
            p99_us={},
            bytes_per_token=0.0,
        )
    # Average bytes per batch, as the last batch may be smaller.
    batch = blocks / -(-blocks // BATCH_BLOCKS)
    run = min(RUN_BLOCKS, max(1, blocks // 2))
    calls = {"store": (found.batches, batch * block_bytes)}
    calls |= {phase: (seconds, run * block_bytes) for phase, seconds in found.runs.items()}
    single = {"store": found.batches, **found.singles}
    # Sums, not medians of calls, include work that is deferred to a later call.
    means = {phase: size * len(s) / sum(s) / 1e9 for phase, (s, size) in calls.items()}
    quarters = {
        phase: [size / s / 1e9 for s in percentiles(seconds, (75, 25))]
        for phase, (seconds, size) in calls.items()
    }
    return PeerRow(
        peer=name,
        sync=found.sync,
        gb_per_s=means,
        low_gb_per_s={phase: low for phase, (low, _) in quarters.items()},
        high_gb_per_s={phase: high for phase, (_, high) in quarters.items()},
        p50_us={phase: 1e6 * median(seconds) for phase, seconds in single.items()},
        p99_us={phase: 1e6 * percentiles(seconds, (99,))[0] for phase, seconds in single.items()},
        bytes_per_token=found.disk_bytes / (blocks * BLOCK_TOKENS),
    )


def percentiles(values: Sequence[float], wanted: Sequence[int]) -> list[float]:
    """Return interpolated percentiles of values."""
    if len(values) == 1:
        return [values[0]] * len(wanted)
    cuts = quantiles(values, n=100, method="inclusive")
    return [cuts[percent - 1] for percent in wanted]


def table(rows: Sequence[PeerRow]) -> list[str]:
    """Return the lines of the table, its header first."""
    load = f"{'GB/s':>6} {'p50 us':>6} {'p99 us':>6}"
    lines = [
        f"{'':20} {'store':>6} {'a batch':>8} {'':>8}  {'warm':>6} {'a block':>13}  {'cold':>6} {'a block':>13}",
        f"{'peer':20} {'GB/s':>6} {'p50 ms':>8} {'p99 ms':>8}  {load}  {load}  B/token  how a batch is made durable",
    ]
    for row in rows:
        if not row.gb_per_s:
            lines.append(f"{row.peer:20} {row.sync}")
            continue
        store = f"{row.gb_per_s['store']:6.2f} {row.p50_us['store'] / 1e3:8.1f} {row.p99_us['store'] / 1e3:8.1f}"
        loads = "  ".join(
            f"{row.gb_per_s[phase]:6.2f} {row.p50_us[phase]:6.0f} {row.p99_us[phase]:6.0f}"
            for phase in ("warm", "cold")
        )
        lines.append(f"{row.peer:20} {store}  {loads}  {row.bytes_per_token:7.1f}  {row.sync}")
    return lines


def picture(rows: Sequence[PeerRow]) -> str:
    """Return the chart: speed of storing, warm and cold loading, for every peer that is there."""
    present = [row for row in rows if row.gb_per_s]
    series = [
        Series(
            name,
            tuple(
                Point(
                    at,
                    row.gb_per_s[phase],
                    min(row.low_gb_per_s[phase], row.gb_per_s[phase]),
                    max(row.high_gb_per_s[phase], row.gb_per_s[phase]),
                )
                for at, row in enumerate(present, 1)
            ),
        )
        for phase, name in PHASES.items()
    ]
    return chart(
        series,
        title="Blocks of DeepSeek-V4.1-Flash, 64 made durable at once, all verified",
        x=Axis("", ticks=tuple((float(x), row.peer) for x, row in enumerate(present, 1))),
        y=Axis("GB/s: mean, and quarters", is_log=True),
    )
