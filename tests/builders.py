"""Builders that tests share: layouts, entries, chains of keys, window snapshots, a clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.identity.block import BlockHash, block_key
from kvstore.identity.hash import as_tokens, block_hashes
from kvstore.layout import LayerGroup, Layout, Lifetime
from kvstore.layout.replay import WindowSnapshot

ROOT = BlockHash(hashlib.sha256(b"root of the tests").digest())
"""A root for chains whose namespace does not matter."""

FORMAT_UNITS = {
    "u8": 1,
    "f16": 1,
    "bf16": 1,
    "f32": 1,
    "nvfp4": 16,
    "mxfp4": 32,
    "mxfp8": 32,
    "fp8": 1,
}
"""Values that each entry format packs at a time, written down again so that tests do not ask."""


def tiny_layout() -> Layout:
    """One layer, one byte a token: the smallest thing that can be stored."""
    group = LayerGroup(name="only", layers=(0,), values=1, entry_format="u8")
    return Layout(model="tiny", groups=(group,))


def mixed_layout() -> Layout:
    """A layout whose owners differ in everything: groups, formats, and ratios on one layer."""
    return Layout(
        model="mixed",
        groups=(
            LayerGroup(
                name="coarse", layers=(1, 4), values=32, entry_format="mxfp4", tokens_per_entry=4
            ),
            LayerGroup(name="fine", layers=(0, 1, 2), values=16, entry_format="nvfp4"),
            LayerGroup(
                name="coarse_raw", layers=(1, 3), values=3, entry_format="f16", tokens_per_entry=4
            ),
            LayerGroup(
                name="pairs", layers=(2, 4), values=5, entry_format="u8", tokens_per_entry=2
            ),
        ),
    )


def windowed_layout(window_tokens: int = 8) -> Layout:
    """A layout with two small WINDOW groups: 3 * 2 + 1 * 4 = 10 bytes a row."""
    return Layout(
        model="windowed",
        window_tokens=window_tokens,
        groups=(
            LayerGroup(name="kept", layers=(0,), values=1, entry_format="u8"),
            LayerGroup(
                name="near",
                layers=(0, 1, 2),
                values=2,
                entry_format="u8",
                lifetime=Lifetime.WINDOW,
            ),
            LayerGroup(
                name="far", layers=(3,), values=4, entry_format="u8", lifetime=Lifetime.WINDOW
            ),
        ),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of one to five GLOBAL groups over up to six layers, any format, ratios 1 to 4."""
    groups = []
    for number in range(draw(st.integers(1, 5))):
        entry_format = draw(st.sampled_from(sorted(FORMAT_UNITS)))
        groups.append(
            LayerGroup(
                name=f"g{number}",
                layers=tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=4)))),
                values=FORMAT_UNITS[entry_format] * draw(st.integers(1, 3)),
                entry_format=entry_format,
                tokens_per_entry=draw(st.integers(1, 4)),
            )
        )
    return Layout(model="drawn", groups=tuple(groups))


def random_entries(
    layout: Layout, tokens: int, rng: np.random.Generator
) -> dict[str, NDArray[np.uint8]]:
    """Entries of random bytes for ``tokens`` tokens, by GLOBAL group."""
    return {
        group.name: rng.integers(
            0,
            256,
            (len(group.layers), tokens // group.tokens_per_entry, group.entry_bytes),
            np.uint8,
        )
        for group in layout.global_groups
    }


def random_tokens(count: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """Token ids from the whole range that a token may have."""
    return rng.integers(0, 2**32, count, np.uint32)


def hashes_of(tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Hashes of the whole blocks of ``tokens`` below ``ROOT``."""
    return list(block_hashes(ROOT, as_tokens(tokens), block_tokens))


def path_of(symbols: Sequence[int]) -> bytes:
    """Keys, end to end, of a chain that has one block per symbol."""
    return b"".join(block_key(block_hash) for block_hash in hashes_of(symbols, 1))


def snapshot_of(layout: Layout, start: int, stop: int, fill: int = 1) -> WindowSnapshot:
    """A window snapshot whose row for token p holds ``(fill + p) % 251`` in every byte."""
    rows = {}
    for group in layout.window_groups:
        count = (stop - start) // group.tokens_per_entry
        values = (fill + start + np.arange(count) * group.tokens_per_entry) % 251
        shape = (len(group.layers), count, group.entry_bytes)
        rows[group.name] = np.broadcast_to(values[None, :, None], shape).astype(np.uint8)
    return WindowSnapshot(start, stop, rows)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
