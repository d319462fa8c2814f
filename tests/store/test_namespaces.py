"""Namespaces appear with their first block and are removed with their last: no state grows with tenants."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import BlockStore, ConfigError, Namespace, PrefixCache, StoreError
from kvstore.admin.archive import export_store, import_store
from kvstore.cache.scope import Scope
from kvstore.cli.main import main
from kvstore.store import generations
from kvstore.store.namespaces import LAST_NUMBER, namespace_facts
from kvstore.tier.ssd.tier import SsdTier
from tests.builders import Clock
from tests.stores import BLOCK, DENSE, entries_of, inside, open_cache, tier_of, tokens_of, writer_of

BLOCK_BYTES = 8192
"""Bytes of a block of ``DENSE`` in the file."""


def tenant(number: int, **fields: Any) -> Namespace:
    return Namespace(model="test", tenant=f"salt-{number:06}", **fields)


def put(scope: Scope, seed: int, count: int = 1, **options: Any) -> NDArray[np.uint32]:
    """Store a prompt of ``count`` blocks; one more token, so that a lookup may hit all of it."""
    tokens = tokens_of(count * BLOCK + 1, seed)
    scope.store(tokens[:-1], entries_of(DENSE, tokens[:-1]), wait=30, **options)
    return tokens


def hit(scope: Scope, tokens: NDArray[np.uint32]) -> int:
    return scope.probe(tokens).hit_tokens // BLOCK


def names(cache: PrefixCache) -> set[int]:
    """Numbers of the namespaces named on the medium, checked against its records."""
    ssd = writer_of(cache).ssd
    found = set(namespace_facts(ssd))
    assert {record.namespace_id for _, record in ssd.records()} <= found
    return found


def tenants(cache: PrefixCache) -> list[str]:
    return [space["tenant"] for space in cache.stats()["namespaces"]]


def in_memory(cache: PrefixCache) -> int:
    """Entries of all state in memory that is kept by namespace."""
    spaces = writer_of(cache).namespaces
    parts: list[Any] = [value for value in vars(spaces).values() if hasattr(value, "__len__")]
    shared = inside(cache)
    parts += [
        writer_of(cache).ssd.usage,
        writer_of(cache).ssd.emptied,
        writer_of(cache).index._apart,
    ]
    parts += [shared.lookups._by_request, shared.generations._newest, shared.leases._lent]
    return sum(len(part) for part in parts)


# ---- many tenants --------------------------------------------------------------------------------


def test_tenants_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ssd_bytes": "4MiB", "block_tokens": 4 * BLOCK}  # 25 KB a block

    def fill(path: Path, count: int, *, is_shared: bool) -> tuple[int, list[int]]:
        """Store prompts of one block; return the most blocks stored, and the entries in memory."""
        most, sizes = 0, []
        with open_cache(path, **options) as cache:
            for number in range(count):
                scope = cache if is_shared else cache.scope(tenant(number))
                tokens = put(scope, number, 4)
                if number % 25 == 24:
                    cache.flush()
                    assert scope.lookup(np.append(tokens, 0)).hit_tokens == 4 * BLOCK
                    most = max(most, cache.stats()["tiers"]["ssd"]["blocks"])
                    sizes.append(in_memory(cache))
            stats = cache.stats()
            assert stats["counters"]["dropped_blocks"]["total"] == 0
            assert len(names(cache)) == len(stats["namespaces"])
            assert is_shared or len(names(cache)) == stats["tiers"]["ssd"]["blocks"]
        return most, sizes

    room, _ = fill(tmp_path / "one", 500, is_shared=True)
    kept, sizes = fill(tmp_path / "many", 1500, is_shared=False)
    assert kept >= 0.95 * room
    assert max(sizes) <= 1.1 * max(sizes[: len(sizes) // 4])
    with open_cache(tmp_path / "many", **options) as cache:
        assert 0.9 * kept < len(names(cache)) <= kept


def test_a_new_tenant_costs_no_transaction_but_that_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    change = SsdTier._change

    def counted(self: SsdTier, *write: Any, **options: Any) -> Any:
        written.append(1)
        return change(self, *write, **options)

    with open_cache(tmp_path / "s") as cache:
        monkeypatch.setattr(SsdTier, "_change", counted)
        costs = []
        for number in range(40):
            put(cache.scope(tenant(number)), number)
            cache.flush()
            costs.append(len(written))
            written.clear()
        assert costs == [1] * 40


@pytest.mark.parametrize("quota", [None, 64 * BLOCK_BYTES])
def test_generations_of_one_namespace_go_with_their_blocks(
    tmp_path: Path, quota: int | None
) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="1MiB", ssd_quota=quota) as cache:
        for generation in range(1, 130):
            cache.bump_generation()
            put(cache, generation)
            if quota is not None and generation % 10 == 9:
                cache.scope(cache.namespace, ssd_quota=quota)
        cache.flush()
        blocks = cache.stats()["tiers"]["ssd"]["blocks"]
        assert len(names(cache)) == blocks < 100
        assert len(writer_of(cache).ssd.facts("generation:")) == 1
        assert generation == cache.namespace.generation


def test_tenants_that_find_no_room_leave_nothing_behind(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="1MiB", request_share=1) as cache:
        pinned = put(cache, 0, 300, pin=True)
        cache.flush()
        for number in range(300):
            put(cache.scope(tenant(number)), number + 1)
        cache.flush()
        assert tenants(cache) == [""]
        assert len(names(cache)) == 1
        assert hit(cache, pinned) == cache.stats()["tiers"]["ssd"]["blocks"]
        before = in_memory(cache)
        writer_of(cache).failures.stopped_until = math.inf
        for number in range(300, 400):
            put(cache.scope(tenant(number)), number + 1)
        assert in_memory(cache) == before


def test_blocks_with_keys_of_their_callers_come_and_go_too(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path / "s", block_bytes=3000, ssd_bytes="1MiB") as store:
        side = inside(store).writer
        assert side is not None
        for _ in range(3):
            assert store.put([b"k"], [bytes(3000)]) == [True]
            store.flush()
            assert store.get([b"k"], [bytearray(3000)]) == [True]
            assert len(namespace_facts(side.ssd)) == 1
            store.clear()
            assert namespace_facts(side.ssd) == {}


# ---- every way that a last block goes ------------------------------------------------------------


@pytest.mark.parametrize("way", ["clear", "evict", "expire", "bad", "delete below", "quota"])
def test_a_namespace_goes_with_its_last_block_whatever_took_it(tmp_path: Path, way: str) -> None:
    clock = Clock()
    with open_cache(tmp_path / "s", clock=clock) as cache:
        keeps, leaves = cache.scope(tenant(1)), cache.scope(tenant(2))
        tokens = put(leaves, 2, 3, ttl=10.0 if way == "expire" else None)
        cache.flush()
        clock.now += 1
        put(keeps, 1)
        cache.flush()
        assert tenants(cache) == ["salt-000002", "salt-000001"]
        if way == "clear":
            assert leaves.clear() == 3
        elif way == "evict":
            writer_of(cache).evict_to(writer_of(cache).ssd.live_bytes - 3 * BLOCK_BYTES)
        elif way == "expire":
            clock.now += 100
            writer_of(cache).evict_to(writer_of(cache).ssd.live_bytes - 1)
        elif way == "bad":
            ssd, key = writer_of(cache).ssd, leaves.probe(tokens).prefix.key(0)
            with ssd._env.begin(write=True) as txn:
                txn.delete(key, db=ssd._pay)
            ssd.amend([key], page=0)
            assert leaves.read(leaves.lookup(tokens)).tokens == 0
        elif way == "delete below":
            assert writer_of(cache).discard(leaves.probe(tokens).prefix.chain[:16]) == 3
        else:
            cache.scope(tenant(2), ssd_quota=0)
            assert writer_of(cache).index.namespace_blocks().keys() == {2}
            assert tenants(cache) == ["salt-000002", "salt-000001"]  # for the quota
            return
        assert tenants(cache) == ["salt-000001"]
        assert names(cache) == {2}
        again = put(leaves, 2, 3)
        cache.flush()
        assert (hit(leaves, again), names(cache)) == (3, {2, 3})


def test_the_commands_do_not_miss_a_namespace_that_just_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        put(cache.scope(tenant(1)), 1)
        put(cache.scope(tenant(2), ssd_quota=BLOCK_BYTES), 2)
        cache.flush()
        cache.scope(tenant(1)).clear()
    assert main(["stats", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["namespaces"]
    assert [(space["tenant"], space["blocks"]) for space in found] == [("salt-000002", 1)]


# ---- numbers -------------------------------------------------------------------------------------


def test_a_number_is_not_given_out_while_a_failed_delete_names_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        put(cache.scope(tenant(1)), 1)
        cache.flush()
        spaces, ssd = writer_of(cache).namespaces, tier_of(cache)
        with ssd.failing("delete", lmdb.DiskError("gone")):
            cache.scope(tenant(1)).clear()
            spaces._last = 0  # all numbers were given out once: from the first again
            put(cache.scope(tenant(2)), 2)
            cache.flush()
            assert names(cache) == {1, 2}
        with ssd.failing("set_facts", lmdb.DiskError("gone")):
            cache.scope(tenant(2)).clear()  # both blocks go, and no name
            spaces._last = 0
            put(cache.scope(tenant(3)), 3)
            cache.flush()
            assert names(cache) == {1, 2, 3}
        cache.scope(tenant(3)).clear()
        assert names(cache) == set()


def test_a_number_is_not_given_out_while_a_queued_block_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.commit_queue.LINGER_SECONDS", 60.0)
    with open_cache(tmp_path / "s") as cache:
        first = put(cache.scope(tenant(1)), 1)
        writer_of(cache).namespaces._last = 0
        second = put(cache.scope(tenant(2)), 2)
        cache.flush()
        assert names(cache) == {1, 2}
        assert hit(cache.scope(tenant(1)), first) == hit(cache.scope(tenant(2)), second) == 1


def test_a_number_that_only_records_have_is_not_given_out(tmp_path: Path) -> None:
    """After damage to a namespace's name its blocks stay and belong to no other namespace."""
    path = tmp_path / "s"
    with open_cache(path) as cache:
        put(cache.scope(tenant(1)), 1)
        cache.flush()
        writer_of(cache).ssd.set_facts({"namespace:1": None})
    with open_cache(path) as cache:
        put(cache.scope(tenant(2)), 2)
        cache.flush()
        assert set(namespace_facts(writer_of(cache).ssd)) == {2}
        assert cache.scope(tenant(2)).clear() == 1


