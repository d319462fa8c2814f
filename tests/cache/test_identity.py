"""Identity at the stores themselves: what callers say in a namespace, a layout or a key decides hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvstore import BlockStore, ImageSpan, LayerGroup, Layout
from tests.identity_contract import ROWS, IdentityContract
from tests.stores import BLOCK, DENSE, NAMESPACE, entries_of, open_cache, tokens_of

_NAMED = "the caller's engine knows it, and names it in Namespace.weights or Namespace.model"
_WINDOWS = (
    "window rows live in the memory of one opening, which has one window length; what that length does "
    "to GLOBAL entries is in the model's config, which the caller names in Namespace.weights"
)
_KEYED = "keys are the caller's, who has it in them, as the engines that hash by themselves do"


def _narrower(layout: Layout) -> Layout:
    """The same values in half the layers."""
    groups: list[LayerGroup] = [replace(group, layers=group.layers[:1]) for group in layout.groups]
    return replace(layout, groups=tuple(groups))


class PrefixCacheRows:
    options: ClassVar[dict[str, dict[str, Any]]] = {
        "layout": {"layout": _narrower(DENSE)},
        "block_tokens": {"block_tokens": 2 * BLOCK},
        "weights": {"namespace": replace(NAMESPACE, weights="2")},
        "tokenizer": {"namespace": replace(NAMESPACE, tokenizer="2")},
        "adapter": {"namespace": replace(NAMESPACE, adapter="")},  # not the same as none
        "tenant": {"namespace": replace(NAMESPACE, tenant="b")},
        "generation": {"namespace": replace(NAMESPACE, generation=1)},
        "secret": {"secret": True},
    }

    def __init__(self) -> None:
        self.absent = {
            "windows": _WINDOWS,
            **dict.fromkeys(("positions", "compute", "rank"), _NAMED),
        }

    def served(self, path: Path, row: str | None) -> int:
        tokens = tokens_of(4 * BLOCK + 1)
        images = [ImageSpan(2, 6, b"an image")] if row == "images" else []
        with open_cache(path) as cache:
            cache.store(tokens[:-1], entries_of(DENSE, tokens[:-1]), images=images)
            cache.flush()
            assert cache.probe(tokens, images=images).hit_tokens == 4 * BLOCK
        if row == "tokens":
            tokens[0] += 1
        images = [replace(image, digest=b"another") for image in images]
        with open_cache(path, **self.options.get(row or "", {})) as cache:
            served = cache.probe(tokens, images=images).hit_tokens
            if images:  # and the same image at another place
                moved = [ImageSpan(3, 7, b"an image")]
                served = max(served, cache.probe(tokens, images=moved).hit_tokens)
        return served


class TestPrefixCache(IdentityContract):
    adapter = PrefixCacheRows()


class BlockStoreRows:
    options: ClassVar[dict[str, dict[str, Any]]] = {
        "layout": {"block_bytes": 128},
        "block_tokens": {"block_bytes": 512},  # as many bytes as tokens make of a block
        "secret": {"secret": True},
    }

    def __init__(self) -> None:
        self.absent = dict.fromkeys(ROWS.keys() - {"tokens", *self.options}, _KEYED)

    def served(self, path: Path, row: str | None) -> int:
        keys = [b"hash 1", b"hash 2"]
        blocks = [np.full(256, number, np.uint8) for number in range(2)]
        with BlockStore.open(path, block_bytes=256, ssd_bytes="8MiB") as store:
            assert store.put(keys, blocks) == [True, True]
        if row == "tokens":
            keys = [b"hash 3", b"hash 4"]
        options = {"block_bytes": 256, **self.options.get(row or "", {})}
        with BlockStore.open(path, ssd_bytes="8MiB", **options) as store:
            return sum(store.get(keys, [bytearray(options["block_bytes"]) for _ in keys]))


class TestBlockStore(IdentityContract):
    adapter = BlockStoreRows()
