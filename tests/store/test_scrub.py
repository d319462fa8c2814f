"""The background scrub: it finds damaged blocks, keeps its rate, and continues after a restart."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockStore, ConfigError
from kvstore.blocks.keys import keys_root
from kvstore.frame.format import FrameFormat
from kvstore.store import scrub
from kvstore.store.scrub import PASS_SECONDS, RETRY_SECONDS, Scrubber, TokenBucket
from kvstore.tier.ssd.direct import DirectFile
from tests.store.test_writer_faults import flip, payload_place
from tests.stores import (
    BLOCK,
    DENSE,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tier_of,
    tokens_of,
    writer_of,
)

FRAME = FrameFormat(DENSE, BLOCK).frame_bytes


def fill(path: Path, prompts: int = 4, blocks: int = 6) -> None:
    with open_cache(path) as cache:
        for seed in range(prompts):
            tokens = tokens_of(blocks * BLOCK + 1, seed)
            cache.store(tokens, entries_of(DENSE, tokens))


class Clock:
    """Seconds that advance only in ``wait``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waits.append(seconds)
        return False


def scrubber(cache: Any, clock: Clock | None = None, rate: int = 1000, **options: Any) -> Scrubber:
    clock = clock or Clock()
    shared = inside(cache)
    return Scrubber(
        *(shared.context, writer_of(cache), shared.format),
        bytes_per_second=rate,
        keys_root=shared._keys_root,
        clock=clock,
        wait=clock.wait,
        **options,
    )


def one_pass(walk: Scrubber) -> list[float]:
    """Step until the pass ends; the last wait is the pause after it."""
    before, waits = walk.stats()["passes"], []
    while walk.stats()["passes"] == before:
        waits.append(walk.step())
    return waits


