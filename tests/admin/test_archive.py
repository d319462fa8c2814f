"""A store as one file and back: byte for byte, and nothing that a stranger put there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import BlockStore, ImageSpan, LayoutMismatch, Namespace, StoreBusy, StoreError
from kvstore.admin import archive
from kvstore.admin import inspect as admin
from kvstore.admin.access import open_for_reading
from kvstore.admin.archive import exporting
from kvstore.cli import main as cli
from kvstore.frame.format import FrameFormat
from kvstore.identity.block import BlockKey
from kvstore.tier.ssd.version_file import read_format
from tests.golden.make import ARCHIVE, archive_prompts
from tests.store.test_writer_faults import flip, payload_place
from tests.stores import (
    BLOCK,
    DENSE,
    WINDOWED,
    assert_entries,
    entries_of,
    open_cache,
    tokens_of,
    writer_of,
)

OTHER = Namespace(model="test", tenant="b", adapter="lora")


def nothing(done: int, total: int) -> None:
    pass


def fill(path: Path, **options: Any) -> None:
    """Forks, two namespaces and an image."""
    with open_cache(path, **options) as cache:
        for seed in range(4):
            tokens = tokens_of(10 * BLOCK + 1, seed)
            cache.store(tokens, entries_of(cache.layout, tokens))
        fork = np.concatenate([tokens_of(10 * BLOCK, 0)[: 4 * BLOCK], tokens_of(4 * BLOCK, 9)])
        cache.store(fork, entries_of(cache.layout, fork))
        tenant = cache.scope(OTHER)
        tokens = tokens_of(5 * BLOCK, 1)
        tenant.store(tokens, entries_of(cache.layout, tokens), images=[ImageSpan(1, 5, b"cat")])


def check(path: Path, **options: Any) -> None:
    """Read everything that ``fill`` stored, and compare it."""
    with open_cache(path, **options) as cache:
        fork = np.concatenate([tokens_of(10 * BLOCK, 0)[: 4 * BLOCK], tokens_of(4 * BLOCK, 9)])
        prompts = [(tokens_of(10 * BLOCK + 1, seed), 10) for seed in range(4)]
        for tokens, blocks in [*prompts, (np.append(fork, np.uint32(1)), 8)]:
            with cache.lookup(tokens) as match:
                assert match.hit_tokens == blocks * BLOCK
                assert_entries(cache.layout, cache.read(match), tokens, blocks * BLOCK)
        tenant, tokens = cache.scope(OTHER), tokens_of(5 * BLOCK, 1)
        with tenant.lookup(
            np.append(tokens, np.uint32(1)), images=[ImageSpan(1, 5, b"cat")]
        ) as match:
            assert match.hit_tokens == 5 * BLOCK
            assert_entries(cache.layout, tenant.read(match), tokens, 5 * BLOCK)
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0


def frames_of(path: Path) -> dict[bytes, tuple[bytes, bool, str]]:
    """What a store holds, but for what is its own: namespace numbers and times."""
    with open_for_reading(path) as store:
        found = {}
        for key, record in store.ssd.records():
            frame = bytearray(store.ssd.frame(key) or b"")
            store.frame_format.form_of(frame).renumber(frame, 0)
            found[bytes(key)] = bytes(frame), record.is_pinned, str(record.error)
        return found


def moved(path: Path, target: Path, name: str = "a.tar", **options: Any) -> dict[str, Any]:
    file = path.with_name(name)
    archive.export_store(path, file, (), nothing)
    return archive.import_store(file, target, options.get("ssd_bytes", "8MiB"), nothing)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.zst"])
@pytest.mark.parametrize("layout", [DENSE, WINDOWED])
def test_what_was_exported_reads_back_byte_for_byte_elsewhere(
    name: str, layout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file, target = tmp_path / "s", tmp_path / name, tmp_path / "t"
    fill(path, layout=layout)
    assert cli.main(["export", str(path), str(file), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["blocks"], out["bad_blocks"], out["vanished_blocks"]) == (49, 0, 0)
    assert out["file_bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    assert (file.read_bytes()[:4] == b"\x28\xb5\x2f\xfd") == name.endswith(".zst")
    arguments = ["import", str(file), str(target), "--ssd-bytes", "8MiB", "--json"]
    assert cli.main(arguments) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["imported_blocks"], got["present_blocks"], got["refused"]) == (49, 0, {})
    check(target, layout=layout)
    assert frames_of(path) == frames_of(target)
    assert admin.verify_store(target, nothing)["bad_blocks"] == 0
    assert cli.main(arguments[:-1]) == 0
    assert "0 blocks imported, 49 already present" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


def test_any_tar_tool_lists_the_blocks_parents_first(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    archive.export_store(tmp_path / "s", tmp_path / "a.tar", (), nothing)
    with open_for_reading(tmp_path / "s") as store:
        parents = {key.hex(): r.parent.hex() for key, r in store.ssd.records() if r.number}
        with tarfile.open(tmp_path / "a.tar") as tar:
            first, *members = tar.getmembers()
            manifest = json.load(tar.extractfile(first) or io.BytesIO())
            names = [member.name for member in members]
            frame = (tar.extractfile(members[3]) or io.BytesIO()).read()
        assert frame == store.ssd.frame(BlockKey(bytes.fromhex(names[3])))
        assert manifest["format"] == read_format(tmp_path / "s")
    assert first.name == "manifest.json"
    assert set(manifest) == {
        *("kvstore_archive", "kvstore", "format", "layout", "namespaces", "generations"),
    }
    assert [space["tenant"] for space in manifest["namespaces"].values()] == ["", "b"]
    for place, name in enumerate(names):
        assert name not in parents or parents[name] in names[:place]


def test_a_block_store_goes_with_its_keys_and_parents(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_bytes": 3000, "ssd_bytes": "4MiB"}
    keys = [f"k{i}" for i in range(30)]
    blocks = [np.random.default_rng(i).bytes(3000) for i in range(30)]
    parents = [None if i % 10 == 0 else keys[i - 1] for i in range(30)]
    with BlockStore.open(tmp_path / "s", **options) as store:
        assert all(store.put(keys, blocks, parents))
    result = moved(tmp_path / "s", tmp_path / "t", ssd_bytes="4MiB")
    assert (result["imported_blocks"], result["refused_members"]) == (30, 0)
    with BlockStore.open(tmp_path / "t", **options) as store:
        buffers = [bytearray(3000) for _ in keys]
        assert all(store.get(keys, buffers))
        assert [bytes(buffer) for buffer in buffers] == blocks
        assert store.delete([keys[10]]) == 10
    assert admin.verify_store(tmp_path / "t", nothing)["bad_blocks"] == 0


def test_a_store_that_packs_at_rest_moves_packed_and_lossless_blocks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ssd_formats": {"v": "nvfp4"}, "error_budget": 0.2}
    path, target = tmp_path / "s", tmp_path / "t"
    with open_cache(path, **options) as cache:
        normal = np.random.default_rng(0).normal(size=(3, 4 * BLOCK, 64)).astype(np.float32)
        fine = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        cache.store(tokens_of(4 * BLOCK, 1), {"k": fine, "v": fine})
        wild = tokens_of(4 * BLOCK, 2)
        cache.store(wild, entries_of(DENSE, wild))
        cache.flush()
        before = [
            cache.read(cache.lookup(np.append(tokens_of(4 * BLOCK, n), np.uint32(0))))
            for n in (1, 2)
        ]
    moved(path, target, "a.tar.zst")
    assert frames_of(path) == frames_of(target)
    stats = admin.store_stats(target)
    assert (stats["packed_blocks"], stats["lossless_blocks"]) == (4, 4)
    with open_cache(target, **options) as cache:
        for n, old in zip((1, 2), before, strict=True):
            found = cache.read(cache.lookup(np.append(tokens_of(4 * BLOCK, n), np.uint32(0))))
            assert found.tokens == 4 * BLOCK
            for name in old:
                np.testing.assert_array_equal(found[name], old[name])


def test_pins_lives_and_the_order_of_use_are_kept(tmp_path: Path) -> None:
    path, target = tmp_path / "s", tmp_path / "t"
    until = time.time() + 5000
    with open_cache(path) as cache:
        for seed in range(6):
            tokens = tokens_of(6 * BLOCK + 1, seed)
            cache.store(
                tokens, entries_of(DENSE, tokens), pin=seed == 1, ttl=5000 if seed == 2 else None
            )
            cache.flush()
        gone = tokens_of(2 * BLOCK, 99)
        cache.store(gone, entries_of(DENSE, gone), ttl=0.001)
        with cache.lookup(tokens_of(6 * BLOCK + 1, 0)):  # the oldest becomes the newest
            pass
        with cache.lookup(tokens_of(6 * BLOCK + 1, 3)[: 2 * BLOCK + 1]):  # but only its head
            pass
    time.sleep(0.01)
    result = moved(path, target)
    assert (result["imported_blocks"], result["expired_blocks"]) == (36, 0 + 2)

    def evicted(store: Path) -> list[bytes]:
        with open_cache(store) as cache:
            side = writer_of(cache)
            order: list[bytes] = []
            while keys := side.index.evict(1, 0.0):
                order += keys
            assert side.index.blocks == 6
            return order

    with open_for_reading(target) as store:
        lives = {
            round(record.expires - until, -2) for _, record in store.ssd.records() if record.expires
        }
        assert lives == {0.0}
        assert sum(record.is_pinned for _, record in store.ssd.records()) == 6
    gone_keys = set(frames_of(path)) - set(frames_of(target))
    assert evicted(target) == [key for key in evicted(path) if key not in gone_keys]


def test_an_import_merges_and_what_is_there_stays(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    shared, mine = tokens_of(4 * BLOCK + 1, 0), tokens_of(4 * BLOCK + 1, 7)
    fill(a)
    with open_cache(b, namespace=Namespace(model="another")) as cache:
        cache.store(mine, entries_of(DENSE, mine))
        cache.scope(Namespace(model="test")).store(shared, entries_of(DENSE, mine))
    before = frames_of(b)
    result = moved(a, b)
    assert result["present_blocks"] == 4
    assert result["imported_blocks"] == 49 - 4
    after = frames_of(b)
    assert {key: after[key] for key in before} == before
    assert set(after) == set(before) | set(frames_of(a))
    spaces = {n["model"] + n["tenant"]: n["blocks"] for n in admin.store_stats(b)["namespaces"]}
    assert spaces == {"another": 4, "test": 44, "testb": 5}
    assert admin.verify_store(b, nothing)["bad_blocks"] == 0


def test_one_namespace_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "s")
    arguments = ["export", str(tmp_path / "s"), str(tmp_path / "a.tar"), "--namespace"]
    assert cli.main([*arguments, "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 5
    assert cli.main([*arguments, "1", "--namespace", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 49
    assert cli.main([*arguments, "7"]) == 2
    assert "expected some of: 1, 2" in capsys.readouterr().err


def test_a_new_generation_goes_along(tmp_path: Path) -> None:
    path, target = tmp_path / "s", tmp_path / "t"
    tokens = tokens_of(3 * BLOCK + 1)
    with open_cache(path) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        cache.bump_generation()
    moved(path, target)
    with open_cache(target) as cache:
        assert cache.namespace.generation == 1
        assert cache.lookup(tokens).hit_tokens == 0


def test_bad_blocks_are_left_out_with_what_hangs_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tokens = tmp_path / "s", tokens_of(10 * BLOCK + 1, 2)
    fill(path)
    flip(path, payload_place(path, tokens, 6))
    assert cli.main(["export", str(path), str(tmp_path / "a.tar"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["bad"] == {"checksum": 1, "parent": 3}
    assert (
        err
        == "kvstore: 4 blocks were left out, bad ones and their descendants: checksum 1, parent 3\n"
    )
    result = archive.import_store(tmp_path / "a.tar", tmp_path / "t", "8MiB", nothing)
    assert (result["imported_blocks"], result["refused_members"]) == (45, 0)
    with open_cache(tmp_path / "t") as cache:
        assert cache.lookup(tokens).hit_tokens == 6 * BLOCK


def test_an_export_beside_its_owner_counts_what_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path)
    reading = exporting.stored_fault  # type: ignore[attr-defined]

    def missing(*args: Any, **options: Any) -> str | None:
        return "missing" if args[3].number == 9 else reading(*args, **options)

    monkeypatch.setattr(exporting, "stored_fault", missing)
    found = archive.export_store(path, tmp_path / "a.tar", (), nothing)
    assert (found["vanished_blocks"], found["bad_blocks"], found["blocks"]) == (4, 0, 45)


def test_a_disk_that_fills_up_leaves_no_half_archive_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "s")
    file = tmp_path / "a.tar"
    file.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting._Export, "write_blocks", full)
    with pytest.raises(StoreError, match=r"a.tar cannot be written: No space left"):
        archive.export_store(tmp_path / "s", file, (), nothing)
    assert file.read_text() == "old"
    assert not (tmp_path / "a.tar.partial").exists()


def test_an_import_under_a_small_cap_keeps_the_newest(tmp_path: Path) -> None:
    path, target = tmp_path / "s", tmp_path / "t"
    with open_cache(path) as cache:
        for seed in range(60):
            tokens = tokens_of(8 * BLOCK + 1, seed)
            cache.store(tokens, entries_of(DENSE, tokens), wait=30)
    result = moved(path, target, ssd_bytes="1MiB")
    assert result["evicted_blocks"] > 0
    assert result["blocks"] + result["evicted_blocks"] == result["imported_blocks"]
    assert result["dropped_blocks"] == result["refused_members"] == 0
    assert (target / "data.mdb").stat().st_size <= 1 << 20
    with open_cache(target, ssd_bytes="1MiB") as cache:
        assert cache.lookup(tokens_of(8 * BLOCK + 1, 59)).hit_tokens == 8 * BLOCK
        assert cache.lookup(tokens_of(8 * BLOCK + 1, 0)).hit_tokens == 0


# ---- whom not to trust -------------------------------------------------------------------------------


Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def members(tmp_path: Path) -> Members:
    """The members of an archive of one chain of six blocks, manifest first."""
    with open_cache(tmp_path / "s") as cache:
        tokens = tokens_of(6 * BLOCK)
        cache.store(tokens, entries_of(DENSE, tokens))
    archive.export_store(tmp_path / "s", tmp_path / "a.tar", (), nothing)
    with tarfile.open(tmp_path / "a.tar") as tar:
        return [(info, (tar.extractfile(info) or io.BytesIO()).read()) for info in tar]


def pack(path: Path, found: Members, end: bytes = b"\0" * 1024) -> Path:
    data = b""
    for info, content in found:
        data += info.tobuf(tarfile.USTAR_FORMAT) + content + b"\0" * (-len(content) % 512)
    path.write_bytes(data + end)
    return path


def info(
    name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, link
    return made


def edited(content: bytes, **changes: Any) -> bytes:
    """A frame with another header, all its checksums right."""
    form = FrameFormat(DENSE, BLOCK)
    header = form.header(memoryview(content))
    assert header is not None
    frame = bytearray(content)
    form.seal(frame, replace(header, **changes))
    return bytes(frame)


def swap(found: Members, place: int, content: bytes, name: str | None = None) -> Members:
    made = info(name or found[place][0].name, len(content))
    return [*found[:place], (made, content), *found[place + 1 :]]


STRANGE: dict[str, tuple[Callable[[Members], Members], dict[str, int], int]] = {
    "absolute name": (lambda m: [*m, (info("/etc/passwd", 3), b"abc")], {"name": 1}, 6),
    "climbing name": (lambda m: [*m, (info("../../x", 3), b"abc")], {"name": 1}, 6),
    "upper case": (lambda m: swap(m, 6, m[6][1], m[6][0].name.upper()), {"name": 1}, 5),
    "a second manifest": (lambda m: [*m, m[0]], {"name": 1}, 6),
    "symbolic link": (
        lambda m: [m[0], (info("ab" * 16, 0, tarfile.SYMTYPE, "/etc/passwd"), b""), *m[1:]],
        {"type": 1},
        6,
    ),
    "hard link": (lambda m: [*m, (info("ab" * 16, 0, tarfile.LNKTYPE, "x"), b"")], {"type": 1}, 6),
    "directory": (lambda m: [*m, (info("d", 0, tarfile.DIRTYPE), b"")], {"type": 1}, 6),
    "device": (lambda m: [*m, (info("d", 0, tarfile.CHRTYPE), b"")], {"type": 1}, 6),
    "long name": (lambda m: [*m, (info("l", 9, tarfile.GNUTYPE_LONGNAME), b"x" * 9)], {"type": 1}, 6),
    "extended header": (lambda m: [*m, (info("p", 9, tarfile.XHDTYPE), b"x" * 9)], {"type": 1}, 6),
    "a large member": (lambda m: [m[0], (info("ab" * 16, 1 << 20), bytes(1 << 20)), *m[1:]], {"size": 1}, 6),
    "a small member": (lambda m: swap(m, 6, m[6][1][:100]), {"header": 1}, 5),
    "another block's name": (lambda m: swap(m, 6, m[6][1], "ab" * 16), {"identity": 1}, 5),
    "another block's frame": (lambda m: swap(m, 6, m[5][1]), {"identity": 1}, 5),
    "a flipped payload": (
        lambda m: swap(m, 4, m[4][1][:-1] + bytes([m[4][1][-1] ^ 1])),
        {"checksum": 1, "parent": 2},
        3,
    ),
    "an unknown namespace": (lambda m: swap(m, 6, edited(m[6][1], namespace_id=9)), {"namespace": 1}, 5),
    "another number": (lambda m: swap(m, 6, edited(m[6][1], number=9)), {"identity": 1}, 5),
    "a block that says it is the first": (lambda m: swap(m, 6, edited(m[6][1], number=0)), {"identity": 1}, 5),
    "a claimed image": (
        lambda m: swap(m, 1, edited(m[1][1], has_images=True, parent_hash=b"x" * 32)),
        {"identity": 1, "parent": 5},
        0,
    ),
    "packed, it says": (
        lambda m: swap(m, 6, m[6][1][:6] + b"\x02" + m[6][1][7:]), {"header": 1}, 5
    ),
    "children first": (lambda m: [m[0], *m[:0:-1]], {"parent": 5}, 1),
    "a gap": (lambda m: [*m[:3], *m[4:]], {"parent": 3}, 2),
    "twice": (lambda m: [*m, *m[1:]], {}, 6),
    "a use of nothing": (lambda m: [m[0], (info("ab" * 16), b""), *m[1:]], {}, 6),
    "no block": (lambda m: m[:1], {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_does_not_belong_is_refused_counted_and_the_rest_taken(
    name: str, members: Members, tmp_path: Path
) -> None:
    change, refused, good = STRANGE[name]
    before = sorted(tmp_path.iterdir())
    file = pack(tmp_path / "b.tar", change(members))
    result = archive.import_store(file, tmp_path / "t", "8MiB", nothing)
    assert (result["refused"], result["imported_blocks"], result["damage"]) == (refused, good, None)
    assert sorted(tmp_path.iterdir()) == [*before[:1], file, *before[1:], tmp_path / "t"]
    assert admin.verify_store(tmp_path / "t", nothing)["bad_blocks"] == 0
    with open_cache(tmp_path / "t") as cache:
        tokens = tokens_of(6 * BLOCK + 1)[:-1]
        with cache.lookup(np.append(tokens_of(6 * BLOCK), np.uint32(1))) as match:
            found = cache.read(match)
            assert found.tokens == good * BLOCK
            assert_entries(DENSE, found, tokens_of(6 * BLOCK), found.tokens)
        assert len(tokens) == 6 * BLOCK


@pytest.mark.parametrize(
    ("end", "damage"),
    [
        (b"", "cut short"),
        (b"\0" * 100, "cut short"),
        (b"junk" * 256, "a header is damaged"),
        (info("ab" * 16, 1 << 40).tobuf(tarfile.GNU_FORMAT), "claims 1099511627776 bytes"),
        (info("ab" * 16, 1000).tobuf(tarfile.USTAR_FORMAT) + b"x" * 700, "cut short"),
    ],
)
def test_a_damaged_archive_gives_what_came_before(
    end: bytes, damage: str, members: Members, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pack(tmp_path / "b.tar", members, end)
    arguments = ["import", str(file), str(tmp_path / "t"), "--ssd-bytes=8MiB"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out.startswith("6 blocks imported")
    assert damage in err
    assert err.count("\n") == 1


def manifest_of(members: Members, **changes: Any) -> bytes:
    return json.dumps({**json.loads(members[0][1]), **changes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"kvstore_archive": 2},
        {"format": None},
        {"format": "{}"},
        {"format": "x" * 20000},
        {"namespaces": 3},
        {"namespaces": [[[], 1]]},
        {"generations": 7},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_and_nothing_made(
    changes: dict[str, Any], members: Members, tmp_path: Path
) -> None:
    content = manifest_of(members, **changes)
    file = pack(tmp_path / "b.tar", swap(members, 0, content))
    with pytest.raises(StoreError):
        archive.import_store(file, tmp_path / "t", "8MiB", nothing)
    assert not (tmp_path / "t").exists()


def test_a_format_that_is_spelled_otherwise_is_refused(members: Members, tmp_path: Path) -> None:
    text = json.loads(members[0][1])["format"]
    content = manifest_of(members, format=text.replace(",", ",\n"))
    file = pack(tmp_path / "b.tar", swap(members, 0, content))
    with pytest.raises(StoreError, match="canonical form"):
        archive.import_store(file, tmp_path / "t", "8MiB", nothing)


@pytest.mark.parametrize(
    "spaces", [{}, [[1, {}]], {"1": {}}, {"1": {"model": 7}}, {"x": {}}, {"1": None}]
)
def test_blocks_of_a_namespace_that_is_not_named_are_refused(
    spaces: Any, members: Members, tmp_path: Path
) -> None:
    file = pack(tmp_path / "b.tar", swap(members, 0, manifest_of(members, namespaces=spaces)))
    result = archive.import_store(file, tmp_path / "t", "8MiB", nothing)
    assert result["refused"] == {"namespace": 6}


def test_a_namespace_cannot_be_claimed_by_another_name(members: Members, tmp_path: Path) -> None:
    """Blocks hang on the root of the namespace they say, not of one that somebody wishes for."""
    (space,) = json.loads(members[0][1])["namespaces"].values()
    content = manifest_of(members, namespaces={"1": {**space, "tenant": "victim"}})
    file = pack(tmp_path / "b.tar", swap(members, 0, content))
    result = archive.import_store(file, tmp_path / "t", "8MiB", nothing)
    assert result["refused"] == {"identity": 1, "parent": 5}


def test_generations_of_strangers_are_not_taken(members: Members, tmp_path: Path) -> None:
    content = manifest_of(members, generations={"ab" * 32: 5, "clean": 1, "x": -1})
    archive.import_store(
        pack(tmp_path / "b.tar", swap(members, 0, content)), tmp_path / "t", "8MiB", nothing
    )
    with open_for_reading(tmp_path / "t") as store:
        assert store.ssd.facts("generation:") == {}


def test_another_layout_is_refused_and_the_store_left_alone(
    members: Members, tmp_path: Path
) -> None:
    fill(tmp_path / "w", layout=WINDOWED)
    before = frames_of(tmp_path / "w")
    with pytest.raises(LayoutMismatch, match="left untouched"):
        archive.import_store(tmp_path / "a.tar", tmp_path / "w", "8MiB", nothing)
    assert frames_of(tmp_path / "w") == before


def test_an_owned_target_is_busy(members: Members, tmp_path: Path) -> None:
    with open_cache(tmp_path / "t"), pytest.raises(StoreBusy):
        archive.import_store(tmp_path / "a.tar", tmp_path / "t", "8MiB", nothing)


@pytest.mark.parametrize("content", [b"", b"x" * 2000, b"\0" * 4096, b"\x28\xb5\x2f\xfdjunk"])
def test_what_is_no_archive_is_bad_input(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(content)
    arguments = ["import", str(tmp_path / "x"), str(tmp_path / "t"), "--ssd-bytes", "8MiB"]
    assert cli.main(arguments) == 2
    assert "is not an archive of a store" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_zstd_stream_that_was_cut_or_wants_too_much_memory_is_damage(
    members: Members, tmp_path: Path
) -> None:
    fill(tmp_path / "f")
    archive.export_store(tmp_path / "f", tmp_path / "a.tar.zst", (), nothing)
    data = (tmp_path / "a.tar.zst").read_bytes()
    (tmp_path / "cut.zst").write_bytes(data[: len(data) * 3 // 4])
    result = archive.import_store(tmp_path / "cut.zst", tmp_path / "t", "8MiB", nothing)
    assert "cut short" in result["damage"]
    assert 0 < result["imported_blocks"] < 49
    wide = zstandard.ZstdCompressionParameters(window_log=30)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    (tmp_path / "wide.zst").write_bytes(packer.compress(bytes(1 << 20)) + packer.flush())
    with pytest.raises(StoreError, match="is not an archive"):
        archive.import_store(tmp_path / "wide.zst", tmp_path / "u", "8MiB", nothing)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_change_of_bytes_crashes_an_import_or_brings_wrong_blocks(
    data: st.DataObject, members: Members, tmp_path: Path
) -> None:
    raw = bytearray((tmp_path / "a.tar").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    target = tmp_path / f"t{os.urandom(8).hex()}"
    (tmp_path / "b.tar").write_bytes(raw)
    try:
        archive.import_store(tmp_path / "b.tar", target, "8MiB", nothing)
    except (StoreError, ValueError):
        return
    assert admin.verify_store(target, nothing)["bad_blocks"] == 0
    try:
        cache = open_cache(target)
    except LayoutMismatch:
        return
    with cache, cache.lookup(np.append(tokens_of(6 * BLOCK), np.uint32(1))) as match:
        found = cache.read(match)
        assert_entries(DENSE, found, tokens_of(6 * BLOCK), found.tokens)


def test_the_golden_archive_is_read_for_ever(tmp_path: Path) -> None:
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    assert digest == "b3fd1c97274389f00b2d8ef42b1e51b912e419172e9fa80c126bcbb682eb9879"
    result = archive.import_store(ARCHIVE, tmp_path / "t", "8MiB", nothing)
    assert (result["imported_blocks"], result["refused"], result["damage"]) == (6, {}, None)
    with open_cache(tmp_path / "t", WINDOWED) as cache:
        for tokens in archive_prompts():
            with cache.lookup(np.append(tokens, np.uint32(0))) as match:
                found = cache.read(match)
                assert_entries(WINDOWED, found, tokens, len(tokens))
        assert len(writer_of(cache).retention.pinned) > 0
