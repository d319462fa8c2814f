"""Builders for tests of whole caches: small layouts, entries that identify their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvstore import BlockStore, LayerGroup, Layout, Lifetime, Namespace, Pages, PrefixCache
from kvstore.blocks.keyed import KeyedBlocks
from kvstore.cache import SharedTiers
from kvstore.cache.device_cache import DeviceCache
from kvstore.cache.scope import Scope
from kvstore.store import opening
from kvstore.store.writer import StoreWriter
from kvstore.tier.ssd.tier import SsdTier

BLOCK = 8
"""Tokens of a block in most tests."""

DENSE = Layout(
    model="tiny dense",
    groups=(
        LayerGroup(name="k", layers=(0, 1, 2), values=64, entry_format="bf16"),
        LayerGroup(name="v", layers=(0, 1, 2), values=64, entry_format="bf16"),
    ),
)

WINDOWED = Layout(
    model="tiny windowed",
    groups=(
        LayerGroup(name="main", layers=(1, 3), values=32, entry_format="nvfp4", tokens_per_entry=2),
        LayerGroup(
            name="index", layers=(1, 3), values=32, entry_format="mxfp4", tokens_per_entry=2
        ),
        LayerGroup(name="last", layers=(4,), values=32, entry_format="nvfp4"),
        LayerGroup(
            name="window", layers=(0, 1, 2), values=4, entry_format="f32", lifetime=Lifetime.WINDOW
        ),
        LayerGroup(
            name="ring", layers=(1, 3), values=8, entry_format="u8", lifetime=Lifetime.TRANSIENT
        ),
    ),
    window_tokens=16,
)

NAMESPACE = Namespace(model="test")


def tokens_of(count: int, seed: int = 0) -> NDArray[np.uint32]:
    """Token ids that no other seed shares."""
    return np.random.default_rng(seed).integers(0, 1 << 17, count, np.uint32)


def entries_of(
    layout: Layout, tokens: Sequence[int] | NDArray[Any], start: int = 0
) -> dict[str, NDArray[np.uint8]]:
    """Entries whose every byte follows from the group, the layer and all tokens before it.

    Two prefixes that differ anywhere have different entries from there on, so wrong bytes show.
    """
    ids = np.asarray(tokens, np.uint64)
    with np.errstate(over="ignore"):
        chain = np.cumsum(ids * np.uint64(0x9E3779B97F4A7C15) ^ ids, dtype=np.uint64)
    made = {}
    for number, group in enumerate(layout.global_groups):
        ratio = group.tokens_per_entry
        ends = chain[start + ratio - 1 :: ratio][: (len(ids) - start) // ratio]
        bytes_ = np.arange(group.entry_bytes, dtype=np.uint64)
        rows = []
        for layer in group.layers:
            salt = np.uint64(number * 1009 + layer * 31 + 7)
            with np.errstate(over="ignore"):
                mixed = (ends[:, None] + salt) * (bytes_[None, :] * np.uint64(2) + np.uint64(3))
            rows.append((mixed >> np.uint64(23)).astype(np.uint8))
        made[group.name] = np.stack(rows)
    return made


def open_cache(path: Path, layout: Layout = DENSE, **options: Any) -> PrefixCache:
    """Open a small cache."""
    defaults: dict[str, Any] = {
        "namespace": NAMESPACE,
        "block_tokens": BLOCK,
        "ssd_bytes": "8MiB",
        "device_bytes": "64KiB",
        "window_bytes": "1MiB",
    }
    return PrefixCache.open(path, layout=layout, **{**defaults, **options})


def assert_entries(
    layout: Layout, found: dict[str, NDArray[np.uint8]], tokens: NDArray[Any], count: int
) -> None:
    """Compare entries read for the first ``count`` tokens with what they must be."""
    expected = entries_of(layout, tokens[:count])
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


class FaultyTier(SsdTier):
    """The SSD tier of every store in this process: a test makes calls of its methods fail or wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.hooks: dict[str, Callable[..., object]] = {}
        """Called before the method of that name, with its arguments: a hook raises, waits or returns."""
        super().__init__(*arguments, **options)

    def fail(self, method: str, *errors: BaseException) -> list[BaseException]:
        """Let the next calls raise these errors, one each; return the list of those left."""
        left = list(errors)

        def hook(*_arguments: Any, **_options: Any) -> None:
            if left:
                raise left.pop(0)

        self.hooks[method] = hook
        return left

    @contextmanager
    def failing(self, method: str, error: BaseException) -> Iterator[None]:
        """Let every call inside raise this error."""

        def hook(*_arguments: Any, **_options: Any) -> None:
            raise error

        self.hooks[method] = hook
        try:
            yield
        finally:
            del self.hooks[method]


def _hooked(name: str) -> Callable[..., Any]:
    def call(self: FaultyTier, *arguments: Any, **options: Any) -> Any:
        if name in self.hooks:
            self.hooks[name](*arguments, **options)
        return getattr(super(FaultyTier, self), name)(*arguments, **options)

    return call


for _name in (
    *("put", "delete", "_delete", "amend", "sync", "set_facts"),
    *("fact", "facts", "read", "_read_batch"),
):
    setattr(FaultyTier, _name, _hooked(_name))
opening.tier_class = FaultyTier


# ---- what tests look into ------------------------------------------------------------------------


@overload
def inside(cache: Scope) -> SharedTiers: ...
@overload
def inside(cache: BlockStore) -> KeyedBlocks: ...
def inside(cache: Scope | BlockStore) -> SharedTiers | KeyedBlocks:
    """The open store behind a scope or a block store."""
    return cache._shared


def tier_of(cache: Scope | BlockStore) -> FaultyTier:
    """The SSD tier of a cache."""
    tier = inside(cache).ssd
    assert isinstance(tier, FaultyTier)
    return tier


def writer_of(cache: Scope) -> StoreWriter:
    """The writing side of a cache."""
    side = inside(cache).writer
    assert side is not None
    return side


def engine_pages() -> Pages:
    """Four zeroed pages of 16 tokens, as an engine of the windowed layout has them."""
    import torch  # not for tests that need none

    tensors = {
        group.name: torch.zeros(
            4, len(group.layers), 16 // group.tokens_per_entry, group.entry_bytes, dtype=torch.uint8
        )
        for group in WINDOWED.global_groups
    }
    return Pages(tensors, [0, 1, 2, 3])


def paged(cache: Scope) -> DeviceCache:
    """The device cache of a cache."""
    device = inside(cache).device
    assert device.is_open
    return device