@pytest.mark.parametrize("name", [str(LAST_NUMBER), "4294967296", "9999999999", "0", "007"])
def test_numbers_go_round_and_a_damaged_one_breaks_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        put(cache.scope(tenant(1)), 1)
        cache.flush()
        fact = writer_of(cache).ssd.fact("namespace:1")
        writer_of(cache).ssd.set_facts({f"namespace:{name}": fact})
    with open_cache(path) as cache:
        writer_of(cache).namespaces._last = LAST_NUMBER
        tokens = put(cache.scope(tenant(2)), 2)
        cache.flush()
        assert hit(cache.scope(tenant(2)), tokens) == 1
        assert names(cache) == {1, 2}


def test_the_order_of_a_quota_is_not_that_of_a_later_namespace(tmp_path: Path) -> None:
    """A second policy is kept by number and removed with the number."""
    with open_cache(tmp_path / "s") as cache:
        scope = cache.scope(tenant(1), ssd_quota=4 * BLOCK_BYTES)
        put(scope, 1, 8)
        cache.flush()
        assert writer_of(cache).index._apart.keys() == {1}
        scope.bump_generation()
        put(scope, 2, 8)
        cache.flush()
        assert writer_of(cache).index._apart.keys() == names(cache) == {2}


# ---- killed at any moment ------------------------------------------------------------------------


