"""What opening checks before it trusts a directory and a file."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore import ConfigError, StoreError
from kvstore.tier.ssd import btree, database, file_system
from kvstore.tier.ssd import tier as ssd_module
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tier_of, tokens_of

TOKENS = tokens_of(6 * BLOCK + 1)


def fill(path: Path) -> None:
    with open_cache(path) as cache:
        cache.store(TOKENS, entries_of(DENSE, TOKENS))


@pytest.fixture
def lies_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let every path lie on a file system of a type."""

    def install(kind: str) -> None:
        monkeypatch.setattr(file_system, "type_of", lambda _: kind)

    return install


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("nfs4", "a network file system"),
        ("cifs", "a network file system"),
        ("virtiofs", "a network file system"),
        ("fuse.sshfs", "FUSE"),
        ("fuseblk", "FUSE"),
        ("fuse", "FUSE"),
    ],
)
def test_a_file_system_that_does_not_hold_locks_can_only_be_read(
    kind: str, what: str, tmp_path: Path, lies_on: Any
) -> None:
    fill(tmp_path / "s")
    lies_on(kind)
    for role in ("auto", "owner"):
        with pytest.raises(
            ConfigError, match=rf"is on {what} \({kind}\), expected a local disk"
        ) as error:
            open_cache(tmp_path / "s", role=role)
        assert "role='reader'" in str(error.value)
        with pytest.raises(ConfigError, match="is on"):
            open_cache(tmp_path / "new", role=role)
    assert not (tmp_path / "new").exists()
    with open_cache(tmp_path / "s", role="reader") as cache:
        assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK


@pytest.mark.parametrize(("kind", "warnings"), [("overlay", 1), ("ext4", 0), ("xfs", 0), ("", 0)])
def test_a_layered_file_system_is_a_warning_and_a_local_one_nothing(
    kind: str, warnings: int, tmp_path: Path, lies_on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lies_on(kind)
    fill(tmp_path / "s")
    assert [record.message.count("use a volume") for record in caplog.records] == [1] * warnings


def test_the_type_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = (
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:2 / {tmp_path}/with\\040space rw,relatime shared:1 master:2 - fuse.sshfs host:/ rw\n"
        f"3 2 0:3 / {tmp_path}/with\\040space/in rw - tmpfs tmpfs rw\n"
    )
    mounted(monkeypatch, mounts.encode())
    assert file_system.type_of(tmp_path / "with space") == "fuse.sshfs"
    assert file_system.type_of(tmp_path / "with space" / "new" / "deep") == "fuse.sshfs"
    assert file_system.type_of(tmp_path / "with space" / "in" / "s") == "tmpfs"
    assert file_system.type_of(tmp_path / "with") == "ext4"


def mounted(monkeypatch: pytest.MonkeyPatch, mounts: bytes) -> None:
    real = Path.read_bytes

    def read(self: Path) -> bytes:
        return mounts if str(self) == "/proc/self/mountinfo" else real(self)

    monkeypatch.setattr(Path, "read_bytes", read)


def test_a_mount_point_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.fsencode(tmp_path)
    mounted(
        monkeypatch,
        b"1 0 0:1 / / rw - ext4 /dev/a rw\n"
        b"2 1 0:2 / /media/caf\xe9 rw - vfat /dev/b rw\n"
        b"3 1 0:2 / /media/a\rb\x0bc\x85 rw - vfat /dev/b rw\n"
        b"4 1 0:2 / " + here + b"/caf\xe9 rw - tmpfs none rw\n"
        b"5 1 0:2 / " + here + b"/a\\040b\\011c\\012d\\134040 rw - xfs none rw\n",
    )
    assert file_system.type_of(tmp_path) == "ext4"
    assert file_system.type_of(tmp_path / os.fsdecode(b"caf\xe9") / "s") == "tmpfs"
    assert file_system.type_of(tmp_path / "a b\tc\nd\\040" / "s") == "xfs"
    fill(tmp_path / "s")


# ---- who may touch a store --------------------------------------------------------------------------


def as_kubernetes_gives_it(path: Path) -> None:
    """What a mount with ``fsGroup`` does to a volume. Source: SetVolumeOwnership of Kubernetes."""
    for item in (path, *path.rglob("*")):
        os.chown(item, -1, 4242 if not os.geteuid() else os.getegid())
        mode = stat.S_IMODE(item.stat().st_mode)
        item.chmod(mode | (0o2770 if item.is_dir() else 0o660))


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("role", ["auto", "owner", "reader"])
def test_a_store_that_was_given_to_a_group_is_taken_back_and_used(
    role: Any, secret: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with open_cache(path, secret=secret) as cache:
        cache.store(TOKENS, entries_of(DENSE, TOKENS))
    for mount in range(3):
        as_kubernetes_gives_it(path)
        with open_cache(path, secret=secret, role=role) as cache:
            assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK
        if role == "reader" and not secret:
            continue  # which has no say in it
        assert path.stat().st_mode & 0o077 == 0
        assert [item.name for item in path.iterdir() if item.stat().st_mode & 0o077] == []
        assert sum("it is private again" in line for line in caplog.messages) == mount + 1


def test_an_empty_directory_of_a_group_becomes_a_private_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    path.chmod(0o2770)
    fill(path)
    assert stat.S_IMODE(path.stat().st_mode) & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o1770])
