"""Layouts of DeepSeek V4 and V4.1: compressed entries of several tokens, and windows in every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError
from kvstore.layout.models.fields import integer, integers, label_of, layer_count
from kvstore.layout.values import MOST_LAYERS, LayerGroup, Layout, Lifetime

_COMPRESSED_RULES = {"nvfp4": "v41", "mxfp4": "rceil"}
"""Scale rules of compressed entries, by format: V4.1's main entries, and the indexer keys of V4 and V4.1.
Source: their engines; docs/format.md, section 3.3."""
_PAIR_STATE_BYTES = 4
"""Compressor pair state is FP32: one key-value and one score per channel."""
_DRAFT_ROW_BYTES = 2
"""Draft rows are BF16."""


def compressed_sparse(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a causal encoder-decoder with compressed sparse attention (DeepSeek-V4.1).

    Owners are ``kv_source_layer_ids``; those of one compression ratio share a group of main entries
    (NVFP4) and one of indexer keys (MXFP4). The encoder is every layer below the last owner; only its
    windows are pooled.
    """
    ratios = list(integers(config, "compress_ratios"))
    owners = tuple(integers(config, "kv_source_layer_ids"))
    count = layer_count(config)
    is_inside = all(0 <= owner < count for owner in owners)
    if not owners or not is_inside or len(ratios) < count:
        msg = (
            f"compress_ratios needs an item for each of {count} layers and kv_source_layer_ids "
            f"must lie among them, found {len(ratios)} ratios and sources {list(owners)}"
        )
        raise ConfigError(msg)
    head_dim = integer(config, "head_dim")
    index_dim = integer(config, "index_head_dim")
    last_owner = max(owners)
    groups: list[LayerGroup] = []
    for ratio in sorted({ratios[owner] for owner in owners}, reverse=True):
        if ratio < 1:
            msg = f"kv source layers must have a compression ratio of at least 1, found {ratio}"
            raise ConfigError(msg)
        members = tuple(owner for owner in owners if ratios[owner] == ratio)
        groups.append(_compressed_group("main", members, ratio, head_dim, "nvfp4"))
        groups.append(_compressed_group("index", members, ratio, index_dim, "mxfp4"))
    decoder = tuple(range(last_owner, count))
    groups.append(_window_group(last_owner, head_dim, "mxfp8"))
    groups.append(_transient_group("decoder_window", decoder, head_dim, "mxfp8"))
    pooling = tuple(owner for owner in owners if ratios[owner] > 1)
    if pooling:
        state_bytes = 2 * head_dim * _PAIR_STATE_BYTES
        groups.append(_transient_group("pair_ring", pooling, state_bytes, "u8"))
    if config.get("num_nextn_predict_layers"):
        drafts = range(count, count + integer(config, "num_nextn_predict_layers", most=MOST_LAYERS))
        groups.append(_transient_group("draft", tuple(drafts), head_dim * _DRAFT_ROW_BYTES, "u8"))
    return Layout(
        model=label_of(config),
        groups=tuple(groups),
        window_tokens=integer(config, "sliding_window"),
    )


_INDEXED_RATIO = 4
"""Compression ratio of the V4 layers that choose entries with an indexer; others read all entries."""
_ROW_SCALE_BLOCK, _ROW_ALIGNMENT = 64, 8
"""Values that share one E8M0 scale in a row of V4, and the bytes that rows are padded to."""


def compressed(config: Mapping[str, Any]) -> Layout:
    """Return the layout of compressed attention and a window in every layer (DeepSeek-V4).

    A row has E4M3 codes, the rotated values in BF16, an E8M0 scale for each 64 codes, and padding: 448 +
    128 + 7 + 1 = 584 bytes, for compressed entries and windows. Source: the V4 caches of vLLM and
    SGLang. Rows are stored as bytes, without a codec. Indexer keys are MXFP4. Compressor states and
    draft layers are not counted.
    """
    ratios = list(integers(config, "compress_ratios"))
    count = layer_count(config)
    if len(ratios) < count:
        msg = f"compress_ratios needs an item for each of {count} layers, found {len(ratios)}"
        raise ConfigError(msg)
    head_dim, rope = integer(config, "head_dim"), integer(config, "qk_rope_head_dim")
    if rope >= head_dim:
        msg = f"qk_rope_head_dim must be less than head_dim, found {rope} and {head_dim}"
        raise ConfigError(msg)
    codes = head_dim - rope
    row = codes + 2 * rope + math.ceil(codes / _ROW_SCALE_BLOCK)
    row += -row % _ROW_ALIGNMENT
    groups: list[LayerGroup] = []
    for ratio in sorted({ratio for ratio in ratios[:count] if ratio}):
        members = tuple(layer for layer in range(count) if ratios[layer] == ratio)
        groups.append(_compressed_group("main", members, ratio, row, "u8"))
        if ratio == _INDEXED_RATIO:
            index_dim = integer(config, "index_head_dim")
            groups.append(_compressed_group("index", members, ratio, index_dim, "mxfp4"))
    groups.append(_window_group(count, row, "u8"))
    return Layout(
        model=label_of(config),
        groups=tuple(groups),
        window_tokens=integer(config, "sliding_window"),
    )


def _compressed_group(
    kind: str, layers: tuple[int, ...], ratio: int, values: int, entry_format: str
) -> LayerGroup:
    return LayerGroup(
        name=f"{kind}_r{ratio}",
        layers=layers,
        values=values,
        entry_format=entry_format,
        scale_rule=_COMPRESSED_RULES.get(entry_format, ""),
        tokens_per_entry=ratio,
    )


def _transient_group(
    name: str, layers: tuple[int, ...], values: int, entry_format: str
) -> LayerGroup:
    return LayerGroup(
        name=name,
        layers=layers,
        values=values,
        entry_format=entry_format,
        lifetime=Lifetime.TRANSIENT,
    )


def _window_group(layers: int, values: int, entry_format: str) -> LayerGroup:
    return LayerGroup(
        name="window",
        layers=tuple(range(layers)),
        values=values,
        entry_format=entry_format,
        lifetime=Lifetime.WINDOW,
    )
