"""Power cuts: a journal of a writer's file operations, and the disk images that a cut may leave.

A cut comes after any call, or during one. Data synced before it is on disk. Of other data, any sector may
be on disk or not, in the version of any write; a file may have grown without its data; and a name may be
missing until its directory was synced. After a *failed* sync the kernel drops the pending pages: each
sector either reached the disk or never will, even if later syncs succeed.
"""

from __future__ import annotations

import errno
import json
import random
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from tests.torture import preload
from tests.torture.prompts import Promise, check, prompts
from tests.torture.runner import Case, Death, Finding, Kind, in_child
from tests.torture.writer import as_text, whole_batches, without_sync, write

OPENED, WRITTEN, WRITTEN_SYNC, RESIZED, SYNCED, SYNC_FAILED, RENAMED, MARKED, MADE_FOLDER = range(
    1, 10
)
_HEAD = struct.Struct("<IIQQ")
IMAGES_PER_JOURNAL = 100
PAGE = 4096
PROMPTS = 24
STEPS = 30
CAP = 1 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """One call of the writer."""

    kind: int
    inode: int
    offset: int
    data: bytes


def events_of(journal: bytes) -> list[Event]:
    """Return the calls in a journal."""
    found, at = [], 0
    while at < len(journal):
        kind, size, inode, offset = _HEAD.unpack_from(journal, at)
        at += _HEAD.size
        found.append(Event(kind, inode, offset, journal[at : at + size]))
        at += size
    return found


