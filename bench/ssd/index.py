"""Index sections of ``python -m bench.ssd``: lookup of a long prefix, opening a large store, memory."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import IO

import lmdb
import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.paired import Row, seconds
from bench.ssd.store import BLOCK_TOKENS, Advance, forget_pages, open_cache, scratch, whole
from kvstore import LayerGroup, Layout
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey, block_key
from kvstore.identity.hash import block_hashes
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.output.sizes import size_text
from kvstore.policy.lru import Lru
from kvstore.tier.ssd.records import Record

LOOKUP_BLOCKS = 8192
"""1,048,576 tokens: the context of DeepSeek-V4.1-Flash."""
LOOKUP_BAR_MS, STDLIB_BAR_MS = 5.0, 12.0
OPEN_BLOCKS = 1_000_000
OPEN_BAR_SECONDS = 2.0
OPENINGS = 3
"""Most openings of each kind: one takes seconds, with little variation."""
INDEX_BAR_BYTES = 40.0
TREE = Path(__file__).parents[1] / "data" / "weka_48_segments.json"
"""Prefix tree of a public trace, without its tokens; ``source`` names the trace."""
CAPACITY = 64 << 30
"""Capacity below which nothing is evicted; the file is as large as its contents."""
_RECORDS = 50_000
"""Records per transaction of a synthetic store."""
_WINDOW = 1 << 27
"""Traces are compressed with a window of 128 MiB."""

Tree = Sequence[tuple[int, int]]
"""Segments as (number of the parent or -1, blocks), parents first."""


def one_byte_layout() -> Layout:
    """Return the smallest layout: lookup and opening do not depend on the payload."""
    group = LayerGroup(name="b", layers=(0,), values=1, entry_format="u8")
    return Layout(model="one byte a token", groups=(group,))


def lookup(blocks: int, folder: Path, rounds: int, advance: Advance) -> list[Row]:
    """Return the times of a lookup and of its parts, interleaved."""
    layout = one_byte_layout()
    # The last token is always computed.
    tokens = (
        np.random.default_rng(1).integers(0, 1 << 17, blocks * BLOCK_TOKENS + 1).astype(np.uint32)
    )
    with scratch(folder, "lookup") as place, open_cache(place, layout, 1 << 30) as cache:
        cache.store(tokens, {"b": np.zeros((1, len(tokens), 1), np.uint8)}, wait=60)
        cache.flush()
        root = cache._chains.root  # noqa: SLF001 - for the parts of a lookup
        owned = cache._shared.writer  # noqa: SLF001
        assert owned is not None
        index, wide = owned.index, tokens.astype(np.int64)
        hashes = block_hashes(root, tokens, BLOCK_TOKENS)
        whole(sum(a == b for a, b in zip(hashes, stdlib_hashes(root, tokens), strict=True)), blocks)
        path = b"".join([block_key(block_hash) for block_hash in hashes])
        hashed = bytes(4 * len(tokens) + 44 * blocks)

        def found(ids: NDArray[np.integer]) -> None:
            whole(cache.lookup(ids).hit_tokens, blocks * BLOCK_TOKENS)

        def stdlib() -> None:
            keys = [block_key(block_hash) for block_hash in stdlib_hashes(root, tokens)]
            whole(index.match(b"".join(keys)).depth, blocks)

        works: list[tuple[str, Callable[[], object], float | None]] = [
            ("PrefixCache.lookup, uint32", lambda: found(tokens), LOOKUP_BAR_MS),
            ("PrefixCache.lookup, int64", lambda: found(wide), LOOKUP_BAR_MS),
            ("hash and match, hashlib alone", stdlib, STDLIB_BAR_MS),
            ("hashes alone", lambda: block_hashes(root, tokens, BLOCK_TOKENS), None),
            ("match alone", lambda: index.match(path), None),
            ("one SHA-256 of as many bytes", lambda: hashlib.sha256(hashed).digest(), None),
        ]
        times = in_turn([work for _, work, _ in works], rounds, advance)
    of = f"{blocks * BLOCK_TOKENS:,} tokens"
    return [
        _row("lookup", what, of, [1e3 * second for second in taken], "ms", bar)
        for (what, _, bar), taken in zip(works, times, strict=True)
    ]


def in_turn(
    works: Sequence[Callable[[], object]], rounds: int, advance: Advance
) -> list[list[float]]:
    """Run each task once unmeasured, then ``rounds`` times in changing order; return the seconds."""
    for work in works:
        work()
    found: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        for at in range(len(works))[:: -1 if number % 2 else 1]:
            found[at].append(seconds(works[at]))
        advance(number + 1, rounds)
    return found


def _row(
    section: str,
    what: str,
    of: str,
    values: Sequence[float],
    unit: str,
    bar: float | None,
    note: str = "",
) -> Row:
    low, _, high = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    )
    return Row(
        section=section,
        what=what,
        of=of,
        value=median(values),
        unit=unit,
        low=low,
        high=high,
        bar=bar,
        note=note,
    )


def stdlib_hashes(root: BlockHash, tokens: NDArray[np.uint32]) -> list[BlockHash]:
    """Return the hashes of whole blocks by hashlib alone: docs/format.md, section 2."""
    head, no_images = b"kvb1" + BLOCK_TOKENS.to_bytes(4, "little"), bytes(4)
    data = tokens.astype("<u4", copy=False).tobytes()
    step, above, found = 4 * BLOCK_TOKENS, root, []
    for at in range(0, len(data) - step + 1, step):
        above = BlockHash(hashlib.sha256(head + above + data[at : at + step] + no_images).digest())
        found.append(above)
    return found


def opening(blocks: int, tree: Tree, folder: Path, rounds: int, advance: Advance) -> list[Row]:
    """Return the opening times of a store of that many blocks, with synthetic metadata.

    Opening reads records alone, so there are no payloads; prefixes repeat ``tree``. The reference is an
    empty loop over all records with LMDB's cursor.
    """
    layout = one_byte_layout()
    opened: dict[str, list[float]] = {"page cache warm": [], "": []}
    shown: list[float] = []
    with scratch(folder, "open") as place:
        with open_cache(place, layout, CAPACITY) as cache:
            tokens = np.zeros(BLOCK_TOKENS, np.uint32)
            cache.store(tokens, {"b": np.zeros((1, BLOCK_TOKENS, 1), np.uint8)}, wait=60)
        make_up(place, blocks, tree)
        size = (place / "data.mdb").stat().st_blocks * 512
        how, count = "", min(rounds, OPENINGS)
        for number in range(count):
            for kind, found in opened.items():
                if not kind:
                    how = forget_pages(place)
                found.append(_seconds_to_open(place, layout, blocks + 1))
            shown.append(_seconds_of_a_cursor(place, blocks + 1))
            advance(number + 1, count)
    return [
        _row(
            "open",
            kind or f"page cache dropped ({how})",
            f"{blocks:,} blocks",
            found,
            "s",
            OPEN_BAR_SECONDS,
            f"a cursor of LMDB alone {median(shown):.2f} s; data.mdb of {size_text(size)}, without payloads",
        )
        for kind, found in opened.items()
    ]


def _seconds_to_open(place: Path, layout: Layout, blocks: int) -> float:
    gc.collect()
    began = time.perf_counter()
    with open_cache(place, layout, CAPACITY) as cache:
        taken = time.perf_counter() - began
        whole(cache.stats()["tiers"]["ssd"]["blocks"], blocks)
    return taken


def _seconds_of_a_cursor(place: Path, blocks: int) -> float:
    with lmdb.open(str(place), max_dbs=8, lib_version=0, readonly=True, lock=False) as env:
        meta = env.open_db(b"meta", create=False)
        began = time.perf_counter()
        with env.begin() as txn:
            count = sum(1 for _ in txn.cursor(meta))
        taken = time.perf_counter() - began
    whole(count, blocks)
    return taken


def make_up(place: Path, blocks: int, tree: Tree) -> None:
    """Write the records of ``blocks`` blocks into a closed store, with the age of each."""
    rng = np.random.default_rng(2)
    env = lmdb.open(
        str(place), map_size=CAPACITY, max_dbs=8, lib_version=0, sync=False, readahead=False
    )
    meta, age = (env.open_db(name, create=False) for name in (b"meta", b"age"))
    records = made_up_records(blocks, tree, rng)
    done = 0
    while done < blocks:
        with env.begin(write=True) as txn:
            for key, record in records:
                txn.put(key, record.pack(), db=meta)
                txn.put(record.sequence.to_bytes(8, "big"), key, db=age)
                done += 1
                if not done % _RECORDS:
                    break
    env.sync(True)  # noqa: FBT003 - py-lmdb's own positional flag
    env.close()


def made_up_records(
    blocks: int, tree: Tree, rng: np.random.Generator
) -> Iterator[tuple[BlockKey, Record]]:
    """Yield records of that many blocks, parents first, under random keys."""
    done = 0
    ends: list[tuple[BlockKey, int]] = []
    for at, (parent, count) in cycle(enumerate(tree)):
        if at == 0:
            ends = []
        key, number = ends[parent] if parent >= 0 else (BlockKey(bytes(KEY_BYTES)), 0)
        for _ in range(count):
            if done == blocks:
                return
            done += 1
            above, key = key, BlockKey(rng.bytes(KEY_BYTES))
            # Sequences start after that of the first block of the store.
            yield (
                key,
                Record(
                    parent=above, number=number, namespace_id=1, sequence=done + 16, frame_bytes=1
                ),
            )
            number += 1
        ends.append((key, number))


def memory(tree: Tree, name: str) -> list[Row]:
    """Return the index's bytes per block: for a trace, and for forks at every block.

    Python's allocations are counted, so the figures do not depend on the machine.
    """
    blocks = sum(count for _, count in tree)
    # One chain in which a request ends at each block: each segment has a child.
    ones = [(at - 1, 1) for at in range(blocks)]
    return [
        Row(
            section="index",
            what=what,
            of=f"{blocks:,} blocks",
            value=index_bytes(segments) / blocks,
            unit="B/block",
            bar=INDEX_BAR_BYTES,
            note=f"{len(segments):,} segments",
        )
        for what, segments in ((f"segments of {name}", tree), ("segments of one block", ones))
    ]


def index_bytes(tree: Tree) -> int:
    """Return the bytes that Python allocates for an index of such a tree, its policy included."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = index_of(tree)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole(index.blocks, sum(count for _, count in tree))
    return after - before


