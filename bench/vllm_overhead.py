"""What the connector costs vLLM: CPU seconds of the process per token, with it over without it.

Two engines run in processes of their own, one with a store and one without, and take turns: A B, B A, ... Each
turn is a batch of prompts that neither has seen. CPU seconds are those of all threads of a process, background
saves and their commit included. A pair's ratio is compared within the pair, so what else the machine does
between pairs does not count.

* ``none``: no prompt has anything in common with another: the store only saves.
* ``local``: nine tenths of each prompt are in vLLM's own prefix cache.

Run:    python -m bench.vllm_overhead [--json] [--pairs 12] [--model FOLDER]
Needs:  vLLM, and the demo's model unless another is named; some minutes, and nothing beside it.
Shows:  the median ratio of each case, and the interval that holds it with 95 % confidence (order statistics).
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
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT_TOKENS, NEW_TOKENS, BATCH = 1024, 64, 2
SHARED_TOKENS = PROMPT_TOKENS * 9 // 10


def batch(case: str, turn: int, vocab: int) -> list[list[int]]:
    """Return the prompts of a turn, the same for both engines: random ids below ``vocab``."""
    rng = np.random.default_rng([turn, case == "local"])
    count = SHARED_TOKENS if case == "local" else 0
    shared = np.random.default_rng(0).integers(0, vocab, count).tolist()
    return [shared + rng.integers(0, vocab, PROMPT_TOKENS - count).tolist() for _ in range(BATCH)]


def serve(model: str, store: str) -> None:
    """Answer turns from standard input until it ends. Runs in a process of its own."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    options: dict[str, Any] = {}
    if store:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore.engine.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": store, "ssd_bytes": "8GiB"},
        )
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        **options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        began, wall = time.process_time(), time.perf_counter()
        made = engine.generate(prompts, greedy, use_tqdm=False)
        if has_kv_transfer_group():
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
    """One of the two engines, in a process of its own."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def turn(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Run a batch and return what it cost."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(prompts) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            sys.exit("an engine ended early; what it said is on standard error")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def engine(model: str, store: str) -> Iterator[Engine]:
    """Start an engine; ``store`` is a folder, or empty for none."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.vllm_overhead", "--child", model, store],
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
    """Return the order statistics that hold the median with at least ``confidence``.

    For too few values that is all of them, and the confidence is less.
    """
    ordered, n = sorted(values), len(values)
    chance = [math.comb(n, k) / 2**n for k in range(n + 1)]
    low = 0
    while low + 1 < n / 2 and 1 - 2 * sum(chance[: low + 2]) >= confidence:
        low += 1
    return ordered[low], ordered[n - 1 - low]


def measure(model: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Return the ratios of every case."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    vocab = int(config["vocab_size"]) - 1
    found: dict[str, Any] = {
        "pairs": pairs,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    with engine(model, "") as plain, engine(model, str(folder / "store")) as kept:
        for case in ("none", "local"):
            for side in (plain, kept):
                side.turn(batch(case, 10_000, vocab))  # warms up, and fills the prefix cache
            ratios, plain_cost, kept_cost, cached = [], [], [], 0.0
            for turn in range(pairs):
                prompts = batch(case, turn, vocab)
                order = (plain, kept) if turn % 2 == 0 else (kept, plain)
                costs = {side: side.turn(prompts) for side in order}
                mine, theirs = costs[kept], costs[plain]
                plain_cost.append(theirs["cpu_seconds"] / theirs["tokens"])
                kept_cost.append(mine["cpu_seconds"] / mine["tokens"])
                ratios.append(kept_cost[-1] / plain_cost[-1])
                cached += theirs["cached"] / (BATCH * PROMPT_TOKENS)
            low, high = interval(ratios)
            found[case] = {
                "median_ratio": median(ratios),
                "low": low,
                "high": high,
                "ratios": ratios,
                "local_hit_share": cached / pairs,
                "plain_cpu_ms_per_token": 1000 * median(plain_cost),
                "kvstore_cpu_ms_per_token": 1000 * median(kept_cost),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--model", help="a folder with a model; default: the demo's")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        serve(*chosen.child)
        return 0
    from kvstore.engine.smollm2 import prepare

    model = chosen.model or str(prepare(lambda text: print(text, file=sys.stderr)))
    with tempfile.TemporaryDirectory(prefix="kvstore-overhead-") as folder:
        found = measure(model, chosen.pairs, Path(folder))
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for case in ("none", "local"):
            it = found[case]
            print(
                f"{case:6} {it['median_ratio']:.3f} [{it['low']:.3f}, {it['high']:.3f}]   "
                f"{it['plain_cpu_ms_per_token']:.3f} -> {it['kvstore_cpu_ms_per_token']:.3f} ms/token, "
                f"{it['local_hit_share']:.0%} cached locally"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