@contextmanager
def pictures(monkeypatch: pytest.MonkeyPatch, path: Path, folder: Path) -> Iterator[list[Path]]:
    """Copy a store after each of its transactions, as a kill at that moment would leave it."""
    taken: list[Path] = []
    change = SsdTier._change

    def seen(self: SsdTier, *write: Any, **options: Any) -> None:
        change(self, *write, **options)
        taken.append(folder / f"{len(taken)}")
        shutil.copytree(path, taken[-1])

    with monkeypatch.context() as patched:
        patched.setattr(SsdTier, "_change", seen)
        yield taken


def test_after_a_kill_at_any_moment_every_block_is_named_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with (
        open_cache(path, ssd_bytes="1MiB") as cache,
        pictures(monkeypatch, path, tmp_path) as taken,
    ):
        keeps = cache.scope(tenant(0), ssd_quota=4 * BLOCK_BYTES)
        for number in range(1, 130):
            put(cache.scope(tenant(number)), number)
            if number % 16 == 0:
                put(keeps, number, 3)
                keeps.bump_generation()
                cache.flush()
            if number % 40 == 39:
                cache.scope(tenant(number)).clear()
        cache.flush()
    assert len(taken) > 30
    for copy in taken:
        with open_cache(copy, ssd_bytes="1MiB") as cache:
            used = {record.namespace_id for _, record in writer_of(cache).ssd.records()}
            quota = {s["id"] for s in cache.stats()["namespaces"] if s["quota"] is not None}
            assert used <= names(cache) <= used | quota
            assert quota, "a quota that was recorded"
            assert used or len(names(cache)) <= 1


