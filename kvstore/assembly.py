"""Wiring: options to objects. The only place that knows which implementation stands for what."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from kvstore.cache import Scope, SharedTiers
from kvstore.cache.scope import quota_bytes
from kvstore.errors import ConfigError
from kvstore.hash import secret_fingerprint
from kvstore.layout import Layout
from kvstore.layout import layout as layout_of
from kvstore.namespace import Namespace
from kvstore.opening import format_text, resolved, secret_for, share, unshare
from kvstore.packing import Packing, frames_of, loses
from kvstore.policy.guarded import METHODS
from kvstore.policy.protocol import Policy
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.sizes import size_bytes
from kvstore.tier.ssd import SsdOptions, SsdTier
from kvstore.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier


class PrefixCache(Scope):
    """The scope that opened a store: what an engine holds.

    A context manager; leaving it flushes and closes. Opening the same directory again in one
    process shares the first opening, counted, with the first one's options.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        layout: Layout | str | Path | Mapping[str, Any],
        namespace: Namespace,
        block_tokens: int = 128,
        ssd_bytes: int | str = "4GiB",
        device: str = "cpu",
        device_bytes: int | str = "256MiB",
        window_bytes: int | str = "64MiB",
        window_ttl: float = 300.0,
        window_rows: int | None = None,
        role: Literal["auto", "owner", "reader"] = "auto",
        clock: Callable[[], float] | None = None,
        preallocate: bool = False,
        debug: bool = False,
        ssd_formats: Mapping[str, str] | str | None = None,
        error_budget: float = math.inf,
        scrub_bytes_per_second: int | str = 0,
        read_threads: int | None = None,
        ssd_quota: int | str | None = None,
        secret: bool = False,
        policy: str | Policy[Any] = "lru",
    ) -> Self:
        """Open the store in directory ``path``, creating it if need be.

        Units:
            Sizes are bytes or text such as ``"4GiB"``; ``window_ttl`` is seconds of ``clock``.

        ``ssd_bytes`` is the hard cap of the file. ``role="auto"`` owns the store if nobody does
        and reads it otherwise. ``window_rows`` is how many rows of a snapshot are kept (default W;
        2W - 2 makes every continuation exact). ``device_bytes=0`` and ``window_bytes=0`` are legal.
        ``clock`` replaces the system's for leases and for every time to live; blocks with one keep
        their expiry across restarts, so such a clock must go on where it stopped.
        ``ssd_formats`` packs float entries at rest: ``{"v": "nvfp4"}``, or one name for every GLOBAL
        group. Entries still go in and come out as the layout says, but what comes out is what packing
        left of them. ``error_budget`` is the most that a block may lose, as the relative
        root-mean-square error of any group; above it, and with a NaN or an infinity, the block is
        stored as it is. The format ``"zstd"`` loses nothing: a group that it names is compressed, in
        blocks that are a page smaller for it. docs/quality.md has what each saves and costs.
        ``scrub_bytes_per_second`` lets the owner read and check every block in turn, in the
        background, at that rate, as bytes or text such as ``"10MiB"``, past the kernel's cache where
        it can; 0 does not. Bad blocks are removed with what hangs on them, and counted.
        ``read_threads`` share a load, its caller included: by default as many as there are processors,
        at most 4. ``ssd_quota`` caps what this ``namespace`` holds on SSD, within the store's cap; see
        ``scope``, which takes one for each.
        ``secret`` hashes under a random secret, in a file of the store's directory, so that nobody who
        knows a prompt knows its hashes; a store is made with or without one, for good.
        ``policy`` orders eviction from SSD: a name that ``kvstore policies`` lists, or an object like
        ``kvstore.policy.protocol.Policy`` that no other store has. What it knew beyond the order of use
        is gone after a restart. One that raises, or names nothing that may go, is replaced by LRU until
        the store is reopened: counted as ``policy_errors``, logged once, and an alarm in ``stats``.
        ``preallocate`` takes the disk space now, all of it or none. ``debug`` poisons window rows when they are freed.

        Raises:
            ConfigError: for options that cannot work, such as a cap below 8 blocks.
            LayoutMismatch: if the store holds blocks of another layout, or has a secret and is
                opened without or the other way round; it is left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or a reader finds none.
        """
        model_layout = layout if isinstance(layout, Layout) else layout_of(layout)
        rows = model_layout.window_tokens if window_rows is None else window_rows
        _check_options(model_layout, namespace, role, window_ttl, rows)
        threads = _threads(read_threads)
        order = _policy(policy)
        packing = _packing(model_layout, ssd_formats, error_budget)
        frame_format = frames_of(model_layout, block_tokens, packing)
        page_bytes = size_bytes(device_bytes, "device_bytes")
        now = clock if clock is not None else time.monotonic
        pool_bytes = size_bytes(window_bytes, "window_bytes")
        scrub_rate = size_bytes(scrub_bytes_per_second, "scrub_bytes_per_second")
        quota = quota_bytes(ssd_quota)
        directory = resolved(path)
        capacity = size_bytes(ssd_bytes, "ssd_bytes")
        key = secret_for(directory, role, is_wanted=secret)
        options = SsdOptions(
            capacity_bytes=capacity,
            frame_bytes=frame_format.frame_bytes,
            format_text=format_text(
                model_layout,
                block_tokens,
                ssd_formats=packing.formats if packing else None,
                secret=secret_fingerprint(key) if key else "",
            ),
            role=role,
            preallocate=preallocate,
            is_mixed=packing is not None,
        )

        def make_device() -> DeviceTier:
            from kvstore.tier.device import DeviceTier  # imports torch: only who loads pays for it

            return DeviceTier(frame_format, page_bytes, device)

        def build(ssd: SsdTier) -> SharedTiers:
            if ssd.is_owner and ssd.fact("layout") is None:
                ssd.set_fact("layout", model_layout.model.encode(errors="replace"))
            window = WindowPool(
                model_layout,
                capacity_bytes=pool_bytes,
                ttl_seconds=window_ttl,
                rows=rows,
                clock=now,
                poison_on_free=debug,
            )
            return SharedTiers(
                frame_format=frame_format,
                ssd=ssd,
                window=window,
                open_device=make_device,
                clock=now,
                wall_clock=clock if clock is not None else time.time,
                secret=key,
                scrub_bytes_per_second=scrub_rate,
                read_threads=threads,
                policy=order,
            )

        holding = share(directory, options, SharedTiers, build)
        try:
            cache = cls(holding.shared, namespace, quota)
            cache._holding = holding
            return cache
        except BaseException:
            unshare(holding)
            raise

    def close(self) -> None:
        """Flush, and release the store when this was its last opening. Idempotent."""
        if self._holding is not None:
            unshare(self._holding)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


