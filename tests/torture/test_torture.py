"""A few cases of every kind, in one process; and tests that the harness has findings for broken stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torture.kinds import KINDS
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
