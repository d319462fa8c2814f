"""Benchmark of time to first token: stored parts, comparisons, and violations."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engines import ttft, ttft_engines
from bench.engines.ttft import (
    BLOCK_TOKENS,
    Case,
    cases,
    faults,
    job_maker,
    measure,
    pictures,
    prompts_of,
    python_of,
    run_job,
    runner,
    summarise,
    table,
)
from bench.engines.ttft_engines import First, Job
from tests.engine.tiny import VOCAB, save_tiny

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(20_000)]


def test_each_case_has_a_prompt_of_its_own_and_whole_blocks_stored() -> None:
    found = cases(TEXT, {300: 2, 1056: 1}, (0.0, 0.5, 0.97))
    assert [(len(c.prompt), c.share, c.cached) for c in found] == [
        *[(300, 0.0, 0)] * 2,
        *[(300, 0.5, 128)] * 2,
        *[(300, 0.97, 256)] * 2,
        (1056, 0.0, 0),
        (1056, 0.5, 512),
        (1056, 0.97, 1024),
    ]
    assert len({case.prompt[:BLOCK_TOKENS] for case in found}) == len(found)
    [whole] = cases(TEXT, {256: 1}, (1.0,))
    assert whole.cached == 128, "a token must be left to compute"
    with pytest.raises(SystemExit, match="the text has 300 tokens"):
        cases(TEXT[:300], {300: 2}, (0.5,))


def test_lengths_of_the_bench_leave_whole_blocks_at_97_per_cent() -> None:
    for length in (1056, 4224):
        assert int(length * 0.97) // BLOCK_TOKENS * BLOCK_TOKENS / length > 0.96


class Pretend:
    """Processes that take a second a token to compute, and keep whole blocks of what they ran."""

    def __init__(self, token: int = 7, lost: int = 0) -> None:
        self.kept: dict[str, set[tuple[int, ...]]] = {}
        self.jobs: list[Job] = []
        self.token, self.lost = token, lost

    def __call__(self, job: Job) -> list[First]:
        self.jobs.append(job)
        return [self.run(job, tuple(prompt)) for prompt in job.prompts]

    def run(self, job: Job, prompt: tuple[int, ...]) -> First:
        kept = self.kept.setdefault(job.store, set())
        hit = 0
        while hit + BLOCK_TOKENS < len(prompt) and prompt[: hit + BLOCK_TOKENS] in kept:
            hit += BLOCK_TOKENS
        hit = max(0, hit - self.lost)
        if job.connector != "none":
            ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
            kept |= {prompt[:end] for end in ends}
        token = self.token if hit else 7
        return First(seconds=float(len(prompt) - hit), token=token, hit_tokens=hit)


def rows_of(processes: Pretend, engine: str = "vllm") -> list[ttft.Row]:
    chosen = cases(TEXT, {1056: 2}, (0.0, 0.97))
    job = job_maker(Path("model"), "float32", Path("folder"), 1057)
    return measure(engine, chosen, job, processes)


def test_no_cache_then_storing_then_the_engine_restarted() -> None:
    processes = Pretend()
    rows = rows_of(processes)
    done = [(job.connector, len(job.prompts)) for job in processes.jobs]
    assert done == [("none", 4), ("kvstore", 2), ("kvstore", 4), ("example", 2), ("example", 4)]
    assert {len(prompt) for prompt in processes.jobs[1].prompts} == {1025}
    none, _, zero, most = rows[:4]
    assert (none.connector, none.seconds, none.speedup) == ("none", 1056.0, 1.0)
    assert (zero.connector, zero.share, zero.hit_tokens, zero.speedup) == ("kvstore", 0, (0, 0), 1)
    assert (most.hit_tokens, most.seconds, most.speedup) == ((1024, 1024), 32.0, 33.0)
    assert (most.same_tokens, most.runs) == (2, 2)
    assert not faults(rows, "float32")
    assert len(table(rows)) == 7
    assert "vllm, kvstore" in pictures(rows)[1056]


def test_a_shorter_hit_and_another_token_are_faults() -> None:
    [short] = faults(rows_of(Pretend(lost=128)), "float32")
    assert "hits of (896, 896), expected 1024 each" in short
    [other] = faults(rows_of(Pretend(token=8)), "float32")
    assert "0 of 2 first tokens as without a cache" in other
    assert not faults(rows_of(Pretend(token=8)), "bfloat16")


def test_a_peer_that_misses_is_no_fault() -> None:
    row = rows_of(Pretend())[-1]
    assert row.connector == "example"
    assert not faults([replace(row, hit_tokens=(0, 0), same_tokens=0)], "float32")


def test_medians_are_of_the_cases_of_one_length_and_share() -> None:
    chosen = [Case(0.5, 128, (i,) * 300) for i in range(3)]
    found = [First(seconds=s, token=1, hit_tokens=128) for s in (3.0, 1.0, 2.5)]
    cold = [First(seconds=s, token=t, hit_tokens=0) for s, t in ((9.0, 1), (5.0, 1), (1.0, 2))]
    [row] = summarise("e", "kvstore", chosen, found, cold)
    assert (row.seconds, row.seconds_min, row.seconds_max) == (2.5, 1.0, 3.0)
    assert (row.speedup, row.same_tokens) == (2.0, 2)


def test_the_real_adapter_restores_what_another_process_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last of the three processes is one here, to be quick."""
    save_tiny(tmp_path / "model")
    chosen = cases(TEXT, {300: 1}, (0.0, 0.97))
    job = job_maker(tmp_path / "model", "float32", tmp_path, 301)
    seen: list[tuple[int, int]] = []
    total = prompts_of("transformers", chosen)
    restarted = runner(Path(sys.executable), tmp_path, lambda *place: seen.append(place), total)
    monkeypatch.setattr(ttft_engines, "SETTLE_SECONDS", 0.0)
    here: list[Job] = []

    def run(job: Job) -> list[First]:
        if len(here) == 2:
            return restarted(job)
        here.append(job)
        results = tmp_path / f"{len(here)}.results"
        ttft_engines.work(job, results)
        return [First(**json.loads(line)) for line in results.read_text().splitlines()]

    rows = measure("transformers", chosen, job, run, is_cold_disk=True)
    assert [row.hit_tokens for row in rows] == [(0,), (0,), (0,), (256,)]
    assert not faults(rows, "float32")
    assert total == 5
    assert all(done <= total == of for done, of in seen)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    job = job_maker(tmp_path / "nothing", "float32", tmp_path, 9)("transformers", "none", [[1]])
    with pytest.raises(SystemExit, match="after 0 of 1 prompts:\n(.|\n)*nothing"):
        run_job(Path(sys.executable), job, tmp_path, lambda _count: None)


