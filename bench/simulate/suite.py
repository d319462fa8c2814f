"""Accuracy and CPU time of the simulator relative to other simulators.

Question: are its ratios those of other tools and of the definitions, and at what cost?
Method:   the same traces in libCacheSim and kvcache-simulator, if installed in the interpreter of
          --peers; CPU seconds of one process, with parsing only on our side. libCacheSim has
          hashpower=18: its default of 24 is several times slower.
Bound:    a limit per figure: accuracy in shares of all blocks, cost as a ratio to the peer of the same
          run. The limit of values that must agree exactly is 0.
Run:      python -m bench.simulate --traces FOLDER [--peers PYTHON] [--only A6,P1] [--json]
          FOLDER has mooncake_conversation.jsonl.zst, weka_claude_code_48.jsonl.zst and others; P4 needs
          a trace of 81 million references, and its own process for its peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.simulate.models import leaf_first
from kvstore.output.sizes import Size, size_of
from kvstore.policy.protocol import Policy
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.flat import flat_policy, simulate_flat
from kvstore.simulate.optimal import OPTIMAL
from kvstore.simulate.report import make_report
from kvstore.simulate.run import SimulateOptions, Simulation
from kvstore.simulate.trace_index import simulate_policy
from kvstore.trace.columns import Trace
from kvstore.trace.info import info
from kvstore.trace.reading import read
from kvstore.trace.writing import write

SPEED_SIZES = ("0.5%", "1%", "2%", "5%", "10%", "15%", "20%", "25%", "30%", "50%", "75%", "100%")
SPEED = {
    "lru": "LRU", "fifo": "FIFO", "sieve": "Sieve", "s3fifo": "S3FIFO", "arc": "ARC", "lfu": "LFU",
    "2q": "TwoQ", "gdsf": "GDSF", "slru": "SLRU", OPTIMAL: "Belady",
}  # fmt: skip
"""Our policies and libCacheSim's classes of the same name, for the speed limits."""
PEERS = SPEED | {"clock": "Clock"}
SIZES = ("1%", "5%", "10%", "25%", "50%", "100%")
CALIBRATION = {
    ("mooncake_conversation", "lru"): {"5%": 0.1958, "10%": 0.2789, "100%": 0.3664},
    ("weka_claude_code_48", "lru"): {"5%": 0.7198, "10%": 0.8867, "100%": 0.9605},
    ("mooncake_conversation", OPTIMAL): {"5%": 0.3664},
    ("weka_claude_code_48", OPTIMAL): {"5%": 0.8177},
}
"""Prefix hit ratios of a block-by-block simulation in C, leaf-first, whole trace from cold."""
ROUNDED = 5e-5
"""Their precision is four digits."""
SIX_DIGITS = 5e-7
CONVERSATION, WEKA = "mooncake_conversation", "weka_claude_code_48"
SMALL = (
    CONVERSATION,
    "mooncake_synthetic",
    "lmcache_miniswe_bytes64",
    "lmcache_magagent_bytes64",
    "lmcache_taubench_bytes64",
)
"""Traces for a loop over blocks in Python; the one of Weka is too long, with five million."""
LARGE = "weka_claude_code_all"
BUDGETS = {CONVERSATION: "16,64,128,512,2048", WEKA: "4,8,16,32,64,96,128,192"}
"""GiB of the peer's model glm-5.2; a block of 512 tokens is 46.5 MiB."""

