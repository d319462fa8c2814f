"""The environment of a store: a clock that jumps by ten years, little memory, a cap that is reached."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from kvstore.tier.ssd.values import Put
from tests.stores import BLOCK, inside, open_cache, tier_of
from tests.torture.prompts import (
    LAYOUT,
    Prompt,
    blocks_of,
    prompts,
    read_check,
    store,
)
from tests.torture.runner import Case, Death, Finding, Kind, Sort, in_child

DAY = 86_400.0
TEN_YEARS = 3652.5 * DAY


# ---- clocks ------------------------------------------------------------------------------------


def clock_jumps(case: Case) -> list[Finding]:
    """Make the wall clock jump by up to ten years, also across a restart.

    Blocks without a time to live stay. A block with a time to live is a miss after it, and at most a
    correct hit if the clock jumps back. Leases use a monotonic clock.
    """
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, 8)
    lasting, mortal = known[0], known[1]
    path, wall, steady = case.folder / "s", [1.8e9], [1000.0]
    findings: list[Finding] = []

    def visit(step: int) -> None:
        cache.lookup(lasting)
        steady[0] += 31.0  # longer than a lease
        for name, prompt, expires in (("lasting", lasting, None), ("mortal", mortal, ends)):
            blocks, wrong = read_check(cache, prompt, name)
            findings.extend(wrong)
            is_due = expires is None or wall[0] < expires
            least = blocks_of(prompt) if is_due else 0
            if name == "mortal" and not is_due:
                least = blocks  # blocks shared with the lasting prompt stay
                if blocks > shared:
                    findings.append(Finding("other", f"step {step}: expired blocks are hits"))
            if blocks < least:
                findings.append(Finding("lost", f"step {step}: {blocks} of {least} {name} blocks"))
        if cache.stats()["counters"]["evicted_blocks"].get("ssd"):
            findings.append(Finding("other", f"step {step}: a jump of the clock evicted blocks"))
        held = sum(not pins.is_released for pins in inside(cache).leases._lent)
        if held > 3:
            findings.append(Finding("other", f"step {step}: {held} leases did not expire"))

    shared = _shared_blocks(lasting, mortal)
    ends = wall[0] + 30 * DAY
    with (
        mock.patch("time.time", side_effect=lambda: wall[0]),
        mock.patch("time.monotonic", _shifted(steady)),
    ):
        cache = open_cache(path, LAYOUT)
        store(cache, lasting)
        store(cache, mortal, ttl=30 * DAY)
        cache.flush()
        for step in range(12):
            wall[0] += rng.choice([-TEN_YEARS, TEN_YEARS, DAY, -DAY, 31 * DAY])
            if rng.random() < 0.3:
                cache.close()
                cache = open_cache(path, LAYOUT)
            visit(step)
        wall[0] = 1.8e9
        visit(99)
        cache.close()
    return findings


def _shifted(offset: list[float]) -> Any:
    import time

    real = time.monotonic
    return lambda: real() + offset[0]


def _shared_blocks(one: Prompt, other: Prompt) -> int:
    count = 0
    for at in range(0, min(len(one), len(other)) - BLOCK + 1, BLOCK):
        if (one[at : at + BLOCK] != other[at : at + BLOCK]).any():
            break
        count += 1
    return count


# ---- memory ------------------------------------------------------------------------------------

_GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""Folders and files that limit the memory of control groups, version 1 and 2."""
MEMORY_BYTES = 32 << 20
"""Memory limit of the control group, page cache included."""


@contextmanager
def little_memory() -> Iterator[Path | None]:
    """Make a control group with little memory for a child; None if that is not permitted."""
    for base, limit in _GROUPS:
        group = Path(base) / f"torture-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(MEMORY_BYTES))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    yield None


def memory_pressure(case: Case) -> list[Finding]:
    """Write and read more data than memory, which has to hold page cache and queue."""
    with little_memory() as group:
        found = in_child(lambda: _under_pressure(case, group))
    if isinstance(found, Death):
        return [Finding("crash", f"it ran out of memory and died: {found}")]
    return [Finding(sort, text) for sort, text in found]


