"""Wiring: options to objects. The only place that knows which implementation stands for what."""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from kvstore.cache import Scope, SharedTiers
from kvstore.errors import ConfigError, KVStoreError, StoreBusy, StoreError
from kvstore.frame import FrameFormat
from kvstore.layout import LayerGroup, Layout
from kvstore.layout import layout as layout_of
from kvstore.namespace import Namespace
from kvstore.tier.ssd import MEDIUM_ERRORS, SsdOptions, open_ssd
from kvstore.window import WindowPool

if TYPE_CHECKING:
    from kvstore.tier.device import DeviceTier

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate(["k", "M", "G", "T"], 1)}


def size_bytes(size: int | str, option: str) -> int:
    """Return a size given as bytes or as text such as ``"4GiB"``. Raises ``ConfigError``."""
    if isinstance(size, int) and not isinstance(size, bool):
        value = float(max(-1, min(size, 2**63)))
    else:
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
        if found is None or found[2] not in _UNITS:
            msg = f"{option} must be bytes or a size such as '4GiB' or '500MB', found {size!r}"
            raise ConfigError(msg)
        value = float(found[1]) * _UNITS[found[2]]
    if value < 0:
        msg = f"{option} must not be negative, found {size!r}"
        raise ConfigError(msg)
    if value >= 2**63:
        msg = f"{option} must be less than 2**63 bytes, found {str(size)[:40]}"
        raise ConfigError(msg)
    return int(value)


def format_text(layout: Layout, block_tokens: int) -> str:
    """Return the one line that says what a store is for. Equal text means equal frames."""
    groups = [
        {
            "name": group.name,
            "layers": list(group.layers),
            "values": group.values,
            "entry_format": group.entry_format,
            "scale_rule": group.scale_rule,
            "tokens_per_entry": group.tokens_per_entry,
        }
        for group in layout.global_groups
    ]
    text = {
        "fingerprint": layout.fingerprint,
        "block_tokens": block_tokens,
        "groups": groups,
    }
    return json.dumps(text, separators=(",", ":"))


