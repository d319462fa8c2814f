"""One namespace's view of the tiers: every method an engine calls.

It turns tokens into identities, checks arguments, and leaves the rest to the shared tiers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.entries import Entries, Stored, host_entries
from kvstore.cache.jobs import Event, Load, Save, await_event
from kvstore.cache.match import Match, PinnedPages
from kvstore.cache.shared import SharedTiers
from kvstore.checks import flag, integer, number, positive, several, text
from kvstore.distribution import require_torch
from kvstore.errors import ConfigError, StoreError, brief
from kvstore.identity.block import BlockHash, ImageSpan
from kvstore.identity.chain import Prefix
from kvstore.identity.hash import as_tokens, identify, namespace_digest
from kvstore.identity.namespace import Namespace
from kvstore.index import plan
from kvstore.layout import Layout
from kvstore.layout.replay import ReplayHook, ReplayRequest, WindowSnapshot
from kvstore.output.sizes import size_bytes
from kvstore.tier.pages import Pages
from kvstore.tier.window import check_snapshot, copy_of
from kvstore.transfer.threads import Job

if TYPE_CHECKING:
    import torch

    from kvstore.tier.paged import PagedEntries

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: any sequence of integers, or a one-dimensional integer array."""


class Scope:
    """A cache as one namespace sees it.

    Scopes of one store share its tiers, capacity and counters, and never each other's blocks.

    Threads: every method may be called from any thread; a ``Match`` belongs to one.
    """

    def __init__(
        self, shared: SharedTiers, namespace: Namespace, ssd_quota: int | None = None
    ) -> None:
        self._shared = shared
        self._holding: Any = None
        """The share in the opening of the store that this scope needs, kept by every scope of it."""
        self._roots: frozenset[BlockHash] = frozenset()
        """Roots of its generations so far: matches of an older one are still its own."""
        self._bind(namespace)
        if ssd_quota is not None:
            shared.set_quota(self._root, asdict(self.namespace), ssd_quota)

    def _bind(self, namespace: Namespace) -> None:
        """Fix the root of every chain of this scope."""
        self._line = self._root_of(replace(namespace, generation=0)).hex()
        generation = self._shared.generation(self._line, namespace.generation)
        self.namespace = replace(namespace, generation=generation)
        """Whose cache this is, with the generation in force."""
        self._root = self._root_of(self.namespace)
        self._roots |= {self._root}

    def _root_of(self, namespace: Namespace) -> BlockHash:
        shared = self._shared
        return namespace_digest(
            shared.layout.fingerprint, shared.block_tokens, namespace, shared.secret
        )

    @property
    def layout(self) -> Layout:
        """What the model caches."""
        return self._shared.layout

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: the unit of reuse."""
        return self._shared.block_tokens

    @property
    def role(self) -> str:
        """``"owner"`` if this process writes, ``"reader"`` otherwise."""
        return "owner" if self._shared.is_owner else "reader"

    def scope(self, namespace: Namespace, *, ssd_quota: int | str | None = None) -> Scope:
        """Return the same tiers as seen by another tenant, adapter or model revision.

        ``ssd_quota`` caps what that namespace holds on SSD, through all its generations: bytes of its
        frames in the file, or text such as ``"4GiB"``. At its quota it evicts its own blocks and no
        others'; what is over is evicted now. It is recorded and holds, after a restart too, until
        another is given; one of the store's cap or more never binds, and with 0 nothing is stored.
        A reader ignores it.

        Raises:
            ConfigError: if it is no size, or less than one block.
            StoreError: if it cannot be recorded.
        """
        self._shared.guard()
        given: object = namespace
        if not isinstance(given, Namespace):
            msg = f"namespace must be a kvstore.Namespace, found {brief(given)}"
            raise ConfigError(msg)
        scope = Scope(self._shared, namespace, quota_bytes(ssd_quota))
        scope._holding = self._holding
        return scope

    def _prefix(self, tokens: Tokens, images: Sequence[ImageSpan]) -> Prefix:
        self._shared.guard()
        self._follow_generation()
        images = several(images, "images", "ImageSpan values")
        if images:
            tokens = as_tokens(tokens)
        count = len(tokens) if images else 0
        for image in images:
            given: object = image
            if not isinstance(given, ImageSpan):
                msg = f"images must be ImageSpan values, found {type(given).__name__}"
                raise ValueError(msg)
            if image.stop > count:
                msg = f"image span [{image.start}, {image.stop}) ends beyond {count} tokens"
                raise ValueError(msg)
        # A match outlives the call; its caller's buffer may not.
        ids, hashes = identify(self._root, tokens, self.block_tokens, images)
        return Prefix(self._root, ids, hashes, images, self.block_tokens)

    def _own(self, match: Match) -> Match:
        """Return a match that this scope found, or raise ``ValueError`` for any other.

        Another store's names blocks that are not here, another namespace's blocks that its tokens
        do not name.
        """
        given: object = match
        if not isinstance(given, Match):
            msg = f"match must come from lookup, found {brief(given)}"
            raise ValueError(msg)
        if not match.is_of(self._shared):
            msg = f"the match is of another store than {self._shared.ssd.path}; look up in this one"
            raise ValueError(msg)
        if match.prefix.root not in self._roots:
            msg = (
                f"the match is of another namespace than {self.namespace}; look up in the scope that "
                "reads it"
            )
            raise ValueError(msg)
        return match

    # ---- global KV -----------------------------------------------------------------------------

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
        """Keep the GLOBAL entries of tokens ``[start, len(tokens))``.

        ``tokens`` is the whole request: entries depend on all of it. Tokens after the last whole
        block are ignored. Blocks that are there already stay as they are: the first writer wins.
        Blocks are framed now and written in the background; ``flush`` waits for them.

        Shapes:
            ``entries[group]``: uint8 ``[len(layers), (len(tokens) - start) // tokens_per_entry,
            entry_bytes]``, numpy or torch, for exactly the GLOBAL groups.

        Units:
            ``wait`` and ``ttl`` are seconds; ``wait`` is the most to wait for room in the queue.
            A ``ttl`` of None keeps blocks until eviction. ``pin`` keeps them until ``unpin``.

        Raises:
            ValueError: if ``start`` is not a block boundary or entries do not fit the layout.

        Cost: one copy and one checksum of what is new, in the caller's thread.
        """
        ids = as_tokens(tokens)
        start = _place(start, "start", self.block_tokens, len(ids))
        wait = number(wait, "wait", "seconds")
        ttl = _ttl(ttl)
        pin = flag(pin, "pin")
        arrays = host_entries(self.layout, entries, start, len(ids))
        prefix = self._prefix(ids, images)
        return self._shared.store(
            prefix, asdict(self.namespace), arrays, start, wait=wait, ttl=ttl, is_pinned=pin
        )

    def unpin(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> None:
        """Take back the lasting pin that ``store(pin=True)`` put on this prefix."""
        self._shared.owner("unpins").unstick(self._prefix(tokens, images))

    def lookup(
        self,
        tokens: Tokens,
        request_id: str | None = None,
        need_window: bool = False,  # noqa: FBT001, FBT002 - the public contract
        *,
        images: Sequence[ImageSpan] = (),
    ) -> Match:
        """Find the longest prefix of ``tokens`` whose GLOBAL entries are all at hand.

        At least one token is left to compute. What was found is protected for the length of a
        lease; enter the match to protect it for as long as it is entered. ``need_window`` finds
        the longest hit whose window is pooled too, for engines that cannot replay.

        Asked again under one ``request_id``, the same request gets the same match, for as long as
        that match protects anything; other tokens under the id are another request. Ids of
        different namespaces have nothing to do with each other.

        Cost: one SHA-256 per block and one comparison per segment; no disk in the owner.
        """
        prefix = self._prefix(tokens, images)
        return self._shared.lookup(
            prefix,
            request_id=None if request_id is None else text(request_id, "request_id"),
            need_window=flag(need_window, "need_window"),
            is_probe=False,
        )

    def probe(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> Match:
        """Return what ``lookup`` would, without lease, recency or counters."""
        prefix = self._prefix(tokens, images)
        return self._shared.lookup(prefix, request_id=None, need_window=False, is_probe=True)

    def hashes(self, tokens: Tokens, *, images: Sequence[ImageSpan] = ()) -> Sequence[BlockHash]:
        """Return the hash of every whole block of ``tokens``, as this store names it.

        It depends on the layout, the namespace with the generation in force, and the store's secret:
        an engine that names blocks to others asks here, and computes no hash of its own.

        Cost: one SHA-256 per block.
        """
        return self._prefix(tokens, images).hashes

    def release(self, request_id: str) -> None:
        """Forget the match that ``lookup`` gave to ``request_id``."""
        self._shared.forget_request((self._root, text(request_id, "request_id")))

    def read(self, match: Match, timeout: float | None = None) -> Entries:
        """Copy the entries of a match to host arrays, verified.

        A bad or missing block shortens the result and the match; it never raises and never
        half-fills a block. So does what is not there after ``timeout`` seconds.

        Cost: reads and checks on as many threads as the store was opened with.
        """
        self._shared.guard()
        return self._shared.read(self._own(match), _timeout(timeout))

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
        """Bring a match to where attention reads it.

        After ``timeout`` seconds nothing more is read, and what is there counts.

        Without ``into``, promote it into pages of the device tier and return its page table; what
        does not fit between pinned pages, or is bad, shortens the result and the match.

        With ``into``, copy entries of tokens ``[start, hit)`` into the engine's own pages in the
        background and return the job. What lies below ``start`` is left alone: it may be another
        request's. ``after`` is a ``threading.Event`` or a device's event, and nothing is written
        before it happened: a device may still have work queued that touches these pages, such as
        zeroing them or the step of their last owner. The job has a pin of its own, so the match need not stay entered, and it never
        touches the match: ``job.loaded_tokens`` and ``job.failed_blocks`` tell what was bad. Layers
        arrive in their order, each for all tokens, so that ``job.wait_group`` lets an engine begin
        with the first ones; with a ``timeout`` blocks arrive in their order, of all layers, so that
        a part is of use.

        Raises:
            ValueError: if ``into`` does not fit the layout or lacks pages of the hit, ``start`` is
                not a multiple of the layout's alignment within the hit, or ``after`` has no ``into``.
        """
        self._shared.guard()
        self._own(match)
        timeout = _timeout(timeout)
        if into is None and after is not None:
            msg = "after is for pages of an engine, found no such pages; give into too"
            raise ValueError(msg)
        if into is None:
            return self._shared.load(match, timeout)
        start = _place(start, "start of a load", self.layout.alignment, match.hit_tokens)
        target = self._paged(into, start, match.hit_tokens)
        load = Load(
            prefix=match.prefix,
            resident=match.resident_blocks,
            target=target,
            start=start,
            stop=match.hit_tokens,
            hold=self._shared.hold_blocks(match),
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
        """Keep the entries of tokens ``[start, stop)`` out of the engine's own pages, in the background.

        As ``store``, with ``job.stored`` for its result. ``tokens`` must all be accepted: nothing of
        a draft. ``after`` is a ``threading.Event`` or a device's event, and nothing is read or
        published before it happened. The pages must stay as they are until ``job.done``.

        Units:
            ``wait`` is the most seconds that the background waits for room in the queue.

        Raises:
            ValueError: if ``start`` is no block boundary, or ``pages`` do not fit the layout.

        Cost: one SHA-256 per block in the caller's thread; no copy of what is stored already.
        """
        ids = as_tokens(tokens)
        end = _place(len(ids) if stop is None else stop, "stop", 1, len(ids))
        start = _place(start, "start", self.block_tokens, end)
        wait = number(wait, "wait", "seconds")
        ttl = _ttl(ttl)
        pin = flag(pin, "pin")
        prefix = self._prefix(ids, images).cut(end // self.block_tokens)
        save = Save(
            prefix=prefix,
            namespace=asdict(self.namespace),
            source=self._paged(pages, start, len(prefix.tokens)),
            start=start,
            after=_event(after),
            wait=wait,
            ttl=ttl,
            is_pinned=pin,
        )
        return self._shared.jobs.save(save)

    def _paged(self, pages: Pages, start: int, stop: int) -> PagedEntries:
        given: object = pages
        if not isinstance(given, Pages):
            msg = f"pages must be kvstore.Pages, found {brief(given)}"
            raise ValueError(msg)
        require_torch()  # takes seconds, so only with the first pages
        from kvstore.tier.paged import PagedEntries

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
        """Let others find device pages that the engine has filled in place, without a copy.

        ``pages`` came from ``device.allocate`` and hold tokens ``[start, ...)``; the whole blocks of
        ``[start, upto)`` are shared, all of them accepted. Waits for ``after`` first. They stay
        pinned until ``pages.release()``. Nothing is written to SSD: ``save`` does that.

        Returns the token up to which the device tier now holds this prefix; 0 if what lies before
        ``start`` is not in it, and then the pages stay private.

        Raises:
            ValueError: if ``start`` is no block boundary, or the pages were released or hold less.
            StoreError: if ``after`` did not happen in time.
        """
        ids = as_tokens(tokens)
        end = _place(len(ids) if upto is None else upto, "upto", 1, len(ids))
        start = _place(start, "start", self.block_tokens, end)
        prefix = self._prefix(ids, images).cut(end // self.block_tokens)
        self._own_pages(pages)
        if len(prefix.tokens) - start > pages.tokens:
            msg = f"pages hold {pages.tokens} tokens, expected {len(prefix.tokens) - start}"
            raise ValueError(msg)
        if not await_event(_event(after)):
            msg = (
                "the event that these pages wait for did not happen in time; nothing was published"
            )
            raise StoreError(msg)
        return self._shared.publish(prefix, start, pages)

    def _own_pages(self, pages: PinnedPages) -> None:
        _check_pages(pages, self._shared)

    @property
    def device(self) -> Device:
        """The device tier: ``gather`` entries from loaded pages."""
        self._shared.guard()
        return Device(self._shared)

    # ---- window KV -----------------------------------------------------------------------------

    def put_window(
        self, tokens: Tokens, snapshot: WindowSnapshot, *, images: Sequence[ImageSpan] = ()
    ) -> bool:
        """Keep a copy of the window that ends the prefix ``tokens[:snapshot.stop]``.

        Returns False if it was not kept: the pool had no room, or the snapshot's ``source`` is
        ``"replay"`` (an engine folded the replay into its prefill) and there is one already. Rows
        older than ``window_rows`` are cut off.

        Raises:
            ValueError: if the snapshot could never serve a hit of this layout.
        """
        check_snapshot(snapshot, self.layout, self.block_tokens)
        prefix = self._prefix(tokens, images)
        if snapshot.stop > len(prefix.tokens):
            msg = f"the snapshot stops at {snapshot.stop}, beyond the {len(prefix.tokens)} tokens given"
            raise ValueError(msg)
        is_replayed = snapshot.source == "replay"
        if is_replayed:  # folded into a prefill, so no hook was asked
            rows = min(snapshot.stop - snapshot.start, self.layout.window_tokens)
            self._shared.count_replay(rows)
        return self._shared.put_window(prefix, snapshot, is_replayed=is_replayed)

    def pooled_windows(self) -> frozenset[bytes]:
        """Return the hashes of all prefixes, of any namespace, whose window is pooled here.

        For a scheduler in another process, which cannot ask ``lookup`` for a window. What is in it
        may be evicted a moment later.
        """
        self._shared.guard()
        return self._shared.pooled_windows()

    def window(self, match: Match, hook: ReplayHook | None = None) -> WindowSnapshot:
        """Return the window of one match; see ``windows``."""
        return self.windows([(match, hook)])[0]

    def windows(self, pairs: Sequence[tuple[Match, ReplayHook | None]]) -> list[WindowSnapshot]:
        """Return the window of each match: from the pool, or rebuilt by its hook.

        Requests that share a hook are handed over in one call. Hooks run in this thread with no
        lock held. ``source`` tells where a window came from: ``"pool"``, ``"replay"``, or
        ``"none"`` when there is nothing to have (no hit, or a model without windows).

        Raises:
            ValueError: if a window is missing and there is no hook, or a hook returns something
                that does not cover what was asked for.
        """
        self._shared.guard()
        found: dict[int, WindowSnapshot] = {}
        asked: list[tuple[ReplayHook, list[int], list[ReplayRequest]]] = []
        checked = [self._pair(pair) for pair in several(pairs, "pairs", "(match, hook) pairs")]
        for position, (match, hook) in enumerate(checked):
            if plan.replay(match.hit_tokens, match.floors) is None:
                found[position] = _from_pool(match)
                continue
            if hook is None:
                msg = (
                    f"the window of a hit at {match.hit_tokens} is not in the pool and there is no "
                    "replay hook; pass one, or look up with need_window=True"
                )
                raise ValueError(msg)
            # By equality: a bound method is a new object each time it is named.
            batch = next((batch for batch in asked if batch[0] == hook), None)
            if batch is None:
                batch = (hook, [], [])
                asked.append(batch)
            batch[1].append(position)
            batch[2].append(_request(match))
        for hook, places, requests in asked:
            returned: object = hook(requests)
            if not isinstance(returned, Sequence):
                msg = f"the replay hook returned {type(returned).__name__}, expected a list of snapshots"
                raise ValueError(msg)
            snapshots = list(returned)
            if len(snapshots) != len(requests):
                msg = f"the replay hook returned {len(snapshots)} snapshots for {len(requests)} requests"
                raise ValueError(msg)
            for position, request, snapshot in zip(places, requests, snapshots, strict=True):
                self._check_replayed(request, snapshot)
                self._shared.count_replay(request.stop - request.start)
                match = checked[position][0]
                self._shared.put_window(match.prefix, snapshot, is_replayed=True)
                found[position] = replace(snapshot, source="replay")
        return [found[position] for position in range(len(checked))]

    def _pair(self, pair: object) -> tuple[Match, ReplayHook | None]:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            msg = f"pairs must be (match, hook) pairs, found {brief(pair)}"
            raise ValueError(msg)
        match, hook = pair
        if hook is not None and not callable(hook):
            msg = f"a replay hook must be a function of requests, found {brief(hook)}"
            raise ValueError(msg)
        return self._own(match), hook

    def _check_replayed(self, request: ReplayRequest, snapshot: WindowSnapshot) -> None:
        given: object = snapshot
        if not isinstance(given, WindowSnapshot):
            msg = f"the replay hook returned a {type(given).__name__}, expected a WindowSnapshot"
            raise ValueError(msg)
        if snapshot.stop != request.stop or snapshot.start > request.start:
            msg = (
                f"the replay hook returned rows [{snapshot.start}, {snapshot.stop}), "
                f"expected [{request.start}, {request.stop})"
            )
            raise ValueError(msg)
        check_snapshot(snapshot, self.layout, self.block_tokens)

    # ---- the rest ------------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute ``tokens``: what ``worth_loading`` weighs."""
        measured = [
            positive(given, "a measurement", "tokens and seconds") for given in (tokens, seconds)
        ]
        if math.inf in measured:
            msg = f"a measurement must be positive tokens and seconds, both finite, found {brief(tokens)} and {brief(seconds)}"
            raise ValueError(msg)
        self._shared.observe_prefill(*measured)

    def flush(self) -> None:
        """Return when every block accepted before survives power loss."""
        self._shared.guard()
        self._shared.flush()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes of the whole store as plain JSON values."""
        self._shared.guard()
        return self._shared.stats()

    def clear(self, scope: Scope | None = None) -> int:
        """Remove every block of ``scope``'s namespace (default: this one); return how many.

        Device pages in use stay until they are released.
        """
        self._shared.guard()
        target: object = scope if scope is not None else self
        if not isinstance(target, Scope):
            msg = f"scope must be a scope of this store, found {brief(target)}"
            raise ValueError(msg)
        if target._shared is not self._shared:  # noqa: SLF001 - a sibling of this class
            msg = "the scope to clear belongs to another store"
            raise ValueError(msg)
        target._follow_generation()  # noqa: SLF001
        return self._shared.clear(target._root)  # noqa: SLF001

    def bump_generation(self) -> int:
        """Make every block stored so far under this namespace a miss; return the new generation.

        For new weights under an old name. It is recorded in the store, so a restart with the old
        ``generation`` does not go back. Old blocks are not deleted; eviction takes them first
        because nothing uses them any more.

        Raises:
            ConfigError: if it is 2**63 - 1 or more already.
            StoreError: if it cannot be recorded: the medium fails, or records that of as many
                namespaces as a store of its size can. The old one stays in force.
        """
        self._shared.guard()
        self._follow_generation()
        newer = self.namespace.generation + 1
        self._shared.set_generation(self._line, newer)
        self._bind(replace(self.namespace, generation=newer))
        return newer

    def _follow_generation(self) -> None:
        """Go on to the generation that another scope of this namespace has begun."""
        if not self._shared.is_current(self._line, self.namespace.generation):
            self._bind(self.namespace)


def quota_bytes(ssd_quota: int | str | None) -> int | None:
    """Return a quota as bytes, None for none given. Raises ``ConfigError``."""
    return None if ssd_quota is None else size_bytes(ssd_quota, "ssd_quota")


class Device:
    """The device tier as an engine sees it."""

    def __init__(self, shared: SharedTiers) -> None:
        self._shared = shared

    def gather(
        self,
        pages: PinnedPages,
        group: str,
        layer: int,
        entry_indices: torch.Tensor | NDArray[np.integer[Any]] | None,
        dtype: torch.dtype | str,
    ) -> torch.Tensor:
        """Return decoded entries of one layer from loaded pages.

        Shapes:
            ``entry_indices``: int ``[queries, k]``, -1 for none (zeros), or None for all entries
            as one query. Returns ``[queries, k, values]`` of ``dtype`` on the tier's device.

        Raises:
            ValueError: for an unknown group, a layer that owns none, or an index beyond the pages.

        Cost: reads only the rows asked for.
        """
        _check_pages(pages, self._shared)
        known = {g.name: g for g in self._shared.layout.global_groups}
        if text(group, "group") not in known:
            msg = f"unknown GLOBAL group {group!r}, expected one of {', '.join(known)}"
            raise ValueError(msg)
        if pages.is_released:
            msg = "these pages were released, and may hold another prefix by now; load the match again"
            raise ValueError(msg)
        number = integer(layer, "layer")
        return self._shared.device.gather(
            pages.page_ids, known[group], number, entry_indices, dtype
        )

    def allocate(self, count: int) -> PinnedPages:
        """Take ``count`` private pages that the engine fills in place; ``publish`` shares them.

        Raises:
            CapacityError: if there are fewer that are free or that nobody pins.
            ValueError: if ``count`` is no positive integer.
        """
        return self._shared.allocate(integer(count, "count", 1))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Page tensors by group: uint8 ``[pages, layers, entries of a block, entry_bytes]``."""
        return self._shared.device.tensors

    @property
    def page_count(self) -> int:
        """How many pages there are."""
        return self._shared.device.page_count

    @property
    def free_pages(self) -> int:
        """How many hold nothing."""
        return self._shared.device.free_pages


