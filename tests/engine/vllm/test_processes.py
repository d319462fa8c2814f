"""Engines whose workers are processes: executors, tensor parallelism, a kill during work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

from tests.engine.vllm.engine import BLOCK, ask, engine, prompt, save_model

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[3]
PROMPTS = [(n, n) for n in (129, 300, 513, 700)]
Answer = tuple[tuple[int, ...], int]


def start(model: str, store: Path, options: dict[str, Any], prompts: list[tuple[int, int]]) -> Any:
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.engine.vllm.serve", model, str(store)),
            *(json.dumps(options), json.dumps(prompts)),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def answers(child: Any, count: int) -> list[Answer]:
    found: list[Answer] = []
    for line in child.stdout:
        if line.startswith("[["):
            tokens, cached = json.loads(line)
            found.append((tuple(tokens), cached))
            if len(found) == count:
                break
    return found


def serve(model: str, store: Path, options: dict[str, Any]) -> list[Answer]:
    with start(model, store, options, PROMPTS) as child:
        try:
            return answers(child, len(PROMPTS))
        finally:
            child.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def cold(model: str) -> list[tuple[int, ...]]:
    with engine(model, enable_prefix_caching=False) as llm:
        return [tokens for tokens, _ in ask(llm, [prompt(*place) for place in PROMPTS])]


def hits() -> list[int]:
    return [(length - 1) // BLOCK * BLOCK for length, _ in PROMPTS]


def test_workers_in_processes_and_a_kill_while_they_save(
    model: str, cold: list[tuple[int, ...]], tmp_path: Path
) -> None:
    store, options = tmp_path / "s", {"distributed_executor_backend": "mp"}
    with start(model, store, options, PROMPTS * 500) as child:
        found = answers(child, len(PROMPTS) - 1)  # the last prompt is being run or saved
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(60)
    assert [tokens for tokens, _ in found] == cold[:-1]
    again = serve(model, store, options)
    assert [tokens for tokens, _ in again] == cold
    for (_, cached), most in zip(again, hits(), strict=True):
        assert cached % BLOCK == 0
        assert cached <= most
    assert again[0][1] == BLOCK, "what was stored before the kill is there"


def test_a_scheduler_finds_windows_under_the_secret_of_a_worker_elsewhere(tmp_path: Path) -> None:
    hybrid = save_model(tmp_path / "gemma3", "gemma3")
    options = {"enable_prefix_caching": False, "extra": {"secret": True}}
    with start(hybrid, tmp_path / "s", options, PROMPTS * 2) as child:
        found = answers(child, 2 * len(PROMPTS))
    tokens = [each for each, _ in found]
    assert tokens[: len(PROMPTS)] == tokens[len(PROMPTS) :]
    assert [cached for _, cached in found] == [0] * len(PROMPTS) + hits()


@pytest.mark.skipif(
    os.environ.get("KVSTORE_SLOW") != "1", reason="minutes on two cores; set KVSTORE_SLOW=1"
)
def test_tensor_parallel_ranks_have_a_store_each_and_a_hit_is_the_least(
    model: str, cold: list[tuple[int, ...]], tmp_path: Path
) -> None:
    store, options = tmp_path / "s", {"tensor_parallel_size": 2}
    assert serve(model, store, options) == [(tokens, 0) for tokens in cold]
    assert sorted(path.name for path in store.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert serve(model, store, options) == list(zip(cold, hits(), strict=True))
    # One rank forgets everything: then there is no hit, and no rank loads anything.
    for path in (store / "rank-1-of-2").iterdir():
        path.unlink()
    assert serve(model, store, options) == [(tokens, 0) for tokens in cold]
