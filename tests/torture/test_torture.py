"""A few cases of every kind, in one process; and tests that the harness has findings for broken stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import BLOCK, open_cache, tier_of, tokens_of
from tests.torture.kills import CAP
from tests.torture.kinds import KINDS
from tests.torture.prompts import LAYOUT, Promise, Prompt, check, keys_of, read_check, store
from tests.torture.runner import Case, Finding, Kind, run, table

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="watches files by LD_PRELOAD"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # by a process with threads
]


def torture(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["outcomes"], done.stderr


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """One process for all kinds: its start takes as long as most kinds."""
    _, found, _ = torture("--seed", "20")
    return {outcome["kind"]: outcome for outcome in found}


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_nothing_is_wrong_lost_or_crashed(kind: str, outcomes: dict[str, dict[str, Any]]) -> None:
    texts = outcomes[kind]["texts"]
    if kind == "flips-open":  # LMDB ends a process whose free list is damaged: docs/torture.md
        texts = [text for text in texts if "signal SIGABRT" not in text]
    assert not texts, "\n".join(texts)


def test_blocks_that_a_check_evicts_are_not_lost(tmp_path: Path) -> None:
    """The check stores one more prompt; in a full store that evicts blocks of the promise."""
    path, promise = tmp_path / "s", Promise()
    known: list[Prompt] = []
    blocks = 0
    with open_cache(path, LAYOUT, role="owner", ssd_bytes=CAP) as cache:
        tier, full = tier_of(cache), 0
        for seed in range(2_000):  # until the store is as full as it was before its first eviction
            prompt = tokens_of(BLOCK + 1, seed).astype(np.uint32)
            if full and tier.block_count == full:
                break
            store(cache, prompt)
            cache.flush()
            known.append(prompt)
            if cache.stats()["counters"]["evicted_blocks"].get("ssd") and not full:
                full = blocks
            blocks = tier.block_count
        promise.flushed(
            {str(n): read_check(cache, prompt, n)[0] for n, prompt in enumerate(known)},
            {str(n): keys_of(cache, prompt) for n, prompt in enumerate(known)},
        )
    before = sum(promise.kept.values())
    for _ in range(3):
        assert check(path, known, promise, ssd_bytes=CAP) == []
    assert 0 < sum(promise.kept.values()) < before, "no check evicted a block of the promise"


@pytest.mark.parametrize(
    ("kind", "sort"), [("images-without-sync", "lost"), ("flips-unchecked", "wrong")]
)
def test_a_store_without_its_promise_is_found_out(kind: str, sort: str) -> None:
    """The harness can fail: without syncs flushes are lost, without checks bytes are wrong."""
    status, (outcome,), _ = torture(kind, "--seed", "20")
    assert status == 1
    assert outcome["findings"][sort] > 0


def test_a_seed_makes_the_same_cases_again(tmp_path: Path) -> None:
    def work(case: Case) -> list[Finding]:
        return [Finding("other", str(case.rng().random()))]

    kind = Kind("seeded", "", work, 1, 1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    whole = run(kind, 4, 7, tmp_path / "a")
    third = run(kind, 1, 7, tmp_path / "b", first=2)
    other = run(kind, 1, 8, tmp_path / "c", first=2)
    assert third.texts == whole.texts[2:3] != other.texts
    assert "--seed 7 --first 2" in third.texts[0]


def test_a_case_that_dies_is_one_crash_and_the_others_go_on(tmp_path: Path) -> None:
    def work(case: Case) -> list[Finding]:
        if case.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [Finding("wrong", "here")] if case.number == 5 else []

    outcome = run(Kind("deadly", "", work, 1, 1), 8, 1, tmp_path)
    assert outcome.findings == {"wrong": 1, "lost": 0, "crash": 1, "other": 0}
    assert "SIGKILL" in outcome.texts[0]
    assert not outcome.is_good
    assert table([outcome]).splitlines()[2].split()[:6] == ["deadly", "8", "1", "0", "1", "0"]
