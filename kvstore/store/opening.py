"""What a store is for, and who has it open: what every kind of cache opens a directory with.

One directory is opened once in a process, however often it is asked for; a forked child lets go of
what it inherited; a normal exit keeps what was accepted.
"""

from __future__ import annotations

import _thread
import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from kvstore.errors import ConfigError, KVStoreError, LayoutMismatch, StoreBusy, StoreError, brief
from kvstore.identity.hash import secret_fingerprint
from kvstore.layout import LayerGroup, Layout
from kvstore.store.open_store import OpenStore
from kvstore.tier.ssd import directory
from kvstore.tier.ssd.tier import BIRTH_SECONDS, MEDIUM_ERRORS, SsdOptions, SsdTier, open_ssd
from kvstore.transfer.interrupts import unharmed

T = TypeVar("T", bound=OpenStore)
V = TypeVar("V")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What a store is for, as its directory says."""

    layout: Layout
    """Its GLOBAL groups."""
    block_tokens: int
    key_bytes: int = 0
    """Longest key of a store whose callers bring their own keys, 0 for one of tokens."""
    ssd_formats: Mapping[str, str] = field(default_factory=dict)
    """Entry formats at rest, by group, where they are not the layout's."""
    secret: str = ""
    """Fingerprint of the secret that hashes are made under, empty for none."""


def format_text(
    layout: Layout,
    block_tokens: int,
    key_bytes: int = 0,
    ssd_formats: Mapping[str, str] | None = None,
    secret: str = "",
) -> str:
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
    text: dict[str, Any] = {
        "fingerprint": layout.fingerprint,
        "block_tokens": block_tokens,
        "groups": groups,
    }
    text |= {"key_bytes": key_bytes} if key_bytes else {}
    text |= {"ssd_formats": dict(sorted(ssd_formats.items()))} if ssd_formats else {}
    text |= {"secret": secret} if secret else {}
    return json.dumps(text, separators=(",", ":"))


def _value(found: Mapping[str, Any], name: str, kind: type[V], *default: V) -> V:
    """Return a field of a kind. Raises ``TypeError`` for another: 16.0 and true are no integers."""
    value = found[name] if name in found or not default else default[0]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.40}, expected {kind.__name__}")
    return value


def _group(found: Mapping[str, Any]) -> LayerGroup:
    layers = _value(found, "layers", list)
    if any(type(layer) is not int for layer in layers):
        raise TypeError(f"layers are {layers!r:.40}, expected integers")
    return LayerGroup(
        name=_value(found, "name", str),
        layers=tuple(layers),
        values=_value(found, "values", int),
        entry_format=_value(found, "entry_format", str),
        tokens_per_entry=_value(found, "tokens_per_entry", int),
        scale_rule=_value(found, "scale_rule", str),
    )


