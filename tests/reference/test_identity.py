"""Identity of the reference engine: its namespace covers all facts that decide its results."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine
from tests.identity_contract import IdentityContract
from tests.reference.support import SYSTEMS, image_at, prompt_tokens, tables, with_images

BLOCK = 32
CONFIG = ReferenceConfig.tiny(
    num_hidden_layers=6,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3),
    sliding_window=16,
    index_topk=8,
    hidden_size=32,
)
SHOWN = replace(CONFIG, **SYSTEMS["images"])
LOOKED_UP = replace(CONFIG, **{**SYSTEMS["n-grams"], "engram_layer_ids": (1,)})
TOKENS = prompt_tokens(4 * BLOCK + 5)


def served(path: Path, engine: ReferenceEngine, **options: Any) -> int:
    """Run the prompt over a store opened for an engine; return the hit, with all of it stored."""
    images = options.pop("images", ())
    given = {"namespace": engine.namespace, "block_tokens": BLOCK, **options}
    sizes: dict[str, Any] = {"ssd_bytes": "64MiB", "device_bytes": 0, "window_rows": 30}
    tokens = with_images(engine.config, options.pop("tokens", TOKENS), images)
    given.pop("tokens", None)
    with kvstore.PrefixCache.open(path, layout=engine.layout, **sizes, **given) as cache:
        engine.cache = cache
        return engine.prefill(tokens, images=images).hit_tokens


class ReferenceRows:
    configs: ClassVar[dict[str, ReferenceConfig]] = {
        "windows": replace(CONFIG, sliding_window=8),
        "positions": replace(CONFIG, compress_rope_theta=1e5),
    }
    engines: ClassVar[dict[str, dict[str, Any]]] = {
        "layout": {"dtype": torch.float32},
        "weights": {"seed": 1},
        "tokenizer": {"tokenizer": "2"},
    }

    def __init__(self) -> None:
        self.absent = {
            "adapter": "the reference model takes no adapter",
            "compute": "it has one implementation of attention; its number format is in the digest",
            "rank": "it is never sharded",
        }

    def served(self, path: Path, row: str | None) -> int:
        config = SHOWN if row == "images" else CONFIG
        images = (image_at(2, seed=1),) if row == "images" else ()
        first = ReferenceEngine(config)
        served(path, first, images=images)
        other = ReferenceEngine(
            self.configs.get(row or "", config), **self.engines.get(row or "", {})
        )
        options: dict[str, Any] = {"images": (image_at(2, seed=2),) if images else ()}
        if row == "tokens":
            options["tokens"] = np.concatenate([TOKENS[:1] ^ 1, TOKENS[1:]])
        elif row == "block_tokens":
            options["block_tokens"] = 2 * BLOCK
        elif row in ("tenant", "generation"):
            changed: dict[str, Any] = {"tenant": "b"} if row == "tenant" else {"generation": 1}
            options["namespace"] = replace(other.namespace, **changed)
        elif row == "secret":
            options["secret"] = True
        return served(path, other, **options)


class TestIdentity(IdentityContract):
    adapter = ReferenceRows()


def test_the_place_of_an_image_decides(tmp_path: Path) -> None:
    engine = ReferenceEngine(SHOWN)
    served(tmp_path / "s", engine, images=(image_at(40, seed=1),))
    assert served(tmp_path / "s", engine, images=(image_at(40, seed=1),)) == 4 * BLOCK
    assert served(tmp_path / "s", engine, images=(image_at(41, seed=1),)) == BLOCK


def test_tables_that_were_there_are_part_of_the_weights(tmp_path: Path) -> None:
    """With one config and seed: the tables in the folder decide, not those that would be made."""
    made = ReferenceEngine(LOOKED_UP, tables=tables())
    shutil.copytree(tables(), tmp_path / "same")
    shutil.copytree(tables(), tmp_path / "other")
    for file in (tmp_path / "other").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2 :] = content[: -(len(content) // 2)]
        file.write_bytes(content)
    same = ReferenceEngine(LOOKED_UP, tables=tmp_path / "same")
    other = ReferenceEngine(LOOKED_UP, tables=tmp_path / "other")
    assert served(tmp_path / "s", made) == 0
    assert served(tmp_path / "s", same) == 4 * BLOCK
    assert served(tmp_path / "s", other) == 0
