"""Block stores by key, each in its own process with the same work, for ``bench.ssd.suite``.

``python -m bench.ssd.peers NAME`` runs in a Python that can import the peer. Jobs and results are lines of
JSON on stdin and stdout. It needs NumPy and xxhash, and kvstore only for kvstore's own rows.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sqlite3
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from bench.ssd.keys import key_of, number_of

Block = NDArray[np.uint8]
POOL_BLOCKS = 256
"""Different blocks; later ones repeat them under new keys. None of these stores deduplicates."""
WAIT_SECONDS = 60.0
SLACK = 4
"""Capacity as a multiple of the stored bytes, so that nothing is evicted."""
SQLITE_PAGE_BYTES = 16_384
"""Seven pages are 1 % larger than a block of 113,920 bytes; 64 KiB pages would waste 15 %."""
SQLITE_MAPPED_BYTES = 2**31 - 65_536
"""Largest map of the usual builds of SQLite. Source: SQLITE_MAX_MMAP_SIZE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Blocks that all peers store."""

    folder: str
    blocks: int
    block_bytes: int
    batch: int
    """Blocks that become durable together."""


class Peer(ABC):
    """Blocks of one size by key. ``put`` returns when all of them survive power loss."""

    module = ""
    """Module that its Python must import."""
    pip = ""
    """Package to install if the module is missing."""
    sync = ""
    """How a batch becomes durable."""
    verifies = False
    """Whether ``get`` checks an xxh3_64 of the payload; if not, the benchmark does, within the measured time."""
    reopens = True
    """Whether a new process finds stored blocks."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.folder = Path(shape.folder)

    @abstractmethod
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Store a batch."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        """Copy blocks into the rows of ``out``. Raises if one is missing."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the files."""


def sync_files(folder: Path) -> None:
    """Make all files of a folder's file system durable in one call."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(descriptor)


class RawFile(Peer):
    """One file without an index: the least work of a store."""

    sync = "fdatasync"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._file = os.open(self.folder / "raw", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            os.pwrite(self._file, block.data, number_of(key) * self.shape.block_bytes)
        os.fdatasync(self._file)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        for key, row in zip(keys, out, strict=True):
            found = os.preadv(self._file, [row.data], number_of(key) * self.shape.block_bytes)
            whole(found, len(row))

    @override
    def close(self) -> None:
        os.close(self._file)


class FilePerBlock(Peer):
    """A file per block, renamed when it is complete."""

    sync = "syncfs"
    suffix = ".bin"

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            partial = self.folder / "partial"
            self._write(partial, block)
            partial.rename(self._path(key))
        sync_files(self.folder)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        for key, row in zip(keys, out, strict=True):
            self._read(self._path(key), row)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{self.suffix}"

    def _write(self, path: Path, block: Block) -> None:
        with path.open("wb", buffering=0) as file:
            file.write(block.data)

    def _read(self, path: Path, row: Block) -> None:
        with path.open("rb", buffering=0) as file:
            whole(file.readinto(row.data), len(row))


class Safetensors(FilePerBlock):
    """A safetensors file per block."""

    module, pip = "safetensors", "pip install safetensors"
    suffix = ".safetensors"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from safetensors.numpy import load_file, save_file

        self._load, self._save = load_file, save_file

    def _write(self, path: Path, block: Block) -> None:
        self._save({"kv": block}, path)

    def _read(self, path: Path, row: Block) -> None:
        row[:] = self._load(path)["kv"]


class Sqlite(Peer):
    """A table of blobs, write-ahead log, one transaction a batch."""

    sync = "WAL, synchronous=FULL"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._db = sqlite3.connect(self.folder / "blocks.db", isolation_level=None)
        for name, value in (
            ("page_size", SQLITE_PAGE_BYTES),
            ("journal_mode", "WAL"),
            ("synchronous", "FULL"),
            ("mmap_size", SQLITE_MAPPED_BYTES),
        ):
            self._db.execute(f"PRAGMA {name}={value}")
        self._db.execute("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, payload BLOB)")

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        self._db.execute("BEGIN")
        rows = [(key, block.data) for key, block in zip(keys, blocks, strict=True)]
        self._db.executemany("INSERT INTO blocks VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        for key, row in zip(keys, out, strict=True):
            [found] = self._db.execute("SELECT payload FROM blocks WHERE key = ?", (key,))
            row[:] = np.frombuffer(found[0], np.uint8)

    @override
    def close(self) -> None:
        self._db.close()


class RocksDb(Peer):
    """RocksDB, one synced write batch per batch, uncompressed: quantized entries do not shrink."""

    module, pip = "rocksdict", "pip install rocksdict"
    sync = "synced write-ahead log"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)  # noqa: FBT003 - rocksdict's own positional flags
        options.set_compression_type(rocksdict.DBCompressionType.none())
        self._new_batch = rocksdict.WriteBatch
        self._db = rocksdict.Rdict(str(self.folder / "rocks"), options)
        synced = rocksdict.WriteOptions()
        synced.sync = True
        self._db.set_write_options(synced)

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        batch = self._new_batch(raw_mode=True)
        for key, block in zip(keys, blocks, strict=True):
            batch.put(key, block.tobytes())
        self._db.write(batch)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        payloads = cast("list[bytes]", self._db.get(list(keys)))
        for found, row in zip(payloads, out, strict=True):
            row[:] = np.frombuffer(found, np.uint8)

    @override
    def close(self) -> None:
        self._db.flush()
        self._db.close()


class LMCache(Peer):
    """LMCache's local disk backend, with its own staging memory."""

    module, pip = "lmcache", "pip install lmcache"
    sync = "syncfs by the bench: it never syncs"
    reopens = False
    """Its index is in memory alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        gibibytes = SLACK * shape.blocks * shape.block_bytes / 2**30
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=max(1.0, SLACK * shape.batch * shape.block_bytes / 2**30),
            local_disk=str(self.folder),
            max_local_disk_size=max(1.0, gibibytes),
        )
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, 1, 1, shape.block_bytes),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = LocalDiskBackend(config, self._loop, self._memory, dst_device="cpu")
        self._size, self._dtype = torch.Size([shape.block_bytes]), torch.uint8
        self._key: Callable[[bytes], Any] = lambda key: CacheEngineKey(
            "bench", 1, 0, int.from_bytes(key, "big"), torch.uint8
        )

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        written = threading.Semaphore(0)
        for key, block in zip(keys, blocks, strict=True):
            staged = self._memory.allocate(self._size, self._dtype)
            bytes_of(staged)[:] = block
            self._disk.submit_put_task(
                self._key(key), staged, on_complete_callback=lambda _key: written.release()
            )
            staged.ref_count_down()
        for _ in keys:
            if not written.acquire(timeout=WAIT_SECONDS):
                raise TimeoutError(f"LMCache wrote no block within {WAIT_SECONDS} s")
        sync_files(self.folder)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        found = self._disk.batched_get_blocking([self._key(key) for key in keys])
        for staged, row in zip(found, out, strict=True):
            row[:] = bytes_of(staged)
            staged.ref_count_down()

    @override
    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


def bytes_of(staged: Any) -> Block:
    """Return LMCache's staging memory of a block as an array."""
    return np.frombuffer(staged.byte_array, np.uint8)


