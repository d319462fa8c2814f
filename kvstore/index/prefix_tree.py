"""The index of a tier: a radix tree of the cached prefixes, closed under prefixes.

A *segment* is a run of blocks without a fork or a request's end inside. Index and policies operate on segments: public
traces have 8 to 78 blocks per segment. The index uses no medium, clock or lock: callers pass ticks and serialise
calls, so the simulator runs the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from typing_extensions import override

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.identity.chain import split_keys
from kvstore.policy.protocol import Policy

NEVER = math.inf  # expiry of a segment without one
GONE = 0.0  # expiry of a segment that no lookup may find, although a pin may still use it


class Segment:
    """A run of blocks, evicted from its tail. Compared by identity: a split keeps the lower half's object."""

    __slots__ = (
        "children",
        "expires",
        "keys",
        "last_use",
        "namespace_id",
        "parent",
        "pins",
        "start",
    )

    def __init__(self, parent: Segment | None, keys: bytes, start: int, namespace_id: int) -> None:
        self.parent = parent
        self.keys = keys  # concatenated keys of its blocks
        self.start = start  # number of its first block in the chain
        self.namespace_id = namespace_id
        self.children: dict[bytes, Segment] = {}  # by the key of their first block
        self.pins = 0
        self.last_use = 0  # tick of the last request that used its last block
        self.expires = NEVER

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.keys) // KEY_BYTES

    @property
    def stop(self) -> int:
        """Number of the block after its last one."""
        return self.start + self.blocks

    def key(self, number: int) -> BlockKey:
        """Return the key of the block with this number."""
        at = (number - self.start) * KEY_BYTES
        return BlockKey(self.keys[at : at + KEY_BYTES])

    def block_keys(self) -> list[BlockKey]:
        """Return the key of each block, in order."""
        return split_keys(self.keys)

    @property
    def is_evictable(self) -> bool:
        """Whether it is an unpinned leaf of the tree."""
        return bool(self.keys) and not self.children and not self.pins

    @property
    def is_live(self) -> bool:
        """Whether it is in the tree."""
        return bool(self.keys) or self.parent is None


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a match: ``inside`` blocks into ``segment``, ``depth`` blocks from the root."""

    segment: Segment
    inside: int
    depth: int


class PrefixIndex:
    """The prefixes in one tier, with the policy that orders their eviction.

    Invariants:
        A block is present only if its parent is. ``blocks`` equals the blocks of all segments.
        Only tails of evictable segments are evicted.

    Threads: the caller serialises every call.
    """

    def __init__(self, policy: Policy[Segment]) -> None:
        self.root = Segment(None, b"", 0, 0)
        self._policy = policy
        self._apart: dict[int, Policy[Segment]] = {}  # by namespace, for evictions within a set
        self.blocks = 0
        self.segments = 0
        self.expiring = 0  # segments with an expiry; with zero a match skips the check

    def match(self, chain: bytes, now: float = -NEVER) -> Position:
        """Return the end of the longest present prefix of ``chain`` (concatenated keys). Changes nothing.

        A segment that has expired at ``now`` ends the match. Cost: one comparison of bytes per segment of the chain.
        """
        segment, at, size = self.root, 0, len(chain)
        while at < size:
            child = segment.children.get(chain[at : at + KEY_BYTES])
            if child is None or child.expires <= now:
                break
            shared = _shared_bytes(child.keys, chain, at)
            segment, at = child, at + shared
            if shared < len(child.keys):
                return Position(child, shared // KEY_BYTES, at // KEY_BYTES)
        return Position(segment, segment.blocks, at // KEY_BYTES)

    def split_at(self, position: Position) -> Segment:
        """Return the segment that ends at ``position``; split a segment that continues after it."""
        if position.inside == position.segment.blocks:
            return position.segment
        return self._split(position.segment, position.inside)

    def _split(self, lower: Segment, at: int) -> Segment:
        """Create an *upper* segment of the first ``at`` blocks; pins of the lower half stay valid."""
        assert lower.parent is not None
        cut = at * KEY_BYTES
        upper = Segment(lower.parent, lower.keys[:cut], lower.start, lower.namespace_id)
        upper.last_use, upper.expires = lower.last_use, lower.expires
        upper.parent.children[upper.keys[:KEY_BYTES]] = upper  # type: ignore[union-attr]
        lower.parent, lower.keys, lower.start = upper, lower.keys[cut:], lower.start + at
        upper.children[lower.keys[:KEY_BYTES]] = lower
        self.segments += 1
        self.expiring += upper.expires != NEVER
        for policy in self._policies(upper):
            policy.split(upper, lower)
        return upper

    def extend(
        self, parent: Segment, keys: bytes, *, now: int, namespace_id: int, expires: float = NEVER
    ) -> Segment:
        """Add later blocks of a request below ``parent``, to its segment if no other request used it.

        ``now`` is the request's tick: it equals the parent's last use unless another request used it.
        """
        grows = parent.parent is not None and not parent.children
        if not (grows and parent.last_use == now and parent.expires == expires):
            return self.insert(parent, keys, now=now, namespace_id=namespace_id, expires=expires)
        self._count(parent, keys)
        parent.keys += keys
        for policy in self._policies(parent):
            policy.resize(parent)
        return parent

    def insert(
        self, parent: Segment, keys: bytes, *, now: int, namespace_id: int, expires: float = NEVER
    ) -> Segment:
        """Add blocks below the end of ``parent`` as a new segment, and return it."""
        assert keys
        assert not len(keys) % KEY_BYTES
        self._count(parent, keys)
        child = Segment(parent, keys, parent.stop, namespace_id)
        child.last_use, child.expires = now, expires
        assert keys[:KEY_BYTES] not in parent.children, "a present block was inserted again"
        parent.children[keys[:KEY_BYTES]] = child
        self.segments += 1
        self.expiring += expires != NEVER
        for policy in self._policies(child):
            policy.insert(child)
        return child

    def _count(self, parent: Segment, keys: bytes) -> None:  # noqa: ARG002 - for subclasses
        """Count new blocks below ``parent``."""
        self.blocks += len(keys) // KEY_BYTES

    def touch(self, segment: Segment, now: int) -> None:
        """Record a use of ``segment``, a chain's deepest; parents inherit the recency of removed children."""
        if segment.parent is not None:
            segment.last_use = now
            for policy in self._policies(segment):
                policy.touch(segment)

    def renew(self, segment: Segment, expires: float) -> list[Segment]:
        """Extend the expiry of ``segment`` and its ancestors to ``expires``; return the changed segments."""
        changed = []
        node: Segment | None = segment
        while node is not None and node.parent is not None:
            if node.expires < expires:
                self.expiring += (expires != NEVER) - 1
                node.expires = expires
                changed.append(node)
            node = node.parent
        return changed

    def expire_namespace(self, namespace_id: int) -> None:
        """Expire all segments of a namespace. Pinned ones remain, but no timed ``match`` finds them."""
        for segment in self:
            if segment.namespace_id == namespace_id:
                self.expiring += segment.expires == NEVER
                segment.expires = GONE

    def pin(self, segment: Segment) -> None:
        """Protect all blocks from the root to the end of ``segment`` from eviction; counted."""
        segment.pins += 1

    def unpin(self, segment: Segment) -> None:
        """Drop one pin."""
        assert segment.pins > 0, "unpinned more often than pinned"
        segment.pins -= 1
        if segment.is_evictable:
            self._release(segment)

    def is_pinned(self, segment: Segment) -> bool:
        """Return whether ``segment`` or a descendant has a pin."""
        pending = [segment]
        while pending:
            node = pending.pop()
            if node.pins:
                return True
            pending.extend(node.children.values())
        return False

    def _policies(self, segment: Segment) -> tuple[Policy[Segment], ...]:
        """Return the policies to notify of changes to a segment."""
        apart = self._apart.get(segment.namespace_id)
        return (self._policy,) if apart is None else (self._policy, apart)

    def _release(self, segment: Segment) -> None:
        for policy in self._policies(segment):
            policy.release(segment)

    def _policy_of(self, namespace_ids: Collection[int]) -> Policy[Segment]:
        """Return the policy of the segments of these namespaces only."""
        known = [self._apart.get(number) for number in namespace_ids]
        if known[0] is not None and all(policy is known[0] for policy in known):
            return known[0]
        apart = self._policy.fresh()
        segments = (segment for segment in self if segment.namespace_id in namespace_ids)
        for segment in sorted(segments, key=lambda each: (each.last_use, each.start)):
            apart.insert(segment)
        self._apart.update(dict.fromkeys(namespace_ids, apart))
        return apart

    def forget_namespace(self, namespace_id: int) -> None:
        """Remove the second policy of a namespace without blocks: its number may be reused."""
        self._apart.pop(namespace_id, None)

    def evict(
        self, blocks: int, now: float = -NEVER, among: Collection[int] | None = None
    ) -> list[BlockKey]:
        """Remove at least ``blocks`` blocks if pins allow, expired ones first; return their keys, deepest first.

        Evicts leaves, from their tails, so the rest is closed under prefixes. ``among`` limits the eviction to one or
        more namespaces. Namespaces of one call must stay together in later calls, which may name more.

        Cost: O(log n) a segment; an iteration over all segments for a new set of namespaces.
        """
        policy = self._policy if among is None else self._policy_of(among)
        removed: list[BlockKey] = []
        if self.expiring:
            for segment in [s for s in self if s.expires <= now and policy in self._policies(s)]:
                self._remove_subtree(segment, removed)
        while len(removed) < blocks:
            short = blocks - len(removed)
            victim = policy.victim(short)
            if victim is None:
                break
            assert victim.is_evictable, "the policy chose a protected segment"
            self._trim(victim, min(short, victim.blocks), removed)
        return removed

    def remove_from(self, position: Position) -> list[BlockKey]:
        """Remove all blocks after ``position`` in its segment and below, pinned or not; return keys, deepest first."""
        removed: list[BlockKey] = []
        segment = position.segment
        for child in list(segment.children.values()):
            self._remove_subtree(child, removed, force=True)
        if position.inside < segment.blocks:
            self._trim(segment, segment.blocks - position.inside, removed)
        return removed

    def remove_namespace(self, namespace_id: int) -> list[BlockKey]:
        """Remove every block of one namespace, pinned or not."""
        removed: list[BlockKey] = []
        for child in list(self.root.children.values()):
            if child.namespace_id == namespace_id:
                self._remove_subtree(child, removed, force=True)
        return removed

    def _remove_subtree(
        self, segment: Segment, removed: list[BlockKey], *, force: bool = False
    ) -> None:
        """Remove a segment and its descendants, children first; pinned ones only with ``force``."""
        pending, order = [segment], []
        while pending:
            node = pending.pop()
            order.append(node)
            pending.extend(node.children.values())
        for node in reversed(order):
            if node.is_live and not node.children and (force or not node.pins):
                self._trim(node, node.blocks, removed)

    def _trim(self, segment: Segment, count: int, removed: list[BlockKey]) -> None:
        """Remove the last ``count`` blocks of a leaf."""
        assert not segment.children
        parent = segment.parent
        assert parent is not None
        keys = segment.keys
        first = len(keys) - count * KEY_BYTES
        removed.extend(reversed(segment.block_keys()[-count:]))
        self.blocks -= count
        if first:
            segment.keys = keys[:first]
            for policy in self._policies(segment):
                policy.resize(segment)
            return
        for policy in self._policies(segment):
            policy.remove(segment)
        del parent.children[keys[:KEY_BYTES]]
        segment.keys = b""
        self.segments -= 1
        self.expiring -= segment.expires != NEVER
        parent.last_use = max(parent.last_use, segment.last_use)
        if parent.is_evictable:
            self._release(parent)

    def namespace_blocks(self) -> dict[int, int]:
        """Return the number of blocks of each namespace."""
        counts: dict[int, int] = {}
        for segment in self:
            counts[segment.namespace_id] = counts.get(segment.namespace_id, 0) + segment.blocks
        return counts

    def __iter__(self) -> Iterator[Segment]:
        pending = list(self.root.children.values())
        while pending:
            segment = pending.pop()
            pending.extend(segment.children.values())
            yield segment


