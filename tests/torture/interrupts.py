"""Ctrl-C at any moment while a store is opened, filled, flushed, closed or maintained.

The moment is a count or a time. A count: the n-th point at which the interpreter checks for signals, which
is reproducible and covers every line. A time: a signal from outside, also during a wait.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import BlockStore, PrefixCache
from kvstore.admin import inspect as admin
from kvstore.admin import upkeep
from kvstore.admin.archive import export_store, import_store
from tests.stores import open_cache
from tests.torture.prompts import LAYOUT, blocks_of, prompts, read_check, store
from tests.torture.runner import Case, Finding, Kind

CAP = 8 << 20
SETTLE_SECONDS = 20.0
"""Most time until stopped threads have ended: far above the usual time."""
_UNCHECKED = frozenset({len, isinstance, list.append})
"""Calls after which the interpreter does not check for signals. Source: specializer of CPython 3.11."""


class Interrupt(KeyboardInterrupt):
    """A Ctrl-C of this module, distinct from a real one."""


@contextmanager
def at_place(place: int) -> Iterator[list[int]]:
    """Raise at the n-th point of a signal check: entries of functions, ends of calls into C.

    It counts the points; with 0 it never raises.
    """
    seen = [0]

    def look(frame: Any, event: str, what: Any) -> None:
        if event == "call" or (event == "c_return" and what not in _UNCHECKED):
            seen[0] += 1
            if seen[0] == place:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@contextmanager
def at_time(seconds: float) -> Iterator[None]:
    """Send a signal to this process after a time, from a thread."""
    main, lock, over = threading.main_thread().ident, threading.Lock(), threading.Event()
    assert main is not None

    def interrupt(*_: object) -> None:
        raise Interrupt

    def send() -> None:
        if not over.wait(seconds):
            with lock:
                if not over.is_set():
                    signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        with suppress(Interrupt), lock:
            pass
        with suppress(Interrupt):
            thread.join()
        signal.signal(signal.SIGINT, before)


# ---- interrupted work --------------------------------------------------------------------------------


class Work:
    """Work with a store, and the state to check afterwards."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path = path
        self.prompts = prompts(rng.randrange(1 << 30), 3)
        self.flushed: list[Any] = []
        """Prompts that a flush has acknowledged."""
        self.held: list[PrefixCache | BlockStore] = []

    def prepare(self) -> None:
        """Do the part that is not interrupted."""
        with open_cache(self.path, LAYOUT, ssd_bytes=CAP) as cache:
            store(cache, self.prompts[0])
        self.flushed.append(self.prompts[0])

    def run(self) -> None:
        """Do the part that is interrupted."""
        self.held.append(open_cache(self.path, LAYOUT, ssd_bytes=CAP))
        cache = self.held[0]
        assert isinstance(cache, PrefixCache)
        store(cache, self.prompts[1])
        cache.flush()
        self.flushed.append(self.prompts[1])
        store(cache, self.prompts[2])
        cache.close()


class WithBlock(Work):
    """The same work as a ``with`` statement, with reads."""

    def run(self) -> None:
        with open_cache(self.path, LAYOUT, ssd_bytes=CAP, scrub_bytes_per_second="1MiB") as cache:
            store(cache, self.prompts[1])
            cache.flush()
            self.flushed.append(self.prompts[1])
            read_check(cache, self.prompts[1], 1)
            cache.stats()


class Secret(Work):
    """A new store with a secret, of callers' keys."""

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        opened = BlockStore.open(self.path, block_bytes=512, ssd_bytes=CAP, secret=True)
        self.held.append(opened)
        opened.put(["a", "b"], [np.zeros(512, np.uint8)] * 2)
        opened.flush()
        opened.close()


class Upkeep(Work):
    """Maintenance tools that own a store for a short time."""

    def run(self) -> None:
        file = self.path.with_name("a.tar")
        upkeep.compact(self.path)
        export_store(self.path, file, (), _quiet)
        import_store(file, self.path.with_name("copy"), str(CAP), _quiet)
        upkeep.evict(self.path, "100%")
        admin.store_stats(self.path)


