"""A second opening in one process: the whole layout agrees, and every option that is given."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import BlockStore, ConfigError, LayoutMismatch, Lifetime, PrefixCache
from kvstore.policy.registry import make_policy
from tests.stores import (
    BLOCK,
    DENSE,
    NAMESPACE,
    WINDOWED,
    entries_of,
    inside,
    open_cache,
    tokens_of,
)

OPTIONS: dict[str, tuple[Any, Any]] = {
    "ssd_bytes": ("8MiB", "16MiB"),
    "device": ("cpu", "cuda:0"),
    "device_bytes": ("64KiB", 0),
    "window_bytes": ("1MiB", "2MiB"),
    "window_ttl": (300.0, 60.0),
    "window_rows": (16, 30),
    "clock": (time.time, time.monotonic),
    "preallocate": (False, True),
    "debug": (False, True),
    "error_budget": (0.2, 0.4),
    "scrub_bytes_per_second": (0, "1MiB"),
    "read_threads": (1, 2),
    "policy": ("lru", "s3fifo"),
    "request_share": (0.5, 0.25),
}
"""Options that a store is not named for: a value, and another."""
FOR = {
    "block_tokens": (BLOCK, 2 * BLOCK),
    "secret": (False, True),
    "ssd_formats": ("nvfp4", "mxfp8"),
}
"""Options that say which blocks a store is for."""


def opened(path: Path, **options: Any) -> PrefixCache:
    packed = "error_budget" in options or "ssd_formats" in options
    layout = DENSE if packed else WINDOWED
    formats = {"ssd_formats": "nvfp4"} if packed else {}
    given = {"block_tokens": BLOCK, "layout": layout, "namespace": NAMESPACE, **formats, **options}
    return PrefixCache.open(path, **given)


def test_every_option_of_an_opening_is_compared() -> None:
    import inspect

    known = inspect.signature(PrefixCache.open).parameters
    apart = {"path", "layout", "namespace", "role", "ssd_quota"}  # role and quota act by themselves
    assert set(known) - apart == OPTIONS.keys() | FOR.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_differs_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    value, other = OPTIONS[name]
    with opened(tmp_path / "s", **{name: value}) as first:
        with opened(tmp_path / "s", **{name: value}) as second:
            assert inside(second) is inside(first)
        with pytest.raises(ConfigError, match=rf"with {name} .*, found") as caught:
            opened(tmp_path / "s", **{name: other})
        assert not isinstance(caught.value, LayoutMismatch)
        assert first.stats()["counters"]["shared_opens"] == 1


@pytest.mark.parametrize("name", FOR)
def test_an_option_that_blocks_depend_on_is_a_mismatch(name: str, tmp_path: Path) -> None:
    value, other = FOR[name]
    with (
        opened(tmp_path / "s", **{name: value}),
        pytest.raises(LayoutMismatch, match=rf"{name} .*, found"),
    ):
        opened(tmp_path / "s", **{name: other})


def test_an_option_left_out_agrees_with_anything(tmp_path: Path) -> None:
    policy = make_policy("sieve")
    unusual: dict[str, Any] = {name: other for name, (_, other) in OPTIONS.items()}
    unusual |= {"device": "cpu", "policy": policy, "secret": True, "block_tokens": 4 * BLOCK}
    with (
        PrefixCache.open(
            tmp_path / "s", layout=DENSE, namespace=NAMESPACE, ssd_formats="nvfp4", **unusual
        ) as first,
        PrefixCache.open(tmp_path / "s", layout=DENSE, namespace=NAMESPACE) as second,
        PrefixCache.open(
            tmp_path / "s", layout=DENSE, namespace=NAMESPACE, policy=policy, ssd_bytes=16 << 20
        ) as third,
    ):
        assert inside(first) is inside(second) is inside(third)
        assert second.block_tokens == 4 * BLOCK


@pytest.mark.parametrize("lifetime", [Lifetime.WINDOW, Lifetime.TRANSIENT])
def test_groups_of_any_lifetime_must_agree(lifetime: Lifetime, tmp_path: Path) -> None:
    groups = tuple(
        replace(group, values=2 * group.values) if group.lifetime == lifetime else group
        for group in WINDOWED.groups
    )
    other = replace(WINDOWED, groups=groups)
    assert other.fingerprint == WINDOWED.fingerprint
    with open_cache(tmp_path / "s", WINDOWED) as first:
        with pytest.raises(
            LayoutMismatch, match=r"group '(window|ring)' .* found .*left untouched"
        ):
            open_cache(tmp_path / "s", other)
        open_cache(tmp_path / "s", replace(WINDOWED, model="another label")).close()
        assert first.stats()["counters"]["shared_opens"] == 1


def test_another_window_size_is_not_served_silently(tmp_path: Path) -> None:
    with (
        open_cache(tmp_path / "s", WINDOWED),
        pytest.raises(LayoutMismatch, match=r"window_tokens 16, found 8"),
    ):
        open_cache(tmp_path / "s", replace(WINDOWED, window_tokens=8))


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("ssd_bytes", "8MiB", "16MiB"),
        ("preallocate", False, True),
        ("on_removed", print, repr),
        ("scrub_bytes_per_second", 0, "1MiB"),
    ],
)
def test_keyed_blocks_agree_too(name: str, value: Any, other: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with BlockStore.open(path, block_bytes=4096, **{name: value}):
        BlockStore.open(path, block_bytes=4096).close()
        with pytest.raises(ConfigError, match=rf"with {name} .*, found"):
            BlockStore.open(path, block_bytes=4096, **{name: other})
        with pytest.raises(LayoutMismatch, match="secret False, found True"):
            BlockStore.open(path, block_bytes=4096, secret=True)


def test_a_refused_opening_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s") as first:
        with pytest.raises(ConfigError):
            open_cache(tmp_path / "s", window_ttl=1.0)
        first.store(tokens, entries_of(DENSE, tokens))
        first.flush()
        assert first.lookup(tokens).hit_tokens == 2 * BLOCK
    with open_cache(tmp_path / "s", window_ttl=1.0) as again:
        assert np.array_equal(again.lookup(tokens).tokens, tokens)
        assert again.role == "owner"