def test_a_store_full_of_names_from_before_is_swept_at_its_opening(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = put(cache, 1)
        cache.flush()
        fact = json.loads(writer_of(cache).ssd.fact("namespace:1") or b"")
        writer_of(cache).ssd.set_facts(
            {
                f"namespace:{n}": json.dumps(
                    {**fact, "root": f"{n:064x}", "tenant": f"{n}"}
                ).encode()
                for n in range(2, 3000)
            }
        )
        full = writer_of(cache).ssd.live_bytes
    with open_cache(path) as cache:
        assert names(cache) == {1}
        assert writer_of(cache).ssd.live_bytes < full / 10
        assert hit(cache, tokens) == 1


def test_threads_that_come_and_go_under_many_names_lose_none(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", ssd_bytes="1MiB") as cache:
        errors: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for step in range(60):
                    scope = cache.scope(tenant(step % 7))
                    put(scope, worker * 1000 + step)
                    if step % 5 == worker:
                        scope.clear()
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.flush()
        assert not errors
        used = {record.namespace_id for _, record in writer_of(cache).ssd.records()}
        assert names(cache) == used
        spaces = cache.stats()["namespaces"]
        assert len({space["root"] for space in spaces}) == len(spaces) == len(used)
        assert writer_of(cache).ssd.usage == {
            space["id"]: space["blocks"] * BLOCK_BYTES for space in spaces
        }
        assert not writer_of(cache).namespaces._references


# ---- generations ---------------------------------------------------------------------------------


def nothing(*_args: int) -> None:
    """Ignore progress."""


def test_a_recorded_generation_outlives_the_last_block_and_keeps_old_weights_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        old = put(cache, 1)
        cache.flush()
    export_store(path, tmp_path / "old.tar", (), nothing)
    with open_cache(path) as cache:
        assert cache.bump_generation() == 1
        writer_of(cache).evict_to(0)
        assert tenants(cache) == []
    import_store(tmp_path / "old.tar", path, "8MiB", nothing)
    with open_cache(path) as cache:
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 1
        assert (cache.namespace.generation, hit(cache, old)) == (1, 0)


def test_lines_with_a_recorded_generation_are_bounded_and_the_last_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "RECORD_BYTES", 8 << 10)
    path = tmp_path / "s"
    with open_cache(path) as cache:  # 8 MiB / 64 / 8 KiB
        for number in range(16):
            assert cache.scope(tenant(number)).bump_generation() == 1
        full = cache.scope(tenant(16))
        with pytest.raises(
            StoreError, match="records the generations of 16 namespaces, expected at most 16"
        ):
            full.bump_generation()
        assert full.namespace.generation == 0
        assert cache.scope(tenant(3)).bump_generation() == 2
        assert len(writer_of(cache).ssd.facts("generation:")) == 16
    with open_cache(path) as cache:
        assert cache.scope(tenant(3)).namespace.generation == 2


@pytest.mark.parametrize("given", [2**63 - 1, 2**64 - 1])
def test_the_last_generations_of_all_end_in_a_sentence(tmp_path: Path, given: int) -> None:
    with open_cache(tmp_path / "s", namespace=Namespace(model="test", generation=given)) as cache:
        tokens = put(cache, 1)
        cache.flush()
        assert hit(cache, tokens) == 1
        with pytest.raises(ConfigError, match=f"generation is {given}.*no later one is recorded"):
            cache.bump_generation()
        assert hit(cache, tokens) == 1
        assert writer_of(cache).ssd.facts("generation:") == {}


def altered(file: Path, **fields: Any) -> None:
    """Rewrite an archive's manifest with other values of some fields."""
    import io
    import tarfile

    data = file.read_bytes()
    with tarfile.open(file) as tar:
        first = tar.next()
        assert first is not None
        content = tar.extractfile(first)
        assert content is not None
        manifest = json.loads(content.read())
        end = 512 + -(-first.size // 512) * 512
    for name, value in fields.items():
        manifest[name] = dict.fromkeys(manifest[name], value)
    text = json.dumps(manifest).encode()
    info = tarfile.TarInfo("manifest.json")
    info.size = len(text)
    made = io.BytesIO()
    made.write(info.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512) + data[end:])
    file.write_bytes(made.getvalue())


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**64, 10**400, -1, 1.5, True, "9", None])
def test_an_archive_cannot_take_a_namespace_to_its_last_generation(
    tmp_path: Path, value: Any
) -> None:
    path, file = tmp_path / "s", tmp_path / "a.tar"
    with open_cache(path) as cache:
        cache.bump_generation()
        put(cache, 1)
        cache.flush()
    export_store(path, file, (), nothing)
    altered(file, generations=value)
    with pytest.raises(StoreError, match=r"manifest\.json.*generation.*expected"):
        import_store(file, tmp_path / "t", "8MiB", nothing)
    assert not (tmp_path / "t").exists()