@dataclass(slots=True)
class _File:
    """A file: its synced content, and the later calls in order."""

    disk: bytearray = field(default_factory=bytearray)
    cache: bytearray = field(default_factory=bytearray)
    """The file as its writer reads it."""
    pending: list[Event] = field(default_factory=list)

    def ask(self, event: Event) -> None:
        """Apply a call. The kernel writes back whole pages of its cache, not the written bytes."""
        if event.kind == RESIZED:
            _resize(self.cache, event.offset)
            self.pending.append(event)
            return
        _write(self.cache, event.offset, event.data)
        start = event.offset // PAGE * PAGE
        stop = min(-(-(event.offset + len(event.data)) // PAGE) * PAGE, len(self.cache))
        whole = bytes(self.cache[start:stop])
        self.pending.append(Event(event.kind, event.inode, start, whole))

    def split_at(self, keep: _Keep | None) -> None:
        """Write the pending calls to disk: all of them, or those that ``keep`` chooses."""
        for event in self.pending:
            if event.kind == RESIZED:
                if keep is None or keep.whole():
                    _resize(self.disk, event.offset)
            elif keep is None or event.kind == WRITTEN_SYNC:
                _write(self.disk, event.offset, event.data)
            else:
                for start, stop in keep.sectors(event.offset, len(event.data)):
                    begin = event.offset
                    _write(self.disk, start, event.data[start - begin : stop - begin])
                if keep.whole():  # size and data reach the disk independently
                    end = event.offset + len(event.data)
                    _resize(self.disk, max(len(self.disk), end))
        self.pending = []


def _write(disk: bytearray, offset: int, data: bytes) -> None:
    _resize(disk, max(len(disk), offset + len(data)))
    disk[offset : offset + len(data)] = data


def _resize(disk: bytearray, size: int) -> None:
    if size < len(disk):
        del disk[size:]
    else:
        disk.extend(bytes(size - len(disk)))


class _Keep:
    """The choice of unsynced sectors that reached the disk: independent, with one probability per cut."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sector = rng.choice([512, 4096])
        self._chance = rng.choice([0.0, 0.05, 0.5, 0.95, 1.0, rng.random()])

    def whole(self) -> bool:
        return self._rng.random() < self._chance

    def sectors(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        at, stop = offset, offset + size
        while at < stop:
            end = min(stop, (at // self._sector + 1) * self._sector)
            if self.whole():
                yield at, end
            at = end


class Disk:
    """The disk during the replay of a journal."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._files: dict[int, _File] = {}
        self._inode: dict[str, int] = {}
        """The inode of every name, as the writer sees it."""
        self._folders: set[int] = set()
        self._names: dict[str, int] = {}
        """Synced names."""
        self._renames: list[tuple[str, tuple[str, ...], dict[str, int]]] = []
        """Unsynced changes of names: their directory, removed names, new names."""

    def play(self, event: Event) -> None:
        """Apply one call."""
        if event.kind == OPENED:
            name = event.data.decode()
            self._inode[name] = event.inode
            if event.offset:
                self._files[event.inode] = _File()
                self._change(name, (), {name: event.inode})
        elif event.kind == MADE_FOLDER:
            name = event.data.decode()
            self._inode[name] = event.inode
            self._folders.add(event.inode)
            self._change(name, (), {name: event.inode})
        elif event.kind == RENAMED:
            old, new = (part.decode() for part in event.data.split(b"\0"))
            self._inode[new] = self._inode.pop(old)
            self._change(new, (old,), {new: self._inode[new]})
        elif event.kind in (SYNCED, SYNC_FAILED):
            keep = None if event.kind == SYNCED else _Keep(self._rng)
            self._file(event.inode).split_at(keep)
            if event.kind == SYNCED:
                self._sync_names(event.inode)
        else:
            self._file(event.inode).ask(event)

    def _file(self, inode: int) -> _File:
        return self._files.setdefault(inode, _File())

    def _change(self, name: str, gone: tuple[str, ...], come: dict[str, int]) -> None:
        self._renames.append((str(PurePosixPath(name).parent), gone, come))

    def _apply(self, gone: tuple[str, ...], come: dict[str, int]) -> None:
        for name in gone:
            self._names.pop(name, None)
        self._names.update(come)

    def _sync_names(self, inode: int) -> None:
        folders = {name for name, found in self._inode.items() if found == inode} | (
            {"."} if inode == self._inode.get("") else set()
        )
        left = []
        for folder, gone, come in self._renames:
            if folder in folders:
                self._apply(gone, come)
            else:
                left.append((folder, gone, come))
        self._renames = left

    def cut(self, to: Path) -> None:
        """Write the disk after a cut to ``to``."""
        keep = _Keep(self._rng)
        for file in self._files.values():
            file.split_at(keep)
        names = _Keep(self._rng)
        for _, gone, come in self._renames:
            if names.whole():
                self._apply(gone, come)
        for name in sorted(self._names):  # folders before their contents
            inode, place = self._names[name], to / name
            if inode in self._folders:
                place.mkdir(mode=0o700)
            elif place.parent.is_dir():
                place.write_bytes(self._files[inode].disk)
                place.chmod(0o600)


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of a writer, and the seed of its prompts."""

    events: list[Event]
    seed: int

    def image(self, rng: random.Random, to: Path) -> tuple[Promise, int]:
        """Write the disk after a random cut to ``to``; return the promise at the cut."""
        # Most calls are writes; half of the cuts follow another call, where the order matters.
        cuts = range(1, len(self.events) + 1)
        failed = [n for n in cuts if self.events[n - 1].kind == SYNC_FAILED]
        if (
            failed and rng.random() < 0.8
        ):  # the effect of a failed sync shows in the next calls or never
            cuts = range(failed[0], min(failed[0] + 40, len(self.events) + 1))
        steps = [n for n in cuts if self.events[n - 1].kind not in (WRITTEN, WRITTEN_SYNC)]
        at = rng.choice(steps) if rng.random() < 0.5 else rng.choice(cuts)
        disk, promise = Disk(rng), Promise()
        for event in self.events[:at]:
            if event.kind == MARKED:
                told = json.loads(event.data)
                if "deleted" in told:
                    promise.deleted(told["deleted"])
                else:
                    promise.flushed(told["resident"], told["keys"])
            else:
                disk.play(event)
        disk.cut(to)
        return promise, at


def record(
    folder: Path, seed: int, *, is_synced: bool = True, failed_sync: int | None = None
) -> Recording:
    """Run a writer below ``folder`` and return its journal."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    journal = folder / "journal"

    def work() -> str:
        preload.begin(folder, journal)
        if failed_sync is not None:
            preload.fail(preload.SYNC, errno.EIO, skip=failed_sync)
        rng = random.Random(repr(("writer", seed)))
        with whole_batches(), nullcontext() if is_synced else without_sync():
            write(
                folder / "s",
                prompts(seed, PROMPTS),
                rng,
                lambda told: preload.mark(as_text(told)),
                steps=STEPS,
                ssd_bytes=CAP,
            )
        return "done"

    ended = in_child(work)
    if isinstance(ended, Death):
        raise RuntimeError(f"the writer died: {ended}")
    found = Recording(events_of(journal.read_bytes()), seed)
    shutil.rmtree(folder)
    return found


def _check_image(case: Case, recording: Recording) -> list[Finding]:
    promise, at = recording.image(case.rng(), case.folder)
    findings = check(case.folder / "s", prompts(recording.seed, PROMPTS), promise, ssd_bytes=CAP)
    return [
        Finding(f.sort, f"cut after call {at} of {len(recording.events)}: {f.text}; {case.folder}")
        for f in findings
    ]


@lru_cache(maxsize=1)
def _recording(shared: Path, seed: int, **options: Any) -> Recording:
    return record(shared / "writer", seed, **options)


def _seed(case: Case) -> int:
    return case.seed * 10_007 + case.number // IMAGES_PER_JOURNAL


def images(case: Case) -> list[Finding]:
    """Check one image of a writer that syncs."""
    return _check_image(case, _recording(case.shared, _seed(case)))


def images_after_a_failed_sync(case: Case) -> list[Finding]:
    """Check one image of a writer with one failed sync."""
    seed = case.seed * 10_007 + case.number // 10
    failed = random.Random(repr(("failed sync", seed))).randrange(40)
    return _check_image(case, _recording(case.shared, seed, failed_sync=failed))


def images_without_sync(case: Case) -> list[Finding]:
    """Check one image of a writer that does not sync: this kind must have findings."""
    return _check_image(case, _recording(case.shared, _seed(case), is_synced=False))


KINDS: Sequence[Kind] = (
    Kind("images", "the disk after a power cut", images, 60, 10_000),
    Kind(
        "failed-syncs",
        "the disk after a failed sync and a power cut",
        images_after_a_failed_sync,
        *(60, 1_000),
    ),
)
SELF_TEST = Kind(
    "images-without-sync", "must have findings", images_without_sync, 60, 500, must_find=True
)