# Runs in the peers' interpreter: a file of int64 ids and of paths' ends, and what to do with them.
PEER = r"""
import json, sys, time
import libcachesim as lib
import numpy as np

job = json.load(sys.stdin)
ids = np.fromfile(job["ids"], np.int64)
offsets = np.fromfile(job["offsets"], np.int64).tolist()
if job["what"] == "speed":
    # The layout that it reads fastest: oracleGeneral, 24 bytes a request.
    records = np.zeros(len(ids), np.dtype([("t", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]))
    records["t"], records["id"], records["size"] = np.arange(len(ids)), ids, 1
    following = {}
    for at in range(len(ids) - 1, -1, -1):
        records["next"][at] = following.get(ids[at], -1)
        following[ids[at]] = at
    records.tofile(job["binary"])
    params = lib.ReaderInitParam(ignore_obj_size=True)
    seconds = {}
    for name in job["policies"]:
        start = time.process_time()
        for size in job["sizes"]:
            reader = lib.TraceReader(job["binary"], lib.TraceType.ORACLE_GENERAL_TRACE, params)
            getattr(lib, name)(max(1, size), hashpower=18).process_trace(reader)
        seconds[name] = time.process_time() - start
    print(json.dumps(seconds))
else:
    found = {}
    request = lib.Request()
    request.obj_size = 1
    for name in job["policies"]:
        for size in job["sizes"]:
            cache = getattr(lib, name)(size, hashpower=18)
            runs = hits = 0
            for start, stop in zip(offsets[:-1], offsets[1:]):
                if job["what"] == "forward":
                    leading = True
                    for block in ids[start:stop].tolist():
                        request.obj_id = block
                        hit = cache.get(request)
                        leading = leading and hit
                        hits += hit
                        runs += leading
                else:  # the last block first, so that the head is the most recent
                    path = ids[start:stop].tolist()
                    for block in path:
                        request.obj_id = block
                        if cache.find(request, False) is None:
                            break
                        runs += 1
                    for block in reversed(path):
                        request.obj_id = block
                        cache.get(request)
            found[f"{name} {size}"] = [runs / len(ids), hits / len(ids)]
    print(json.dumps(found))
"""


