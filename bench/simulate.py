"""The simulator beside others: accuracy against them, CPU time against them.

Question: does it give the ratios that other tools and the specification give, and at what cost?
Method:   the same traces through libCacheSim and kvcache-simulator where they are installed, in the
          interpreter given with --peers; CPU seconds of one process, parsing included on our side
          alone. libCacheSim runs with hashpower=18: its default of 24 is several times slower.
Bound:    ratios to the peer of the same run. What must agree exactly is compared exactly.
Run:      python -m bench.simulate --traces FOLDER [--peers PYTHON] [--large]
Needs:    the folder with mooncake_conversation.jsonl.zst, weka_claude_code_48.jsonl.zst and others.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.policy.registry import POLICIES, make_policy
from kvstore.simulate.flat import simulate_flat
from kvstore.simulate.run import OPTIMAL, Simulation, simulate
from kvstore.simulate.sizes import Size, size_of
from kvstore.simulate.tree import simulate_policy
from kvstore.trace.columns import Trace
from kvstore.trace.info import info
from kvstore.trace.reading import read
from kvstore.trace.writing import write

SPEED_SIZES = ("0.5%", "1%", "2%", "5%", "10%", "15%", "20%", "25%", "30%", "50%", "75%", "100%")
SPEED_POLICIES = ("lru", "fifo", "sieve", "s3fifo", "arc", "lfu", "2q", "gdsf", "clock", OPTIMAL)
"""As many as the peer runs: LRU FIFO SIEVE S3FIFO ARC LFU TwoQ GDSF SLRU Belady."""
SIZES = ("1%", "5%", "10%", "25%", "50%", "100%")
CALIBRATION = {
    ("mooncake_conversation", "lru"): {"5%": 0.1958, "10%": 0.2789, "100%": 0.3664},
    ("weka_claude_code_48", "lru"): {"5%": 0.7198, "10%": 0.8867, "100%": 0.9605},
    ("mooncake_conversation", OPTIMAL): {"5%": 0.3664},
    ("weka_claude_code_48", OPTIMAL): {"5%": 0.8177},
}
"""Prefix hit ratios of a block-by-block simulation in C, leaf-first, whole trace from cold."""
LAST_HALF = {352: 0.045400, 1409: 0.048897, 2818: 0.064228, 11275: 0.233364, 45100: 0.374381}
"""Token hit ratios of kvcache-simulator 0.1.3 on mooncake_conversation, LRU, by blocks."""
LAST_HALF_OPTIMAL = {352: 0.118219, 1409: 0.229910, 2818: 0.302762, 11275: 0.398113}
FLAT = {
    "lru": "LRU", "fifo": "FIFO", "sieve": "Sieve", "lfu": "LFU", "clock": "Clock", "arc": "ARC",
    "s3fifo": "S3FIFO", "2q": "TwoQ", "gdsf": "GDSF",
}  # fmt: skip
"""Our policies and libCacheSim's classes of the same name."""
TRACES = (
    "mooncake_conversation",
    "mooncake_synthetic",
    "weka_claude_code_48",
    "lmcache_miniswe_bytes64",
    "lmcache_magagent_bytes64",
)

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
    """Write a trace's blocks where a peer can read them."""
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


def say(name: str, **facts: object) -> None:
    print(json.dumps({"check": name, **facts}), flush=True)


def sizes_of(trace: Trace, texts: tuple[str, ...]) -> list[Size]:
    return [size_of(text, trace.distinct_blocks) for text in texts]


# ---- accuracy ----------------------------------------------------------------------------------


def check_points(simulations: dict[str, Simulation]) -> None:
    for (name, policy), points in CALIBRATION.items():
        simulation = simulations[name]
        worst = 0.0
        for text, expected in points.items():
            size = size_of(text, simulation.trace.distinct_blocks)
            found = simulation.row(policy, size).ratios.prefix_hit_ratio
            worst = max(worst, abs(round(found, 4) - expected))
        say("calibration", trace=name, policy=policy, worst=worst)
    conversation = simulations["mooncake_conversation"]
    for policy, by_blocks in (("lru", LAST_HALF), (OPTIMAL, LAST_HALF_OPTIMAL)):
        worst = max(
            abs(
                conversation.row(policy, Size(blocks, 0), "last_half").ratios.prefix_token_hit_ratio
                - expected
            )
            for blocks, expected in by_blocks.items()
        )
        say("A3 last half", policy=policy, worst=worst)


def check_within(simulation: Simulation) -> None:
    """A7, A8, A9, and every policy under the bound, on every size of a trace."""
    trace = simulation.trace
    runs: dict[str, list[int]] = {name: [] for name in ("lru", OPTIMAL)}
    exceeded, curve_differs = 0, 0
    for size in sizes_of(trace, SPEED_SIZES):
        bound = int(simulation.hits(OPTIMAL, size.blocks).sum())
        runs[OPTIMAL].append(bound)
        for name in POLICIES:
            hits = simulate_policy(simulation.rows, make_policy(name), size.blocks)
            exceeded += sum(hits) > bound
            if name == "lru":
                runs["lru"].append(sum(hits))
                curve_differs += hits != simulation.curve.hits(size.blocks).tolist()
    say(
        "A7 A8 A9",
        trace=trace.name,
        above_optimal=exceeded,
        falls=sum(each != sorted(each) for each in runs.values()),
        curve_differs=curve_differs,
    )


