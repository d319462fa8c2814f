"""Wiring: options to objects. The only place that knows which implementation stands for what."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from kvstore.cache import Scope, SharedTiers
from kvstore.cache.scope import quota_bytes
from kvstore.checks import ROLES, choice, flag, integer, number, positive, text
from kvstore.distribution import has_torch, install_command, require_torch
from kvstore.errors import ConfigError, brief
from kvstore.frame.at_rest import Packing, frames_of, loses
from kvstore.identity.hash import secret_fingerprint
from kvstore.identity.namespace import Namespace
from kvstore.index.plan import REQUEST_SHARE
from kvstore.layout import Layout
from kvstore.layout import layout as layout_of
from kvstore.output.sizes import share_of, size_bytes
from kvstore.policy.guarded import METHODS
from kvstore.policy.protocol import Policy
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.store.opening import format_text, resolved, secret_for, share, unshare
from kvstore.tier.ssd.tier import SsdOptions, SsdTier
from kvstore.tier.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

logger = logging.getLogger(__name__)


class PrefixCache(Scope):
    """The scope that opened a store: what an engine holds.

    A context manager; leaving it flushes and closes. One that is dropped without ``close`` is closed
    in the background, with the last of its scopes. Opening the same directory again in one
    process shares the first opening, counted; options that differ from the first one's are refused.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        layout: Layout | str | Path | Mapping[str, Any],
        namespace: Namespace,
        block_tokens: int | None = None,
        ssd_bytes: int | str | None = None,
        device: str | None = None,
        device_bytes: int | str | None = None,
        window_bytes: int | str | None = None,
        window_ttl: float | None = None,
        window_rows: int | None = None,
        role: Literal["auto", "owner", "reader"] = "auto",
        clock: Callable[[], float] | None = None,
        preallocate: bool | None = None,
        debug: bool | None = None,
        ssd_formats: Mapping[str, str] | str | None = None,
        error_budget: float | None = None,
        scrub_bytes_per_second: int | str | None = None,
        read_threads: int | None = None,
        ssd_quota: int | str | None = None,
        secret: bool | None = None,
        policy: str | Policy[Any] | None = None,
        request_share: float | None = None,
    ) -> Self:
        """Open the store in directory ``path``, creating it if need be.

        An option of None is left out. Then it has its default (:class:`PrefixOptions`), or in a
        store that this process has open already, its value there. One that is given and differs
        there is refused.

        Units:
            Sizes are bytes or text such as ``"4GiB"``; ``window_ttl`` is seconds of ``clock``.

        ``ssd_bytes`` is the hard cap of the file. ``role="auto"`` owns the store if nobody does
        and reads it otherwise. ``window_rows`` is how many rows of a snapshot are kept (default W;
        2W - 2 makes every continuation exact). ``device_bytes=0`` and ``window_bytes=0`` are legal.
        Both need the extra ``torch``; without it a cache has no device tier, and ``load`` raises.
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
            ConfigError: for options that cannot work, such as a cap below 8 blocks, or that differ
                from those with which this process has the store open; each is named.
            LayoutMismatch: if the store holds blocks of another layout, has a secret and is opened
                without or the other way round, or is open in this process with other groups of
                any lifetime; it is left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or a reader finds none.
        """
        given: dict[str, Any] = {
            "block_tokens": block_tokens,
            "ssd_bytes": ssd_bytes,
            "device": device,
            "device_bytes": device_bytes,
            "window_bytes": window_bytes,
            "window_ttl": window_ttl,
            "window_rows": window_rows,
            "clock": clock,
            "preallocate": preallocate,
            "debug": debug,
            "ssd_formats": ssd_formats,
            "error_budget": error_budget,
            "scrub_bytes_per_second": scrub_bytes_per_second,
            "read_threads": read_threads,
            "secret": secret,
            "policy": policy,
            "request_share": request_share,
        }
        whose: object = namespace
        if not isinstance(whose, Namespace):
            msg = f"namespace must be a kvstore.Namespace, found {brief(namespace)}"
            raise ConfigError(msg)
        choice(role, "role", ROLES, ConfigError)
        quota = quota_bytes(ssd_quota)
        options = PrefixOptions.of(layout, given)
        directory = resolved(path)
        named = ["layout", *(name for name, value in given.items() if value is not None)]
        holding = share(
            *(directory, role, SharedTiers, options, named),
            partial(_opening, directory, role, options),
        )
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
DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "npu", "meta")
"""Kinds of devices in torch's names; checked here, because torch is imported with the first load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Options of one opening, checked: sizes in bytes, and the default of each that was left out."""

    layout: Layout
    window_rows: int
    block_tokens: int = 128
    ssd_bytes: int = 4 << 30
    device: str = "cpu"
    device_bytes: int = 256 << 20
    window_bytes: int = 64 << 20
    window_ttl: float = 300.0
    clock: Callable[[], float] | None = None
    preallocate: bool = False
    debug: bool = False
    ssd_formats: Mapping[str, str] = field(default_factory=dict)
    error_budget: float = math.inf
    scrub_bytes_per_second: int = 0
    read_threads: int = field(
        default_factory=lambda: min(READ_THREADS, len(os.sched_getaffinity(0)))
    )
    secret: bool = False
    policy: str | Policy[Any] = "lru"
    request_share: float = REQUEST_SHARE

    @classmethod
    def of(
        cls, layout: Layout | str | Path | Mapping[str, Any], given: Mapping[str, Any]
    ) -> PrefixOptions:
        """Return checked options; one that is None in ``given`` was left out.

        Raises:
            ConfigError: naming an option that cannot work, whatever lies at the path.
        """
        model_layout = layout if isinstance(layout, Layout) else layout_of(layout)
        checked: dict[str, Any] = {"window_rows": model_layout.window_tokens}
        for name, value in given.items():
            if value is not None:
                checked[name] = _CHECKS[name](value, name)
        if isinstance(checked.get("ssd_formats"), str):
            checked["ssd_formats"] = dict.fromkeys(
                (group.name for group in model_layout.global_groups), checked["ssd_formats"]
            )
        options = cls(layout=model_layout, **checked)
        rows, least = options.window_rows, model_layout.window_tokens - 1
        if rows < least:
            msg = f"window_rows must be at least W - 1 = {least}, found {rows}: fewer rows serve no hit"
            raise ConfigError(msg)
        if options.error_budget != math.inf and not loses(options.ssd_formats):
            msg = (
                f"error_budget is {options.error_budget}, but nothing is packed: name ssd_formats "
                "that lose"
            )
            raise ConfigError(msg)
        if ("device" in checked or checked.get("device_bytes")) and not has_torch():
            msg = f"device and device_bytes need torch, which is not installed; run: {install_command('torch')}"
            raise ConfigError(msg)
        return options

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed at rest, None if they are not."""
        return Packing(dict(self.ssd_formats), self.error_budget) if self.ssd_formats else None


def _opening(
    directory: Path, role: Literal["auto", "owner", "reader"], options: PrefixOptions
) -> tuple[SsdOptions, Callable[[SsdTier], SharedTiers]]:
    """Return how the tier of a directory is opened, and what builds an open store on it."""
    packing = options.packing
    frame_format = frames_of(options.layout, options.block_tokens, packing)
    key = secret_for(directory, role, is_wanted=options.secret)
    ssd_options = SsdOptions(
        capacity_bytes=options.ssd_bytes,
        frame_bytes=frame_format.frame_bytes,
        format_text=format_text(
            options.layout,
            options.block_tokens,
            ssd_formats=packing.formats if packing else None,
            secret=secret_fingerprint(key) if key else "",
        ),
        role=role,
        preallocate=options.preallocate,
        is_mixed=packing is not None,
    )

    def make_device() -> DeviceTier:
        require_torch()  # takes seconds, so only with the first use of the device tier
        from kvstore.tier.device import DeviceTier

        return DeviceTier(frame_format, options.device_bytes, options.device)

    def build(ssd: SsdTier) -> SharedTiers:
        if ssd.is_owner and ssd.fact("layout") is None:
            ssd.set_fact("layout", options.layout.model.encode(errors="replace"))
        if options.device_bytes and not has_torch():
            logger.info(
                "%s has no device tier: torch is not installed; run: %s",
                *(directory, install_command("torch")),
            )
        now = options.clock if options.clock is not None else time.monotonic
        return SharedTiers(
            frame_format=frame_format,
            ssd=ssd,
            window=WindowPool(
                options.layout,
                capacity_bytes=options.window_bytes,
                ttl_seconds=options.window_ttl,
                rows=options.window_rows,
                clock=now,
                poison_on_free=options.debug,
            ),
            open_device=make_device,
            clock=now,
            wall_clock=options.clock if options.clock is not None else time.time,
            secret=key,
            scrub_bytes_per_second=options.scrub_bytes_per_second,
            read_threads=options.read_threads,
            policy=_order(options.policy),
            request_share=options.request_share,
        )

    return ssd_options, build


def _device(value: object, name: str) -> str:
    """Return a device's name. Raises ``ConfigError`` for one that torch does not know."""
    device = text(value, name, ConfigError)
    if re.fullmatch(rf"({'|'.join(DEVICES)})(:[0-9]{{1,3}})?", device) is None:
        msg = f"{name} must be one of {', '.join(DEVICES)}, perhaps with a number such as 'cuda:0', found {brief(value)}"
        raise ConfigError(msg)
    return device


