"""kill -9 of a writer at a random moment, or just before a chosen write or sync."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.torture import preload
from tests.torture.prompts import Promise, check, prompts
from tests.torture.runner import Case, Child, Finding, Kind
from tests.torture.writer import write

CYCLES_PER_STORE = 50
CAP = 1 << 20
PROMPTS = 24
_promises: dict[Path, Promise] = {}
"""Promises to dead writers, by the store that this process continues with."""


def take(promise: Promise, told: dict[str, Any]) -> None:
    """Record a message of a writer."""
    if "deleted" in told:
        promise.deleted(told["deleted"])
    else:
        promise.flushed(told["resident"], told["keys"])


def kill_cycle(case: Case) -> list[Finding]:
    """Start one more writer, kill it, and check the whole store."""
    rng = case.rng()
    path = case.shared / "s"
    seed = case.seed * 10_007 + case.number // CYCLES_PER_STORE
    if path not in _promises or case.number % CYCLES_PER_STORE == 0:
        shutil.rmtree(path, ignore_errors=True)
        _promises[path] = Promise()
    promise, known = _promises[path], prompts(seed, PROMPTS)

    def main(send: Callable[[Any], None]) -> None:
        preload.begin(case.shared)
        if rng.random() < 0.5:  # the moments around writes and syncs are rare: choose them
            preload.kill(rng.choice([preload.WRITE, preload.SYNC]), skip=rng.randrange(40))
        write(path, known, rng, send, ssd_bytes=CAP)

    writer = Child(main)
    time.sleep(rng.random() * 0.03)
    writer.kill()
    for told in writer.lines():
        take(promise, told)
    writer.wait()
    findings = check(path, known, promise, ssd_bytes=CAP)
    if findings:
        shutil.copytree(path, case.folder / "s")
        del _promises[path]
    return findings


KINDS: Sequence[Kind] = (Kind("kills", "kill -9 of a writer", kill_cycle, 60, 5_000),)
