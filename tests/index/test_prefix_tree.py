"""PrefixIndex and Lru against a tree of single blocks that is searched from end to end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from kvstore.identity.block import KEY_BYTES
from kvstore.index.prefix_tree import NEVER, Position, PrefixIndex, Segment
from kvstore.policy.lru import Lru
from kvstore.policy.registry import POLICIES, make_policy
from tests.builders import path_of


def cut(path: bytes) -> list[bytes]:
    return [path[at : at + KEY_BYTES] for at in range(0, len(path), KEY_BYTES)]


# ---- the oracle --------------------------------------------------------------------------------

Among = tuple[int, ...] | None
"""Namespaces that an eviction keeps to."""


@dataclass
class Block:
    """One block, on its own: it knows its parent and the newest request that used it."""

    parent: bytes | None
    depth: int
    namespace_id: int
    use: int
    expires: float


@dataclass
class Oracle:
    """Leaf-first LRU over blocks, by looking at every block every time."""

    blocks: dict[bytes, Block] = field(default_factory=dict)
    pins: list[bytes] = field(default_factory=list)

    def depth(self, path: bytes, now: float) -> int:
        found = 0
        for key in cut(path):
            block = self.blocks.get(key)
            if block is None or block.expires <= now:
                break
            found += 1
        return found

    def use(self, keys: list[bytes], tick: int) -> None:
        for key in keys:
            self.blocks[key].use = max(self.blocks[key].use, tick)

    def add(self, path: bytes, first: int, tick: int, namespace_id: int, expires: float) -> None:
        keys = cut(path)
        self.use(keys[:first], tick)
        for depth in range(first, len(keys)):
            parent = keys[depth - 1] if depth else None
            assert keys[depth] not in self.blocks
            self.blocks[keys[depth]] = Block(parent, depth + 1, namespace_id, tick, expires)

    def leaves(self, among: Among = None) -> list[bytes]:
        parents = {block.parent for block in self.blocks.values()}
        return [
            key
            for key, block in self.blocks.items()
            if key not in parents
            and key not in self.pins
            and (among is None or block.namespace_id in among)
        ]

    def next_victim(self, among: Among = None) -> bytes | None:
        leaves = self.leaves(among)
        return min(leaves, key=lambda k: (self.blocks[k].use, -self.blocks[k].depth), default=None)

    def evict(self, count: int, now: float, among: Among = None) -> tuple[set[bytes], list[bytes]]:
        expired = {key for key, block in self.blocks.items() if block.expires <= now}
        expired |= {key for key in self.blocks if any(a in expired for a in self.line(key))}
        gone: set[bytes] = set()
        while True:
            free = [key for key in self.leaves(among) if key in expired]
            if not free:
                break
            for key in free:
                del self.blocks[key]
            gone.update(free)
        order: list[bytes] = []
        while len(gone) + len(order) < count:
            victim = self.next_victim(among)
            if victim is None:
                break
            del self.blocks[victim]
            order.append(victim)
        return gone, order

    def line(self, key: bytes) -> list[bytes]:
        line = []
        at: bytes | None = key
        while at is not None:
            line.append(at)
            at = self.blocks[at].parent
        return line

    def remove_if(self, doomed: set[bytes]) -> set[bytes]:
        gone = {key for key in self.blocks if any(a in doomed for a in self.line(key))}
        for key in gone:
            del self.blocks[key]
        return gone


# ---- the fuzzer --------------------------------------------------------------------------------


@dataclass
class Pending:
    """A store whose later pieces have not been committed yet."""

    path: bytes
    next: int
    tick: int
    namespace_id: int
    expires: float


class Fuzzer:
    """Does the same to an index and to the oracle, the way a cache does it, and compares."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = Lru[Segment]()
        self.index = PrefixIndex(self.policy)
        self.oracle = Oracle()
        self.tick = 0
        self.now = 0.0
        self.pending: list[Pending] = []
        self.held: list[tuple[Segment, bytes, bytes]] = []  # segment, the block it pinned, path
        self.paths: list[list[int]] = [[]]

    def symbols(self) -> list[int]:
        """A path that often shares a prefix with an earlier one. Its head tells its namespace."""
        old = self.random.choice(self.paths)
        kept = old[: self.random.randint(0, len(old))]
        if not kept:
            kept = [1000 + self.random.randrange(3)]
        new = kept + [self.random.randrange(2) for _ in range(self.random.randint(0, 7))]
        self.paths.append(new[:14])
        self.paths = self.paths[-30:]
        return new[:14]

    def expiry(self) -> float:
        return self.random.choice([NEVER, NEVER, NEVER, self.now + self.random.randint(1, 40)])

    def store(self) -> None:
        symbols, start = self.symbols(), self.random.choice([0, 0, 0, 1, 3])
        path = path_of(symbols)
        self.tick += 1
        position = self.index.match(path)
        assert position.depth == self.oracle.depth(path, -NEVER)
        if position.depth < start:  # the parent is missing: a cache drops the whole store
            return
        segment = self.index.split_at(position)
        self.index.touch(segment, self.tick)
        self.oracle.use(cut(path)[: position.depth], self.tick)
        self.tick += 1  # the new blocks' own: a segment grows only below blocks of the same store
        job = Pending(path, position.depth, self.tick, symbols[0], self.expiry())
        if self.random.random() < 0.3:
            self.pending.append(job)
        while self.piece(job) and job not in self.pending:
            pass

    def commit(self) -> None:
        if self.pending:
            job = self.pending[self.random.randrange(len(self.pending))]
            if not self.piece(job):
                self.pending.remove(job)

    def piece(self, job: Pending) -> bool:
        """Commit one more piece of a store; False when there is none or its parent is gone."""
        position = self.index.match(job.path)
        total = len(job.path) // KEY_BYTES
        if position.depth < job.next or position.depth == total:
            return False
        stop = min(total, position.depth + self.random.randint(1, 5))
        path = job.path[: stop * KEY_BYTES]
        add = self.random.choice([self.index.extend, self.index.extend, self.index.insert])
        segment = add(
            self.index.split_at(position),
            path[position.depth * KEY_BYTES :],
            now=job.tick,
            namespace_id=job.namespace_id,
            expires=job.expires,
        )
        assert segment.stop == stop
        self.oracle.add(path, position.depth, job.tick, job.namespace_id, job.expires)
        job.next = stop
        return True

    def lookup(self) -> None:
        path = path_of(self.symbols())
        self.tick += 1
        position = self.index.match(path, self.now)
        assert position.depth == self.oracle.depth(path, self.now)
        if not position.depth:
            return
        segment = self.index.split_at(position)
        assert segment.stop == position.depth
        keys = cut(path)[: position.depth]
        assert segment.keys[-KEY_BYTES:] == keys[-1]
        if self.random.random() < 0.4 and len(self.held) < 6:
            self.index.pin(segment)
            self.held.append((segment, keys[-1], b"".join(keys)))
            self.oracle.pins.append(keys[-1])
        self.index.touch(segment, self.tick)
        self.oracle.use(keys, self.tick)

    def probe(self) -> None:
        """A match alone changes nothing; the comparison after every step would tell."""
        path = path_of(self.symbols())
        assert self.index.match(path, self.now).depth == self.oracle.depth(path, self.now)

    def unpin(self) -> None:
        if self.held:
            segment, key, _ = self.held.pop(self.random.randrange(len(self.held)))
            self.index.unpin(segment)
            if key:
                self.oracle.pins.remove(key)

    def renew(self) -> None:
        path = path_of(self.symbols())
        position = self.index.match(path)
        if position.depth:
            expires = self.expiry()
            changed = self.index.renew(self.index.split_at(position), expires)
            wanted = set()
            for key in cut(path)[: position.depth]:
                if self.oracle.blocks[key].expires < expires:
                    self.oracle.blocks[key].expires = expires
                    wanted.add(key)
            assert {key for segment in changed for key in cut(segment.keys)} == wanted

    def evict(self) -> None:
        count = self.random.choice([0, 1, 1, 2, 3, 5, 8, 40])
        now = self.random.choice([self.now, -NEVER])
        among: Among = self.random.choice([None, None, (1000,), (1001, 1002)])
        before = len(self.oracle.blocks)
        of_others = {
            k for k, b in self.oracle.blocks.items() if b.namespace_id not in (among or ())
        }
        removed = self.index.evict(count, now, among)
        expired, order = self.oracle.evict(count, now, among)
        assert among is None or of_others.isdisjoint(removed), "a block of another namespace went"
        assert set(removed[: len(expired)]) == expired
        assert removed[len(expired) :] == order, "victims differ from leaf-first LRU"
        assert len(removed) == len(set(removed)) == before - len(self.oracle.blocks)
        assert len(removed) >= min(count, before) or not self.oracle.leaves(among)
        assert len(removed) <= max(count, len(expired))

    def remove_from(self) -> None:
        path = path_of(self.symbols())
        position = self.index.match(path)
        if not position.depth:
            return
        keys = cut(path)[: position.depth]
        if self.random.random() < 0.5:  # everything deeper than a place inside a segment
            kept = position.depth
        else:  # the last block as well, as a cache does with a block that cannot be read
            segment = self.index.split_at(position)
            position = Position(segment, segment.blocks - 1, position.depth - 1)
            kept = position.depth
        doomed = {k for k, b in self.oracle.blocks.items() if b.parent == keys[kept - 1]}
        doomed = doomed if kept == len(keys) else {keys[kept]}
        removed = self.index.remove_from(position)
        self.forget(set(removed), doomed)

    def remove_namespace(self) -> None:
        namespace_id = 1000 + self.random.randrange(3)
        removed = self.index.remove_namespace(namespace_id)
        doomed = {k for k, b in self.oracle.blocks.items() if b.namespace_id == namespace_id}
        self.forget(set(removed), doomed)

    def forget(self, removed: set[bytes], doomed: set[bytes]) -> None:
        """Removal by force: what is left of a pinned segment stays pinned, the rest is free."""
        assert removed == self.oracle.remove_if(doomed)
        self.oracle.pins = []
        for number, (segment, key, path) in enumerate(self.held):
            if key in removed or not key:
                tail = cut(path)[segment.stop - 1] if segment.is_live else b""
                self.held[number] = (segment, tail, path)
        self.oracle.pins = [key for _, key, _ in self.held if key]

    def check(self) -> None:
        """Compare everything that can be counted again."""
        index, blocks = self.index, self.oracle.blocks
        segments = list(index)
        assert index.segments == len(segments)
        assert index.blocks == len(blocks) == sum(segment.blocks for segment in segments)
        assert index.expiring == sum(segment.expires != NEVER for segment in segments)
        counts: dict[int, int] = {}
        for segment in segments:
            parent = segment.parent
            assert parent is not None
            assert segment.is_live
            assert segment.start == parent.stop
            assert parent.children[segment.keys[:KEY_BYTES]] is segment
            above = parent.keys[-KEY_BYTES:] if parent.parent is not None else None
            for number, key in enumerate(cut(segment.keys)):
                block = blocks[key]
                assert block.parent == above, "not closed under prefixes"
                assert block.depth == segment.start + number + 1
                assert block.namespace_id == segment.namespace_id
                assert block.expires == segment.expires
                above = key
            counts[segment.namespace_id] = counts.get(segment.namespace_id, 0) + segment.blocks
        assert index.namespace_blocks() == counts
        assert all(key in blocks for key in self.oracle.pins), "a pinned block is gone"
        victim = self.policy.victim(1)
        expected = self.oracle.next_victim()
        assert (victim.keys[-KEY_BYTES:] if victim else None) == expected

    def step(self) -> None:
        self.now += self.random.random()
        operations = {
            self.store: 30,
            self.commit: 12,
            self.lookup: 22,
            self.probe: 4,
            self.unpin: 12,
            self.renew: 3,
            self.evict: 14,
            self.remove_from: 2,
        }
        chosen = self.random.choices(list(operations), list(operations.values()))[0]
        if self.random.random() < 0.004:
            chosen = self.remove_namespace
        chosen()


