"""Config of the reference model, with the fields of the released config, and its layer table.

The owner of a layer is the highest KV source at or below it, and its index source likewise; a layer with
compression ratio 0 has neither. The last KV source starts the decoder; layers below are the encoder.
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
"""Format of window rows: the model's own floats, or the release's format."""
GlobalFormat = Literal["fp4", "bf16"]
"""Format of global entries: that of the release, or of the previous one."""


class Mode(Enum):
    """Global entries read by a layer's attention besides its own window."""

    WINDOW_ONLY = "window only"
    """None: compression ratio 0."""
    FULL = "full"
    """Entries written by the layer, chosen by its own indexer."""
    REINDEX = "reindex"
    """Entries of another layer, chosen by its own indexer among that layer's candidates."""
    REUSE = "reuse"
    """Entries and choice of the last index source below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Row of the layer table. ``owner`` and ``index_source`` are None exactly when ``ratio`` is 0."""

    layer: int
    mode: Mode
    ratio: int
    """Tokens per global entry; 0 without entries."""
    owner: int | None
    """Layer of the global entries that this one reads."""
    index_source: int | None
    """Layer of the indexer that chooses among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Fields of the release's ``config.json`` that decide cached KV and its readers.

    By default there are compressed sparse attention, encoder and decoder. Other systems are enabled by
    the fields of their groups below.

    Invariants:
        The last KV source and all layers above it have ratio 1; every KV source is an index source; any
        other index source is above the candidate source, whose entries it reads; a layer has the
        ratio of its owner; Engram layers belong to the encoder.
    """

    vocab_size: int = 256
    """Tokens below 256 are bytes; others are not text."""
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

    # Hierarchical indexer: enabled if index_source_layer_ids has layers without own entries.
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8

    # Hyper-connections: enabled with more than one stream.
    hc_mult: int = 1
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    # Engram: enabled in these layers.
    engram_layer_ids: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16_000_000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2

    # DSpark: enabled with draft layers, which follow the model's.
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256

    # Vision: enabled with an image token.
    image_token_id: int | None = None
    vision_hidden_size: int = 1024
    downsample_ratio: int = 3

    window_format: WindowFormat = "exact"
    global_format: GlobalFormat = "fp4"

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a table that the model cannot compute."""
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
        self._check_indexers()
        dims = self.qk_rope_head_dim
        if dims % 2 or dims > min(self.head_dim, self.index_head_dim):
            msg = f"qk_rope_head_dim must be even and at most head_dim and index_head_dim, found {dims}"
            raise ConfigError(msg)
        if not set(self.engram_layer_ids) <= set(range(self.last_owner)):
            # A decoder layer computes only the last rows of a prompt, so its Engram rows would not
            # affect the stored entries of a prefix.
            msg = f"engram_layer_ids must be below the decoder's first layer {self.last_owner}, found {self.engram_layer_ids}"
            raise ConfigError(msg)
        drafts = self.num_nextn_predict_layers
        targets = self.dspark_target_layer_ids if drafts else (self.last_owner,)
        if not targets or not set(targets) <= set(range(self.last_owner, self.num_hidden_layers)):
            msg = (
                f"dspark_target_layer_ids must be layers {self.last_owner} to "
                f"{self.num_hidden_layers - 1} of the decoder, found {targets}"
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

    def _check_indexers(self) -> None:
        sources, owners = set(self.index_source_layer_ids), set(self.kv_source_layer_ids)
        if not owners <= sources:
            msg = (
                f"index_source_layer_ids must include kv_source_layer_ids {self.kv_source_layer_ids}, "
                f"found {self.index_source_layer_ids}"
            )
            raise ConfigError(msg)
        for spec in self.layers:
            if spec.mode is Mode.REINDEX and spec.owner != self.candidate_source_layer_id:
                msg = (
                    f"index_source_layer_ids has layer {spec.layer}, which reads the entries of layer "
                    f"{spec.owner}; it needs that layer as candidate_source_layer_id, found "
                    f"{self.candidate_source_layer_id}"
                )
                raise ConfigError(msg)

    @classmethod
    def tiny(cls, **changes: Any) -> ReferenceConfig:
        """Return the smallest config with every kind of layer: 12 layers, W = 128.

        Layers 0 and 1 read their window only; 2 and 4 own ratio-2 entries that 3 and 5 reuse; 6
        starts the decoder and owns ratio-1 entries that 7 to 11 reuse.
        """
        return dataclasses.replace(cls(), **changes)

    @classmethod
    def full(cls, **changes: Any) -> ReferenceConfig:
        """Return the smallest config with every system.

        Layers 8 and 10 choose again among the candidates of 6, residuals have four streams, layers
        1 and 4 look up n-grams, there are two draft layers, and token 256 is the image token.
        """
        every: dict[str, Any] = {
            "vocab_size": 258,
            "index_source_layer_ids": (2, 4, 6, 8, 10),
            "candidate_source_layer_id": 6,
            "candidate_topk_blocks": 16,
            "candidate_block_size": 4,
            "hc_mult": 4,
            "engram_layer_ids": (1, 4),
            "engram_vocab_size": 500,
            "engram_n_heads": 2,
            "engram_head_dim": 32,
            "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0),
            "num_nextn_predict_layers": 2,
            "dspark_noise_token_id": 257,
            "dspark_target_layer_ids": (10, 11),
            "dspark_markov_rank": 16,
            "image_token_id": 256,
            "vision_hidden_size": 8,
        }
        return cls.tiny(**{**every, **changes})

    @classmethod
    def release(cls) -> ReferenceConfig:
        """Return the config of DeepSeek-V4.1-Flash, to count bytes: it is too large to compute.

        Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash, without mixture of experts, the
        grouped output projection and YaRN, which do not affect the cache.
        """
        return cls(
            vocab_size=129_280,
            hidden_size=5120,
            intermediate_size=2304,
            num_hidden_layers=40,
            num_attention_heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1280,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=512,
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            kv_source_layer_ids=(2, 8, 14, 20),
            index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            candidate_source_layer_id=20,
            hc_mult=4,
            engram_layer_ids=(1, 14),
            num_nextn_predict_layers=3,
            dspark_noise_token_id=128_799,
            dspark_target_layer_ids=(37, 38, 39),
            image_token_id=129_264,
            window_format="mxfp8",
        )

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of every layer, without draft layers."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def last_owner(self) -> int:
        """First decoder layer; its global entries are projected from the encoder's output."""
        return self.kv_source_layer_ids[-1]

    @property
    def draft_layers(self) -> range:
        """Ids of the draft layers, after those of the model."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Layer table."""
        return tuple(self._resolve(layer) for layer in range(self.num_hidden_layers))

    def _resolve(self, layer: int) -> LayerSpec:
        ratio = self.compress_ratios[layer]
        owner = max((o for o in self.kv_source_layer_ids if o <= layer), default=None)
        source = max((i for i in self.index_source_layer_ids if i <= layer), default=None)
        if ratio == 0:
            mode = Mode.WINDOW_ONLY
            return LayerSpec(layer=layer, mode=mode, ratio=0, owner=None, index_source=None)
        if owner is None:
            msg = f"layer {layer} has compression ratio {ratio} and no KV source at or below it"
            raise ConfigError(msg)
        mode = Mode.FULL if owner == layer else Mode.REINDEX if source == layer else Mode.REUSE
        return LayerSpec(layer=layer, mode=mode, ratio=ratio, owner=owner, index_source=source)

    def to_hf(self) -> dict[str, Any]:
        """Return the config in the form of a Hugging Face ``config.json``."""
        fields = dataclasses.asdict(self)
        del fields["window_format"], fields["global_format"]
        return {"model_type": "deepseek_v41_text", "_name_or_path": "reference", **fields}

    def layout(self, dtype: torch.dtype = torch.float64) -> kvstore.Layout:
        """Return the layout of a model that computes in ``dtype``.

        It is ``kvstore.layout`` of the config, except for other formats than the release's. With
        ``window_format="exact"`` the WINDOW group has the model's own floats: a restored row equals the
        computed row, so that differences after a hit are caused by replay and not by rounding. GLOBAL
        groups and the fingerprint are unchanged. ``global_format="bf16"`` is for comparison with FP4.
        """
        layout = kvstore.layout(self.to_hf())
        groups = {group.name: group for group in layout.groups}
        if self.window_format == "exact":
            size = self.head_dim * dtype.itemsize
            groups["window"] = dataclasses.replace(
                groups["window"], values=size, entry_format="u8", scale_rule=""
            )
        if self.global_format == "bf16":
            for group in layout.global_groups:
                groups[group.name] = dataclasses.replace(group, entry_format="bf16", scale_rule="")
        return dataclasses.replace(layout, groups=tuple(groups.values()))