def _clock(value: object, name: str) -> Callable[[], float]:
    """Return a clock. Raises ``ConfigError`` for what cannot be called."""
    if not callable(value):
        msg = f"{name} must be a function that returns seconds, found {brief(value)}"
        raise ConfigError(msg)
    return value


def _formats(value: object, name: str) -> Mapping[str, str] | str:
    """Return formats at rest by group, or the one of all. Raises ``ConfigError``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        msg = f"{name} must be a format or map groups to formats, found {brief(value)}"
        raise ConfigError(msg)
    return dict(value)


def _budget(value: object, name: str) -> float:
    """Return an error budget. Raises ``ConfigError`` for what cannot be one."""
    budget = number(value, name, "a relative error of at least 0", ConfigError)
    if budget < 0:
        msg = f"{name} must be a relative error of at least 0, found {brief(value)}"
        raise ConfigError(msg)
    return budget


def _policy(value: object, name: str) -> str | Policy[Any]:
    """Return a policy's name, or a policy. Raises ``ConfigError`` for what is neither."""
    if isinstance(value, str):
        if value not in POLICIES:
            msg = f"no policy named {value!r}; expected one of {', '.join(POLICIES)}, or an object"
            raise ConfigError(msg)
        return value
    missing = [method for method in METHODS if not callable(getattr(value, method, None))]
    if isinstance(value, type) or missing:
        lacks = (
            "is a class, expected an object of it" if not missing else f"lacks {', '.join(missing)}"
        )
        msg = f"{name} must be a name or a kvstore.policy.protocol.Policy; {brief(value)} {lacks}"
        raise ConfigError(msg)
    return cast("Policy[Any]", value)


def _order(policy: str | Policy[Any]) -> Policy[Any] | None:
    """Return the policy to evict by, None for LRU."""
    if isinstance(policy, str):
        return None if policy == "lru" else make_policy(policy)
    return policy


_flag = partial(flag, error=ConfigError)
_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "block_tokens": partial(integer, low=1, error=ConfigError),
    "ssd_bytes": size_bytes,
    "device": _device,
    "device_bytes": size_bytes,
    "window_bytes": size_bytes,
    "window_ttl": partial(positive, what="seconds", error=ConfigError),
    "window_rows": partial(integer, error=ConfigError),
    "clock": _clock,
    "preallocate": _flag,
    "debug": _flag,
    "ssd_formats": _formats,
    "error_budget": _budget,
    "scrub_bytes_per_second": size_bytes,
    "read_threads": partial(integer, low=1, error=ConfigError),
    "secret": _flag,
    "policy": _policy,
    "request_share": share_of,
}
"""The check of each option: takes the value and its name, raises ``ConfigError``."""


__all__ = ["PrefixCache", "format_text", "size_bytes"]