@pytest.mark.parametrize("seed", range(20))
def test_every_operation_agrees_with_a_tree_of_single_blocks(seed: int) -> None:
    fuzzer = Fuzzer(seed)
    most = 0
    for _ in range(1100):
        fuzzer.step()
        fuzzer.check()
        most = max(most, fuzzer.index.blocks)
    assert most > 60, "the fuzzer never filled the index"
    while fuzzer.held:
        fuzzer.unpin()
        fuzzer.check()
    removed = fuzzer.index.evict(10**6)
    assert removed == fuzzer.oracle.evict(10**6, -NEVER)[1]
    assert fuzzer.index.blocks == fuzzer.index.segments == fuzzer.index.expiring == 0


# ---- single promises ---------------------------------------------------------------------------


def make_index() -> tuple[PrefixIndex, Lru[Segment]]:
    policy = Lru[Segment]()
    return PrefixIndex(policy), policy


def put(index: PrefixIndex, symbols: list[int], now: int) -> Segment:
    """Store and use a path, as one request does."""
    path = path_of(symbols)
    position = index.match(path)
    segment = index.split_at(position)
    index.touch(segment, now)
    if position.depth == len(symbols):
        return segment
    keys = path[position.depth * KEY_BYTES :]
    return index.insert(segment, keys, now=now, namespace_id=1)


