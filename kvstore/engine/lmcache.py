"""LMCache's second tier on block stores: an adapter for its ``plugin`` type (MP mode).

Objects of one size share a store; how many sizes to expect is an option, because each gets its
share of the cap once and for all. An object is stored under its whole key and a digest of its shapes
and dtypes, which LMCache's keys lack.

LMCache's controllers submit tasks and wait for three event fds. Two threads do the work, one the
stores and one the lookups and loads, each behind a bounded queue: a task that finds it full fails at
once. Unlocking never waits and never fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from typing_extensions import override

from kvstore.blocks.block_store import BlockStore
from kvstore.distribution import install_command
from kvstore.engine.options import check_options, check_weights
from kvstore.errors import ConfigError, KVStoreError
from kvstore.output.sizes import size_bytes
from kvstore.store.opening import resolved
from kvstore.tier.ssd.directory import VERSION_FILE
from kvstore.transfer.threads import TaskThread

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    _msg = (
        f"kvstore.engine.lmcache needs LMCache 0.5.6 ({install_command('lmcache')}); "
        f"it cannot be imported: {error}"
    )
    raise ImportError(_msg) from error

logger = logging.getLogger(__name__)

_KEY_BYTES = 1024
"""Longest encoded object key: a model's name and a salt of 128 characters with room to spare."""
_MAGIC = b"kvl1"
_SIZE = struct.Struct("<I")
_HASH_BYTES = 16
"""Shortest hash of a chunk that is taken. LMCache's ``builtin`` and ``*_64bit`` have 8 bytes: prompts
that collide can be written down, and an SSD full of chunks meets some by chance."""
_RANK_LIMIT = 1 << 32
"""LMCache packs size and number of a worker into 8 bits each: ranks of more workers overlap."""
_PUT_WAIT_SECONDS = 30.0
"""How long a store task waits for room in the queue of its store before it fails."""
_FOLDER = "size-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    path: str
    ssd_bytes: int | str = "16GiB"
    sizes: int = 1
    queue_tasks: int = 1024
    revision: str
    tenant: str = ""
    secret: bool = False


class KVStoreL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc] # the engine is not typed
    """What ``adapter_params`` may say."""

    def __init__(self, options: _Options) -> None:
        self.options = options

    @classmethod
    @override
    def from_dict(cls, d: Mapping[str, Any]) -> KVStoreL2AdapterConfig:
        """Check and take the parameters. Raises ``ConfigError``, a ``ValueError``."""
        known = [field.name for field in fields(_Options)]
        check_options("adapter_params", d, known, ("path", "revision", "tenant"), ("secret",))
        check_weights("adapter_params", "revision", d)
        for name, default in (("sizes", 1), ("queue_tasks", 1)):
            value = d.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"adapter_params: {name!r} must be a positive integer, found {value!r}"
                raise ConfigError(msg)
        options = _Options(**d)
        size_bytes(options.ssd_bytes, "ssd_bytes")
        return cls(options)

    @classmethod
    @override
    def help(cls) -> str:
        """Return what the parameters mean."""
        return (
            "kvstore L2 adapter fields:\n"
            "- path (str): directory of the stores, on a local disk (required)\n"
            "- ssd_bytes (int or text such as '16GiB'): cap of all files together (default 16GiB)\n"
            "- sizes (int): different object sizes to expect; each gets an equal share of the cap "
            "(default 1)\n"
            "- queue_tasks (int): tasks that may wait (default 1024)\n"
            "- revision (str): digest or revision of weights and config, or 'unchecked' (required); "
            "another one never hits\n"
            "- tenant (str): keeps users of one directory apart"
        )


# ---- keys ---------------------------------------------------------------------------------------


def encode_key(key: ObjectKey, layout: bytes) -> bytes:
    """Return the store's key of an object: each field with its length before it."""
    parts = [
        key.chunk_hash,
        key.model_name.encode(),
        b"%d" % key.kv_rank,
        b"%d" % key.object_group_id,
        key.cache_salt.encode(),
        layout,
    ]
    return _MAGIC + b"".join(_SIZE.pack(len(part)) + part for part in parts)


