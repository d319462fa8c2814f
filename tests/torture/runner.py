"""Runner of cases in processes that may die, with a count of findings."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Sort = Literal["wrong", "lost", "crash", "other"]
SORTS: tuple[Sort, ...] = ("wrong", "lost", "crash", "other")
CASE_SECONDS = 600
"""Deadline of one case: far above every case, so a case that reaches it hangs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise.

    ``wrong``: bytes that were never stored for these tokens. ``lost``: a block of an acknowledged
    flush is missing. ``crash``: a process died unexpectedly. ``other``: any other broken promise.
    """

    sort: Sort
    text: str


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a kind: its randomness depends on the seed and its number only."""

    seed: int
    number: int
    amount: int
    """Units of the kind in this case."""
    folder: Path
    """The case's own empty folder, removed without findings."""
    shared: Path
    """The kind's folder, in which a case can continue another one's work."""

    def rng(self, *salt: int) -> random.Random:
        """Return a random generator of this case."""
        return random.Random(repr((self.seed, self.number, *salt)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of torture."""

    name: str
    about: str
    work: Callable[[Case], list[Finding]]
    """Does one case, in a process that may crash."""
    small: int
    full: int
    batch: int = 1
    """Units of the count in one case."""
    on_disk: bool = False
    """Whether it needs a file system with write-back."""
    must_find: bool = False
    """Whether it tests the harness: its findings are expected, and not kept."""


@dataclass(slots=True)
class Outcome:
    """The result of a kind."""

    kind: str
    count: int
    findings: dict[Sort, int]
    seconds: float
    texts: list[str] = field(default_factory=list)
    """The first findings, each with the command that runs its case again."""

    @property
    def is_good(self) -> bool:
        """Return whether there are no findings."""
        return not any(self.findings.values())


# ---- processes that may die --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Death:
    """The exit status of a child that failed."""

    status: int

    def __str__(self) -> str:
        code = os.waitstatus_to_exitcode(self.status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class Child:
    """A forked process that sends JSON lines."""

    def __init__(self, main: Callable[[Callable[[Any], None]], None]) -> None:
        """Start ``main(send)`` in a child."""
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reader)
            status = 1
            try:
                main(lambda value: _write_all(writer, json.dumps(value).encode() + b"\n"))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")

    def lines(self) -> Iterator[Any]:
        """Yield the values that the child sends until it ends, without an incomplete last line."""
        for line in self._pipe:
            if line.endswith(b"\n"):
                yield json.loads(line)

    def kill(self) -> None:
        """Kill it at once."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Death | None:
        """Wait for its end; return its death, None if it exited with 0."""
        self._pipe.close()
        _, status = os.waitpid(self.pid, 0)
        return Death(status) if status else None


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in a forked child (JSON), or the ``Death`` of the child."""
    child = Child(lambda send: send(work()))
    values = list(child.lines())
    death = child.wait()
    return death if death is not None or not values else values[0]


# ---- cases -------------------------------------------------------------------------------------


def _do(kind: Kind, case: Case) -> list[Finding]:
    try:
        return kind.work(case)
    except Exception:  # a bug of store or harness, reported as a finding
        return [Finding("other", traceback.format_exc(limit=-6))]


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """Kill a process that hangs, with a stack trace."""

    def give_up(*_: object) -> None:
        traceback.print_stack()
        os._exit(98)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _serve(kind: Kind, cases: Iterator[Case], send: Callable[[Any], None]) -> None:
    for case in cases:
        case.folder.mkdir(parents=True)
        send(["begin", case.number])
        with _alarm(CASE_SECONDS):
            findings = _do(kind, case)
        if not findings or kind.must_find:
            shutil.rmtree(case.folder, ignore_errors=True)
        send(["done", case.number, [[f.sort, f.text] for f in findings]])


def run(
    kind: Kind,
    count: int,
    seed: int,
    folder: Path,
    *,
    first: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keep_texts: int = 5,
) -> Outcome:
    """Do ``count`` units of a kind, from case ``first`` on; a worker that dies is a finding."""
    began = time.monotonic()
    number, left = first, count
    found: Counter[Sort] = Counter()
    outcome = Outcome(kind.name, count, {}, 0.0)

    def note(at: int, sort: Sort, text: str) -> None:
        found[sort] += 1
        if len(outcome.texts) < keep_texts:
            again = f"python -m tests.torture {kind.name} --seed {seed} --first {at} --count {kind.batch}"
            outcome.texts.append(f"{kind.name} {sort}: {text}\n  again: {again}")

    while left > 0:
        cases = _cases(kind, number, left, seed, folder)
        child = Child(lambda send, cases=cases: _serve(kind, cases, send))  # type: ignore[misc]
        begun: int | None = None
        for what, at, *rest in child.lines():
            begun = at if what == "begin" else None
            if what == "done":
                for sort, text in rest[0]:
                    note(at, sort, text)
                number, left = at + 1, left - kind.batch
                progress(min(count, count - left), count)
        death = child.wait()
        if death is None:
            break
        note(number if begun is None else begun, "crash", f"the process died: {death}")
        number, left = number + 1, left - kind.batch
    outcome.findings = {sort: found[sort] for sort in SORTS}
    outcome.seconds = time.monotonic() - began
    return outcome


def _cases(kind: Kind, number: int, left: int, seed: int, folder: Path) -> Iterator[Case]:
    shared = folder / f"{kind.name}-shared"
    shared.mkdir(exist_ok=True)
    while left > 0:
        own = folder / f"{kind.name}-{number}"
        yield Case(seed, number, min(left, kind.batch), own, shared)
        number, left = number + 1, left - kind.batch


def table(outcomes: list[Outcome]) -> str:
    """Return an aligned table of outcomes."""
    head = ["kind", "count", "wrong blocks", "lost flushes", "crashes", "other", "seconds"]
    rows = [
        [o.kind, f"{o.count:,}", *(f"{o.findings[s]:,}" for s in SORTS), f"{o.seconds:.1f}"]
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)
