"""The rebuilt index compared with a walk of the records block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.identity.block import BlockKey
from kvstore.index.prefix_tree import NEVER, PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.store.rebuild import rebuild
from kvstore.tier.ssd.records import Record, Records

Found = tuple[list[object], list[BlockKey]]


def rebuilt(records: Mapping[BlockKey, Record]) -> Found:
    """Return the fields of every segment in the order of insertion, and the orphans."""
    rows = b"".join(key + records[key].pack() for key in sorted(records))
    made: list[Segment] = []
    stuck: list[Segment] = []

    class Noting(Lru[Segment]):
        def insert(self, segment: Segment) -> None:
            made.append(segment)
            super().insert(segment)

    index = PrefixIndex(Noting())
    orphans = rebuild(index, Records(rows), stuck.append)
    assert stuck == [segment for segment in made if segment in stuck]
    assert index.blocks + len(orphans) == len(records)
    return [
        (
            *(segment.keys, segment.start, segment.last_use, segment.expires),
            *(segment.namespace_id, segment in stuck),
            segment.parent.keys if segment.parent else b"",
        )
        for segment in made
    ], orphans


def expected(records: Mapping[BlockKey, Record]) -> Found:
    """Walk from every first block down, largest key first."""

    def hangs(key: BlockKey) -> bool:
        record, above = records[key], records.get(records[key].parent)
        return record.number > 0 and above is not None and above.number == record.number - 1

    below: dict[BlockKey, list[BlockKey]] = defaultdict(list)
    for key in sorted(records):
        if hangs(key):
            below[records[key].parent].append(key)
    recency: dict[BlockKey, int] = {}
    for key in sorted(records, key=lambda key: -records[key].number):
        recency[key] = max([records[key].sequence, *(recency[child] for child in below[key])])
    made: list[object] = []
    reached: set[BlockKey] = set()
    pending = [(b"", key) for key in sorted(records) if records[key].number == 0]
    while pending:
        above, key = pending.pop()
        run = [key]
        while len(below[run[-1]]) == 1:
            (child,) = below[run[-1]]
            last, record = records[run[-1]], records[child]
            if recency[child] != recency[run[-1]] or record.expires != last.expires:
                break
            if last.is_pinned and not record.is_pinned:
                break
            run.append(child)
        first = records[key]
        joined = b"".join(run)
        pinned = any(records[k].is_pinned for k in run)
        expires = first.expires or NEVER
        made.append(
            (joined, first.number, recency[key], expires, first.namespace_id, pinned, above)
        )
        reached.update(run)
        pending += [(joined, child) for child in below[run[-1]]]
    orphans = sorted(records.keys() - reached, key=lambda key: (-records[key].number, key))
    return made, orphans


def a_key(number: int) -> BlockKey:
    """Return one of a few keys; half of them share a prefix."""
    word = 0 if number % 2 else number * 0x9E3779B97F4A7C15 % 2**64
    return BlockKey(word.to_bytes(8, "big") + number.to_bytes(8, "big"))


@st.composite
def stores(draw: st.DrawFn) -> dict[BlockKey, Record]:
    """Trees of blocks in which some records are damaged, missing, or parents of each other."""
    blocks = draw(st.integers(0, 40))
    damage = draw(st.booleans())
    found: dict[BlockKey, Record] = {}
    for at in draw(st.permutations(range(blocks))):
        key = a_key(at)
        above = draw(st.one_of(st.none(), st.sampled_from(sorted(found)))) if found else None
        number = 0 if above is None else (found[above].number + 1) % 2**32
        parent = above or BlockKey(bytes(16))
        if damage and draw(st.integers(0, 4)) == 0:
            parent = a_key(draw(st.integers(0, blocks)))
        if damage and draw(st.integers(0, 4)) == 0:
            number = draw(st.sampled_from([0, 1, 2, 3, 2**32 - 1]))
        found[key] = Record(
            parent=parent,
            number=number,
            namespace_id=draw(st.integers(0, 2)),
            sequence=draw(st.one_of(st.integers(0, 4), st.just(2**64 - 1))),
            expires=draw(st.sampled_from([0.0, 0.0, 5.0, 7.0, float("nan"), float("inf"), -1.0])),
            is_pinned=draw(st.integers(0, 3)) == 0,
        )
    stored = {key: Record.unpack(record.pack()) for key, record in found.items()}
    return {key: record for key, record in stored.items() if record is not None}


@settings(max_examples=400, deadline=None)
@given(records=stores())
def test_it_is_what_a_walk_block_by_block_finds(records: dict[BlockKey, Record]) -> None:
    assert rebuilt(records) == expected(records)


def chain_of(blocks: int, fork_every: int, head_every: int) -> dict[BlockKey, Record]:
    """Return blocks in one long shape: a chain, a comb, or single blocks."""
    rng = np.random.default_rng(blocks)
    keys = [BlockKey(rng.bytes(16)) for _ in range(blocks)]
    found: dict[BlockKey, Record] = {}
    spine, number = BlockKey(bytes(16)), 0
    for at, key in enumerate(keys):
        if at % head_every == 0:
            spine, number = BlockKey(bytes(16)), 0
        found[key] = Record(parent=spine, number=number, namespace_id=1, sequence=at + 1)
        if at % fork_every == 0:
            spine, number = key, number + 1
    return found


@pytest.mark.parametrize(
    ("fork_every", "head_every"),
    [(1, 10**9), (1, 1), (2, 10**9), (10**9, 10**9), (3, 100)],
    ids=["one chain", "first blocks alone", "a comb", "one wide fork", "many trees"],
)
def test_long_shapes_are_the_same_too(fork_every: int, head_every: int) -> None:
    records = chain_of(3000, fork_every, head_every)
    assert rebuilt(records) == expected(records)


def test_records_that_name_each_other_in_a_circle_are_orphans_deepest_first() -> None:
    a, b, c, alone = (BlockKey(bytes([n] * 16)) for n in range(1, 5))
    records = {
        a: Record(parent=c, number=1, namespace_id=1, sequence=1),
        b: Record(parent=a, number=2, namespace_id=1, sequence=2),
        c: Record(parent=b, number=3, namespace_id=1, sequence=3),
        alone: Record(parent=alone, number=7, namespace_id=1, sequence=4),
    }
    assert rebuilt(records) == ([], [alone, c, b, a])
