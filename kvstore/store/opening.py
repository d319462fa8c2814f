"""Opening a store directory: its path, its SSD tier, and an open store built on the tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvstore.errors import ConfigError, StoreError, brief
from kvstore.identity.hash import secret_fingerprint
from kvstore.store.open_store import OpenStore
from kvstore.store.secret import secret_for
from kvstore.store.store_format import StoreFormat, format_text
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.opening import open_ssd
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import SsdOptions

T = TypeVar("T", bound=OpenStore)

tier_class: type[SsdTier] = SsdTier  # replaced in tests, by a subclass that injects faults


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a store, fixed against later changes of directory or link."""
    try:
        return Path(path).expanduser().resolve()
    except TypeError as error:
        raise ConfigError(f"path must name a directory, found {brief(path)}") from error
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"path {os.fspath(path)!r} cannot be resolved: {error}; choose another path"
        raise ConfigError(msg) from error


def tier_opening(
    path: Path,
    role: Literal["auto", "owner", "reader"],
    options: Any,
    form: StoreFormat,
    frame_bytes: int,
    build: Callable[[SsdTier, bytes | None], T],
) -> tuple[SsdOptions, Callable[[SsdTier], T]]:
    """Return the options of the tier of a store, and the function that builds the store on it.

    ``options`` has ``ssd_bytes``, ``preallocate`` and ``secret``; ``form`` is the format without its secret. ``build``
    receives the tier and the secret. Raises as ``secret_for``.
    """
    secret = secret_for(path, role, is_wanted=options.secret)
    ssd_options = SsdOptions(
        capacity_bytes=options.ssd_bytes,
        frame_bytes=frame_bytes,
        format_text=format_text(
            replace(form, secret=secret_fingerprint(secret)) if secret else form
        ),
        role=role,
        preallocate=options.preallocate,
        is_mixed=bool(form.ssd_formats),
    )

    def build_named(ssd: SsdTier) -> T:
        if ssd.is_owner and ssd.fact("layout") is None:
            ssd.set_fact("layout", form.layout.model.encode(errors="replace"))
        return build(ssd, secret)

    return ssd_options, build_named


def take_over(path: Path, options: SsdOptions, build: Callable[[SsdTier], T]) -> T:
    """Open the tier of a directory and build an open store on it. A broken store is retried once."""
    for is_last in (False, True):
        ssd, set_aside = open_ssd(path, options, tier_class)
        try:
            store = build(ssd)
            store.start()
        except MEDIUM_ERRORS as error:
            ssd.give_up()  # not marked clean: the next opening verifies the whole tree
            if ssd.is_owner and not is_last:
                continue
            raise StoreError(f"the store at {path} cannot be read: {error}") from error
        except BaseException:
            ssd.give_up()
            raise
        store.metrics.quarantined_stores += set_aside is not None
        return store
    raise AssertionError  # the second round returns or raises
