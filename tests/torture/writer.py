"""A process that stores prompts, and reports the store's promises. It imports no torch."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb

from kvstore import KVStoreError, PrefixCache
from kvstore.identity.block import BlockKey
from kvstore.transfer import commit_queue
from tests.stores import BLOCK, open_cache, tier_of
from tests.torture.prompts import LAYOUT, Prompt, blocks_of, keys_of, store

Tell = Callable[[dict[str, Any]], None]
"""Takes ``{"resident": ..., "keys": ...}`` after a flush, ``{"deleted": [...]}`` before a delete."""


@contextmanager
def whole_batches() -> Iterator[None]:
    """Let commits wait for a full batch or a flush, never for a clock: what they hold follows."""
    with mock.patch.object(commit_queue, "LINGER_SECONDS", 3600.0):
        yield


@contextmanager
def without_sync() -> Iterator[None]:
    """Open LMDB without syncs: the self-test of the harness."""
    real = lmdb.open

    def careless(*args: Any, **options: Any) -> lmdb.Environment:
        return real(*args, **{**options, "sync": False})

    with mock.patch.object(lmdb, "open", careless):
        yield


def tell_deletes(cache: PrefixCache, tell: Tell) -> None:
    """Tell of every delete before it happens: from then on a block may be gone."""
    ssd = tier_of(cache)
    real = ssd.delete

    def delete(keys: Sequence[BlockKey]) -> None:
        if keys:
            tell({"deleted": [key.hex() for key in keys]})
        real(keys)

    ssd.delete = delete  # type: ignore[method-assign]


def write(
    path: Path,
    known: Sequence[Prompt],
    rng: random.Random,
    tell: Tell,
    *,
    steps: float = math.inf,
    **options: Any,
) -> None:
    """Store prompts in a random order, with random flushes; at the end, close or not."""
    assert "torch" not in sys.modules, "a writer needs no torch"
    try:
        cache = open_cache(path, LAYOUT, role="owner", **options)
    except KVStoreError:  # the disk failed at that moment: try again, as a user would
        cache = open_cache(path, LAYOUT, role="owner", **options)
    tell_deletes(cache, tell)
    at = 0
    while at < steps:
        at += 1
        with suppress(KVStoreError):
            _step(cache, known, rng)
        while rng.random() < 0.4:
            flush(cache, known, tell)
    if rng.random() < 0.5:
        with suppress(KVStoreError):
            cache.close()


def _step(cache: PrefixCache, known: Sequence[Prompt], rng: random.Random) -> None:
    prompt, kind = rng.choice(known), rng.random()
    cut = rng.randint(1, blocks_of(prompt)) * BLOCK + 1
    if kind < 0.02:
        cache.clear()
    elif kind < 0.12:  # a use, written with the next commit
        cache.lookup(prompt)
    else:
        store(cache, prompt[:cut], ttl=rng.choice([None, None, 1e9]))


def flush(cache: PrefixCache, known: Sequence[Prompt], tell: Tell) -> bool:
    """Flush; if it is acknowledged, report the promised blocks."""
    try:
        cache.flush()
    except KVStoreError:
        return False
    resident, keys = {}, {}
    for number, prompt in enumerate(known):
        blocks = cache.probe(prompt).residency["ssd"] // BLOCK
        if blocks:
            resident[str(number)] = blocks
            keys[str(number)] = keys_of(cache, prompt)[:blocks]
    tell({"resident": resident, "keys": keys})
    return True


def as_text(told: dict[str, Any]) -> str:
    """Return a report as one line."""
    return json.dumps(told, separators=(",", ":"))
