"""Corruption: one bit of the file flipped, or its end truncated. Blocks may be lost, never be wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from unittest import mock

import lmdb

from kvstore import KVStoreError
from kvstore.frame.format import FrameFormat
from kvstore.frame.targets import AddressTable
from tests.stores import open_cache
from tests.torture.prompts import LAYOUT, Promise, Prompt, check, prompts, read_check, still_works
from tests.torture.runner import Case, Death, Finding, Kind, in_child
from tests.torture.writer import whole_batches, write

CAP = 1 << 20
PROMPTS = 24
CASES_PER_STORE = 200


@lru_cache(maxsize=1)
def _stored(shared: Path, seed: int) -> tuple[Path, tuple[Prompt, ...]]:
    """Return the path of a written and closed store, and its prompts."""
    path, known = shared / "s", prompts(seed, PROMPTS)
    shutil.rmtree(path, ignore_errors=True)

    def work() -> bool:
        with whole_batches():
            write(path, known, random.Random(seed), lambda told: None, steps=40, ssd_bytes=CAP)
        return True

    ended = in_child(work)
    if isinstance(ended, Death):
        raise RuntimeError(f"the writer died: {ended}")
    return path, known


def _copy(case: Case) -> tuple[Path, tuple[Prompt, ...]]:
    source, known = _stored(case.shared, case.seed * 10_007 + case.number // CASES_PER_STORE)
    path = case.folder / "s"
    shutil.copytree(source, path)
    return path, known


def flip(case: Case) -> list[Finding]:
    """Flip one bit, anywhere or in the bytes of B+ trees; then read, write and read again."""
    rng = case.rng()
    path, known = _copy(case)
    data = path / "data.mdb"
    size = data.stat().st_size
    offset = rng.randrange(size)
    if rng.random() < 0.5:  # headers of pages and meta pages: most bytes of the file are payload
        offset = min(size - 1, offset // 4096 * 4096 + rng.randrange(64))
        if rng.random() < 0.2:
            offset = rng.randrange(2) * 4096 + rng.randrange(152)
    _flip(data, offset, rng.randrange(8))
    findings = _look(path, known)
    return [Finding(f.sort, f"a bit at {offset}: {f.text}") for f in findings]


def flip_unchecked(case: Case) -> list[Finding]:
    """Flip one bit of a store that verifies no reads: this must have findings."""
    checked = FrameFormat.scatter

    def scatter(self: FrameFormat, frame: memoryview, target: AddressTable, block: int) -> None:
        checked(self, frame, target, block)

    with (
        mock.patch.object(FrameFormat, "reader", return_value=None),
        mock.patch.object(FrameFormat, "head_fault", return_value=None),
        mock.patch.object(FrameFormat, "scatter", scatter),
    ):
        return flip(case)


def flip_under_an_owner(case: Case) -> list[Finding]:
    """Flip one bit while the store is open, so that no check at open detects it."""
    rng = case.rng()
    path, known = _copy(case)
    data = path / "data.mdb"
    offset = rng.randrange(data.stat().st_size)
    if rng.random() < 0.5:
        offset = offset // 4096 * 4096 + rng.randrange(64)
    findings = []
    with suppress(KVStoreError), open_cache(path, LAYOUT, role="owner", ssd_bytes=CAP) as cache:
        _flip(data, offset, rng.randrange(8))
        for number, prompt in enumerate(known):
            findings += read_check(cache, prompt, number)[1]
        with suppress(KVStoreError):
            still_works(cache)
        for number, prompt in enumerate(known):
            findings += read_check(cache, prompt, number)[1]
    findings += _look(path, known)
    return [Finding(f.sort, f"a bit at {offset}, store open: {f.text}") for f in findings]


def _flip(data: Path, offset: int, bit: int) -> None:
    with data.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def _look(path: Path, known: Sequence[Prompt]) -> list[Finding]:
    """Read everything from a damaged store and write to it; reopening must repair a failure."""
    try:
        findings = check(path, known, Promise(), is_damaged=True, ssd_bytes=CAP)
    except KVStoreError:  # a write reached the damage and raised; the next open repairs the store
        findings = []
    else:
        if not any(f.sort == "other" for f in findings):
            return findings
    return [f for f in findings if f.sort != "other"] + check(
        path, known, Promise(), is_damaged=True, ssd_bytes=CAP
    )


def _used(path: Path) -> int:
    """Return the end of the last used page."""
    env = lmdb.open(str(path), readonly=True, lock=False, max_dbs=8)
    try:
        return (int(env.info()["last_pgno"]) + 1) * 4096
    finally:
        env.close()


SHARES = (0.99, 0.9, 0.5, 0.1, 0.004, 0.0)


def truncate(case: Case) -> list[Finding]:
    """Truncate the file; an owner and a reader must detect that at open."""
    rng = case.rng()
    path, known = _copy(case)
    data = path / "data.mdb"
    size = _used(path)  # a hole follows if the store was not closed
    share = rng.choice([*SHARES, rng.random()])
    left = min(size - 1, int(size * share))
    if rng.random() < 0.3:
        left = size - 4096 * rng.randint(1, 4)
    with data.open("r+b") as file:
        file.truncate(max(0, left))
    findings = []
    try:
        with open_cache(path, LAYOUT, role="reader", ssd_bytes=CAP) as cache:
            if any(read_check(cache, prompt, "")[0] for prompt in known):
                findings.append(
                    Finding("other", f"a reader took {left} of {size} bytes for a store")
                )
    except KVStoreError:
        pass
    with open_cache(path, LAYOUT, role="owner", ssd_bytes=CAP) as cache:
        if not cache.stats()["counters"]["quarantined_stores"] and left:
            findings.append(Finding("other", f"an owner took {left} of {size} bytes for a store"))
    findings += check(path, known, Promise(), is_damaged=True, ssd_bytes=CAP)
    return [Finding(f.sort, f"cut to {left} of {size} bytes: {f.text}") for f in findings]


KINDS: Sequence[Kind] = (
    Kind("flips", "one bit of a closed store", flip, 60, 8_000),
    Kind("flips-open", "one bit under an owner", flip_under_an_owner, 30, 2_000),
    Kind("truncations", "the end of the file cut off", truncate, 20, 200),
)
SELF_TEST = Kind("flips-unchecked", "must have findings", flip_unchecked, 60, 500, must_find=True)
