"""The layer table follows from the config's fields, and so does the layout."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.reference.config import Mode, ReferenceConfig


def test_layers_of_the_release_resolve_to_their_owners() -> None:
    config = ReferenceConfig.release()

    owners = [spec.owner for spec in config.layers]
    sources = [spec.index_source for spec in config.layers]
    modes = [spec.mode for spec in config.layers]

    assert owners == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    reindexed = [layer for source in (24, 28, 32, 36) for layer in [source] * 4]
    assert sources == [*owners[:20], *[20] * 4, *reindexed]
    assert modes[:2] == [Mode.WINDOW_ONLY] * 2
    assert [layer for layer, mode in enumerate(modes) if mode is Mode.FULL] == [2, 8, 14, 20]
    assert [layer for layer, mode in enumerate(modes) if mode is Mode.REINDEX] == [24, 28, 32, 36]
    assert modes.count(Mode.REUSE) == 3 * 5 + 5 * 3


def owned_bytes(config: ReferenceConfig) -> Fraction:
    """Bytes per token out of the layer table: FP4 with a scale per 16, or per 32 for index keys."""
    main = config.head_dim / 2 + config.head_dim / 16
    index = config.index_head_dim / 2 + config.index_head_dim / 32
    full = [spec for spec in config.layers if spec.mode is Mode.FULL]
    return sum((Fraction(main + index) / spec.ratio for spec in full), Fraction(0))


def test_the_release_takes_890_bytes_a_token_by_layers_by_layout_and_by_preset() -> None:
    config, preset = ReferenceConfig.release(), kvstore.layout("deepseek-v4.1-flash")

    layout = config.layout()

    assert owned_bytes(config) == layout.bytes_per_token == preset.bytes_per_token == 890
    assert layout.groups == preset.groups
    assert layout.window_tokens == preset.window_tokens
    assert layout.fingerprint == preset.fingerprint


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    groups=st.lists(st.tuples(st.sampled_from([2, 4]), st.integers(1, 3)), max_size=4),
    decoder=st.integers(1, 6),
    first=st.integers(0, 2),
    width=st.sampled_from([32, 64, 512]),
    index_width=st.sampled_from([32, 128]),
)
def test_any_table_has_the_layout_that_its_layers_add_up_to(
    groups: list[tuple[int, int]], decoder: int, first: int, width: int, index_width: int
) -> None:
    ratios, owners = [0] * first, []
    for ratio, layers in [*groups, (1, decoder)]:
        owners.append(len(ratios))
        ratios += [ratio] * layers
    if not owners[-1]:  # a decoder needs an encoder
        return
    config = ReferenceConfig.tiny(
        num_hidden_layers=len(ratios),
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(owners),
        index_source_layer_ids=tuple(owners),
        head_dim=width,
        index_head_dim=index_width,
    )

    layout = config.layout()

    assert layout.bytes_per_token == owned_bytes(config)
    assert layout.group("window").layers == tuple(range(owners[-1]))
    assert {layer for group in layout.global_groups for layer in group.layers} == set(owners)


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


def test_entries_in_bf16_are_the_same_values_in_two_bytes_each() -> None:
    config = ReferenceConfig.tiny(global_format="bf16")
    packed = ReferenceConfig.tiny().layout()

    for group in config.layout().global_groups:
        assert group.entry_bytes == 2 * packed.group(group.name).values
    assert config.layout().window_groups == packed.window_groups


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kv_source_layer_ids": ()}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": (2, 4, 12), "index_source_layer_ids": (2, 4, 12)}, "12"),
        ({"index_source_layer_ids": (2, 6)}, "index_source_layer_ids"),
        ({"index_source_layer_ids": (2, 4, 6, 8)}, "candidate_source_layer_id"),
        ({"index_source_layer_ids": (2, 3, 4, 6), "candidate_source_layer_id": 6}, "layer 3"),
        ({"engram_layer_ids": (6,)}, "engram_layer_ids"),
        ({"num_nextn_predict_layers": 1, "dspark_target_layer_ids": (5,)}, "dspark_target"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1)}, "layer 5"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)}, "ratio 1"),
        ({"compress_ratios": (0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)}, "layer 1"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    ],
)
def test_a_table_that_cannot_run_is_refused(changes: dict[str, object], found: str) -> None:
    with pytest.raises(kvstore.ConfigError, match=found):
        ReferenceConfig.tiny(**changes)
