"""Tiers once more, block by block, in plain dicts: the specification of ``simulate.tiers``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulate.support import Prefix


@dataclass
class Held:
    """A block in one tier."""

    stored: int
    used: int
    uses: int = 0


RANKS: dict[str, Callable[[Held], Any]] = {
    "lru": lambda block: block.used,
    "fifo": lambda block: block.stored,
    "lfu": lambda block: (block.uses, block.used),
}


class Level:
    """One tier: blocks, of which the lowest rank without a child goes, deepest first."""

    def __init__(self, capacity: int, rank: Callable[[Held], Any]) -> None:
        self.capacity = capacity
        self.rank = rank
        self.blocks: dict[Prefix, Held] = {}
        self.written = 0

    def run_of(self, path: Sequence[Prefix], at: int = 0) -> int:
        """How many blocks of a path are here in a row from ``at`` on."""
        end = at
        while end < len(path) and path[end] in self.blocks:
            end += 1
        return end - at

    def use(self, block: Prefix, now: int) -> None:
        """A use counts for the deepest block; its parent inherits it on eviction."""
        self.blocks[block].used = now
        self.blocks[block].uses += 1

    def add(self, blocks: Collection[Prefix], now: int) -> None:
        for block in blocks:
            assert block not in self.blocks
            self.blocks[block] = Held(now, now)
        self.written += len(blocks)
        assert len(self.blocks) <= self.capacity

    def evict(self, count: int, pinned: Collection[Prefix]) -> list[Prefix]:
        gone: list[Prefix] = []
        while len(gone) < count:
            inner = {block[:-1] for block in self.blocks}
            free = [b for b in self.blocks if b not in inner and b not in pinned]
            if not free:
                break
            victim = min(free, key=lambda each: (self.rank(self.blocks[each]), -len(each)))
            held = self.blocks.pop(victim)
            if (parent := self.blocks.get(victim[:-1])) is not None:
                parent.used = max(parent.used, held.used)
                parent.uses += held.uses
            gone.append(victim)
        return gone


class Model:
    """A hierarchy of levels; subclasses say what they exchange."""

    def __init__(
        self,
        capacities: Sequence[int],
        writes: Sequence[str],
        policies: Sequence[str],
        rooms: Sequence[int] | None = None,
    ) -> None:
        """``rooms``: blocks of one path that each level takes at most; by default its capacity."""
        self.rooms = list(capacities if rooms is None else rooms)
        self.levels = [
            Level(capacity, RANKS[policy])
            for capacity, policy in zip(capacities, policies, strict=True)
        ]
        self.writes = writes
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def run(self, paths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
        served, written = [], []
        for symbols in paths:
            path = [tuple(symbols[: i + 1]) for i in range(len(symbols))]
            served.append(self.serve(path))
            written.append([level.written for level in self.levels])
            for level in self.levels:
                level.written = 0
        return served, written

    def serve(self, path: list[Prefix]) -> list[int]:
        raise NotImplementedError


class Inclusive(Model):
    """Each level holds whole prefixes."""

    def serve(self, path: list[Prefix]) -> list[int]:
        reach, served = 0, []
        self.pins: list[set[Prefix]] = []
        for level in self.levels:
            depth = level.run_of(path)
            if depth:
                level.use(path[depth - 1], self.tick())
            self.pins.append(set(path[:depth]))
            served.append(max(0, depth - reach))
            reach = max(reach, depth)
        for k in range(len(self.levels)):
            if k == 0 or self.writes[k] == "through":
                self.store(k, path)
        for level in self.levels:
            assert all(len(b) == 1 or b[:-1] in level.blocks for b in level.blocks)
        return served

    def store(self, k: int, path: list[Prefix]) -> None:
        level = self.levels[k]
        depth = level.run_of(path)
        missing = min(len(path), self.rooms[k]) - depth
        gone: list[Prefix] = []
        fresh = 0
        if missing > 0:
            room = level.capacity - len(level.blocks)
            gone = level.evict(missing - room, self.pins[k] | set(path[:depth]))
            fresh = min(missing, level.capacity - len(level.blocks))
            if fresh:
                level.add(path[depth : depth + fresh], self.tick())
        if k + 1 == len(self.levels) or self.writes[k + 1] == "through":
            return
        for block, before in zip(gone, [None, *gone], strict=False):
            if before is None or before[:-1] != block:
                self.store(k + 1, [block[: i + 1] for i in range(len(block))])
        if depth + fresh < len(path):
            self.store(k + 1, path)


class Exclusive(Model):
    """Each block is in one level at most; the levels down to any one hold whole prefixes."""

    def serve(self, path: list[Prefix]) -> list[int]:
        reach, served, above = 0, [], 0
        shares = []
        self.pins: list[set[Prefix]] = []
        for level, room in zip(self.levels, self.rooms, strict=True):
            depth = level.run_of(path, reach)
            served.append(depth)
            mine = path[above : above + room]
            for block in path[reach : reach + depth]:
                if block not in mine:
                    del level.blocks[block]  # it rises
            kept = [block for block in path[reach : reach + depth] if block in mine]
            if kept:
                level.use(kept[-1], self.tick())
            self.pins.append(set(kept))
            shares.append(mine)
            reach += depth
            above += room
        for k, level in enumerate(self.levels):
            missing = [block for block in shares[k] if block not in level.blocks]
            if missing:
                room = level.capacity - len(level.blocks)
                gone = level.evict(len(missing) - room, self.pins[k])
                level.add(missing, self.tick())
                self.sink(k + 1, gone)
        seen: set[Prefix] = set()
        for level in self.levels:
            assert not seen & set(level.blocks)
            seen |= set(level.blocks)
            assert all(len(block) == 1 or block[:-1] in seen for block in seen)
        return served

    def sink(self, k: int, gone: list[Prefix]) -> None:
        if k == len(self.levels) or not gone:
            return
        level = self.levels[k]
        cut = max(0, len(gone) - (level.capacity - len(self.pins[k])))
        passed, taken = gone[:cut], gone[cut:]
        out = level.evict(len(taken) - (level.capacity - len(level.blocks)), self.pins[k])
        now = 0
        for block, before in zip(taken, [None, *taken], strict=False):
            if before is None or before[:-1] != block:
                now = self.tick()
            level.add([block], now)
        self.sink(k + 1, [*out, *passed])
