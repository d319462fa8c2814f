"""Stored objects: a block store for each object size, and an index of the objects by key.

Each size has a fixed share of the cap, so the number of sizes is an option.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

import kvstore
from kvstore.engine.lmcache.keys import KEY_BYTES, Entry, decode_key
from kvstore.engine.lmcache.options import KVStoreL2AdapterConfig
from kvstore.errors import ConfigError, KVStoreError

PUT_WAIT_SECONDS = 30.0
"""Longest wait of a store task for room in the queue of its store, after which it fails."""
_FOLDER = "size-"
_SIZE = struct.Struct("<I")
_VERSION_FILE = "VERSION"
"""File of every store (docs/format.md)."""


def claim(path: str) -> Path:
    """Create the directory of the stores. Raises ``ConfigError`` if no store can be created in it."""
    try:
        root = Path(path).expanduser().resolve()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"path {path} cannot be created: {error}; choose a directory that you can write to"
        raise ConfigError(msg) from error
    if not os.access(root, os.W_OK | os.X_OK):
        msg = f"path {root} is not writable by this user; choose a directory that you can write to"
        raise ConfigError(msg)
    if (root / _VERSION_FILE).exists():
        raise ConfigError(f"path {root} is a store of its own; choose a new or empty directory")
    return root


class Objects:
    """Stores of all sizes, with an index of their objects and LMCache's locks on them. Threads: any."""

    def __init__(self, config: KVStoreL2AdapterConfig, capacity: int) -> None:
        """Open the stores and index their objects; ``capacity`` is the cap of all files in bytes.

        Raises:
            KVStoreError: if a store cannot be opened, or another process owns it.
        """
        self.config = config
        self.capacity = capacity
        self._root = claim(config.path)
        self._opening = threading.Lock()
        self.stores: dict[int, kvstore.BlockStore] = {}
        self.obstacle = ""
        """Error of the last attempt to open a store; empty after a success."""
        self._lock = threading.Lock()  # of the members below; held without waiting
        self.entries: dict[ObjectKey, dict[bytes, Entry]] = {}
        """Stored objects by key and layout."""
        self._by_id: dict[bytes, Entry] = {}
        """Stored objects by size and block id."""
        self._removed: deque[bytes] = deque()
        """Sizes and ids of blocks that a store removed and the index still has."""
        self._locks: dict[ObjectKey, list[Entry]] = {}
        """Entries pinned by the locks of a key, newest last."""
        try:
            self._open_existing()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def locked_keys(self) -> int:
        """Keys with at least one lock."""
        return len(self._locks)

    def _open_existing(self) -> None:
        names = [item.name for item in self._root.iterdir() if item.name.startswith(_FOLDER)]
        sizes = sorted(int(n[len(_FOLDER) :]) for n in names if n[len(_FOLDER) :].isdigit())
        if len(sizes) > self.config.sizes:
            msg = (
                f"{self._root} has stores for {len(sizes)} object sizes ({sizes}), expected at most "
                f"'sizes' = {self.config.sizes}; raise it, or remove a folder"
            )
            raise ConfigError(msg)
        for size in sizes:
            store = self._store(size)
            assert store is not None
            for block_id, name in store.listing():
                if (found := decode_key(name)) is not None:
                    self.enter(block_id, Entry(*found, size))

    def _store(self, size: int) -> kvstore.BlockStore | None:
        """Return the store of a size, None if ``sizes`` other stores are open."""
        with self._opening:
            store = self.stores.get(size)
            if store is None and len(self.stores) < self.config.sizes:
                prefix = _SIZE.pack(size)
                try:
                    store = kvstore.BlockStore.open(
                        self._root / f"{_FOLDER}{size}",
                        block_bytes=size,
                        key_bytes=KEY_BYTES,
                        ssd_bytes=self.capacity // self.config.sizes,
                        role="owner",
                        secret=self.config.secret,
                        on_removed=lambda block_id: self._removed.append(prefix + block_id),
                    )
                except KVStoreError as error:
                    self.obstacle = str(error)
                    raise
                self.stores[size] = store
                self.obstacle = ""
            return store

    # ---- index ---------------------------------------------------------------------------------

    def enter(self, block_id: bytes, entry: Entry) -> bool:
        """Add a stored object to the index; return whether it is new."""
        with self._lock:
            is_new = entry.layout not in self.entries.get(entry.key, {})
            self.entries.setdefault(entry.key, {})[entry.layout] = entry
            self._by_id[_SIZE.pack(entry.size) + block_id] = entry
        return is_new

    def take_removed(self) -> list[Entry]:
        """Remove the objects that the stores removed from the index, and return them."""
        removed: list[Entry] = []
        with self._lock:
            while self._removed:
                sized_id = self._removed.popleft()
                entry = self._by_id.get(sized_id)
                if entry is not None and not self.stores[entry.size].exists([entry.name]):
                    del self._by_id[sized_id]  # unless it was stored again meanwhile
                    layouts = self.entries[entry.key]
                    del layouts[entry.layout]
                    if not layouts:
                        del self.entries[entry.key]
                    removed.append(entry)
        return removed

    def every(self, model_name: str | None) -> list[Entry]:
        """Return the stored objects, of all models or of one."""
        with self._lock:
            return [
                entry
                for layouts in self.entries.values()
                for entry in layouts.values()
                if model_name is None or entry.key.model_name == model_name
            ]

    def _candidate(self, key: ObjectKey, desc: MemoryLayoutDesc | None) -> Entry | None:
        """Return the stored object of ``key`` with the layout ``desc``, or one made by a serde."""
        with self._lock:
            layouts = self.entries.get(key, {})
            if desc is None:
                return next(iter(layouts.values()), None)
            exact = layouts.get(self.config.layout(desc.shapes, desc.dtypes))
            if exact is not None:
                return exact
            opaque = self.config.opaque_layout
            return next((e for e in layouts.values() if e.layout == opaque(e.size)), None)

    # ---- objects -------------------------------------------------------------------------------

    def put(self, entries: Sequence[Entry], buffers: Sequence[Any]) -> tuple[list[Entry], bool]:
        """Store objects durably; return those that are new, and whether all are stored.

        Raises:
            ConfigError: for an object of more sizes than configured.
        """
        stores = {size: self._store(size) for size in dict.fromkeys(e.size for e in entries)}
        unknown = [size for size, store in stores.items() if store is None]
        if unknown:
            msg = (
                f"an object has {unknown[0]} bytes, expected one of {sorted(self.stores)}, the most "
                "sizes that 'sizes' allows; raise 'sizes' in adapter_params"
            )
            raise ConfigError(msg)
        new: list[Entry] = []
        is_whole = True
        for size, store in stores.items():
            assert store is not None
            mine = [i for i, entry in enumerate(entries) if entry.size == size]
            names = [entries[i].name for i in mine]
            store.put(names, [buffers[i] for i in mine], wait=PUT_WAIT_SECONDS)
            store.flush()
            for i, name in zip(mine, names, strict=True):
                if not store.exists([name]):
                    is_whole = False
                elif self.enter(store.block_id(name), entries[i]):
                    new.append(entries[i])
                    # A store that removed it since has reported that before the index had it.
                    self._removed.append(_SIZE.pack(size) + store.block_id(name))
        return new, is_whole

    def get(self, entries: Sequence[Entry], buffers: Sequence[Any]) -> list[bool]:
        """Copy objects to buffers, each wholly or not at all; return which were copied."""
        found = [False] * len(entries)
        for size in dict.fromkeys(entry.size for entry in entries):
            store = self.stores.get(size)
            if store is None:
                continue
            mine = [i for i, entry in enumerate(entries) if entry.size == size]
            copied = store.get([entries[i].name for i in mine], [buffers[i] for i in mine])
            for i, is_copied in zip(mine, copied, strict=True):
                found[i] = is_copied
        return found

    def delete(self, entries: Sequence[Entry]) -> None:
        """Delete objects; locked ones stay."""
        for size in dict.fromkeys(entry.size for entry in entries):
            self.stores[size].delete([e.name for e in entries if e.size == size])

    def delete_keys(self, keys: Sequence[ObjectKey]) -> None:
        """Delete the objects of ``keys`` in every layout; locked ones stay."""
        with self._lock:
            entries = [e for key in keys for e in self.entries.get(key, {}).values()]
        self.delete(entries)

    def lock(self, key: ObjectKey, desc: MemoryLayoutDesc | None) -> bool:
        """Pin the object of a key until ``unlock``; return whether it is stored."""
        entry = self._candidate(key, desc)
        if entry is None or not self.stores[entry.size].pin([entry.name])[0]:
            return False
        with self._lock:
            self._locks.setdefault(key, []).append(entry)
        return True

    def unlock(self, key: ObjectKey) -> None:
        """Release one lock of a key, if it has any."""
        with self._lock:
            held = self._locks.get(key)
            entry = held.pop() if held else None
            if not held:
                self._locks.pop(key, None)
        if entry is not None:
            self.stores[entry.size].unpin([entry.name])

    def stats(self) -> dict[str, Mapping[str, Any]]:
        """Return ``stats`` of each size's store."""
        return {str(size): store.stats() for size, store in list(self.stores.items())}

    def close(self) -> None:
        """Close every store, also after a failure."""
        with ExitStack() as stack:
            for store in self.stores.values():
                stack.callback(store.close)