def test_a_directory_for_everybody_is_left_as_it_is(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}\), expected .*; run chmod 700"):
        open_cache(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(path.iterdir()) == []


def test_what_is_no_store_is_never_made_private(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos").chmod(0o775)
    (tmp_path / "photos" / "one").touch()
    with pytest.raises(StoreError, match="is not a kvstore store"):
        open_cache(tmp_path / "photos")
    assert stat.S_IMODE((tmp_path / "photos").stat().st_mode) == 0o775


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "owner.lock", "VERSION"])
def test_a_file_of_somebody_else_in_our_store_is_refused_with_the_cure(
    name: str, tmp_path: Path
) -> None:
    fill(tmp_path / "s")
    os.chown(tmp_path / "s" / name, 4242, -1)
    with pytest.raises(ConfigError, match=rf"{name} belongs to user id 4242, expected 0.*chown 0"):
        open_cache(tmp_path / "s")


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "s")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    cure = rf"belongs to user id {mine}, expected {mine + 1}, .*run chown -R {mine + 1} on it"
    with pytest.raises(ConfigError, match=cure):
        open_cache(tmp_path / "s")


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "owner.lock", "VERSION"])
@pytest.mark.parametrize("role", ["owner", "reader"])
def test_a_file_of_a_store_that_is_a_link_is_refused_and_not_followed(
    name: str, role: str, tmp_path: Path
) -> None:
    path, outside = tmp_path / "s", tmp_path / "outside"
    fill(path)
    (path / name).rename(outside)
    before = outside.read_bytes()
    (path / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link, expected a file"):
        open_cache(path, role=role)
    assert outside.read_bytes() == before
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(ConfigError, match="no plain file"):
        open_cache(path, role=role)


def test_a_directory_that_is_a_link_is_followed(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with open_cache(tmp_path / "link") as cache:
        assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK


# ---- a store that was not closed ---------------------------------------------------------------------


def unclean(path: Path) -> None:
    fill(path)
    with lmdb.open(str(path), max_dbs=8, lib_version=0) as env:
        sys_db = env.open_db(b"sys")
        with env.begin(write=True) as txn:
            txn.put(b"clean", b"0", db=sys_db)


def spoil_a_value(path: Path) -> None:
    """Break the head of a payload, which LMDB believes when it frees its pages."""
    data = path / "data.mdb"
    page = int(btree.check(data).values["page"][-1])
    whole = bytearray(data.read_bytes())
    struct.pack_into("<I", whole, page * 4096 + 12, 1000)
    data.write_bytes(whole)


def test_after_an_unclean_end_the_heads_of_all_values_are_looked_at(tmp_path: Path) -> None:
    unclean(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 0
        assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK
    spoil_a_value(tmp_path / "s")
    with open_cache(tmp_path / "s") as cache:  # it was closed: its reads will find what is bad
        assert cache.stats()["counters"]["quarantined_stores"] == 0
    unclean(tmp_path / "t")
    spoil_a_value(tmp_path / "t")
    with open_cache(tmp_path / "t") as cache:
        assert cache.stats()["counters"]["quarantined_stores"] == 1
        cache.store(TOKENS, entries_of(DENSE, TOKENS))
        cache.flush()
        assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK


def test_a_look_that_takes_too_long_is_given_up_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(file: Path, values: object, seconds: float) -> str:
        assert seconds == database.HEADS_SECONDS
        raise TimeoutError

    unclean(tmp_path / "s")
    monkeypatch.setattr(btree, "problem_of_heads", slow)
    with open_cache(tmp_path / "s") as cache:
        assert cache.lookup(TOKENS).hit_tokens == 6 * BLOCK
    messages = [record.message for record in caplog.records]
    expected = "was not closed, and the check of its values takes more than 60 s: opened unchecked"
    assert [message for message in messages if "use a volume" not in message] == [
        f"{tmp_path / 's'} {expected}"
    ]


@pytest.mark.parametrize("write", ["commit", "sync"])
def test_slots_of_killed_readers_are_cleared_with_a_write_once_a_minute(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then such a slot keeps every page that was freed since."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    code = (
        "import lmdb, os, sys\n"
        "env = lmdb.open(sys.argv[1], lib_version=0, readonly=True)\n"
        "txn = env.begin()\n"
        "os.kill(os.getpid(), 9)"
    )

    with open_cache(tmp_path / "s") as cache:
        ssd = tier_of(cache)
        change: Callable[[], None] = (
            ssd.sync if write == "sync" else lambda: ssd.set_fact("any", b"")
        )
        change()
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
        now += ssd_module.READERS_SECONDS - 1
        change()
        before = ssd._env.readers()
        now += 1
        change()
        after = ssd._env.readers()
    assert len(before.splitlines()) > len(after.splitlines())


def test_a_meta_page_that_is_none_is_refused(tmp_path: Path) -> None:
    for place in (0, 1):
        path = tmp_path / str(place)
        fill(path)
        with (path / "data.mdb").open("r+b") as file:
            file.seek(place * 4096 + 16)
            file.write(b"\0" * 8)
        with pytest.raises(StoreError, match="cannot be read"):
            open_cache(path, role="reader")
        with open_cache(path) as cache:
            assert cache.stats()["counters"]["quarantined_stores"] == 1


def test_every_page_that_a_transaction_may_name_lies_within_the_file(tmp_path: Path) -> None:
    """A changed bit may name a page that the file has not got yet: behind its end that is SIGBUS."""
    path = tmp_path / "s"
    data = path / "data.mdb"
    cap = 8 << 20
    with open_cache(path, ssd_bytes=cap) as cache:
        ssd = tier_of(cache)
        commit = ssd.commit_blocks * ssd.block_bytes
        for seed in range(12):
            tokens = tokens_of(40 * BLOCK, seed)
            cache.store(tokens, entries_of(DENSE, tokens))
            cache.flush()
            room = data.stat().st_size - ssd.file_bytes
            assert min(commit, cap - ssd.file_bytes) <= room
            assert data.stat().st_size <= cap
        assert data.stat().st_blocks * 512 < data.stat().st_size, "it takes no room on the disk"
        end = ssd.file_bytes
    assert data.stat().st_size == end, "and is given back"


# ---- two processes of one number ---------------------------------------------------------------------

IN_A_CONTAINER = """
import sys
from pathlib import Path
from tests.stores import open_cache
try:
    with open_cache(Path(sys.argv[1]), role=sys.argv[2]):
        print("open", flush=True)
        sys.stdin.readline()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@contextmanager
def container(path: Path, role: str) -> Iterator[str]:
    """Open a store as process 1 of a process namespace of its own; give what it says."""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", IN_A_CONTAINER, str(path), role]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        pytest.skip("only who may make a namespace of processes has two of one number")
    yield said
    process.communicate("\n", timeout=60)


@pytest.mark.parametrize(("first", "second"), [("owner", "reader"), ("reader", "owner")])
def test_a_process_of_the_same_number_in_another_container_is_told_so(
    first: str, second: str, tmp_path: Path
) -> None:
    fill(tmp_path / "s")
    with container(tmp_path / "s", first) as one:
        assert one == "open\n"
        with container(tmp_path / "s", second) as other:
            assert other.startswith("StoreBusy ")
            assert "another reader with this process's number, 1" in other
            assert "shareProcessNamespace" in other
    with container(tmp_path / "s", second) as other:
        assert other == "open\n"
