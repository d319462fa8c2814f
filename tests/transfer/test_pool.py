"""Parallel tasks: several threads work through the chunks of a range."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.transfer.pool import ParallelTask, ThreadPool

SOON = 30.0
"""Seconds that only a hang takes."""


@settings(max_examples=200)
@given(
    count=st.integers(0, 40),
    chunk=st.integers(1, 7),
    bad=st.sets(st.integers(0, 45), max_size=3),
    threads=st.integers(0, 3),
)
def test_a_task_ends_at_the_first_position_that_is_not_done(
    count: int, chunk: int, bad: set[int], threads: int
) -> None:
    done: Counter[int] = Counter()
    lock = threading.Lock()

    def work(first: int, stop: int) -> int:
        end = next((n for n in range(first, stop) if n in bad), stop)
        with lock:
            done.update(range(first, end))
        return end

    pool = ThreadPool("test", threads)
    task = ParallelTask(count, chunk, work)
    pool.begin(task)
    found = pool.finish(task)
    pool.close()
    assert found == min([n for n in bad if n < count], default=count)
    assert all(done[n] == 1 for n in range(found))
    assert max(done.values(), default=0) <= 1


def test_an_exception_of_a_chunk_is_raised_in_the_caller_and_the_threads_live() -> None:
    def fail(first: int, stop: int) -> int:
        if first:
            raise LookupError("chunk 1")
        return stop

    pool = ThreadPool("test", 2)
    for _ in range(5):
        task = ParallelTask(8, 1, fail)
        pool.begin(task)
        with pytest.raises(LookupError, match="chunk 1"):
            pool.finish(task)
    task = ParallelTask(8, 1, lambda _, stop: stop)
    pool.begin(task)
    assert pool.finish(task) == 8
    pool.close()


def test_a_caller_that_leaves_at_a_deadline_has_the_positions_done_without_a_gap() -> None:
    hung = threading.Event()
    third = threading.Event()

    def work(first: int, stop: int) -> int:
        if first == 2:
            third.set()
            hung.wait(SOON)
        return stop

    pool = ThreadPool("test", 2)
    task = ParallelTask(100, 1, work, deadline=time.monotonic() + 0.2)
    pool.begin(task)
    assert pool.finish(task, leaves=True) == 2
    assert third.is_set()
    assert not hung.is_set()
    hung.set()
    assert task.finish() == 2, "a chunk that ends later does not count any more"
    pool.close()


def test_no_chunk_begins_once_cancelled() -> None:
    begun: list[int] = []

    def work(first: int, stop: int) -> int:
        begun.append(first)
        return stop

    task = ParallelTask(10, 2, work, is_cancelled=lambda: len(begun) == 3)
    task.help()
    assert task.finish() == 6
    assert begun == [0, 2, 4]


def test_a_closed_pool_leaves_tasks_to_their_callers() -> None:
    pool = ThreadPool("test", 2)
    pool.close()
    task = ParallelTask(10, 3, lambda _, stop: stop)
    pool.begin(task)
    assert pool.finish(task) == 10
