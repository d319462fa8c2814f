"""Reads of long prefixes: many threads, deadlines, and layer after layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import ConfigError, Layout, Pages, PrefixCache
from kvstore.cache import jobs, ssd_reads
from kvstore.frame.format import FrameFormat
from kvstore.identity.block import BlockKey
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import ReadResult
from tests.stores import (
    BLOCK,
    DENSE,
    WINDOWED,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    tier_of,
    tokens_of,
)

SOON = 30.0
"""Seconds that only a hang takes."""
BLOCKS = 24


@pytest.fixture
def by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every block a run of its own."""
    monkeypatch.setattr(ssd_reads, "RUN_BYTES", 1)


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every layer a batch of its own."""
    monkeypatch.setattr("kvstore.frame.geometry.PART_BATCH_BYTES", 1)
    monkeypatch.setattr("kvstore.frame.geometry.PART_BATCH_BLOCK_BYTES", 1)


def kept(cache: PrefixCache, layout: Layout = DENSE, blocks: int = BLOCKS) -> Any:
    tokens = tokens_of(blocks * BLOCK + 1)
    cache.store(tokens, entries_of(layout, tokens))
    cache.flush()
    return tokens


def pages_of(layout: Layout, blocks: int) -> Pages:
    """Pages of bytes, one a block."""
    tensors = {
        group.name: [
            torch.zeros(
                (blocks, BLOCK // group.tokens_per_entry, group.entry_bytes), dtype=torch.uint8
            )
            for _ in group.layers
        ]
        for group in layout.global_groups
    }
    return Pages(tensors, list(range(blocks)))


def entries_in(pages: Pages, tokens: int, layout: Layout) -> dict[str, Any]:
    return {
        group.name: np.stack([layer.flatten(0, 1).numpy() for layer in pages.tensors[group.name]])[
            :, : tokens // group.tokens_per_entry
        ]
        for group in layout.global_groups
    }


def damage(cache: PrefixCache, tokens: Any, number: int, layer: int | None = None) -> None:
    """Change a byte of a block on the medium, in the part of a layer or in its head."""
    tier, form = tier_of(cache), inside(cache).format
    assert isinstance(form, FrameFormat)
    frame = tier.frame(cache.probe(tokens).prefix.key(number))
    assert frame is not None
    byte = 40 if layer is None else form.part_bounds[list(form.members).index(layer)][0] + 5
    with (tier.path / "data.mdb").open("r+b") as file:
        at = (data := file.read()).find(frame)
        assert at > 0
        while at > 0:  # small frames move with the pages of a tree
            file.seek(at + byte)
            file.write(bytes([frame[byte] ^ 1]))
            at = data.find(frame, at + 1)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BlockKey], threading.Event]]:
    """Let reads of a block hang; what is returned is set once one does."""
    released, hung = threading.Event(), dict[BlockKey, threading.Event]()
    read = SsdTier.read

    def slow(self: SsdTier, keys: Sequence[BlockKey], *args: Any, **named: Any) -> ReadResult:
        for key in keys:
            if key in hung:
                hung[key].set()
                assert released.wait(SOON)
        return read(self, keys, *args, **named)

    def hang(key: BlockKey) -> threading.Event:
        return hung.setdefault(key, threading.Event())

    monkeypatch.setattr(SsdTier, "read", slow)
    yield hang
    released.set()


@pytest.mark.usefixtures("by_block")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("layout", [DENSE, WINDOWED], ids=["dense", "windowed"])
def test_threads_share_a_read_and_agree(tmp_path: Path, layout: Layout, threads: int) -> None:
    with open_cache(tmp_path / "s", layout, read_threads=threads, device_bytes="1MiB") as cache:
        tokens = kept(cache, layout)
        with cache.lookup(tokens) as match:
            assert_entries(layout, cache.read(match), tokens, BLOCKS * BLOCK)
            with cache.load(match) as pages:
                assert pages.tokens == BLOCKS * BLOCK
            damage(cache, tokens, 17)
            damage(cache, tokens, 9)
        with cache.lookup(tokens) as match:
            found = cache.read(match)
            assert found.tokens == 9 * BLOCK
            assert_entries(layout, found, tokens, 9 * BLOCK)
        counters = cache.stats()["counters"]
        assert counters["corrupt_blocks"]["total"] == 1, (
            "what hangs on a bad block is no other fault"
        )
        assert cache.probe(tokens).residency["ssd"] == 9 * BLOCK
    helpers = [each for each in threading.enumerate() if each.name.startswith("kvstore-read")]
    for each in helpers:
        each.join(SOON)
    assert not any(each.is_alive() for each in helpers), "closing lets the threads go"


@pytest.mark.usefixtures("by_block")
def test_a_read_is_back_by_its_deadline_with_what_came_in_time(
    tmp_path: Path, hang: Callable[[BlockKey], threading.Event]
) -> None:
    with open_cache(tmp_path / "s", read_threads=3) as cache:
        tokens = kept(cache)
        with cache.lookup(tokens) as match:
            hung = hang(match.prefix.key(7))
            found = cache.read(match, timeout=0.3)
            assert hung.is_set()
            assert match.hit_tokens == found.tokens == 7 * BLOCK
            assert_entries(DENSE, found, tokens, 7 * BLOCK)
        assert cache.stats()["counters"]["late_blocks"] == BLOCKS - 7
        assert cache.stats()["counters"]["corrupt_blocks"]["total"] == 0
        assert cache.probe(tokens).hit_tokens == BLOCKS * BLOCK, "late is not bad"


@pytest.mark.usefixtures("by_block")
def test_a_disk_that_hangs_for_all_threads_holds_up_nobody_with_a_deadline(
    tmp_path: Path, hang: Callable[[BlockKey], threading.Event]
) -> None:
    with open_cache(tmp_path / "s", read_threads=3) as cache:
        tokens = kept(cache)
        for number in range(BLOCKS):
            hang(cache.probe(tokens).prefix.key(number))
        for _ in range(3):
            assert cache.read(cache.lookup(tokens), timeout=0.05).tokens == 0


def test_no_time_at_all_reads_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        for timeout in (0, -1.0):
            assert cache.read(cache.lookup(tokens), timeout=timeout).tokens == 0
            with cache.load(cache.lookup(tokens), timeout=timeout) as pages:
                assert pages.tokens == 0
        with pytest.raises(ValueError, match="timeout must be seconds, found 'soon'"):
            cache.read(cache.lookup(tokens), timeout="soon")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout must be seconds, found nan"):
            cache.load(cache.lookup(tokens), timeout=float("nan"))
        assert cache.read(cache.lookup(tokens), timeout=1e300).tokens == BLOCKS * BLOCK


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
def test_a_number_of_threads_that_is_none_is_refused(tmp_path: Path, threads: Any) -> None:
    with pytest.raises(ConfigError, match="read_threads must be a positive integer"):
        open_cache(tmp_path / "s", read_threads=threads)


@pytest.mark.usefixtures("by_block", "by_layer")
def test_a_job_with_a_deadline_has_whole_blocks_of_what_came_in_time(
    tmp_path: Path, hang: Callable[[BlockKey], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STAGING_BYTES", 2 * 4 * BLOCK * 768)  # pieces of four blocks
    pages = pages_of(DENSE, BLOCKS)
    with open_cache(tmp_path / "s", read_threads=3) as cache:
        tokens = kept(cache)
        match = cache.lookup(tokens)
        hang(match.prefix.key(10))
        job = cache.load(match, into=pages, timeout=0.5)
        assert job.wait(SOON)
        assert job.error is None
        assert job.loaded_tokens == 10 * BLOCK
        assert job.failed_blocks == tuple(range(10, BLOCKS))
        assert_entries(DENSE, entries_in(pages, 10 * BLOCK, DENSE), tokens, 10 * BLOCK)
        assert not entries_in(pages, BLOCKS * BLOCK, DENSE)["k"][:, 10 * BLOCK :].any()


@pytest.mark.usefixtures("by_block", "by_layer")
@pytest.mark.parametrize("layout", [DENSE, WINDOWED], ids=["dense", "windowed"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("staged_blocks", [1, 5, 1000])
@pytest.mark.parametrize("start", [0, 2 * BLOCK + 2])
def test_layers_come_one_after_the_other_and_all_of_them(
    tmp_path: Path,
    layout: Layout,
    threads: int,
    staged_blocks: int,
    start: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "STAGING_BYTES", 2 * staged_blocks * BLOCK * 256)
    pages = pages_of(layout, BLOCKS)
    with open_cache(tmp_path / "s", layout, read_threads=threads) as cache:
        tokens = kept(cache, layout)
        assert len(inside(cache).format.part_batches(BLOCKS)) == 3
        job = cache.load(cache.lookup(tokens), into=pages, start=start)
        for group in layout.global_groups:
            assert all(job.wait_group(group.name, layer, SOON) for layer in group.layers)
        assert job.wait(SOON)
        assert (job.error, job.loaded_tokens, job.failed_blocks) == (None, BLOCKS * BLOCK, ())
        # Of each layer its own bytes are read, and once.
        most = BLOCKS * inside(cache).format.frame_bytes
        assert 0 < cache.stats()["counters"]["read_bytes"] <= most
    found, expected = entries_in(pages, BLOCKS * BLOCK, layout), entries_of(layout, tokens[:-1])
    for group in layout.global_groups:
        first = start // group.tokens_per_entry
        np.testing.assert_array_equal(found[group.name][:, first:], expected[group.name][:, first:])
        assert not found[group.name][:, :first].any()


@pytest.mark.usefixtures("by_layer")
def test_the_first_layer_is_ready_before_the_last_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, opened = pages_of(DENSE, BLOCKS), threading.Event()
    read = SsdTier.read
    with open_cache(tmp_path / "s") as cache:
        tokens = kept(cache)
        last = inside(cache).format.part_batches(BLOCKS)[-1]

        def late(self: SsdTier, *args: Any, bounds: Any = None, **named: Any) -> ReadResult:
            assert bounds != last.bounds or opened.wait(SOON)
            return read(self, *args, bounds=bounds, **named)

        monkeypatch.setattr(SsdTier, "read", late)
        job = cache.load(cache.lookup(tokens), into=pages)
        assert job.wait_group("k", 0, SOON)
        assert job.wait_group("v", 0, SOON)
        expected = entries_of(DENSE, tokens[:-1])
        np.testing.assert_array_equal(
            entries_in(pages, BLOCKS * BLOCK, DENSE)["k"][0], expected["k"][0]
        )
        assert not job.done
        assert not job.wait_group("k", 2, 0)
        opened.set()
        assert job.wait_group("v", 2, SOON)


@pytest.mark.usefixtures("by_block", "by_layer")
@pytest.mark.parametrize("layer", [None, 0, 1, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_layer_that_is_bad_shortens_all(
    tmp_path: Path, layer: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STAGING_BYTES", 2 * 5 * BLOCK * 256)
    pages = pages_of(DENSE, BLOCKS)
    with open_cache(tmp_path / "s", read_threads=threads) as cache:
        tokens = kept(cache)
        damage(cache, tokens, 12, layer)
        job = cache.load(cache.lookup(tokens), into=pages)
        assert job.wait(SOON)
        assert (job.error, job.loaded_tokens) == (None, 12 * BLOCK)
        assert job.failed_blocks == tuple(range(12, BLOCKS))
        assert_entries(DENSE, entries_in(pages, 12 * BLOCK, DENSE), tokens, 12 * BLOCK)
        before = 0 if layer is None else layer
        assert [job.wait_group("k", n, 0) for n in range(3)] == [n < before for n in range(3)]
        assert cache.probe(tokens).hit_tokens == 12 * BLOCK


@pytest.mark.usefixtures("by_layer")
def test_layers_of_device_pages_come_alike(tmp_path: Path) -> None:
    """What is in device pages and not on the medium yet is copied layer by layer too."""
    pages = pages_of(DENSE, BLOCKS)
    with open_cache(tmp_path / "s", device_bytes="1MiB") as cache:
        tokens = kept(cache)
        cache.load(cache.probe(tokens)).release()
        owned = inside(cache).writer
        assert owned is not None
        owned.evict_to(0)
        match = cache.lookup(tokens)
        assert match.residency == {"device": BLOCKS * BLOCK, "ssd": 0}
        job = cache.load(match, into=pages)
        assert job.wait(SOON)
        assert (job.error, job.loaded_tokens) == (None, BLOCKS * BLOCK)
    assert_entries(DENSE, entries_in(pages, BLOCKS * BLOCK, DENSE), tokens, BLOCKS * BLOCK)


def test_a_cancelled_load_begins_no_further_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, third, reads = threading.Event(), threading.Event(), 0
    read = SsdTier.read

    def counted(self: SsdTier, *args: Any, **named: Any) -> ReadResult:
        nonlocal reads
        reads += 1
        assert known.wait(SOON)
        if reads == 3:
            third.set()
            until = time.monotonic() + SOON
            while not job.is_cancelled:
                assert time.monotonic() < until
                time.sleep(0.001)
        return read(self, *args, **named)

    monkeypatch.setattr(ssd_reads, "RUN_BYTES", 1)
    with open_cache(tmp_path / "s", read_threads=1) as cache:
        tokens = kept(cache)
        match = cache.lookup(tokens)
        monkeypatch.setattr(SsdTier, "read", counted)
        job = cache.load(match, into=pages_of(DENSE, BLOCKS))
        known.set()
        assert third.wait(SOON)
        job.cancel()
        assert job.wait()
        assert reads == 3


@pytest.mark.usefixtures("by_block")
def test_a_bad_block_is_bad_and_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 1.5
    read = SsdTier.read
    with open_cache(tmp_path / "s", device_bytes="1MiB", read_threads=1) as cache:
        tokens = kept(cache)
        damage(cache, tokens, 3)
        match = cache.lookup(tokens)
        bad = match.prefix.key(3)

        def slow(self: SsdTier, keys: Sequence[BlockKey], *args: Any, **named: Any) -> ReadResult:
            if bad in keys:
                time.sleep(seconds)
            return read(self, keys, *args, **named)

        monkeypatch.setattr(SsdTier, "read", slow)
        with cache.load(match, timeout=seconds) as pages:
            assert pages.tokens == 3 * BLOCK
        counters = cache.stats()["counters"]
        assert (counters["corrupt_blocks"]["total"], counters["late_blocks"]) == (1, 0)
