"""Stores with a secret: hashes that nobody can know who has not got it, and the file it is in."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import (
    BlockStore,
    ConfigError,
    ImageSpan,
    LayoutMismatch,
    Namespace,
    PrefixCache,
    StoreBusy,
    StoreError,
    WindowSnapshot,
)
from kvstore.admin import inspect as admin
from kvstore.admin import upkeep
from kvstore.admin.access import open_for_writing
from kvstore.admin.archive import export_store, import_store
from kvstore.blocks.keys import keys_root
from kvstore.cli.main import main
from kvstore.identity.block import KEY_BYTES
from kvstore.identity.hash import as_tokens, block_hashes, namespace_digest, secret_fingerprint
from kvstore.store import secret as secret_module
from kvstore.store.scrub import Scrubber
from kvstore.tier.ssd.owner_lock import try_lock
from tests.stores import (
    BLOCK,
    DENSE,
    NAMESPACE,
    WINDOWED,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tokens_of,
)

TOKENS = tokens_of(5 * BLOCK + 1)
SIZE = 256


def open_secret(path: Path, **options: Any) -> PrefixCache:
    return open_cache(path, **{"secret": True, **options})


def fill(path: Path, **options: Any) -> NDArray[np.uint32]:
    with open_secret(path, **options) as cache:
        cache.store(TOKENS[:-1], entries_of(DENSE, TOKENS[:-1]))
    return TOKENS


def assert_whole(path: Path, **options: Any) -> None:
    with open_secret(path, **options) as cache, cache.lookup(TOKENS) as match:
        assert match.hit_tokens == 5 * BLOCK
        assert_entries(DENSE, cache.read(match), TOKENS, 5 * BLOCK)


def keys_of(path: Path) -> set[str]:
    return {block["key"] for block in admin.list_blocks(path, 1000)}


def secret_of(path: Path) -> bytes:
    return (path / "secret").read_bytes()


def names_in(path: Path) -> set[str]:
    return {item.name for item in path.iterdir()}


def quiet(*_: int) -> None:
    """Progress that nobody watches."""


# ---- hashes ------------------------------------------------------------------------------------


def test_a_root_under_a_secret_is_the_vector_of_the_format() -> None:
    secret = bytes(range(32))
    namespace = Namespace(
        model="m", weights="w", tokenizer="t", adapter="a", tenant="s", generation=1
    )
    root = namespace_digest("f" * 64, 128, namespace, secret)
    assert root.hex() == "c7157436f9401abec74e181ba4596ebd35db2bf57d7e0b981a661c68269f5d07"
    assert (
        secret_fingerprint(secret)
        == "5b07e64b66ed24bea91802787d5e8074014bea0f81c3a86666d2d6adf8d6733a"
    )
    assert (
        keys_root(secret).hex()
        == "efa0f48cc51850b01a29e4ae20c624a3891772d50be6dd23a5e0d89e9a975556"
    )
    (first,) = block_hashes(root, as_tokens(range(128)), 128)
    assert first.hex() == "a684c140d5673df3284e2d22c9ad3a99975de71f06b64a9199e2b297d54a395e"


def test_a_root_under_a_secret_is_the_hmac_of_what_is_hashed_without_one() -> None:
    def text(tag: str, value: str) -> bytes:
        return tag.encode() + b"s" + len(value).to_bytes(8, "little") + value.encode()

    spelled = (
        b"kvstore.namespace.1"
        + text("L", "f" * 64)
        + b"B"
        + (128).to_bytes(8, "little")
        + b"".join(text(tag, value) for tag, value in zip("MWT", "mwt", strict=True))
        + b"An"
        + text("S", "")
        + b"G"
        + bytes(8)
    )
    namespace = Namespace(model="m", weights="w", tokenizer="t")
    for secret in (b"k" * 32, b"l" * 32):
        expected = hmac.new(secret, spelled, hashlib.sha256).digest()
        assert namespace_digest("f" * 64, 128, namespace, secret) == expected
    assert namespace_digest("f" * 64, 128, namespace) == hashlib.sha256(spelled).digest()


def test_keys_cannot_be_computed_without_the_secret_and_differ_from_store_to_store(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name)
    open_keys, keys, others = set(), keys_of(tmp_path / "a"), keys_of(tmp_path / "b")
    root = namespace_digest(DENSE.fingerprint, BLOCK, NAMESPACE)
    open_keys = {digest[:KEY_BYTES].hex() for digest in block_hashes(root, TOKENS, BLOCK)}
    assert len(keys) == len(others) == len(open_keys) == 5
    assert not keys & others
    assert not (keys | others) & open_keys
    root = namespace_digest(DENSE.fingerprint, BLOCK, NAMESPACE, secret_of(tmp_path / "a"))
    assert {digest[:KEY_BYTES].hex() for digest in block_hashes(root, TOKENS, BLOCK)} == keys


@pytest.mark.parametrize("secret", [True, False])
def test_a_scope_names_blocks_as_its_store_does(tmp_path: Path, *, secret: bool) -> None:
    images = [ImageSpan(3, 9, b"cat")]
    with open_cache(tmp_path / "s", layout=WINDOWED, secret=secret) as cache:
        tenant = cache.scope(Namespace(model="test", tenant="b"))
        tenant.bump_generation()
        tenant.store(TOKENS[:-1], entries_of(WINDOWED, TOKENS[:-1]), images=images)
        cache.flush()
        rows = {"window": np.zeros((3, WINDOWED.window_tokens, 16), np.uint8)}
        end = 2 * BLOCK
        window = WindowSnapshot(end - WINDOWED.window_tokens, end, rows)
        assert tenant.put_window(TOKENS, window, images=images)
        names = tenant.hashes(TOKENS, images=images)
        assert cache.pooled_windows() == {names[1]}
        assert not set(names) & set(cache.hashes(TOKENS, images=images))
    assert {name[:KEY_BYTES].hex() for name in names} == keys_of(tmp_path / "s")


def test_tenants_images_generations_and_windows_work_as_ever(tmp_path: Path) -> None:
    images = [ImageSpan(3, 9, b"cat")]
    with open_secret(tmp_path / "s", layout=WINDOWED) as cache:
        entries = entries_of(WINDOWED, TOKENS[:-1])
        cache.store(TOKENS[:-1], entries, images=images)
        cache.flush()
        other = cache.scope(Namespace(model="test", tenant="other"))
        assert cache.probe(TOKENS, images=images).hit_tokens == 5 * BLOCK
        assert cache.probe(TOKENS).hit_tokens == other.probe(TOKENS, images=images).hit_tokens == 0
        cache.bump_generation()
        assert cache.probe(TOKENS, images=images).hit_tokens == 0
        cache.store(TOKENS[:-1], entries, images=images)
    with open_secret(tmp_path / "s", layout=WINDOWED) as cache:
        assert cache.namespace.generation == 1
        assert cache.probe(TOKENS, images=images).hit_tokens == 5 * BLOCK


def test_a_block_store_hashes_its_callers_keys_under_it(tmp_path: Path) -> None:
    def open_blocks(name: str, **options: Any) -> BlockStore:
        return BlockStore.open(tmp_path / name, block_bytes=SIZE, ssd_bytes="8MiB", **options)

    ids = {}
    for name, secret in (("a", True), ("b", True), ("open", False)):
        with open_blocks(name, secret=secret) as store:
            assert store.put(["k", "l"], [bytes(SIZE), b"x" * SIZE], [None, "k"]) == [True] * 2
            store.flush()
            ids[name] = store.block_id("k")
            assert {key for _, key in store.listing()} == {b"k", b"l"}
    assert len(set(ids.values())) == 3
    with open_blocks("a", secret=True, scrub_bytes_per_second="1GiB") as store:
        target = bytearray(SIZE)
        assert store.get(["l"], [target]) == [True]
        assert bytes(target) == b"x" * SIZE
        assert store.delete(["k"]) == 2
    with pytest.raises(LayoutMismatch, match="has a secret"):
        open_blocks("a")
    with pytest.raises(LayoutMismatch, match="has no secret"):
        open_blocks("open", secret=True)
    with pytest.raises(LayoutMismatch, match="left untouched"):
        open_secret(tmp_path / "a")


# ---- the file ----------------------------------------------------------------------------------


def test_a_new_store_makes_its_secret_before_its_first_block_for_its_owner_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with open_secret(path):
        assert (path / "secret").stat().st_mode & 0o777 == 0o600
        assert len(secret_of(path)) == 32
        named = json.loads((path / "VERSION").read_text().splitlines()[1])["secret"]
        assert named == hmac.new(secret_of(path), b"kvstore.secret.1", hashlib.sha256).hexdigest()
    before = secret_of(path)
    fill(path)
    assert secret_of(path) == before
    with open_cache(tmp_path / "open"):
        assert not (tmp_path / "open" / "secret").exists()
        assert "secret" not in (tmp_path / "open" / "VERSION").read_text()


def test_the_secret_is_nowhere_but_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    export_store(path, tmp_path / "s.tar", (), quiet)
    files = [item for item in path.iterdir() if item.name != "secret"] + [tmp_path / "s.tar"]
    assert len(files) >= 4
    for file in files:
        content = file.read_bytes()
        assert secret_of(path) not in content
        assert secret_of(path).hex().encode() not in content


def test_the_secret_is_on_the_disk_before_the_version_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, set[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append((Path(f"/proc/self/fd/{fd}").readlink(), names_in(tmp_path / "s")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with open_secret(tmp_path / "s"):
        pass
    names = [file.name for file, _ in seen]
    assert names.index("secret.partial") < names.index("s") < names.index("VERSION.partial")
    assert "data.mdb" not in seen[names.index("s")][1]


@pytest.mark.parametrize("role", ["auto", "owner", "reader"])
@pytest.mark.parametrize("has_secret", [False, True])
def test_with_and_without_a_secret_are_two_kinds_of_store(
    tmp_path: Path, role: str, has_secret: bool
) -> None:
    path = tmp_path / "s"
    with open_cache(path, secret=has_secret) as cache:
        cache.store(TOKENS[:-1], entries_of(DENSE, TOKENS[:-1]))
    before = {item.name: item.read_bytes() for item in path.iterdir() if item.name != "lock.mdb"}
    message = "open it with secret=True" if has_secret else "open it without secret=True"
    with pytest.raises(LayoutMismatch, match=message):
        open_cache(path, secret=not has_secret, role=role)
    after = {item.name: item.read_bytes() for item in path.iterdir() if item.name != "lock.mdb"}
    assert after == before
    with open_cache(path, secret=has_secret, role=role) as cache:
        assert cache.probe(TOKENS).hit_tokens == 5 * BLOCK


def lose(path: Path) -> None:
    (path / "secret").unlink()


def shorten(path: Path) -> None:
    (path / "secret").write_bytes(secret_of(path)[:31])


def empty(path: Path) -> None:
    (path / "secret").write_bytes(b"")


def lengthen(path: Path) -> None:
    (path / "secret").write_bytes(secret_of(path) + b"\n")


def replace(path: Path) -> None:
    (path / "secret").write_bytes(os.urandom(32))


def expose(path: Path) -> None:
    (path / "secret").chmod(0o640)


def link(path: Path) -> None:
    (path / "secret").rename(path.parent / "elsewhere")
    (path / "secret").symlink_to(path.parent / "elsewhere")


def link_to_nothing(path: Path) -> None:
    (path / "secret").unlink()
    (path / "secret").symlink_to(path.parent / "nothing")


def fold(path: Path) -> None:
    (path / "secret").unlink()
    (path / "secret").mkdir()


def pipe(path: Path) -> None:
    (path / "secret").unlink()
    os.mkfifo(path / "secret", 0o600)


FAULTS: list[tuple[Callable[[Path], None], type[Exception], str]] = [
    (lose, StoreError, "is missing.*restore the secret"),
    (shorten, StoreError, "has 31 bytes, expected 32: restore"),
    (empty, StoreError, "has 0 bytes, expected 32: restore"),
    (lengthen, StoreError, "has 33 bytes, expected 32: restore"),
    (replace, StoreError, "is another secret.*restore the secret"),
    (expose, ConfigError, "is accessible to others .mode 0640.; run chmod 600"),
    (link, ConfigError, "is a symbolic link"),
    (link_to_nothing, ConfigError, "is a symbolic link"),
    (fold, ConfigError, "is no plain file"),
    (pipe, ConfigError, "is no plain file"),
]


@pytest.mark.parametrize("role", ["owner", "reader"])
@pytest.mark.parametrize(
    ("break_it", "kind", "message"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_a_fault_of_the_file_says_what_to_do_and_costs_nothing(
    tmp_path: Path, break_it: Callable[[Path], None], kind: type[Exception], message: str, role: str
) -> None:
    path = tmp_path / "s"
    fill(path)
    right = secret_of(path)
    break_it(path)
    names = names_in(path)
    calls: list[Callable[[], Any]] = [
        lambda: open_secret(path, role=role),
        lambda: admin.store_stats(path),
        lambda: admin.verify_store(path, quiet),
        lambda: upkeep.evict(path, "0%"),
        lambda: export_store(path, tmp_path / "s.tar", (), quiet),
    ]
    for call in calls:
        with pytest.raises(kind, match=message):
            call()
    assert names_in(path) == names, "something was made anew"
    file = path / "secret"
    shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
    file.write_bytes(right)
    file.chmod(0o600)
    assert_whole(path, role=role)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    fill(path)
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        facts = list(real(fd))
        facts[4] += 1  # the user id
        return os.stat_result(facts)

    with monkeypatch.context() as foreign:
        foreign.setattr(os, "fstat", fstat)
        with pytest.raises(ConfigError, match=r"belongs to user id \d+, expected \d+"):
            open_secret(path)
    assert_whole(path)


def test_a_file_that_cannot_be_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path)
    real = os.open

    def denied(name: Any, *rest: Any, **options: Any) -> int:
        if str(name).endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return real(name, *rest, **options)

    with monkeypatch.context() as locked:
        locked.setattr(os, "open", denied)
        with pytest.raises(StoreError, match="cannot be read: Permission denied"):
            open_secret(path)
    assert_whole(path)


def test_a_process_killed_while_it_made_the_secret_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    (path / "secret.partial").write_bytes(b"half")
    fill(path)
    assert_whole(path)
    other = tmp_path / "t"
    other.mkdir(mode=0o700)
    (other / "secret").write_bytes(b"s" * 32)  # it got as far as that, and made no store
    (other / "secret").chmod(0o600)
    fill(other)
    assert secret_of(other) == b"s" * 32


def test_a_disk_too_full_for_the_secret_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as short:
        short.setattr(secret_module, "write_file", full)
        with pytest.raises(StoreError, match="cannot be created: No space left on device"):
            open_secret(tmp_path / "s")
    fill(tmp_path / "s")


@pytest.mark.parametrize("wrong", [b"k" * 32, "yes", 1])
def test_a_secret_is_not_the_callers_to_choose(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="secret must be True or False"):
        open_cache(tmp_path / "s", secret=wrong)
    assert not (tmp_path / "s").exists()


def test_options_that_cannot_work_leave_no_secret_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssd_bytes"):
        open_secret(tmp_path / "s", ssd_bytes="much")
    assert not (tmp_path / "s").exists()


RACER = """
import sys, pathlib, time
from tests.store.test_secret import *
path, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open_secret(path) as cache:
    print(cache.role, secret_of(path).hex(), flush=True)
    sys.stdin.read()
