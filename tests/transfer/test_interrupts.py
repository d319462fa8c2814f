"""Ctrl-C inside an opening or a closing: all of it or none, and closing again finishes it."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import opening, registry
from kvstore.tier.ssd.owner_lock import owner_pid
from kvstore.tier.ssd.tier import SsdTier
from kvstore.transfer.interrupts import uninterrupted
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tokens_of

TOKENS = tokens_of(4 * BLOCK + 1)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def press(go: threading.Event) -> threading.Thread:
    """Send Ctrl-C to the main thread once something has happened."""

    def send() -> None:
        go.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_work_that_has_begun_ends_and_is_undone_before_ctrl_c_is_raised() -> None:
    begun = threading.Event()
    undone: list[str] = []

    def work() -> str:
        begun.set()
        keyboard.join()
        time.sleep(0.05)
        return "made"

    keyboard = press(begun)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, undone.append)
    assert undone == ["made"]


def test_a_second_ctrl_c_leaves_and_the_work_goes_on() -> None:
    begun, again, go_on, done = (threading.Event() for _ in range(4))

    def work() -> None:
        begun.set()
        go_on.wait(60)
        done.set()

    first = press(begun)
    second = press(again)

    def repeat() -> None:
        first.join()
        time.sleep(0.1)  # the first one is taken by then, or both are one and the second is lost
        again.set()

    threading.Thread(target=repeat).start()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    second.join()
    assert not done.is_set()
    go_on.set()
    assert done.wait(60)


def test_errors_and_results_come_through_from_every_thread() -> None:
    def fail() -> None:
        raise LookupError("mine")

    found: list[Any] = []
    threading.Thread(target=lambda: found.append(uninterrupted(threading.get_ident))).start()
    with pytest.raises(LookupError, match="mine"):
        uninterrupted(fail)
    assert uninterrupted(lambda: 7) == 7
    assert uninterrupted(threading.get_ident) != threading.get_ident()
    while not found:
        time.sleep(0.001)


def test_a_close_that_is_interrupted_is_finished_by_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = threading.Event()

    class SlowlyClosed(SsdTier):
        def close(self) -> None:
            closing.set()
            keyboard.join()
            super().close()

    monkeypatch.setattr(opening, "tier_class", SlowlyClosed)
    cache = open_cache(tmp_path / "s")
    cache.store(TOKENS, entries_of(DENSE, TOKENS))
    keyboard = press(closing)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close()
    assert not registry.is_open_here(tmp_path / "s")
    with open_cache(tmp_path / "s", role="owner") as again:
        assert again.lookup(TOKENS).hit_tokens == 4 * BLOCK


def test_an_opening_that_nobody_got_is_closed_with_the_next_one(tmp_path: Path) -> None:
    before = descriptors()
    open_cache(tmp_path / "s")  # as if cut off before it had a name
    gc.collect()
    with open_cache(tmp_path / "s", role="owner") as cache:
        assert cache.role == "owner"
    assert not registry.is_open_here(tmp_path / "s")
    assert descriptors() == before


def test_a_scope_keeps_the_opening_of_its_cache(tmp_path: Path) -> None:
    scope = open_cache(tmp_path / "s").scope(open_cache(tmp_path / "s").namespace)
    gc.collect()
    with open_cache(tmp_path / "s") as other:
        other.store(TOKENS, entries_of(DENSE, TOKENS))
        other.flush()
    assert scope.lookup(TOKENS).hit_tokens == 4 * BLOCK
    registry.unshare(scope._share)
    assert not registry.is_open_here(tmp_path / "s")


def test_a_lock_is_free_again_wherever_a_writer_is_interrupted(tmp_path: Path) -> None:
    """The place that a condition has between its lock and its block."""
    with open_cache(tmp_path / "s") as cache:
        from tests.torture.interrupts import Interrupt, at_place

        for place in range(1, 400, 7):
            tokens = tokens_of(2 * BLOCK + 1, place)
            try:
                with at_place(place):
                    cache.store(tokens, entries_of(DENSE, tokens))
                    cache.flush()
            except (Interrupt, RuntimeError):
                pass
        cache.store(TOKENS, entries_of(DENSE, TOKENS))
        cache.flush()
        assert cache.lookup(TOKENS).hit_tokens == 4 * BLOCK
        assert not cache.stats()["tiers"]["ssd"]["is_read_only"]


def test_a_store_whose_last_share_is_dropped_is_closed(tmp_path: Path) -> None:
    """As where Ctrl-C comes on the way into ``__exit__``, or garbage keeps the cache for a while."""
    knot: list[Any] = [open_cache(tmp_path / "s")]
    knot.append(knot)
    knot[0].store(TOKENS, entries_of(DENSE, TOKENS))
    with open_cache(tmp_path / "s"):  # its closing is not the last
        pass
    assert registry.is_open_here(tmp_path / "s")
    del knot
    gc.collect()
    deadline = time.monotonic() + 60
    while owner_pid(tmp_path / "s") is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not registry.is_open_here(tmp_path / "s")
    with open_cache(tmp_path / "s", role="owner") as cache:
        assert cache.lookup(TOKENS).hit_tokens == 4 * BLOCK


def test_a_dead_share_that_an_interrupt_left_behind_holds_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s"):
        (opened,) = [
            o for o in registry._open_stores.values() if o.shared.ssd.path == tmp_path / "s"
        ]
        gone: Any = registry.Share(opened.shared)
        vars(opened.shares)["data"].add(weakref.ref(gone))  # as where its removal was cut off
        del gone
        assert len(opened.shares) == 2
    assert not registry.is_open_here(tmp_path / "s")
