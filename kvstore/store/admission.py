"""Admission: the selection of blocks of a ``store`` call, and their submission to the write queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.frame.format import Frames, Header
from kvstore.identity.block import KEY_BYTES, BlockKey
from kvstore.identity.chain import Chain
from kvstore.index import plan
from kvstore.index.prefix_tree import NEVER
from kvstore.store.context import Context
from kvstore.store.failures import WriteFailures
from kvstore.store.namespaces import Namespaces
from kvstore.store.pending import PendingBlocks, StoreRequest
from kvstore.store.retention import Renewal, Retention
from kvstore.transfer.commit_queue import CommitQueue, QueuedBlock

Encode = Callable[[Header], bytearray]  # returns the frame of the block described by a header


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The outcome of a ``store`` call, in blocks."""

    end: int  # leading blocks that are now stored or queued
    present: int  # offered blocks that were stored or queued already
    dropped: int  # not accepted: full queue, missing parent, or too long a request


@dataclass(eq=False)
class Admission:
    """Queues the new blocks of ``store`` calls, each after its parent, and renews the others. Threads: any."""

    context: Context
    frames: Frames
    namespaces: Namespaces
    pending: PendingBlocks
    queue: CommitQueue[StoreRequest]
    retention: Retention
    failures: WriteFailures
    request_blocks: int  # most stored blocks of one request

    def store(
        self,
        prefix: Chain,
        namespace: Mapping[str, Any],
        encode: Encode,
        first: int,
        *,
        wait: float,
        ttl: float | None,
        is_pinned: bool,
    ) -> StoreResult:
        """Queue the blocks of ``prefix`` from block ``first`` on that are neither stored nor queued."""
        stop = len(prefix.chain) // KEY_BYTES
        expires = NEVER if ttl is None else self.context.wall_clock() + ttl
        with self.context.lock:
            known = self.pending.known_blocks(prefix)
            decided = plan.stores(first, stop, known, self.request_blocks)
            self.context.metrics.present_blocks += decided.present
            renewal = Renewal(prefix, min(known, stop), expires, is_pinned)
            amendments = self.retention.renew(renewal)
            self.retention.defer(renewal, self.pending)
        self.retention.amend(amendments)
        self.context.count_drop("no_parent", decided.orphans)
        self.context.count_drop("request_share", decided.excess)
        if decided.store is None:
            return StoreResult(min(known, stop), decided.present, decided.orphans + decided.excess)
        with self.context.lock:
            number = self.namespaces.acquire(prefix.root, namespace)
            tick = self.context.next_tick()
        request = StoreRequest(prefix, number, tick, expires, is_pinned)
        try:
            end, reason = self._enqueue(request, decided.store, encode, time.monotonic() + wait)
        finally:
            with self.context.lock:
                self.namespaces.release(number)
        self.context.count_drop(reason, decided.store.stop - end)
        return StoreResult(end, decided.present, stop - end)

    def _enqueue(
        self, request: StoreRequest, wanted: plan.Store, encode: Encode, deadline: float
    ) -> tuple[int, str]:
        """Queue blocks in order; return the end, and the reason if not all were queued."""
        for number in range(wanted.start, wanted.stop):
            if self.failures.is_stopped:
                return number, "write_error"
            if not self.queue.wait_for_room(deadline - time.monotonic()):
                return number, "closed" if self.queue.is_closing else "queue_full"
            if not self._submit(request, number, encode):
                return number, "closed"
        return wanted.stop, ""

    def _submit(self, request: StoreRequest, number: int, encode: Encode) -> bool:
        """Frame one block without the lock, then queue it unless another thread did; False if the store is closing."""
        prefix = request.prefix
        header = Header(
            block_tokens=self.frames.block_tokens,
            number=number,
            namespace_id=request.namespace_id,
            payload_bytes=self.frames.payload_bytes,
            block_hash=prefix.hash_of(number),
            parent_hash=prefix.parent_hash(number),
            sequence=request.tick,
            has_images=prefix.has_images(number),
        )
        frame = encode(header)
        parent = BlockKey(header.parent_hash[:KEY_BYTES])
        block = QueuedBlock(prefix.key(number), parent, number, frame, request)
        with self.context.lock:
            if block.key in self.pending:
                self.context.metrics.present_blocks += 1
                return True
            # Before the block is queued: an interrupt between the two leaves an unused name until the store is closed.
            # In the other order it would leave a block without a namespace.
            self.namespaces.acquire_again(request.namespace_id)
            if not self.queue.submit(block):
                self.namespaces.release(request.namespace_id)
                return False
            self.pending[block.key] = parent
            return True
