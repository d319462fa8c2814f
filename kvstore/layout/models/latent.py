"""Layouts of latent attention (MLA): DeepSeek V2 to V3.2 and models that adopted it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import (
    Config,
    entry_format,
    integer,
    label_of,
    layer_count,
    named_formats,
    type_of,
)
from kvstore.layout.models.plain import refuse_other_caches, refuse_other_layers
from kvstore.layout.values import LayerGroup, Layout

_LATENT_SCALE_BLOCK = 128
"""Values of a latent or of an indexer key that share one float32 scale in an FP8 cache of V3.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Config fields that describe the latent attention of a model type."""

    layers: str = "num_hidden_layers"
    per_layer: int = 1
    """Attention modules of one layer, each with its own latent."""


def latent(spec: Latent, config: Config, own: str, dtype: str | Mapping[str, str] | None) -> Layout:
    """Return the layout of latent attention: one latent with its rotated key per token and layer.

    Draft layers are not counted, because few engines run them.
    """
    count = _layers(spec, config, "kv_lora_rank")
    formats = named_formats(own if dtype is None else dtype, ("latent",))
    group = LayerGroup(
        name="latent",
        layers=tuple(range(count * spec.per_layer)),
        values=integer(config, "kv_lora_rank") + integer(config, "qk_rope_head_dim"),
        entry_format=entry_format(formats["latent"]),
    )
    return Layout(model=label_of(config), groups=(group,))


def _layers(spec: Latent, config: Config, *claims: str) -> int:
    refuse_other_caches(config, "latent attention (MLA) in every layer", claims)
    count = layer_count(config, spec.layers)
    refuse_other_layers(config, count, "latent attention (MLA)")
    return count


def latent_sparse(config: Config) -> Layout:
    """Return the layout of latent attention with an indexer (DeepSeek-V3.2), in the FP8 cache of engines.

    Latent: E4M3 codes with a float32 scale for each 128, and the rotated key in BF16: 656 bytes. Indexer
    key: E4M3 codes with such scales: 132 bytes. Both are stored as bytes, without a codec. Source: the
    ``fp8_ds_mla`` cache of vLLM and FlashMLA.
    """
    layers = tuple(range(_layers(Latent(), config, "kv_lora_rank", "index_head_dim")))
    indexers = config.get("indexer_types") or ["full"]
    if not isinstance(indexers, list | tuple) or any(kind != "full" for kind in indexers):
        msg = f"model type {type_of(config)} has indexer_types {brief(indexers)}, expected an indexer of its own in every layer"
        raise ConfigError(msg)
    rank, index_dim = integer(config, "kv_lora_rank"), integer(config, "index_head_dim")
    if rank % _LATENT_SCALE_BLOCK or index_dim % _LATENT_SCALE_BLOCK:
        msg = f"kv_lora_rank and index_head_dim must be multiples of {_LATENT_SCALE_BLOCK}, found {rank} and {index_dim}"
        raise ConfigError(msg)
    scaled = Fraction(_LATENT_SCALE_BLOCK + 4, _LATENT_SCALE_BLOCK)
    size = int(rank * scaled) + 2 * integer(config, "qk_rope_head_dim")
    return Layout(
        model=label_of(config),
        groups=tuple(
            LayerGroup(name=name, layers=layers, values=values, entry_format="u8")
            for name, values in (("latent", size), ("index", int(index_dim * scaled)))
        ),
    )
