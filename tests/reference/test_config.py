"""The layer table follows from the config's fields, and so does the layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvstore
from kvstore.reference.config import Mode, ReferenceConfig

# Widths do not matter here, so the release's table fits a small config. Its decoder also has layers
# that choose again among the last owner's entries; this model runs them as Reuse.
RELEASE = {
    "num_hidden_layers": 40,
    "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
    "kv_source_layer_ids": (2, 8, 14, 20),
    "index_source_layer_ids": (2, 8, 14, 20),
}


def test_layers_of_the_release_resolve_to_their_owners() -> None:
    config = dataclasses.replace(ReferenceConfig(), **RELEASE)  # type: ignore[arg-type]

    owners = [spec.owner for spec in config.layers]

    assert owners == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [spec.index_source for spec in config.layers] == owners
    modes = [spec.mode for spec in config.layers]
    assert modes[:2] == [Mode.WINDOW_ONLY] * 2
    assert [layer for layer, mode in enumerate(modes) if mode is Mode.FULL] == [2, 8, 14, 20]


def test_layout_is_the_one_that_kvstore_derives_except_for_exact_window_rows() -> None:
    config = ReferenceConfig.tiny()
    derived = kvstore.layout(config.to_hf())

    for dtype in (torch.float64, torch.float32):
        exact = config.layout(dtype)
        assert exact.fingerprint == derived.fingerprint
        assert exact.global_groups == derived.global_groups
        window = exact.group("window")
        assert window.entry_bytes == config.head_dim * dtype.itemsize
        assert window.layers == derived.group("window").layers == tuple(range(6))
        assert exact.window_bytes == 6 * 128 * window.entry_bytes

    stored = dataclasses.replace(config, window_format="mxfp8")
    assert stored.layout() == derived


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kv_source_layer_ids": ()}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": (2, 4, 12), "index_source_layer_ids": (2, 4, 12)}, "12"),
        ({"index_source_layer_ids": (2, 4, 6, 8)}, "index_source_layer_ids"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1)}, "layer 5"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)}, "ratio 1"),
        ({"compress_ratios": (0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)}, "layer 1"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    ],
)
def test_a_table_that_cannot_run_is_refused(changes: dict[str, object], found: str) -> None:
    with pytest.raises(kvstore.ConfigError, match=found):
        ReferenceConfig.tiny(**changes)
