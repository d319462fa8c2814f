"""Adapters of engines that are not there, and the pool that their trailing pages live in."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvstore.distribution import install_command
from kvstore.engine.trailing import TrailingPages
from tests.builders import Clock


@pytest.mark.parametrize("engine", ["sglang", "lmcache"])
def test_an_adapter_without_its_engine_names_the_extra(engine: str) -> None:
    code = f"""
import sys
sys.modules[{engine!r}] = None
try:
    import kvstore.engine.{engine}
except ImportError as error:
    assert {install_command(engine)!r} in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("engine", ["sglang", "lmcache"])
def test_an_absent_engine_is_a_skip_with_a_reason_unless_it_is_required(engine: str) -> None:
    module = (
        f"tests.engine.{engine}." + {"sglang": "test_hicache", "lmcache": "test_l2_adapter"}[engine]
    )
    code = f"""
import os, sys
import pytest
sys.modules[{engine!r}] = None
def outcome():
    sys.modules.pop({module!r}, None)
    try:
        import {module}
    except pytest.skip.Exception as skipped:
        return str(skipped)
    except ImportError:
        return "failure"
os.environ.pop("KVSTORE_REQUIRE_ENGINE", None)
assert "see tests/engine/{engine}/requirements.txt" in outcome()
os.environ["KVSTORE_REQUIRE_ENGINE"] = {engine!r}
assert outcome() == "failure"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def page(value: int, size: int = 100) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, value, np.uint8)


def test_trailing_pages_are_capped_by_bytes_and_the_oldest_use_goes_first() -> None:
    pool = TrailingPages(300, 60.0, Clock())
    for n in range(3):
        assert pool.put(("swa", b"%d" % n), page(n))
    target = page(9)
    assert pool.get(("swa", b"0"), target)
    assert (target == 0).all()
    assert pool.put(("swa", b"3"), page(3))
    assert [pool.has(("swa", b"%d" % n)) for n in range(4)] == [True, False, True, True]
    assert pool.put(("swa", b"3"), page(7, 200)), "the newest under a key counts"
    assert (len(pool), pool.live_bytes) == (2, 300)
    assert not pool.put(("swa", b"huge"), page(1, 301))
    assert not pool.get(("swa", b"3"), page(9)), "of another size"
    pool.clear()
    assert (len(pool), pool.live_bytes) == (0, 0)


def test_trailing_pages_expire_and_are_copies() -> None:
    clock = Clock()
    pool = TrailingPages(1000, 10.0, clock)
    source = page(1)
    pool.put(("swa", b"k"), source)
    source[:] = 2
    target = page(9)
    assert pool.get(("swa", b"k"), target)
    assert (target == 1).all()
    clock.now += 10
    assert not pool.has(("swa", b"k"))
    assert not pool.get(("swa", b"k"), target)
    assert (pool.live_bytes, pool.expired) == (0, 1)


def test_trailing_pages_from_many_threads() -> None:
    pool = TrailingPages(2000, 60.0, Clock())

    def work(seed: int) -> None:
        for n in range(2000):
            key = ("swa", b"%d" % ((seed * 7 + n) % 40))
            pool.put(key, page(int(key[1]), 100 + n % 2))
            target = page(255)
            if pool.get(key, target):
                assert (target == int(key[1])).all()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert pool.live_bytes == sum(p.data.nbytes for p in pool._pages.values()) <= 2000