def index_of(tree: Tree) -> PrefixIndex:
    """Return an index of such a tree, under random keys."""
    rng = np.random.default_rng(3)
    index = PrefixIndex(Lru[Segment]())
    made: list[Segment] = []
    for now, (parent, count) in enumerate(tree, 1):
        above = made[parent] if parent >= 0 else index.root
        made.append(index.insert(above, rng.bytes(count * KEY_BYTES), now=now, namespace_id=1))
    return index


def read_tree(path: Path) -> Tree:
    """Return the segments that ``write_tree`` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [(parent, count) for parent, count in found["segments"]]


def trace_tree(path: Path) -> Tree:
    """Return the segments of a trace: JSON lines with ``hash_ids``, plain or ``.zst``.

    Equal ids must be equal prefixes, as in the traces of Mooncake and Weka.
    """
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix == ".zst":
            decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
            file = stack.enter_context(decompressor.stream_reader(file))
        lines = stack.enter_context(io.TextIOWrapper(file, encoding="utf-8"))
        return tree_of(json.loads(line)["hash_ids"] for line in lines)


def tree_of(requests: Iterable[Sequence[int]]) -> Tree:
    """Return the segments of requests, split at every fork and request end."""
    index = PrefixIndex(Lru[Segment]())
    for now, ids in enumerate(requests, 1):
        keys = np.zeros((len(ids), KEY_BYTES // 4), "<u4")
        keys[:, 0] = ids
        path = keys.tobytes()
        position = index.match(path)
        segment = index.split_at(position)
        rest = path[position.depth * KEY_BYTES :]
        if rest:
            index.insert(segment, rest, now=now, namespace_id=1)
    tree: list[tuple[int, int]] = []
    pending = [(segment, -1) for segment in index.root.children.values()]
    while pending:
        segment, parent = pending.pop()
        pending += [(child, len(tree)) for child in segment.children.values()]
        tree.append((parent, segment.blocks))
    return tree


def write_tree(tree: Tree, source: str, block_tokens: int, path: Path) -> None:
    """Write a tree with its source."""
    text = {"source": source, "block_tokens": block_tokens, "segments": tree}
    path.write_text(json.dumps(text, separators=(",", ":")) + "\n", encoding="utf-8")