def use(index: PrefixIndex, symbols: list[int], now: int) -> Segment:
    segment = index.split_at(index.match(path_of(symbols)))
    index.touch(segment, now)
    return segment


def depth(index: PrefixIndex, symbols: list[int]) -> int:
    return index.match(path_of(symbols)).depth


def test_the_tail_of_a_full_tier_goes_and_the_head_still_hits() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3], 1)
    assert index.evict(1) == cut(path_of([1, 2, 3]))[2:]
    assert depth(index, [1, 2, 3]) == 2


def test_a_path_longer_than_the_tier_keeps_its_head() -> None:
    index, _ = make_index()
    put(index, list(range(100)), 1)
    index.evict(90)
    assert depth(index, list(range(100))) == 10


def test_a_pinned_hit_survives_an_allocation_that_wants_everything() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3, 4], 1)
    put(index, [9, 9], 2)
    held = use(index, [1, 2], 3)
    index.pin(held)
    assert len(index.evict(1000)) == 4
    assert depth(index, [1, 2, 3, 4]) == 2
    index.unpin(held)
    assert len(index.evict(1000)) == 2


def test_split_pin_and_unpin_leave_every_counter_where_it_was() -> None:
    index, policy = make_index()
    lower = put(index, [1, 2, 3, 4, 5, 6], 1)
    index.pin(lower)
    upper = use(index, [1, 2], 2)
    assert upper is not lower
    assert (lower.start, lower.blocks, upper.start, upper.blocks) == (2, 4, 0, 2)
    assert (lower.pins, upper.pins) == (1, 0)
    index.pin(upper)
    assert policy.victim(1) is None
    index.unpin(lower)
    assert policy.victim(1) is lower
    index.unpin(upper)
    assert index.blocks == 6
    assert index.segments == 2


