"""The public contract of a cache, promise by promise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, LayoutMismatch, Namespace, PrefixCache, StoreError
from kvstore.cache.leases import LEASE_SECONDS
from tests.stores import (
    BLOCK,
    DENSE,
    NAMESPACE,
    WINDOWED,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tier_of,
    tokens_of,
    writer_of,
)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("layout", [DENSE, WINDOWED], ids=["dense", "windowed"])
@pytest.mark.parametrize("length", [*range(1, 3 * BLOCK + 2), 40 * BLOCK, 40 * BLOCK + 5])
def test_every_prompt_length_hits_all_whole_blocks_but_leaves_one_token(
    tmp_path: Path, layout: kvstore.Layout, length: int
) -> None:
    tokens = tokens_of(length)
    with open_cache(tmp_path / "s", layout) as cache:
        stored = cache.store(tokens, entries_of(layout, tokens))
        assert stored == kvstore.Stored(length // BLOCK * BLOCK, 0, 0)
        cache.flush()
        with cache.lookup(tokens) as match:
            assert match.hit_tokens == (length - 1) // BLOCK * BLOCK
            found = cache.read(match)
            assert found.tokens == match.hit_tokens
            assert_entries(layout, found, tokens, match.hit_tokens)
        longer = np.append(tokens, np.uint32(7))
        with cache.lookup(longer) as match:
            assert match.hit_tokens == length // BLOCK * BLOCK


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    tokens = tokens_of(100 * BLOCK + 3)
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        cache.store(tokens, entries_of(WINDOWED, tokens))
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        with cache.lookup(tokens) as match:
            assert match.hit_tokens == 100 * BLOCK
            assert match.residency == {"ssd": 100 * BLOCK}
            assert_entries(WINDOWED, cache.read(match), tokens, 100 * BLOCK)
        assert cache.stats()["index"]["segments"] == 1


def test_a_prompt_that_differs_in_its_last_five_tokens_shares_what_lies_before(
    tmp_path: Path,
) -> None:
    tokens = tokens_of(6 * BLOCK + 5)
    other = tokens.copy()
    other[-5:] += 1
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert cache.lookup(other).hit_tokens == 6 * BLOCK
        other[4 * BLOCK] += 1
        assert cache.lookup(other).hit_tokens == 4 * BLOCK
        other[0] += 1
        assert cache.lookup(other).hit_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "w2"},
        {"tokenizer": "t2"},
        {"adapter": "lora"},
        {"adapter": ""},
        {"tenant": "b"},
        {"generation": 1},
    ],
    ids=str,
)
def test_another_namespace_never_hits(tmp_path: Path, change: dict[str, Any]) -> None:
    tokens = tokens_of(4 * BLOCK)
    fields = {"model": "test", **change}
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        other = cache.scope(Namespace(**fields))
        assert other.lookup(tokens).hit_tokens == 0
        assert cache.scope(NAMESPACE).lookup(tokens).hit_tokens == 3 * BLOCK
        other.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert other.lookup(tokens).hit_tokens == 3 * BLOCK
        assert [n["blocks"] for n in cache.stats()["namespaces"]] == [4, 4]


def test_another_image_under_the_same_placeholder_tokens_never_hits(tmp_path: Path) -> None:
    tokens = np.full(4 * BLOCK, 5, np.uint32)
    cat = [kvstore.ImageSpan(BLOCK + 2, 3 * BLOCK, b"cat")]
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens), images=cat)
        cache.flush()
        assert cache.lookup(tokens, images=cat).hit_tokens == 3 * BLOCK
        dog = [kvstore.ImageSpan(BLOCK + 2, 3 * BLOCK, b"dog")]
        assert cache.lookup(tokens, images=dog).hit_tokens == BLOCK
        moved = [kvstore.ImageSpan(BLOCK + 3, 3 * BLOCK, b"cat")]
        assert cache.lookup(tokens, images=moved).hit_tokens == BLOCK
        with pytest.raises(ValueError, match=r"\[8, 99\) ends beyond 32 tokens"):
            cache.lookup(tokens, images=[kvstore.ImageSpan(8, 99, b"cat")])


def test_the_first_writer_wins_and_the_second_is_counted(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    first = entries_of(DENSE, tokens)
    second = {name: array ^ 1 for name, array in first.items()}
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, first)
        assert cache.store(tokens, second) == kvstore.Stored(3 * BLOCK, 3, 0)
        cache.flush()
        assert cache.store(tokens, second) == kvstore.Stored(3 * BLOCK, 3, 0)
        longer = np.append(tokens, np.uint32(1))
        with cache.lookup(longer) as match:
            assert_entries(DENSE, cache.read(match), tokens, 3 * BLOCK)


def test_a_store_may_continue_where_another_stopped(tmp_path: Path) -> None:
    tokens = tokens_of(9 * BLOCK + 1)
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        for start, stop in [(0, 2), (2, 3), (3, 9)]:
            part = tokens[: stop * BLOCK]
            begin = start * BLOCK
            assert cache.store(part, entries_of(WINDOWED, part, begin), begin).dropped == 0
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(WINDOWED, cache.read(match), tokens, 9 * BLOCK)


def test_a_store_without_its_parent_is_dropped_whole(tmp_path: Path) -> None:
    tokens = tokens_of(5 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        head = tokens[:BLOCK]
        cache.store(head, entries_of(DENSE, head))
        stored = cache.store(tokens, entries_of(DENSE, tokens, 3 * BLOCK), 3 * BLOCK)
        assert stored == kvstore.Stored(BLOCK, 0, 2)
        cache.flush()
        assert cache.lookup(tokens).hit_tokens == BLOCK
        assert cache.stats()["counters"]["dropped_blocks"]["no_parent"] == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda e: e.pop("v"),
            r"group 'v' is missing, expected exactly \['k', 'v'\], found \['k'\]",
        ),
        (lambda e: e.update(w=e["k"]), r"group 'w' is unknown"),
        (
            lambda e: e.update(k=e["k"].view(np.uint16)),
            r"group 'k': expected dtype uint8 .*found uint16",
        ),
        (lambda e: e.update(k=e["k"].astype(np.float32)), r"expected dtype uint8 .*found float32"),
        (
            lambda e: e.update(k=e["k"][:, :-1]),
            r"group 'k' for tokens \[0, 16\): expected shape \[3, 16, 128\].*found \[3, 15, 128\]",
        ),
        (lambda e: e.update(k=e["k"][:2]), r"found \[2, 16, 128\]"),
        (lambda e: e.update(k=e["k"].tolist()), r"group 'k': expected dtype uint8.*found list"),
    ],
)
def test_bad_entries_are_refused_by_group_and_lose_nothing(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    tokens = tokens_of(2 * BLOCK)
    entries = entries_of(DENSE, tokens)
    spoil(entries)
    with open_cache(tmp_path / "s") as cache:
        with pytest.raises(ValueError, match=message):
            cache.store(tokens, entries)
        cache.flush()
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 0
        assert cache.store(tokens, entries_of(DENSE, tokens)).dropped == 0


def test_torch_entries_are_taken_as_they_are(tmp_path: Path) -> None:
    import torch

    tokens = tokens_of(3 * BLOCK + 1)
    entries = {n: torch.from_numpy(a) for n, a in entries_of(DENSE, tokens).items()}
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 3 * BLOCK)
        with pytest.raises(ValueError, match=r"expected dtype uint8 .*found torch\.bfloat16"):
            cache.store(tokens, {n: t.to(torch.bfloat16) for n, t in entries.items()})


def test_start_must_be_a_block_boundary(tmp_path: Path) -> None:
    tokens = tokens_of(2 * BLOCK)
    with (
        open_cache(tmp_path / "s") as cache,
        pytest.raises(ValueError, match=r"multiple of 8.*found 3"),
    ):
        cache.store(tokens, entries_of(DENSE, tokens, 3), 3)


def test_a_second_open_in_one_process_shares_the_first(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as first:
        with open_cache(tmp_path / "s") as second:
            assert second.role == "owner"
            second.store(tokens, entries_of(DENSE, tokens))
        first.flush()
        assert first.lookup(tokens).hit_tokens == 2 * BLOCK
        assert first.stats()["counters"]["shared_opens"] == 1
        with pytest.raises(LayoutMismatch):
            open_cache(tmp_path / "s", WINDOWED)
    with pytest.raises(StoreError, match="is closed"):
        first.lookup(tokens)


_OTHER_PROCESS = """
import sys, json, logging
import numpy as np
from tests.stores import *
import kvstore
logging.basicConfig(stream=sys.stderr, format="%(message)s")
role = sys.argv[2]
tokens = tokens_of(int(sys.argv[3]))
try:
    with open_cache(sys.argv[1], role=role) as cache:
        with cache.lookup(tokens) as match:
            found = cache.read(match)
            assert_entries(DENSE, found, tokens, found.tokens)
        fresh = tokens_of(2 * BLOCK, seed=99)
        stored = cache.store(fresh, entries_of(DENSE, fresh))
        print(json.dumps([cache.role, match.hit_tokens, stored.dropped,
                          cache.stats()["counters"]["dropped_blocks"]]))