"""


def test_processes_that_make_a_store_at_once_have_one_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path / "s")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([*command, str(n)], **pipes) for n in range(3)]  # type: ignore[call-overload]
    said = [racer.stdout.readline().split() for racer in racers]
    for racer in racers:
        racer.communicate("", timeout=60)
        assert racer.returncode == 0
    assert sorted(role for role, _ in said) == ["owner", "reader", "reader"]
    assert len({secret for _, secret in said}) == 1


def test_who_waits_for_a_store_that_another_process_never_makes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    lock = try_lock(path)
    assert lock is not None
    monkeypatch.setattr(secret_module, "BIRTH_SECONDS", 0.1)
    with pytest.raises(StoreBusy, match="is owned by process"):
        open_secret(path)
    os.close(lock)
    assert not (path / "secret").exists()
    fill(path)


# ---- what else there is ------------------------------------------------------------------------


@pytest.mark.parametrize("can_rename", [True, False])
def test_a_broken_store_keeps_its_secret_here_and_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_rename: bool
) -> None:
    path = tmp_path / "s"
    fill(path)
    secret = secret_of(path)
    (path / "data.mdb").write_bytes(b"broken" * 10_000)
    if not can_rename:
        real = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self == path:
                raise OSError(16, "busy")
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
    fill(path)
    (aside,) = [*tmp_path.glob("s.bad-*"), *path.glob("s.bad-*")]
    assert secret_of(path) == secret_of(aside) == secret
    assert (aside / "secret").stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    assert_whole(path)


def test_every_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "tokens", tmp_path / "keys"):
        if path.name == "tokens":
            fill(path)
        else:
            with BlockStore.open(path, block_bytes=SIZE, ssd_bytes="8MiB", secret=True) as store:
                store.put(["k", "l"], [bytes(SIZE)] * 2, [None, "k"])
        (key, *_) = keys_of(path)
        for command in ("stats", "verify", "inspect", "compact"):
            assert main([command, str(path)]) == 0, command
        assert main(["inspect", str(path), key]) == 0
        assert "intact" in capsys.readouterr().out
        assert main(["evict", str(path), "--to", "0%"]) == 0
        assert keys_of(path) == set()


def test_damage_is_found_under_a_secret_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with BlockStore.open(path, block_bytes=SIZE, ssd_bytes="8MiB", secret=True) as store:
        store.put(["k"], [bytes(SIZE)])
    (path / "secret").rename(tmp_path / "kept")
    # A frame that another store, with another secret, has under its own key for "k".
    with BlockStore.open(tmp_path / "o", block_bytes=SIZE, ssd_bytes="8MiB", secret=True) as other:
        other.put(["k"], [bytes(SIZE)])
    (tmp_path / "kept").rename(path / "secret")
    assert admin.verify_store(path, quiet)["bad"] == []
    foreign = tmp_path / "o" / "data.mdb"
    shutil.copy(foreign, path / "data.mdb")
    with pytest.raises(StoreError, match="different layouts|moved aside"), open_for_writing(path):
        pass


@pytest.mark.parametrize("is_right", [True, False])
def test_a_scrub_checks_keys_of_callers_against_the_secret(tmp_path: Path, is_right: bool) -> None:
    path = tmp_path / "k"
    with BlockStore.open(path, block_bytes=SIZE, ssd_bytes="8MiB", secret=True) as store:
        store.put(["k"], [bytes(SIZE)])
        store.flush()
        shared = inside(store)
        assert shared.writer is not None
        scrubber = Scrubber(
            shared.context,
            shared.writer,
            shared.format,
            bytes_per_second=1 << 30,
            keys_root=keys_root(secret_of(path) if is_right else None),
            wait=lambda _: False,
        )
        while not scrubber.stats()["passes"]:
            scrubber.step()
        scrubber.stop()
        assert shared.metrics.corrupt_blocks == ({} if is_right else {"identity": 1})


def test_an_archive_goes_into_a_store_with_the_same_secret_and_no_other(tmp_path: Path) -> None:
    path, file = tmp_path / "s", tmp_path / "s.tar"
    fill(path)
    export_store(path, file, (), quiet)
    with pytest.raises(StoreError, match="is missing"):
        import_store(file, tmp_path / "new", "8MiB", quiet)
    assert not (tmp_path / "new" / "VERSION").exists()
    for other, secret in (("other", True), ("open", False)):
        with open_cache(tmp_path / other, secret=secret):
            pass
        with pytest.raises(LayoutMismatch, match="found secret.*expected"):
            import_store(file, tmp_path / other, "8MiB", quiet)
        assert keys_of(tmp_path / other) == set()
    (tmp_path / "new").mkdir(mode=0o700, exist_ok=True)
    shutil.copy(path / "secret", tmp_path / "new" / "secret")
    result = import_store(file, tmp_path / "new", "8MiB", quiet)
    assert (result["imported_blocks"], result["refused_members"]) == (5, 0)
    assert_whole(tmp_path / "new")
    assert import_store(file, path, "8MiB", quiet)["present_blocks"] == 5


def test_an_archive_without_a_secret_does_not_go_into_a_store_with_one(tmp_path: Path) -> None:
    with open_cache(tmp_path / "open") as cache:
        cache.store(TOKENS[:-1], entries_of(DENSE, TOKENS[:-1]))
    export_store(tmp_path / "open", tmp_path / "open.tar", (), quiet)
    fill(tmp_path / "s")
    with pytest.raises(LayoutMismatch, match="found secret"):
        import_store(tmp_path / "open.tar", tmp_path / "s", "8MiB", quiet)


def test_generations_and_keys_of_callers_go_through_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with open_secret(path) as cache:
        cache.bump_generation()
    with BlockStore.open(tmp_path / "k", block_bytes=SIZE, ssd_bytes="8MiB", secret=True) as store:
        store.put(["k", "l"], [b"x" * SIZE] * 2, [None, "k"])
    for source in (path, tmp_path / "k"):
        target = source.with_name(source.name + "2")
        export_store(source, source.with_suffix(".tar"), (), quiet)
        target.mkdir(mode=0o700)
        shutil.copy(source / "secret", target / "secret")
        found = import_store(source.with_suffix(".tar"), target, "8MiB", quiet)
        assert found["imported_blocks"] == found["archive_blocks"] > 0
        assert admin.verify_store(target, quiet)["bad"] == []
    with open_secret(tmp_path / "s2") as cache:
        assert cache.namespace.generation == 1
