"""The shape of the reference model, in the fields of the real config. It knows no weights.

The layer table is derived, never written down: the owner of a layer is the largest KV source at or
below it, its index source likewise, and both are absent where the compression ratio is 0. The last
KV source starts the decoder; every layer below it is the encoder.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

import kvstore
from kvstore.errors import ConfigError

WindowFormat = Literal["exact", "mxfp8"]
"""How window rows are kept: as the model's own floats, or as the release keeps them."""


class Mode(Enum):
    """What a layer's attention reads besides its own window."""

    WINDOW_ONLY = "window only"
    """Nothing: compression ratio 0."""
    FULL = "full"
    """Global entries that it writes itself, chosen by its own indexer."""
    REUSE = "reuse"
    """The entries and the choice of the last Full layer below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One row of the layer table.

    Invariants:
        ``owner`` and ``index_source`` are None exactly when ``ratio`` is 0.
    """

    layer: int
    mode: Mode
    ratio: int
    """Tokens per global entry; 0 where there are none."""
    owner: int | None
    """The layer whose global entries this one reads."""
    index_source: int | None
    """The layer whose indexer chooses among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Fields of the release's ``config.json`` that decide what is cached and what reads it.

    Invariants:
        The last KV source has ratio 1, and so have all layers above it; every KV source is an index
        source and the other way round; a layer's ratio is its owner's.
    """

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    head_dim: int = 32
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 48
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 32
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)
    kv_source_layer_ids: tuple[int, ...] = (2, 4, 6)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 6)
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rms_norm_eps: float = 1e-20
    window_format: WindowFormat = "exact"

    def __post_init__(self) -> None:
        """Reject a table that this model could not run."""
        self._check_sources()
        for spec in self.layers:
            if spec.owner is not None and self.compress_ratios[spec.owner] != spec.ratio:
                msg = (
                    f"layer {spec.layer} has compression ratio {spec.ratio}, "
                    f"its owner {spec.owner} has {self.compress_ratios[spec.owner]}; they must agree"
                )
                raise ConfigError(msg)
        decoder = self.compress_ratios[self.last_owner : self.num_hidden_layers]
        if set(decoder) != {1}:
            msg = f"the last KV source and all layers above it need compression ratio 1, found {decoder}"
            raise ConfigError(msg)
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(
            self.head_dim, self.index_head_dim
        ):
            msg = (
                f"qk_rope_head_dim must be even and at most head_dim and index_head_dim, "
                f"found {self.qk_rope_head_dim}"
            )
            raise ConfigError(msg)

    def _check_sources(self) -> None:
        owners = self.kv_source_layer_ids
        if not owners or list(owners) != sorted(set(owners)) or owners[-1] > len(self.ratios) - 1:
            msg = (
                f"kv_source_layer_ids must be ascending layers of {self.num_hidden_layers}, each with "
                f"a compression ratio; found {owners} and {len(self.ratios)} ratios"
            )
            raise ConfigError(msg)
        if self.index_source_layer_ids != owners:
            # A layer that chooses again among another layer's entries does so inside a pool of
            # candidates, which this model does not have.
            msg = (
                f"index_source_layer_ids must equal kv_source_layer_ids {owners}, "
                f"found {self.index_source_layer_ids}"
            )
            raise ConfigError(msg)

    @classmethod
    def tiny(cls, **changes: Any) -> ReferenceConfig:
        """Return the smallest config with every kind of layer: 12 layers, W = 128.

        Layers 0 and 1 read their window only; 2 and 4 own ratio-2 entries that 3 and 5 reuse; 6
        starts the decoder and owns ratio-1 entries that 7 to 11 reuse.
        """
        return dataclasses.replace(cls(), **changes)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of every layer that runs; draft layers may follow in the config."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def last_owner(self) -> int:
        """The first decoder layer; its global entries are projected from the encoder's output."""
        return self.kv_source_layer_ids[-1]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layer table, derived."""
        return tuple(self._resolve(layer) for layer in range(self.num_hidden_layers))

    def _resolve(self, layer: int) -> LayerSpec:
        ratio = self.compress_ratios[layer]
        owner = max((o for o in self.kv_source_layer_ids if o <= layer), default=None)
        source = max((i for i in self.index_source_layer_ids if i <= layer), default=None)
        if ratio == 0:
            return LayerSpec(
                layer=layer, mode=Mode.WINDOW_ONLY, ratio=0, owner=None, index_source=None
            )
        if owner is None:
            msg = f"layer {layer} has compression ratio {ratio} and no KV source at or below it"
            raise ConfigError(msg)
        mode = Mode.FULL if owner == layer else Mode.REUSE
        return LayerSpec(layer=layer, mode=mode, ratio=ratio, owner=owner, index_source=source)

    def to_hf(self) -> dict[str, Any]:
        """Return the config as a Hugging Face ``config.json`` would hold it."""
        fields = dataclasses.asdict(self)
        del fields["window_format"]
        return {"model_type": "deepseek_v41_text", "_name_or_path": "reference", **fields}

    def layout(self, dtype: torch.dtype = torch.float64) -> kvstore.Layout:
        """Return what this model caches when it computes in ``dtype``.

        It is ``kvstore.layout`` of the config. The release keeps window rows as MXFP8, and so does
        ``window_format="mxfp8"``. With ``"exact"`` the WINDOW group holds the model's own floats,
        byte for byte: then a restored row is the row that was computed, and what differs after a
        hit differs because of replay and not because of rounding. GLOBAL groups and so the
        fingerprint are the same either way.
        """
        layout = kvstore.layout(self.to_hf())
        if self.window_format == "mxfp8":
            return layout
        window = dataclasses.replace(
            layout.group("window"),
            values=self.head_dim * dtype.itemsize,
            entry_format="u8",
            scale_rule="",
        )
        groups = tuple(window if group.name == "window" else group for group in layout.groups)
        return dataclasses.replace(layout, groups=groups)