class SGLang(Peer):
    """SGLang's file backend of its hierarchical cache."""

    module, pip = "sglang", "pip install sglang"
    sync = "syncfs by the bench: it never syncs"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self._files = HiCacheFile(config, str(self.folder))
        self._tensor = torch.from_numpy

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        tensors = [self._tensor(block) for block in blocks]
        done = self._files.batch_set([key.hex() for key in keys], tensors)
        whole(len(keys) * done, len(keys), "stored")
        sync_files(self.folder)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        targets = [self._tensor(row) for row in out]
        found = self._files.batch_get([key.hex() for key in keys], targets)
        whole(sum(tensor is not None for tensor in found), len(keys))


class KVStoreTier(Peer):
    """kvstore's SSD tier without a cache above it: frames sealed, one transaction a batch."""

    sync = "one transaction"
    verifies = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from bench.ssd.flat import FlatTier

        self._tier = FlatTier(self.folder, shape.block_bytes, capacity_of(shape))

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        self._tier.put(keys, blocks)

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        self._tier.get(keys, out)

    @override
    def close(self) -> None:
        self._tier.close()


class KVStoreBlocks(Peer):
    """kvstore's ``BlockStore``, as SGLang and LMCache use it."""

    sync = "one transaction and a sync"
    verifies = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from kvstore import BlockStore

        self._store = BlockStore.open(
            self.folder / "store", block_bytes=shape.block_bytes, ssd_bytes=capacity_of(shape)
        )

    @override
    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        whole(sum(self._store.put(keys, blocks, wait=WAIT_SECONDS)), len(keys), "stored")
        self._store.flush()

    @override
    def get(self, keys: Sequence[bytes], out: Block) -> None:
        whole(sum(self._store.get(keys, list(out))), len(keys))

    @override
    def close(self) -> None:
        self._store.close()


