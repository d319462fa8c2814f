"""The public prefix cache: its options, their validation, and the objects built from them."""

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
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from kvstore.cache import Scope, SharedTiers
from kvstore.cache.scope import quota_bytes
from kvstore.checks import ROLES, choice, flag, integer, number, positive, text
from kvstore.distribution import has_torch, install_command, require_torch
from kvstore.errors import ConfigError, brief
from kvstore.frame.at_rest import Packing, frames_of, loses
from kvstore.identity.namespace import Namespace
from kvstore.index.plan import REQUEST_SHARE
from kvstore.layout import Layout
from kvstore.layout import layout as layout_of
from kvstore.output.sizes import share_of, size_bytes
from kvstore.policy.guarded import METHODS
from kvstore.policy.protocol import Policy
from kvstore.policy.registry import POLICIES, make_policy
from kvstore.store.opening import resolved, tier_opening
from kvstore.store.registry import Sharing, share, unshare
from kvstore.store.store_format import StoreFormat
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions
from kvstore.tier.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

logger = logging.getLogger(__name__)


class PrefixCache(Scope, Sharing):
    """A persistent KV cache for token prefixes: one open store, seen by one namespace.

    A context manager that flushes and closes on exit. A cache dropped without ``close`` is closed in the background,
    once its last scope is dropped. A second opening of the same directory in one process shares the first one; options
    that differ from it are refused.
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
        """Open the store in directory ``path``; create it if the directory contains none.

        An option of None has its default (:class:`PrefixOptions`), or the value in force if this process has the store
        open.

        Options:
            ``block_tokens``: tokens per block. ``ssd_bytes``: hard cap of the store's file.
            ``device``, ``device_bytes``: torch device and capacity of the device tier; 0 for none. Both need the extra
            ``torch``; without it there is no device tier, and ``load`` raises.
            ``window_bytes``, ``window_ttl``: capacity of the window pool, 0 for none, and seconds until a window
            expires.
            ``window_rows``: rows kept of a window (default W; with 2W - 2 every continuation is exact).
            ``role``: ``"auto"`` owns the store unless another process does, in which case it is a reader.
            ``clock``: replaces the system's clocks for leases and expiries. Expiries persist across restarts, so it
            must continue from its last value.
            ``preallocate``: allocate all disk space now. ``debug``: poison window rows on free.
            ``ssd_formats``: quantize float entries at rest, as ``{"v": "nvfp4"}`` or one format for all GLOBAL groups;
            reads return the dequantized values in the layout's format. ``"zstd"`` compresses blocks without
            loss if they become a page smaller. docs/quality.md lists the costs.
            ``error_budget``: highest relative root-mean-square error of a group in a quantized block. A block above it,
            or with a NaN or an infinity, is stored unquantized.
            ``scrub_bytes_per_second``: rate at which the owner verifies all blocks in the background, 0 for never. Bad
            blocks are removed with their descendants, and counted.
            ``read_threads``: threads of one read, including the caller (default: one per processor, at most 4).
            ``ssd_quota``: cap of this ``namespace``'s bytes on SSD; see ``scope``.
            ``secret``: hash under a random secret in the store's directory, so that prompts cannot be confirmed by
            their hashes. Fixed when the store is created.
            ``policy``: eviction order on SSD: a name of ``kvstore policies``, or an object with the methods of
            ``kvstore.Policy`` for this store alone. Its state is lost at a restart. If it raises or
            chooses no evictable segment, LRU replaces it until the store is reopened: counted as ``policy_errors``,
            logged once, an alarm in ``stats``.
            ``request_share``: largest part of the tier that the blocks of one request may use.

        Units:
            Sizes are bytes or text such as ``"4GiB"``.

        Raises:
            ConfigError: for options that cannot work, such as a cap below 8 blocks, or that differ from those of the
                store as opened by this process; each is named.
            LayoutMismatch: if the store contains blocks of another layout, was created with a secret and is opened
                without or vice versa, or is open in this process with other groups; it is left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or ``role="reader"`` and there is none.
        """
        values = locals()
        given = {name: values[name] for name in _CHECKS}
        checked: object = namespace
        if not isinstance(checked, Namespace):
            raise ConfigError(f"namespace must be a kvstore.Namespace, found {brief(namespace)}")
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
            cache._share = holding
            return cache
        except BaseException:
            unshare(holding)
            raise


READ_THREADS = 4  # keeps 128 blocks in flight; more would occupy the engine's CPUs
DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "npu", "meta")
"""Device types of torch, checked here because torch is imported by the first load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Validated options of one opening, with defaults; sizes in bytes."""

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
        """Return validated options; None in ``given`` selects the default. Raises ``ConfigError`` naming the option."""
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
            raise ConfigError(
                f"error_budget is {options.error_budget}, but no format at rest is lossy: name one in "
                "ssd_formats, or leave error_budget out"
            )
        if ("device" in checked or checked.get("device_bytes")) and not has_torch():
            msg = f"device and device_bytes need torch, which is not installed; run: {install_command('torch')}"
            raise ConfigError(msg)
        return options

    @property
    def packing(self) -> Packing | None:
        """How blocks are quantized or compressed at rest; None if they are not."""
        return Packing(dict(self.ssd_formats), self.error_budget) if self.ssd_formats else None


def _opening(
    directory: Path, role: Literal["auto", "owner", "reader"], options: PrefixOptions
) -> tuple[SsdOptions, Callable[[SsdTier], SharedTiers]]:
    """Return the options of the SSD tier, and a function that builds the open store on it."""
    packing = options.packing
    frame_format = frames_of(options.layout, options.block_tokens, packing)

    def make_device() -> DeviceTier:
        require_torch()  # takes seconds, so only at the first use of the device tier
        from kvstore.tier.device import DeviceTier

        return DeviceTier(frame_format, options.device_bytes, options.device)

    def build(ssd: SsdTier, secret: bytes | None) -> SharedTiers:
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
            secret=secret,
            scrub_bytes_per_second=options.scrub_bytes_per_second,
            read_threads=options.read_threads,
            policy=_order(options.policy),
            request_share=options.request_share,
        )

    form = StoreFormat(options.layout, options.block_tokens, ssd_formats=options.ssd_formats)
    return tier_opening(directory, role, options, form, frame_format.frame_bytes, build)


def _device(value: object, name: str) -> str:
    """Return the name of a device. Raises ``ConfigError`` for a type that torch does not support."""
    device = text(value, name, ConfigError)
    if re.fullmatch(rf"({'|'.join(DEVICES)})(:[0-9]{{1,3}})?", device) is None:
        msg = f"{name} must be one of {', '.join(DEVICES)}, perhaps with a number such as 'cuda:0', found {brief(value)}"
        raise ConfigError(msg)
    return device


def _clock(value: object, name: str) -> Callable[[], float]:
    """Return a clock. Raises ``ConfigError`` if it is not a function."""
    if not callable(value):
        raise ConfigError(f"{name} must be a function that returns seconds, found {brief(value)}")
    return value


def _formats(value: object, name: str) -> Mapping[str, str] | str:
    """Return formats at rest by group, or one for all groups. Raises ``ConfigError``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise ConfigError(f"{name} must be a format or map groups to formats, found {brief(value)}")
    return dict(value)


def _budget(value: object, name: str) -> float:
    """Return an error budget. Raises ``ConfigError`` below 0."""
    budget = number(value, name, "a relative error of at least 0", ConfigError)
    if budget < 0:
        raise ConfigError(f"{name} must be a relative error of at least 0, found {brief(value)}")
    return budget


def _policy(value: object, name: str) -> str | Policy[Any]:
    """Return a policy or its name. Raises ``ConfigError`` for anything else."""
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
        msg = f"{name} must be a name or an object of a subclass of kvstore.Policy; {brief(value)} {lacks}"
        raise ConfigError(msg)
    return cast("Policy[Any]", value)


def _order(policy: str | Policy[Any]) -> Policy[Any] | None:
    """Return the eviction policy, None for LRU."""
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
"""The validation of each option: a function of the value and its name that raises ``ConfigError``."""