def check_keys(keys: Sequence[ObjectKey]) -> None:
    """Raise ``ConfigError`` for a key that does not tell prompts or workers apart."""
    for key in keys:
        if len(key.chunk_hash) < _HASH_BYTES:
            msg = (
                f"a chunk's hash has {len(key.chunk_hash)} bytes, expected at least {_HASH_BYTES}: "
                "start LMCache with --hash-algorithm blake3, its default"
            )
            raise ConfigError(msg)
        if not 0 <= key.kv_rank < _RANK_LIMIT:
            msg = (
                f"kv rank {key.kv_rank:#x} is of more than 255 workers, whose ranks LMCache's keys "
                "do not tell apart; use fewer"
            )
            raise ConfigError(msg)


def decode_key(data: bytes) -> tuple[ObjectKey, bytes] | None:
    """Return what ``encode_key`` was given, None for anything else."""
    parts: list[bytes] = []
    at = len(_MAGIC)
    while at + _SIZE.size <= len(data) and len(parts) < 6:
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size + size
        parts.append(data[at - size : at])
    if not data.startswith(_MAGIC) or len(parts) != 6 or at != len(data):
        return None
    try:
        chunk, model, rank, group, salt, layout = parts
        key = ObjectKey(chunk, model.decode(), int(rank), int(group), salt.decode())
    except ValueError:
        return None
    return key, layout


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any], options: _Options) -> bytes:
    """Return a digest of everything besides the object key that must agree before a hit."""
    facts = [[list(shape) for shape in shapes], [str(dtype) for dtype in dtypes]]
    owner = ["kvstore.lmcache.1", options.revision, options.tenant]
    return hashlib.sha256(json.dumps([owner, facts]).encode()).digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    """An object that is stored."""

    key: ObjectKey
    layout: bytes
    size: int

    @property
    def name(self) -> bytes:
        return encode_key(self.key, self.layout)


