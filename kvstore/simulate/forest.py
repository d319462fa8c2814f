"""Index of one exclusive tier: ranges of chains whose first blocks may be in a tier above."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.policy.protocol import Policy


class Forest(PrefixIndex):
    """An index of chain ranges, whose first blocks may be in a tier above.

    A segment whose parent is in another tier is a child of the root until its parent is added again.
    Invariants: ``_headless`` has exactly the children of the root that do not begin a chain.
    """

    def __init__(
        self, policy: Policy[Segment], parent: Callable[[BlockKey], BlockKey | None]
    ) -> None:
        """``parent`` returns the block before a block, None for a first one."""
        super().__init__(policy)
        self._parent = parent
        self._headless: dict[BlockKey, list[Segment]] = {}
        """By parent block."""

    def add(self, end: Segment, keys: bytes, start: int, now: int) -> None:
        """Add blocks below ``end`` as a segment with first depth ``start``, and re-attach its children."""
        fresh = Segment(end, keys, start, 0)
        fresh.last_use = now
        end.children[keys[:KEY_BYTES]] = fresh
        self.blocks += fresh.blocks
        self.segments += 1
        self._policy.insert(fresh)
        if end is self.root:
            self._add_headless(fresh)
        for number, key in enumerate(fresh.block_keys(), start + 1):
            lower = self._headless.pop(key, None)
            if lower is None:
                continue
            upper = self._split(fresh, number - fresh.start) if number < fresh.stop else fresh
            for child in lower:
                first = child.keys[:KEY_BYTES]
                del self.root.children[first]
                child.parent, upper.children[first] = upper, child

    def remove(self, keys: bytes) -> None:
        """Remove blocks that begin with a child of the root; their children stay."""
        segment: Segment | None = self.split_at(self.match(keys))
        removed = []
        while segment is not None and segment is not self.root:
            removed.append(segment)
            segment = segment.parent
        for each in reversed(removed):
            self._policy.remove(each)
            self._drop_headless(each)
            del self.root.children[each.keys[:KEY_BYTES]]
            for first, child in each.children.items():
                child.parent, self.root.children[first] = self.root, child
                self._add_headless(child)
            self.blocks -= each.blocks
            self.segments -= 1
            each.keys, each.children = b"", {}

    @override
    def _split(self, lower: Segment, at: int) -> Segment:
        is_top = lower.parent is self.root
        if is_top:
            self._drop_headless(lower)
        upper = super()._split(lower, at)
        if is_top:
            self._add_headless(upper)
        return upper

    @override
    def _trim(self, segment: Segment, count: int, removed: list[BlockKey]) -> None:
        if count == segment.blocks and segment.parent is self.root:
            self._drop_headless(segment)
        super()._trim(segment, count, removed)

    def _add_headless(self, segment: Segment) -> None:
        """Record a child of the root whose parent is in another tier."""
        above = self._parent(BlockKey(segment.keys[:KEY_BYTES]))
        if above is not None:
            self._headless.setdefault(above, []).append(segment)

    def _drop_headless(self, segment: Segment) -> None:
        above = self._parent(BlockKey(segment.keys[:KEY_BYTES]))
        if above is None:
            return
        left = self._headless[above]
        left.remove(segment)
        if not left:
            del self._headless[above]
