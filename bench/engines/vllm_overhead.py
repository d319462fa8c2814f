"""CPU time that the connector adds to vLLM, per token.

Question: how many CPU seconds per token does an engine use with kvstore's connector, relative to none?
Method:   three engines in their own processes alternate in changing order: without a connector, with an idle
          one, with kvstore's. Each turn is a batch of new prompts. CPU seconds are those of all threads of a
          process, including background saves and commits. Ratios are within a turn, so load between turns
          does not count. ``none``: prompts have no common prefix, the store only saves. ``local``: nine
          tenths of each prompt are in vLLM's own prefix cache.
Bound:    the idle connector, which measures vLLM's own part of the difference.
Run:      python -m bench.engines.vllm_overhead [--json] [--turns 12] [--model FOLDER]
          Prints per case the median ratios of kvstore to none, of the idle connector to none and of
          kvstore to the idle connector, with 95 % intervals (order statistics). Needs vLLM and the demo's
          model or another; some minutes of an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
SIDES = ("none", "idle", "kvstore")
RATIOS = (("kvstore", "none"), ("idle", "none"), ("kvstore", "idle"))
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # waiting threads spin, and their CPU time counts
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT_TOKENS, NEW_TOKENS, BATCH = 1024, 64, 2
SHARED_TOKENS = PROMPT_TOKENS * 9 // 10


def batch(case: str, turn: int, vocab: int) -> list[list[int]]:
    """Return the prompts of a turn, the same for all engines: random ids below ``vocab``."""
    rng = np.random.default_rng([turn, case == "local"])
    count = SHARED_TOKENS if case == "local" else 0
    shared = np.random.default_rng(0).integers(0, vocab, count).tolist()
    return [shared + rng.integers(0, vocab, PROMPT_TOKENS - count).tolist() for _ in range(BATCH)]


def connector(side: str, store: str) -> dict[str, Any]:
    """Return vLLM's configuration of a connector."""
    from vllm.config import KVTransferConfig

    if side == "none":
        return {}
    if side == "idle":
        found = KVTransferConfig(
            kv_connector="IdleConnector",
            kv_connector_module_path="bench.engines.vllm_idle",
            kv_role="kv_both",
        )
    else:
        found = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore.engine.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": store, "ssd_bytes": "8GiB"},
        )
    return {"kv_transfer_config": found}


def serve(model: str, side: str, store: str) -> None:
    """Run turns from standard input until it ends, in its own process."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps vLLM's output out of the results
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        **connector(side, store),
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        began, wall = time.process_time(), time.perf_counter()
        made = engine.generate(prompts, greedy, use_tqdm=False)
        if side == "kvstore" and has_kv_transfer_group():
            get_kv_transfer_group().worker_side.flush()
        answer = {
            "cpu_seconds": time.process_time() - began,
            "wall_seconds": time.perf_counter() - wall,
            "tokens": sum(len(out.prompt_token_ids) + NEW_TOKENS for out in made),
            "cached": sum(out.num_cached_tokens or 0 for out in made),
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Engine:
    """One of the engines, in a process of its own."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def turn(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Run a batch and return its cost."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(prompts) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            sys.exit("an engine ended early; see its output on standard error")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def engine(model: str, side: str, store: Path) -> Iterator[Engine]:
    """Start the engine of one side; ``store`` is the folder that a store may use."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.engines.vllm_overhead", "--child", model, side, str(store)],
        cwd=ROOT,
        env={**SETTINGS, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Engine(child)
    finally:
        child.terminate()
        child.wait(60)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics that enclose the median with ``confidence``; all for too few values."""
    ordered, n = sorted(values), len(values)
    chance = [math.comb(n, k) / 2**n for k in range(n + 1)]
    low = 0
    while low + 1 < n / 2 and 1 - 2 * sum(chance[: low + 2]) >= confidence:
        low += 1
    return ordered[low], ordered[n - 1 - low]


def measure(model: str, turns: int, folder: Path) -> dict[str, Any]:
    """Return the ratios of every case."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    vocab = int(config["vocab_size"]) - 1
    found: dict[str, Any] = {
        "turns": turns,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    with ExitStack() as stack:
        engines = {
            side: stack.enter_context(engine(model, side, folder / "store")) for side in SIDES
        }
        for case in ("none", "local"):
            for side in SIDES:
                engines[side].turn(batch(case, 10_000, vocab))  # warms up, fills the prefix cache
            costs: dict[str, list[float]] = {side: [] for side in SIDES}
            cached = 0.0
            for turn in range(turns):
                prompts = batch(case, turn, vocab)
                first = turn % len(SIDES)
                for side in SIDES[first:] + SIDES[:first]:
                    answer = engines[side].turn(prompts)
                    costs[side].append(1000 * answer["cpu_seconds"] / answer["tokens"])
                    cached += answer["cached"] / (BATCH * PROMPT_TOKENS * len(SIDES))
            found[case] = {
                "local_hit_share": cached / turns,
                "cpu_ms_per_token": {side: median(costs[side]) for side in SIDES},
                "ratios": {
                    f"{over}/{under}": ratio(costs[over], costs[under]) for over, under in RATIOS
                },
            }
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the median of the turns' ratios, and the interval that holds it."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, high = interval(ratios)
    return {"median": median(ratios), "low": low, "high": high}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--model", help="a folder with a model; default: the demo's")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        serve(*chosen.child)
        return 0
    from kvstore.engine.smollm2 import prepare

    model = chosen.model or str(prepare(lambda text: print(text, file=sys.stderr)))
    with tempfile.TemporaryDirectory(prefix="kvstore-overhead-") as folder:
        found = measure(model, chosen.turns, Path(folder))
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for case in ("none", "local"):
            it = found[case]
            costs = ", ".join(f"{side} {it['cpu_ms_per_token'][side]:.3f}" for side in SIDES)
            print(f"{case}: {it['local_hit_share']:.0%} cached locally; CPU ms a token: {costs}")
            for name, one in it["ratios"].items():
                print(f"  {name:13} {one['median']:.3f} [{one['low']:.3f}, {one['high']:.3f}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