def test_every_block_is_checked_once_a_pass_in_the_order_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "s", prompts=30)
    with open_cache(tmp_path / "s") as cache:
        walk = scrubber(cache)
        seen: list[bytes] = []
        real = walk._check

        def check(key: bytes, record: Any) -> None:
            seen.append(key)
            real(key, record)  # type: ignore[arg-type]

        monkeypatch.setattr(walk, "_check", check)
        one_pass(walk)
        assert seen == [key for key, _ in tier_of(cache).records()] == sorted(seen)
        assert len(seen) == 180
        one_pass(walk)
        assert seen[180:] == seen[:180]
        counters = cache.stats()["counters"]
        assert counters["scrubbed_blocks"] == 360
        assert counters["corrupt_blocks"]["total"] == 0
        assert counters["hit_tokens"]["total"] == counters["lookups"] == 0
        walk.stop()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_bad_block_goes_with_what_hangs_on_it_counted_and_said_once(
    is_direct: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "s"
    fill(path)
    for seed, number in ((1, 2), (2, 4)):
        flip(path, payload_place(path, tokens_of(6 * BLOCK + 1, seed), number))
    if not is_direct:

        def refused(*_: Any) -> None:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(scrub, "DirectFile", refused)
    with open_cache(path) as cache:
        walk = scrubber(cache)
        if is_direct and walk._direct is None:
            pytest.skip("this file system has no direct reads")
        assert (walk._direct is not None) == is_direct
        one_pass(walk)
        stats = cache.stats()
        assert stats["counters"]["corrupt_blocks"] == {"checksum": 2, "total": 2}
        assert stats["tiers"]["ssd"]["blocks"] == 24 - 4 - 2 == writer_of(cache).index.blocks
        assert sum("the scrub removes it" in record.message for record in caplog.records) == 1
        for seed, blocks in ((0, 6), (1, 2), (2, 4), (3, 6)):
            tokens = tokens_of(6 * BLOCK + 1, seed)
            with cache.lookup(tokens) as match:
                found = cache.read(match)
                assert found.tokens == blocks * BLOCK
                assert_entries(DENSE, found, tokens, found.tokens)
        one_pass(walk)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 2
        walk.stop()


def test_the_disk_is_asked_and_not_the_kernels_memory_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        walk = scrubber(cache)
        if walk._direct is None:
            pytest.skip("this file system has no direct reads")
        ssd = tier_of(cache)

        def never(*_: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(ssd, "read", never)
        one_pass(walk)
        assert cache.stats()["counters"]["scrubbed_blocks"] == 24
        walk.stop()


def test_a_stale_hint_is_no_fault(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        ssd = tier_of(cache)
        keys = [key for key, _ in ssd.records()]
        wrong = ssd.record(keys[0])
        assert wrong is not None
        ssd.amend(keys[1:4], page=wrong.page)
        ssd.amend(keys[4:6], page=0)
        ssd.amend(keys[6:8], page=2**50)
        ssd.amend(keys[8:10], page=2**64 - 1)
        walk = scrubber(cache)
        one_pass(walk)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 24
        walk.stop()


def test_another_blocks_frame_a_wrong_record_and_a_lost_payload_are_found(tmp_path: Path) -> None:
    fill(tmp_path / "s", prompts=3)
    with open_cache(tmp_path / "s") as cache:
        ssd = tier_of(cache)
        a, b, c = (cache.probe(tokens_of(6 * BLOCK + 1, seed)).prefix for seed in range(3))
        frame = ssd.frame(b.key(5))
        assert frame is not None
        with ssd._env.begin(write=True) as txn:
            txn.put(a.key(5), frame, db=ssd._pay)
            txn.delete(c.key(5), db=ssd._pay)
        ssd.amend([a.key(5), c.key(5)], page=0)
        ssd.amend([b.key(5)], namespace_id=9)
        walk = scrubber(cache)
        one_pass(walk)
        found = cache.stats()["counters"]["corrupt_blocks"]
        assert found == {"header": 1, "identity": 1, "missing": 1, "total": 3}
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 15
        walk.stop()


def test_a_block_that_is_evicted_or_stored_again_meanwhile_is_not_bad(tmp_path: Path) -> None:
    fill(tmp_path / "s", prompts=1)
    with open_cache(tmp_path / "s") as cache:
        tokens = tokens_of(6 * BLOCK + 1, 0)
        walk = scrubber(cache)
        walk.step()  # the records of all are looked up by now
        cache.clear()
        other = entries_of(DENSE, tokens_of(6 * BLOCK + 1, 5))
        part = tokens[: 3 * BLOCK]
        cache.store(part, {name: array[:, : 3 * BLOCK] for name, array in other.items()})
        cache.flush()
        one_pass(walk)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK
        walk.stop()


def test_keyed_blocks_are_scrubbed_too(tmp_path: Path) -> None:
    removed: list[bytes] = []
    with BlockStore.open(
        tmp_path / "s", block_bytes=5000, ssd_bytes="4MiB", on_removed=removed.append
    ) as store:
        keys = [f"k{i}" for i in range(10)]
        store.put(keys, [bytes([i]) * 5000 for i in range(10)], [None, *keys[:-1]])
        store.flush()
        clock, shared = Clock(), inside(store)
        assert shared.writer is not None
        walk = Scrubber(
            *(shared.context, shared.writer, shared.format),
            bytes_per_second=1,
            keys_root=keys_root(None),
            clock=clock,
            wait=clock.wait,
        )
        one_pass(walk)
        assert store.stats()["counters"]["scrubbed_blocks"] == 10
        assert store.stats()["counters"]["corrupt_blocks"]["total"] == 0
        key = store._named([keys[7]])[0].key
        record = shared.ssd.record(key)
        assert record is not None
        flip(tmp_path / "s", record.page * 4096 + 16 + record.frame_bytes - 100)
        one_pass(walk)
        assert store.exists(keys) == 7
        assert len(removed) == 3
        assert store.stats()["counters"]["corrupt_blocks"] == {"checksum": 1, "total": 1}
        walk.stop()


# ---- rate ------------------------------------------------------------------------------------------


def test_the_rate_is_kept_on_the_clock_it_was_given(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        clock = Clock()
        walk = scrubber(cache, clock, rate=FRAME // 2)
        began = clock.now
        for _ in range(24):
            clock.wait(walk.step())
        assert clock.now - began == pytest.approx(24 * FRAME / (FRAME // 2))
        clock.wait(1000)  # what was idle is not made up for
        clock.waits.clear()
        for _ in range(3):
            walk.step()
            clock.wait(walk.step())
        assert sum(clock.waits) >= 3 * FRAME / (FRAME // 2)
        walk.stop()


@given(
    st.floats(1, 1e9),
    st.floats(0, 1e6),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 1e3)), max_size=30),
)
def test_a_bucket_never_lets_more_through_than_its_rate(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    now, taken, elapsed, last = 0.0, 0.0, 0.0, 0.0
    for amount, idle in steps:
        now += idle
        elapsed += max(0.0, idle)
        assert taken - last <= burst + elapsed * rate * (1 + 1e-9) + 1e-3
        delay = bucket.take(amount, now)
        taken, last = taken + amount, amount
        assert delay >= 0
        now += delay
        elapsed += delay


def test_a_pass_starts_an_hour_after_the_one_before_it_at_the_earliest(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        clock = Clock()
        walk = scrubber(cache, clock, rate=1 << 40)
        began = clock.now
        *_, rest = one_pass(walk)
        assert clock.now + rest == pytest.approx(began + PASS_SECONDS)
        clock.wait(rest)
        clock.wait(5 * PASS_SECONDS)  # a slow one needs no rest
        *_, rest = one_pass(walk)
        assert rest == 1.0
        cache.clear()
        assert walk.step() >= 1.0
        walk.stop()


# ---- life --------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_stopped_and_wraps_round(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        keys = [key for key, _ in tier_of(cache).records()]
        walk = scrubber(cache)
        for _ in range(10):
            walk.step()
        walk.stop()
    with open_cache(tmp_path / "s") as cache:
        walk = scrubber(cache)
        assert walk.stats()["position"] == keys[9].hex()
        assert 0 < walk.stats()["share"] < 1
        one_pass(walk)
        assert cache.stats()["counters"]["scrubbed_blocks"] == 14
        assert walk.stats()["position"] == ""
        one_pass(walk)
        assert cache.stats()["counters"]["scrubbed_blocks"] == 38
        walk.stop()
        tier_of(cache).set_fact("scrub", b"not a key")
        walk = scrubber(cache)
        assert walk.stats()["position"] == ""
        walk.stop()


def test_a_kill_costs_the_place_of_a_few_thousand_blocks_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "SAVED_BLOCKS", 5)
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        walk = scrubber(cache)
        places = []
        for _ in range(12):
            walk.step()
            places.append(tier_of(cache).fact("scrub"))
        keys = [key for key, _ in tier_of(cache).records()]
        assert places == [None] * 4 + [keys[4]] * 5 + [keys[9]] * 3
        walk.stop()


def test_the_owner_scrubs_in_the_background_and_close_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    flip(path, payload_place(path, tokens_of(6 * BLOCK + 1, 3), 3))
    with open_cache(path, scrub_bytes_per_second="1GiB") as cache:
        walk = inside(cache)._scrubber
        assert walk is not None
        assert cache.stats()["scrub"]["bytes_per_second"] == 1 << 30
        done = threading.Event()
        while not walk.stats()["passes"] and not done.wait(0.01):
            pass
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 21
        assert walk._thread.is_alive()  # it rests now, for most of an hour
    assert not walk._thread.is_alive()
    with open_cache(path) as cache:
        assert cache.stats()["scrub"] is None
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-scrub"]


def test_a_reader_does_not_scrub(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s", role="reader", scrub_bytes_per_second=1000) as cache:
        assert cache.stats()["scrub"] is None


@pytest.mark.parametrize("rate", [-1, "fast", True])
def test_a_rate_that_is_none_is_refused(rate: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scrub_bytes_per_second"):
        open_cache(tmp_path / "s", scrub_bytes_per_second=rate)


def test_a_medium_that_fails_lets_it_rest_and_a_bug_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        clock = Clock()
        walk = scrubber(cache, clock)
        errors: list[BaseException] = [
            lmdb.DiskError("bad"),
            OSError(5, "bad"),
            RuntimeError("bug"),
        ]

        def fails() -> float:
            raise errors.pop(0)

        walk.step = fails  # type: ignore[method-assign]
        walk._run()
        assert clock.waits == [RETRY_SECONDS] * 2
        levels = [r.levelno for r in caplog.records if "scrub" in r.message]
        assert levels == [logging.WARNING, logging.ERROR]
        walk.stop()


def test_a_child_forked_while_it_runs_opens_the_store_as_its_own(tmp_path: Path) -> None:
    code = """
import os, sys
from tests.stores import *
path = Path(sys.argv[1])
cache = open_cache(path, scrub_bytes_per_second="1GiB")
tokens = tokens_of(40 * BLOCK)
cache.store(tokens, entries_of(DENSE, tokens))
for _ in range(5):
    child = os.fork()
    if not child:
        with open_cache(path, role="reader") as mine:
            assert mine.stats()["scrub"] is None
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
cache.close()
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "s")], check=True, timeout=120
    )


def test_a_direct_read_never_gives_less_than_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 32)
    file = DirectFile(tmp_path / "f", 6000)
    found = file.read(0, 16, 5000)
    assert found is not None
    assert bytes(found) == (bytes(range(256)) * 32)[16:5016]
    assert file.read(1, 16, 5000) is None
    assert file.read(9, 16, 10) is None
    assert file.read(0, 16, 100_000) is None
    assert file.read(2**60, 16, 10) is None
    file.close()
