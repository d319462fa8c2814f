"""What a model caches: groups of layers, their entries, and how long each is worth keeping.

A layout knows bytes and lifetimes. It knows no tier, no token and no file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError


class Lifetime(StrEnum):
    """How long the entries of a group are worth keeping, and so where they may live."""

    GLOBAL = "GLOBAL"
    """Read by every later token: kept for days, in device pages and on SSD."""
    WINDOW = "WINDOW"
    """Read by the next few tokens only: kept for minutes, in the host window pool alone."""
    TRANSIENT = "TRANSIENT"
    """Never worth keeping: counted by the footprint, stored nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """How the values of one entry become bytes.

    An entry is its ``planes``, one after the other: the packed values, then their scales.

    Source: spec of the formats in docs/format.md, section 3.
    """

    name: str
    value_bits: int
    scale_block: int = 0
    """Values that share one scale; 0 when all values of an entry do."""
    scale_bytes: int = 0
    """Bytes of one scale; 0 when the format has no scales."""

    def planes(self, values: int) -> tuple[int, ...]:
        """Bytes of each plane of an entry of ``values`` values."""
        if self.value_bits * values % 8 or (self.scale_block and values % self.scale_block):
            unit = math.lcm(8 // math.gcd(8, self.value_bits), self.scale_block or 1)
            msg = f"{self.name} packs {unit} values at a time, an entry of {values} does not divide"
            raise ConfigError(msg)
        packed = self.value_bits * values // 8
        scales = values // self.scale_block if self.scale_block else 1
        return (packed, scales * self.scale_bytes) if self.scale_bytes else (packed,)

    def entry_bytes(self, values: int) -> int:
        """Bytes of an entry of ``values`` values."""
        return sum(self.planes(values))


FORMATS: Mapping[str, EntryFormat] = {
    entry_format.name: entry_format
    for entry_format in (
        EntryFormat(name="u8", value_bits=8),
        EntryFormat(name="f16", value_bits=16),
        EntryFormat(name="bf16", value_bits=16),
        EntryFormat(name="f32", value_bits=32),
        EntryFormat(name="nvfp4", value_bits=4, scale_block=16, scale_bytes=1),
        EntryFormat(name="mxfp4", value_bits=4, scale_block=32, scale_bytes=1),
        EntryFormat(name="mxfp8", value_bits=8, scale_block=32, scale_bytes=1),
        EntryFormat(name="fp8", value_bits=8, scale_bytes=4),
    )
}
"""Every entry format that a layout can name."""

SCALE_RULES: Mapping[str, tuple[str, ...]] = {
    "nvfp4": ("v41", "torchao"),
    "mxfp4": ("floor", "even", "rceil"),
    "mxfp8": ("rceil",),
    "fp8": ("amax",),
}
"""Rules for choosing a scale, by format. The first is the default. Source: docs/format.md."""

DTYPE_FORMATS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "uint8": "u8",
}
"""Names that model configs use, as entry formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that cache one kind of entry.

    Invariants:
        ``layers`` are distinct and ascending; every count is at least 1; ``scale_rule`` belongs to
        ``entry_format``.
    """

    name: str
    layers: tuple[int, ...]
    """Ids of the layers that own entries; layers that only read them are not listed."""
    values: int
    """Values in one entry of one layer."""
    entry_format: str
    lifetime: Lifetime = Lifetime.GLOBAL
    tokens_per_entry: int = 1
    scale_rule: str = ""

    def __post_init__(self) -> None:
        """Reject a group that could not be stored."""
        is_ascending = list(self.layers) == sorted(set(self.layers))
        if not self.layers or not is_ascending or self.layers[0] < 0:
            msg = f"group {self.name!r}: layers must be ids from 0 on, distinct, ascending and not empty, found {self.layers}"
            raise ConfigError(msg)
        if self.tokens_per_entry < 1 or self.values < 1:
            msg = (
                f"group {self.name!r}: tokens_per_entry and values must be at least 1, "
                f"found {self.tokens_per_entry} and {self.values}"
            )
            raise ConfigError(msg)
        if self.entry_format not in FORMATS:
            msg = f"group {self.name!r}: unknown entry format {self.entry_format!r}, expected one of {', '.join(FORMATS)}"
            raise ConfigError(msg)
        rules = SCALE_RULES.get(self.entry_format, ("",))
        if not self.scale_rule:
            object.__setattr__(self, "scale_rule", rules[0])
        if self.scale_rule not in rules:
            msg = f"group {self.name!r}: {self.entry_format} has no scale rule {self.scale_rule!r}, expected one of {', '.join(rules)}"
            raise ConfigError(msg)
        self.planes  # noqa: B018 - raises for a number of values that the format cannot pack

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of each plane of one entry: packed values, then scales."""
        return FORMATS[self.entry_format].planes(self.values)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer."""
        return sum(self.planes)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one token adds, over all layers of the group."""
        return Fraction(len(self.layers) * self.entry_bytes, self.tokens_per_entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a model caches.

    Invariants:
        At least one GLOBAL group; group names are distinct; ``window_tokens`` is positive exactly
        when there are WINDOW groups.
    """

    model: str
    """A label for people. It is not part of the fingerprint."""
    groups: tuple[LayerGroup, ...]
    window_tokens: int = 0
    """W: how many of the last tokens a window layer reads, the query's own token included."""
    _fingerprint: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Reject a layout that no cache could hold."""
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            msg = f"layout {self.model!r}: group names must be distinct, found {names}"
            raise ConfigError(msg)
        if not self.global_groups:
            msg = f"layout {self.model!r} has no GLOBAL group, so there is nothing to keep"
            raise ConfigError(msg)
        if self.window_tokens < 0 or bool(self.window_groups) != (self.window_tokens > 0):
            msg = (
                f"layout {self.model!r}: window_tokens is {self.window_tokens} "
                f"with {len(self.window_groups)} WINDOW groups; give both or neither"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "_fingerprint", self._digest())

    @property
    def global_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that tiers keep."""
        return tuple(group for group in self.groups if group.lifetime is Lifetime.GLOBAL)

    @property
    def window_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that the window pool keeps."""
        return tuple(group for group in self.groups if group.lifetime is Lifetime.WINDOW)

    def group(self, name: str) -> LayerGroup:
        """Return the group of that name, or raise ``ValueError`` naming those there are."""
        for group in self.groups:
            if group.name == name:
                return group
        msg = f"layout {self.model!r} has no group {name!r}, expected one of {', '.join(g.name for g in self.groups)}"
        raise ValueError(msg)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of global KV that one token adds."""
        return sum((group.bytes_per_token for group in self.global_groups), Fraction(0))

    @property
    def window_bytes(self) -> int:
        """Bytes of one window snapshot of ``window_tokens`` rows."""
        rows = self.window_tokens
        return sum(
            len(g.layers) * g.entry_bytes * rows // g.tokens_per_entry for g in self.window_groups
        )

    @property
    def alignment(self) -> int:
        """Least number of tokens that is a whole number of entries in every GLOBAL group."""
        return math.lcm(*(group.tokens_per_entry for group in self.global_groups))

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides how GLOBAL entries are laid out in bytes."""
        return self._fingerprint

    def _digest(self) -> str:
        groups = [
            [g.name, list(g.layers), g.values, g.entry_format, g.tokens_per_entry, g.scale_rule]
            for g in self.global_groups
        ]
        text = json.dumps(["kvstore.layout.1", groups], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def layout(
    source: str | Path | Mapping[str, Any], *, dtype: str | Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a model.

    ``source`` is a preset's name, the path of a Hugging Face ``config.json`` (or of the folder that
    holds one), or such a config as a mapping. ``dtype`` overrides the entry format of keys and
    values: one name for both, or one per group as ``{"k": "bf16", "v": "nvfp4"}``. Windows keep the
    model's own dtype unless the mapping names ``k_window`` and ``v_window`` as well.

    Raises:
        ConfigError: for an unknown preset, a missing or unreadable file, or a kind of model whose
            cache this version cannot describe.
    """
    if isinstance(source, Mapping):
        return from_config(source, dtype=dtype)
    given: object = source
    if not isinstance(given, str | Path):
        msg = (
            f"expected a preset's name, the path of a config.json or a config as a mapping, found "
            f"{type(given).__name__}; a transformers config gives one as config.to_dict()"
        )
        raise ConfigError(msg)
    preset = PRESETS.get(str(source))
    if preset is not None:
        return from_config(preset, dtype=dtype)
    path = Path(source)
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = path.is_file()
    except OSError:  # a text that no file system takes as a name
        is_file = False
    if not is_file:
        msg = f"{str(source)!r} is neither a preset ({', '.join(PRESETS)}) nor the path of a config.json"
        raise ConfigError(msg)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        msg = f"{path} is not a readable JSON file: {error}"
        raise ConfigError(msg) from error
    if not isinstance(config, dict):
        msg = f"{path} holds a JSON {type(config).__name__}, expected an object with a model_type"
        raise ConfigError(msg)
    return from_config(config, dtype=dtype)


