"""Store sections of ``python -m bench.ssd``: fill, steady state, warm and cold loads, relative to the machine.

Every figure includes verification: checksums are computed on writes, and checked for head and payload on
reads.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.paired import Row, paired, seconds, speeds
from kvstore import Layout, Namespace, Pages, PrefixCache
from kvstore.cache.match import Match
from kvstore.cli.demo.process import drop_page_cache
from kvstore.codec import native
from kvstore.frame.format import FrameFormat, Frames
from kvstore.frame.header import Header, head_sum
from kvstore.frame.targets import AddressTable
from kvstore.identity.block import BlockHash
from kvstore.identity.chain import Prefix
from kvstore.identity.hash import block_hashes
from kvstore.output.sizes import size_text
from kvstore.store.store_format import StoreFormat, format_text
from kvstore.tier.ssd.capacity import PAGE_BYTES, commit_blocks, minimum_capacity, pages_of
from kvstore.tier.ssd.files import DATA_FILE
from kvstore.tier.ssd.opening import open_ssd
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import Put, SsdOptions

BLOCK_TOKENS = 128
NAMESPACE = Namespace(model="bench")
FILL_BAR, STEADY_BAR, WARM_BAR, COLD_BAR = 1.0, 0.8, 0.75, 0.9
"""Target ratios of the durable store and the loads."""
PROMPT_COMMITS = 8
"""Commits that one prompt fills: 512 blocks of DeepSeek-V4.1-Flash are 65,536 tokens."""
LARGE_CAP = 512 << 20
"""Smallest cap with commits of the largest size: 16 MB is a 32nd of it."""
TURNOVERS = 2
"""Fills of a store at its cap before steady state is measured."""
WARM_BYTES = 256 << 20
"""Most bytes of a warm load: far more than a processor's cache, and four copies fit in memory."""
RUN_BLOCKS = 32
"""Blocks of a cold run: a prompt of 4,096 tokens."""
COLD_SHARE = 0.2
"""Largest share of the file in a cold measurement, so that reading ahead has no benefit."""
COLD_THREADS = ((1, 1), (8, 8), (1, 32))
"""Threads of loads and of their O_DIRECT reference reads: equal numbers, and a single loading thread, whose
hints request 32 blocks at once, with as many requests in flight."""
WAIT_SECONDS = 120.0
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
"""What drops the page cache of the whole machine, for root."""

Advance = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(slots=True)
class Blocks:
    """Prompts of one layout, all with the same random entries."""

    layout: Layout
    format: FrameFormat
    count: int
    """Blocks of a prompt."""
    entries: dict[str, NDArray[np.uint8]]
    source: AddressTable
    """The same, as frames are made of them."""
    raw: NDArray[np.uint8]
    """Another copy of the payload, for reference writes and copies."""
    rng: np.random.Generator

    @classmethod
    def of(cls, layout: Layout, count: int, seed: int = 0) -> Blocks:
        """Make entries for ``count`` blocks."""
        rng = np.random.default_rng(seed)
        entries = {
            group.name: rng.integers(
                0,
                256,
                (
                    len(group.layers),
                    count * BLOCK_TOKENS // group.tokens_per_entry,
                    group.entry_bytes,
                ),
                np.uint8,
            )
            for group in layout.global_groups
        }
        raw = np.concatenate([array.reshape(-1) for array in entries.values()])
        form = FrameFormat(layout, BLOCK_TOKENS)
        return cls(layout, form, count, entries, form.entries_source(entries), raw, rng)

    def prompt(self) -> NDArray[np.uint32]:
        """Return token ids of a new prompt."""
        return self.rng.integers(0, 1 << 17, self.count * BLOCK_TOKENS, np.uint32)

    def puts(self, sequence: int) -> list[Put]:
        """Return the frames of a new prompt, as the writer passes them to the tier."""
        tokens, root = self.prompt(), BlockHash(self.rng.bytes(32))
        hashes = block_hashes(root, tokens, BLOCK_TOKENS)
        prefix = Prefix(root, tokens, hashes, (), BLOCK_TOKENS)
        return [
            self._put(prefix, number, sequence + number, self._frame(prefix, number, sequence))
            for number in range(self.count)
        ]

    def _frame(self, prefix: Prefix, number: int, sequence: int) -> bytearray:
        header = Header(
            block_tokens=BLOCK_TOKENS,
            number=number,
            namespace_id=1,
            payload_bytes=self.format.payload_bytes,
            block_hash=prefix.hash_of(number),
            parent_hash=prefix.parent_hash(number),
            sequence=sequence,
        )
        return self.format.encode(header, prefix.block_ids(number), self.source, number)

    @staticmethod
    def _put(prefix: Prefix, number: int, sequence: int, frame: bytearray) -> Put:
        record = Record(
            parent=prefix.key(number - 1) if number else prefix.key(0),
            number=number,
            namespace_id=1,
            sequence=sequence,
            frame_bytes=len(frame),
            head_sum=head_sum(frame),
        )
        return Put(prefix.key(number), record, frame)