READ_THREADS = 4
"""Most threads of a load by default: of four, each reading its next run, a disk has 128 blocks to
work on; more would take processors from the engine."""


def _threads(given: object) -> int:
    """Return how many threads share a load. Raises ``ConfigError`` for what is no such number."""
    if given is None:
        return min(READ_THREADS, len(os.sched_getaffinity(0)))
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        msg = f"read_threads must be a positive integer, found {given!r}"
        raise ConfigError(msg)
    return given


def _policy(given: object) -> Policy[Any] | None:
    """Return a policy by name or as it is, None for LRU. Raises ``ConfigError`` for what is none."""
    if isinstance(given, str):
        if given not in POLICIES:
            msg = f"no policy named {given!r}; expected one of {', '.join(POLICIES)}, or an object"
            raise ConfigError(msg)
        return None if given == "lru" else make_policy(given)
    missing = [name for name in METHODS if not callable(getattr(given, name, None))]
    if isinstance(given, type) or missing:
        lacks = (
            "is a class, expected an object of it" if not missing else f"lacks {', '.join(missing)}"
        )
        msg = f"policy must be a name or a kvstore.policy.protocol.Policy; {given!r} {lacks}"
        raise ConfigError(msg)
    policy: Any = given
    return cast("Policy[Any]", policy)


def _packing(
    layout: Layout, formats: Mapping[str, str] | str | None, error_budget: float
) -> Packing | None:
    """Return how a store packs at rest. Raises ``ConfigError`` for what cannot be a budget."""
    if isinstance(formats, str):
        formats = {group.name: formats for group in layout.global_groups}
    is_number = isinstance(error_budget, int | float) and not isinstance(error_budget, bool)
    if not is_number or not error_budget >= 0:
        msg = f"error_budget must be a relative error of at least 0, found {error_budget!r}"
        raise ConfigError(msg)
    if error_budget != math.inf and not loses(formats or {}):
        msg = f"error_budget is {error_budget}, but nothing is packed: name ssd_formats that lose"
        raise ConfigError(msg)
    return Packing(dict(formats), float(error_budget)) if formats else None


def _check_options(
    layout: Layout, namespace: object, role: str, window_ttl: float, rows: object
) -> None:
    """Raise ``ConfigError`` for an option that cannot work, whatever lies at the path."""
    if not isinstance(namespace, Namespace):
        msg = f"namespace must be a kvstore.Namespace, found {type(namespace).__name__}"
        raise ConfigError(msg)
    if role not in ("auto", "owner", "reader"):
        msg = f"role must be 'auto', 'owner' or 'reader', found {role!r}"
        raise ConfigError(msg)
    if not window_ttl > 0:  # NaN is not
        msg = f"window_ttl must be positive seconds, found {window_ttl}"
        raise ConfigError(msg)
    if isinstance(rows, bool) or not isinstance(rows, int):
        msg = f"window_rows must be an integer, found {rows!r}"
        raise ConfigError(msg)
    if layout.window_tokens and rows < layout.window_tokens - 1:
        msg = (
            f"window_rows must be at least W - 1 = {layout.window_tokens - 1}, found {rows}: "
            "fewer rows serve no hit"
        )
        raise ConfigError(msg)


__all__ = ["PrefixCache", "format_text", "size_bytes"]
