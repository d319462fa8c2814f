"""The representation of an open store."""

from __future__ import annotations

from pathlib import Path

from kvstore import BlockStore
from tests.stores import open_cache


def test_an_open_store_shows_its_path_and_its_role(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s") as cache:
        assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, owner>"
    assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, closed>"
    with open_cache(tmp_path / "s", role="reader") as cache:
        assert repr(cache) == f"<PrefixCache of {tmp_path / 's'}, reader>"
    with BlockStore.open(tmp_path / "b", block_bytes=64, ssd_bytes="8MiB") as store:
        assert repr(store) == f"<BlockStore of {tmp_path / 'b'}, owner>"