def parse_format(text: str) -> tuple[Layout, int]:
    """Return the layout (its GLOBAL groups) and block size that ``format_text`` wrote down.

    Raises:
        StoreError: if the text is damaged.
    """
    try:
        found = json.loads(text)
        groups = tuple(
            LayerGroup(**{**group, "layers": tuple(group["layers"])}) for group in found["groups"]
        )
        layout = Layout(model="stored", groups=groups)
        block_tokens = int(found["block_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"the store's VERSION file is damaged: {error!r}"
        raise StoreError(msg) from error
    if layout.fingerprint != found.get("fingerprint"):
        msg = "the store's VERSION file is damaged: its groups do not match its fingerprint"
        raise StoreError(msg)
    return layout, block_tokens


@dataclass(slots=True)
class _Opened:
    shared: SharedTiers
    count: int


_opened: dict[tuple[int, int], _Opened] = {}
"""Stores open in this process, by device and inode: LMDB must not open one twice."""
_inherited: dict[tuple[int, int], SharedTiers] = {}
"""Stores that a forked child took over and must let go of before it opens its own."""
_opening = threading.RLock()


class PrefixCache(Scope):
    """The scope that opened a store: what an engine holds.

    A context manager; leaving it flushes and closes. Opening the same directory again in one
    process shares the first opening, counted, with the first one's options.
    """

    def __init__(self, shared: SharedTiers, namespace: Namespace) -> None:
        self._is_open = True
        super().__init__(shared, namespace)

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
    ) -> Self:
        """Open the store in directory ``path``, creating it if need be.

        Units:
            Sizes are bytes or text such as ``"4GiB"``; ``window_ttl`` is seconds of ``clock``.

        ``ssd_bytes`` is the hard cap of the file. ``role="auto"`` owns the store if nobody does
        and reads it otherwise. ``window_rows`` is how many rows of a snapshot are kept (default W;
        2W - 2 makes every continuation exact). ``device_bytes=0`` and ``window_bytes=0`` are legal.
        ``clock`` replaces the system's for leases and for every time to live; blocks with one keep
        their expiry across restarts, so such a clock must go on where it stopped.
        ``preallocate`` takes the disk space now. ``debug`` poisons window rows when they are freed.

        Raises:
            ConfigError: for options that cannot work, such as a cap below 8 blocks.
            LayoutMismatch: if the store holds blocks of another layout; it is left untouched.
            StoreBusy: if ``role="owner"`` and another process owns it.
            StoreError: if ``path`` is not a store, or a reader finds none.
        """
        model_layout = layout if isinstance(layout, Layout) else layout_of(layout)
        rows = model_layout.window_tokens if window_rows is None else window_rows
        _check_options(model_layout, namespace, role, window_ttl, rows)
        frame_format = FrameFormat(model_layout, block_tokens)
        page_bytes = size_bytes(device_bytes, "device_bytes")
        now = clock if clock is not None else time.monotonic
        pool_bytes = size_bytes(window_bytes, "window_bytes")
        directory = _resolved(path)
        options = SsdOptions(
            capacity_bytes=size_bytes(ssd_bytes, "ssd_bytes"),
            frame_bytes=frame_format.frame_bytes,
            format_text=format_text(model_layout, block_tokens),
            role=role,
            preallocate=preallocate,
        )

        def make_device() -> DeviceTier:
            from kvstore.tier.device import DeviceTier  # imports torch: only who loads pays for it

            return DeviceTier(frame_format, page_bytes, device)

        def make_shared(*, is_last: bool = False) -> SharedTiers:
            ssd, set_aside = open_ssd(directory, options)
            try:
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
                shared = SharedTiers(
                    frame_format=frame_format,
                    ssd=ssd,
                    window=window,
                    open_device=make_device,
                    clock=now,
                    wall_clock=clock if clock is not None else time.time,
                )
            except MEDIUM_ERRORS as error:
                ssd.give_up()
                if ssd.is_owner and not is_last:
                    return make_shared(
                        is_last=True
                    )  # not closed cleanly: the whole tree is checked
                msg = f"the store at {directory} cannot be read: {error}"
                raise StoreError(msg) from error
            except BaseException:
                ssd.give_up()
                raise
            shared.metrics.quarantined_stores += set_aside is not None
            return shared

        shared = _share(directory, options, make_shared)
        try:
            return cls(shared, namespace)
        except BaseException:
            _unshare(shared)
            raise

    def close(self) -> None:
        """Flush, and release the store when this was its last opening. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        _unshare(self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


def _resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a store really lies: it stays there if the process or a link moves on."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        msg = f"path {os.fspath(path)!r} leads nowhere: {error}; choose another path"
        raise ConfigError(msg) from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _share(path: Path, options: SsdOptions, make: Callable[[], SharedTiers]) -> SharedTiers:
    """Return the opening of ``path`` in this process, making it if there is none."""
    from kvstore.tier.directory import claim_format

    with _opening:
        known = _identity(path)
        if known is not None and known in _opened:
            claim_format(path, options.format_text)  # another layout is refused here as well
            opened = _opened[known]
            if options.role == "owner" and not opened.shared.is_owner:
                msg = (
                    f"{path} is open as a reader in this process already; close that before opening "
                    "it with role='owner'"
                )
                raise StoreBusy(msg)
            opened.count += 1
            opened.shared.metrics.shared_opens += 1
            return opened.shared
        if known is not None and known in _inherited:
            _inherited.pop(known).ssd.forget()
        shared = make()
        made = _identity(path)
        assert made is not None
        _opened[made] = _Opened(shared, 1)
        return shared


def _unshare(shared: SharedTiers) -> None:
    with _opening:
        for key, opened in list(_opened.items()):
            if opened.shared is shared:
                opened.count -= 1
                if opened.count:
                    return
                del _opened[key]
        shared.close()


def _after_fork() -> None:
    """In a child: let go of every inherited store, so that the child can open its own."""
    global _opening  # noqa: PLW0603 - the parent's lock may be held by a thread that is not here
    _opening = threading.RLock()
    for key, opened in _opened.items():
        opened.shared.abandon()
        _inherited[key] = opened.shared
    _opened.clear()


def _close_all() -> None:
    """At a normal exit: keep what was accepted, also where nobody closed the cache."""
    for opened in list(_opened.values()):
        with suppress(KVStoreError):
            opened.shared.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)

__all__ = ["PrefixCache", "format_text", "size_bytes"]