class KeyedIndex(PrefixIndex):
    """An index that also maps the key of each block to its parent's. Cost: two references a block."""

    def __init__(
        self, policy: Policy[Segment], on_removed: Callable[[BlockKey], object] | None = None
    ) -> None:
        """``on_removed`` is called with each removed key, during the removal."""
        super().__init__(policy)
        self._on_removed = on_removed
        self.parents: dict[BlockKey, BlockKey] = {}  # by key; empty for a chain's first block

    @override
    def _count(self, parent: Segment, keys: bytes) -> None:
        super()._count(parent, keys)
        found = split_keys(keys)
        above = [BlockKey(parent.keys[-KEY_BYTES:]), *found]
        self.parents.update(zip(found, above, strict=False))  # the last key has no child yet

    @override
    def _trim(self, segment: Segment, count: int, removed: list[BlockKey]) -> None:
        before = len(removed)
        super()._trim(segment, count, removed)
        for key in removed[before:]:
            del self.parents[key]
            if self._on_removed is not None:
                self._on_removed(key)


def _shared_bytes(keys: bytes, chain: bytes, at: int) -> int:
    """Return the length of the common prefix of ``keys`` and ``chain[at:]``, in whole keys."""
    size = min(len(keys), len(chain) - at)
    if keys[:size] == chain[at : at + size]:
        return size
    low, high = 0, size // KEY_BYTES  # equal keys have equal ancestors: binary search
    while high - low > 1:
        middle = (low + high) // 2
        stop = middle * KEY_BYTES
        if keys[stop - KEY_BYTES : stop] == chain[at + stop - KEY_BYTES : at + stop]:
            low = middle
        else:
            high = middle
    return low * KEY_BYTES