except kvstore.StoreBusy as error:
    print(json.dumps(["busy", str(error)]))
"""


def run_elsewhere(path: Path, role: str, count: int, **environment: str) -> Any:
    import json

    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(path), role, str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        timeout=60,
    )
    is_told = "owned by another process: this one reads it and stores nothing" in done.stderr
    assert is_told == (role == "auto" and "reader" in done.stdout)
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_a_process_with_another_hash_seed_hits(tmp_path: Path, seed: str) -> None:
    tokens = tokens_of(5 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
    found = run_elsewhere(tmp_path / "s", "auto", 5 * BLOCK, PYTHONHASHSEED=seed)
    assert found == ["owner", 4 * BLOCK, 0, {"total": 0}]


def test_a_reader_reads_what_the_owner_committed_and_its_store_is_a_counted_no_op(
    tmp_path: Path,
) -> None:
    tokens = tokens_of(5 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        for role in ("auto", "reader"):
            found = run_elsewhere(tmp_path / "s", role, 5 * BLOCK)
            assert found == ["reader", 4 * BLOCK, 2, {"reader": 2, "total": 2}]
        busy = run_elsewhere(tmp_path / "s", "owner", 5 * BLOCK)
        assert busy[0] == "busy"
        assert f"owned by process {os.getpid()}" in busy[1]
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 5


def test_a_block_that_goes_between_lookup_and_read_shortens_the_hit(tmp_path: Path) -> None:
    tokens = tokens_of(6 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            tier_of(cache).delete([match.prefix.key(n) for n in (4, 3)])
            found = cache.read(match)
            assert found.tokens == match.hit_tokens == match.replay_start == 3 * BLOCK
            assert_entries(DENSE, found, tokens, 3 * BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"] == {"missing": 1, "total": 1}
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 5 * BLOCK)


def test_a_reader_survives_an_eviction_between_lookup_and_read(tmp_path: Path) -> None:
    script = """
