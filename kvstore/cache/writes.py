"""Stores of blocks: from host entries to the owner's write queue."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.entries import Stored, StoreOptions
from kvstore.frame.format import Header
from kvstore.identity.chain import Prefix
from kvstore.store.open_store import OpenStore


class Writes:
    """Queues blocks in the owner; a reader drops and counts them. Threads: any."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._format = store.format

    @property
    def is_owner(self) -> bool:
        """Whether this process writes the store."""
        return self._store.is_owner

    def known_blocks(self, prefix: Prefix) -> int:
        """Return the number of leading blocks that are stored or queued; 0 in a reader."""
        if self._store.writer is None:
            return 0
        with self._store.context.lock:
            return self._store.writer.known_blocks(prefix)

    def store(
        self,
        prefix: Prefix,
        entries: Mapping[str, NDArray[np.uint8]],
        start: int,
        options: StoreOptions,
    ) -> Stored:
        """Queue the blocks of tokens ``[start, ...)`` that are neither stored nor queued."""
        size = self._format.block_tokens
        first = start // size
        if self._store.writer is None:
            count = len(prefix.hashes) - first
            self._store.context.count_drop("reader", count)
            return Stored(start, 0, count)
        source = cache(lambda: self._format.entries_source(entries))  # only for new blocks

        def encode(header: Header) -> bytearray:
            ids = prefix.block_ids(header.number)
            return self._format.encode(header, ids, source(), header.number - first)

        taken = self._store.writer.store(
            *(prefix, options.namespace, encode, first),
            wait=options.wait,
            ttl=options.ttl,
            is_pinned=options.is_pinned,
        )
        return Stored(taken.end * size, taken.present, taken.dropped)