def test_the_last_generation_that_an_archive_may_have_leaves_room_for_another(
    tmp_path: Path,
) -> None:
    path, file = tmp_path / "s", tmp_path / "a.tar"
    with open_cache(path) as cache:
        cache.bump_generation()
        put(cache, 1)
        cache.flush()
    export_store(path, file, (), nothing)
    altered(file, generations=2**63 - 2)
    import_store(file, tmp_path / "t", "8MiB", nothing)
    with open_cache(tmp_path / "t") as cache:
        assert cache.bump_generation() == 2**63 - 1


# ---- numbers of records that make no sense -------------------------------------------------------


@pytest.mark.parametrize("sequence", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_sequence_of_the_far_future_takes_no_other_there(tmp_path: Path, sequence: int) -> None:
    """Rows of `age` are keyed by sequence: equal ones overwrite each other and cannot be deleted."""
    path = tmp_path / "s"
    with open_cache(path, ssd_bytes="1MiB") as cache:
        tokens = put(cache, 1)
        cache.flush()
        writer_of(cache).ssd.amend([cache.probe(tokens).prefix.key(0)], sequence=sequence)
    for first in (100, 300):
        with open_cache(path, ssd_bytes="1MiB") as cache:
            prompts = [put(cache, seed) for seed in range(first, first + 200)]
            cache.flush()
            ssd = writer_of(cache).ssd
            assert max(record.sequence for _, record in ssd.records_after(b"", 999)) <= max(
                sequence, 2000
            )
            assert inside(cache).context.tick < 2000
            with ssd._using(), ssd._begin() as txn:
                rows = txn.stat(ssd._age)["entries"]
            assert rows <= ssd.block_count + 1
            assert [hit(cache, each) for each in prompts[-20:]] == [1] * 20


def test_a_size_that_no_frame_has_costs_a_namespace_none_of_its_quota(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_cache(path, ssd_quota=8 * BLOCK_BYTES) as cache:
        tokens = put(cache, 1, 4)
        cache.flush()
        writer_of(cache).ssd.amend([cache.probe(tokens).prefix.key(3)], frame_bytes=2**32 - 1)
    with open_cache(path) as cache:
        more = put(cache, 2, 4)
        cache.flush()
        assert (hit(cache, tokens), hit(cache, more)) == (4, 4)
        assert cache.stats()["namespaces"][0]["bytes"] == 8 * BLOCK_BYTES
        writer_of(cache).evict_to(0)
        assert writer_of(cache).ssd.usage == {}


@pytest.mark.parametrize("expires", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_an_expiry_that_is_no_time_is_never_or_long_ago(tmp_path: Path, expires: float) -> None:
    path = tmp_path / "s"
    with open_cache(path) as cache:
        tokens = put(cache, 1)
        cache.flush()
        writer_of(cache).ssd.amend([cache.probe(tokens).prefix.key(0)], expires=expires)
    export_store(path, tmp_path / "a.tar", (), nothing)
    import_store(tmp_path / "a.tar", tmp_path / "t", "8MiB", nothing)
    for store in (path, tmp_path / "t"):
        with open_cache(store) as cache:
            assert hit(cache, tokens) == (0 if expires < 0 else 1)
    assert main(["stats", str(path)]) == main(["inspect", str(path)]) == 0
