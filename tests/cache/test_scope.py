"""Arguments and representation of a scope."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import BlockStore
from tests.stores import BLOCK, DENSE, entries_of, open_cache, tokens_of


def test_a_negative_wait_is_refused(tmp_path: Path) -> None:
    tokens = tokens_of(BLOCK)
    with open_cache(tmp_path / "s") as cache:
        with pytest.raises(ValueError, match=r"wait must be seconds, 0 or more, found -1"):
            cache.store(tokens, entries_of(DENSE, tokens), wait=-1)
        assert cache.store(tokens, entries_of(DENSE, tokens), wait=0).dropped == 0


def test_an_open_store_shows_its_path_and_its_role(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, owner>"
    assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, closed>"
    with open_cache(tmp_path / "s", role="reader") as cache:
        assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, reader>"
    with BlockStore.open(tmp_path / "b", block_bytes=64, ssd_bytes="8MiB") as store:
        assert repr(store) == f"<BlockStore of {tmp_path / 'b'}, owner>"