def test_a_parent_inherits_the_recency_of_a_child_that_dies() -> None:
    index, _ = make_index()
    put(index, [1, 2], 1)
    put(index, [8, 8], 2)
    put(index, [1, 2, 3], 3)
    use(index, [1, 2, 3], 4)
    assert index.evict(3) == [*reversed(cut(path_of([8, 8]))), cut(path_of([1, 2, 3]))[2]]
    put(index, [7], 5)
    assert index.evict(1) == [cut(path_of([1, 2]))[1]]


def test_a_shorter_use_does_not_refresh_what_lies_below_it() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3, 4], 1)
    put(index, [5, 6], 2)
    use(index, [1, 2], 3)
    assert index.evict(2) == list(reversed(cut(path_of([1, 2, 3, 4]))[2:]))
    assert index.evict(1) == [cut(path_of([5, 6]))[1]]


def test_among_equals_the_deeper_tail_goes_first() -> None:
    index, _ = make_index()
    put(index, [1, 2], 7)
    put(index, [3, 4, 5], 7)
    assert index.evict(1) == [cut(path_of([3, 4, 5]))[2]]


def test_among_equals_the_deeper_tail_goes_first_after_a_split() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3, 4, 5, 6], 7)
    put(index, [8], 1)
    put(index, [8, 9, 9], 7)
    use(index, [1, 2, 3, 4], 8)
    assert index.evict(1) == [cut(path_of([1, 2, 3, 4, 5, 6]))[5]]