def from_config(
    config: Mapping[str, Any], *, dtype: str | Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a Hugging Face config. Raises ``ConfigError`` as :func:`layout` does."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        msg = f"text_config must be an object, found {type(text).__name__}"
        raise ConfigError(msg)
    kind = text.get("model_type", config.get("model_type"))
    if kind == "deepseek_v41_text":
        if dtype is not None:
            msg = f"{kind} has fixed entry formats, dtype={dtype!r} does not apply"
            raise ConfigError(msg)
        return _compressed_sparse(text)
    # A multi-modal config may name the dtype once, outside.
    named = (c.get(name) for c in (text, config) for name in ("dtype", "torch_dtype"))
    own = str(next(filter(None, named), "bfloat16"))
    return _plain(text, kind, own, own if dtype is None else dtype)


def _field(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"config field {name} must be a positive integer, found {value!r}"
        if value is None:
            msg += f"; model type {config.get('model_type')!r} may cache what this version cannot describe: make a kvstore.Layout of your own"
        raise ConfigError(msg)
    return value


def _entry_format(dtype: object) -> str:
    text = str(dtype).removeprefix("torch.")
    name = DTYPE_FORMATS.get(text, text)
    if name not in FORMATS:
        known = ", ".join([*FORMATS, *DTYPE_FORMATS])
        msg = f"unknown dtype {str(dtype)!r}, expected one of {known}"
        raise ConfigError(msg)
    return name


_OTHER_CACHES = {
    "kv_lora_rank": "latent attention (MLA)",
    "compress_ratios": "compressed attention",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "hybrid_override_pattern": "layers of several kinds",
    "layers_block_type": "layers of several kinds",
    "attn_type_list": "layers of several kinds",
    "attention_chunk_size": "attention in chunks",
    "cross_attention_layers": "cross attention",
    "is_encoder_decoder": "cross attention",
    "num_kv_shared_layers": "layers that share a cache",
    "multi_query": "one key and value for all heads",
    "per_layer_config": "a configuration for each layer",
    "use_bidirectional_attention": "attention in both directions",
}
"""Config fields that say a model does not cache plain keys and values in every layer."""

_HEAD_SHAPES = {
    "head_dim": ("v_head_dim", "global_head_dim", "swa_head_dim"),
    "num_key_value_heads": (
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        "num_key_value_heads_per_layer",
    ),
}
"""Config fields that give values, or some of the layers, heads of another shape."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""The layer types whose layers cache plain keys and values."""


def _plain(
    config: Mapping[str, Any], kind: object, own: str, dtype: str | Mapping[str, str]
) -> Layout:
    """Layout of a model whose every layer caches one key and one value per token and KV head.

    Layers of full attention are GLOBAL; those with a sliding window are WINDOW. ``own`` is the
    model's dtype, in which a window is kept unless ``dtype`` says otherwise: a window lives for
    minutes in host memory, where exactness is worth more than its bytes.
    """
    for name, meaning in _OTHER_CACHES.items():
        if config.get(name):
            msg = f"model type {kind!r} uses {meaning} ({name}), expected plain keys and values in every layer"
            raise ConfigError(msg)
    heads = _field(config, "num_attention_heads")
    kv_heads = _field(config, "num_key_value_heads", heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = _field(config, "hidden_size") // heads
    head_dim = _field({"head_dim": head_dim}, "head_dim")
    full, sliding = _layers_by_type(config, kind)
    shape = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    for plain, others in _HEAD_SHAPES.items():
        for name in others:
            if config.get(name) and config[name] != shape[plain]:
                msg = (
                    f"model type {kind!r} has {name} {config[name]} beside {plain} {shape[plain]}, "
                    "expected keys and values of one shape in every layer"
                )
                raise ConfigError(msg)
    names = {"k": full, "v": full} | ({"k_window": sliding, "v_window": sliding} if sliding else {})
    formats = dict(dtype) if isinstance(dtype, Mapping) else {"k": dtype, "v": dtype}
    if not {"k", "v"} <= formats.keys() <= names.keys():
        optional = " and may have k_window and v_window" if sliding else ""
        msg = f"dtype names groups {sorted(formats)}, this model has exactly k and v{optional}"
        raise ConfigError(msg)
    groups = tuple(
        LayerGroup(
            name=name,
            layers=layers,
            values=kv_heads * head_dim,
            entry_format=_entry_format(formats.get(name, own)),
            lifetime=Lifetime.GLOBAL if layers is full else Lifetime.WINDOW,
        )
        for name, layers in names.items()
    )
    return Layout(
        model=str(config.get("_name_or_path") or kind or "dense"),
        groups=groups,
        window_tokens=_field(config, "sliding_window") if sliding else 0,
    )


def _layers_by_type(
    config: Mapping[str, Any], kind: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the layers of full attention and of those with a sliding window."""
    count = _field(config, "num_hidden_layers")
    types = config.get("layer_types") or []
    if not isinstance(types, (list, tuple)):
        msg = f"config field layer_types must be a list, found {types!r}"
        raise ConfigError(msg)
    if any(layer_type not in (_FULL, _SLIDING) for layer_type in types):
        found = sorted({str(layer_type) for layer_type in types})
        msg = f"model type {kind!r} has layer types {found}, expected {_FULL} and {_SLIDING} alone"
        raise ConfigError(msg)
    if not types and config.get("sliding_window") and config.get("use_sliding_window", True):
        msg = (
            f"model type {kind!r} has a sliding window of {config['sliding_window']} and no "
            "layer_types that say which layers use it"
        )
        raise ConfigError(msg)
    if _SLIDING not in types:
        return tuple(range(count)), ()
    if len(types) != count:
        msg = f"layer_types names {len(types)} layers, expected one for each of {count}"
        raise ConfigError(msg)
    full = tuple(layer for layer in range(count) if types[layer] == _FULL)
    if not full:
        msg = (
            f"model type {kind!r} has {_SLIDING} in every layer, so nothing it caches is worth "
            f"keeping; expected {_FULL} in some"
        )
        raise ConfigError(msg)
    return full, tuple(layer for layer in range(count) if types[layer] == _SLIDING)


_INDEX_SCALE_RULE = "rceil"
"""Scale rule of indexer keys. Source: the indexer of DeepSeek V4; docs/format.md, section 3.3."""
_PAIR_STATE_BYTES = 4
"""Compressor pair state is FP32: one key-value and one score per channel."""
_DRAFT_ROW_BYTES = 2
"""Draft rows are BF16."""


def _compressed_sparse(config: Mapping[str, Any]) -> Layout:
    """Layout of a causal encoder-decoder with compressed sparse attention (DeepSeek-V4.1).

    Owners are ``kv_source_layer_ids``. Owners of one compression ratio share a group for their main
    entries (NVFP4) and one for their indexer keys (MXFP4). The encoder is every layer below the
    last owner; its windows are pooled, the decoder's are not.
    """
    ratios = list(_sequence(config, "compress_ratios"))
    owners = tuple(_sequence(config, "kv_source_layer_ids"))
    layer_count = _field(config, "num_hidden_layers")
    is_inside = all(0 <= owner < layer_count for owner in owners)
    if not owners or not is_inside or len(ratios) < layer_count:
        msg = (
            f"compress_ratios needs an item for each of {layer_count} layers and kv_source_layer_ids "
            f"must lie among them, found {len(ratios)} ratios and sources {list(owners)}"
        )
        raise ConfigError(msg)
    head_dim = _field(config, "head_dim")
    index_dim = _field(config, "index_head_dim")
    last_owner = max(owners)
    groups: list[LayerGroup] = []
    for ratio in sorted({ratios[owner] for owner in owners}, reverse=True):
        if ratio < 1:
            msg = f"kv source layers must have a compression ratio of at least 1, found {ratio}"
            raise ConfigError(msg)
        members = tuple(owner for owner in owners if ratios[owner] == ratio)
        groups += [
            LayerGroup(
                name=f"{part}_r{ratio}",
                layers=members,
                values=values,
                entry_format=entry_format,
                scale_rule=rule,
                tokens_per_entry=ratio,
            )
            for part, values, entry_format, rule in (
                ("main", head_dim, "nvfp4", "v41"),
                ("index", index_dim, "mxfp4", _INDEX_SCALE_RULE),
            )
        ]
    groups.append(
        LayerGroup(
            name="window",
            layers=tuple(range(last_owner)),
            values=head_dim,
            entry_format="mxfp8",
            lifetime=Lifetime.WINDOW,
        )
    )
    groups.append(
        LayerGroup(
            name="decoder_window",
            layers=tuple(range(last_owner, layer_count)),
            values=head_dim,
            entry_format="mxfp8",
            lifetime=Lifetime.TRANSIENT,
        )
    )
    pooling = tuple(owner for owner in owners if ratios[owner] > 1)
    if pooling:
        groups.append(
            LayerGroup(
                name="pair_ring",
                layers=pooling,
                values=2 * head_dim * _PAIR_STATE_BYTES,
                entry_format="u8",
                lifetime=Lifetime.TRANSIENT,
            )
        )
    if config.get("num_nextn_predict_layers"):
        drafts = _field(config, "num_nextn_predict_layers")
        groups.append(
            LayerGroup(
                name="draft",
                layers=tuple(range(layer_count, layer_count + drafts)),
                values=head_dim * _DRAFT_ROW_BYTES,
                entry_format="u8",
                lifetime=Lifetime.TRANSIENT,
            )
        )
    return Layout(
        model=str(config.get("_name_or_path") or "deepseek_v41"),
        groups=tuple(groups),
        window_tokens=_field(config, "sliding_window"),
    )


def _sequence(config: Mapping[str, Any], name: str) -> Sequence[int]:
    value = config.get(name)
    if not isinstance(value, (list, tuple)) or any(
        isinstance(item, bool) or not isinstance(item, int) for item in value
    ):
        msg = f"config field {name} must be a list of integers, found {value!r}"
        raise ConfigError(msg)
    return value


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
    "deepseek-v4.1-flash": {
        "_name_or_path": "deepseek-v4.1-flash",
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "num_nextn_predict_layers": 3,
    },
    # Source: config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
    "smollm2-135m": {
        "_name_or_path": "smollm2-135m",
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "dtype": "bfloat16",
    },
}
"""Configs of models that can be named instead of read."""
