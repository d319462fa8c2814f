"""Restarts of a vLLM server over a store: lost blocks, answers, and opening time.

Question: does a restart lose a committed block or change an answer, and how long does opening take?
Method:   a server answers prompts over HTTP and receives SIGTERM during a request, as from systemd or
          Kubernetes. With vLLM's default, ``--shutdown-timeout 0``, it kills its engine at once, so the store
          is not closed. The next server starts on the same folder. Before each signal a reader lists the
          committed blocks. Opening is timed on a copy, unclosed and after a clean close.
Bound:    every listed block is stored afterwards, each answer is the same, and committed blocks are hits;
          else exit 1.
Run:      python -m bench.engines.vllm_restarts [--rounds 20] [--shutdown-timeout 0] [--fill 4GiB] [--model FOLDER] [--json]
          Needs vLLM and the demo's model (requirements-demo.txt) or another; half a minute per round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lmdb
import numpy as np

import kvstore
from kvstore.output.sizes import size_bytes
from kvstore.store.store_format import StoreFormat, parse_format
from kvstore.tier.ssd.version_file import read_format

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
FOLDER = "rank-0-of-1"
BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and of the store's."""
START_SECONDS = 600.0
"""Longest start of a server; on two busy cores it is two minutes."""
STOP_SECONDS = 120.0
PATIENCE_SECONDS = 3.0
"""Seconds after which the client of the last request disconnects: vLLM's HTTP server waits for it."""
FILL_RUN = 16
"""Blocks of one sequence of filling."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a prompt, and the tokens of the prompt that were not computed."""

    tokens: tuple[int, ...]
    cached: int


@dataclass(slots=True)
class Asked:
    """Prompts so far, and the first answer to each."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    """Leading tokens of each whose blocks were committed before the last signal."""


@dataclass(frozen=True, slots=True)
class Row:
    """One server, from its start to its end."""

    start_seconds: float
    """Until the server answers, including imports and the model."""
    exit_seconds: float
    """From SIGTERM to the end of the process, which the client of the last request may delay."""
    was_closed: bool
    """Whether the store was closed before the process ended."""
    equal: bool
    """Whether each prompt was answered as the first time."""
    missed_tokens: int
    """Tokens of committed blocks that were computed."""
    committed_blocks: int
    lost_blocks: int
    """Committed blocks that were missing after the signal."""
    opening_seconds: float
    """Of a copy of the store as the server left it."""
    clean_opening_seconds: float
    """Of that copy, once it was closed."""
    store_bytes: int


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(self, model: str, store: Path, ssd_bytes: str, log: Path, timeout: int) -> None:
        self._base = f"http://127.0.0.1:{(port := free_port())}"
        self._model = model
        self._log = log
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.engine.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"path": str(store), "ssd_bytes": ssd_bytes},
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--dtype", "float32", "--max-model-len", "2048", "--port", str(port)),
            *("--host", "127.0.0.1", "--shutdown-timeout", str(timeout)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**SETTINGS, **os.environ},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait_until_it_answers(self) -> None:
        """Return when the server is up. Raises ``RuntimeError`` with the end of its log if it ends."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._child.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self._base}/health", timeout=5):
                return
            time.sleep(0.2)
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        msg = f"the server did not start:\n{tail}"
        raise RuntimeError(msg)

    def ask(self, prompt: Sequence[int], count: int = 8, timeout: float = STOP_SECONDS) -> Answer:
        """Return the greedy continuation of a prompt."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._base}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            found = json.load(reply)
        details = found["usage"]["prompt_tokens_details"]
        return Answer(tuple(found["choices"][0]["token_ids"]), int(details["cached_tokens"] or 0))

    def terminate(self) -> float:
        """Send SIGTERM to the server alone, as a supervisor does; return how long it took to end."""
        begun = time.monotonic()
        self._child.terminate()
        self._child.wait(STOP_SECONDS)
        return time.monotonic() - begun

    def kill(self) -> None:
        """Kill the rest of its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


@contextmanager
def running(model: str, store: Path, ssd_bytes: str, log: Path, timeout: int) -> Iterator[Server]:
    """Run a server, and stop it at the end."""
    server = Server(model, store, ssd_bytes, log, timeout)
    try:
        yield server
    finally:
        server.kill()


def format_of(folder: Path) -> StoreFormat:
    """Return the contents of a store."""
    return parse_format(read_format(folder))


@contextmanager
def opened(
    folder: Path, role: Literal["owner", "reader"], ssd_bytes: str = "1TiB", tenant: str = ""
) -> Iterator[kvstore.PrefixCache]:
    """Open a store of any layout."""
    found = format_of(folder)
    with kvstore.PrefixCache.open(
        folder,
        layout=found.layout,
        namespace=kvstore.Namespace(model="restarts", tenant=tenant),
        block_tokens=found.block_tokens,
        ssd_bytes=ssd_bytes,
        device_bytes=0,
        role=role,
    ) as cache:
        yield cache


def committed(folder: Path) -> set[bytes]:
    """Return the keys of all blocks that a reader finds."""
    with opened(folder, "reader") as cache:
        return {bytes(key) for key, _ in cache._shared.ssd.records()}  # noqa: SLF001 - no cache lists its keys


def was_closed(folder: Path) -> bool:
    """Return whether a store's last owner closed it."""
    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=16) as env:
        facts = env.open_db(b"sys", create=False)
        with env.begin() as txn:
            return bool(txn.get(b"clean", db=facts) == b"1")