def _quiet(done: int, total: int) -> None:
    pass


WORKS: Sequence[type[Work]] = (Work, Work, Work, WithBlock, WithBlock, Secret, Upkeep)


# ---- checks afterwards -------------------------------------------------------------------------------


def _tasks() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _descriptors(below: Path) -> dict[str, int]:
    """Count the open files of stores below a folder, by name."""
    found: dict[str, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(link.readlink())
            if target.startswith(str(below)) and ".tar" not in target:
                found[target] = found.get(target, 0) + 1
    return found


def _interrupted(work: Work, moment: Any) -> bool:
    """Do the work with an interrupt; return whether it was raised."""
    try:
        with moment:
            work.run()
    except Interrupt:
        return True
    except RuntimeError as error:  # of a condition interrupted while it released its lock
        return isinstance(error.__context__, Interrupt)
    return False


def _left(folder: Path, tasks: int) -> list[Finding]:
    """Return findings for threads and files left after closing."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while _tasks() > tasks and time.monotonic() < deadline:
        time.sleep(0.002)
    findings = []
    if _tasks() > tasks:
        names = [thread.name for thread in threading.enumerate()]
        findings.append(Finding("other", f"threads are left: {names}"))
    if open_files := _descriptors(folder):
        findings.append(Finding("other", f"descriptors are left: {open_files}"))
    return findings


def _reopens(work: Work) -> list[Finding]:
    """Open the store as its owner, in the same process, and look for what was acknowledged."""
    findings: list[Finding] = []
    if isinstance(work, Secret):
        with BlockStore.open(
            work.path, block_bytes=512, ssd_bytes=CAP, secret=True, role="owner"
        ) as blocks:
            blocks.put(["c"], [np.ones(512, np.uint8)])
            blocks.flush()
        return findings
    with open_cache(work.path, LAYOUT, ssd_bytes=CAP, role="owner") as cache:
        for number, prompt in enumerate(work.flushed):
            blocks_found, wrong = read_check(cache, prompt, number)
            findings += wrong
            if blocks_found < blocks_of(prompt):
                findings.append(Finding("lost", f"prompt {number}: {blocks_found} blocks"))
        store(cache, work.prompts[2])
        cache.flush()
        if cache.stats()["tiers"]["ssd"]["is_read_only"]:
            findings.append(Finding("other", "it is read-only"))
    return findings


def interrupt(case: Case) -> list[Finding]:
    """Interrupt once; then close again, open as owner, close, and look at what is left."""
    rng = case.rng()
    kind = WORKS[rng.randrange(len(WORKS))]
    known = kind(case.folder / "known", case.rng(1))
    known.prepare()
    began = time.monotonic()
    with at_place(0) as places:
        known.run()
    seconds = time.monotonic() - began  # more than without the count, so some come too late
    work = kind(case.folder / "s", case.rng(1))
    work.prepare()
    del known
    tasks = _tasks()
    is_counted = rng.random() < 0.7
    place = rng.randrange(1, places[0] + 1)
    moment: Callable[[], Any] = (
        (lambda: at_place(place)) if is_counted else (lambda: at_time(rng.random() * seconds * 0.7))
    )
    began = time.monotonic()
    _interrupted(work, moment())
    for held in work.held:
        held.close()
    findings = _reopens(work) + _left(case.folder, tasks)
    if time.monotonic() - began > SETTLE_SECONDS:
        findings.append(Finding("other", "it took more time than a deadline"))
    what = f"{kind.__name__}, place {place} of {places[0]}" if is_counted else kind.__name__
    return [Finding(finding.sort, f"{what}: {finding.text}") for finding in findings]


KINDS: Sequence[Kind] = (
    Kind("interrupts", "Ctrl-C at any moment, in one process", interrupt, 30, 3_000),
)
