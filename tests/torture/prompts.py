"""Prompts with shared prefixes, their entries, and the check of a store against them.

Every byte of an entry depends on all tokens up to its own, so bytes of another block, of another prompt
or of no prompt differ from the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import KVStoreError, PrefixCache
from kvstore.cache.scope import Scope
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tier_of, tokens_of
from tests.torture.runner import Finding

Prompt = NDArray[np.uint32]
LAYOUT = DENSE


@lru_cache(maxsize=4)
def prompts(seed: int, count: int, longest: int = 16) -> tuple[Prompt, ...]:
    """Return prompts of up to ``longest`` blocks, most of them forks of earlier ones."""
    rng = random.Random(repr(("prompts", seed)))
    made: list[Prompt] = []
    for number in range(count):
        length = rng.randint(1, longest)
        own = tokens_of(length * BLOCK + 1, seed * 100_003 + number)
        if made and rng.random() < 0.6:
            parent = rng.choice(made)
            shared = rng.randint(1, len(parent) // BLOCK) * BLOCK
            own = np.concatenate([parent[:shared], own])[: longest * BLOCK + 1]
        made.append(own.astype(np.uint32))
    return tuple(made)


def blocks_of(prompt: Prompt) -> int:
    """Return the most blocks that a prompt can hit."""
    return (len(prompt) - 1) // BLOCK


@lru_cache(maxsize=128)
def _expected(prompt: bytes) -> dict[str, NDArray[np.uint8]]:
    return entries_of(LAYOUT, np.frombuffer(prompt, np.uint32))


def expected_of(prompt: Prompt) -> dict[str, NDArray[np.uint8]]:
    """Return the entries of a prompt."""
    return _expected(prompt.tobytes())


def store(cache: Scope, prompt: Prompt, **options: Any) -> Any:
    """Store the blocks of a prompt that a cache lacks."""
    return cache.store(prompt, expected_of(prompt), wait=30, **options)


def keys_of(cache: Scope, prompt: Prompt) -> list[str]:
    """Return the keys of the whole blocks of a prompt."""
    prefix = cache.probe(prompt).prefix
    return [prefix.key(number).hex() for number in range(blocks_of(prompt))]


def read_check(cache: Scope, prompt: Prompt, name: object) -> tuple[int, list[Finding]]:
    """Read the hit of a prompt; return the number of blocks, and findings of wrong bytes."""
    with cache.lookup(prompt) as match:
        found = cache.read(match)
    if found.tokens > blocks_of(prompt) * BLOCK:
        return 0, [Finding("wrong", f"prompt {name}: {found.tokens} tokens of {len(prompt)}")]
    expected = expected_of(prompt)
    for group, array in found.items():
        if not np.array_equal(array, expected[group][:, : array.shape[1]]):
            return 0, [Finding("wrong", f"prompt {name}: other bytes in group {group}")]
    return found.tokens // BLOCK, []


@dataclass(slots=True)
class Promise:
    """The promise to a writer: blocks of an acknowledged flush, less those evicted since."""

    kept: dict[int, int] = field(default_factory=dict)
    """By number of the prompt: leading blocks that an acknowledged flush covers."""
    keys: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By key: the prompts of the block, and its number in each."""
    is_made: bool = False
    """Whether any flush was acknowledged."""

    def flushed(self, resident: Mapping[str, int], keys: Mapping[str, Sequence[str]]) -> None:
        """Record an acknowledged flush, with the resident blocks just after it."""
        self.is_made = True
        for name, blocks in resident.items():
            number = int(name)
            self.kept[number] = max(self.kept.get(number, 0), blocks)
            for place, key in enumerate(keys.get(name, ())):
                owners = self.keys.setdefault(key, [])
                if (number, place) not in owners:
                    owners.append((number, place))

    def deleted(self, keys: Iterable[str]) -> None:
        """Record blocks that are about to be deleted: from now on they may be missing."""
        for key in keys:
            for number, place in self.keys.get(key, ()):
                self.kept[number] = min(self.kept.get(number, 0), place)


def check(
    path: Path,
    known: Sequence[Prompt],
    promise: Promise,
    *,
    is_damaged: bool = False,
    **options: Any,
) -> list[Finding]:
    """Open a store as its owner and compare its blocks with the prompts and the promise.

    With ``is_damaged`` its file was changed: blocks may be missing and counted as bad, and the store
    may be set aside, but no block may be wrong. A store without a promise may be set aside too: it was
    cut while it was made. Afterwards the store must work.
    """
    promised = promise.is_made
    try:
        cache = open_cache(path, LAYOUT, role="owner", **options)
    except KVStoreError as error:
        is_lost = promised and not is_damaged
        return [Finding("lost" if is_lost else "other", f"it cannot be opened: {error}")]
    with cache:
        findings = _check_open(cache, known, promise, is_damaged=is_damaged)
        counters = cache.stats()["counters"]
        if not is_damaged and promised and counters["quarantined_stores"]:
            findings.append(Finding("lost", "it was set aside as broken"))
        if not is_damaged and counters["corrupt_blocks"]["total"]:
            findings.append(Finding("other", f"torn blocks: {counters['corrupt_blocks']}"))
        if not is_damaged and counters["dropped_blocks"].get("orphan"):
            findings.append(Finding("other", f"orphans: {counters['dropped_blocks']}"))
        # A full store evicts promised blocks for the next prompt: they are no loss in a later check.
        tier_of(cache).hooks["delete"] = lambda keys: promise.deleted(key.hex() for key in keys)
        findings += still_works(cache)
        size = (path / "data.mdb").stat().st_size
        if size > tier_of(cache).capacity_bytes and not is_damaged:
            findings.append(Finding("other", f"the file takes {size} bytes, above its cap"))
    return findings


def _check_open(
    cache: PrefixCache, known: Sequence[Prompt], promise: Promise, *, is_damaged: bool
) -> list[Finding]:
    findings: list[Finding] = []
    for number, prompt in enumerate(known):
        blocks, wrong = read_check(cache, prompt, number)
        findings += wrong
        least = 0 if is_damaged or wrong else promise.kept.get(number, 0)
        if blocks < least:
            text = f"prompt {number}: {blocks} blocks left of {least} that were flushed"
            findings.append(Finding("lost", text))
    return findings


def still_works(cache: PrefixCache) -> list[Finding]:
    """Store, flush and read one more prompt."""
    prompt = tokens_of(2 * BLOCK + 1, 999_999_937).astype(np.uint32)
    store(cache, prompt)
    cache.flush()
    blocks, findings = read_check(cache, prompt, "afterwards")
    if blocks != 2 and not findings:
        stats = cache.stats()
        findings = [Finding("other", f"it stores nothing any more: {stats['counters']}")]
    return findings