def test_equals_shrink_together_one_block_at_a_time() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3, 4, 5], 7)
    put(index, [6, 7, 8], 7)
    places = cut(path_of([1, 2, 3, 4, 5])) + cut(path_of([6, 7, 8]))
    depths = [(places.index(index.evict(1)[0]) % 5) + 1 for _ in places]
    assert depths == [5, 4, 3, 3, 2, 2, 1, 1]


def test_evicting_nothing_removes_nothing() -> None:
    index, _ = make_index()
    put(index, [1, 2], 1)
    assert index.evict(0) == []
    assert index.evict(-5) == []
    assert index.blocks == 2


def test_what_expired_goes_even_when_nothing_was_asked_for() -> None:
    index, _ = make_index()
    put(index, [5], 1)
    index.insert(index.match(b"").segment, path_of([1, 2]), now=2, namespace_id=1, expires=10.0)
    assert index.evict(0, 9.9) == []
    assert depth(index, [1, 2]) == 2
    assert index.match(path_of([1, 2]), 10.0).depth == 0
    assert index.evict(0, 10.0) == list(reversed(cut(path_of([1, 2]))))
    assert index.expiring == 0


def test_what_expired_stays_while_it_is_pinned() -> None:
    index, _ = make_index()
    root = index.match(b"").segment
    head = index.insert(root, path_of([1]), now=1, namespace_id=1, expires=10.0)
    tail = index.insert(head, path_of([1, 2])[KEY_BYTES:], now=1, namespace_id=1, expires=10.0)
    index.pin(tail)
    assert index.evict(5, 99.0) == []
    index.unpin(tail)
    assert len(index.evict(0, 99.0)) == 2


def test_a_renewed_path_outlives_its_first_expiry() -> None:
    index, _ = make_index()
    root = index.match(b"").segment
    segment = index.insert(root, path_of([1, 2, 3]), now=1, namespace_id=1, expires=10.0)
    upper = index.split_at(index.match(path_of([1, 2])))
    assert index.renew(upper, 20.0) == [upper]
    assert index.renew(upper, 5.0) == []
    assert index.evict(0, 10.0) == [cut(path_of([1, 2, 3]))[2]]
    assert not segment.is_live
    assert index.renew(upper, NEVER) == [upper]
    assert index.expiring == 0
    assert index.evict(0, 1e9) == []


def test_a_forced_removal_takes_pinned_blocks_and_a_late_unpin_is_harmless() -> None:
    index, _ = make_index()
    segment = put(index, [1, 2, 3], 1)
    index.pin(segment)
    assert len(index.remove_namespace(1)) == 3
    assert not segment.is_live
    index.unpin(segment)
    assert index.evict(5) == []
    put(index, [1, 2, 3], 2)
    assert len(index.evict(5)) == 3


def test_a_removed_middle_takes_everything_below_it_on_every_branch() -> None:
    index, _ = make_index()
    put(index, [1, 2, 3, 4], 1)
    put(index, [1, 2, 3, 5, 6], 2)
    put(index, [1, 7], 3)
    segment = index.split_at(index.match(path_of([1, 2])))
    removed = index.remove_from(Position(segment, segment.blocks - 1, 1))
    assert len(removed) == 5
    assert removed[4] == cut(path_of([1, 2]))[1], "a parent left before its children"
    assert depth(index, [1, 7]) == 2
    assert depth(index, [1, 2]) == 1


