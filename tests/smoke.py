"""Uses an installation that has no torch: a store, its commands, and the errors that name the extra.

``make dist`` runs it with an installed wheel, ``tests/test_distribution.py`` with this checkout and a torch
that cannot be imported. Start it as ``python -I``, since this folder has modules named like Python's own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.cli.main import main
from kvstore.distribution import install_command

LAYOUT = kvstore.Layout(
    model="smoke",
    groups=(kvstore.LayerGroup(name="kv", layers=(0, 1), values=32, entry_format="nvfp4"),),
)
SPACE = kvstore.Namespace(model="smoke")


def store_and_read(path: Path) -> None:
    tokens = np.arange(65, dtype=np.uint32)
    group = LAYOUT.groups[0]
    entries = np.random.default_rng(1).integers(0, 120, (2, 64, group.entry_bytes), np.uint8)
    with kvstore.PrefixCache.open(path, layout=LAYOUT, namespace=SPACE, block_tokens=16) as cache:
        cache.store(tokens[:64], {"kv": entries})
        cache.flush()
        with cache.lookup(tokens) as match:
            assert match.hit_tokens == 64, match.hit_tokens
            assert np.array_equal(cache.read(match)["kv"], entries)
        assert cache.stats()["tiers"]["ssd"]["blocks"] == 4
        match = cache.lookup(tokens)
        expect_error(lambda: cache.load(match))
        expect_error(lambda: cache.device.allocate(1))
    options: tuple[dict[str, Any], ...] = ({"device": "cpu"}, {"device_bytes": "1MiB"})
    for option in options:
        expect_error(
            partial(kvstore.PrefixCache.open, path, layout=LAYOUT, namespace=SPACE, **option)
        )


def put_and_get(path: Path) -> None:
    target = bytearray(64)
    with kvstore.BlockStore.open(path, block_bytes=64) as store:
        assert store.put([b"key"], [bytes(range(64))]) == [True]
        store.flush()
        assert store.get([b"key"], [target]) == [True]
    assert target == bytes(range(64))


def expect_error(call: Callable[[], object]) -> None:
    found = "no error"
    try:
        call()
    except kvstore.ConfigError as error:
        found = str(error)
    assert install_command("torch") in found, found


def write_trace(path: Path) -> None:
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 1536,
            "output_length": 10,
            "hash_ids": [0, 1, 2 + n % 3],
        }
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, trace = Path(folder) / "store", Path(folder) / "trace.jsonl"
        store_and_read(store)
        put_and_get(Path(folder) / "blocks")
        expect_error(partial(import_module, "kvstore.engine"))
        write_trace(trace)
        for command in (
            ["footprint", "deepseek-v4.1-flash", "--measure"],
            ["simulate", str(trace), "--size", "1GiB", "--model", "deepseek-v4.1-flash"],
            ["stats", str(store)],
            ["verify", str(store)],
        ):
            assert main(command) == 0, command


run()
