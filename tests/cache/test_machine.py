"""A cache against a dict: no wrong byte, no lost block, no leaked pin, whatever the order of calls."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import Match, PinnedPages
from tests.cache.test_contract import Clock
from tests.stores import BLOCK, DENSE, assert_entries, entries_of, open_cache

# Prompts are walks through a tree with two branches at each block, so that they fork and share.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
TAIL = st.integers(0, BLOCK - 1)
CAPACITY = "1MiB"  # about 70 blocks: the tree has more, so eviction is part of the game


def tokens_for(walk: list[int], tail: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    ids = np.repeat(np.array(walk, np.uint32), BLOCK) * 1000 + np.tile(np.arange(BLOCK), len(walk))
    return np.concatenate([ids, np.arange(tail)]).astype(np.uint32)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.cache = self.open()
        self.offered: set[tuple[int, ...]] = set()
        """Prefixes (walks) that were stored since the last clear: what may hit."""
        self.held: list[tuple[Match, PinnedPages | None]] = []

    def open(self) -> Any:
        return open_cache(
            self.folder / "s", ssd_bytes=CAPACITY, device_bytes="256KiB", clock=self.clock
        )

    def teardown(self) -> None:
        self.let_go()
        self.cache.close()
        shutil.rmtree(self.folder)

    @rule(walk=PROMPTS, tail=TAIL, pin=st.booleans())
    def store(self, walk: list[int], tail: int, pin: bool) -> None:
        tokens = tokens_for(walk, tail)
        match = self.cache.probe(tokens)
        start = match.hit_tokens
        stored = self.cache.store(tokens, entries_of(DENSE, tokens, start), start, wait=30, pin=pin)
        assert stored.end // BLOCK + stored.dropped == len(walk)
        self.offered.update(tuple(walk[:n]) for n in range(1, len(walk) + 1))
        if pin:
            self.cache.flush()
            self.cache.unpin(tokens)

    @rule(walk=PROMPTS, tail=TAIL)
    def read(self, walk: list[int], tail: int) -> None:
        tokens = tokens_for(walk, tail)
        with self.cache.lookup(tokens) as match:
            assert match.hit_tokens <= (len(tokens) - 1) // BLOCK * BLOCK
            hit = match.hit_tokens
            assert not hit or tuple(walk[: hit // BLOCK]) in self.offered
            found = self.cache.read(match)
            assert found.tokens == hit, "what was looked up is what loads"
            assert_entries(DENSE, found, tokens, hit)

    @rule(walk=PROMPTS, load=st.booleans())
    @precondition(lambda self: len(self.held) < 3)
    def hold(self, walk: list[int], load: bool) -> None:
        match = self.cache.lookup(tokens_for(walk, 1))
        match.__enter__()
        self.held.append((match, self.cache.load(match) if load else None))

    @rule()
    def let_go(self) -> None:
        for match, pages in self.held:
            found = self.cache.read(match)
            assert found.tokens == match.hit_tokens, "a held match lost blocks"
            assert_entries(DENSE, found, match.tokens, found.tokens)
            if pages is not None:
                expected = entries_of(DENSE, match.tokens[: pages.tokens])
                for name, tensor in self.cache.device.tensors.items():
                    pages_in_order = tensor[pages.page_ids].numpy()
                    rows = np.concatenate([*pages_in_order, expected[name][:, :0]], axis=1)
                    np.testing.assert_array_equal(rows, expected[name])
                pages.release()
            match.__exit__(None, None, None)
        self.held = []

    @rule(walk=PROMPTS)
    def look_and_forget(self, walk: list[int]) -> None:
        self.cache.lookup(tokens_for(walk, 1))

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0, 1e9]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @precondition(lambda self: not self.held)
    @rule()
    def reopen(self) -> None:
        self.cache.flush()
        before = self.resident()
        self.cache.close()
        self.cache = self.open()
        assert self.resident() == before

    @precondition(lambda self: not self.held)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.offered.clear()
        assert self.resident() == set()
        assert self.cache.stats()["tiers"]["ssd"]["blocks"] == 0

    @precondition(lambda self: not self.held)
    @rule(walk=PROMPTS, choice=st.integers(0, 1 << 16))
    def lose_a_block(self, walk: list[int], choice: int) -> None:
        """The medium loses a block: the hit shortens, and storing again heals it.

        What is stored depends on how commits fell together, so nothing may be drawn from it.
        """
        self.cache.flush()
        tokens = tokens_for(walk, 1)
        hit = self.cache.probe(tokens).residency["ssd"] // BLOCK
        if not hit:
            return
        number = choice % hit
        with self.cache.lookup(tokens) as match:
            self.cache._shared.ssd.delete([match.prefix.key(number)])
            found = self.cache.read(match)
            assert number * BLOCK <= found.tokens == match.hit_tokens
            assert_entries(DENSE, found, tokens, found.tokens)

    def resident(self) -> set[bytes]:
        index = self.cache._shared.owned.index
        return {
            segment.keys[at : at + 16]
            for segment in index
            for at in range(0, len(segment.keys), 16)
        }

    @invariant()
    def accounts_agree(self) -> None:
        shared = self.cache._shared
        with shared.context.lock:
            index = shared.owned.index
            assert index.blocks == sum(segment.blocks for segment in index)
            assert index.segments == sum(1 for _ in index)
            for segment in index:
                parent = segment.parent
                assert parent is not None
                assert segment.start == parent.stop
                assert parent.children[segment.keys[:16]] is segment
            if shared.pages is not None:
                pages = set(shared.pages._page_of.values())
                assert len(pages) == len(shared.pages._page_of) == shared.pages.index.blocks
                assert pages.isdisjoint(shared.pages.tier._free)
                assert len(pages) + shared.pages.tier.free_pages == shared.pages.tier.page_count
            pinned = sum(segment.pins for segment in index)
        if not self.held:
            live = sum(not hold.is_released for hold in shared._leases)
            assert pinned <= live + 4, "pins outlive their matches"  # a commit pins its parents

    @invariant()
    def file_stays_below_its_cap(self) -> None:
        assert (self.folder / "s" / "data.mdb").stat().st_size <= 1 << 20


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
TestCacheAgainstADict = CacheMachine.TestCase