def test_one_request_grows_one_segment_until_another_request_ends_there() -> None:
    index, _ = make_index()
    path = path_of([1, 2, 3, 4, 5])
    root = index.match(b"").segment
    first = index.extend(root, path[:KEY_BYTES], now=1, namespace_id=1)
    grown = index.extend(first, path[KEY_BYTES : 3 * KEY_BYTES], now=1, namespace_id=1)
    assert grown is first
    assert index.segments == 1
    use(index, [1, 2, 3], 2)
    other = index.extend(first, path[3 * KEY_BYTES :], now=1, namespace_id=1)
    assert other is not first
    assert (index.segments, index.blocks) == (2, 5)
    assert depth(index, [1, 2, 3, 4, 5]) == 5


def test_a_piece_with_another_expiry_is_a_segment_of_its_own() -> None:
    index, _ = make_index()
    path = path_of([1, 2])
    root = index.match(b"").segment
    first = index.extend(root, path[:KEY_BYTES], now=1, namespace_id=1)
    second = index.extend(first, path[KEY_BYTES:], now=1, namespace_id=1, expires=9.0)
    assert second is not first
    assert index.evict(0, 9.0) == [path[KEY_BYTES:]]


def test_inserting_a_present_block_again_is_a_bug_that_is_named() -> None:
    index, _ = make_index()
    put(index, [1, 2], 1)
    root = index.match(b"").segment
    with pytest.raises(AssertionError, match="present block was inserted again"):
        index.insert(root, path_of([1]), now=2, namespace_id=1)


def test_unpinning_more_often_than_pinning_is_a_bug_that_is_named() -> None:
    index, _ = make_index()
    segment = put(index, [1], 1)
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        index.unpin(segment)


def test_the_root_can_be_touched_and_pinned_without_harm() -> None:
    index, policy = make_index()
    root = index.match(b"").segment
    index.touch(root, 5)
    index.pin(root)
    index.unpin(root)
    assert policy.victim(1) is None
    assert index.evict(3) == []


@pytest.mark.parametrize("shared", range(1, 34))
def test_a_match_ends_at_the_first_difference_wherever_it_lies(shared: int) -> None:
    index, _ = make_index()
    put(index, list(range(33)), 1)
    position = index.match(path_of([*range(shared), 999, 998]))
    assert (position.depth, position.inside) == (shared, shared)


def test_a_namespace_that_joins_others_is_evicted_with_them_by_last_use() -> None:
    index, _ = make_index()
    for number, tick in ((1, 10), (2, 5), (1, 1), (3, 0)):
        keys = path_of([tick, tick])
        index.insert(index.root, keys, now=tick, namespace_id=number)
    first, second = path_of([1, 1]), path_of([5, 5])
    assert index.evict(1, among=[1]) == cut(first)[1:]
    assert index.evict(3, among=[1, 2]) == [*cut(first)[:1], *reversed(cut(second))]
    assert index.evict(9, among={2, 1}) == list(reversed(cut(path_of([10, 10]))))
    assert index.evict(9, among=[1, 2]) == []
    assert depth(index, [0, 0]) == 2


def test_a_policy_of_some_namespaces_stays_bounded_as_the_first_does() -> None:
    index, policy = make_index()
    kept = index.insert(index.root, path_of([1]), now=0, namespace_id=1)
    index.evict(0, among=[1])
    for tick in range(10_000):
        index.touch(kept, tick + 1)
    assert len(index._policy_of([1])._leaves) <= 70  # type: ignore[attr-defined]
    assert len(policy._leaves) <= 70


class Stubborn(Lru[Segment]):
    """A policy that chooses what it was told to, however wrong."""

    choice: Segment | None = None

    @override
    def victim(self, blocks: int) -> Segment | None:
        return self.choice