def fill(folder: Path, size: int) -> None:
    """Add blocks of random bytes of another tenant until the store holds ``size`` bytes."""
    rng = np.random.default_rng(0)
    with opened(folder, "owner", tenant="filling") as cache:
        tokens = FILL_RUN * cache.block_tokens
        shapes = {
            group.name: (len(group.layers), tokens // group.tokens_per_entry, group.entry_bytes)
            for group in cache.layout.global_groups
        }
        while cache.stats()["tiers"]["ssd"]["live_bytes"] < size:
            ids = rng.integers(0, 1 << 20, tokens)
            entries = {
                name: rng.integers(0, 256, shape, np.uint8) for name, shape in shapes.items()
            }
            cache.store(ids, entries, wait=60.0)
            cache.flush()


def timed_openings(folder: Path, scratch: Path) -> tuple[float, float]:
    """Return the opening times of a copy: unclosed, and after a clean close."""
    seconds = []
    shutil.copytree(folder, scratch)
    try:
        for _ in range(2):
            begun = time.perf_counter()
            with opened(scratch, "owner"):
                seconds.append(time.perf_counter() - begun)
    finally:
        shutil.rmtree(scratch)
    return seconds[0], seconds[1]


def hit_of(prompt: Sequence[int]) -> int:
    """Return the largest hit of a prompt; its last token is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def random_prompt(number: int) -> list[int]:
    """Return a unique prompt of 300 to 900 tokens."""
    rng = random.Random(number)
    return [rng.randrange(200) for _ in range(rng.randrange(300, 900))]


def wait_for(folder: Path, blocks: int) -> None:
    """Return when a store has that many blocks; a commit takes some tens of milliseconds."""
    until = time.monotonic() + STOP_SECONDS
    while len(committed(folder)) < blocks and time.monotonic() < until:
        time.sleep(0.05)


def restart(
    model: str, place: Path, asked: Asked, *, ssd_bytes: str = "1GiB", timeout: int = 0
) -> Row:
    """Run one server over the store in ``place``, with all earlier prompts and a new one."""
    folder = place / "store" / FOLDER
    begun = time.monotonic()
    with running(model, place / "store", ssd_bytes, place / "server.log", timeout) as server:
        server.wait_until_it_answers()
        started = time.monotonic() - begun
        again = [server.ask(prompt) for prompt in asked.prompts]
        new = random_prompt(len(asked.prompts))
        before = len(committed(folder))
        asked.answers.append(server.ask(new).tokens)
        asked.prompts.append(new)
        wait_for(folder, before + len(new) // BLOCK)
        # The signal arrives during this request, whose result is not used.
        last = threading.Thread(target=_ask_in_vain, args=(server, random_prompt(-1)))
        last.start()
        time.sleep(0.2)
        kept = committed(folder)
        stopped = server.terminate()
        last.join()
    missed = sum(
        max(0, most - answer.cached) for most, answer in zip(asked.committed, again, strict=True)
    )
    asked.committed.append(hit_of(new))
    closed = was_closed(folder)
    opening, clean = timed_openings(folder, place / "copy")
    return Row(
        start_seconds=started,
        exit_seconds=stopped,
        was_closed=closed,
        equal=[answer.tokens for answer in again] == asked.answers[:-1],
        missed_tokens=missed,
        committed_blocks=len(kept),
        lost_blocks=len(kept - committed(folder)),
        opening_seconds=opening,
        clean_opening_seconds=clean,
        store_bytes=(folder / "data.mdb").stat().st_size,
    )


def _ask_in_vain(server: Server, prompt: Sequence[int]) -> None:
    with suppress(OSError, ValueError, KeyError, urllib.error.URLError):
        server.ask(prompt, 1000, PATIENCE_SECONDS)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the results of all rounds."""
    return {
        "reopened": len(rows) - 1,
        "closed": sum(row.was_closed for row in rows),
        "equal": sum(row.equal for row in rows),
        "missed_tokens": sum(row.missed_tokens for row in rows),
        "committed_blocks": rows[-1].committed_blocks,
        "lost_blocks": sum(row.lost_blocks for row in rows),
        "store_bytes": rows[-1].store_bytes,
        "exit_seconds": statistics.median(row.exit_seconds for row in rows),
        "opening_seconds": statistics.median(row.opening_seconds for row in rows[1:] or rows),
        "clean_opening_seconds": statistics.median(
            row.clean_opening_seconds for row in rows[1:] or rows
        ),
        "holds": all(row.equal and not row.lost_blocks and not row.missed_tokens for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=20, help="number of restarts")
    parser.add_argument("--shutdown-timeout", type=int, default=0, help="vLLM's, in seconds")
    parser.add_argument("--fill", default="0", help="size of the store from the first restart on")
    parser.add_argument("--model", help="folder of a model; without it the demo's")
    chosen = parser.parse_args()
    model = chosen.model
    if model is None:
        from kvstore.engine.smollm2 import prepare

        model = str(prepare(lambda text: print(text, file=sys.stderr)))
    size = size_bytes(chosen.fill, "--fill")
    asked, rows = Asked(), []
    with tempfile.TemporaryDirectory(prefix="kvstore-restarts-") as name:
        for number in range(chosen.rounds + 1):
            row = restart(
                model,
                Path(name),
                asked,
                ssd_bytes=str(2 * size + (1 << 30)),
                timeout=chosen.shutdown_timeout,
            )
            rows.append(row)
            print(f"{number}: {asdict(row)}", file=sys.stderr)
            if not number and size:
                fill(Path(name) / "store" / FOLDER, size)
    figures = summary(rows)
    if chosen.json:
        print(json.dumps(figures | {"rows": [asdict(row) for row in rows]}, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
