"""Whatever lies where a store's files are, or in what it says of itself: an error of ours, at once."""

from __future__ import annotations

import io
import json
import os
import random
import re
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockStore, ConfigError, KVStoreError, LayerGroup, Layout
from kvstore.admin import inspect as admin
from kvstore.admin import upkeep
from kvstore.admin.archive import export_store, import_store
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tokens_of

TOKENS = tokens_of(4 * BLOCK + 1)
SECONDS = 60.0
"""Far above what any call takes, so what reaches it hangs."""


def quiet(done: int, total: int) -> None:
    pass


def fill(path: Path) -> None:
    with open_cache(path, secret=True) as cache:
        cache.store(TOKENS, entries_of(DENSE, TOKENS))


def outcome(call: Callable[[], Any]) -> BaseException | None:
    """Do a call in a thread of its own; return what it raised. Fails if it hangs."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


# ---- files that are none -----------------------------------------------------------------------------


def fifo(place: Path) -> None:
    os.mkfifo(place)


def listening(place: Path) -> None:
    here = os.open(place.parent, os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{place.name}")  # a path as such may be too long for one
    os.close(here)


def loop(place: Path) -> None:
    place.symlink_to(place.name)


def dangling(place: Path) -> None:
    place.symlink_to("nowhere")


def folder(place: Path) -> None:
    place.mkdir()
    (place / "in").touch()


def empty(place: Path) -> None:
    place.touch()


KINDS = [fifo, listening, loop, dangling, folder, empty]
NAMES = [
    *("owner.lock", "data.mdb", "lock.mdb", "VERSION", "secret"),
    *("VERSION.partial", "secret.partial", "compacting"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_no_call_hangs_or_dies_of_a_file_that_is_none(
    name: str, kind: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    fill(path)
    export_store(path, tmp_path / "a.tar", (), quiet)
    kept = tmp_path / "kept"
    if (path / name).exists():
        (path / name).rename(kept)
    calls: list[Callable[[], Any]] = [
        *(lambda role=role: open_cache(path, secret=True, role=role).close() for role in ROLES),
        lambda: BlockStore.open(path, block_bytes=64).close(),
        lambda: admin.store_stats(path),
        lambda: admin.verify_store(path, quiet),
        lambda: upkeep.evict(path, "100%"),
        lambda: upkeep.compact(path),
        lambda: export_store(path, tmp_path / "b.tar", (), quiet),
        lambda: import_store(tmp_path / "a.tar", path, "8MiB", quiet),
    ]
    for call in calls:
        clear(path / name)
        kind(path / name)
        error = outcome(call)
        assert error is None or isinstance(error, KVStoreError), repr(error)
    assert not (tmp_path / "nowhere").exists()
    assert not (path / "nowhere").exists(), "a link was followed"


ROLES: tuple[Any, ...] = ("auto", "owner", "reader")


def clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        for item in place.iterdir():
            item.unlink()
        place.rmdir()
    else:
        place.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [fifo, listening, loop, dangling, folder])
@pytest.mark.parametrize("name", NAMES[:5])
def test_a_new_store_is_not_made_over_a_file_that_is_none(
    name: str, kind: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    kind(tmp_path / "s" / name)
    error = outcome(lambda: open_cache(tmp_path / "s", secret=True).close())
    assert isinstance(error, ConfigError), repr(error)


# ---- what a store says of itself ---------------------------------------------------------------------

HOSTILE: list[str] = [
    *("Infinity", "-Infinity", "NaN", "1e999", "16.0", "-1", "0", "true", "null", '"16"', '""'),
    *("[]", "{}", '"\\ud800"', "18446744073709551616", "1" * 400, "9" * 5000, '"x"', "[16.0]"),
    *("[[]]", "[true]", '{"a": 1}', "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000),
    json.dumps(list(range(300_000))),
]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for name, below in rows:
            yield from leaves(below, (*path, name))


def with_value(value: Any, path: tuple[Any, ...], text: str) -> str:
    """Return a JSON value as a text, with another text at one place."""
    mark = "\x01here\x01"
    copy = json.loads(json.dumps(value))
    at = copy
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = mark
    return json.dumps(copy, separators=(",", ":")).replace(json.dumps(mark), text)


def test_a_version_file_with_any_value_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    version = path / "VERSION"
    first, second = version.read_text().splitlines()
    good = json.loads(second)
    for place in leaves(good):
        if place[0] == "groups" and len(place) > 1 and place[1] != 0:
            continue  # one group is like another
        for text in HOSTILE:
            changed = with_value(good, place, text)
            if changed == second or (place == ("secret",) and text == '""'):
                continue  # empty is how a store without one spells it
            version.write_text(f"{first}\n{changed}\n")
            error = outcome(lambda: admin.store_stats(path))
            assert isinstance(error, KVStoreError), (place, text[:40], repr(error))
            assert len(str(error)) < 2000
    error = outcome(lambda: open_cache(path, secret=True))
    assert isinstance(error, KVStoreError), repr(error)
    version.write_text(f"{first}\n{second}\n")
    assert admin.verify_store(path, quiet)["bad_blocks"] == 0


def archive_with(file: Path, manifest: str, target: Path) -> None:
    with tarfile.open(file) as source, tarfile.open(target, "w") as made:
        for member in source:
            data = source.extractfile(member)
            assert data is not None
            content = manifest.encode() if member.name == "manifest.json" else data.read()
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))


def test_an_import_of_any_manifest_leaves_a_store_that_can_be_looked_at(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        cache.store(TOKENS, entries_of(DENSE, TOKENS))
        cache.bump_generation()
        cache.store(TOKENS, entries_of(DENSE, TOKENS))
    export_store(tmp_path / "s", tmp_path / "a.tar", (), quiet)
    with tarfile.open(tmp_path / "a.tar") as archive:
        data = archive.extractfile("manifest.json")
        assert data is not None
        good = json.loads(data.read())
    texts = [text for text in HOSTILE if len(text) < 20_000]
    inside = json.loads(good["format"])
    spelled = [
        with_value(inside, place, text)
        for place in leaves(inside)
        if not (place[0] == "groups" and len(place) > 1 and place[1] != 0)
        for text in texts
    ]
    manifests = [with_value(good, place, text) for place in leaves(good) for text in texts]
    manifests += [with_value(good, ("format",), json.dumps(text)) for text in spelled]
    typed = [m for m in manifests if re.search(r"16\.0|Infinity|:true", m)]
    chosen = typed[:100] + random.Random(16).sample(manifests, 100)  # all of them take a minute
    for number, manifest in enumerate(chosen):
        target = tmp_path / f"t{number}"
        archive_with(tmp_path / "a.tar", manifest, tmp_path / "b.tar")
        error = outcome(partial(import_store, tmp_path / "b.tar", target, "8MiB", quiet))
        assert error is None or isinstance(error, KVStoreError), (manifest[:300], repr(error))
        if target.exists() and (target / "VERSION").exists():
            admin.store_stats(target)
            with suppress(KVStoreError), open_cache(target) as cache:
                cache.lookup(TOKENS)
                cache.stats()


def test_a_layout_too_large_to_write_down_is_refused_before_a_store_is_made(tmp_path: Path) -> None:
    groups = tuple(
        LayerGroup(name=f"group-{n:04}", layers=(n,), values=64, entry_format="u8")
        for n in range(200)
    )
    with pytest.raises(ConfigError, match="bytes of JSON, expected at most 16384"):
        open_cache(tmp_path / "s", Layout(model="large", groups=groups), ssd_bytes="64MiB")
    assert not (tmp_path / "s" / "VERSION").exists()