def cpu(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@contextmanager
def handed(trace: Trace) -> Iterator[dict[str, Any]]:
    """Write a trace's blocks to files for a peer."""
    with tempfile.TemporaryDirectory() as folder:
        ids, offsets = Path(folder) / "ids", Path(folder) / "offsets"
        trace.blocks.astype(np.int64).tofile(ids)
        trace.offsets.tofile(offsets)
        yield {"ids": str(ids), "offsets": str(offsets), "binary": str(Path(folder) / "binary")}


def peer(python: Path, trace: Trace, **job: Any) -> Any:
    with handed(trace) as files:
        done = subprocess.run(
            [python, "-c", PEER],
            input=json.dumps(files | job),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its limit."""

    bar: str
    what: str
    found: float
    limit: float
    note: str = ""

    @property
    def met(self) -> bool:
        """Return whether the figure is within its limit."""
        return abs(self.found) <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{self.bar:<4} {verdict:<7}{self.found:>12.6f} <= {self.limit:<8g} {self.what}  {self.note}"


Bars = Iterator[Bar]


class Bench:
    """Traces, each read once, and the interpreter of the peers."""

    def __init__(self, folder: Path, python: Path | None) -> None:
        self.folder = folder
        self.python = python
        self.simulation = cache(lambda name: Simulation(read(self.path(name))))
        self.rival = cache(self._rival)

    def path(self, name: str) -> Path:
        """Return the file of a trace."""
        return self.folder / f"{name}.jsonl.zst"

    def trace(self, name: str) -> Trace:
        """Return a trace."""
        trace: Trace = self.simulation(name).trace
        return trace

    def _rival(self, name: str) -> tuple[dict[str, Any], float]:
        """Run kvcache-simulator; return its result, and our wall time over its better one."""
        assert self.python is not None
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "trace.jsonl"
            write(self.trace(name), plain)
            command = [
                str(self.python.with_name("kvcache-simulator")), "run", "--trace", str(plain),
                "--model", "glm-5.2", "--budgets-gib", BUDGETS[name], "--policies",
                "fifo,lru,optimal", "--format", "json", "--no-progress",
            ]  # fmt: skip
            walls, found = [], {}
            for _ in range(2):  # the first compiles
                start = time.perf_counter()
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                walls.append(time.perf_counter() - start)
                if done.returncode:
                    sys.exit(done.stderr)
                found = json.loads(done.stdout)
            start = time.perf_counter()
            simulation = Simulation(read(plain))
            sizes = [Size(point["cacheBlocks"], 0) for point in found["points"]]
            policies = ("fifo", "lru", OPTIMAL)
            options = SimulateOptions(policies=policies, sizes=sizes, interval="last_half")
            make_report(simulation, options)
            ours = time.perf_counter() - start
        return found, ours / min(walls)


LEAST = 10
"""Blocks of the smallest cache in which a tenth is a block: libCacheSim's S3-FIFO ends at less."""


def sizes_for(trace: Trace, policies: Iterable[str]) -> list[int]:
    least = LEAST if "s3fifo" in policies else 1
    return [size for size in sizes_of(trace, SIZES) if size >= least]


def sizes_of(trace: Trace, texts: Sequence[str]) -> list[int]:
    return [size_of(text, trace.distinct_blocks).blocks for text in texts]


def worst(differences: Iterable[float]) -> float:
    return float(max(differences, key=abs))


def points(bench: Bench, bar: str, wanted: str) -> Bars:
    for (name, policy), expected in CALIBRATION.items():
        if policy == wanted:
            simulation = bench.simulation(name)
            found = [
                simulation.row(policy, size_of(text, simulation.trace.distinct_blocks))
                for text in expected
            ]
            differences = [
                row.ratios.prefix_hit_ratio - each
                for row, each in zip(found, expected.values(), strict=True)
            ]
            yield Bar(bar, f"{policy} at known points, {name}", worst(differences), ROUNDED)


def against_blocks(bench: Bench, bar: str, policy: str, rank: Callable[[Any], Any]) -> Bars:
    """Compare a policy with a loop over single blocks."""
    limit = 0.002 if bar == "A4" else SIX_DIGITS
    for name in SMALL:
        simulation = bench.simulation(name)
        trace = simulation.trace
        differences = [
            (int(simulation.hits(policy, size).sum()) - leaf_first(trace, rank, size))
            / trace.references
            for size in sizes_of(trace, SIZES[:-1])
        ]
        yield Bar(bar, f"{policy} block by block, {name}", worst(differences), limit)


def a1(bench: Bench) -> Bars:
    """LRU at every size."""
    yield from points(bench, "A1", "lru")
    yield from against_blocks(bench, "A1", "lru", lambda block: block.used)
    if bench.python is not None:
        yield from against_reverse(bench, "A1", ("lru",), SIX_DIGITS)


def a2(bench: Bench) -> Bars:
    """Infinite cache: every block that was requested before hits."""
    for name in (*SMALL, WEKA):
        trace = bench.trace(name)
        seen = np.zeros(trace.distinct_blocks, np.bool_)
        again = 0
        for request in range(len(trace)):
            path = trace.chain(request)
            again += int(seen[path].sum())
            seen[path] = True
        found = int(bench.simulation(name).infinite_cache_hits().sum())
        yield Bar("A2", f"infinite cache, {name}", (found - again) / trace.references, SIX_DIGITS)


def against_rival(bench: Bench, bar: str, policy: str) -> Bars:
    if bench.python is None:
        return
    for name, limit in ((CONVERSATION, 1e-6), (WEKA, 3e-4)):
        found, _ = bench.rival(name)
        simulation = bench.simulation(name)
        differences = []
        for point in found["points"]:
            row = simulation.row(policy, Size(point["cacheBlocks"], 0), "last_half")
            theirs = point["results"][policy]["hitRate"]
            differences.append(row.ratios.prefix_token_hit_ratio - theirs)
        what = f"{policy} beside kvcache-simulator at {len(differences)} sizes, {name}"
        yield Bar(bar, what, worst(differences), limit)


def a3(bench: Bench) -> Bars:
    """LRU, the last half of the requests."""
    yield from against_rival(bench, "A3", "lru")


def a4(bench: Bench) -> Bars:
    """FIFO and LFU, leaf-first."""
    yield from against_blocks(bench, "A4", "fifo", lambda block: block.stored)
    yield from against_blocks(bench, "A4", "lfu", lambda block: (block.uses, block.used))


def flat_ratio(trace: Trace, policy: Policy[Any], size: int) -> float:
    _, hits = simulate_flat(trace, policy, size)
    return sum(hits) / trace.references


def against_flat(bench: Bench, bar: str, limits: dict[str, float]) -> Bars:
    if bench.python is None:
        return
    for name in SMALL:
        trace = bench.trace(name)
        sizes = sizes_for(trace, limits)
        peers = [PEERS[each] for each in limits]
        found = peer(bench.python, trace, what="forward", policies=peers, sizes=sizes)
        for policy, limit in limits.items():
            theirs = [found[f"{PEERS[policy]} {size}"][1] for size in sizes]
            ours = [flat_ratio(trace, flat_policy(policy, size), size) for size in sizes]
            yield Bar(bar, f"{policy} flat, {name}", worst(np.subtract(ours, theirs)), limit)


def a5(bench: Bench) -> Bars:
    """Flat policies that have one definition."""
    exact = dict.fromkeys(("lru", "fifo", "sieve"), SIX_DIGITS)
    yield from against_flat(bench, "A5", exact | {"lfu": 0.003, "clock": 0.003})


def a6(bench: Bench) -> Bars:
    """Flat policies whose implementations differ."""
    names = ("arc", "s3fifo", "2q", "slru", "gdsf")
    yield from against_flat(bench, "A6", dict.fromkeys(names, 0.01))


def a7(bench: Bench) -> Bars:
    """Optimum: its expected value, and no policy above it."""
    yield from points(bench, "A7", OPTIMAL)
    yield from against_rival(bench, "A7", OPTIMAL)
    for name in (*SMALL, WEKA):
        simulation = bench.simulation(name)
        above = [
            f"{policy} at {size}"
            for size in sizes_of(simulation.trace, SPEED_SIZES)
            for policy in POLICIES
            if simulation.hits(policy, size).sum() > simulation.hits(OPTIMAL, size).sum()
        ]
        yield Bar("A7", f"policies above the optimum, {name}", len(above), 0, ", ".join(above))


def against_reverse(bench: Bench, bar: str, names: Sequence[str], limit: float) -> Bars:
    assert bench.python is not None
    for name in SMALL:
        simulation = bench.simulation(name)
        trace = simulation.trace
        sizes = sizes_for(trace, names)
        policies = [PEERS[each] for each in names]
        theirs = peer(bench.python, trace, what="reverse", policies=policies, sizes=sizes)
        for policy in names:
            differences = [
                int(simulation.hits(policy, size).sum()) / trace.references
                - theirs[f"{PEERS[policy]} {size}"][0]
                for size in sizes
            ]
            note = f"lowest {min(differences):+.4f}, highest {max(differences):+.4f}"
            what = f"{policy} beside the peer, last block first, {name}"
            yield Bar(bar, what, worst(differences), limit, note)


def a7b(bench: Bench) -> Bars:
    """Policies on prefixes and flat policies that use the last block of a request first.

    The simulator hits more, because the peer may evict a first block before its children.
    """
    if bench.python is not None:
        names = ("arc", "clock", "s3fifo", "gdsf", "2q")
        yield from against_reverse(bench, "A7b", names, 0.02)


def a8(bench: Bench) -> Bars:
    """Hits never decrease with the size."""
    for name in (*SMALL, WEKA):
        simulation = bench.simulation(name)
        sizes = sizes_of(simulation.trace, SPEED_SIZES)
        for policy in ("lru", OPTIMAL):
            hits = [int(simulation.hits(policy, size).sum()) for size in sizes]
            falls = int((np.diff(hits) < 0).sum())
            yield Bar("A8", f"sizes at which {policy} falls, {name}", falls, 0)


def a9(bench: Bench) -> Bars:
    """The curve equals the policy, request by request."""
    for name in (*SMALL, WEKA):
        simulation = bench.simulation(name)
        differs = sum(
            simulate_policy(simulation.chain_lists, make_policy("lru"), size)
            != simulation.curve.hits(size).tolist()
            for size in sizes_of(simulation.trace, SPEED_SIZES)
        )
        yield Bar("A9", f"sizes at which the curve is off, {name}", differs, 0)


def ten_policies(bench: Bench, name: str) -> tuple[float, float, float, dict[str, float]]:
    """Return our CPU seconds, of them for reading, for LRU without it, and the peer's by class."""
    path = bench.path(name)
    trace = read(path)
    sizes = [size_of(text, trace.distinct_blocks) for text in SPEED_SIZES]

    def lru() -> None:
        simulation = Simulation(trace)
        for size in sizes:
            simulation.row("lru", size)

    options = SimulateOptions(policies=tuple(SPEED), sizes=sizes)
    ours = cpu(lambda: make_report(Simulation(read(path)), options))
    assert bench.python is not None
    blocks = [size.blocks for size in sizes]
    theirs = peer(bench.python, trace, what="speed", policies=list(SPEED.values()), sizes=blocks)
    return ours, cpu(lambda: read(path)), cpu(lru), theirs


def p1(bench: Bench) -> Bars:
    """Ten policies at twelve sizes, short prompts."""
    if bench.python is not None:
        ours, reading, _, theirs = ten_policies(bench, CONVERSATION)
        peers = sum(theirs.values())
        note = f"{ours:.2f} s, of them {reading:.2f} s reading, beside {peers:.2f} s"
        yield Bar("P1", f"ten policies, {CONVERSATION}", ours / peers, 1.0, note)


def p2(bench: Bench) -> Bars:
    """The same with long prompts, and LRU alone."""
    if bench.python is not None:
        ours, reading, lru, theirs = ten_policies(bench, WEKA)
        peers = sum(theirs.values())
        note = f"{ours:.2f} s, of them {reading:.2f} s reading, beside {peers:.2f} s"
        yield Bar("P2", f"ten policies, {WEKA}", ours / peers, 0.25, note)
        note = f"{lru:.3f} s beside {theirs['LRU']:.2f} s"
        yield Bar("P3", f"lru at twelve sizes, {WEKA}", lru / theirs["LRU"], 0.5, note)


def p4(bench: Bench) -> Bars:
    """81 million references: statistics, and LRU at every size."""
    path = bench.path(LARGE)
    if not path.exists():
        return
    folder = str(bench.folder)
    command = [sys.executable, "-m", "bench.simulate", "--traces", folder, "--large"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout)
    yield Bar("P4", "CPU seconds of info and curve", found["seconds"], 60, done.stdout.strip())
    yield Bar("P4", "GiB of memory for it", found["peak_gib"], 4)


def large(folder: Path) -> None:
    start = time.process_time()
    trace = read(folder / f"{LARGE}.jsonl.zst")
    facts = info(trace)
    curve = Simulation(trace).curve
    ratio = int(curve.hits(trace.distinct_blocks // 20).sum()) / trace.references
    found = {
        "seconds": round(time.process_time() - start, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "references": facts["block_references"],
        "lru_at_5_percent": round(ratio, 6),
    }
    print(json.dumps(found))


def p5(bench: Bench) -> Bars:
    """Three policies at eight budgets, wall time with reading, the peer's compiler warm."""
    if bench.python is not None:
        _, ratio = bench.rival(WEKA)
        yield Bar("P5", f"three policies beside kvcache-simulator, {WEKA}", ratio, 0.5)


CHECKS: dict[str, Callable[[Bench], Bars]] = {
    "A1": a1, "A2": a2, "A3": a3, "A4": a4, "A5": a5, "A6": a6, "A7": a7, "A7b": a7b, "A8": a8,
    "A9": a9, "P1": p1, "P2": p2, "P4": p4, "P5": p5,
}  # fmt: skip
"""By name; P3 comes with P2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--peers", type=Path, help="a Python with libcachesim, kvcache-simulator")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, with commas between them")
    parser.add_argument("--json", action="store_true", help="print an array instead of a table")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large(options.traces)
        return
    bench = Bench(options.traces, options.peers)
    bars = []
    for name in options.only.split(","):
        for bar in CHECKS[name](bench):
            bars.append(bar)
            if not options.json:
                print(bar, flush=True)
    if options.json:
        print(json.dumps([asdict(bar) | {"met": bar.met} for bar in bars], indent=2))
    else:
        missed = sorted({bar.bar for bar in bars if not bar.met})
        print(f"missed: {', '.join(missed) or 'none'}")
