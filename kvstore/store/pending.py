"""The blocks in the write queue: accepted by a ``store`` call but not committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.identity.chain import Chain
from kvstore.index.prefix_tree import PrefixIndex
from kvstore.store.namespaces import Namespaces
from kvstore.transfer.commit_queue import QueuedBlock


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequest:
    """The properties shared by all blocks of one ``store`` call."""

    prefix: Chain
    namespace_id: int
    tick: int  # tick of the request
    expires: float
    is_pinned: bool


Queued = QueuedBlock[StoreRequest]


class PendingBlocks(dict[BlockKey, BlockKey]):
    """The parents of queued blocks, by key. Queued blocks count as stored for parents and duplicates.

    Each block has a reference to its namespace. Threads: any; the caller holds the context's lock.
    """

    def __init__(self, index: PrefixIndex, namespaces: Namespaces) -> None:
        super().__init__()
        self._index = index
        self._namespaces = namespaces

    def known_blocks(self, prefix: Chain) -> int:
        """Return the number of leading blocks of ``prefix`` that are stored or queued."""
        known = self._index.match(prefix.chain).depth
        while known < len(prefix.chain) // KEY_BYTES and prefix.key(known) in self:
            known += 1
        return known

    def remove(self, blocks: Iterable[Queued]) -> None:
        """Remove blocks whose commit ended, and release their namespaces."""
        for block in blocks:
            self.pop(block.key, None)
            self._namespaces.release(block.request.namespace_id)
