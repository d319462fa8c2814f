"""A disk that is full, or fails to read, write or sync: each failure is a counter and one line of log."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore import KVStoreError
from tests.stores import open_cache, tier_of, writer_of
from tests.torture import preload
from tests.torture.kills import take
from tests.torture.prompts import (
    LAYOUT,
    Promise,
    Prompt,
    blocks_of,
    check,
    prompts,
    read_check,
    store,
)
from tests.torture.runner import Case, Finding, Kind
from tests.torture.writer import flush, tell_deletes

PROMPTS = 60
CAP = 8 << 20


class Lines(logging.Handler):
    """The messages that the store logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that the store logs, without printing them."""
    logger, handler, before = logging.getLogger("kvstore"), Lines(), logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    logger.propagate, was = False, logger.propagate
    try:
        yield handler.lines
    finally:
        logger.propagate = was
        logger.removeHandler(handler)
        logging.disable(before)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a file system of ``size`` bytes at ``folder``; yield whether this process may."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "torture", str(folder)]
    is_mounted = (
        os.geteuid() == 0
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(case: Case) -> list[Finding]:
    """Fill a file system smaller than the cap, free space, continue; without one, make writes fail."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, PROMPTS)
    size = rng.randrange(320 << 10, 1 << 20) // 4096 * 4096
    with small_disk(case.folder / "disk", size) as is_small, logged() as lines:
        path, ballast = case.folder / "disk" / "s", case.folder / "disk" / "ballast"
        preload.begin(case.folder)
        promise = Promise()
        with suppress(KVStoreError), open_cache(path, LAYOUT, ssd_bytes=CAP) as cache:
            tell_deletes(cache, lambda told: take(promise, told))
            if rng.random() < 0.5:
                ballast.write_bytes(bytes(rng.randrange(64 << 10)))
            if not is_small:
                count = rng.choice([1, 5, preload.FOR_EVER])
                preload.fail(preload.WRITE, errno.ENOSPC, skip=rng.randrange(60), count=count)
            _use(cache, known, rng, promise)
            ballast.unlink(missing_ok=True)
            preload.heal()
            _use(cache, known, rng, promise)
        findings = [
            Finding("other", f"it logged {line!r} {lines.count(line)} times")
            for line in set(lines)
            if lines.count(line) > 1
        ]
        # Reopened elsewhere: on the full disk there may be no space to open it.
        shutil.copytree(path, case.folder / "s")
    return findings + check(case.folder / "s", known, promise, ssd_bytes=CAP)


def _use(cache: Any, known: Sequence[Prompt], rng: random.Random, promise: Promise) -> None:
    for _ in range(40):
        store(cache, rng.choice(known))
        if rng.random() < 0.3:
            flush(cache, known, lambda told: take(promise, told))


def failing_reads(case: Case) -> list[Finding]:
    """Make reads fail: each is a miss, counted and logged once; nothing raises, no block is wrong."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, 12)
    path = case.folder / "s"
    with open_cache(path, LAYOUT, ssd_bytes=CAP) as cache:
        for prompt in known:
            store(cache, prompt)
    findings: list[Finding] = []
    with logged() as lines, open_cache(path, LAYOUT, ssd_bytes=CAP) as cache:
        preload.begin(case.folder)
        ssd = tier_of(cache)
        with suppress(OSError):  # its descriptor was opened before the watch began
            os.close(ssd._file)
        ssd._file = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        count = rng.choice([1, 1, 3, preload.FOR_EVER])
        preload.fail(preload.READ, errno.EIO, skip=rng.randrange(30), count=count)
        for number, prompt in enumerate(known):
            findings += read_check(cache, prompt, number)[1]
        preload.heal()
        for number, prompt in enumerate(known):
            store(cache, prompt)
            cache.flush()
            blocks, wrong = read_check(cache, prompt, number)
            findings += wrong
            if blocks != blocks_of(prompt):
                text = f"prompt {number}: {blocks} blocks after it was stored again"
                findings.append(Finding("other", text))
        told = [line for line in lines if "unusable" in line]
        if len(told) > 1:
            findings.append(Finding("other", f"it logged {len(told)} lines: {told[:3]}"))
    return findings


def failing_medium(case: Case) -> list[Finding]:
    """Make writes or syncs fail permanently: read-only, an alarm, reads continue; reopening repairs."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, 12)
    path = case.folder / "s"
    operation = rng.choice([preload.WRITE, preload.SYNC])
    findings: list[Finding] = []
    preload.begin(case.folder)
    promise = Promise()
    with (
        logged() as lines,
        suppress(KVStoreError),
        open_cache(path, LAYOUT, ssd_bytes=CAP) as cache,
    ):
        tell_deletes(cache, lambda told: take(promise, told))
        _use(cache, known[:6], rng, promise)
        preload.fail(operation, errno.EIO, skip=rng.randrange(6), count=preload.FOR_EVER)
        for prompt in known[6:] * 2:
            store(cache, prompt)
            writer_of(cache).queue.drain()
        if flush(cache, known, lambda told: None):
            findings.append(Finding("lost", "a flush was acknowledged by a disk that fails"))
        stats = cache.stats() if operation == preload.SYNC else None
        if stats is not None:  # after a failed meta page LMDB refuses all calls, also statistics
            if not stats["tiers"]["ssd"]["is_read_only"] or not stats["alarms"]:
                findings.append(Finding("other", "a disk that fails raised no alarm"))
            if not stats["counters"]["write_errors"]:
                findings.append(Finding("other", "a disk that fails was not counted"))
        for number, prompt in enumerate(known):
            findings += read_check(cache, prompt, number)[1]
        if any(lines.count(line) > 1 for line in lines):
            findings.append(Finding("other", f"it logged a line more than once: {lines}"))
        preload.heal()
    preload.heal()
    return findings + check(path, known, promise, ssd_bytes=CAP)


KINDS: Sequence[Kind] = (
    Kind("full-disk", "a file system smaller than the cap", full_disk, 4, 100),
    Kind("failing-reads", "input/output errors of reads", failing_reads, 10, 1_000),
    Kind("failing-medium", "writes or syncs that fail permanently", failing_medium, 15, 500),
)
