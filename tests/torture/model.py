"""A cache against a dict: no wrong byte, no hit that was never stored, no lost block, no leaked pin.

``CacheModel`` does and checks one operation at a time. Hypothesis drives it for small examples
(tests/cache/test_machine.py), a seeded generator for long tests.
"""

from __future__ import annotations

import errno
import math
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore import (
    ImageSpan,
    Match,
    Namespace,
    PinnedPages,
    ReplayRequest,
    StoreError,
    WindowSnapshot,
)
from kvstore.cache.scope import Scope
from kvstore.store.namespaces import namespace_facts
from kvstore.tier.ssd.capacity import usage_of
from tests.builders import Clock
from tests.stores import BLOCK, WINDOWED, entries_of, inside, open_cache, tier_of, writer_of
from tests.torture.runner import Case, Finding, Kind

CAPACITY = 1 << 20
WINDOW = WINDOWED.window_tokens
WINDOW_TTL = 300.0
QUOTA = 64 << 10
"""Quota of the second tenant: 16 blocks, a few more than its longest prompt."""
Identity = tuple[int, int, int, tuple[int, ...]]
"""The identity of a prefix: tenant, generation, image and walk."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A walk through a tree with two branches at each block, so that prompts fork and share."""

    walk: tuple[int, ...]
    tail: int = 0
    """Tokens after the last whole block."""
    image: int = 0
    """0 for none; an image is in blocks 1 and 2 of a prompt of at least 3 blocks."""
    tenant: int = 0

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Token ids, which are equal for all images."""
        return _tokens(self.walk, self.tail)

    @property
    def images(self) -> list[ImageSpan]:
        """The image, if there is one."""
        digest = b"image %d" % self.image
        return [ImageSpan(BLOCK + 2, 2 * BLOCK + 3, digest)] if self._has_image else []

    @property
    def _has_image(self) -> bool:
        return self.image > 0 and len(self.walk) > 2

    def prefix(self, blocks: int, generation: int) -> Identity:
        """Return the identity of the first ``blocks`` blocks."""
        image = self.image if self._has_image and blocks > 1 else 0
        return (self.tenant, generation, image, self.walk[:blocks])

    def entries(self, generation: int) -> dict[str, NDArray[np.uint8]]:
        """Return the entries of all tokens."""
        image = self.image if self._has_image else 0
        whole = _entries(self.walk, image, self.tenant, generation)
        tokens = len(self.walk) * BLOCK + self.tail
        return {
            group.name: whole[group.name][:, : tokens // group.tokens_per_entry]
            for group in WINDOWED.global_groups
        }


@lru_cache(maxsize=1 << 14)
def _tokens(walk: tuple[int, ...], tail: int) -> NDArray[np.uint32]:
    ids = np.repeat(np.array(walk, np.uint32), BLOCK) * 1000 + np.tile(np.arange(BLOCK), len(walk))
    return np.concatenate([ids, np.arange(tail)]).astype(np.uint32)


@lru_cache(maxsize=1 << 14)
def _entries(
    walk: tuple[int, ...], image: int, tenant: int, generation: int
) -> dict[str, NDArray[np.uint8]]:
    """Return entries that depend on the whole identity, so that a mix-up shows in the bytes."""
    ids = _tokens(walk, BLOCK - 1).astype(np.uint64)
    ids[0] += np.uint64(1_000_003 * tenant + 10_000_019 * generation)
    if image:
        ids[BLOCK + 2] += np.uint64(7_000_003 * image)
    return entries_of(WINDOWED, ids)


def window_of(identity: Identity, start: int, stop: int) -> WindowSnapshot:
    """Return the window at the end of a prefix, different for every prefix."""
    salt = zlib.crc32(repr(identity).encode())
    rows = {}
    for group in WINDOWED.window_groups:
        at = np.arange(start, stop, dtype=np.uint64)[None, :, None] + np.uint64(salt)
        layers = np.array(group.layers, np.uint64)[:, None, None]
        column = np.arange(group.entry_bytes, dtype=np.uint64)[None, None, :]
        rows[group.name] = ((at * np.uint64(31) + layers * np.uint64(7) + column) % 251).astype(
            np.uint8
        )
    return WindowSnapshot(start, stop, rows)


class CacheModel:
    """One cache, the prefixes that it may have, and the matches held on it.

    No random choice may depend on the resident blocks, which depend on the timing of commits: a choice
    is a number modulo a size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.generations = [0, 0]
        self.known: dict[Identity, float] = {}
        """Prefixes stored since the last clear, with their expiry."""
        self.windows: dict[Identity, float] = {}
        """Prefixes with a pooled window, with its expiry."""
        self.held: list[tuple[Match, PinnedPages | None, Prompt, int]] = []
        self._failing: list[BaseException] = []
        self._open()

    def _open(self) -> None:
        self.cache = open_cache(
            self.folder / "s",
            WINDOWED,
            ssd_bytes=CAPACITY,
            device_bytes="16KiB",
            window_bytes="64KiB",
            window_ttl=WINDOW_TTL,
            clock=self.clock,
        )
        self.scopes: list[Scope] = [
            self.cache.scope(Namespace(model="test", tenant=f"tenant {n}"), ssd_quota=quota)
            for n, quota in enumerate((None, QUOTA))
        ]
        for scope, generation in zip(self.scopes, self.generations, strict=True):
            assert scope.namespace.generation == generation, "a restart went back to old weights"
        real = tier_of(self.cache).put

        def put(*args: Any) -> None:
            if self._failing:
                raise self._failing.pop(0)
            real(*args)

        tier_of(self.cache).put = put  # type: ignore[method-assign,assignment]

    def end(self) -> None:
        """Release all matches, close the cache and remove the files."""
        self._failing.clear()
        self.let_go()
        self.cache.close()
        shutil.rmtree(self.folder)

    # ---- operations ----------------------------------------------------------------------------

    def store(
        self,
        prompt: Prompt,
        *,
        skipped: int = 0,
        ttl: float | None = None,
        pin: bool = False,
        is_full: bool = False,
    ) -> None:
        """Store a prompt from block ``skipped`` on; with ``is_full`` the queue has no room."""
        scope, generation = self.scopes[prompt.tenant], self.generations[prompt.tenant]
        blocks = len(prompt.walk)
        start = min(skipped, blocks)
        entries = {
            group.name: prompt.entries(generation)[group.name][
                :, start * BLOCK // group.tokens_per_entry :
            ]
            for group in WINDOWED.global_groups
        }
        writer = writer_of(self.cache).queue
        room, writer._queue_blocks = writer._queue_blocks, 0 if is_full else writer._queue_blocks
        try:
            stored = scope.store(
                prompt.tokens,
                entries,
                start * BLOCK,
                wait=0 if is_full else 30,
                ttl=ttl,
                pin=pin,
                images=prompt.images,
            )
        finally:
            writer._queue_blocks = room
        assert 0 <= stored.end <= blocks * BLOCK
        assert stored.end // BLOCK + stored.dropped >= blocks - start
        ends = math.inf if ttl is None else self.clock.now + ttl
        for count in range(1, blocks + 1):
            prefix = prompt.prefix(count, generation)
            if count > start or prefix in self.known:
                self.known[prefix] = max(self.known.get(prefix, 0.0), ends)
        if pin:
            self.flush()
            scope.unpin(prompt.tokens, images=prompt.images)

    def store_and_find(self, prompt: Prompt) -> None:
        """Store and flush a prompt: it is a hit unless blocks were dropped or a write failed."""
        before = self._losses()  # the writer may commit, and evict, as soon as the prompt is queued
        self.store(prompt)
        if not self.flush() or writer_of(self.cache).is_read_only or self._failing:
            return
        found = self.scopes[prompt.tenant].probe(prompt.tokens, images=prompt.images)
        if self._losses() == before:
            want = max(0, (len(prompt.tokens) - 1) // BLOCK)
            assert found.hit_tokens == want * BLOCK, "a flushed prompt is no hit"

    def _losses(self) -> int:
        """Count what excuses a store that is no hit: a quota, or a map said to be full, evicts it at once."""
        counters = inside(self.cache).metrics
        lost = counters.dropped_blocks.total() + counters.write_errors
        return lost + counters.evicted_blocks["ssd"]

    def read(self, prompt: Prompt, request_id: str | None = None) -> None:
        """Look up a prompt and read it."""
        scope = self.scopes[prompt.tenant]
        generation = self.generations[prompt.tenant]
        with scope.lookup(prompt.tokens, request_id, images=prompt.images) as match:
            self._check_hit(prompt, match)
            hit = match.hit_tokens
            found = scope.read(match)
            assert found.tokens == hit, "what was looked up is what loads"
            self._check_entries(prompt, found, generation)

    def probe(self, prompt: Prompt) -> None:
        """Probe a prompt."""
        match = self.scopes[prompt.tenant].probe(prompt.tokens, images=prompt.images)
        self._check_hit(prompt, match)

    def forget(self, prompt: Prompt) -> None:
        """Look up a prompt without using the match: its lease must expire."""
        self.scopes[prompt.tenant].lookup(prompt.tokens, images=prompt.images)

    def _check_hit(self, prompt: Prompt, match: Match) -> None:
        assert match.hit_tokens <= max(0, len(prompt.tokens) - 1) // BLOCK * BLOCK
        generation = self.generations[prompt.tenant]
        for count in range(1, match.hit_tokens // BLOCK + 1):
            ends = self.known.get(prompt.prefix(count, generation), 0.0)
            assert self.clock.now < ends, "a hit on what was never stored, or is over"

    @staticmethod
    def _check_entries(prompt: Prompt, found: Any, generation: int) -> None:
        for name, expected in prompt.entries(generation).items():
            array = found[name]
            assert np.array_equal(array, expected[:, : array.shape[1]]), f"other bytes in {name}"

    def hold(self, prompt: Prompt, *, load: bool) -> None:
        """Enter a match, perhaps load it, and keep it."""
        if len(self.held) >= 3:
            return
        match = self.scopes[prompt.tenant].lookup(prompt.tokens, images=prompt.images)
        match.__enter__()
        pages = self.scopes[prompt.tenant].load(match) if load else None
        self.held.append((match, pages, prompt, self.generations[prompt.tenant]))

    def let_go(self) -> None:
        """Read the held matches again, and release them."""
        for match, pages, prompt, generation in self.held:
            found = self.scopes[prompt.tenant].read(match)
            assert found.tokens == match.hit_tokens, "a held match lost blocks"
            self._check_entries(prompt, found, generation)
            if pages is not None:
                self._check_pages(pages, prompt.entries(generation))
                pages.release()
            match.__exit__(None, None, None)
        self.held = []

    def _check_pages(self, pages: PinnedPages, expected: dict[str, NDArray[np.uint8]]) -> None:
        for name, tensor in self.cache.device.tensors.items():
            rows = np.concatenate([*tensor[pages.page_ids].numpy(), expected[name][:, :0]], axis=1)
            assert np.array_equal(rows, expected[name][:, : rows.shape[1]]), (
                f"other pages of {name}"
            )

    def put_window(self, prompt: Prompt, choice: int) -> None:
        """Put the window at the end of a prefix into the pool."""
        blocks = len(prompt.walk)
        least = -(-WINDOW // BLOCK)
        if blocks < least:
            return
        stop = least + choice % (blocks - least + 1)
        identity = prompt.prefix(stop, self.generations[prompt.tenant])
        snapshot = window_of(identity, stop * BLOCK - WINDOW, stop * BLOCK)
        scope = self.scopes[prompt.tenant]
        if scope.put_window(prompt.tokens, snapshot, images=prompt.images):
            self.windows[identity] = self.clock.now + WINDOW_TTL

    def window(self, prompt: Prompt) -> None:
        """Request a window: pooled or replayed, it is that of its prefix."""
        generation = self.generations[prompt.tenant]

        def hook(requests: Sequence[ReplayRequest]) -> list[WindowSnapshot]:
            return [
                window_of(prompt.prefix(r.stop // BLOCK, generation), r.start, r.stop)
                for r in requests
            ]

        with self.scopes[prompt.tenant].lookup(prompt.tokens, images=prompt.images) as match:
            found = self.scopes[prompt.tenant].window(match, hook)
            if found.source == "none":
                assert not match.hit_tokens
                return
            identity = prompt.prefix(found.stop // BLOCK, generation)
            assert found.stop == match.hit_tokens
            for name, rows in window_of(identity, found.start, found.stop).rows.items():
                assert np.array_equal(found.rows[name], rows), "another prefix's window"
            if found.source == "pool":
                assert self.clock.now < self.windows.get(identity, 0.0), "a window from nowhere"
            else:
                self.windows[identity] = self.clock.now + WINDOW_TTL

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds

    def flush(self) -> bool:
        """Flush; return whether it was acknowledged, which it must be unless a write failed."""
        try:
            self.cache.flush()
        except StoreError:
            # A medium that failed has said so; one that did not must not.
            assert writer_of(self.cache).failures.count, "a flush failed on a sound medium"
            return False
        return True

    def reopen(self) -> None:
        """Close and open: the resident blocks and generations stay the same."""
        if self.held:
            return
        self._failing.clear()
        self.flush()
        before = self.resident()
        back = set(map(bytes, writer_of(self.cache).removal.undeleted))  # a delete failed
        self.cache.close()
        self._open()
        self.windows.clear()
        now = self.resident()
        assert now == before or (back and now <= before | back)

    def clear(self, tenant: int) -> None:
        """Clear one tenant; the other keeps its blocks."""
        if self.held:
            return
        with suppress(StoreError):
            self.cache.clear(self.scopes[tenant])
            generation = self.generations[tenant]
            for known in (self.known, self.windows):
                for key in [key for key in known if key[:2] == (tenant, generation)]:
                    del known[key]

    def bump_generation(self, tenant: int) -> None:
        """Begin a new generation of weights: no block of the old one is a hit."""
        self.generations[tenant] += 1
        assert self.scopes[tenant].bump_generation() == self.generations[tenant]

    # ---- faults --------------------------------------------------------------------------------

    def fail_writes(self, count: int, sort: int) -> None:
        """Make the next commits fail; after three in a row the store is read-only until it is reopened."""
        errors: list[Callable[[], BaseException]] = [
            lambda: lmdb.MapFullError("full"),
            lambda: lmdb.DiskError("No space left on device"),
            lambda: OSError(errno.EIO, "Input/output error"),
        ]
        self._failing = [errors[sort % len(errors)]() for _ in range(count)]

    def damage(self, prompt: Prompt, choice: int, *, lose: bool) -> None:
        """Corrupt or delete a block on the medium: the hit is shorter, no byte is wrong."""
        if self.held or not self.flush():
            return
        scope = self.scopes[prompt.tenant]
        hit = scope.probe(prompt.tokens, images=prompt.images).residency["ssd"] // BLOCK
        if not hit:
            return
        number = choice % hit
        with scope.lookup(prompt.tokens, images=prompt.images) as match:
            key, ssd = match.prefix.key(number), tier_of(self.cache)
            record = ssd.record(key)
            if lose:
                ssd.delete([key])
            elif record is not None and record.page:
                with (self.folder / "s" / "data.mdb").open("r+b") as file:
                    file.seek(record.page * 4096 + 16 + choice % ssd.options.frame_bytes)
                    (byte,) = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 1 << choice % 8]))
            found = scope.read(match)
            assert number * BLOCK <= found.tokens == match.hit_tokens
            is_bad = lose or (record is not None and record.page > 0)
            if is_bad and not match.residency.get("device"):  # its copy there may be intact
                assert found.tokens == number * BLOCK, "a bad block was handed out"
            self._check_entries(prompt, found, self.generations[prompt.tenant])

    # ---- invariants ----------------------------------------------------------------------------

    def resident(self) -> set[bytes]:
        """Return the keys in the index."""
        return {
            bytes(key) for segment in writer_of(self.cache).index for key in segment.block_keys()
        }

    def check_accounts(self) -> None:
        """Recount everything."""
        shared = inside(self.cache)
        index = writer_of(self.cache).index
        with (
            writer_of(self.cache).changing,
            shared.context.lock,
        ):  # no commit pins parents meanwhile
            assert index.blocks == sum(segment.blocks for segment in index)
            assert index.segments == sum(1 for _ in index)
            for segment in index:
                parent = segment.parent
                assert parent is not None
                assert segment.start == parent.stop
                assert parent.children[segment.keys[:16]] is segment
            device = shared.device
            if device.is_open:
                pages = set(device._page_of.values())
                assert len(pages) == len(device._page_of) == device.index.blocks
                assert pages.isdisjoint(device.tier._free)
                assert len(pages) + device.tier.free_pages == device.tier.page_count
            pinned = sum(segment.pins for segment in index)
        if not self.held:
            live = sum(not pins.is_released for pins in shared.leases._lent)
            assert pinned <= live + 4, "pins outlive their matches"  # a commit pins its parents
        self.check_file()
        self.check_usage()

    def check_usage(self) -> None:
        """The bytes of each namespace are those of its records, and no more than its quota."""
        side = writer_of(self.cache)
        with side.changing:
            usage = usage_of(record for _, record in side.ssd.records())
            assert +side.ssd.usage == usage == side.ssd.usage, "bytes by namespace do not recount"
            assert usage.keys() <= namespace_facts(side.ssd).keys(), "a block of no namespace"
            spaces = side.namespaces.table({}, usage)
            used = sum(space["bytes"] for space in spaces if space["tenant"] == "tenant 1")
            assert used <= QUOTA or side.removal.undeleted, "a tenant is above its quota"

    def check_file(self) -> None:
        """The file is never above its cap."""
        assert (self.folder / "s" / "data.mdb").stat().st_size <= CAPACITY


# ---- long runs ---------------------------------------------------------------------------------

_ACCOUNTS_EVERY = 50
OPERATIONS = 1_000
"""Operations on one store; the next store has its own seed, so that a failure is reproducible."""


def _prompt(rng: random.Random) -> Prompt:
    walk = tuple(rng.choices((0, 1), (3, 1), k=rng.randint(1, 12)))
    return Prompt(walk, rng.randrange(BLOCK), rng.choice((0, 0, 0, 1, 2)), rng.choice((0, 0, 1)))


def _operations(model: CacheModel, rng: random.Random) -> list[tuple[int, Callable[[], object]]]:
    """Return weighted operations; every random choice is drawn in every state."""
    n, odds, prompt = rng.randrange(1 << 16), rng.random(), _prompt(rng)
    ttl = rng.choice((None, None, None, 10.0, 1000.0))
    return [
        (22, lambda: model.store(prompt, ttl=ttl, pin=odds < 0.05)),
        (4, lambda: model.store(prompt, skipped=n % 8, ttl=ttl)),
        (1, lambda: model.store(prompt, is_full=True)),
        (6, lambda: model.store_and_find(prompt)),
        (24, lambda: model.read(prompt, request_id=None if odds < 0.8 else f"r{n % 4}")),
        (8, lambda: model.probe(prompt)),
        (6, lambda: model.forget(prompt)),
        (5, lambda: model.hold(prompt, load=odds < 0.5)),
        (4, model.let_go),
        (5, lambda: model.put_window(prompt, n)),
        (5, lambda: model.window(prompt)),
        (3, lambda: model.wait((1.0, 29.0, 31.0, 400.0)[n % 4])),
        (3, model.flush),
        (1, lambda: model.reopen() if odds < 0.5 else None),
        (1, lambda: model.clear(n % 2) if odds < 0.3 else None),
        (1, lambda: model.bump_generation(n % 2) if odds < 0.3 else None),
        (1, lambda: model.fail_writes(1 + n % 4, n // 4) if odds < 0.5 else None),
        (2, lambda: model.damage(prompt, n, lose=odds < 0.5)),
    ]


def drive(case: Case) -> list[Finding]:
    """Do operations drawn from a seed."""
    rng = case.rng()
    model = CacheModel(case.folder / "m")
    at = 0
    try:
        for at in range(case.amount):
            operations = _operations(model, rng)
            weights, calls = zip(*operations, strict=True)
            rng.choices(calls, weights)[0]()
            model.check_file()
            if at % _ACCOUNTS_EVERY == 0:
                model.check_accounts()
        model.check_accounts()
        model.end()
    except AssertionError as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        line = place.tb_lineno if place is not None else 0
        is_wrong = "other" in str(error) or "another" in str(error) or "nowhere" in str(error)
        is_lost = "lost" in str(error) or "no hit" in str(error)
        text = f"operation {at}: {str(error) or 'an assertion'} (line {line})"
        return [Finding("wrong" if is_wrong else "lost" if is_lost else "other", text)]
    return []


KINDS: Sequence[Kind] = (
    Kind("model", "operations against a dict", drive, 5_000, 1_000_000, batch=OPERATIONS),
)
