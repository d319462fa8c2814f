"""``KVStoreL2Adapter``: LMCache's L2 interface over ``Objects``.

LMCache's controllers submit tasks and wait for three event fds. One thread stores; another looks up
and loads. Each has a bounded queue; a task for a full queue fails at once. Unlocking neither waits nor
fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from typing_extensions import override

import kvstore
from kvstore.checks import integer
from kvstore.engine.faults import Faults
from kvstore.engine.lmcache.keys import Entry, check_keys, decode_key
from kvstore.engine.lmcache.objects import Objects
from kvstore.engine.lmcache.options import KVStoreL2AdapterConfig
from kvstore.engine.lmcache.tasks import TaskQueue, Tasks
from kvstore.errors import KVStoreError

logger = logging.getLogger("kvstore.engine.lmcache")


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc] # the engine is not typed
    """L2 adapter for LMCache's MP server. Threads: any.

    A store task succeeds when all its objects survive power loss. A lookup pins the objects that it
    finds; each needs as many unlocks as lookups. A load verifies each object in the caller's buffer.
    Each result is returned once.
    """

    def __init__(
        self,
        config: KVStoreL2AdapterConfig,
        l1_memory_desc: Any = None,  # noqa: ARG002 - how the factory calls it; nothing is registered
    ) -> None:
        """Open existing stores, and report their objects. Raises ``KVStoreError`` as ``Objects``."""
        capacity = kvstore.size_bytes(config.ssd_bytes, "ssd_bytes")
        super().__init__(max_capacity_bytes=capacity)
        self.objects = Objects(config, capacity)
        self._is_closed = False
        self.faults = Faults(logger)
        self.writer = TaskQueue("kvstore-lmcache-store", config.queue_tasks)
        self.reader = TaskQueue("kvstore-lmcache-load", config.queue_tasks)
        numbers = count()  # shared, because LMCache may keep ids of all three kinds in one table
        note = self.faults.note
        self._storing = Tasks[L2StoreResult](self.writer, numbers, lambda e: note("store task", e))
        self._lookups = Tasks[Bitmap](self.reader, numbers, lambda e: note("lookup task", e))
        self._loading = Tasks[Bitmap](self.reader, numbers, lambda e: note("load task", e))
        entries = self.objects.every(None)
        self._notify_keys_stored([e.key for e in entries], [e.size for e in entries])

    @override
    def get_store_event_fd(self) -> int:
        """Return the fd that is signalled when a store task is done."""
        return self._storing.event_fd

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the fd that is signalled when a lookup is done."""
        return self._lookups.event_fd

    @override
    def get_load_event_fd(self) -> int:
        """Return the fd that is signalled when a load is done."""
        return self._loading.event_fd

    # ---- storing -------------------------------------------------------------------------------

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Store objects; the task succeeds only if all of them are stored durably."""
        return self._storing.submit(
            lambda: self._store(keys, objects),
            lambda: L2StoreResult(False, 0),  # noqa: FBT003 - LMCache's own signature
        )

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        check_keys(keys)
        entries = self._entries(keys, objects)
        new, is_whole = self.objects.put(entries, [item.byte_array for item in objects])
        if new:
            self._notify_keys_stored([e.key for e in new], [e.size for e in new])
        if not is_whole:  # a task fails as a whole
            self.objects.delete(new)
        self.report_removed()
        return L2StoreResult(is_whole, sum(entry.size for entry in new) if is_whole else 0)

    def _entries(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[Entry]:
        layout = self.objects.config.layout
        return [
            Entry(key, layout(item.get_shapes(), item.get_dtypes()), item.get_size())
            for key, item in zip(keys, objects, strict=True)
        ]

    def report_removed(self) -> None:
        """Report the objects that the stores removed to LMCache."""
        removed = self.objects.take_removed()
        if removed:
            self._notify_keys_deleted([e.key for e in removed], [e.size for e in removed])

    @override
    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return the results of all completed store tasks, once."""
        return self._storing.take_all()

    # ---- looking up ----------------------------------------------------------------------------

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look objects up, and lock those that are stored."""
        return self._lookups.submit(
            lambda: self._lookup(keys, group_layout_descs), lambda: Bitmap(len(keys))
        )

    def _lookup(self, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        check_keys(keys)
        self.report_removed()  # before any lock, which a failure here would leak
        found = Bitmap(len(keys))
        for i, key in enumerate(keys):
            if self.objects.lock(key, descs.get(key.object_group_id)):
                found.set(i)
        return found

    @override
    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return the result of a lookup, once; None before it is done and after."""
        return self._lookups.take(task_id)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Release one lock of each key, at once."""
        for key in keys:
            try:
                self.objects.unlock(key)
            except Exception as error:
                if not self._is_closed:
                    self.faults.note("unlocking", error)

    # ---- loading -------------------------------------------------------------------------------

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Load objects into buffers of the caller, each wholly or not at all."""
        return self._loading.submit(lambda: self._load(keys, objects), lambda: Bitmap(len(keys)))

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        loaded = Bitmap(len(keys))
        entries = self._entries(keys, objects)
        found = self.objects.get(entries, [item.byte_array for item in objects])
        accessed = [i for i, is_there in enumerate(found) if is_there]
        for i in accessed:
            loaded.set(i)
        if accessed:
            self._notify_keys_accessed([keys[i] for i in accessed])
        self.report_removed()
        return loaded

    @override
    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return the result of a load, once; None before it is done and after."""
        return self._loading.take(task_id)

    # ---- eviction, listing and status ----------------------------------------------------------

    @override
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects; locked ones stay. Deletions are reported to listeners."""
        # An exception would end LMCache's eviction thread.
        with self.faults.noted("deletion"):
            self.objects.delete_keys(keys)
            self.report_removed()

    @override
    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List stored objects, ordered by encoded keys; the cursor is the last key of a page.

        Raises:
            ValueError: for a page size below 1, or an invalid cursor.
        """
        integer(page_size, "page_size", 1)
        after = b""
        if cursor is not None:
            try:
                after = bytes.fromhex(cursor)
            except ValueError:
                after = b""
            if decode_key(after) is None:
                msg = f"cursor must be the token of an earlier page, found {cursor[:40]!r}"
                raise ValueError(msg)
        named = ((entry.name, entry) for entry in self.objects.every(model_name))
        rest = sorted((name, entry) for name, entry in named if name > after)
        page = rest[:page_size]
        return KeyListPage(
            entries=tuple(KeyEntry(e.key.to_encoded_object_key(), e.size) for _, e in page),
            next_page_token=page[-1][0].hex() if len(rest) > page_size else None,
        )

    @override
    def report_status(self) -> dict[str, Any]:
        """Return whether the adapter works, its counters and the ``stats`` of its stores."""
        try:
            stores = self.objects.stats()
        except KVStoreError as error:
            return {"is_healthy": False, "type": type(self).__name__, "error": str(error)}
        alarms = [alarm for store in stores.values() for alarm in store["alarms"]]
        alarms += [self.objects.obstacle] if self.objects.obstacle else []
        return {
            "is_healthy": not (self._is_closed or alarms),
            "type": type(self).__name__,
            "stored_object_count": len(self.objects),
            "locked_key_count": self.objects.locked_keys,
            "waiting_tasks": self.writer.waiting + self.reader.waiting,
            "failed_tasks": self.faults.counts.total(),
            "refused_tasks": sum(t.refused for t in (self._storing, self._lookups, self._loading)),
            "alarms": alarms,
            "stores": stores,
        }

    @override
    def close(self) -> None:
        """Finish the waiting tasks, then close the stores and the event fds. Idempotent."""
        if self._is_closed:
            return
        self.writer.close()
        self.reader.close()
        self._is_closed = True
        with self.faults.noted("closing"):  # LMCache closes its other adapters after this one
            self.objects.close()
        for tasks in (self._storing, self._lookups, self._loading):
            tasks.close()
