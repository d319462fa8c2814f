"""Layouts of plain keys and values: full and sliding-window attention with any number of KV heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvstore import checks
from kvstore.checks import is_integer
from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import (
    Config,
    context_tokens,
    entry_format,
    integer,
    label_of,
    layer_count,
    named_formats,
    one_of_names,
    type_of,
)
from kvstore.layout.values import LayerGroup, Layout, Lifetime

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Layer types that cache plain keys and values."""


class Slides(Enum):
    """Rule for the layers of a model type that have its sliding window.

    ``STATED``: the layers in ``layer_types``, or all but each ``sliding_window_pattern``-th.
    ``EVERY``: all layers, if the config has a window. ``UPPER``: the layers from
    ``max_window_layers`` on, if ``use_sliding_window`` is true.
    """

    NONE = "none"
    STATED = "stated"
    EVERY = "every"
    UPPER = "upper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Config fields that describe the cache of a model type; of several names the first is preferred."""

    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    hidden: tuple[str, ...] = ("hidden_size",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    """Empty: every head has its own keys and values."""
    head_dim: tuple[str, ...] = ("head_dim",)
    """Empty: hidden size / heads."""
    slides: Slides = Slides.NONE
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the model class for fields that a config.json may omit."""
    kv_heads_of: Callable[[Config, int], int] | None = None
    """Rule for the number of KV heads, given the number of heads."""
    shares: str = ""
    """Field with the number of last layers that read the keys and values of earlier layers."""
    claims: tuple[str, ...] = ()
    """Fields of ``OTHER_CACHES`` that the rules of this type read."""


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers whose keys and values have one shape and one lifetime."""

    suffix: str
    layers: tuple[int, ...]
    values: int
    lifetime: Lifetime = Lifetime.GLOBAL


def plain(spec: Plain, config: Config, own: str, dtype: str | Mapping[str, str] | None) -> Layout:
    """Return the layout of a model whose layers cache one key and one value per token and KV head.

    Layers with full attention are GLOBAL, with a sliding window WINDOW. Windows have ``own``, the format of
    the model's cache, unless ``dtype`` names them: in host memory exactness matters more than bytes.
    """
    config = {**spec.left_out, **config}
    refuse_other_caches(config, "plain keys and values in every layer", spec.claims)
    heads = integer(config, *spec.heads)
    kv_heads = _kv_heads(spec, config, heads)
    head_dim = _head_dim(spec, config, heads)
    _refuse_other_shapes(config, kv_heads, head_dim)
    full, sliding, window = _layers_by_type(spec, config)
    parts = [AttentionLayers("", full, kv_heads * head_dim)]
    if sliding:
        parts.append(AttentionLayers("_window", sliding, kv_heads * head_dim, Lifetime.WINDOW))
    return layout_of_layers(config, parts, own, dtype, window)


def layout_of_layers(
    config: Config,
    items: Sequence[AttentionLayers],
    own: str,
    dtype: str | Mapping[str, str] | None,
    window_tokens: int = 0,
) -> Layout:
    """Return a layout with a group of keys and one of values per item, the first named k and v."""
    optional = [f"{kind}{each.suffix}" for each in items[1:] for kind in "kv"]
    formats = named_formats(own if dtype is None else dtype, ("k", "v"), optional)
    return Layout(
        model=label_of(config),
        groups=tuple(
            LayerGroup(
                name=kind + each.suffix,
                layers=each.layers,
                values=each.values,
                entry_format=entry_format(
                    formats.get(
                        kind + each.suffix,
                        formats[kind] if each.lifetime is Lifetime.GLOBAL else own,
                    )
                ),
                lifetime=each.lifetime,
            )
            for each in items
            for kind in "kv"
        ),
        window_tokens=window_tokens,
    )


def _kv_heads(spec: Plain, config: Config, heads: int) -> int:
    if spec.kv_heads_of is not None:
        return spec.kv_heads_of(config, heads)
    if not spec.kv_heads:
        found = config.get("num_key_value_heads")
        if found not in (None, heads):
            _refuse_ignored(config, "num_key_value_heads", f"{heads} heads with their own")
        return heads
    if one_of_names(config, *spec.kv_heads) is None and any(n in config for n in spec.kv_heads):
        return heads
    return integer(config, *spec.kv_heads)


def _head_dim(spec: Plain, config: Config, heads: int) -> int:
    found = one_of_names(config, *spec.head_dim) if spec.head_dim else None
    if found is not None:
        return integer(config, *spec.head_dim)
    divided = integer(config, *spec.hidden) // heads
    if not spec.head_dim and config.get("head_dim") not in (None, divided):
        _refuse_ignored(config, "head_dim", f"{divided}, the hidden size over the heads")
    return integer({"head_dim": divided}, "head_dim")


def _refuse_ignored(config: Config, name: str, expected: str) -> None:
    msg = f"model type {type_of(config)} has {name} {brief(config[name])}, which its class does not read; expected {expected}"
    raise ConfigError(msg)


OTHER_CACHES = {
    "compress_ratios": "compressed attention",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "hybrid_override_pattern": "layers of several kinds",
    "layers_block_type": "layers of several kinds",
    "block_configs": "layers of several kinds",
    "attention_chunk_size": "attention in chunks",
    "cross_attention_layers": "cross attention",
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "cross attention",
    "num_kv_shared_layers": "layers that share a cache",
    "kv_sharing_modes": "layers that share a cache",
    "use_cla": "layers that share a cache",
    "layer_sharing": "layers that run more than once",
    "use_mla": "latent attention",
    "kv_lora_rank": "latent attention",
    "index_head_dim": "indexer keys",
    "multi_query": "one key and value for all heads",
    "per_layer_config": "a configuration for each layer",
    "use_bidirectional_attention": "attention in both directions",
}
"""Config fields of models that do not cache plain keys and values in every layer."""

_HEAD_SHAPES = {
    "head_dim": ("v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim"),
    "num_key_value_heads": (
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        "num_key_value_heads_per_layer",
    ),
}
"""Config fields that give another head shape to values or to some layers."""


def refuse_other_caches(config: Config, expected: str, claims: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` for a field whose cache the rules of the model type do not cover."""
    for name, meaning in OTHER_CACHES.items():
        if config.get(name) and name not in claims:
            msg = f"model type {type_of(config)} uses {meaning} ({name}), expected {expected}"
            raise ConfigError(msg)
    kinds = config.get("attn_type_list")
    if kinds and (not isinstance(kinds, list | tuple) or any(kind != 1 for kind in kinds)):
        msg = (
            f"model type {type_of(config)} uses linear attention in some layers (attn_type_list "
            f"{brief(kinds)}), expected 1 for each: {expected}"
        )
        raise ConfigError(msg)


def _refuse_other_shapes(config: Config, kv_heads: int, head_dim: int) -> None:
    shape = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    for name, others in _HEAD_SHAPES.items():
        for other in others:
            if config.get(other) and config[other] != shape[name]:
                msg = (
                    f"model type {type_of(config)} has {other} {brief(config[other])} beside {name} "
                    f"{shape[name]}, expected keys and values of one shape in every layer"
                )
                raise ConfigError(msg)


def refuse_other_layers(config: Config, count: int, expected: str) -> None:
    """Raise ``ConfigError`` if ``layer_types`` has layers without full attention."""
    types = _layer_types(config, count)
    if any(kind not in (_FULL, "indexed_attention") for kind in types):
        msg = f"model type {type_of(config)} has layer types {brief(sorted(set(types)))}, expected {expected} alone"
        raise ConfigError(msg)


def _layer_types(config: Config, count: int) -> list[str]:
    """Return the types of all layers; empty if the config has none."""
    types = config.get("layer_types") or []
    if not isinstance(types, (list, tuple)):
        raise ConfigError(f"config field layer_types must be a list, found {brief(types)}")
    if types and len(types) != count:
        msg = f"layer_types names {len(types):,} layers, expected one for each of {count}"
        raise ConfigError(msg)
    return [kind if isinstance(kind, str) else brief(kind) for kind in types]


def _layers_by_type(spec: Plain, config: Config) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    count = layer_count(config, *spec.layers)
    types = _layer_types(config, count)
    if any(kind not in (_FULL, _SLIDING) for kind in types):
        msg = f"model type {type_of(config)} has layer types {brief(sorted(set(types)))}, expected {_FULL} and {_SLIDING} alone"
        raise ConfigError(msg)
    owners = range(count - _shared(spec, config, count))
    if not types and _has_window(spec, config):
        types = _types_by_rule(spec, config, count)
    if _SLIDING not in types or _covers_context(config):
        return tuple(owners), (), 0
    if config.get("use_sliding_window") is False:
        msg = (
            f"model type {type_of(config)} has layers with a sliding window and use_sliding_window false, which "
            "not every engine reads; expected only one of them"
        )
        raise ConfigError(msg)
    if spec.slides is Slides.NONE:
        msg = f"model type {type_of(config)} has {_SLIDING} in layer_types, which its class does not support"
        raise ConfigError(msg)
    full = tuple(layer for layer in owners if types[layer] == _FULL)
    if not full:
        msg = f"model type {type_of(config)} has {_SLIDING} in every layer, so there is no global KV to store; expected {_FULL} in some layer"
        raise ConfigError(msg)
    sliding = tuple(layer for layer in owners if types[layer] == _SLIDING)
    return full, sliding, integer(config, "sliding_window") if sliding else 0


def _shared(spec: Plain, config: Config, count: int) -> int:
    """Return the number of last layers without keys and values of their own."""
    if not spec.shares or not config.get(spec.shares):
        return 0
    shared = integer(config, spec.shares)
    if shared >= count:
        msg = f"config field {spec.shares} must be less than the {count} layers, found {shared}"
        raise ConfigError(msg)
    return shared


def _has_window(spec: Plain, config: Config) -> bool:
    """Return whether a model has a window, or may have the default of its class."""
    if _is_off(spec, config):
        return False
    may_be_left_out = spec.slides is Slides.STATED and "sliding_window" not in config
    return may_be_left_out or bool(config.get("sliding_window"))


def _is_off(spec: Plain, config: Config) -> bool:
    """Return whether a config switches its window off; only some classes read that field."""
    return "use_sliding_window" in spec.left_out and config.get("use_sliding_window") is False


def _covers_context(config: Config) -> bool:
    """Return whether a window exceeds the context. Engines keep one row less, so equal is not enough."""
    window, context = config.get("sliding_window"), context_tokens(config)
    if context is None or not is_integer(window):
        return False
    return window > context


def _types_by_rule(spec: Plain, config: Config, count: int) -> list[str]:
    """Return the types of the layers of a config that has a window and no ``layer_types``."""
    if spec.slides is Slides.EVERY:
        return [_SLIDING] * count
    if spec.slides is Slides.UPPER:
        name = "max_window_layers"
        first = checks.integer(config.get(name), f"config field {name}", error=ConfigError)
        return [_FULL if layer < first else _SLIDING for layer in range(count)]
    period = config.get("sliding_window_pattern")
    if period is None or spec.slides is Slides.NONE:
        if _covers_context(config):
            return [_FULL] * count
        msg = (
            f"model type {type_of(config)} has a sliding window of {brief(config.get('sliding_window'))} and no "
            "layer_types; expected layer_types that name the layers with the window"
        )
        raise ConfigError(msg)
    period = integer(config, "sliding_window_pattern")
    return [_SLIDING if layer % period else _FULL for layer in range(1, count + 1)]
