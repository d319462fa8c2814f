"""The contract of identity: a block is served only where everything that decides its bytes is equal.

An adapter joins with one class in its tests::

    class TestIdentity(IdentityContract):
        adapter = MyAdapter()

``docs/identity.md`` is the table of the rows below; ``tests/docs/test_identity_page.py`` keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from kvstore import KVStoreError

ROWS = {
    "tokens": "token ids of the prefix",
    "layout": "GLOBAL groups: layers, values, entry formats, dtype",
    "windows": "WINDOW groups and the window length",
    "block_tokens": "tokens of a block",
    "weights": "model weights",
    "tokenizer": "tokenizer and prompt encoder",
    "adapter": "adapters (LoRA): names, weights, scales, which are active",
    "positions": "position tables: rope parameters, edited buffers, tables chosen by length",
    "images": "image content, and its place in the prompt",
    "compute": "attention implementation and other settings that choose kernels or dtypes",
    "rank": "tensor-parallel rank and size: which heads a process holds",
    "tenant": "tenant, cache salt",
    "generation": "generation of the weights under one name",
    "secret": "secret that hashes are made under",
}
"""Everything that decides a key or a value, by the name of its row."""


class IdentityAdapter(Protocol):
    """One adapter, as the contract asks it."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Rows that do not exist here, each with the reason."""
        ...

    def served(self, path: Path, row: str | None) -> int:
        """Return how many tokens a changed setting is served of what the base setting stored.

        Stores a prompt of several blocks under the base setting in a store at ``path``, then asks
        for the same prompt with what ``row`` names changed, and nothing else; None changes nothing.
        Raises ``KVStoreError`` where the changed setting is refused.
        """
        ...


class IdentityContract:
    """Tests of one adapter; a subclass names it."""

    adapter: ClassVar[IdentityAdapter]

    def test_the_same_setting_is_served(self, tmp_path: Path) -> None:
        assert self.adapter.served(tmp_path / "store", None) > 0

    @pytest.mark.parametrize("row", ROWS)
    def test_another_setting_is_not_served(self, row: str, tmp_path: Path) -> None:
        if row in self.adapter.absent:
            assert len(self.adapter.absent[row]) > 10, "an absent row needs its reason"
            return
        try:
            served = self.adapter.served(tmp_path / "store", row)
        except KVStoreError:
            served = 0  # refused by name
        assert served == 0
