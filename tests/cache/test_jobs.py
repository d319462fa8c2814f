"""Saves out of an engine's pages, loads into them, and device pages that an engine fills in place."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore import (
    CapacityError,
    Job,
    LayerGroup,
    Layout,
    Pages,
    PinnedPages,
    PrefixCache,
    StoreError,
)
from kvstore.cache import jobs
from kvstore.cache.writes import Writes
from kvstore.codec import codec_for
from kvstore.frame.format import FrameFormat
from kvstore.tier.engine_copy import PagedEntries
from tests.stores import (
    BLOCK,
    DENSE,
    WINDOWED,
    assert_entries,
    entries_of,
    inside,
    open_cache,
    paged,
    tokens_of,
    writer_of,
)
from tests.streams import Stream

LAYOUTS = pytest.mark.parametrize("layout", [DENSE, WINDOWED], ids=["dense", "windowed"])
UNTOUCHED = 0xA5


class Engine:
    """Pages of bytes as an engine might keep them: heads before tokens, so entries are strided."""

    def __init__(self, layout: Layout, page_tokens: int, pages: int = 64, seed: int = 0) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self.ids = np.random.default_rng(seed).permutation(pages)
        self.backing = {
            group.name: [
                torch.full(
                    (pages, 4, page_tokens // group.tokens_per_entry, group.entry_bytes // 4),
                    UNTOUCHED,
                    dtype=torch.uint8,
                )
                if group.entry_bytes % 4 == 0
                else torch.full(
                    (pages, 1, page_tokens // group.tokens_per_entry, group.entry_bytes),
                    UNTOUCHED,
                    dtype=torch.uint8,
                )
                for _ in group.layers
            ]
            for group in layout.global_groups
        }

    @property
    def pages(self) -> Pages:
        tensors = {
            name: [tensor.permute(0, 2, 1, 3) for tensor in layers]
            for name, layers in self.backing.items()
        }
        return Pages(tensors, self.ids)

    def fill(self, tokens: NDArray[np.uint32]) -> None:
        """Write what a model would: token by token, by plain indexing."""
        for name, array in entries_of(self.layout, tokens).items():
            ratio = self.layout.group(name).tokens_per_entry
            per = self.page_tokens // ratio
            for layer, rows in enumerate(array):
                target = self.backing[name][layer].permute(0, 2, 1, 3)
                for entry, row in enumerate(rows):
                    place = target[self.ids[entry // per], entry % per]
                    place.copy_(torch.from_numpy(row).view(place.shape))

    def entries(self, count: int) -> dict[str, NDArray[np.uint8]]:
        """Read tokens ``[0, count)`` back the same way."""
        found = {}
        for group in self.layout.global_groups:
            per = self.page_tokens // group.tokens_per_entry
            rows = [
                [
                    tensor.permute(0, 2, 1, 3)[self.ids[entry // per], entry % per]
                    .reshape(-1)
                    .numpy()
                    for entry in range(count // group.tokens_per_entry)
                ]
                for tensor in self.backing[group.name]
            ]
            found[group.name] = np.array(rows, np.uint8).reshape(
                len(group.layers), -1, group.entry_bytes
            )
        return found


class Gate:
    """Where jobs wait before each copy."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        """Open it for good."""
        self.opened.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(30)


@pytest.fixture
def hold_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Let no job copy before the gate is opened."""
    gate = Gate()
    gather, scatter = PagedEntries.gather, PagedEntries.scatter

    def late_gather(self: PagedEntries, *args: Any) -> Any:
        gate.pass_through()
        return gather(self, *args)

    def late_scatter(self: PagedEntries, *args: Any) -> None:
        gate.pass_through()
        scatter(self, *args)

    monkeypatch.setattr(PagedEntries, "gather", late_gather)
    monkeypatch.setattr(PagedEntries, "scatter", late_scatter)
    yield gate
    gate()


