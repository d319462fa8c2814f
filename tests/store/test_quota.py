"""Quotas: the most bytes that one namespace may take of a store."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore import BlockStore, ConfigError, Namespace, PrefixCache, StoreError
from kvstore.admin.archive import export_store, import_store
from kvstore.cache.scope import Scope
from kvstore.cli.main import main
from kvstore.tier.ssd.capacity import usage_of
from tests.frame.test_at_rest import numbers, open_packed
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tier_of, tokens_of, writer_of

BLOCK_BYTES = 8192
"""Bytes of a block of ``DENSE`` in the file: 6,144 bytes of entries and a head."""


def tenant(name: str, **fields: Any) -> Namespace:
    return Namespace(model="test", tenant=name, **fields)


def blocks(count: int) -> int:
    return count * BLOCK_BYTES


def put(scope: Scope, seed: int, count: int, **options: Any) -> NDArray[np.uint32]:
    """Store a prompt of ``count`` blocks unique to its seed, and wait for its commit."""
    tokens = tokens_of(count * BLOCK + 1, seed)
    scope.store(tokens[:-1], entries_of(DENSE, tokens[:-1]), wait=30, **options)
    scope.flush()
    return tokens


def held(cache: PrefixCache) -> dict[str, tuple[int, int, int | None]]:
    """Blocks, bytes and quota by tenant, checked against the records."""
    side = writer_of(cache)
    usage = usage_of(record for _, record in side.ssd.records())
    assert side.ssd.usage == usage
    found: dict[str, tuple[int, int, int | None]] = {}
    for space in cache.stats()["namespaces"]:
        assert space["bytes"] == usage[space["id"]] == blocks(space["blocks"])
        before = found.get(space["tenant"], (0, 0, None))
        found[space["tenant"]] = (
            before[0] + space["blocks"],
            before[1] + space["bytes"],
            space["quota"],
        )
    return found


FAULT = lmdb.DiskError("gone")


def hit(scope: Scope, tokens: NDArray[np.uint32]) -> int:
    return scope.probe(tokens).hit_tokens // BLOCK


def test_a_namespace_at_its_quota_evicts_its_own_oldest_leaves_and_nobody_elses(
    tmp_path: Path,
) -> None:
    with open_cache(tmp_path / "s") as cache:
        other, mine = cache.scope(tenant("other")), cache.scope(tenant("me"), ssd_quota=blocks(50))
        theirs = put(other, 0, 20)
        prompts = [put(mine, seed, 10) for seed in range(1, 6)]
        assert held(cache)["me"] == (50, blocks(50), blocks(50))
        assert cache.stats()["counters"]["quota_evicted_blocks"] == 0
        with mine.lookup(prompts[0]):
            pass
        prompts.append(put(mine, 6, 10))
        # Down to 48 blocks, 4 % below the quota: 12 blocks go, of what was used least recently.
        assert held(cache)["me"] == (48, blocks(48), blocks(50))
        assert [hit(mine, tokens) for tokens in prompts] == [10, 0, 8, 10, 10, 10]
        assert hit(other, theirs) == 20
        counters = cache.stats()["counters"]
        assert counters["quota_evicted_blocks"] == counters["evicted_blocks"]["ssd"] == 12
        assert counters["dropped_blocks"] == {"total": 0}


def test_one_tenant_that_floods_the_store_takes_nothing_from_another(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="4MiB") as cache:
        victim = cache.scope(tenant("victim"))
        flooder = cache.scope(tenant("flooder"), ssd_quota="1MiB")
        old = put(victim, 0, 100)
        for seed in range(1, 40):
            put(flooder, seed, 40)
            assert held(cache)["flooder"][1] <= 1 << 20
        assert hit(victim, old) == 100
        assert cache.stats()["counters"]["quota_evicted_blocks"] > 1000


def test_without_a_quota_the_same_flood_evicts_by_the_policy_over_everything(
    tmp_path: Path,
) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="4MiB") as cache:
        victim, flooder = cache.scope(tenant("victim")), cache.scope(tenant("flooder"))
        old = put(victim, 0, 100)
        for seed in range(1, 40):
            put(flooder, seed, 40)
        assert hit(victim, old) == 0
        assert cache.stats()["counters"]["quota_evicted_blocks"] == 0
        spaces = cache.stats()["namespaces"]
        assert [(space["tenant"], space["quota"]) for space in spaces] == [("flooder", None)]


def test_the_cap_still_evicts_a_tenant_that_is_below_its_quota(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="2MiB") as cache:
        small, large = cache.scope(tenant("small"), ssd_quota="1GiB"), cache.scope(tenant("large"))
        old = put(small, 0, 20)
        for seed in range(1, 10):
            put(large, seed, 60)
        assert hit(small, old) == 0
        assert held(cache)["small"] == (0, 0, 1 << 30)


def test_a_prompt_longer_than_the_quota_keeps_its_head(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(70))
        put(scope, 1, 30)
        tokens = put(scope, 2, 200)  # several commits: none evicts what the one before wrote
        assert hit(scope, tokens) == 70
        assert held(cache)["me"] == (70, blocks(70), blocks(70))
        dropped = cache.stats()["counters"]["dropped_blocks"]
        assert dropped["total"] == 130
        assert set(dropped) <= {"quota", "no_parent", "total"}


def test_the_parent_of_a_batch_stays_though_it_was_used_least(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(20))
        tokens = tokens_of(15 * BLOCK + 1, 1)
        entries = entries_of(DENSE, tokens[:-1])
        scope.store(tokens[: 5 * BLOCK], {name: a[:, : 5 * BLOCK] for name, a in entries.items()})
        scope.flush()
        put(scope, 2, 15)
        scope.store(
            tokens[:-1], {name: a[:, 5 * BLOCK :] for name, a in entries.items()}, 5 * BLOCK
        )
        scope.flush()
        assert hit(scope, tokens) == 15


def test_pins_and_entered_matches_protect_and_what_finds_no_room_is_dropped(
    tmp_path: Path,
) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(10))
        pinned = put(scope, 1, 4, pin=True)
        used = put(scope, 2, 3)
        with scope.lookup(used) as match:
            fresh = put(scope, 3, 8)
            assert scope.read(match).tokens == 3 * BLOCK
        assert [hit(scope, tokens) for tokens in (pinned, used, fresh)] == [4, 3, 3]
        assert cache.stats()["counters"]["dropped_blocks"] == {"quota": 5, "total": 5}
        scope.unpin(pinned)
        put(scope, 4, 10)
        assert hit(scope, pinned) == 0


def test_a_quota_of_0_stores_nothing_and_evicts_what_there_is(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope, other = cache.scope(tenant("me")), cache.scope(tenant("other"))
        tokens, theirs = put(scope, 1, 5), put(other, 1, 5)
        barred = cache.scope(tenant("me"), ssd_quota=0)
        assert (hit(scope, tokens), hit(other, theirs)) == (0, 5)
        put(barred, 2, 5)
        assert held(cache)["me"] == (0, 0, 0)
        assert cache.stats()["counters"]["dropped_blocks"] == {"quota": 5, "total": 5}


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        (BLOCK_BYTES - 1, f"ssd_quota is {BLOCK_BYTES - 1}, expected at least the {BLOCK_BYTES}"),
        (1, "or 0 for a namespace that stores nothing"),
        (-1, "ssd_quota must not be negative"),
        ("much", "ssd_quota must be bytes or a size"),
        (True, "ssd_quota must be bytes or a size"),
        (2**63, "less than 2\\*\\*63"),
    ],
)
def test_what_cannot_be_a_quota_is_refused_and_changes_nothing(
    tmp_path: Path, quota: Any, message: str
) -> None:
    path = tmp_path / "s"
    with open_cache(path, ssd_quota=blocks(9)) as cache:
        with pytest.raises(ConfigError, match=message):
            cache.scope(tenant("me"), ssd_quota=quota)
        assert [space["quota"] for space in cache.stats()["namespaces"]] == [blocks(9)]
    with pytest.raises(ConfigError, match=message):
        open_cache(path, ssd_quota=quota)
    with open_cache(path, role="owner") as cache:  # the failed opening let go of it
        assert [space["quota"] for space in cache.stats()["namespaces"]] == [blocks(9)]


def test_a_quota_of_one_block_keeps_one_block(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=BLOCK_BYTES)
        first, second = put(scope, 1, 1), put(scope, 2, 3)
        assert (hit(scope, first), hit(scope, second)) == (0, 1)


def test_a_lowered_quota_evicts_at_once_and_a_raised_one_takes_more(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(30))
        tokens = put(scope, 1, 30)
        cache.scope(tenant("me"), ssd_quota=blocks(10))
        assert hit(scope, tokens) == held(cache)["me"][0] == 9  # 4 % below
        cache.scope(tenant("me"))  # none given: it stays
        put(scope, 2, 30)
        assert held(cache)["me"] == (10, blocks(10), blocks(10))
        cache.scope(tenant("me"), ssd_quota="1GiB")
        put(scope, 3, 60)
        assert held(cache)["me"][0] == 70


def test_a_quota_holds_after_a_restart_that_does_not_name_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        put(cache.scope(tenant("me"), ssd_quota=blocks(12)), 1, 8)
    with open_cache(tmp_path / "s") as cache:
        assert held(cache)["me"] == (8, blocks(8), blocks(12))
        put(cache.scope(tenant("me")), 2, 8)
        assert held(cache)["me"][1] <= blocks(12)


def test_it_holds_through_all_generations_of_a_namespace_together(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(20))
        other = put(cache.scope(tenant("me", adapter="lora")), 9, 8)
        put(scope, 1, 12)
        scope.bump_generation()
        put(scope, 2, 5)
        fresh = put(scope, 3, 12)
        assert hit(scope, fresh) == 12
        spaces = [space for space in cache.stats()["namespaces"] if space["adapter"] is None]
        assert [space["quota"] for space in spaces] == [blocks(20)] * 2
        assert [space["blocks"] for space in spaces] == [2, 17]  # the old generation goes first
        assert hit(cache.scope(tenant("me", adapter="lora")), other) == 8
    with open_cache(path) as cache:
        scope = cache.scope(tenant("me", generation=7))
        put(scope, 4, 20)
        spaces = [space for space in cache.stats()["namespaces"] if space["adapter"] is None]
        assert [space["blocks"] for space in spaces] == [20]  # the others went with their blocks
        assert [space["quota"] for space in spaces] == [blocks(20)]


def test_a_full_quota_takes_nothing_from_others_in_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.commit_queue.LINGER_SECONDS", 60.0)
    with open_cache(tmp_path / "s") as cache:
        mine, other = cache.scope(tenant("me"), ssd_quota=blocks(2)), cache.scope(tenant("other"))
        text, theirs = tokens_of(3 * BLOCK + 1, 1), tokens_of(8 * BLOCK + 1, 2)
        other.store(theirs[:-1], entries_of(DENSE, theirs[:-1]), wait=30)
        mine.store(text[:-1], entries_of(DENSE, text[:-1]), wait=30)
        cache.flush()
        assert (hit(mine, text), hit(other, theirs)) == (2, 8)
        assert cache.stats()["counters"]["dropped_blocks"]["quota"] == 1


def test_the_newest_quota_holds_after_a_restart_however_many_generations_there_were(
    tmp_path: Path,
) -> None:
    path, last = tmp_path / "s", 10  # in the order of texts, namespace 9 comes after 10
    with open_cache(path) as cache:
        for generation in range(last):
            quota = blocks(20 - generation)
            put(cache.scope(tenant("me", generation=generation), ssd_quota=quota), generation, 1)
    with open_cache(path) as cache:
        quotas = {space["quota"] for space in cache.stats()["namespaces"] if space["blocks"]}
        assert quotas == {blocks(20 - last + 1)}


def test_a_reader_ignores_the_quota_that_it_gives_and_shows_the_owners(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path, ssd_quota=blocks(9)) as cache:
        tokens = put(cache, 1, 9)
    with open_cache(path, role="reader", ssd_quota=blocks(2)) as reader:
        assert hit(reader, tokens) == 9
        assert [space["quota"] for space in reader.stats()["namespaces"]] == [blocks(9)]


def test_a_quota_that_cannot_be_recorded_says_so_and_the_old_one_stays(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(20))
        put(scope, 1, 10)

        refused = pytest.raises(StoreError, match="cannot be recorded")
        with tier_of(cache).failing("set_facts", FAULT), refused:
            cache.scope(tenant("me"), ssd_quota=blocks(5))
        assert held(cache)["me"] == (10, blocks(10), blocks(20))


def test_deletes_that_fail_are_counted_as_used_until_they_succeed(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant("me"), ssd_quota=blocks(10))
        put(scope, 1, 10)

        with tier_of(cache).failing("delete", FAULT):
            put(scope, 2, 4)
        assert writer_of(cache).ssd.usage == {1: blocks(10)}
        again = put(scope, 1, 6)  # comes back over what was not deleted
        assert hit(scope, again) == 6
        assert held(cache)["me"][1] <= blocks(10)


@pytest.mark.parametrize("value", ['"9"', "-1", "true", "1.5", "[]"])
def test_a_damaged_quota_on_the_medium_is_none(tmp_path: Path, value: str) -> None:
    path = tmp_path / "s"
    with open_cache(path, ssd_quota=blocks(9)) as cache:
        put(cache, 1, 1)
        ssd = writer_of(cache).ssd
        fact = json.loads(ssd.fact("namespace:1") or b"")
        text = json.dumps({**fact, "quota": None}).replace("null}", value + "}")
        ssd.set_fact("namespace:1", text.encode())
    with open_cache(path) as cache:
        assert [space["quota"] for space in cache.stats()["namespaces"]] == [None]
    assert main(["stats", str(path)]) == 0


def test_an_import_keeps_to_the_quota_of_its_target(tmp_path: Path) -> None:
    with open_cache(tmp_path / "a") as cache:
        put(cache, 1, 30)
    export_store(tmp_path / "a", tmp_path / "a.tar", (), lambda *_: None)
    with open_cache(tmp_path / "b", ssd_quota=blocks(10)):
        pass
    import_store(tmp_path / "a.tar", tmp_path / "b", "8MiB", lambda *_: None)
    with open_cache(tmp_path / "b") as cache:
        assert held(cache)[""] == (10, blocks(10), blocks(10))


def test_the_commands_show_blocks_bytes_and_quota_of_each_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        put(cache.scope(tenant("free")), 1, 3)
        tokens = put(cache.scope(tenant("bound"), ssd_quota=123456), 2, 5)
        key = cache.scope(tenant("bound")).probe(tokens).prefix.key(0).hex()
    assert main(["stats", str(path), "--json"]) == 0
    spaces = json.loads(capsys.readouterr().out)["namespaces"]
    assert [(n["tenant"], n["blocks"], n["bytes"], n["quota"]) for n in spaces] == [
        ("free", 3, blocks(3), None),
        ("bound", 5, blocks(5), 123456),
    ]
    assert main(["inspect", str(path), key, "--json"]) == 0
    block = json.loads(capsys.readouterr().out)
    assert block["bytes"] == BLOCK_BYTES
    assert block["namespace"] == spaces[1]
    for command in (["stats", str(path)], ["inspect", str(path), key]):
        assert main(command) == 0
        text = capsys.readouterr().out
        assert "123,456" in text
        assert f"{blocks(5):,}" in text


def test_a_block_store_has_one_namespace_without_a_quota(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path / "b", block_bytes=64, ssd_bytes="8MiB") as store:
        store.put(["a"], [bytes(64)])
        store.flush()
        assert tier_of(store).usage == {1: 4096}


# ---- bytes by namespace are those of the records, whatever happens -------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bytes_by_namespace_recount_after_every_step_with_frames_of_two_sizes(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("mixed") / "s"
    cache = open_packed(path, ssd_bytes="1MiB", error_budget=0.5)
    names = ["a", "b", "c"]
    quotas: dict[str, int | None] = {"a": 100_000, "b": 60_000, "c": None}
    scopes = {n: cache.scope(tenant(n), ssd_quota=quotas[n]) for n in names}
    sizes: set[int] = set()
    for _ in range(25):
        name, count = rng.choice(names), rng.randint(1, 8)
        step = rng.choice(["store", "store", "store", "clear", "reopen", "bump", "quota"])
        if step == "store":
            entries = numbers(rng.randrange(6), count)
            if rng.random() < 0.5:
                entries["k"][:, -1] = 0x7F  # NaN: the last block stays lossless, and larger
            tokens = tokens_of(count * BLOCK, rng.randrange(6))
            scopes[name].store(tokens, entries, pin=rng.random() < 0.1)
            scopes[name].flush()
        elif step == "clear":
            cache.clear(scopes[name])
        elif step == "bump":
            scopes[name].bump_generation()
        elif step == "quota" and quotas[name] is not None:
            quotas[name] = rng.choice([40_000, 100_000, 200_000])
            scopes[name] = cache.scope(tenant(name), ssd_quota=quotas[name])
        elif step == "reopen":
            cache.close()
            cache = open_packed(path, ssd_bytes="1MiB", error_budget=0.5)
            scopes = {n: cache.scope(tenant(n)) for n in names}
        side = writer_of(cache)
        records = [record for _, record in side.ssd.records()]
        sizes |= {record.frame_bytes for record in records}
        assert +side.ssd.usage == usage_of(records)
        for entry in cache.stats()["namespaces"]:
            assert entry["quota"] == quotas[entry["tenant"]]
        pinned = {record.namespace_id for record in records if record.is_pinned}
        for space in names:
            mine = [each for each in cache.stats()["namespaces"] if each["tenant"] == space]
            quota = quotas[space]
            if quota is not None and pinned.isdisjoint(each["id"] for each in mine):
                assert sum(each["bytes"] for each in mine) <= quota
    cache.close()
