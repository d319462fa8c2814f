"""Layouts of models whose configs describe each layer separately (architecture search)."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import Config, integer, layer_count, type_of
from kvstore.layout.models.plain import AttentionLayers, layout_of_layers, refuse_other_caches
from kvstore.layout.values import Layout


def per_block(config: Config, own: str, dtype: str | Mapping[str, str] | None) -> Layout:
    """Return the layout of ``block_configs`` (Nemotron-NAS): plain attention, a linear layer or none.

    Layers with the same number of KV heads share a group: k and v for the largest number, k_heads4 etc. below.
    """
    refuse_other_caches(config, "plain keys and values in some layers", ("block_configs",))
    heads, count = integer(config, "num_attention_heads"), layer_count(config)
    blocks = config.get("block_configs")
    if not isinstance(blocks, list | tuple) or len(blocks) != count:
        msg = f"config field block_configs must be a list of {count} objects, found {brief(blocks)}"
        raise ConfigError(msg)
    head_dim = config.get("head_dim") or integer(config, "hidden_size") // heads
    size = integer({"head_dim": head_dim}, "head_dim")
    layers: dict[int, list[int]] = {}
    for layer, block in enumerate(blocks):
        kv_heads = _kv_heads(config, block, heads)
        if kv_heads:
            layers.setdefault(kv_heads, []).append(layer)
    most = max(layers, default=0)
    parts = [
        AttentionLayers("" if n == most else f"_heads{n}", tuple(layers[n]), n * size)
        for n in sorted(layers, reverse=True)
    ]
    if not parts:
        msg = f"model type {type_of(config)} has no layer with attention in block_configs"
        raise ConfigError(msg)
    return layout_of_layers(config, parts, own, dtype)


def _kv_heads(config: Config, block: object, heads: int) -> int:
    """Return the number of KV heads of a layer; 0 for a layer without attention."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        msg = f"an item of block_configs must be an object with attention, found {brief(block)}"
        raise ConfigError(msg)
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    # Configs of later models of this family have windows, chunks and state here as well.
    plain = {"no_op", "replace_with_linear", "n_heads_in_group"}
    others = [name for name, value in attention.items() if value and name not in plain]
    group = integer(attention, "n_heads_in_group")
    if others or heads % group:
        msg = (
            f"model type {type_of(config)} has attention {brief(dict(attention))} in a layer of {heads} "
            "heads, expected n_heads_in_group that divides them alone"
        )
        raise ConfigError(msg)
    return heads // group