def tier_of(cache: PrefixCache) -> SsdTier:
    """Return the SSD tier of a cache."""
    return cache._shared.ssd  # noqa: SLF001


def open_cache(
    folder: Path, layout: Layout, capacity: int, *, read_threads: int = 1
) -> PrefixCache:
    """Open a store for blocks of the benchmark, by default read in the caller's thread alone."""
    return PrefixCache.open(
        folder,
        layout=layout,
        namespace=NAMESPACE,
        block_tokens=BLOCK_TOKENS,
        ssd_bytes=capacity,
        request_share=1.0,  # the tier is measured, full of one prompt too
        read_threads=read_threads,
    )


def tier_options(layout: Layout, frames: Frames, capacity: int) -> SsdOptions:
    """Return the options of a tier without a cache."""
    return SsdOptions(
        capacity_bytes=capacity,
        frame_bytes=frames.frame_bytes,
        format_text=format_text(StoreFormat(layout, BLOCK_TOKENS)),
    )


def keep(cache: PrefixCache, tokens: NDArray[np.uint32], blocks: Blocks) -> None:
    """Store a prompt. Raises ``RuntimeError`` unless all of it was taken."""
    stored = cache.store(tokens, blocks.entries, wait=WAIT_SECONDS)
    if stored.dropped or stored.present:
        raise RuntimeError(f"a prompt was not stored as new: {stored}")


class RawFile:
    """File written by ``pwrite`` and ``fdatasync``: the least work of a store."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Make the file, of ``size`` written bytes."""
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        self._size, self._at = size, 0
        piece = bytes(min(size, 1 << 20))
        for at in range(0, size, 1 << 20):
            os.pwrite(self._fd, piece[: size - at], at)
        os.fdatasync(self._fd)

    def write(self, data: NDArray[np.uint8], batch_bytes: int, copy_bytes: int = 0) -> None:
        """Append ``data``, cyclically if the file has a size, with a sync for each batch.

        With ``copy_bytes`` a batch is first copied to new memory, in parts of that size.
        """
        for first in range(0, len(data), batch_bytes):
            piece = data[first : first + batch_bytes]
            if self._size and self._at + len(piece) > self._size:
                self._at = 0
            step = copy_bytes or len(piece)
            parts = [piece[at : at + step] for at in range(0, len(piece), step)]
            if copy_bytes:
                parts = [part.copy() for part in parts]
            written = os.pwritev(self._fd, [part.data for part in parts], self._at)
            if written != len(piece):
                raise OSError(f"pwrite wrote {written} of {len(piece)} bytes")
            os.fdatasync(self._fd)
            self._at += written

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def forget_pages(folder: Path) -> str:
    """Drop ``folder`` from the page cache; return the method: the whole cache as root, else by file."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError:
        drop_page_cache(folder)
        return "posix_fadvise(DONTNEED)"
    return "drop_caches"


def open_direct(path: Path) -> int:
    """Open a file with O_DIRECT. Raises ``SystemExit`` if it is not supported."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        sys.exit(f"{path.parent} has no O_DIRECT ({error.strerror}): choose another --dir")


@contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder, removed and synced at the end, outside of other measurements."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()