@LAYOUTS
@pytest.mark.parametrize("page_tokens", [2, 4, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("chunk_bytes", [1, jobs.STAGING_BYTES], ids=["by-block", "at-once"])
def test_pages_of_any_size_come_back_in_place(
    tmp_path: Path,
    layout: Layout,
    page_tokens: int,
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "STAGING_BYTES", chunk_bytes)
    tokens = tokens_of(5 * BLOCK + 3)
    writer, reader = Engine(layout, page_tokens, seed=1), Engine(layout, page_tokens, seed=2)
    writer.fill(tokens)
    with open_cache(tmp_path / "s", layout) as cache:
        job = cache.save(tokens, writer.pages)
        assert job.wait()
        assert job.error is None
        assert (job.stored.end, job.stored.present, job.stored.dropped) == (5 * BLOCK, 0, 0)
        cache.flush()
        with cache.lookup(tokens) as match:
            assert match.hit_tokens == 5 * BLOCK
            assert_entries(layout, cache.read(match), tokens, 5 * BLOCK)
            load = cache.load(match, into=reader.pages)
            assert load.wait()
        assert (load.error, load.loaded_tokens, load.failed_blocks) == (None, 5 * BLOCK, ())
        assert_entries(layout, reader.entries(5 * BLOCK), tokens, 5 * BLOCK)
        beyond = reader.entries(5 * BLOCK + 2 * page_tokens)
        for group in layout.global_groups:
            tail = beyond[group.name][:, 5 * BLOCK // group.tokens_per_entry :]
            assert (tail == UNTOUCHED).all()


@LAYOUTS
@pytest.mark.parametrize("start", [0, 2, 6, 8, 14, 16])
def test_a_load_leaves_alone_what_lies_below_its_start(
    tmp_path: Path, layout: Layout, start: int
) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine = Engine(layout, 4)
    with open_cache(tmp_path / "s", layout) as cache:
        cache.store(tokens, entries_of(layout, tokens))
        cache.flush()
        job = cache.load(cache.lookup(tokens), engine.pages, start)
        assert job.wait()
        assert job.loaded_tokens == 3 * BLOCK
    found, expected = engine.entries(3 * BLOCK), entries_of(layout, tokens[: 3 * BLOCK])
    for group in layout.global_groups:
        first = start // group.tokens_per_entry
        assert (found[group.name][:, :first] == UNTOUCHED).all()
        np.testing.assert_array_equal(found[group.name][:, first:], expected[group.name][:, first:])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_pages_may_be_made_for_inference_or_belong_to_a_gradient(
    tmp_path: Path, mode: Callable[[], Any]
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    shape, numbers = (8, BLOCK, 64), mode is torch.enable_grad
    with mode():
        source, target = (
            {n: [torch.randn(shape, requires_grad=numbers) for _ in range(3)] for n in ("k", "v")}
            for _ in range(2)
        )
    with open_cache(tmp_path / "s") as cache:
        save = cache.save(tokens, Pages(source, range(8)))
        assert save.wait()
        assert save.error is None
        cache.flush()
        load = cache.load(cache.lookup(tokens), Pages(target, range(8)))
        assert load.wait()
    assert (load.error, load.loaded_tokens) == (None, 2 * BLOCK)
    for name, layers in target.items():
        for found, given in zip(layers, source[name], strict=True):
            rounded = given[:2].to(torch.bfloat16).float()
            assert torch.equal(found[:2], rounded)


def test_groups_may_be_paged_apart(tmp_path: Path) -> None:
    tokens = tokens_of(4 * BLOCK)
    small, large = Engine(WINDOWED, 2, seed=3), Engine(WINDOWED, 2 * BLOCK, seed=4)
    small.fill(tokens)
    large.fill(tokens)
    tensors = {**small.pages.tensors, "last": large.pages.tensors["last"]}
    pages = Pages(tensors, {"main": small.ids, "index": small.ids, "last": large.ids})
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        assert cache.save(tokens, pages).wait()
        cache.flush()
        with cache.lookup([*tokens.tolist(), 1]) as match:
            assert_entries(WINDOWED, cache.read(match), tokens, 4 * BLOCK)


@pytest.mark.parametrize("entry_format", ["bf16", "f16", "f32", "fp8", "mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_numbers_are_encoded_and_decoded_by_the_groups_format(
    tmp_path: Path, entry_format: str, dtype: torch.dtype
) -> None:
    group = LayerGroup(name="k", layers=(0, 1), values=64, entry_format=entry_format)
    layout = Layout(model="numbers", groups=(group,))
    tokens = tokens_of(2 * BLOCK)
    numbers = torch.randn(
        (9, 2, 6, 4, 16), generator=torch.Generator().manual_seed(0)
    )  # [pages, layers, entries, heads, head_dim]
    source, target = numbers.to(dtype), torch.zeros(numbers.shape, dtype=dtype)
    ids = [4, 2, 7]
    codec = codec_for(group)
    raw = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}.get(entry_format)
    rows = source[ids].transpose(0, 1).reshape(2, 18, 64)[:, : 2 * BLOCK]
    expected = codec.encode(rows.contiguous() if raw is None else rows.to(raw).contiguous())
    with open_cache(tmp_path / "s", layout) as cache:
        assert cache.save(tokens, Pages({"k": source}, ids)).wait()
        cache.flush()
        with cache.lookup([*tokens.tolist(), 1]) as match:
            stored = cache.read(match)["k"]
            np.testing.assert_array_equal(stored, expected.numpy())
            job = cache.load(match, Pages({"k": target}, ids))
            assert job.wait()
        assert job.error is None
    found = target[ids].transpose(0, 1).reshape(2, 18, 64)
    assert torch.equal(
        found[:, : 2 * BLOCK], codec.decode(expected, dtype if raw is None else raw).to(dtype)
    )
    assert not found[:, 2 * BLOCK :].any()


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_bad_block_ends_a_load_and_is_named(tmp_path: Path, damaged: int) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        match = cache.lookup(tokens)
        damage(cache, match.prefix.key(damaged))
        job = cache.load(match, engine.pages)
        assert job.wait()
        assert job.error is None
        assert job.loaded_tokens == damaged * BLOCK
        assert job.failed_blocks == tuple(range(damaged, 4))
        assert not job.wait_group("k", 2)
        assert match.hit_tokens == 4 * BLOCK, "a match belongs to its own thread"
        assert_entries(DENSE, engine.entries(damaged * BLOCK), tokens, damaged * BLOCK)
        rest = engine.entries(4 * BLOCK)["k"][:, damaged * BLOCK :]
        assert (rest == UNTOUCHED).all(), "no block is half there"
        assert cache.lookup(tokens).hit_tokens == damaged * BLOCK


def test_nothing_is_loaded_behind_a_bad_block_that_a_reader_cannot_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STAGING_BYTES", 1)
    tokens = tokens_of(4 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        damage(cache, cache.probe(tokens).prefix.key(1))
    with open_cache(tmp_path / "s", role="reader") as cache:
        match = cache.lookup(tokens)
        assert match.hit_tokens == 4 * BLOCK
        job = cache.load(match, engine.pages)
        assert job.wait()
        assert (job.loaded_tokens, job.failed_blocks) == (BLOCK, (1, 2, 3))


def damage(cache: PrefixCache, key: Any) -> None:
    """Flip a bit of a stored payload."""
    ssd = writer_of(cache).ssd
    with ssd._env.begin(write=True) as txn:
        frame = bytearray(txn.get(key, db=ssd._pay) or b"")
        frame[-1] ^= 1
        txn.put(key, bytes(frame), db=ssd._pay)
        record = bytearray(txn.get(key, db=ssd._meta) or b"")
        record[32:40] = bytes(8)  # the copy moved: forget where it lay
        txn.put(key, bytes(record), db=ssd._meta)


def test_a_load_pins_what_it_reads(tmp_path: Path, hold_jobs: Gate) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            job = cache.load(match, engine.pages)
        assert not job.done
        assert writer_of(cache).index.evict(4) == [], "the match was left; the job's own pin stays"
        hold_jobs()
        assert job.wait()
        assert job.loaded_tokens == 4 * BLOCK
        assert len(writer_of(cache).index.evict(4)) == 4


def test_layers_are_ready_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    order: list[tuple[str, int]] = []
    allowed = threading.Semaphore(0)
    scatter = PagedEntries.scatter

    def stepped(self: PagedEntries, group: LayerGroup, layer: int, *args: Any) -> None:
        assert allowed.acquire(timeout=30)
        order.append((group.name, layer))
        scatter(self, group, layer, *args)

    monkeypatch.setattr(PagedEntries, "scatter", stepped)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        job = cache.load(cache.lookup(tokens), engine.pages)
        allowed.release(2)
        assert job.wait_group("k", 0, 30)
        assert job.wait_group("v", 0, 30)
        assert not job.wait_group("k", 1, 0)
        allowed.release(4)
        assert job.wait_group("v", 2, 30)
        assert job.wait()
    assert order == [("k", 0), ("v", 0), ("k", 1), ("v", 1), ("k", 2), ("v", 2)]
    with pytest.raises(ValueError, match="loads no layer 9 of group 'k', expected one of"):
        job.wait_group("k", 9)


def test_a_cancelled_load_touches_nothing_afterwards(tmp_path: Path, hold_jobs: Gate) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        job = cache.load(cache.lookup(tokens), engine.pages)
        assert hold_jobs.reached.wait(30)
        canceller = threading.Thread(target=job.cancel)
        canceller.start()
        canceller.join(0.05)
        assert canceller.is_alive(), "a copy that has begun is waited for"
        assert job.is_cancelled
        hold_jobs()
        canceller.join(30)
        assert job.wait()
        assert (job.loaded_tokens, job.failed_blocks) == (0, (0, 1, 2, 3))
        again = cache.load(cache.lookup(tokens), engine.pages)
        assert again.wait()
        assert again.loaded_tokens == 4 * BLOCK


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["part_batches", "one batch"])
def test_a_load_comes_after_what_a_device_has_queued(tmp_path: Path, timeout: float | None) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    with open_cache(tmp_path / "s") as cache:
        entries = entries_of(DENSE, tokens)
        cache.store(tokens, entries)
        cache.flush()
        for is_ordered in (False, True):
            engine, stream = Engine(DENSE, 4), Stream()
            for tensor in [tensor for layers in engine.backing.values() for tensor in layers]:
                stream.queue(tensor.zero_)  # as an engine clears the new pages of a request
            after = stream.record() if is_ordered else None
            stream.queue(lambda: None)  # what comes behind the event is not waited for
            job = cache.load(cache.lookup(tokens), engine.pages, after=after, timeout=timeout)
            assert job.wait()
            assert job.loaded_tokens == 4 * BLOCK
            assert len(stream) == 1 or not is_ordered
            stream.run()
            found = engine.entries(4 * BLOCK)
            alike = [
                np.array_equal(found[name], entries[name][:, : found[name].shape[1]])
                for name in found
            ]
            assert alike == [is_ordered] * len(alike)


def test_pages_that_stay_anothers_are_not_loaded_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        never = threading.Event()
        with cache.lookup(tokens) as match:
            cancelled = cache.load(match, engine.pages, after=never)
            assert not cancelled.wait(0.05)
            cancelled.cancel()
            late = cache.load(match, engine.pages, after=never, timeout=0.01)
            assert late.wait()
            monkeypatch.setattr(jobs, "BARRIER_SECONDS", 0.01)
            given_up = cache.load(match, engine.pages, after=never)
            assert given_up.wait(30)
            with pytest.raises(ValueError, match="found no such pages; give into too"):
                cache.load(match, after=never)  # type: ignore[call-overload]
        for job in (cancelled, late, given_up):
            assert (job.loaded_tokens, job.failed_blocks, job.error) == (0, (0, 1, 2), None)
        for found in engine.entries(3 * BLOCK).values():
            assert (found == UNTOUCHED).all()
        assert len(writer_of(cache).index.evict(3)) == 3, "no pin is left"


def test_a_save_waits_for_its_event_and_publishes_nothing_before(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    written = threading.Event()
    with open_cache(tmp_path / "s") as cache:
        job = cache.save(tokens, engine.pages, after=written)
        assert not job.wait(0.05)
        assert cache.lookup(tokens).hit_tokens == 0
        engine.fill(tokens)
        written.set()
        assert job.wait()
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_entries(DENSE, cache.read(match), tokens, 3 * BLOCK)


def test_a_cancelled_save_waits_for_no_event_and_holds_up_no_other(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    with open_cache(tmp_path / "s") as cache:
        waiting = cache.save(tokens, engine.pages, after=threading.Event())
        queued = cache.save(tokens, engine.pages, after=threading.Event())
        later = cache.save(tokens, engine.pages)
        queued.is_cancelled = True  # what cancel() does first; it would wait for its turn
        waiting.cancel()
        assert later.wait()
        assert [job.stored.dropped for job in (waiting, queued, later)] == [3, 3, 0]
        assert cache.stats()["counters"]["dropped_blocks"]["total"] == 0


def test_who_cancels_waits_for_copies_and_for_nothing_else(
    tmp_path: Path, hold_jobs: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    offered, room = threading.Event(), threading.Event()
    store = Writes.store

    def late_store(self: Writes, *args: Any, **options: Any) -> Any:
        offered.set()
        assert room.wait(30)  # as for room in the queue of a slow disk
        return store(self, *args, **options)

    with open_cache(tmp_path / "s") as cache:
        copying = cache.save(tokens, engine.pages)
        queued = cache.save(tokens, engine.pages)
        assert hold_jobs.reached.wait(30)
        queued.cancel()  # it has not had its turn
        assert not copying.done
        monkeypatch.setattr(Writes, "store", late_store)
        hold_jobs()
        assert offered.wait(30)
        copying.cancel()  # its copy is made
        assert not copying.done
        room.set()
        assert copying.wait()
        assert queued.wait()
        assert [job.stored.end for job in (copying, queued)] == [3 * BLOCK, 0]


def test_pages_of_numbers_are_refused_for_a_group_of_opaque_bytes(tmp_path: Path) -> None:
    layout = Layout(
        model="bytes",
        groups=(LayerGroup(name="b", layers=(0,), values=8, entry_format="u8"),),
    )
    numbers = Pages({"b": torch.zeros(4, 1, BLOCK, 8)}, [0, 1])
    with (
        open_cache(tmp_path / "s", layout) as cache,
        pytest.raises(ValueError, match=r"with 8 bytes \(uint8\) an entry, found float32"),
    ):
        cache.save(tokens_of(BLOCK), numbers)


def test_an_event_that_never_happens_costs_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BARRIER_SECONDS", 0.01)
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as cache:
        job = cache.save(tokens, Engine(DENSE, 4).pages, after=threading.Event())
        assert job.wait()
        assert (job.stored.end, job.stored.dropped) == (0, 3)
        assert cache.stats()["counters"]["dropped_blocks"] == {"not_written": 3, "total": 3}
        pages = open_pages(cache, 3)
        with pytest.raises(StoreError, match="did not occur in time; nothing was published"):
            cache.publish(tokens, pages, after=threading.Event())


def test_a_save_stores_only_what_it_was_given(tmp_path: Path) -> None:
    tokens = tokens_of(6 * BLOCK)
    engine = Engine(DENSE, BLOCK)
    engine.fill(tokens)
    with open_cache(tmp_path / "s") as cache:
        job = cache.save(tokens, engine.pages, stop=2 * BLOCK + 5)
        assert job.wait()
        assert job.stored.end == 2 * BLOCK, "tokens behind the last whole block are not stored"
        job = cache.save(tokens, engine.pages, 4 * BLOCK)
        assert job.wait()
        assert (job.stored.end, job.stored.dropped) == (2 * BLOCK, 2), "their parent is missing"
        job = cache.save(tokens, engine.pages, BLOCK, 6 * BLOCK)
        assert job.wait()
        assert (job.stored.end, job.stored.present, job.stored.dropped) == (6 * BLOCK, 1, 0)
        cache.flush()
        assert cache.probe([*tokens.tolist(), 1]).hit_tokens == 6 * BLOCK


def test_what_is_stored_already_is_not_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(4 * BLOCK)
    engine = Engine(DENSE, BLOCK)
    engine.fill(tokens)
    spans: list[tuple[int, int]] = []
    gather = PagedEntries.gather

    def recorded(self: PagedEntries, start: int, stop: int) -> Any:
        spans.append((start, stop))
        return gather(self, start, stop)

    monkeypatch.setattr(PagedEntries, "gather", recorded)
    with open_cache(tmp_path / "s") as cache:
        assert cache.save(tokens[: 3 * BLOCK], engine.pages).wait()
        assert cache.save(tokens, engine.pages).wait()
        assert cache.save(tokens, engine.pages, pin=True).wait()
        assert spans == [(0, 3 * BLOCK), (3 * BLOCK, 4 * BLOCK), (4 * BLOCK, 4 * BLOCK)]
        cache.flush()
        assert writer_of(cache).index.evict(4) == [], "a save of known blocks still pins them"


def test_a_reader_saves_nothing_and_loads(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine, other = Engine(DENSE, 4), Engine(DENSE, 4, seed=5)
    engine.fill(tokens)
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.stores import *\n"
        "tokens = tokens_of(3 * BLOCK + 1)\n"
        "cache = open_cache(Path(sys.argv[1]))\n"
        "cache.store(tokens, entries_of(DENSE, tokens)); cache.flush()\n"
        "print('ready', flush=True); sys.stdin.read(); cache.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "s")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with open_cache(tmp_path / "s", role="reader") as cache:
            job = cache.save(tokens_of(2 * BLOCK, 7), engine.pages)
            assert job.wait()
            assert job.stored.dropped == 2
            load = cache.load(cache.lookup(tokens), other.pages)
            assert load.wait()
            assert load.loaded_tokens == 3 * BLOCK
            assert_entries(DENSE, other.entries(3 * BLOCK), tokens, 3 * BLOCK)
        process.communicate(b"")


def test_more_jobs_than_the_queue_takes_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "QUEUED_JOBS", 2)
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    gate, begun = threading.Event(), threading.Event()
    gather = PagedEntries.gather

    def late(self: PagedEntries, *args: Any) -> Any:
        begun.set()
        assert gate.wait(30)
        return gather(self, *args)

    monkeypatch.setattr(PagedEntries, "gather", late)
    with open_cache(tmp_path / "s") as cache:
        running = cache.save(tokens, engine.pages)
        assert begun.wait(30)
        waiting = [cache.save(tokens, engine.pages) for _ in range(2)]
        dropped = cache.save(tokens, engine.pages)
        assert dropped.done
        assert (dropped.stored.end, dropped.stored.dropped) == (0, 2)
        assert cache.stats()["counters"]["dropped_blocks"] == {"queue_full": 2, "total": 2}
        gate.set()
        assert all(job.wait() for job in [running, *waiting])
        assert cache.lookup(tokens).hit_tokens in (0, 2 * BLOCK)


def test_an_error_in_a_job_is_kept_and_the_thread_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    with open_cache(tmp_path / "s") as cache:
        with monkeypatch.context() as patch:
            patch.setattr(PagedEntries, "gather", lambda *_: 1 / 0)
            job = cache.save(tokens, engine.pages)
            assert job.wait()
            assert isinstance(job.error, ZeroDivisionError)
            assert job.stored is None
        assert "a background job failed" in caplog.text
        job = cache.save(tokens, engine.pages)
        assert job.wait()
        assert job.stored.end == 2 * BLOCK


def test_a_flush_covers_saves_that_were_begun(tmp_path: Path, hold_jobs: Gate) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    with open_cache(tmp_path / "s") as cache:
        job = cache.save(tokens, engine.pages)
        assert hold_jobs.reached.wait(30)
        flusher = threading.Thread(target=cache.flush)
        flusher.start()
        flusher.join(0.2)
        assert flusher.is_alive()
        hold_jobs()
        flusher.join(30)
        assert job.done
        assert cache.probe(tokens).hit_tokens == 2 * BLOCK


def test_closing_finishes_saves_that_were_begun(tmp_path: Path, hold_jobs: Gate) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    engine.fill(tokens)
    cache = open_cache(tmp_path / "s")
    job = cache.save(tokens, engine.pages)
    closer = threading.Thread(target=cache.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    hold_jobs()
    closer.join(30)
    assert job.done
    with open_cache(tmp_path / "s") as again:
        assert again.lookup(tokens).hit_tokens == 2 * BLOCK


def test_a_job_that_comes_too_late_is_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, engine = tokens_of(2 * BLOCK + 1), Engine(DENSE, 4)
    cache = open_cache(tmp_path / "s")
    cache.store(tokens, entries_of(DENSE, tokens))
    cache.flush()
    match = cache.lookup(tokens)
    cache.close()
    monkeypatch.setattr(
        inside(cache), "check_open", lambda: None
    )  # passed before the store was closed
    threads = threading.active_count()
    load, save = cache.load(match, engine.pages), cache.save(tokens, engine.pages)
    assert load.done
    assert save.done
    assert (load.error, load.loaded_tokens, load.failed_blocks) == (None, 0, (0, 1))
    assert (save.error, save.stored.dropped) == (None, 2)
    assert threading.active_count() == threads


BAD_PAGES: list[tuple[Callable[[Engine], Pages], str]] = [
    (
        lambda e: Pages(e.pages.tensors, e.ids, "padded"),
        "layout tag 'padded', expected 'entries'",
    ),
    (
        lambda e: Pages({"k": e.pages.tensors["k"]}, e.ids),
        r"no tensors of group 'v', found \['k'\]",
    ),
    (
        lambda e: Pages({**e.pages.tensors, "k": e.pages.tensors["k"][:2]}, e.ids),
        "group 'k': expected pages of 3 layers, found 2",
    ),
    (
        lambda e: Pages(
            {**e.pages.tensors, "v": [t[..., :5] for t in e.pages.tensors["v"]]}, e.ids
        ),
        "group 'v': expected pages .* 128 bytes .* found uint8",
    ),
    (
        lambda e: Pages(
            {**e.pages.tensors, "v": [t.to(torch.int32) for t in e.pages.tensors["v"]]}, e.ids
        ),
        "or 64 floating-point numbers an entry, found int32",
    ),
    (
        lambda e: Pages(
            {**e.pages.tensors, "k": [*e.pages.tensors["k"][:2], e.pages.tensors["k"][2][:, :2]]},
            e.ids,
        ),
        "group 'k': layers have pages of different shapes",
    ),
    (lambda e: Pages(e.pages.tensors, e.ids[:2]), "2 pages have 8 entries, expected at least 16"),
    (lambda e: Pages(e.pages.tensors, [0, 1, 64, 2]), r"found page 64, expected one of \[0, 64\)"),
    (lambda e: Pages(e.pages.tensors, [0, 1, 2, -1]), r"found page -1, expected one of \[0, 64\)"),
    (lambda e: Pages(e.pages.tensors, {"k": e.ids}), r"no group 'v', found \['k'\]"),
    (lambda e: Pages(e.pages.tensors, [0.5, 1, 2, 3]), "must be a list of integers, found float32"),
    (lambda e: Pages(e.pages.tensors, [[0, 1, 2, 3]]), r"list of integers, found int64 \[1, 4\]"),
    (lambda e: Pages(e.pages.tensors, [1j, 1, 2, 3]), "list of integers, found complex64"),
    (lambda e: Pages(e.pages.tensors, "0123"), "group 'k' must be a list of integers: "),
    (lambda e: Pages(e.pages.tensors, {"k": None, "v": e.ids}), "page_ids has no group 'k'"),
]


@pytest.mark.parametrize(("make", "message"), BAD_PAGES, ids=[message for _, message in BAD_PAGES])
def test_pages_that_do_not_fit_are_named(
    tmp_path: Path, make: Callable[[Engine], Pages], message: str
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with pytest.raises(ValueError, match=message):
            cache.save(tokens, make(engine))
        match = cache.lookup(tokens)
        with pytest.raises(ValueError, match=message):
            cache.load(match, make(engine))
        assert len(writer_of(cache).index.evict(2)) == 0
        cache.release("nobody")
        with match:
            pass
        assert len(writer_of(cache).index.evict(2)) == 2, "a refused load pins nothing"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"start": 3},
            r"start must be a block boundary \(a multiple of 8\) within 17 tokens, found 3",
        ),
        ({"start": 24}, "start must be a block boundary"),
        ({"stop": 18}, "stop must be a multiple of 1 within 17 tokens, found 18"),
        ({"stop": 8, "start": 16}, "within 8 tokens, found 16"),
        ({"ttl": 0.0}, "ttl must be positive seconds or None"),
        ({"wait": float("nan")}, "wait must be seconds"),
    ],
)
def test_bad_places_of_a_save_are_named(tmp_path: Path, wish: dict[str, Any], message: str) -> None:
    with open_cache(tmp_path / "s") as cache, pytest.raises(ValueError, match=message):
        cache.save(tokens_of(2 * BLOCK + 1), Engine(DENSE, 4).pages, **wish)


def test_a_load_cannot_start_beyond_the_hit_or_inside_an_entry(tmp_path: Path) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        cache.store(tokens, entries_of(WINDOWED, tokens))
        cache.flush()
        match = cache.lookup(tokens)
        for start in (1, 2 * BLOCK + 2, -2):
            with pytest.raises(
                ValueError, match="start of a load must be a multiple of 2 within 16"
            ):
                cache.load(match, Engine(WINDOWED, 4).pages, start)
        job = cache.load(match, Engine(WINDOWED, 4).pages, 2 * BLOCK)
        assert job.wait()
        assert (job.loaded_tokens, job.failed_blocks) == (2 * BLOCK, ())


# ---- device pages filled in place --------------------------------------------------------------


def open_pages(cache: PrefixCache, count: int) -> PinnedPages:
    return cache.device.allocate(count)


def write_pages(pages: PinnedPages, layout: Layout, tokens: NDArray[Any], start: int = 0) -> None:
    entries = entries_of(layout, tokens, start)
    for name, tensor in pages.tensors.items():
        per = BLOCK // layout.group(name).tokens_per_entry
        for number, page in enumerate(pages.page_ids.tolist()):
            rows = entries[name][:, number * per : (number + 1) * per]
            tensor[page, :, : rows.shape[1]] = torch.from_numpy(rows)


def device_bytes(pages: int, layout: Layout = DENSE) -> int:
    return pages * FrameFormat(layout, BLOCK).payload_bytes


@LAYOUTS
def test_published_pages_are_found_without_a_copy(tmp_path: Path, layout: Layout) -> None:
    tokens = tokens_of(3 * BLOCK + 2)
    with open_cache(tmp_path / "s", layout, device_bytes=device_bytes(8, layout)) as cache:
        with cache.device.allocate(4) as pages:
            write_pages(pages, layout, tokens)
            assert cache.lookup(tokens).hit_tokens == 0, "private until published"
            assert cache.publish(tokens, pages) == 3 * BLOCK
            with cache.lookup(tokens) as match:
                assert match.residency == {"device": 3 * BLOCK, "ssd": 0}
                assert_entries(layout, cache.read(match), tokens, 3 * BLOCK)
                with cache.load(match) as loaded:
                    assert loaded.page_ids.tolist() == pages.page_ids.tolist()[:3]
            assert cache.device.free_pages == 4
        assert cache.device.free_pages == 5, "the page that was not published is free again"
        assert cache.lookup(tokens).hit_tokens == 3 * BLOCK, "the others stay until evicted"


def test_device_pages_made_during_inference_can_be_written_after_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        with torch.inference_mode():
            tensors = cache.device.tensors
        for tensor in tensors.values():
            tensor[0].fill_(1)
            assert (tensor[0] == 1).all()


def test_pages_of_the_device_tier_can_be_saved(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with (
        open_cache(tmp_path / "s", device_bytes=device_bytes(4)) as cache,
        cache.device.allocate(3) as pages,
    ):
        write_pages(pages, DENSE, tokens)
        assert cache.save(tokens, pages).wait()
    with open_cache(tmp_path / "s") as again, again.lookup([*tokens.tolist(), 1]) as match:
        assert_entries(DENSE, again.read(match), tokens, 3 * BLOCK)


def test_a_prefix_grows_by_publishing_behind_loaded_pages(tmp_path: Path) -> None:
    tokens = tokens_of(5 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes=device_bytes(6)) as cache:
        cache.store(tokens[: 2 * BLOCK], entries_of(DENSE, tokens[: 2 * BLOCK]))
        cache.flush()
        with cache.lookup(tokens) as match:
            loaded = cache.load(match)
        own = cache.device.allocate(3)
        write_pages(own, DENSE, tokens, 2 * BLOCK)
        assert cache.publish(tokens, own, 4 * BLOCK, start=2 * BLOCK) == 4 * BLOCK
        assert cache.probe(tokens).hit_tokens == 4 * BLOCK
        loaded.release()
        assert paged_evict(cache, 6) == [], "published pages keep their parents"
        own.release()
        assert len(paged_evict(cache, 6)) == 4
        assert cache.device.free_pages == 6


def paged_evict(cache: PrefixCache, count: int) -> list[Any]:
    pages = paged(cache)
    keys = pages.index.evict(count, inside(cache).context.wall_clock())
    pages._free(keys)
    return keys


def test_without_what_lies_before_them_pages_stay_private(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes=device_bytes(4)) as cache:
        own = cache.device.allocate(2)
        write_pages(own, DENSE, tokens, BLOCK)
        assert cache.publish(tokens, own, start=BLOCK) == 0
        assert cache.probe(tokens).hit_tokens == 0
        own.release()
        assert cache.device.free_pages == 4


def test_the_second_publisher_keeps_its_pages_to_itself(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    asked = [*tokens.tolist(), 1]
    with open_cache(tmp_path / "s", device_bytes=device_bytes(8)) as cache:
        first, second = cache.device.allocate(2), cache.device.allocate(3)
        write_pages(first, DENSE, tokens[: 2 * BLOCK])
        write_pages(second, DENSE, tokens)
        assert cache.publish(tokens[: 2 * BLOCK], first) == 2 * BLOCK
        assert cache.publish(tokens, second) == 3 * BLOCK
        with cache.lookup(asked) as match, cache.load(match) as loaded:
            expected = [*first.page_ids.tolist(), second.page_ids.tolist()[2]]
            assert loaded.page_ids.tolist() == expected
        assert cache.device.free_pages == 3, "its engine still reads its own copies"
        assert cache.publish(tokens, second) == 3 * BLOCK, "again is no harm"
        second.release()
        first.release()
        assert cache.device.free_pages == 5


def test_device_pages_are_never_taken_from_their_users(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", device_bytes=device_bytes(4)) as cache:
        own = cache.device.allocate(3)
        with pytest.raises(CapacityError, match="2 device pages were requested, 1 of 4 are free"):
            cache.device.allocate(2)
        assert cache.device.free_pages == 1
        own.release()
        own.release()
        assert cache.device.free_pages == 4
        with pytest.raises(ValueError, match="these pages were released; allocate new ones"):
            cache.publish(tokens_of(BLOCK), own)
        for count in (0, -1, True, 1.5):
            with pytest.raises(ValueError, match="count must be a positive integer"):
                cache.device.allocate(count)  # type: ignore[arg-type]


def test_a_published_page_cannot_become_another_block(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", device_bytes=device_bytes(4)) as cache:
        own = cache.device.allocate(2)
        write_pages(own, DENSE, tokens_of(2 * BLOCK))
        cache.publish(tokens_of(2 * BLOCK), own)
        with pytest.raises(ValueError, match="some of these pages are already published"):
            cache.publish(tokens_of(2 * BLOCK, 9), own)
        with pytest.raises(ValueError, match="pages hold 16 tokens, expected 24"):
            cache.publish(tokens_of(3 * BLOCK, 9), own)


def test_a_request_id_may_be_released_while_its_load_goes_on(
    tmp_path: Path, hold_jobs: Gate
) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    engine = Engine(DENSE, 4)
    with open_cache(tmp_path / "s") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        job: Job = cache.load(cache.lookup(tokens, request_id="r"), engine.pages)
        cache.release("r")
        assert writer_of(cache).index.evict(2) == []
        hold_jobs()
        assert job.wait()
        assert job.loaded_tokens == 2 * BLOCK