def _claim(root: Path) -> None:
    """Make the directory, and refuse one that nothing can be stored in.

    Raises:
        ConfigError: saying why, and what to do.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"path {root} cannot be made: {error}; choose a directory that you can write to"
        raise ConfigError(msg) from error
    if not os.access(root, os.W_OK | os.X_OK):
        msg = f"path {root} is not writable by this user; choose a directory that you can write to"
        raise ConfigError(msg)
    if (root / VERSION_FILE).exists():
        msg = f"path {root} is a store of its own; choose a new or empty directory"
        raise ConfigError(msg)


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc] # the engine is not typed
    """An L2 adapter of LMCache's MP server.

    A store task succeeds only when all its objects survive power loss. What a lookup found is
    pinned until it is unlocked as often. A load verifies each object on the copy that it hands out.

    Threads: any; results are handed out once.
    """

    def __init__(
        self,
        config: KVStoreL2AdapterConfig,
        l1_memory_desc: Any = None,  # noqa: ARG002 - how the factory calls it; nothing is registered
    ) -> None:
        """Open the stores that are there already, and list what they hold.

        Raises:
            KVStoreError: if one cannot be opened, or belongs to another process.
        """
        self.options = config.options
        self._root = resolved(self.options.path)
        self._capacity = size_bytes(self.options.ssd_bytes, "ssd_bytes")
        super().__init__(max_capacity_bytes=self._capacity)
        self._lock = threading.Lock()
        """Guards everything below but the stores themselves. Nothing is waited for inside."""
        self._stores: dict[int, BlockStore] = {}
        self._opening = threading.Lock()
        self._entries: dict[ObjectKey, dict[bytes, _Entry]] = {}
        """Stored objects by key, and by layout."""
        self._by_id: dict[bytes, _Entry] = {}
        """The same by the id of their block, with the size in front."""
        self._left: deque[bytes] = deque()
        """Ids of blocks that a store removed by itself, not yet told to LMCache."""
        self._locks: dict[ObjectKey, list[_Entry]] = {}
        """What each lock of a key has pinned, newest last."""
        self._numbers = count()
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._found: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._errors = 0
        self._refused = 0
        self._obstacle = ""
        """Why a store could not be opened, until one can."""
        self._is_closed = False
        self._events = {name: create_event_notifier() for name in ("store", "lookup", "load")}
        try:
            self._open_existing()
        except BaseException:
            self._release()
            raise
        bound = self.options.queue_tasks
        self._writer = TaskThread("kvstore-lmcache-store", bound)
        self._reader = TaskThread("kvstore-lmcache-load", bound)

    # ---- stores --------------------------------------------------------------------------------

    def _open_existing(self) -> None:
        root = self._root
        _claim(root)
        names = [item.name for item in root.iterdir() if item.name.startswith(_FOLDER)]
        sizes = sorted(int(n[len(_FOLDER) :]) for n in names if n[len(_FOLDER) :].isdigit())
        if len(sizes) > self.options.sizes:
            msg = (
                f"{root} holds stores for {len(sizes)} object sizes ({sizes}), expected at most "
                f"'sizes' = {self.options.sizes}; raise it, or remove a folder"
            )
            raise ConfigError(msg)
        for size in sizes:
            store = self._store(size)
            assert store is not None
            entries = [
                (block_id, _Entry(*found, size))
                for block_id, name in store.listing()
                if (found := decode_key(name)) is not None
            ]
            for block_id, entry in entries:
                self._enter(block_id, entry)
            self._notify_keys_stored([e.key for _, e in entries], [e.size for _, e in entries])

    def _store(self, size: int) -> BlockStore | None:
        """Return the store of a size, None if there are as many as may be."""
        with self._opening:
            store = self._stores.get(size)
            if store is None and len(self._stores) < self.options.sizes:
                prefix = _SIZE.pack(size)
                try:
                    store = BlockStore.open(
                        self._root / f"{_FOLDER}{size}",
                        block_bytes=size,
                        key_bytes=_KEY_BYTES,
                        ssd_bytes=self._capacity // self.options.sizes,
                        role="owner",
                        secret=self.options.secret,
                        on_removed=lambda block_id: self._left.append(prefix + block_id),
                    )
                except KVStoreError as error:
                    self._obstacle = str(error)
                    raise
                self._stores[size] = store
                self._obstacle = ""
            return store

    def _enter(self, block_id: bytes, entry: _Entry) -> bool:
        """Note a stored object; say whether it is new."""
        with self._lock:
            is_new = entry.layout not in self._entries.get(entry.key, {})
            self._entries.setdefault(entry.key, {})[entry.layout] = entry
            self._by_id[_SIZE.pack(entry.size) + block_id] = entry
        return is_new

    def _settle(self) -> None:
        """Take out of the books, and tell LMCache, what the stores removed by themselves."""
        gone: list[_Entry] = []
        with self._lock:
            while self._left:
                place = self._left.popleft()
                entry = self._by_id.get(place)
                if entry is not None and not self._stores[entry.size].exists([entry.name]):
                    del self._by_id[place]  # else it was stored again meanwhile
                    layouts = self._entries[entry.key]
                    del layouts[entry.layout]
                    if not layouts:
                        del self._entries[entry.key]
                    gone.append(entry)
        if gone:
            self._notify_keys_deleted([e.key for e in gone], [e.size for e in gone])

    # ---- events --------------------------------------------------------------------------------

    @override
    def get_store_event_fd(self) -> int:
        """Return the fd that is signalled when store tasks are done."""
        return int(self._events["store"].fileno())

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the fd that is signalled when lookups are done."""
        return int(self._events["lookup"].fileno())

    @override
    def get_load_event_fd(self) -> int:
        """Return the fd that is signalled when loads are done."""
        return int(self._events["load"].fileno())

    def _submit(
        self,
        worker: TaskThread,
        what: str,
        results: dict[L2TaskId, Any],
        work: Callable[[], Any],
        failed: Callable[[], Any],
    ) -> L2TaskId:
        """Queue a task; whatever happens, its result comes and its event is signalled."""
        with self._lock:
            number = next(self._numbers)

        def finish(result: Any) -> None:
            with self._lock:
                results[number] = result
                if not self._is_closed:
                    self._events[what].notify()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # the controllers wait for this task
                self._note(f"{what} task", error)
                result = failed()
            finish(result)

        if not worker.submit(run):
            with self._lock:
                self._refused += 1
            finish(failed())
        return number

    def _note(self, what: str, error: Exception) -> None:
        """Count a failure that a thread of LMCache must not see, and log the first one."""
        with self._lock:
            self._errors += 1
            is_first = self._errors == 1
        if is_first:
            message = "a %s failed: %s; further failures are only counted"
            logger.error(message, what, error, exc_info=error)
        else:
            logger.debug("a %s failed: %r", what, error)

    # ---- storing -------------------------------------------------------------------------------

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Store objects; the task succeeds only if all of them are stored for good."""
        return self._submit(
            *(self._writer, "store", self._stored),
            lambda: self._do_store(keys, objects),
            lambda: L2StoreResult(False, 0),  # noqa: FBT003 - LMCache's own signature
        )

    def _do_store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        check_keys(keys)
        entries = [
            _Entry(key, self._layout_of(item), item.get_size())
            for key, item in zip(keys, objects, strict=True)
        ]
        stores = {size: self._store(size) for size in dict.fromkeys(e.size for e in entries)}
        strange = [size for size, store in stores.items() if store is None]
        if strange:
            msg = (
                f"an object of {strange[0]} bytes is of a further size beside "
                f"{sorted(self._stores)}; raise 'sizes' in adapter_params"
            )
            raise ConfigError(msg)
        fresh: list[_Entry] = []
        is_whole = True
        for size, store in stores.items():
            assert store is not None
            mine = [i for i, entry in enumerate(entries) if entry.size == size]
            names = [entries[i].name for i in mine]
            store.put(names, [objects[i].byte_array for i in mine], wait=_PUT_WAIT_SECONDS)
            store.flush()
            for i, name in zip(mine, names, strict=True):
                if not store.exists([name]):
                    is_whole = False
                elif self._enter(store.block_id(name), entries[i]):
                    fresh.append(entries[i])
                    # It may have gone since: then its removal was settled before it was noted.
                    self._left.append(_SIZE.pack(size) + store.block_id(name))
        if fresh:
            self._notify_keys_stored([e.key for e in fresh], [e.size for e in fresh])
        if not is_whole:  # a task fails as a whole
            for entry in fresh:
                self._stores[entry.size].delete([entry.name])
        self._settle()
        return L2StoreResult(is_whole, sum(entry.size for entry in fresh) if is_whole else 0)

    def _layout_of(self, item: MemoryObj) -> bytes:
        return _layout(item.get_shapes(), item.get_dtypes(), self.options)

    @override
    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return the results of all store tasks that are done, once."""
        with self._lock:
            done = dict(self._stored)
            self._stored.clear()
        return done

    # ---- looking up ----------------------------------------------------------------------------

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look objects up, and protect what is there until it is unlocked."""
        return self._submit(
            *(self._reader, "lookup", self._found),
            lambda: self._do_lookup(keys, group_layout_descs),
            lambda: Bitmap(len(keys)),
        )

    def _do_lookup(
        self, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]
    ) -> Bitmap:
        check_keys(keys)
        self._settle()  # first: what fails after a lock would leave it behind
        found = Bitmap(len(keys))
        for i, key in enumerate(keys):
            entry = self._candidate(key, descs.get(key.object_group_id))
            if entry is not None and self._stores[entry.size].pin([entry.name])[0]:
                with self._lock:
                    self._locks.setdefault(key, []).append(entry)
                found.set(i)
        return found

    def _candidate(self, key: ObjectKey, desc: MemoryLayoutDesc | None) -> _Entry | None:
        """Return the stored object that a lookup means, if there is one.

        Objects that a serde made are plain bytes, whatever layout their values had.
        """
        with self._lock:
            layouts = self._entries.get(key, {})
            if desc is None:
                return next(iter(layouts.values()), None)
            exact = layouts.get(_layout(desc.shapes, desc.dtypes, self.options))
            if exact is not None:
                return exact
            return next((e for e in layouts.values() if e.layout == self._opaque(e.size)), None)

    def _opaque(self, size: int) -> bytes:
        return _layout([[size]], ["torch.uint8"], self.options)

    @override
    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return the result of a lookup, once; None before it is done and after."""
        with self._lock:
            return self._found.pop(task_id, None)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Give back one lock of each key, at once."""
        for key in keys:
            with self._lock:
                held = self._locks.get(key)
                entry = held.pop() if held else None
                if not held:
                    self._locks.pop(key, None)
            if entry is not None and not self._is_closed:
                try:
                    self._stores[entry.size].unpin([entry.name])
                except Exception as error:
                    self._note("unlocking", error)

    # ---- loading -------------------------------------------------------------------------------

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Load objects into buffers of the caller, each wholly or not at all."""
        return self._submit(
            *(self._reader, "load", self._loaded),
            lambda: self._do_load(keys, objects),
            lambda: Bitmap(len(keys)),
        )

    def _do_load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        loaded = Bitmap(len(keys))
        wanted = [
            (i, key, item, item.get_size())
            for i, (key, item) in enumerate(zip(keys, objects, strict=True))
        ]
        accessed: list[ObjectKey] = []
        for size in dict.fromkeys(size for *_, size in wanted):
            store = self._stores.get(size)
            if store is None:
                continue
            mine = [(i, key, item) for i, key, item, of_size in wanted if of_size == size]
            names = [encode_key(key, self._layout_of(item)) for _, key, item in mine]
            found = store.get(names, [item.byte_array for *_, item in mine])
            for (i, key, _), is_there in zip(mine, found, strict=True):
                if is_there:
                    loaded.set(i)
                    accessed.append(key)
        if accessed:
            self._notify_keys_accessed(accessed)
        self._settle()
        return loaded

    @override
    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return the result of a load, once; None before it is done and after."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # ---- eviction and telling ------------------------------------------------------------------

    @override
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects; locked ones stay. Listeners are told of what went."""
        with self._lock:
            entries = [e for key in keys for e in self._entries.get(key, {}).values()]
        try:
            for size in dict.fromkeys(entry.size for entry in entries):
                self._stores[size].delete([e.name for e in entries if e.size == size])
            self._settle()
        except Exception as error:  # LMCache's thread would end, and nothing be evicted any more
            self._note("deletion", error)

    @override
    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List stored objects, ordered by their encoded keys; the cursor is the last of a page.

        Raises:
            ValueError: for a page size below 1 or a cursor that is none.
        """
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            msg = f"page_size must be a positive integer, found {page_size!r}"
            raise ValueError(msg)
        after = b""
        if cursor is not None:
            try:
                after = bytes.fromhex(cursor)
            except ValueError:
                after = b""
            if decode_key(after) is None:
                msg = f"cursor must be the token of an earlier page, found {cursor[:40]!r}"
                raise ValueError(msg)
        with self._lock:
            every = [
                entry
                for layouts in self._entries.values()
                for entry in layouts.values()
                if model_name is None or entry.key.model_name == model_name
            ]
        rest = sorted((e.name, e) for e in every if e.name > after)
        page = rest[:page_size]
        return KeyListPage(
            entries=tuple(KeyEntry(e.key.to_encoded_object_key(), e.size) for _, e in page),
            next_page_token=page[-1][0].hex() if len(rest) > page_size else None,
        )

    @override
    def report_status(self) -> dict[str, Any]:
        """Return whether the adapter works, and how full it is."""
        try:
            stores = {str(size): store.stats() for size, store in list(self._stores.items())}
        except KVStoreError as error:
            return {"is_healthy": False, "type": type(self).__name__, "error": str(error)}
        alarms = [alarm for store in stores.values() for alarm in store["alarms"]]
        with self._lock:
            return {
                "is_healthy": not (self._is_closed or alarms or self._obstacle),
                "type": type(self).__name__,
                "stored_object_count": len(self._by_id),
                "locked_key_count": len(self._locks),
                "waiting_tasks": self._writer.waiting + self._reader.waiting,
                "failed_tasks": self._errors,
                "refused_tasks": self._refused,
                "alarms": [*alarms, *([self._obstacle] if self._obstacle else [])],
                "stores": stores,
            }

    @override
    def close(self) -> None:
        """Finish what waits, then close the stores and the event fds. Idempotent."""
        if self._is_closed:
            return
        self._writer.close()
        self._reader.close()
        with self._lock:
            self._is_closed = True
        self._release()

    def _release(self) -> None:
        for store in self._stores.values():
            try:
                store.close()
            except Exception as error:  # the others, and LMCache's own, are still to be closed
                self._note("closing", error)
        for event in self._events.values():
            event.close()
