"""Equality of a vLLM engine's answers with and without a store.

Question: does a store change more than the time?
Method:   fifty prompts of real text with common prefixes are answered greedily by an engine without a store,
          by one with an empty store that is killed midway, by the next one over the same store, and by a
          third one with hits only. Then a block is corrupted. Then blocks are forged with valid checksums.
Bound:    the same tokens from all, also with the corrupt block; other tokens with forged blocks, as proof
          that the comparison can fail; else exit 1.
Run:      python -m bench.engines.vllm_proof [--json] [--prompts 50] [--new-tokens 24]
          Needs vLLM and the demo's model (requirements-demo.txt), and a few minutes of two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvstore
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import head_sum
from kvstore.tier.ssd.values import Put

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PREFIXES, PREFIX_TOKENS, BATCH = 5, 512, 5
FOLDER = "rank-0-of-1"


@dataclass(frozen=True, slots=True)
class Job:
    """Job of one engine."""

    model: str
    store: str | None
    prompts: Sequence[Sequence[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a prompt, and the tokens of the prompt that were not computed."""

    tokens: tuple[int, ...]
    cached: int


def serve(job: Job, results: Path) -> None:
    """Answer every prompt, a few at a time, in its own process."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if job.store is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore.engine.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": job.store},
        )
    engine = LLM(
        model=job.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        **options,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=job.new_tokens, ignore_eos=True, detokenize=False
    )
    with results.open("a", encoding="utf-8") as file:
        for first in range(0, len(job.prompts), BATCH):
            batch = [{"prompt_token_ids": list(p)} for p in job.prompts[first : first + BATCH]]
            for made in engine.generate(batch, greedy, use_tqdm=False):
                answer = Answer(tuple(made.outputs[0].token_ids), int(made.num_cached_tokens or 0))
                file.write(json.dumps(asdict(answer)) + "\n")
            file.flush()
    engine.llm_engine.engine_core.shutdown()


def run(job: Job, folder: Path, name: str, *, kill_after: int | None = None) -> list[Answer]:
    """Run a job in a process group of its own; kill it once it has answered some prompts."""
    path, results = folder / f"{name}.job", folder / f"{name}.results"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    results.touch()
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.engines.vllm_proof", "--child", str(path), str(results)],
            cwd=ROOT,
            env={**SETTINGS, **os.environ},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        while child.poll() is None:
            time.sleep(0.02)
            lines = results.read_bytes().count(b"\n")
            if kill_after is not None and lines >= kill_after:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return []
    found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    if len(found) < len(job.prompts):
        tail = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"engine {name} answered {len(found)} of {len(job.prompts)} prompts:\n{tail}")
    answers = [Answer(tuple(line["tokens"]), line["cached"]) for line in found]
    print(f"{name}: {sum(a.cached for a in answers)} tokens cached", file=sys.stderr)
    return answers


def real_prompts(model: str, count: int) -> list[list[int]]:
    """Return prompts cut from this project's own documents; each tenth of them shares a prefix."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    texts = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    ids = [i for path in texts for i in tokenizer.encode(path.read_text(encoding="utf-8"))]
    prompts = []
    for number in range(count):
        group = number % PREFIXES
        start = group * PREFIX_TOKENS
        tail = PREFIXES * PREFIX_TOKENS + number * 97
        length = 1 + (number * 53) % 260  # 513 to 772 tokens, on a block's boundary now and then
        prompts.append(ids[start : start + PREFIX_TOKENS] + ids[tail : tail + length])
    return prompts


def change(store: Path, which: Callable[[int], bool], make: Callable[..., bytearray]) -> int:
    """Replace frames of blocks by number; return the number of replaced frames."""
    from kvstore.store.store_format import parse_format
    from kvstore.tier.ssd.version_file import read_format

    folder, count = store / FOLDER, 0
    found = parse_format(read_format(folder))
    frame_format = FrameFormat(found.layout, found.block_tokens)
    with kvstore.PrefixCache.open(
        folder,
        layout=found.layout,
        namespace=kvstore.Namespace(model="none"),
        block_tokens=found.block_tokens,
        role="owner",
    ) as cache:
        ssd = cache._shared.ssd  # noqa: SLF001 - a cache cannot damage blocks
        records = dict(ssd.records())
        keys = sorted(records)
        for place, key in enumerate(keys):
            mine, other = ssd.frame(key), ssd.frame(keys[place - 1])
            header = frame_format.header(memoryview(mine or b""))
            if mine is None or other is None or header is None or not which(header.number):
                continue
            frame = make(frame_format, mine, other)
            changed = dataclasses.replace(records[key], page=0, head_sum=head_sum(frame))
            ssd.put([Put(key, changed, frame)])
            count += 1
    return count


def damage(_format: FrameFormat, mine: bytes, _other: bytes) -> bytearray:
    """Return a frame with one bit of its payload flipped."""
    frame = bytearray(mine)
    frame[-100] ^= 1
    return frame


def forge(frame_format: FrameFormat, mine: bytes, other: bytes) -> bytearray:
    """Return a frame with another block's payload and valid checksums."""
    return frame_format.forge(mine, other)


def prove(model: str, count: int, new_tokens: int, folder: Path) -> dict[str, Any]:
    """Run all engines and return the results."""
    prompts = real_prompts(model, count)
    store = folder / "store"
    plain = Job(model, None, prompts, new_tokens)
    kept = Job(model, str(store), prompts, new_tokens)
    cold = run(plain, folder, "plain")
    run(kept, folder, "killed", kill_after=count * 2 // 5)
    after_kill = run(kept, folder, "after-kill")
    warm = run(kept, folder, "restarted")
    damaged_blocks = change(store, lambda number: number == 2, damage)
    damaged = run(kept, folder, "damaged")
    forged_blocks = change(store, lambda number: number >= 1, forge)
    forged = run(kept, folder, "forged")

    def equal(answers: Sequence[Answer]) -> int:
        return sum(a.tokens == b.tokens for a, b in zip(cold, answers, strict=True))

    def cached(answers: Sequence[Answer]) -> int:
        return sum(answer.cached for answer in answers)

    total = sum(len(prompt) for prompt in prompts)
    figures = {
        "prompts": count,
        "prompt_tokens": total,
        "new_tokens": new_tokens,
        "equal_after_kill": equal(after_kill),
        "equal_after_restart": equal(warm),
        "equal_with_damage": equal(damaged),
        "equal_with_forgery": equal(forged),
        "cached_without_store": cached(cold),
        "cached_after_kill": cached(after_kill),
        "cached_after_restart": cached(warm),
        "cached_with_damage": cached(damaged),
        "damaged_blocks": damaged_blocks,
        "forged_blocks": forged_blocks,
    }
    figures["holds"] = (
        figures["equal_after_kill"] == count
        and figures["equal_after_restart"] == count
        and figures["equal_with_damage"] == count
        and figures["equal_with_forgery"] < count
        and cached(warm) > cached(after_kill) >= cached(cold)
        and cached(damaged) < cached(warm)
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        job, results = chosen.child
        serve(Job(**json.loads(job.read_text(encoding="utf-8"))), results)
        return 0
    from kvstore.engine.smollm2 import prepare

    model = str(prepare(lambda text: print(text, file=sys.stderr)))
    with tempfile.TemporaryDirectory(prefix="kvstore-proof-") as folder:
        figures = prove(model, chosen.prompts, chosen.new_tokens, Path(folder))
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