def parse_format(text: str) -> StoreFormat:
    """Return what ``format_text`` wrote down.

    Raises:
        StoreError: if the text is damaged.
    """
    try:
        if len(text) > directory.FORMAT_BYTES:
            raise ValueError(f"{len(text)} characters, expected at most {directory.FORMAT_BYTES}")
        found = json.loads(text)
        layout = Layout(model="stored", groups=tuple(map(_group, found["groups"])))
        formats = _value(found, "ssd_formats", dict, {})
        form = StoreFormat(
            layout,
            _value(found, "block_tokens", int),
            _value(found, "key_bytes", int, 0),
            {name: _value(formats, name, str) for name in formats},
            _value(found, "secret", str, ""),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"the store's VERSION file is damaged: {error!r:.200}"
        raise StoreError(msg) from error
    if layout.fingerprint != found.get("fingerprint"):
        msg = "the store's VERSION file is damaged: its groups do not match its fingerprint"
        raise StoreError(msg)
    return form


def secret_for(
    path: Path, role: Literal["auto", "owner", "reader"], *, is_wanted: bool
) -> bytes | None:
    """Return the secret of the store at ``path``, made first for a new one; None if none is wanted.

    Raises:
        LayoutMismatch: if the store has one and none is wanted, or the other way round.
        ConfigError: if ``path`` cannot be a store's, or its secret is not kept.
        StoreBusy: if another process is making the store and does not come to it.
        StoreError: if the secret is missing or not that of the store.
    """
    deadline = time.monotonic() + BIRTH_SECONDS
    try:
        while not (path / directory.VERSION_FILE).exists():
            if not is_wanted:
                return None
            if role == "reader":
                directory.require_store(path)
            directory.prepare(path)
            if directory.make_secret(path):
                return directory.read_secret(path)
            if time.monotonic() > deadline:
                raise directory.busy(path)
            time.sleep(0.02)
        named = _fingerprint_in(directory.read_format(path))
        if named is not None and bool(named) != is_wanted:
            has, other = ("a", "with") if named else ("no", "without")
            msg = (
                f"{path} has {has} secret that its hashes are made under: open it {other} "
                "secret=True, or use another path; it was left untouched"
            )
            raise LayoutMismatch(msg)
        return _secret_named(path, named) if is_wanted else None
    except OSError as error:
        if not is_wanted:
            return None  # opening it meets the same, and says more
        msg = f"the secret of {path} cannot be made: {error.strerror}; free what is short or use another path"
        raise StoreError(msg) from error


def secret_of(path: Path, text: str) -> bytes | None:
    """Return the secret of a store for ``text``, which need not be there yet; None if it has none.

    Raises:
        LayoutMismatch: if the store at ``path`` is for something else.
        ConfigError, StoreError: as ``secret_for``.
    """
    directory.has_format(path, text)
    named = _fingerprint_in(text)
    return _secret_named(path, named) if named else None


def _fingerprint_in(text: str) -> str | None:
    """Return what a format says of its secret, empty for none; None if the text is damaged."""
    try:
        return str(json.loads(text).get("secret", ""))
    except (ValueError, AttributeError, RecursionError):
        return None


def _secret_named(path: Path, named: str | None) -> bytes:
    secret = directory.read_secret(path)
    if named is not None and secret_fingerprint(secret) != named:
        file = path / directory.SECRET_FILE
        msg = (
            f"{file} is another secret: its fingerprint is {secret_fingerprint(secret)[:16]}, expected "
            f"{named[:16]}; put back the one that the store or the archive was made with"
        )
        raise StoreError(msg)
    return secret


@dataclass(slots=True, weakref_slot=True, eq=False)
class Holding(Generic[T]):
    """A share in the opening of a store, as long as somebody has it and did not give it back."""

    shared: T


@dataclass(slots=True)
class _Opened:
    shared: OpenStore
    options: Any
    """Those in force: of the opening that made it."""
    holders: weakref.WeakSet[Holding[Any]] = field(default_factory=weakref.WeakSet)
    """Not a count: a share that an interrupted caller never got is gone with him."""

    @property
    def is_held(self) -> bool:
        """Say whether anybody has a share that is alive; an interrupt may leave a dead one in the set."""
        return any(True for _ in self.holders)


_FOR = frozenset({"block_tokens", "key_bytes", "secret", "ssd_formats"})
"""Options that say, with the layout, for which blocks a store is."""
_opened: dict[tuple[int, int], _Opened] = {}
"""Stores open in this process, by device and inode: LMDB must not open one twice."""
_inherited: dict[tuple[int, int], OpenStore] = {}
"""Stores that a forked child took over and must let go of before it opens its own."""
_opening = threading.RLock()
_forking = threading.local()
"""The tiers that a thread holds still while it forks."""


def take_over(directory_path: Path, options: SsdOptions, build: Callable[[SsdTier], T]) -> T:
    """Open the tier of a directory and build an open store on it, once more if it proves broken."""
    for is_last in (False, True):
        ssd, set_aside = open_ssd(directory_path, options)
        try:
            store = build(ssd)
            store.start()
        except MEDIUM_ERRORS as error:
            ssd.give_up()  # not closed cleanly: the next opening checks the whole tree
            if ssd.is_owner and not is_last:
                continue
            msg = f"the store at {directory_path} cannot be read: {error}"
            raise StoreError(msg) from error
        except BaseException:
            ssd.give_up()
            raise
        store.metrics.quarantined_stores += set_aside is not None
        return store
    raise AssertionError  # the second round returns or raises


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a store really lies: it stays there if the process or a link moves on."""
    try:
        return Path(path).expanduser().resolve()
    except TypeError as error:
        msg = f"path must name a directory, found {brief(path)}"
        raise ConfigError(msg) from error
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"path {os.fspath(path)!r} leads nowhere: {error}; choose another path"
        raise ConfigError(msg) from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def share(
    path: Path,
    role: Literal["auto", "owner", "reader"],
    kind: type[T],
    options: Any,
    given: Collection[str],
    opening: Callable[[], tuple[SsdOptions, Callable[[SsdTier], T]]],
) -> Holding[T]:
    """Return a share in the opening of ``path``, made with ``opening`` if this process has none.

    ``options`` holds every option of the caller as an attribute, and ``given`` names those that it
    did not leave out. ``opening`` returns how the tier is opened and what builds a store on it.

    Raises:
        ConfigError: if the store is open here with other options than are given; each is named.
        LayoutMismatch: if the store is for something else; it is left untouched.
        StoreBusy: if ``role="owner"`` and it is open as a reader, or owned by another process.
        StoreError: if ``path`` is not a store, or a reader finds it broken.
    """

    def shared() -> Holding[T]:
        with _opening:
            known = _identity(path)
            if known is not None and known in _opened:
                opened = _opened[known]
                _check_kind(path, kind, opened.shared)
                _check_agreement(path, options, opened.options, given)
                if role == "owner" and not opened.shared.is_owner:
                    msg = (
                        f"{path} is open as a reader in this process already; close that before "
                        "opening it with role='owner'"
                    )
                    raise StoreBusy(msg)
                opened.shared.metrics.shared_opens += 1
                return _hold(opened)
            if known is not None and known in _inherited:
                _inherited.pop(known).ssd.forget()
            ssd_options, build = opening()
            store = take_over(path, ssd_options, build)
            if role == "auto" and not store.is_owner:
                logger.warning(
                    "%s is owned by another process: this one reads it and stores nothing", path
                )
            made = _identity(path)
            assert made is not None
            _opened[made] = _Opened(store, options)
            return _hold(_opened[made])

    return unharmed(shared, unshare)


def _check_kind(path: Path, kind: type[OpenStore], shared: OpenStore) -> None:
    """Raise ``LayoutMismatch`` if the store that is open here is of another kind."""
    if not isinstance(shared, kind):
        msg = (
            f"{path} is open in this process for blocks of another kind, and was left "
            "untouched; use another path"
        )
        raise LayoutMismatch(msg)


def _hold(opened: _Opened) -> Holding[Any]:
    holding = Holding(opened.shared)
    opened.holders.add(holding)
    weakref.finalize(
        holding, _left_alone, opened.shared
    ).atexit = False  # which ``_close_all`` sees to
    return holding


def _left_alone(shared: OpenStore) -> None:
    """Let a thread close a store whose last share was dropped and not given back, as by an interrupt.

    Runs wherever a reference goes, perhaps under any lock: it takes none and waits for nothing.
    """
    if shared.is_closed or any(o.is_held for o in list(_opened.values()) if o.shared is shared):
        return
    with suppress(RuntimeError):  # at the end of the interpreter
        _thread.start_new_thread(_close_unheld, (shared,))


def _close_unheld(shared: OpenStore) -> None:
    with _opening, suppress(KVStoreError):
        for key, opened in list(_opened.items()):
            if opened.shared is shared and not opened.is_held:
                del _opened[key]
                shared.close()


def _check_agreement(path: Path, options: Any, in_force: Any, given: Collection[str]) -> None:
    """Raise an error that names every given option which differs from that of the open store."""
    layouts = in_force.layout, options.layout
    parts = _layout_differences(*layouts) if "layout" in given else []
    is_other = bool(parts)
    for name in given:
        here, there = getattr(options, name), getattr(in_force, name)
        if name != "layout" and here != there:
            parts.append(f"{name} {brief(there)}, found {brief(here)}")
            is_other |= name in _FOR
    if parts:
        found = f"{path} is open in this process with {'; '.join(parts)}"
        if is_other:
            msg = f"{found}; it was left untouched: use another path"
            raise LayoutMismatch(msg)
        msg = f"{found}: leave the option out, give the same, or close the store first"
        raise ConfigError(msg)


def _layout_differences(found: Layout, expected: Layout) -> list[str]:
    """Say in which groups, of any lifetime, two layouts differ; their labels do not count."""
    parts = []
    if found.window_tokens != expected.window_tokens:
        parts.append(f"window_tokens {found.window_tokens}, found {expected.window_tokens}")
    there, here = ({group.name: group for group in each.groups} for each in (found, expected))
    parts += [
        f"group {name!r} {_group_text(there.get(name))}, found {_group_text(here.get(name))}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    return parts


def _group_text(group: LayerGroup | None) -> str:
    if group is None:
        return "missing"
    values = asdict(group) | {"layers": brief(list(group.layers)), "lifetime": group.lifetime.name}
    return " ".join(f"{name}={value}" for name, value in values.items() if name != "name")


def is_open_here(path: Path) -> bool:
    """Say whether this process has the store at ``path`` open, as owner or reader."""
    with _opening:
        return _identity(path) in _opened


def unshare(holding: Holding[Any]) -> None:
    """Give back a share; the last one closes the store. Idempotent."""
    unharmed(lambda: _unshare(holding))


def _unshare(holding: Holding[Any]) -> None:
    with _opening:
        for key, opened in list(_opened.items()):
            if holding in opened.holders:
                opened.holders.discard(holding)
                if not opened.is_held:
                    del _opened[key]
                    opened.shared.close()


def _before_fork() -> None:
    _forking.tiers = [opened.shared.ssd for opened in list(_opened.values())]
    for tier in _forking.tiers:
        tier.before_fork()


def _after_fork_in_parent() -> None:
    for tier in _forking.tiers:
        tier.after_fork()


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


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork
)
atexit.register(_close_all)
