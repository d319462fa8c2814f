"""docs/counters.md has every key of ``stats``, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.cli.main import main
from kvstore.store.context import DROP_REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "counters.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.]+)` \| ([PBC ]+) \|", PAGE, re.MULTILINE)
OPEN_ENDED = ("counters.hit_tokens", "counters.dropped_blocks", "counters.corrupt_blocks")
"""Counters by name, whose total alone is a fixed key."""
MAPS = ("counters.block_errors", "counters.evicted_blocks", "ssd_formats", "block_errors")
"""Objects without a fixed key."""
SCRUB = "1MiB"


def keys(value: object, prefix: str = "") -> Iterator[str]:
    """Yield the keys of nested objects, a dot for each level."""
    if isinstance(value, list):
        for item in value:
            yield from keys(item, prefix)
    elif isinstance(value, Mapping) and prefix not in MAPS:
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else key
            if prefix in OPEN_ENDED and key != "total":
                continue
            if not isinstance(inner, Mapping) or name in (*OPEN_ENDED, *MAPS, "scrub"):
                yield name
            yield from keys(inner, name)


def listed(column: str) -> set[str]:
    return {key for key, columns in ROWS if column in columns}


def prefix_cache(path: Path) -> kvstore.PrefixCache:
    return kvstore.PrefixCache.open(
        path,
        layout="smollm2-135m",
        namespace=kvstore.Namespace(model="m"),
        block_tokens=16,
        ssd_bytes="8MiB",
        scrub_bytes_per_second=SCRUB,
    )


def fill(cache: kvstore.PrefixCache) -> None:
    tokens = np.arange(32, dtype=np.uint32)
    entries = {
        group.name: np.zeros((len(group.layers), 32, group.entry_bytes), np.uint8)
        for group in cache.layout.global_groups
    }
    cache.store(tokens, entries)
    cache.flush()


def test_every_key_of_a_prefix_cache_is_listed(tmp_path: Path) -> None:
    with prefix_cache(tmp_path / "s") as cache:
        fill(cache)
        with cache.lookup(np.arange(33)) as match, cache.load(match):
            assert set(keys(cache.stats())) == listed("P")


def test_every_key_of_a_block_store_is_listed(tmp_path: Path) -> None:
    with kvstore.BlockStore.open(
        tmp_path / "b", block_bytes=4096, ssd_bytes="8MiB", scrub_bytes_per_second=SCRUB
    ) as store:
        assert set(keys(store.stats())) == listed("B")


def test_every_key_of_the_command_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prefix_cache(tmp_path / "s") as cache:
        fill(cache)
    assert main(["stats", str(tmp_path / "s"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(keys(found)) == listed("C")


def test_every_reason_of_a_drop_is_listed() -> None:
    section = PAGE.partition("Reasons of `dropped_blocks`")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(DROP_REASONS)


def test_every_row_says_what_it_is() -> None:
    for line in PAGE.splitlines():
        if re.match(r"\| `[\w.]+` \| [PBC ]+ \|", line):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert all(cells[:4]), line
