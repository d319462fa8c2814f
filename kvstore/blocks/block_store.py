"""``BlockStore``, the public interface for callers with their own keys, and its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from kvstore.blocks.keyed import Bytes, KeyedBlocks
from kvstore.blocks.keys import KEY_BYTES_LIMIT, Key, NamedBlock, keyed_format, keys_root, named
from kvstore.checks import ROLES, choice, flag, integer, number, several
from kvstore.codec.host import host_bytes, writable_bytes
from kvstore.errors import ConfigError, brief
from kvstore.frame.format import FrameFormat
from kvstore.index.plan import REQUEST_SHARE
from kvstore.layout import Layout
from kvstore.output.sizes import share_of, size_bytes
from kvstore.store.opening import resolved, tier_opening
from kvstore.store.registry import Share, Sharing, share
from kvstore.store.store_format import StoreFormat
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions


class BlockStore(Sharing):
    """A store of blocks of one size on SSD under keys chosen by callers, for engines with their own hashes.

    A key is up to ``key_bytes`` bytes, or a string, encoded as UTF-8. It is stored whole and compared on every read,
    so two keys never share a block. The caller includes in it whatever distinguishes blocks (model, formats, tenant,
    ...).

    A context manager that flushes and closes on exit. A store dropped without ``close`` is closed in the background.
    Openings of one directory in one process share one store; options that differ from those of the first are refused. A
    forked child must reopen. No reference to a caller's buffer is kept after a call returns.

    Threads: every method may be called from any thread of the process that opened it.
    """

    def __init__(self, holding: Share[KeyedBlocks], block_bytes: int, key_bytes: int) -> None:
        """Use a share of an open store. Called by ``open``."""
        self._share = holding
        self._shared = holding.shared
        self.block_bytes = block_bytes
        self.key_bytes = key_bytes

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        block_bytes: int,
        key_bytes: int = 256,
        ssd_bytes: int | str | None = None,
        role: Literal["auto", "owner", "reader"] = "auto",
        preallocate: bool | None = None,
        on_removed: Callable[[bytes], object] | None = None,
        scrub_bytes_per_second: int | str | None = None,
        secret: bool | None = None,
        request_share: float | None = None,
    ) -> Self:
        """Open the store in directory ``path``; create it if it does not exist.

        An option of None has its default, or the value in force if this process has the store open.

        Options:
            ``ssd_bytes``: hard cap of the file, in bytes or as text; 4 GiB by default.
            ``role``: ``"auto"`` owns the store if no process does, and reads it otherwise.
            ``preallocate``: allocate the disk space now, all or nothing.
            ``on_removed``: called with the ``block_id`` of each block that the owner evicts, deletes or finds bad, in
            any thread and under a lock: it must only record it.
            ``scrub_bytes_per_second``: rate at which the owner verifies all blocks in the background; 0 for no scrub.
            ``secret``: hash keys with a random secret in the store's directory. Fixed when the store is created.
            ``request_share``: largest share of the store, in (0, 1], for one chain of parents; a half by default.
            Further blocks of a chain are dropped and counted in ``dropped_blocks``.

        Raises:
            ConfigError: for options that cannot work, such as a cap below 8 blocks, or that differ from those of the
                store as opened by this process; each is named.
            LayoutMismatch: if the store contains blocks of another size or key length, or of a ``PrefixCache``, or has
                a secret and is opened without or vice versa; it is left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or a reader finds none there.
        """
        choice(role, "role", ROLES, ConfigError)
        given: dict[str, Any] = {
            "ssd_bytes": ssd_bytes,
            "preallocate": preallocate,
            "on_removed": on_removed,
            "scrub_bytes_per_second": scrub_bytes_per_second,
            "secret": secret,
            "request_share": request_share,
        }
        block_bytes = integer(block_bytes, "block_bytes", 1, 2**31, ConfigError)
        key_bytes = integer(key_bytes, "key_bytes", 1, KEY_BYTES_LIMIT, ConfigError)
        frame_format = keyed_format(block_bytes, key_bytes)
        checked = {
            name: _CHECKS[name](value, name) for name, value in given.items() if value is not None
        }
        options = _KeyedOptions(layout=frame_format.layout, key_bytes=key_bytes, **checked)
        directory = resolved(path)
        holding = share(
            *(directory, role, KeyedBlocks, options, ["layout", "key_bytes", *checked]),
            partial(_opening, directory, role, options, frame_format),
        )
        return cls(holding, block_bytes, key_bytes)

    @property
    def is_owner(self) -> bool:
        """Whether this process writes. In a reader ``put`` stores nothing, and is counted."""
        return self._shared.is_owner

    @property
    def request_blocks(self) -> int:
        """Most blocks of one chain of parents, by ``request_share``; 0 in a reader.

        For callers that know the length of a request before a block whose parent was evicted.
        """
        writer = self._guarded().writer
        return 0 if writer is None else writer.request_blocks

    # ---- blocks --------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[Key],
        sources: Sequence[Any],
        parents: Sequence[Key | None] | None = None,
        *,
        wait: float = 1.0,
    ) -> list[bool]:
        """Queue blocks; return for each whether it is stored or queued.

        Shapes:
            ``sources[i]`` has exactly ``block_bytes`` bytes: a NumPy array, a torch tensor or bytes, of any dtype and
            shape. A contiguous one on the host is copied once.

        A key that is already stored keeps its bytes and its parent, and counts as used. ``parents[i]`` is the key of
        the parent of block i (None for none): it must be stored, queued, or earlier in this call. A parent is evicted
        after its children. False means that the queue was full for ``wait`` seconds, the parent is unknown, the disk
        failed, or this is a reader; it is counted, and other blocks are not affected. Blocks are durable after
        ``flush``; a queued block that cannot be written is lost.

        Raises:
            ValueError: for a bad argument, before anything is stored.
        """
        shared = self._guarded()
        blocks = self._named(keys)
        sources = self._as_many(sources, blocks, "sources")
        above: list[NamedBlock | None] = [None] * len(blocks)
        if parents is not None:
            parents = self._as_many(parents, blocks, "parents")
            above = [None if p is None else self._name(p) for p in parents]
        arrays = [self._bytes(i, source, "sources") for i, source in enumerate(sources)]
        return shared.put(blocks, arrays, above, _wait(wait))

    def get(self, keys: Sequence[Key], targets: Sequence[Any]) -> list[bool]:
        """Copy blocks into ``targets``, verified; return for each whether it was copied.

        Shapes:
            ``targets[i]`` has exactly ``block_bytes`` bytes: a writable, contiguous NumPy array, bytearray or torch
            tensor on the host, of any dtype and shape.

        A target is written completely or not at all. A bad block is a miss: it is counted and deleted with its
        descendants, and later keys are still read. Blocks stored at the start of the call are not evicted before it
        returns.

        Raises:
            ValueError: for a bad argument, before anything is written.
        """
        shared = self._guarded()
        blocks = self._named(keys)
        targets = self._as_many(targets, blocks, "targets")
        arrays = [self._bytes(i, target, "targets", into=True) for i, target in enumerate(targets)]
        return shared.get(blocks, arrays)

    def exists(self, keys: Sequence[Key]) -> int:
        """Return the number of leading keys that are stored, not queued. Neither pins blocks nor marks them used."""
        return self._guarded().exists(self._named(keys))

    def listing(self) -> list[tuple[bytes, bytes]]:
        """Return the ``block_id`` and the key of every stored block, in no order. Cost: one page read per block."""
        return [(bytes(block_id), key) for block_id, key in self._guarded().listing()]

    def block_id(self, key: Key) -> bytes:
        """Return the 16-byte id of the block under a key."""
        return self._name(key).key

    def delete(self, keys: Sequence[Key]) -> int:
        """Delete blocks and their descendants; return the number of blocks deleted.

        A block that is pinned, or has a pinned descendant, is kept. Waits for the commit of queued blocks.

        Raises:
            StoreBusy: in a reader.
        """
        return self._guarded().delete(self._named(keys))

    def pin(self, keys: Sequence[Key]) -> list[bool]:
        """Pin blocks, and with them their ancestors, against eviction and ``delete``. Pins are counted.

        Returns for each key whether it is stored; only stored blocks are pinned. Pins are in memory: they end with
        ``unpin`` or with the process.

        Raises:
            StoreBusy: in a reader.
        """
        return self._guarded().pin(self._named(keys))

    def unpin(self, keys: Sequence[Key]) -> None:
        """Release one pin of each key; keys without a pin are ignored.

        Raises:
            StoreBusy: in a reader.
        """
        self._guarded().unpin(self._named(keys))

    # ---- the store -----------------------------------------------------------------------------

    def clear(self) -> int:
        """Delete every block, pinned or not; return the number deleted."""
        return self._guarded().clear()

    def flush(self) -> None:
        """Wait until every block accepted before is durable against power loss."""
        self._guarded().flush()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        return self._guarded().stats()

    # ---- arguments -----------------------------------------------------------------------------

    def _guarded(self) -> KeyedBlocks:
        self._shared.check_open()
        return self._shared

    def _named(self, keys: Sequence[Key]) -> list[NamedBlock]:
        return [self._name(key) for key in several(keys, "keys", "keys")]

    def _name(self, key: Key) -> NamedBlock:
        return named(key, self.key_bytes, self._shared.keys_root)

    @staticmethod
    def _as_many(given: object, blocks: Sequence[NamedBlock], what: str) -> list[Any]:
        found = several(given, what, "one for each key")
        if len(found) != len(blocks):
            msg = f"{what}: expected one for each of {len(blocks)} keys, found {len(found)}"
            raise ValueError(msg)
        return found

    def _bytes(self, number: int, buffer: Any, what: str, *, into: bool = False) -> Bytes:
        """Return a caller's buffer as the bytes of a block; a view of it for a target."""
        array = writable_bytes(buffer) if into else host_bytes(buffer)
        if array is None:
            msg = (
                f"{what}[{number}]: expected a writable, contiguous array, bytearray or tensor on the host"
                if into
                else f"{what}[{number}]: expected a NumPy array, a torch tensor or bytes"
            )
            raise ValueError(f"{msg}, found {type(buffer).__name__}")
        if array.nbytes != self.block_bytes:
            msg = f"{what}[{number}] has {array.nbytes} bytes, expected exactly {self.block_bytes}"
            raise ValueError(msg)
        return array


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyedOptions:
    """Validated options of one opening, with defaults for omitted ones."""

    layout: Layout
    key_bytes: int
    ssd_bytes: int = 4 << 30
    preallocate: bool = False
    on_removed: Callable[[bytes], object] | None = None
    scrub_bytes_per_second: int = 0
    secret: bool = False
    request_share: float = REQUEST_SHARE


