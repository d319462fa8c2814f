"""One namespace's view of an open store: every method that an engine calls.

A scope validates arguments, computes block hashes from tokens, and delegates.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.chains import Chains
from kvstore.cache.device_handle import DeviceHandle
from kvstore.cache.entries import Entries, Stored, StoreOptions, host_entries
from kvstore.cache.jobs import Event, Load, Save, await_event
from kvstore.cache.match import Match, PinnedPages
from kvstore.cache.shared import SharedTiers
from kvstore.checks import flag, is_integer, number, positive, several, text
from kvstore.errors import ConfigError, StoreError, brief
from kvstore.identity.block import BlockHash, ImageSpan
from kvstore.identity.hash import as_tokens
from kvstore.identity.namespace import Namespace
from kvstore.layout import Layout
from kvstore.layout.replay import ReplayHook, WindowSnapshot
from kvstore.output.sizes import size_bytes
from kvstore.tier.engine_pages import Pages
from kvstore.tier.window import check_snapshot
from kvstore.transfer.job import Job

if TYPE_CHECKING:
    from kvstore.tier.engine_copy import PagedEntries

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: any sequence of integers, or a one-dimensional integer array."""


class Scope:
    """A cache as seen by one namespace.

    Scopes of one store share its tiers, capacity and counters, but not blocks.

    Errors: every method raises ``StoreError`` after ``close`` and in a forked child. A missing or corrupt block is a
    shorter hit, never an exception.

    Threads: any, for every method. A ``Match`` belongs to one thread at a time.
    """

    def __init__(
        self, shared: SharedTiers, namespace: Namespace, ssd_quota: int | None = None
    ) -> None:
        self._shared = shared
        self._share: Any = None  # the share of the store's opening, kept alive by all its scopes
        self._chains = Chains(shared, namespace)
        if ssd_quota is not None:
            shared.set_quota(self._chains.root, asdict(self.namespace), ssd_quota)

    @property
    def namespace(self) -> Namespace:
        """The namespace, with the generation in force."""
        return self._chains.namespace

    @property
    def layout(self) -> Layout:
        """The layout of the model's cache."""
        return self._shared.layout

    @property
    def block_tokens(self) -> int:
        """Tokens per block, the unit of reuse."""
        return self._shared.block_tokens

    @property
    def role(self) -> str:
        """``"owner"`` if this process writes the store, otherwise ``"reader"``."""
        return "owner" if self._shared.is_owner else "reader"

    def scope(self, namespace: Namespace, *, ssd_quota: int | str | None = None) -> Scope:
        """Return a scope of another namespace (tenant, adapter or weights) over the same tiers.

        ``ssd_quota`` caps the namespace's bytes on SSD over all its generations, frames included, in bytes or text
        such as ``"4GiB"``. Over its quota a namespace evicts only its own blocks; the excess is evicted now. The quota
        is recorded and stays in force, also after a restart, until another is given. 0 stores nothing. A reader
        ignores it.

        Raises:
            ConfigError: if ``ssd_quota`` is not a size, or above 0 and below one block.
            StoreError: if it cannot be recorded.
        """
        self._shared.check_open()
        given: object = namespace
        if not isinstance(given, Namespace):
            raise ConfigError(f"namespace must be a kvstore.Namespace, found {brief(given)}")
        scope = Scope(self._shared, namespace, quota_bytes(ssd_quota))
        scope._share = self._share
        return scope

    # ---- GLOBAL KV -----------------------------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        entries: Mapping[str, Any],
        start: int = 0,
        wait: float = 1.0,
        ttl: float | None = None,
        pin: bool = False,  # noqa: FBT001, FBT002 - the public contract
        *,
        images: Sequence[ImageSpan] = (),
    ) -> Stored:
        """Store the GLOBAL entries of tokens ``[start, len(tokens))``.

        ``tokens`` is the whole request, because each entry depends on all tokens before it. Tokens after the last
        whole block are ignored. Stored blocks are never overwritten: the first writer wins. Frames are encoded in this
        call and written in the background; ``flush`` waits for them.

        Shapes:
            ``entries[group]``: uint8 ``[len(layers), (len(tokens) - start) // tokens_per_entry, entry_bytes]``, numpy
            or torch, for exactly the GLOBAL groups.

        Units:
            ``wait`` is the most seconds to wait for space in the queue. ``ttl`` is seconds until the blocks expire,
            None for never. ``pin`` keeps the blocks until ``unpin``.

        Raises:
            ValueError: if ``start`` is not a block boundary or entries do not fit the layout.

        Cost: one copy and one checksum of the new blocks, in the caller's thread.
        """
        ids = as_tokens(tokens)
        start = _position(start, "start", self.block_tokens, len(ids))
        arrays = host_entries(self.layout, entries, start, len(ids))
        prefix = self._chains.prefix(ids, images)
        return self._shared.writes.store(prefix, arrays, start, self._options(wait, ttl, pin))

    def unpin(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> None:
        """Remove the persistent pin set by ``store(pin=True)`` on this prefix.

        Raises:
            StoreBusy: in a reader.
        """
        self._shared.require_writer("unpins").unpin(self._chains.prefix(tokens, images))

    def lookup(
        self,
        tokens: Tokens,
        request_id: str | None = None,
        need_window: bool = False,  # noqa: FBT001, FBT002 - the public contract
        *,
        images: Sequence[ImageSpan] = (),
    ) -> Match:
        """Return the longest prefix of ``tokens`` whose GLOBAL entries are stored.

        The hit leaves at least one token to compute. Its blocks are leased for 30 s; enter the match to pin them for
        as long as it is entered. With ``need_window`` a hit counts only if its window is pooled too, for engines that
        cannot replay.

        A second lookup of the same tokens under the same ``request_id`` returns the same match until its lease or pin
        ends. Request ids of different namespaces are independent.

        Cost: one SHA-256 per block and one comparison per index segment. An owner reads no disk; a reader reads the
        store's records.
        """
        prefix = self._chains.prefix(tokens, images)
        return self._shared.lookups.find(
            prefix,
            request_id=None if request_id is None else text(request_id, "request_id"),
            need_window=flag(need_window, "need_window"),
            is_probe=False,
        )

    def probe(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> Match:
        """Return the match of ``lookup`` without a lease, a change of recency, or counters."""
        prefix = self._chains.prefix(tokens, images)
        return self._shared.lookups.find(prefix, request_id=None, need_window=False, is_probe=True)

    def hashes(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> Sequence[BlockHash]:
        """Return the hash of every whole block of ``tokens`` in this store and namespace, for publication by an engine.

        Hashes depend on the layout, the namespace with its generation, and the store's secret. Cost: one SHA-256 per
        block.
        """
        return self._chains.prefix(tokens, images).hashes

    def release(self, request_id: str) -> None:
        """Remove the match of ``request_id`` and release its lease. Unknown ids are ignored."""
        self._shared.lookups.forget((self._chains.root, text(request_id, "request_id")))

    def read(self, match: Match, timeout: float | None = None) -> Entries:
        """Copy the entries of a match to host arrays, verified.

        A bad or missing block, or one not read within ``timeout`` seconds, ends the result and shortens the match. No
        block is returned in part.

        Shapes:
            ``[group]``: uint8 ``[len(layers), result.tokens // tokens_per_entry, entry_bytes]``.

        Raises:
            ValueError: if the match is of another store or namespace.

        Cost: reads and verifies on ``read_threads`` threads, including the caller's.
        """
        self._shared.check_open()
        return self._shared.reads.read(self._chains.check(match), _timeout(timeout))

    @overload
    def load(self, match: Match, *, timeout: float | None = None) -> PinnedPages: ...

    @overload
    def load(
        self,
        match: Match,
        into: Pages,
        start: int = 0,
        *,
        after: Event | None = None,
        timeout: float | None = None,
    ) -> Job: ...

    def load(
        self,
        match: Match,
        into: Pages | None = None,
        start: int = 0,
        *,
        after: Event | None = None,
        timeout: float | None = None,
    ) -> PinnedPages | Job:
        """Load a match into pages of the device tier, or into an engine's own pages.

        No block is read after ``timeout`` seconds; the blocks read until then count.

        Without ``into``: load into device pages and return their page table. A bad block, or a lack of unpinned pages,
        shortens the result and the match.

        With ``into``: copy the entries of tokens ``[start, hit)`` to the engine's pages in the background, and return
        the job. Nothing is written before ``after`` (a ``threading.Event`` or a device event) occurs. The job has its
        own pin, so the match need not stay entered, and reports bad blocks by ``loaded_tokens`` and ``failed_blocks``;
        the match does not change. Without a timeout layers are loaded in order, each for all tokens, for
        ``job.wait_group``; with a timeout blocks are loaded in order, each with all layers, so that a partial result
        is usable.

        Raises:
            ValueError: if the match is of another store or namespace, ``into`` does not fit the layout or lacks pages
                of the hit, ``start`` is not a multiple of the layout's alignment within the hit, or ``after`` is given
                without ``into``.
        """
        self._shared.check_open()
        self._chains.check(match)
        timeout = _timeout(timeout)
        if into is None and after is not None:
            raise ValueError("after is for pages of an engine, found no such pages; give into too")
        if into is None:
            return self._shared.device.load(match, timeout)
        hit = match.hit_tokens
        start = _position(start, "start of a load", self.layout.alignment, hit)
        target = self._paged(into, start, hit)
        load = Load(
            prefix=match.prefix,
            resident=match.resident_blocks,
            target=target,
            start=start,
            stop=hit,
            pins=self._shared.leases.pin(match.prefix, hit // self.block_tokens),
            after=after,
            deadline=math.inf if timeout is None else time.monotonic() + timeout,
        )
        return self._shared.jobs.load(load)

    def save(
        self,
        tokens: Tokens,
        pages: Pages,
        start: int = 0,
        stop: int | None = None,
        after: Event | None = None,
        *,
        wait: float = 1.0,
        ttl: float | None = None,
        pin: bool = False,
        images: Sequence[ImageSpan] = (),
    ) -> Job:
        """Store the entries of tokens ``[start, stop)`` from the engine's own pages, in the background.

        As ``store``; ``job.stored`` is its result. All of ``tokens`` must be accepted, none a draft. ``after`` is a
        ``threading.Event`` or a device event; nothing is read before it occurs. The pages must not change until
        ``job.done``. ``wait`` is the most seconds that the background thread waits for space in the queue.

        Raises:
            ValueError: if ``start`` is not a block boundary, or ``pages`` do not fit the layout.

        Cost: one SHA-256 per block in the caller's thread. Blocks already stored are not copied.
        """
        ids = as_tokens(tokens)
        end = _position(len(ids) if stop is None else stop, "stop", 1, len(ids))
        start = _position(start, "start", self.block_tokens, end)
        prefix = self._chains.prefix(ids, images).cut(end // self.block_tokens)
        save = Save(
            prefix=prefix,
            source=self._paged(pages, start, len(prefix.tokens)),
            start=start,
            after=_event(after),
            options=self._options(wait, ttl, pin),
        )
        return self._shared.jobs.save(save)

    def _options(self, wait: float, ttl: float | None, pin: object) -> StoreOptions:
        return StoreOptions(
            asdict(self.namespace),
            number(wait, "wait", "seconds"),
            None if ttl is None else positive(ttl, "ttl", "seconds or None"),
            flag(pin, "pin"),
        )

    def _paged(self, pages: Pages, start: int, stop: int) -> PagedEntries:
        given: object = pages
        if not isinstance(given, Pages):
            raise ValueError(f"pages must be kvstore.Pages, found {brief(given)}")
        # It imports torch, which only callers with pages need.
        from kvstore.tier.engine_copy import PagedEntries

        paged = PagedEntries(self.layout, pages, stop)
        paged.check(start, stop)
        return paged

    def publish(
        self,
        tokens: Tokens,
        pages: PinnedPages,
        upto: int | None = None,
        after: Event | None = None,
        *,
        start: int = 0,
        images: Sequence[ImageSpan] = (),
    ) -> int:
        """Make device pages that the engine has filled in place available to lookups, without a copy.

        ``pages`` were returned by ``device.allocate`` and contain tokens ``[start, ...)``. The whole blocks of
        ``[start, upto)`` are shared; all their tokens must be accepted. Waits for ``after`` first. The pages stay
        pinned until ``pages.release()``. Nothing is written to SSD; ``save`` does so.

        Returns the token up to which the device tier now contains this prefix. It is 0 if the tier lacks blocks before
        ``start``; then the pages remain private.

        Raises:
            ValueError: if ``start`` is not a block boundary, or the pages were released or are too few.
            StoreError: if ``after`` did not occur in time.
        """
        ids = as_tokens(tokens)
        end = _position(len(ids) if upto is None else upto, "upto", 1, len(ids))
        start = _position(start, "start", self.block_tokens, end)
        prefix = self._chains.prefix(ids, images).cut(end // self.block_tokens)
        self._shared.device.check(pages)
        if len(prefix.tokens) - start > pages.tokens:
            msg = f"pages hold {pages.tokens} tokens, expected {len(prefix.tokens) - start}"
            raise ValueError(msg)
        if not await_event(_event(after)):
            raise StoreError(
                "the event of these pages did not occur in time; nothing was published"
            )
        first = start // self.block_tokens
        return self._shared.device.publish(prefix, first, pages) * self.block_tokens

    @property
    def device(self) -> DeviceHandle:
        """The device tier: gather entries from loaded pages, or allocate pages to fill."""
        self._shared.check_open()
        return DeviceHandle(self._shared.device)

    # ---- window KV -----------------------------------------------------------------------------

    def put_window(
        self, tokens: Tokens, snapshot: WindowSnapshot, *, images: Sequence[ImageSpan] = ()
    ) -> bool:
        """Copy the window that ends the prefix ``tokens[:snapshot.stop]`` to the window pool.

        Returns False if it was not kept: the pool has no space next to pinned windows, or ``snapshot.source`` is
        ``"replay"`` (an engine replayed during its prefill) and the pool already has that window. Rows older than
        ``window_rows`` are cut off.

        Shapes:
            ``snapshot.rows[group]``: uint8 ``[len(layers), (stop - start) // tokens_per_entry, entry_bytes]``, for
            exactly the WINDOW groups.

        Raises:
            ValueError: if the snapshot does not fit the layout, does not end at a block boundary, or has too few rows
                for a hit.

        Cost: one copy of the rows, under the store's lock.
        """
        check_snapshot(snapshot, self.layout, self.block_tokens)
        prefix = self._chains.prefix(tokens, images)
        if snapshot.stop > len(prefix.tokens):
            msg = f"the snapshot stops at {snapshot.stop}, beyond the {len(prefix.tokens)} tokens given"
            raise ValueError(msg)
        return self._shared.windows.put(prefix, snapshot)

    def pooled_windows(self) -> frozenset[bytes]:
        """Return the hashes of all prefixes, of any namespace, whose window is pooled.

        For a scheduler in another process. A window may be evicted after the call.
        """
        self._shared.check_open()
        return self._shared.windows.keys()

    def window(self, match: Match, hook: ReplayHook | None = None) -> WindowSnapshot:
        """Return the window of one match; see ``windows``."""
        return self.windows([(match, hook)])[0]

    def windows(self, pairs: Sequence[tuple[Match, ReplayHook | None]]) -> list[WindowSnapshot]:
        """Return the window of each match: a copy from the pool, or rebuilt by its replay hook.

        A hook is called once with all its requests, in this thread without a lock. ``source`` of the result is
        ``"pool"``, ``"replay"``, or ``"none"`` for no hit or a model without windows.

        Raises:
            ValueError: if a window is missing without a hook, or a hook's result does not cover its request.
        """
        self._shared.check_open()
        return self._shared.windows.of(
            [self._pair(pair) for pair in several(pairs, "pairs", "(match, hook) pairs")]
        )

    def _pair(self, pair: object) -> tuple[Match, ReplayHook | None]:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"pairs must be (match, hook) pairs, found {brief(pair)}")
        match, hook = pair
        if hook is not None and not callable(hook):
            raise ValueError(f"a replay hook must be a function of requests, found {brief(hook)}")
        return self._chains.check(match), hook

    # ---- the store -----------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Report that the engine computed ``tokens`` in ``seconds``, for ``match.worth_loading``.

        Raises:
            ValueError: unless both are positive and finite.
        """
        measured = [
            positive(given, "a measurement", "tokens and seconds") for given in (tokens, seconds)
        ]
        if math.inf in measured:
            msg = f"a measurement must be positive tokens and seconds, both finite, found {brief(tokens)} and {brief(seconds)}"
            raise ValueError(msg)
        self._shared.lookups.observe_prefill(*measured)

    def flush(self) -> None:
        """Wait until every block accepted before is durable against power loss, or counted as dropped.

        Raises:
            StoreError: if blocks could not be written.
        """
        self._shared.check_open()
        self._shared.flush()

    def stats(self) -> dict[str, Any]:
        """Return counters, sizes and alarms of the whole store as plain JSON values.

        Raises:
            StoreError: if the medium cannot be read.
        """
        self._shared.check_open()
        return self._shared.stats()

    def clear(self, scope: Scope | None = None) -> int:
        """Remove every block and window of ``scope``'s namespace (default: this one); return the blocks on SSD.

        Pinned device pages remain until they are released.

        Raises:
            StoreBusy: in a reader.
            ValueError: if ``scope`` is not a scope of this store.
        """
        self._shared.check_open()
        target: object = scope if scope is not None else self
        if not isinstance(target, Scope):
            raise ValueError(f"scope must be a scope of this store, found {brief(target)}")
        if target._shared is not self._shared:  # noqa: SLF001 - a sibling of this class
            raise ValueError("the scope to clear belongs to another store")
        chains = target._chains  # noqa: SLF001
        chains.follow()
        return self._shared.clear(chains.root)

    def bump_generation(self) -> int:
        """Make every block of this namespace a miss from now on, for new weights under an old name.

        Returns the new generation. It is recorded in the store, so a restart with the old ``generation`` does not
        return to the old blocks. They are not deleted; unused, they are evicted first.

        Raises:
            ConfigError: if the new generation exceeds 2**63 - 1.
            StoreBusy: in a reader.
            StoreError: if it cannot be recorded: the medium fails, or the store records the generations of as many
                namespaces as its size allows. The old one stays in force.
        """
        self._shared.check_open()
        return self._chains.begin_generation()


def quota_bytes(ssd_quota: int | str | None) -> int | None:
    """Return a quota in bytes, None if none is given. Raises ``ConfigError``."""
    return None if ssd_quota is None else size_bytes(ssd_quota, "ssd_quota")


def _position(value: object, name: str, unit: int, limit: int) -> int:
    """Return a token position. Raises ``ValueError`` beyond ``limit`` or off a multiple of ``unit``."""
    position = int(value) if is_integer(value) else -1  # NumPy's narrow integers overflow
    if not 0 <= position <= limit or position % unit:
        what = f"a multiple of {unit}"
        what = f"a block boundary ({what})" if name == "start" else what
        raise ValueError(f"{name} must be {what} within {limit} tokens, found {value!r}")
    return position


def _timeout(value: float | None) -> float | None:
    return None if value is None else number(value, "timeout", "seconds")


def _event(after: Event | None) -> Event | None:
    """Return an event or None. Raises ``ValueError`` for anything else."""
    given: object = after
    if not (
        given is None
        or isinstance(given, threading.Event)
        or (not isinstance(given, type) and callable(getattr(given, "synchronize", None)))
    ):
        raise ValueError(
            f"after must be a threading.Event or an event with synchronize(), found {brief(given)}"
        )
    return after


__all__ = ["Scope", "Tokens"]
