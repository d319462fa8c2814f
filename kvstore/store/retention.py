"""Recency, expiry and persistent pins of stored blocks, in the index and in their records."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.identity.chain import Chain
from kvstore.index.prefix_tree import NEVER, PrefixIndex, Segment
from kvstore.store.context import Context
from kvstore.store.failures import WriteFailures
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier

Amendment = tuple[list[BlockKey], dict[str, Any]]  # keys of records, and their new field values


@dataclass(slots=True)
class Renewal:
    """A repeated ``store`` of blocks that are stored or queued."""

    prefix: Chain
    blocks: int  # number of leading blocks of ``prefix`` to renew
    expires: float
    is_pinned: bool


@dataclass(eq=False)
class Retention:
    """Records last uses, expiries and persistent pins of stored blocks.

    Threads: any. The caller holds the context's lock, except for ``amend``, ``renew_deferred`` and ``unpin``, which
    write to the medium.
    """

    context: Context
    ssd: SsdTier
    index: PrefixIndex
    failures: WriteFailures
    uses: dict[BlockKey, int] = field(default_factory=dict)
    """Newest tick of each used block, to be written by the next commit."""
    pinned: set[Segment] = field(default_factory=set)  # segments with a persistent pin
    _deferred: dict[BlockKey, Renewal] = field(default_factory=dict)
    """Renewals whose last block is still queued, by the key of that block."""

    def note_use(self, key: BlockKey, tick: int) -> None:
        """Record that a request used every block up to ``key``. Written by the next commit."""
        self.uses[key] = tick

    def take_uses(self) -> dict[BlockKey, int]:
        """Return the recorded uses and clear them."""
        uses, self.uses = self.uses, {}
        return uses

    def pin(self, segment: Segment) -> bool:
        """Add a persistent pin to a segment; return False if it has one."""
        if segment in self.pinned:
            return False
        self.index.pin(segment)
        self.pinned.add(segment)
        return True

    def drop_removed(self) -> None:
        """Remove the pins of segments that were removed from the index."""
        self.pinned = {segment for segment in self.pinned if segment.is_live}

    def extend_life(self, segment: Segment, expires: float) -> list[Amendment]:
        """Extend the expiry of a segment and its ancestors to ``expires``: parents outlive children."""
        changed = self.index.renew(segment, expires) if self.index.expiring else []
        keys = [key for each in changed for key in each.block_keys()]
        return [(keys, {"expires": stored_expiry(expires)})] if keys else []

    def renew(self, renewal: Renewal) -> list[Amendment]:
        """Make stored blocks the most recent, extend their expiry, pin on request; return what ``amend`` must write."""
        prefix = renewal.prefix
        position = self.index.match(prefix.chain[: renewal.blocks * KEY_BYTES])
        if not position.depth:
            return []
        segment = self.index.split_at(position)
        tick = self.context.next_tick()
        self.index.touch(segment, tick)
        key = prefix.key(position.depth - 1)
        self.note_use(key, tick)
        amendments = self.extend_life(segment, renewal.expires)
        if renewal.is_pinned and self.pin(segment):
            amendments.append(([key], {"is_pinned": True}))
        return amendments

    def defer(self, renewal: Renewal, pending: Container[BlockKey]) -> None:
        """Keep a renewal whose last block is queued until that block is committed."""
        if not renewal.blocks or (key := renewal.prefix.key(renewal.blocks - 1)) not in pending:
            return
        earlier = self._deferred.setdefault(key, renewal)
        earlier.expires = max(earlier.expires, renewal.expires)
        earlier.is_pinned |= renewal.is_pinned

    def renew_deferred(self, pending: Container[BlockKey]) -> None:
        """Apply the deferred renewals whose blocks are no longer queued."""
        with self.context.lock:
            due = [key for key in self._deferred if key not in pending]
            amendments = [change for key in due for change in self.renew(self._deferred.pop(key))]
        self.amend(amendments)

    def unpin(self, prefix: Chain) -> None:
        """Remove every persistent pin on the path of ``prefix``."""
        keys: list[BlockKey] = []
        with self.context.lock:
            position = self.index.match(prefix.chain)
            is_whole = position.inside == position.segment.blocks
            node = position.segment if is_whole else position.segment.parent
            while node is not None:
                if node in self.pinned:
                    self.pinned.discard(node)
                    self.index.unpin(node)
                keys += (
                    node.block_keys()
                )  # a split leaves marks of the pin in the upper segment too
                node = node.parent
        self.amend([(keys, {"is_pinned": False})])

    def amend(self, amendments: Iterable[Amendment]) -> None:
        """Change fields of stored records, one transaction per amendment."""
        for keys, fields in amendments:
            try:
                self.ssd.amend(keys, **fields)
            except MEDIUM_ERRORS as error:
                self.failures.note(error)


def stored_expiry(expires: float) -> float:
    """Return an expiry as stored in a record: 0 for never."""
    return 0.0 if expires == NEVER else expires