def _place(value: object, name: str, unit: int, limit: int) -> int:
    """Return a token position as an int. Raises ``ValueError`` if it is none, or not on a boundary."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    place = int(value) if is_number else -1  # type: ignore[call-overload]  # narrow ones overflow
    if not 0 <= place <= limit or place % unit:
        what = (
            f"a block boundary (a multiple of {unit})"
            if name == "start"
            else f"a multiple of {unit}"
        )
        msg = f"{name} must be {what} within {limit} tokens, found {value!r}"
        raise ValueError(msg)
    return place


def _timeout(value: float | None) -> float | None:
    return None if value is None else number(value, "timeout", "seconds")


def _ttl(value: float | None) -> float | None:
    return None if value is None else positive(value, "ttl", "seconds or None")


def _event(after: Event | None) -> Event | None:
    """Return an event. Raises ``ValueError`` for what cannot be waited for."""
    given: object = after
    if not (
        given is None
        or isinstance(given, threading.Event)
        or (not isinstance(given, type) and callable(getattr(given, "synchronize", None)))
    ):
        msg = (
            f"after must be a threading.Event or an event with synchronize(), found {brief(given)}"
        )
        raise ValueError(msg)
    return after


def _check_pages(pages: PinnedPages, shared: SharedTiers) -> None:
    """Raise ``ValueError`` for pages that are not of this store's device tier."""
    given: object = pages
    if not isinstance(given, PinnedPages):
        msg = f"pages must come from load or device.allocate, found {brief(given)}"
        raise ValueError(msg)
    if not pages.is_of(shared):
        msg = f"the pages are of another store than {shared.ssd.path}; load the match from this one"
        raise ValueError(msg)


def _request(match: Match) -> ReplayRequest:
    floors = match.floors
    return ReplayRequest(
        start=floors.replay_start,
        stop=match.hit_tokens,
        read_floor=floors.read_floor,
        write_floor=floors.write_floor,
        window_write_floor=floors.window_write_floor,
        tokens=match.tokens,
        images=match.prefix.images,
        pages=match.pages,
        request_id=match.request_id,
    )


def _from_pool(match: Match) -> WindowSnapshot:
    if match.snapshot is not None and match.window_hit:
        return replace(copy_of(match.snapshot), source="pool")
    return WindowSnapshot(match.hit_tokens, match.hit_tokens, {}, "none")


__all__ = ["Device", "Scope", "Tokens"]