def test_a_missing_engine_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert python_of("transformers", None) == Path(sys.executable)
    with pytest.raises(SystemExit, match="--vllm-python"):
        python_of("vllm", tmp_path / "python")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="--vllm-python"):
        python_of("vllm", None)


def test_each_prompt_runs_once_after_a_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    class Recorder:
        def start(self, job: Job) -> None:
            ran.append("start")

        def first_token(self, prompt: Sequence[int]) -> First:
            ran.append(list(prompt))
            return First(seconds=0.5, token=len(prompt), hit_tokens=0)

        def stop(self) -> None:
            ran.append("stop")

    monkeypatch.setitem(ttft_engines.ENGINES, "vllm", Recorder)
    monkeypatch.setattr(ttft_engines, "SETTLE_SECONDS", 0.0)
    job = job_maker(Path("m"), "float32", tmp_path, 11)("vllm", "none", [[5, 6], [7]])
    ttft_engines.work(job, tmp_path / "results")
    assert (ran[0], len(ran[1]), ran[2:]) == ("start", 10, [[5, 6], [7], "stop"])
    lines = (tmp_path / "results").read_text().splitlines()
    assert [json.loads(line)["token"] for line in lines] == [2, 1]


@pytest.mark.parametrize(("lines", "status"), [(1, 3), (0, 0)])
def test_results_of_a_process_that_did_not_end_well_do_not_count(
    tmp_path: Path, lines: int, status: int
) -> None:
    line = json.dumps({"seconds": 1.0, "token": 1, "hit_tokens": 0})
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ {lines} = 0 ] || echo '{line}' >> \"${{3%.json}}.results\"\nexit {status}\n"
    )
    python.chmod(0o755)
    job = job_maker(tmp_path, "float32", tmp_path, 9)("vllm", "none", [[1]])
    with pytest.raises(SystemExit, match=f"exit status {status} after {lines} of 1 prompts"):
        run_job(python, job, tmp_path, lambda _count: None)