def test_a_policy_that_chooses_a_protected_segment_is_stopped() -> None:
    policy = Stubborn()
    index = PrefixIndex(policy)
    parent = put(index, [1, 2], 1)
    child = put(index, [1, 2, 3], 2)
    policy.choice = parent
    with pytest.raises(AssertionError, match="protected segment"):
        index.evict(1)
    index.pin(child)
    policy.choice = child
    with pytest.raises(AssertionError, match="protected segment"):
        index.evict(1)
    assert index.blocks == 3


class Flaky(Lru[Segment]):
    """A policy that fails once."""

    failures = 1

    @override
    def victim(self, blocks: int) -> Segment | None:
        if self.failures:
            self.failures -= 1
            message = "broken policy"
            raise RuntimeError(message)
        return super().victim(blocks)


def test_a_policy_that_raises_is_heard_and_eviction_goes_on() -> None:
    index = PrefixIndex(Flaky())
    put(index, [1, 2, 3], 1)
    with pytest.raises(RuntimeError, match="broken policy"):
        index.evict(1)
    assert index.evict(2) == list(reversed(cut(path_of([1, 2, 3]))[1:]))


def test_a_policy_heap_stays_bounded_over_a_hundred_thousand_touches() -> None:
    index, policy = make_index()
    segments = [put(index, [number], number) for number in range(10)]
    most = 0
    for tick in range(100_000):
        segment = segments[tick % len(segments)]
        index.touch(segment, 100 + tick)
        if tick % 3 == 0:
            index.pin(segment)
            index.unpin(segment)
        most = max(most, len(policy._leaves))
    assert most <= 64 + 4 * len(segments) + 1
    order = [index.evict(1)[0] for _ in segments]
    assert order == [path_of([number]) for number in range(10)]


def test_a_policy_heap_stays_bounded_when_the_index_turns_over() -> None:
    index, policy = make_index()
    for tick in range(5_000):
        put(index, [tick, tick], tick)
        if index.blocks > 20:
            index.evict(2)
    assert len(policy._leaves) <= 64 + 4 * 12


# ---- every policy, in a tier's index -----------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_policy_keeps_an_index_whole_through_everything_a_tier_does(
    name: str, seed: int
) -> None:
    """Stores, pins, forced removals and expiries: whatever is unpinned goes when all must go."""
    draw = random.Random(seed)
    index = PrefixIndex(make_policy(name))
    pinned: list[Segment] = []
    for now in range(1, 400):
        symbols = [draw.randrange(3) for _ in range(draw.randint(1, 9))]
        path = path_of(symbols)
        position = index.match(path)
        segment = index.split_at(position)
        if position.depth:
            index.touch(segment, 3 * now)
        expires = draw.choice([NEVER, NEVER, 3.0 * now + 60])
        for stop in (draw.randint(position.depth, len(symbols)), len(symbols)):
            here = index.match(path)
            fresh = path[here.depth * KEY_BYTES : stop * KEY_BYTES]
            if fresh:
                parent, made = index.split_at(here), 3 * now + 1
                index.extend(parent, fresh, now=made, namespace_id=now % 3, expires=expires)
        if draw.random() < 0.2:
            index.pin(segment := index.split_at(index.match(path)))
            pinned.append(segment)
        if pinned and draw.random() < 0.2:
            segment = pinned.pop(draw.randrange(len(pinned)))
            if segment.is_live:
                index.unpin(segment)
        if draw.random() < 0.05:
            whole = index.match(path)
            index.remove_from(Position(whole.segment, max(0, whole.inside - 1), 0))
        if draw.random() < 0.02:
            index.expire_namespace(now % 3)
        asked = draw.choice([0, 1, 3, 10])
        removed = index.evict(asked, 3.0 * now if draw.random() < 0.5 else -NEVER)
        assert len(removed) >= asked or all(index.is_pinned(each) for each in index)
    for segment in pinned:
        if segment.is_live:
            index.unpin(segment)
    index.evict(index.blocks)
    assert index.blocks == 0
    assert list(index) == []