PEERS: Mapping[str, type[Peer]] = {
    "kvstore, tier": KVStoreTier,
    "kvstore, BlockStore": KVStoreBlocks,
    "raw file, no index": RawFile,
    "file per block": FilePerBlock,
    "safetensors": Safetensors,
    "SQLite": Sqlite,
    "RocksDB": RocksDb,
    "LMCache": LMCache,
    "SGLang": SGLang,
}


def capacity_of(shape: Shape) -> int:
    """Return a cap that is never reached, and large enough for the largest commits."""
    return max(1 << 30, SLACK * shape.blocks * shape.block_bytes)


def whole(found: int | None, expected: int, what: str = "read") -> None:
    """Raise ``OSError`` unless all blocks, or all bytes of one, were stored or read."""
    if found != expected:
        raise OSError(f"{found} of {expected} were {what}")


class Worker:
    """Server of one peer. Each job is a method; its result is returned as JSON."""

    def __init__(self, kind: type[Peer]) -> None:
        self._kind = kind
        self._peer: Peer | None = None
        self._shape: Shape | None = None
        self._pool = np.empty((0, 0), np.uint8)
        self._sums: list[int] = []

    def prepare(self, **shape: Any) -> dict[str, Any]:
        """Make an empty store and its blocks, or return the module that cannot be imported."""
        module = self._kind.module
        if module and find_spec(module) is None:
            return {"missing": module}
        self._shape = Shape(**shape)
        blocks = min(POOL_BLOCKS, self._shape.blocks)
        pool = np.random.default_rng(0).integers(
            0, 256, (blocks, self._shape.block_bytes), np.uint8
        )
        self._pool, self._sums = pool, [xxhash.xxh3_64_intdigest(block.data) for block in pool]
        self._peer = self._kind(self._shape)
        return {"sync": self._kind.sync}

    def store(self) -> dict[str, Any]:
        """Put every block; return the seconds of each batch, its checksums included."""
        shape, peer = self._open()
        found = []
        for first in range(0, shape.blocks, shape.batch):
            numbers = range(first, min(first + shape.batch, shape.blocks))
            keys = [key_of(number) for number in numbers]
            blocks = [self._pool[number % len(self._pool)] for number in numbers]
            began = time.perf_counter()
            if not peer.verifies:
                self._checked(blocks, numbers)
            peer.put(keys, blocks)
            found.append(time.perf_counter() - began)
        return {"seconds": found}

    def load(self, runs: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Get runs of blocks; return the seconds of each, verification included."""
        shape, peer = self._open()
        # Ones: the system allocates the pages of zeros only when they are written.
        out = np.ones((max(map(len, runs)), shape.block_bytes), np.uint8)
        found = []
        for numbers in runs:
            keys, rows = [key_of(number) for number in numbers], out[: len(numbers)]
            began = time.perf_counter()
            peer.get(keys, rows)
            if not peer.verifies:
                self._checked(rows, numbers)
            found.append(time.perf_counter() - began)
            self._checked(rows, numbers)  # also for peers that verify themselves
        return {"seconds": found}

    def _checked(self, blocks: Sequence[Block] | Block, numbers: Sequence[int]) -> None:
        """Compare checksums, as kvstore does, so that no peer is faster for the lack of them."""
        for block, number in zip(blocks, numbers, strict=True):
            if xxhash.xxh3_64_intdigest(block.data) != self._sums[number % len(self._pool)]:
                raise RuntimeError(f"block {number} was returned with another checksum")

    def release(self) -> dict[str, Any]:
        """Close the store's files if it can be reopened."""
        _, peer = self._open()
        if peer.reopens:
            peer.close()
        return {}

    def acquire(self) -> dict[str, Any]:
        """Reopen the closed store."""
        shape, peer = self._open()
        if peer.reopens:
            self._peer = self._kind(shape)
        return {}

    def close(self) -> dict[str, Any]:
        """Close the store; return the size of its folder on disk."""
        shape, peer = self._open()
        peer.close()
        self._peer = None
        files = [path for path in Path(shape.folder).rglob("*") if path.is_file()]
        return {"disk_bytes": sum(path.stat().st_blocks for path in files) * 512}

    def _open(self) -> tuple[Shape, Peer]:
        assert self._peer is not None
        assert self._shape is not None
        return self._shape, self._peer


def main() -> None:
    """Run jobs until stdin ends."""
    worker = Worker(PEERS[sys.argv[1]])
    # Keeps a peer's output out of the results.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job = cast("dict[str, Any]", json.loads(line))
        answer = getattr(worker, job.pop("do"))(**job)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
