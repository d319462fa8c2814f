"""Eviction policies of a store: chosen by name or given, as in the simulator, and replaced on failure."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from kvstore import ConfigError, PrefixCache
from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.guarded import METHODS, Guarded
from kvstore.policy.lru import Lru
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.store.eviction import Eviction, Limit
from tests.builders import path_of
from tests.simulate.support import Prefix, grown_paths
from tests.simulate.test_policies import drive_tree
from tests.store.test_quota import hit, put, tenant
from tests.stores import BLOCK, DENSE, assert_entries, entries_of, open_cache, tokens_of, writer_of


class Failing(Lru[Segment]):
    """LRU whose one method raises from a call on."""

    def __init__(self, method: str, after: int = 0) -> None:
        super().__init__()
        self.method = method
        self.calls = 0
        self.after = after

    @override
    def fresh(self) -> Failing:
        self._call("fresh")
        return Failing(self.method, self.after)

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == self.method:
            self.calls += 1
            if self.calls > self.after:
                msg = f"{method} is broken"
                raise RuntimeError(msg)
        return None if method == "fresh" else getattr(Lru, method)(self, *arguments)

    @override
    def insert(self, segment: Segment) -> None:
        self._call("insert", segment)

    @override
    def resize(self, segment: Segment) -> None:
        self._call("resize", segment)

    @override
    def touch(self, segment: Segment) -> None:
        self._call("touch", segment)

    @override
    def split(self, upper: Segment, lower: Segment) -> None:
        self._call("split", upper, lower)

    @override
    def release(self, segment: Segment) -> None:
        self._call("release", segment)

    @override
    def remove(self, segment: Segment) -> None:
        self._call("remove", segment)

    @override
    def victim(self, blocks: int) -> Segment | None:
        found: Segment | None = self._call("victim", blocks)
        return found


def flood(cache: PrefixCache, prompts: int = 20, blocks: int = 40) -> list[Any]:
    """Store prompts that fork from each other until many blocks are evicted, and use some again."""
    stored: list[Any] = []
    for seed in range(prompts):
        tokens = tokens_of(blocks * BLOCK, seed)
        if stored:
            tokens[: 10 * BLOCK] = stored[-1][: 10 * BLOCK]
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        stored.append(tokens)
        with cache.lookup(stored[seed // 2]):
            pass
    return stored


def assert_sound(cache: PrefixCache, stored: list[Any]) -> None:
    """Blocks of the index are stored and correct, and the newest prompt is among them."""
    for tokens in stored:
        with cache.lookup(tokens) as match:
            expected = match.hit_tokens
            assert_entries(DENSE, cache.read(match), tokens, expected)
            assert match.hit_tokens == expected
    assert hit(cache, stored[-1]) == len(stored[-1]) // BLOCK - 1
    side = writer_of(cache)
    assert side.index.blocks == side.ssd.block_count
    assert side.ssd.live_bytes <= side.ssd.high_bytes
    counters = cache.stats()["counters"]
    assert counters["dropped_blocks"] == {"total": 0}
    assert counters["corrupt_blocks"] == {"total": 0}


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fresh"])
def test_a_policy_that_raises_is_heard_once_and_eviction_goes_on(
    method: str, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # LMCache issue 4817: a policy raised in the eviction thread, and the cache froze full.
    policy = Failing(method, after)
    with (
        caplog.at_level(logging.WARNING),
        open_cache(tmp_path / "s", ssd_bytes="2MiB", policy=policy) as cache,
    ):
        stored = flood(cache)
        assert_sound(cache, stored)
        stats = cache.stats()
        assert policy.calls == after + 1, "it was asked again, or never"
        assert stats["counters"]["policy_errors"] == 1
        assert stats["counters"]["evicted_blocks"]["ssd"] > 100
        (alarm,) = stats["alarms"]
        assert f"RuntimeError('{method} is broken')" in alarm
    said = [record for record in caplog.records if "eviction policy" in record.message]
    assert len(said) == 1


class Choosing(Lru[Segment]):
    """A policy that returns invalid victims."""

    def __init__(self, choice: Any) -> None:
        super().__init__()
        self.choice = choice
        self.seen: list[Segment] = []

    @override
    def insert(self, segment: Segment) -> None:
        self.seen.append(segment)

    @override
    def victim(self, blocks: int) -> Segment | None:
        found: Segment | None = self.choice(self.seen)
        return found


@pytest.mark.parametrize(
    "choice",
    [
        lambda seen: None,
        lambda seen: "a name",
        lambda seen: seen[0].parent.parent,
        lambda seen: seen[0].parent,
        lambda seen: Segment(None, b"k" * KEY_BYTES, 0, 0),
    ],
    ids=["nothing", "text", "the root", "a parent", "a stranger"],
)
def test_a_policy_that_names_nothing_that_may_go_is_replaced(choice: Any, tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="2MiB", policy=Choosing(choice)) as cache:
        stored = flood(cache)
        assert_sound(cache, stored)
        assert cache.stats()["counters"]["policy_errors"] == 1
        assert "victim() returned" in cache.stats()["alarms"][0]


def test_nothing_to_name_is_no_fault_where_nothing_may_go() -> None:
    errors: list[Exception] = []
    index = PrefixIndex(Guarded(Lru[Segment](), errors.append))
    segment = index.insert(index.root, path_of([1, 2]), now=1, namespace_id=0)
    index.pin(segment)
    assert index.evict(1) == []
    index.unpin(segment)
    assert len(index.evict(1)) == 1
    assert errors == []


def test_a_quota_is_kept_though_the_policy_cannot_be_made_anew(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", policy=Failing("fresh")) as cache:
        theirs = put(cache.scope(tenant("other")), 0, 20)
        size = writer_of(cache).ssd.block_bytes
        mine = cache.scope(tenant("me"), ssd_quota=30 * size)
        prompts = [put(mine, seed, 10) for seed in range(1, 6)]
        assert hit(mine, prompts[-1]) == 10
        assert hit(cache.scope(tenant("other")), theirs) == 20
        assert cache.stats()["counters"]["policy_errors"] == 1


def test_one_that_fails_while_it_evicts_for_a_quota_takes_from_nobody_else(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", policy=Failing("victim")) as cache:
        other = cache.scope(tenant("other"))
        theirs = put(other, 0, 20)
        size = writer_of(cache).ssd.block_bytes
        mine = cache.scope(tenant("me"), ssd_quota=30 * size)
        prompts = [put(mine, seed, 10) for seed in range(1, 9)]
        assert hit(mine, prompts[-1]) == 10
        assert hit(other, theirs) == 20
        counters = cache.stats()["counters"]
        assert counters["evicted_blocks"]["ssd"] == counters["quota_evicted_blocks"] > 40


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("mru", "no policy named 'mru'; expected one of lru, arc"),
        (7, "7 lacks fresh, insert"),
        (Lru, "is a class, expected an object of it"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=fault):
        open_cache(tmp_path / "s", policy=policy)
    assert not (tmp_path / "s").exists()


# ---- the simulator -----------------------------------------------------------------------------

CAPACITY = 11


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tier hold CAPACITY blocks, to the block, and write what one ``store`` queued at once."""

    def limit(eviction: Eviction, _high: int, _low: int) -> Limit:
        size = eviction.ssd.block_bytes
        full = CAPACITY * size
        return Limit(lambda: eviction.index.blocks * size, full, full, None, "no_room")

    monkeypatch.setattr(Eviction, "cap", limit)
    monkeypatch.setattr(
        "kvstore.transfer.commit_queue.LINGER_SECONDS", 60.0
    )  # a flush ends the wait


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_event_by_event_a_store_does_what_the_simulator_says(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = grown_paths(seed, 50)
    names: dict[BlockKey, Prefix] = {}
    hits: list[int] = []
    evicted: list[list[Hashable]] = []
    with open_cache(tmp_path / "s", policy=name) as cache:
        index = writer_of(cache).index
        remove = index.evict

        def recorded(blocks: int, *arguments: Any) -> list[BlockKey]:
            gone = remove(blocks, *arguments)
            evicted[-1] += [names[key] for key in gone]
            return gone

        monkeypatch.setattr(index, "evict", recorded)
        for symbols in paths:
            evicted.append([])
            hits.append(0)
            if not symbols:
                continue
            tokens = np.repeat(np.array(symbols, np.uint32), BLOCK)
            keys = cache._chains.prefix(tokens, ()).chain
            for i in range(len(symbols)):
                key = BlockKey(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
                names[key] = tuple(symbols[: i + 1])
            # One token more: the last of a prompt is always computed, and a block with it.
            hits[-1] = cache.probe([*tokens.tolist(), 0]).hit_tokens // BLOCK
            cache.store(tokens, entries_of(DENSE, tokens))
            cache.flush()
            assert index.blocks <= CAPACITY
    simulated = drive_tree(paths, make_policy(name), CAPACITY)
    assert hits == simulated.hits
    assert evicted == simulated.evicted
    assert sum(map(len, evicted)) > 40