import sys
from tests.stores import *
tokens = tokens_of(6 * BLOCK)
with open_cache(sys.argv[1], role="reader") as cache:
    with cache.lookup(tokens) as match:
        print(match.hit_tokens, flush=True)
        sys.stdin.readline()
        found = cache.read(match)
        assert_entries(DENSE, found, tokens, found.tokens)
        print(found.tokens, match.hit_tokens, flush=True)
"""
    tokens = tokens_of(6 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        keys = [cache.lookup(tokens).prefix.key(n) for n in (5, 4, 3, 2)]
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "s")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdin is not None
            assert reader.stdout.readline().split() == [str(5 * BLOCK)]
            tier_of(cache).delete(keys)
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline().split() == [str(2 * BLOCK)] * 2
        assert reader.returncode == 0


def test_probe_leaves_no_trace(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        before = cache.stats()
        assert cache.probe(tokens).hit_tokens == 2 * BLOCK
        assert cache.stats() == before
        assert not any(segment.pins for segment in writer_of(cache).index)


def test_a_lookup_that_never_loads_leaves_nothing_pinned_after_its_lease(tmp_path: Path) -> None:
    clock = Clock()
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s", clock=clock) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        index = writer_of(cache).index
        for _ in range(5):
            cache.lookup(tokens)
        assert sum(segment.pins for segment in index) == 5
        clock.now += LEASE_SECONDS
        match = cache.lookup(tokens)
        assert sum(segment.pins for segment in index) == 1
        clock.now += LEASE_SECONDS
        cache.lookup(tokens_of(BLOCK, seed=9))
        assert sum(segment.pins for segment in index) == 0
        with match:  # an expired lease is taken anew
            assert match.hit_tokens == 2 * BLOCK
            assert sum(segment.pins for segment in index) == 1
            clock.now += 100 * LEASE_SECONDS
            cache.lookup(tokens_of(BLOCK, seed=9))
            assert sum(segment.pins for segment in index) == 1
        assert sum(segment.pins for segment in index) == 0
        assert cache.stats()["counters"]["expired_leases"] == 6


def test_a_request_id_gets_the_same_match_until_it_is_released(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        first = cache.lookup(tokens, request_id="r1")
        assert cache.lookup(tokens, request_id="r1") is first
        assert cache.stats()["counters"]["lookups"] == 1
        cache.release("r1")
        assert cache.lookup(tokens, request_id="r1") is not first
        cache.release("unknown")


def test_what_a_match_holds_is_not_evicted(tmp_path: Path) -> None:
    size = 1 << 20
    kept, count = tokens_of(20 * BLOCK, seed=1), 20 * BLOCK
    with open_cache(tmp_path / "s", ssd_bytes=size) as cache:
        cache.store(kept, entries_of(DENSE, kept))
        cache.flush()
        with cache.lookup(np.append(kept, np.uint32(1))) as match:
            for seed in range(10, 40):
                other = tokens_of(count, seed)
                cache.store(other, entries_of(DENSE, other))
            cache.flush()
            assert cache.stats()["counters"]["evicted_blocks"]["ssd"] > 300
            found = cache.read(match)
            assert found.tokens == count
            assert_entries(DENSE, found, kept, count)
        for seed in range(40, 60):
            other = tokens_of(count, seed)
            cache.store(other, entries_of(DENSE, other))
        cache.flush()
        assert cache.lookup(kept).hit_tokens == 0
        assert cache.stats()["tiers"]["ssd"]["file_bytes"] <= size


def test_a_prompt_longer_than_the_tier_keeps_its_head(tmp_path: Path) -> None:
    tokens = tokens_of(1000 * BLOCK)
    with open_cache(tmp_path / "s", ssd_bytes="1MiB", request_share=1) as cache:
        cache.store(tokens, entries_of(DENSE, tokens), wait=30.0)
        cache.flush()
        counters = cache.stats()["counters"]
        hit = cache.lookup(tokens).hit_tokens
        assert 50 * BLOCK < hit < 1000 * BLOCK
        assert counters["evicted_blocks"].get("ssd", 0) == 0
        assert counters["dropped_blocks"]["total"] == 1000 - hit // BLOCK
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, hit)


def test_a_full_queue_drops_and_counts_instead_of_blocking(tmp_path: Path) -> None:
    tokens = tokens_of(2000 * BLOCK)
    with open_cache(tmp_path / "s", ssd_bytes="24MiB", request_share=1) as cache:
        gate = threading.Event()
        tier_of(cache).hooks["put"] = lambda *_: gate.wait(30)
        stored = cache.store(tokens, entries_of(DENSE, tokens), wait=0)
        assert stored.dropped > 0
        assert stored.end // BLOCK + stored.dropped == 2000
        gate.set()
        cache.flush()
        assert cache.stats()["counters"]["dropped_blocks"]["queue_full"] == stored.dropped
        assert cache.lookup(tokens).hit_tokens == stored.end
        again = cache.store(tokens, entries_of(DENSE, tokens), wait=30)
        assert again == kvstore.Stored(2000 * BLOCK, stored.end // BLOCK, 0)


def test_many_threads_storing_and_reading_the_same_prefixes_agree(tmp_path: Path) -> None:
    base = tokens_of(30 * BLOCK)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(25):
                tokens = base[: int(rng.integers(1, len(base)))].copy()
                if rng.random() < 0.5:
                    tokens[rng.integers(0, len(tokens))] = rng.integers(0, 3)
                with cache.lookup(tokens) as match:
                    found = cache.read(match)
                    assert_entries(DENSE, found, tokens, found.tokens)
                    start = found.tokens
                cache.store(tokens, entries_of(DENSE, tokens, start), start)
        except BaseException as error:
            failures.append(error)

    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        cache.flush()
        index = writer_of(cache).index
        assert index.blocks == tier_of(cache).block_count
        assert writer_of(cache).pending == {}
        assert not any(segment.pins for segment in index)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0


def test_a_normal_exit_keeps_what_was_accepted_even_if_nobody_closed(tmp_path: Path) -> None:
    code = """
