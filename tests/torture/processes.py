"""Forked children, and readers and writers that are killed during their work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore import StoreError
from tests.stores import open_cache
from tests.torture.kills import take
from tests.torture.prompts import LAYOUT, Promise, Prompt, check, prompts, read_check, store
from tests.torture.runner import Case, Child, Death, Finding, Kind, in_child
from tests.torture.writer import flush, tell_deletes

CAP = 1 << 20
PROMPTS = 24


def fork(case: Case) -> list[Finding]:
    """Fork while the store works: the child is refused or opens its own store; the parent continues."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, PROMPTS)
    path = case.folder / "s"
    findings: list[Finding] = []
    with open_cache(path, LAYOUT, ssd_bytes=CAP) as cache:
        store(cache, known[0])
        cache.flush()
        store(cache, rng.choice(known))  # the writer may be inside a commit while this forks
        match = cache.lookup(known[0])
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("store", lambda: store(cache, known[1])),
            ("lookup", lambda: cache.lookup(known[0])),
            ("read", lambda: cache.read(match)),
            ("probe", lambda: cache.probe(known[0])),
            ("flush", cache.flush),
            ("stats", cache.stats),
            ("clear", cache.clear),
            ("bump_generation", cache.bump_generation),
            ("enter", match.__enter__),
            ("scope", lambda: cache.scope(cache.namespace)),
            ("unpin", lambda: cache.unpin(known[0])),
        ]
        rng.shuffle(calls)

        def child() -> list[str]:
            said = []
            for name, call in calls:
                try:
                    call()
                except StoreError:
                    continue
                said.append(f"{name} worked through the parent's store")
            try:
                with open_cache(path, LAYOUT, ssd_bytes=CAP) as own:
                    if own.role != "reader":
                        said.append(f"its own store is {own.role}")
                    said += [f.text for f in read_check(own, known[0], 0)[1]]
            except StoreError as error:  # a call of the parent was inside at the fork
                if "busy when this process forked" not in str(error):
                    said.append(str(error))
            return said

        said = in_child(child)
        if isinstance(said, Death):
            findings.append(Finding("crash", f"a forked child died: {said}"))
        else:
            findings += [Finding("other", f"in a forked child: {text}") for text in said]
        promise = Promise()
        store(cache, known[2])
        if not flush(cache, known, lambda told: take(promise, told)):
            findings.append(Finding("other", "the parent cannot flush after a fork"))
        findings += read_check(cache, known[0], 0)[1]
    return findings + check(path, known, promise, ssd_bytes=CAP)


def _read_for_ever(path: Path, known: Sequence[Prompt], seed: float) -> None:
    rng = random.Random(seed)
    with open_cache(path, LAYOUT, role="reader", ssd_bytes=CAP) as cache:
        while True:
            number = rng.randrange(len(known))
            _, wrong = read_check(cache, known[number], number)
            if wrong:
                raise AssertionError(wrong[0].text)


def _kill_readers(path: Path, known: Sequence[Prompt], rng: random.Random) -> list[Finding]:
    """Start readers one after the other and kill each; an earlier death is a finding."""
    findings = []
    for _ in range(4):
        seed = rng.random()
        reader = Child(lambda send, seed=seed: _read_for_ever(path, known, seed))  # type: ignore[misc]
        time.sleep(rng.random() * 0.05)
        reader.kill()
        death = reader.wait()
        if death is None or "SIGKILL" not in str(death):
            findings.append(Finding("crash", f"a reader died before it was killed: {death}"))
    return findings


def killed_readers(case: Case) -> list[Finding]:
    """Kill readers while an owner replaces its blocks: the file stays below its cap."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, PROMPTS)
    path = case.folder / "s"
    promise = Promise()

    def owner(send: Callable[[Any], None]) -> None:
        with open_cache(path, LAYOUT, role="owner", ssd_bytes=CAP) as cache:
            tell_deletes(cache, send)
            own = random.Random(repr((case.seed, case.number, "owner")))
            send("open")
            for _ in range(200):
                store(cache, own.choice(known))
                if own.random() < 0.3:
                    flush(cache, known, send)
            # A reader that waits for a core inside its transaction may cost a commit, no more.
            if cache.stats()["tiers"]["ssd"]["is_read_only"]:
                send({"errors": cache.stats()["counters"]})

    writer = Child(owner)
    told = iter(writer.lines())
    if next(told, None) != "open":
        return [Finding("crash", f"the owner died: {writer.wait()}")]
    kill_owner = rng.random() < 0.5
    findings = _kill_readers(path, known, rng)
    if kill_owner:
        writer.kill()
    for what in told:
        if "errors" in what:
            findings.append(Finding("other", f"dead readers made it read-only: {what}"))
        else:
            take(promise, what)
    death = writer.wait()
    if not kill_owner and death is not None:
        findings.append(Finding("crash", f"the owner died beside killed readers: {death}"))
    size = (path / "data.mdb").stat().st_size
    if size > CAP:
        findings.append(Finding("other", f"the file takes {size} bytes, above its cap"))
    return findings + check(path, known, promise, ssd_bytes=CAP)


KINDS: Sequence[Kind] = (
    Kind("forks", "a fork while the store works", fork, 30, 1_000),
    Kind("killed-readers", "readers killed beside an owner", killed_readers, 4, 200),
)