def _under_pressure(case: Case, group: Path | None) -> list[tuple[Sort, str]]:
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number, 700)
    findings: list[tuple[Sort, str]] = []
    with open_cache(case.folder / "s", LAYOUT, ssd_bytes="64MiB") as cache:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        for number, prompt in enumerate(known):
            store(cache, prompt)
            if number % 20 == 0:  # queued blocks take memory too
                cache.flush()
        cache.flush()
        before = _anonymous_bytes()
        for _ in range(600):
            if group is None:  # the next best thing: every read is a cold one
                os.posix_fadvise(tier_of(cache)._file, 0, 0, os.POSIX_FADV_DONTNEED)
            number = rng.randrange(len(known))
            blocks, wrong = read_check(cache, known[number], number)
            findings += [(f.sort, f.text) for f in wrong]
            if blocks < blocks_of(known[number]):
                findings.append(("lost", f"prompt {number}: {blocks} blocks"))
        grown = _anonymous_bytes() - before
        if grown > MEMORY_BYTES:
            findings.append(("other", f"reads leaked {grown} bytes of memory"))
    return findings


def _anonymous_bytes() -> int:
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def little_address_space(case: Case) -> list[Finding]:
    """Refuse memory to a store in use: calls may raise ``MemoryError``, blocks stay correct."""
    rng = case.rng()
    known = prompts(case.seed * 10_007 + case.number % 7, 24)
    path = case.folder / "s"
    findings: list[Finding] = []
    cache = open_cache(path, LAYOUT, ssd_bytes="2MiB")
    for prompt in known:
        store(cache, prompt)
    cache.flush()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + rng.randrange(2 << 20), old[1]))
    try:
        for _ in range(60):
            number = rng.randrange(len(known))
            with suppress(MemoryError):
                findings += read_check(cache, known[number], number)[1]
            with suppress(MemoryError):
                store(cache, known[number])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    for number, prompt in enumerate(known):
        findings += read_check(cache, prompt, number)[1]
    cache.close()
    return findings


# ---- the cap -----------------------------------------------------------------------------------


def turnovers(case: Case) -> list[Finding]:
    """Store many times the capacity, and measure the file after every commit and delete."""
    rng = case.rng()
    cap = rng.choice([1 << 20, 3 << 20])
    path = case.folder / "s"
    findings: list[Finding] = []
    highest = 0
    with open_cache(path, LAYOUT, ssd_bytes=cap) as cache:
        ssd = tier_of(cache)
        real_put, real_delete = ssd.put, ssd.delete

        def measure() -> None:
            nonlocal highest
            highest = max(highest, (path / "data.mdb").stat().st_size)

        def put(puts: Sequence[Put], uses: Any = None, facts: Any = None) -> None:
            real_put(puts, uses, facts)
            measure()

        def delete(keys: Any) -> None:
            real_delete(keys)
            measure()

        ssd.put, ssd.delete = put, delete  # type: ignore[method-assign]
        capacity = ssd.high_bytes // ssd.block_bytes
        seed, last = 0, None
        while cache.stats()["counters"]["stored_blocks"] < case.amount * capacity:
            own = random.Random(repr((case.seed, case.number, seed)))
            for last in prompts(own.randrange(1 << 30), 40):
                store(cache, last)
            seed += 1
        cache.flush()
        assert last is not None
        blocks, wrong = read_check(cache, last, "last")
        findings += wrong
        if blocks < blocks_of(last):
            findings.append(
                Finding("lost", f"{blocks} of {blocks_of(last)} blocks of the last prompt")
            )
        counters = cache.stats()["counters"]
        if counters["write_errors"] or counters["dropped_blocks"]["total"]:
            findings.append(Finding("other", f"blocks were not stored: {counters}"))
    if highest > cap:
        findings.append(Finding("other", f"the file took {highest} bytes, above its cap of {cap}"))
    return findings


KINDS: Sequence[Kind] = (
    Kind("clocks", "a wall clock that jumps by ten years", clock_jumps, 15, 500),
    Kind("memory", "more data than memory", memory_pressure, 1, 20, on_disk=True),
    Kind("allocations", "memory that is refused", little_address_space, 5, 200),
    Kind("turnovers", "the cap, many times over", turnovers, 4, 100, batch=25),
)