def _opening(
    directory: Path,
    role: Literal["auto", "owner", "reader"],
    options: _KeyedOptions,
    frame_format: FrameFormat,
) -> tuple[SsdOptions, Callable[[SsdTier], KeyedBlocks]]:
    """Return the options of the tier, and the function that builds the open store on it."""

    def build(ssd: SsdTier, secret: bytes | None) -> KeyedBlocks:
        return KeyedBlocks(
            frame_format=frame_format,
            ssd=ssd,
            keys_root=keys_root(secret),
            on_removed=options.on_removed,
            scrub_bytes_per_second=options.scrub_bytes_per_second,
            request_share=options.request_share,
        )

    form = StoreFormat(frame_format.layout, frame_format.block_tokens, options.key_bytes)
    return tier_opening(directory, role, options, form, frame_format.frame_bytes, build)


def _listener(value: object, name: str) -> Callable[[bytes], object]:
    """Return a function. Raises ``ConfigError`` for a value that cannot be called."""
    if not callable(value):
        raise ConfigError(f"{name} must be a function that takes a block_id, found {brief(value)}")
    return value


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "ssd_bytes": size_bytes,
    "preallocate": partial(flag, error=ConfigError),
    "on_removed": _listener,
    "scrub_bytes_per_second": size_bytes,
    "secret": partial(flag, error=ConfigError),
    "request_share": share_of,
}
"""Validation of each optional argument."""


def _wait(given: object) -> float:
    """Return a wait in seconds. Raises ``ValueError`` for any other value."""
    wait = number(given, "wait", "seconds, 0 or more")
    if wait < 0:
        raise ValueError(f"wait must be seconds, 0 or more, found {brief(given)}")
    return wait
