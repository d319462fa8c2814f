"""Wiring for callers with their own keys: options to a store of blocks of one size."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from kvstore.blocks.keyed import Bytes, KeyedBlocks
from kvstore.blocks.keys import Key, NamedBlock, keyed_format, keys_root, named
from kvstore.checks import ROLES, choice, flag, number, several
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
    """Blocks of one size under keys that their callers choose, on SSD.

    For engines that hash by themselves. A key is up to ``key_bytes`` bytes, or a text, which stands
    for its UTF-8 bytes. It is stored whole and compared on every read, so two keys never share a
    block. What a key must cover (model, formats, tenant, ...) is its caller's business.

    A context manager; leaving it flushes and closes. One that is dropped without ``close`` is closed
    in the background. Opening the same directory again in one
    process shares the first opening, counted; options that differ from the first one's are refused.
    Forked children must reopen. Buffers belong to the caller: nothing keeps one after its call returned.

    Threads: every method may be called from any thread of the process that opened it.
    """

    def __init__(self, holding: Share[KeyedBlocks], block_bytes: int, key_bytes: int) -> None:
        """Take part in an opening; use ``open``."""
        self._holding = holding
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
        """Open the store in directory ``path``, creating it if need be.

        An option of None is left out: it has its default, or in a store that this process has open
        already, its value there. ``ssd_bytes`` is the hard cap of the file, in bytes or as text;
        4 GiB by default.
        ``role="auto"`` owns the store if nobody does and reads it otherwise. ``preallocate`` takes
        the disk space now, all of it or none. ``on_removed`` is called with the ``block_id`` of each block that the
        owner evicts, deletes or finds bad, in any thread and under a lock: it must only take note.
        ``scrub_bytes_per_second`` lets the owner check every block in turn, in the background, at that
        rate; 0 does not. ``secret`` hashes keys under a random secret, in a file of the store's
        directory; a store is made with or without one, for good. ``request_share`` is the most that a
        chain of parents may take of the store, in (0, 1], by default a half: what hangs on a longer one
        is not stored, and counted among ``dropped_blocks``.

        Raises:
            ConfigError: for options that cannot work, such as a cap below 8 blocks, or that differ
                from those with which this process has the store open; each is named.
            LayoutMismatch: if the store holds blocks of another size or key length, or of a
                ``PrefixCache``, or has a secret and is opened without or the other way round; it is
                left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or a reader finds none.
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
        """Say whether this process writes; a reader's ``put`` is a counted no-op."""
        return self._shared.is_owner

    @property
    def request_blocks(self) -> int:
        """Most blocks of one chain of parents that are stored, by ``request_share``; 0 in a reader.

        For callers that know how much of a request lies before a block whose parent is gone.
        """
        owned = self._guarded().owned
        return 0 if owned is None else owned.request_blocks

    # ---- blocks --------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[Key],
        sources: Sequence[Any],
        parents: Sequence[Key | None] | None = None,
        *,
        wait: float = 1.0,
    ) -> list[bool]:
        """Queue blocks; return for each whether it is stored or queued now.

        Shapes:
            ``sources[i]`` holds exactly ``block_bytes`` bytes: a NumPy array, a torch tensor or
            bytes, of any dtype and shape. Contiguous ones on the host are copied once.

        A key that is there already keeps its bytes and its parent, and becomes recent. With
        ``parents``, ``parents[i]`` is the key that block i hangs on (None for none): it must be
        stored, queued or earlier in this call, and it is evicted after what hangs on it. A False
        means that the queue stayed full for ``wait`` seconds, the parent is unknown, the disk
        failed, or this is a reader; it is counted, and nothing else is lost by it. Stored for
        good is what ``flush`` has returned after, and a queued block that the disk refuses is lost.

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
        """Copy blocks into ``targets``, verified; return for each whether it is there now.

        Shapes:
            ``targets[i]`` takes exactly ``block_bytes`` bytes: a writable, contiguous NumPy array,
            bytearray or torch tensor on the host, of any dtype and shape.

        A target is written wholly or not at all. A bad block is a miss, counted, and removed with
        all that hangs on it; keys after it are still served. What was stored when the call began
        is not evicted before it returns.

        Raises:
            ValueError: for a bad argument, before anything is written.
        """
        shared = self._guarded()
        blocks = self._named(keys)
        targets = self._as_many(targets, blocks, "targets")
        arrays = [self._bytes(i, target, "targets", into=True) for i, target in enumerate(targets)]
        return shared.get(blocks, arrays)

    def exists(self, keys: Sequence[Key]) -> int:
        """Return how many leading keys are stored. Protects nothing, and leaves no trace.

        A queued block counts from its commit on.
        """
        return self._guarded().exists(self._named(keys))

    def listing(self) -> list[tuple[bytes, bytes]]:
        """Return the ``block_id`` and the key of every stored block, in no particular order.

        Cost: one page read of each block.
        """
        return [(bytes(block_id), key) for block_id, key in self._guarded().listing()]

    def block_id(self, key: Key) -> bytes:
        """Return what the tier knows a key by: 16 bytes."""
        return self._name(key).key

    def delete(self, keys: Sequence[Key]) -> int:
        """Remove blocks and all that hangs on them; return how many went, those included.

        A block that is pinned, or has a pinned one hanging on it, stays. Queued blocks are waited
        for.

        Raises:
            StoreBusy: in a reader.
        """
        return self._guarded().delete(self._named(keys))

    def pin(self, keys: Sequence[Key]) -> list[bool]:
        """Protect blocks, and what they hang on, from eviction and ``delete``; counted.

        Returns for each key whether it is stored; only those are pinned. Pins live in memory: they
        end with ``unpin`` or with the process.

        Raises:
            StoreBusy: in a reader.
        """
        return self._guarded().pin(self._named(keys))

    def unpin(self, keys: Sequence[Key]) -> None:
        """Give back one pin of each key. Keys without one are ignored.

        Raises:
            StoreBusy: in a reader.
        """
        self._guarded().unpin(self._named(keys))

    # ---- the store -----------------------------------------------------------------------------

    def clear(self) -> int:
        """Remove every block, pinned or not; return how many went."""
        return self._guarded().clear()

    def flush(self) -> None:
        """Return when every block accepted before survives power loss."""
        self._guarded().flush()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain JSON values."""
        return self._guarded().stats()

    # ---- arguments -----------------------------------------------------------------------------

    def _guarded(self) -> KeyedBlocks:
        self._shared.guard()
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
        """Return a caller's buffer as a block's bytes, a view of it if it is a target."""
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
    """Options of one opening, checked, and the default of each that was left out."""

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
    """Return how the tier of a directory is opened, and what builds an open store on it."""

    def build(ssd: SsdTier, secret: bytes | None) -> KeyedBlocks:
        return KeyedBlocks(
            frame_format=frame_format,
            ssd=ssd,
            keys_root=keys_root(secret),
            on_removed=options.on_removed,
            scrub_bytes_per_second=options.scrub_bytes_per_second,
            request_share=options.request_share,
        )

    return tier_opening(
        directory,
        role,
        StoreFormat(frame_format.layout, frame_format.block_tokens, options.key_bytes),
        build,
        frame_bytes=frame_format.frame_bytes,
        capacity_bytes=options.ssd_bytes,
        preallocate=options.preallocate,
        has_secret=options.secret,
    )


def _listener(value: object, name: str) -> Callable[[bytes], object]:
    """Return a function. Raises ``ConfigError`` for what cannot be called."""
    if not callable(value):
        msg = f"{name} must be a function that takes a block_id, found {brief(value)}"
        raise ConfigError(msg)
    return value


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "ssd_bytes": size_bytes,
    "preallocate": partial(flag, error=ConfigError),
    "on_removed": _listener,
    "scrub_bytes_per_second": size_bytes,
    "secret": partial(flag, error=ConfigError),
    "request_share": share_of,
}
"""The check of each option that may be left out."""


def _wait(given: object) -> float:
    """Return a wait as seconds. Raises ``ValueError`` for what is none."""
    wait = number(given, "wait", "seconds, 0 or more")
    if wait < 0:
        msg = f"wait must be seconds, 0 or more, found {brief(given)}"
        raise ValueError(msg)
    return wait