import sys
from tests.stores import *
tokens = tokens_of(40 * BLOCK)
cache = open_cache(Path(sys.argv[1]))
assert cache.store(tokens, entries_of(DENSE, tokens), wait=10).dropped == 0
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True, timeout=60)
    with open_cache(tmp_path / "s") as cache:
        assert cache.lookup(tokens_of(40 * BLOCK)).hit_tokens == 39 * BLOCK


def test_a_lower_cap_evicts_and_the_file_shrinks(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="8MiB") as cache:
        for seed in range(25):
            tokens = tokens_of(20 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
        cache.flush()
        assert cache.stats()["alarms"] == []
    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        tokens = tokens_of(20 * BLOCK, 99)
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        stats = cache.stats()
        assert stats["tiers"]["ssd"]["live_bytes"] <= 1 << 20
        assert stats["alarms"] == []
        assert cache.probe(np.append(tokens, np.uint32(1))).hit_tokens == 20 * BLOCK
    assert (tmp_path / "s" / "data.mdb").stat().st_size <= 1 << 20


def test_bump_generation_makes_old_blocks_a_miss_also_after_a_restart(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert cache.bump_generation() == 1
        assert cache.lookup(tokens).hit_tokens == 0
        cache.store(tokens, entries_of(DENSE, tokens))
    with open_cache(tmp_path / "s") as cache:
        assert cache.namespace.generation == 1
        assert cache.lookup(tokens).hit_tokens == 2 * BLOCK
        assert cache.scope(Namespace(model="test", generation=1)).lookup(tokens).hit_tokens == 16
        assert cache.scope(Namespace(model="test", generation=2)).lookup(tokens).hit_tokens == 0


def test_clear_removes_one_namespace_only(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        other = cache.scope(Namespace(model="test", tenant="b"))
        for scope in (cache, other):
            scope.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert cache.clear(other) == 3
        assert other.lookup(tokens).hit_tokens == 0
        assert cache.lookup(tokens).hit_tokens == 2 * BLOCK
        assert cache.clear() == 3
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 0


def test_ttl_expires_and_storing_again_renews(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        wall = Clock()
        inside(cache).context.wall_clock = wall
        cache.store(tokens, entries_of(DENSE, tokens), ttl=60)
        cache.flush()
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK
        wall.now += 61
        assert cache.lookup(tokens).hit_tokens == 0
        assert cache.store(tokens, entries_of(DENSE, tokens), ttl=60).present == 3
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK
        wall.now += 61
        assert cache.store(tokens, entries_of(DENSE, tokens)).present == 3
        wall.now += 1e9
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK
        with pytest.raises(ValueError, match="ttl must be positive"):
            cache.store(tokens, entries_of(DENSE, tokens), ttl=0)


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_parent_lives_as_long_as_what_hangs_on_it(tmp_path: Path, is_flushed: bool) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    head = tokens[: 2 * BLOCK]
    with open_cache(tmp_path / "s") as cache:
        cache.store(head, entries_of(DENSE, head), ttl=60)
        if is_flushed:
            cache.flush()
        cache.store(tokens, entries_of(DENSE, tokens, 2 * BLOCK), 2 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        inside(cache).context.wall_clock = lambda: time.time() + 1e6
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_unpinning_a_shorter_prefix_leaves_the_longer_one_pinned(tmp_path: Path) -> None:
    tokens = tokens_of(6 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens), pin=True)
        cache.flush()
        cache.unpin(tokens[: 3 * BLOCK])
        assert len(writer_of(cache).retention.pinned) == 1
        cache.unpin(tokens)
        assert len(writer_of(cache).retention.pinned) == 0


def test_a_pinned_prefix_outlives_eviction_and_restart_until_it_is_unpinned(tmp_path: Path) -> None:
    kept = tokens_of(20 * BLOCK + 1, seed=1)

    def churn(cache: PrefixCache, first: int) -> None:
        for seed in range(first, first + 30):
            other = tokens_of(20 * BLOCK, seed)
            cache.store(other, entries_of(DENSE, other))
        cache.flush()

    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        cache.store(kept, entries_of(DENSE, kept), pin=True)
        churn(cache, 100)
        assert cache.lookup(kept).hit_tokens == 20 * BLOCK
    with open_cache(tmp_path / "s", ssd_bytes="1MiB", clock=(clock := Clock())) as cache:
        churn(cache, 200)
        assert cache.probe(kept).hit_tokens == 20 * BLOCK
        cache.unpin(kept)
        clock.now += 1000
        churn(cache, 300)
        assert cache.probe(kept).hit_tokens == 0


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    prompts = [tokens_of(20 * BLOCK + 1, seed) for seed in range(3)]
    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        for tokens in prompts:
            cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(prompts[0]):
            pass
    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        for seed in range(50, 52):
            tokens = tokens_of(20 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        assert cache.probe(prompts[0]).hit_tokens == 20 * BLOCK
        assert cache.probe(prompts[1]).hit_tokens < 20 * BLOCK


def test_hit_tokens_per_tier_sum_to_the_total(tmp_path: Path) -> None:
    tokens = tokens_of(6 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens[: 3 * BLOCK + 1]) as match:
            cache.load(match).release()
        with cache.lookup(tokens) as match:
            assert match.residency == {"device": 3 * BLOCK, "ssd": 6 * BLOCK}
        hits = cache.stats()["counters"]["hit_tokens"]
        assert hits == {"ssd": (3 + 3) * BLOCK, "device": 3 * BLOCK, "total": 9 * BLOCK}


def test_the_alarm_tells_of_stores_without_hits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_cache(tmp_path / "s") as cache:
        reader = cache.scope(Namespace(model="test", weights="typo"))
        for seed in range(70):
            tokens = tokens_of(5 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens))
            reader.lookup(tokens)
        cache.flush()
        reader.lookup(tokens_of(5 * BLOCK, 1))
        assert len(cache.stats()["alarms"]) == 1
        assert "without one hit" in cache.stats()["alarms"][0]
        assert sum("without one hit" in record.message for record in caplog.records) == 1
        cache.lookup(tokens_of(5 * BLOCK, 1))
        assert cache.stats()["alarms"] == []


def _use_in_child(cache: PrefixCache, path: Path, tokens: Any) -> int:
    """Return 0 if the inherited cache refuses and a fresh one works."""
    try:
        with pytest.raises(StoreError, match=r"after a fork|is closed"):
            cache.lookup(tokens)
        with open_cache(path) as own, own.lookup(tokens) as match:
            assert_entries(DENSE, own.read(match), tokens, 2 * BLOCK)
            return 0 if own.role == "reader" else 2
    except BaseException:
        traceback.print_exc()
        return 1


def test_a_forked_child_must_reopen_and_can(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        child = os.fork()
        if child == 0:
            os._exit(_use_in_child(cache, tmp_path / "s", tokens))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 2 * BLOCK)
        more = tokens_of(3 * BLOCK, 5)
        cache.store(more, entries_of(DENSE, more))
        cache.flush()
        assert cache.lookup(more).hit_tokens == 2 * BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssd_bytes": "40KiB"}, "ssd_bytes is 40960, expected at least .*8 blocks"),
        ({"ssd_bytes": "4 apples"}, "ssd_bytes must be bytes or a size such as '4GiB'"),
        ({"device_bytes": -1}, "device_bytes must not be negative"),
        ({"block_tokens": 0}, "block_tokens must be a positive integer"),
        ({"role": "boss"}, "role must be 'auto', 'owner' or 'reader'"),
        ({"window_ttl": 0}, "window_ttl must be positive"),
    ],
    ids=str,
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_cache(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_block_tokens_must_fit_the_alignment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of the layout's alignment 2, found 7"):
        open_cache(tmp_path / "s", WINDOWED, block_tokens=7)


def test_a_reader_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        open_cache(tmp_path / "s", role="reader")


def test_worth_loading_weighs_measured_speeds(tmp_path: Path) -> None:
    tokens = tokens_of(50 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        match = cache.lookup(tokens)
        verdicts = [match.worth_loading]  # nothing measured yet
        for seconds in (1e-9, 1e9):
            cache.observe_prefill(1000, seconds)
            verdicts.append(match.worth_loading)
        assert verdicts == [True, False, True]
        assert not cache.lookup(tokens_of(BLOCK, 3)).worth_loading
        with pytest.raises(ValueError, match="positive tokens and seconds"):
            cache.observe_prefill(0, 1)


def test_salts_that_come_and_go_leave_nothing_in_memory(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        for number in range(50):
            cache.scope(replace(NAMESPACE, tenant=str(number))).probe(tokens_of(BLOCK + 1))
        assert inside(cache).generations._newest == {}
        cache.bump_generation()
        assert list(inside(cache).generations._newest.values()) == [1]