def prompts_of(layout: Layout, total_bytes: int, capacity: int) -> tuple[Blocks, int, int]:
    """Return prompts of about ``total_bytes``, their number, and the blocks of a commit."""
    form = FrameFormat(layout, BLOCK_TOKENS)
    commit = commit_blocks(capacity, form.frame_bytes)
    whole = max(1, total_bytes // form.payload_bytes // commit)
    blocks = Blocks.of(layout, commit * min(PROMPT_COMMITS, whole))
    return blocks, max(1, total_bytes // len(blocks.raw)), commit


def fill(layout: Layout, total_bytes: int, folder: Path, pairs: int, advance: Advance) -> list[Row]:
    """Return the speed of filling an empty store, through the cache and by the tier alone.

    Reference: a new file with the payload, with ``fdatasync`` as often as the store commits; and again
    with a copy of each block, the least work of LMDB.
    """
    capacity = max(LARGE_CAP, 2 * total_bytes)
    blocks, prompts, commit = prompts_of(layout, total_bytes, capacity)
    moved = prompts * len(blocks.raw)

    def through_cache() -> float:
        with scratch(folder, "cache") as place, open_cache(place, layout, capacity) as cache:
            texts = [blocks.prompt() for _ in range(prompts)]

            def store() -> None:
                for tokens in texts:
                    keep(cache, tokens, blocks)
                cache.flush()

            return seconds(store)

    def by_tier() -> float:
        with scratch(folder, "tier") as place:
            tier, _ = open_ssd(place, tier_options(layout, blocks.format, capacity))
            puts = blocks.puts(1)  # written under new keys again: frames take memory
            try:
                return sum(
                    seconds(partial(put_all, tier, renamed(puts, number, blocks), commit))
                    for number in range(prompts)
                )
            finally:
                tier.close()

    def raw(copy_bytes: int = 0) -> float:
        with scratch(folder, "raw") as place:
            file = RawFile(place / "raw")
            batch = commit * blocks.format.payload_bytes
            try:
                return sum(
                    seconds(lambda: file.write(blocks.raw, batch, copy_bytes))
                    for _ in range(prompts)
                )
            finally:
                file.close()

    note = f"{prompts * blocks.count} blocks, {commit} a commit"
    beside = "pwrite + fdatasync to a new file"
    rows = []
    for what, work, bar in (
        ("fill", through_cache, FILL_BAR),
        ("fill, tier alone, framed before", by_tier, None),
        (
            "the file alone, each block copied first",
            partial(raw, blocks.format.payload_bytes),
            None,
        ),
    ):
        found = speeds(*paired(work, raw, pairs, advance), moved)
        rows.append(
            Row(
                section="fill",
                what=what,
                of=layout.model,
                beside=beside,
                bar=bar,
                note=note,
                **found,
            )
        )
    return rows


def renamed(puts: Sequence[Put], number: int, blocks: Blocks) -> list[Put]:
    """Return the same frames under other keys and sequences."""
    first = 1 + number * len(puts)
    return [
        Put(
            type(put.key)(blocks.rng.bytes(len(put.key))),
            Record(
                parent=put.record.parent,
                number=put.record.number,
                namespace_id=1,
                sequence=first + at,
                frame_bytes=put.record.frame_bytes,
                head_sum=put.record.head_sum,
            ),
            put.frame,
        )
        for at, put in enumerate(puts)
    ]


def put_all(tier: SsdTier, puts: Sequence[Put], commit: int) -> None:
    """Write blocks, ``commit`` at a time."""
    for at in range(0, len(puts), commit):
        tier.put(puts[at : at + commit])


def steady(
    layout: Layout, total_bytes: int, folder: Path, pairs: int, advance: Advance
) -> list[Row]:
    """Return the speed of storing new prompts at the cap, which evict old ones.

    Reference: overwriting a file of the size of the cap.
    """
    form = FrameFormat(layout, BLOCK_TOKENS)
    capacity = max(total_bytes, minimum_capacity(form.frame_bytes))
    blocks, _, commit = prompts_of(layout, capacity, capacity)
    stored = blocks.count * pages_of(form.frame_bytes) * PAGE_BYTES
    with scratch(folder, "steady") as place:
        file = RawFile(place / "raw", capacity)
        with open_cache(place / "store", layout, capacity) as cache:

            def store() -> float:
                tokens = blocks.prompt()

                def work() -> None:
                    keep(cache, tokens, blocks)
                    cache.flush()

                return seconds(work)

            for _ in range(TURNOVERS * -(-capacity // stored)):
                store()
            mine, theirs = paired(
                store,
                lambda: seconds(
                    lambda: file.write(blocks.raw, commit * blocks.format.payload_bytes)
                ),
                pairs,
                advance,
            )
            evicted = cache.stats()["counters"]["evicted_blocks"].get("ssd", 0)
        file.close()
    return [
        Row(
            section="steady",
            what="at the cap",
            of=layout.model,
            beside="pwrite + fdatasync over a file",
            bar=STEADY_BAR,
            note=f"cap {size_text(capacity)}, {blocks.count} blocks a prompt, {commit} a commit, {evicted} evicted",
            **speeds(mine, theirs, len(blocks.raw)),
        )
    ]


def contiguous(form: FrameFormat, out: NDArray[np.uint8]) -> AddressTable:
    """Return targets for unchanged consecutive payloads in ``out``: the least work of a load."""
    bounds, base = form.part_bounds, out.ctypes.data - form.payload_offset
    pieces = [(0, 1, 1, stop - start, base + start, stop - start) for start, stop in bounds]
    return AddressTable(
        out.size // form.payload_bytes,
        np.array(pieces, np.int64),
        np.full(len(bounds), form.payload_bytes, np.int64),
        tuple(native.Part(*bound, at, at + 1) for at, bound in enumerate(bounds)),
        out,
    )


def whole(found: int, expected: int) -> None:
    """Raise ``RuntimeError`` unless everything was read."""
    if found != expected:
        raise RuntimeError(f"{found} of {expected} blocks were read")


def read_by_tier(tier: SsdTier, prefix: Prefix, form: FrameFormat, places: AddressTable) -> None:
    """Read a prefix from the tier, verified as in the cache."""
    reader, count = form.reader(places), len(prefix.hashes)

    def take(number: int, frame: memoryview) -> str | None:
        expected = (prefix.hash_of(number), prefix.parent_hash(number), prefix.block_ids(number))
        return form.head_fault(frame, *expected) or form.scatter(frame, places, number)

    def take_many(first: int, file: int, offsets: NDArray[np.int64]) -> int:
        assert reader is not None
        hashes = prefix.run_of_hashes(first, len(offsets))
        return reader.read(file, offsets, hashes, prefix.run_of_ids(first, len(offsets)), first)

    keys = [prefix.key(number) for number in range(count)]
    whole(tier.read(keys, take, {form.frame_bytes: take_many} if reader else None).count, count)


def warm(layout: Layout, total_bytes: int, folder: Path, pairs: int, advance: Advance) -> list[Row]:
    """Return the speed of one thread loading a prompt from the page cache, relative to memcpy."""
    form = FrameFormat(layout, BLOCK_TOKENS)
    blocks = Blocks.of(layout, max(1, min(total_bytes, WARM_BYTES) // form.payload_bytes))
    moved, count = len(blocks.raw), blocks.count
    target = np.zeros_like(blocks.raw)
    tokens = blocks.prompt()
    asked = np.append(tokens, np.uint32(0))  # the last token is always computed
    places = contiguous(form, np.zeros_like(blocks.raw))
    kept = {name: np.zeros_like(array) for name, array in blocks.entries.items()}
    rows = []
    with (
        scratch(folder, "warm") as place,
        open_cache(place, layout, max(LARGE_CAP, 2 * moved)) as cache,
    ):
        keep(cache, tokens, blocks)
        cache.flush()
        with cache.lookup(asked) as match:
            whole(match.hit_tokens, count * BLOCK_TOKENS)
            reads, tier = cache._shared.reads, tier_of(cache)  # noqa: SLF001

            def into_new() -> None:
                whole(cache.read(match).tokens, len(tokens))

            def into_kept() -> None:
                resident = match.resident_blocks
                begun = reads.begin(match.prefix, resident, 0, count, kept)
                whole(reads.finish(begun), count)

            def by_tier() -> None:
                read_by_tier(tier, match.prefix, form, places)

            def copy() -> None:
                np.copyto(target, blocks.raw)

            for what, work, beside, bound, bar in (
                ("PrefixCache.read", into_new, "memcpy to new memory", blocks.raw.copy, WARM_BAR),
                ("the same", into_new, "memcpy to memory in use", copy, None),
                ("into entries in use", into_kept, "memcpy to memory in use", copy, WARM_BAR),
                ("tier alone", by_tier, "memcpy to memory in use", copy, WARM_BAR),
            ):
                found = paired(partial(seconds, work), partial(seconds, bound), pairs, advance)
                rows.append(
                    Row(
                        section="warm",
                        what=what,
                        of=layout.model,
                        beside=beside,
                        bar=bar,
                        note=f"{count} blocks",
                        **speeds(*found, moved),
                    )
                )
    for name, array in blocks.entries.items():
        if not np.array_equal(kept[name], array):
            raise RuntimeError(f"group {name} was read with other bytes than stored")
    return rows


def shared(
    layout: Layout, total_bytes: int, folder: Path, pairs: int, advance: Advance
) -> list[Row]:
    """Return the speed of a load by two threads relative to one, and the time to its first layer."""
    form = FrameFormat(layout, BLOCK_TOKENS)
    blocks = Blocks.of(layout, max(1, min(total_bytes, WARM_BYTES) // form.payload_bytes))
    moved, count, tokens = len(blocks.raw), blocks.count, blocks.prompt()
    kept = {name: np.zeros_like(array) for name, array in blocks.entries.items()}
    pages = _pages(layout, count)
    first = min((layer, group.name) for group in layout.global_groups for layer in group.layers)
    note = f"{count} blocks"
    with (
        scratch(folder, "one") as one,
        scratch(folder, "two") as two,
        open_cache(one, layout, max(LARGE_CAP, 2 * moved)) as alone,
        open_cache(two, layout, max(LARGE_CAP, 2 * moved), read_threads=2) as pair,
        ExitStack() as stack,
    ):
        matches = {}
        for cache in (alone, pair):
            keep(cache, tokens, blocks)
            cache.flush()
            matches[cache] = stack.enter_context(cache.lookup(np.append(tokens, np.uint32(0))))

        def read(cache: PrefixCache) -> float:
            match = matches[cache]
            reads = cache._shared.reads  # noqa: SLF001
            begin = partial(reads.begin, match.prefix, match.resident_blocks, 0, count, kept)
            return seconds(lambda: whole(reads.finish(begin()), count))

        def load(layer: int | None, group: str) -> float:
            began = time.perf_counter()
            job = pair.load(matches[pair], into=pages)
            done = job.wait() if layer is None else job.wait_group(group, layer)
            took = time.perf_counter() - began
            job.wait()
            whole(job.loaded_tokens if done else 0, len(tokens))
            return took

        by_threads = paired(partial(read, pair), partial(read, alone), pairs, advance)
        by_layer = paired(partial(load, *first), partial(load, None, ""), pairs, advance)
    return [
        Row(
            section="shared",
            what="into entries in use, 2 threads",
            of=layout.model,
            beside="1 thread",
            bar=None,
            note=note,
            **speeds(*by_threads, moved),
        ),
        Row(
            section="shared",
            what="load into pages, until its first layer is there",
            of=layout.model,
            beside="until all of it is",
            bar=None,
            note=f"{note}; GB/s of all bytes",
            **speeds(*by_layer, moved),
        ),
    ]


def _pages(layout: Layout, count: int) -> Pages:
    """Return pages of an engine, one a block."""
    import torch

    tensors = {}
    for group in layout.global_groups:
        entries = BLOCK_TOKENS // group.tokens_per_entry
        shape = (count, len(group.layers), entries, group.entry_bytes)
        tensors[group.name] = torch.zeros(shape, dtype=torch.uint8)
    return Pages(tensors, list(range(count)))


@dataclass(slots=True)
class ColdRun:
    """Prompt of 32 blocks, with the positions of its frames in the file."""

    tokens: NDArray[np.uint32]
    places: list[tuple[int, int]]
    """Offset and length of each frame's pages."""


def cold(layout: Layout, total_bytes: int, folder: Path, pairs: int, advance: Advance) -> list[Row]:
    """Return the speed of prompts of 32 blocks from disk, in random order, a fifth of the file.

    Reference: unverified O_DIRECT reads of the same pages.
    """
    blocks = Blocks.of(layout, RUN_BLOCKS)
    # At least one run per thread, so that all threads work.
    least = max(min(pair) for pair in COLD_THREADS)
    count = max(math.ceil(least / COLD_SHARE), total_bytes // len(blocks.raw))
    chosen = int(count * COLD_SHARE)
    moved = chosen * len(blocks.raw)
    capacity = max(LARGE_CAP, 2 * count * len(blocks.raw))
    rows: list[Row] = []
    with scratch(folder, "cold") as place:
        runs = _cold_store(place, blocks, count, capacity)
        for by, threads, direct_threads in [
            (by, *pair) for by in ("PrefixCache.read", "tier alone") for pair in COLD_THREADS
        ]:
            bench = _ColdPair(place, blocks, runs, capacity, chosen, is_tier=by == "tier alone")
            found = paired(
                partial(bench.load, threads),
                partial(bench.direct, direct_threads, is_by_run=threads == direct_threads),
                pairs,
                advance,
            )
            is_equal = threads == direct_threads
            rows.append(
                Row(
                    section="cold",
                    what=f"{by}, {threads} thread{'s' * (threads > 1)}",
                    of=layout.model,
                    beside=f"O_DIRECT, {direct_threads} thread{'s' * (direct_threads > 1)}",
                    bar=COLD_BAR if is_equal else None,
                    note=f"{chosen} of {count} runs of {RUN_BLOCKS}; cache dropped by {bench.how}",
                    **speeds(*found, moved),
                )
            )
    return rows


def _cold_store(place: Path, blocks: Blocks, count: int, capacity: int) -> list[ColdRun]:
    """Fill a store with prompts; return the positions of their blocks."""
    form = blocks.format
    with open_cache(place / "store", blocks.layout, capacity) as cache:
        texts = [blocks.prompt() for _ in range(count)]
        for tokens in texts:
            keep(cache, tokens, blocks)
        cache.flush()
        tier, runs = tier_of(cache), []
        for tokens in texts:
            prefix = cache.probe(tokens).prefix
            records = [tier.record(prefix.key(number)) for number in range(blocks.count)]
            pages = [record.page for record in records if record is not None and record.page]
            whole(len(pages), blocks.count)
            size = pages_of(form.frame_bytes) * PAGE_BYTES
            runs.append(ColdRun(tokens, [(page * PAGE_BYTES, size) for page in pages]))
    return runs


class _ColdPair:
    """A load from disk and the O_DIRECT reads of the same blocks.

    Both sides of a pair read the same runs; the next pair chooses others.
    """

    def __init__(
        self,
        place: Path,
        blocks: Blocks,
        runs: Sequence[ColdRun],
        capacity: int,
        chosen: int,
        *,
        is_tier: bool,
    ) -> None:
        self._store, self._blocks, self._runs = place / "store", blocks, runs
        self._capacity, self._chosen, self._is_tier = capacity, chosen, is_tier
        self._calls = 0
        self.how = ""

    def _next(self) -> list[ColdRun]:
        seed, self._calls = self._calls // 2, self._calls + 1
        order = np.random.default_rng(seed).permutation(len(self._runs))
        return [self._runs[at] for at in order[: self._chosen]]

    def load(self, threads: int) -> float:
        """Open the store with a cold page cache, and load runs."""
        runs = self._next()
        self.how = forget_pages(self._store)
        with open_cache(self._store, self._blocks.layout, self._capacity) as cache:
            matches = [cache.lookup(np.append(run.tokens, np.uint32(0))) for run in runs]
            load = self._by_tier(cache, threads) if self._is_tier else self._by_cache(cache)
            return self._timed(load, matches, threads)

    def _by_cache(self, cache: PrefixCache) -> Callable[[Match], None]:
        return lambda match: whole(cache.read(match).tokens, RUN_BLOCKS * BLOCK_TOKENS)

    def _by_tier(self, cache: PrefixCache, threads: int) -> Callable[[Match], None]:
        tier, form = tier_of(cache), self._blocks.format
        outs: SimpleQueue[AddressTable] = SimpleQueue()
        for _ in range(threads):
            # Ones: the system allocates the pages of zeros only when they are written.
            outs.put(contiguous(form, np.ones(RUN_BLOCKS * form.payload_bytes, np.uint8)))

        def load(match: Match) -> None:
            out = outs.get()
            read_by_tier(tier, match.prefix, form, out)
            outs.put(out)

        return load

    def direct(self, threads: int, *, is_by_run: bool) -> float:
        """Read the pages of the same runs with O_DIRECT, one block per call.

        By runs, one block per thread is in flight; otherwise as many as there are threads.
        """
        runs = self._next()
        size = runs[0].places[0][1]
        buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(threads):
            buffers.put(mmap.mmap(-1, size))  # page-aligned, as O_DIRECT requires
        file = open_direct(self._store / DATA_FILE)

        def read(places: Sequence[tuple[int, int]]) -> None:
            buffer = buffers.get()
            for offset, _ in places:
                whole(os.preadv(file, [buffer], offset), size)
            buffers.put(buffer)

        places = [run.places for run in runs]
        singles = [[place] for run in places for place in run]
        try:
            return self._timed(read, places if is_by_run else singles, threads)
        finally:
            os.close(file)

    @staticmethod
    def _timed(work: Callable[[T], None], items: Sequence[T], threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return seconds(lambda: deque((pool.map if threads > 1 else map)(work, items), maxlen=0))