def check_flat(python: Path, trace: Trace, texts: tuple[str, ...] = ("1%", "10%", "25%")) -> None:
    sizes = [size.blocks for size in sizes_of(trace, texts)]
    theirs = peer(python, trace, what="forward", policies=list(FLAT.values()), sizes=sizes)
    for name, other in FLAT.items():
        worst = 0.0
        for size in sizes:
            _, hits = simulate_flat(trace, make_policy(name), size)
            worst = max(worst, abs(sum(hits) / trace.references - theirs[f"{other} {size}"][1]))
        say("A5 A6 flat", trace=trace.name, policy=name, worst=worst)


def check_reverse(python: Path, simulation: Simulation) -> None:
    trace = simulation.trace
    sizes = [size.blocks for size in sizes_of(trace, SIZES[:-1])]
    names = {
        name: FLAT[name] for name in ("lru", "fifo", "lfu", "arc", "clock", "s3fifo", "gdsf", "2q")
    }
    theirs = peer(python, trace, what="reverse", policies=list(names.values()), sizes=sizes)
    for name, other in names.items():
        differences = [
            int(simulation.hits(name, size).sum()) / trace.references - theirs[f"{other} {size}"][0]
            for size in sizes
        ]
        worst = max(differences, key=abs)
        say("A1 A7b reverse", trace=trace.name, policy=name, worst=round(worst, 6))


# ---- speed -------------------------------------------------------------------------------------


def check_speed(folder: Path, python: Path | None, name: str) -> None:
    path = folder / f"{name}.jsonl.zst"
    trace = read(path)
    sizes = sizes_of(trace, SPEED_SIZES)

    def ours(policies: tuple[str, ...]) -> None:
        simulate(Simulation(read(path)), policies, sizes)

    def ours_parsed() -> None:
        simulation = Simulation(trace)
        for size in sizes:
            simulation.row("lru", size)

    facts: dict[str, Any] = {
        "ten_policies": round(cpu(lambda: ours(SPEED_POLICIES)), 3),
        "lru_parsed": round(cpu(ours_parsed), 3),
        "reading": round(cpu(lambda: read(path)), 3),
    }
    if python is not None:
        others = ["LRU", "FIFO", "Sieve", "S3FIFO", "ARC", "LFU", "TwoQ", "GDSF", "SLRU", "Belady"]
        blocks = [size.blocks for size in sizes]
        seconds = peer(python, trace, what="speed", policies=others, sizes=blocks)
        facts["peer_ten_policies"] = round(sum(seconds.values()), 3)
        facts["peer_lru"] = round(seconds["LRU"], 3)
        facts["ratio"] = round(facts["ten_policies"] / facts["peer_ten_policies"], 3)
        facts["lru_ratio"] = round(facts["lru_parsed"] / facts["peer_lru"], 3)
    say("P1 P2 P3", trace=name, **facts)


def check_rival(folder: Path, python: Path) -> None:
    """P5: three policies at eight budgets, wall time, the rival's compiler warm."""
    path = folder / "weka_claude_code_48.jsonl.zst"
    trace = read(path)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "trace.jsonl"
        write(trace, plain)
        command = [
            str(python.with_name("kvcache-simulator")), "run", "--trace", str(plain), "--model",
            "glm-5.2", "--budgets-gib", "4,8,16,32,64,96,128,192", "--policies", "fifo,lru,optimal",
            "--format", "json", "--no-progress",
        ]  # fmt: skip
        walls = []
        for _ in range(2):
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            walls.append(time.perf_counter() - start)
            if done.returncode:
                say("P5", fault=done.stderr[-500:])
                return
        start = time.perf_counter()
        simulation = Simulation(read(plain))
        sizes = sizes_of(trace, ("0.5%", "1%", "2%", "5%", "10%", "25%", "50%", "75%"))
        simulate(simulation, ("fifo", "lru", OPTIMAL), sizes, window="last_half")
        ours = time.perf_counter() - start
    say("P5", ours=round(ours, 2), peer=round(min(walls), 2), ratio=round(ours / min(walls), 3))


def check_large(folder: Path) -> None:
    start = time.process_time()
    trace = read(folder / "weka_claude_code_all.jsonl.zst")
    facts = info(trace)
    simulation = Simulation(trace)
    curve = simulation.curve
    ratio = int(curve.hits(trace.distinct_blocks // 20).sum()) / trace.references
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(
        "P4",
        references=facts["block_references"],
        seconds=round(time.process_time() - start, 1),
        peak_gib=round(peak, 2),
        lru_at_5_percent=round(ratio, 6),
        ceiling=facts["ceiling"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--peers", type=Path, help="a Python with libcachesim, kvcache-simulator")
    parser.add_argument(
        "--large", action="store_true", help="only the trace of 81 million references"
    )
    options = parser.parse_args()
    if options.large:
        check_large(options.traces)
        return
    simulations = {name: Simulation(read(options.traces / f"{name}.jsonl.zst")) for name in TRACES}
    check_points(simulations)
    for simulation in simulations.values():
        check_within(simulation)
    for name in ("mooncake_conversation", "weka_claude_code_48"):
        check_speed(options.traces, options.peers, name)
    if options.peers is not None:
        check_rival(options.traces, options.peers)
        for name in TRACES:
            if name != "weka_claude_code_48":  # five million references a policy and size
                check_flat(options.peers, simulations[name].trace)
                check_reverse(options.peers, simulations[name])


if __name__ == "__main__":
    main()
