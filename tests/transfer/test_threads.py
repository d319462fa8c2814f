"""Errands: long lists of runs that several threads work through; the writer's commits."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.identity.block import BlockKey
from kvstore.transfer import threads as transfer
from kvstore.transfer.threads import Crew, Errand, QueuedBlock, Writer

SOON = 30.0
"""Seconds that only a hang takes."""


@settings(max_examples=200)
@given(
    count=st.integers(0, 40),
    run=st.integers(1, 7),
    bad=st.sets(st.integers(0, 45), max_size=3),
    threads=st.integers(0, 3),
)
def test_an_errand_ends_at_the_first_place_that_is_not_done(
    count: int, run: int, bad: set[int], threads: int
) -> None:
    done: Counter[int] = Counter()
    lock = threading.Lock()

    def work(first: int, stop: int) -> int:
        end = next((n for n in range(first, stop) if n in bad), stop)
        with lock:
            done.update(range(first, end))
        return end

    crew = Crew("test", threads)
    errand = Errand(count, run, work)
    crew.begin(errand)
    found = crew.finish(errand)
    crew.close()
    assert found == min([n for n in bad if n < count], default=count)
    assert all(done[n] == 1 for n in range(found))
    assert max(done.values(), default=0) <= 1


def test_what_a_run_raises_is_raised_to_who_waits_and_the_threads_live() -> None:
    def fail(first: int, stop: int) -> int:
        if first:
            raise LookupError("run 1")
        return stop

    crew = Crew("test", 2)
    for _ in range(5):
        errand = Errand(8, 1, fail)
        crew.begin(errand)
        with pytest.raises(LookupError, match="run 1"):
            crew.finish(errand)
    errand = Errand(8, 1, lambda _, stop: stop)
    crew.begin(errand)
    assert crew.finish(errand) == 8
    crew.close()


def test_who_leaves_at_a_deadline_has_what_was_done_without_a_gap() -> None:
    hung = threading.Event()
    third = threading.Event()

    def work(first: int, stop: int) -> int:
        if first == 2:
            third.set()
            hung.wait(SOON)
        return stop

    crew = Crew("test", 2)
    errand = Errand(100, 1, work, deadline=time.monotonic() + 0.2)
    crew.begin(errand)
    assert crew.finish(errand, leaves=True) == 2
    assert third.is_set()
    assert not hung.is_set()
    hung.set()
    assert errand.finish() == 2, "what ends later does not count any more"
    crew.close()


def test_nothing_is_begun_once_cancelled() -> None:
    begun: list[int] = []

    def work(first: int, stop: int) -> int:
        begun.append(first)
        return stop

    errand = Errand(10, 2, work, is_cancelled=lambda: len(begun) == 3)
    errand.help()
    assert errand.finish() == 6
    assert begun == [0, 2, 4]


def test_a_closed_crew_leaves_errands_to_their_callers() -> None:
    crew = Crew("test", 2)
    crew.close()
    errand = Errand(10, 3, lambda _, stop: stop)
    crew.begin(errand)
    assert crew.finish(errand) == 10


@pytest.mark.parametrize(("lingers", "expected"), [(100, [5]), (1, [4, 1])])
def test_a_commit_waits_for_the_next_block_but_not_for_ever(
    lingers: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(transfer, "LINGERS", lingers)
    commits: list[int] = []
    writer = Writer[None](
        lambda batch: commits.append(len(batch)), commit_blocks=64, queue_blocks=64
    )
    for number in range(5):  # the last comes 1.2 s after the first
        key = BlockKey(bytes([number]) * 16)
        assert writer.submit(QueuedBlock(key, BlockKey(b""), number, bytearray(1), None))
        time.sleep(0.3)
    writer.close()
    assert commits == expected
