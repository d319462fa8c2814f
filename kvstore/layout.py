"""What a model caches: groups of layers, their entries, and how long each is worth keeping.

A layout knows bytes and lifetimes. It knows no tier, no token and no file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.presets import PRESETS


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
    model's own dtype unless the mapping names ``k_window`` and ``v_window`` as well. A model of
    latent attention has one group, ``latent``; DeepSeek V3.2, V4 and V4.1 have formats of their own.

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
    is_folder = is_file = False
    with suppress(OSError):  # of a text that no file system takes as a name
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        is_file = path.is_file()
    if is_folder and not is_file:
        msg = f"{_shown(source)} is a folder without a config.json, expected a model's folder"
        raise ConfigError(msg)
    if not is_file:
        msg = f"{_shown(source)} is neither a preset ({', '.join(PRESETS)}) nor the path of a config.json{_near(source)}"
        raise ConfigError(msg)
    try:
        return from_config(_read(path), dtype=dtype)
    except ConfigError as error:
        msg = f"{path}: {error}"
        raise ConfigError(msg) from error


_MOST_CONFIG_BYTES = 1 << 24
"""Largest config that is read: hundreds of times any public one, so that weights are refused at once."""
_SHOWN = 200
"""Characters of a source that an error repeats."""


def _shown(source: object) -> str:
    return repr(str(source)[:_SHOWN])


def _near(source: object) -> str:
    """Return a question that names the presets most like a name that is none."""
    name = str(source)[:_SHOWN].lower().rsplit("/", 1)[-1]
    near = [preset for preset in PRESETS if name and (name in preset or preset in name)]
    near = near or difflib.get_close_matches(name, PRESETS)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _read(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises ``ConfigError`` for anything else."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        is_whole = len(text) <= _MOST_CONFIG_BYTES
        config = json.loads(text.decode()) if is_whole else None
    except (OSError, ValueError, RecursionError) as error:
        msg = f"not a readable JSON file: {error}"
        raise ConfigError(msg) from error
    if not is_whole:
        msg = f"larger than any config.json, expected at most {_MOST_CONFIG_BYTES:,} bytes"
        raise ConfigError(msg)
    if not isinstance(config, dict):
        msg = f"a JSON {type(config).__name__}, expected an object with a model_type"
        raise ConfigError(msg)
    return config


def from_config(
    config: Mapping[str, Any], *, dtype: str | Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a Hugging Face config. Raises ``ConfigError`` as :func:`layout` does."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        msg = f"text_config must be an object, found {type(text).__name__}"
        raise ConfigError(msg)
    kind = text.get("model_type", config.get("model_type"))
    own_formats = _OWN_FORMATS.get(kind) if isinstance(kind, str) else None
    if own_formats is None and text.get("kv_lora_rank") and text.get("index_head_dim"):
        own_formats = _latent_sparse
    if own_formats is not None:
        if dtype is not None:
            msg = f"{kind} has fixed entry formats, dtype={dtype!r} does not apply"
            raise ConfigError(msg)
        return own_formats(text)
    # A multi-modal config may name the dtype once, outside.
    named = (c.get(name) for c in (text, config) for name in ("dtype", "torch_dtype"))
    own = str(next(filter(None, named), "bfloat16"))
    chosen = own if dtype is None else dtype
    if text.get("kv_lora_rank"):
        return _latent(text, kind, chosen)
    return _plain({**_CLASS_DEFAULTS.get(str(kind), {}), **text}, kind, own, chosen)


_MOST_FIELD = 1 << 20
"""Largest value of a field: no window is longer than the longest context, 1,048,576 tokens."""
_MOST_LAYERS = 1 << 12
"""Most layers: thirty times any public model's. Laying out a frame costs their square."""


def _field(
    config: Mapping[str, Any], name: str, default: int | None = None, most: int = _MOST_FIELD
) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"config field {name} must be a positive integer, found {_brief(value)}"
        if value is None:
            msg += (
                f"; model type {config.get('model_type')!r} may leave it to its class (transformers' "
                "AutoConfig has its to_dict() with every field), or cache what this version cannot "
                "describe: make a kvstore.Layout of your own"
            )
        raise ConfigError(msg)
    if value > most:
        msg = f"config field {name} must be at most {most:,}, found {_brief(value)}"
        raise ConfigError(msg)
    return value


def _layer_count(config: Mapping[str, Any]) -> int:
    return _field(config, "num_hidden_layers", most=_MOST_LAYERS)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _entry_format(dtype: object) -> str:
    text = str(dtype).removeprefix("torch.")
    name = DTYPE_FORMATS.get(text, text)
    if name not in FORMATS:
        known = ", ".join([*FORMATS, *DTYPE_FORMATS])
        msg = f"unknown dtype {str(dtype)!r}, expected one of {known}"
        raise ConfigError(msg)
    return name


_OTHER_CACHES = {
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

_GEMMA = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
_CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma2": {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 6},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "gemma": {"head_dim": 256},
    "qwen3": {"head_dim": 128},
}
"""What a config.json may leave out because it is the default of its class.

Every ``sliding_window_pattern``-th layer is full, the others slide. Source: transformers,
configuration_*.py of these model types.
"""


def _refuse_other_caches(config: Mapping[str, Any], kind: object, expected: str) -> None:
    for name, meaning in _OTHER_CACHES.items():
        if config.get(name):
            msg = f"model type {kind!r} uses {meaning} ({name}), expected {expected}"
            raise ConfigError(msg)


def _plain(
    config: Mapping[str, Any], kind: object, own: str, dtype: str | Mapping[str, str]
) -> Layout:
    """Layout of a model whose every layer caches one key and one value per token and KV head.

    Layers of full attention are GLOBAL; those with a sliding window are WINDOW. ``own`` is the
    model's dtype, in which a window is kept unless ``dtype`` says otherwise: a window lives for
    minutes in host memory, where exactness is worth more than its bytes.
    """
    _refuse_other_caches(config, kind, "plain keys and values in every layer")
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
    count = _layer_count(config)
    types = config.get("layer_types") or []
    if not isinstance(types, (list, tuple)):
        msg = f"config field layer_types must be a list, found {_brief(types)}"
        raise ConfigError(msg)
    if any(layer_type not in (_FULL, _SLIDING) for layer_type in types):
        found = sorted({str(layer_type)[:_SHOWN] for layer_type in types})
        msg = f"model type {kind!r} has layer types {_brief(found)}, expected {_FULL} and {_SLIDING} alone"
        raise ConfigError(msg)
    if not types and config.get("sliding_window") and config.get("use_sliding_window", True):
        if config.get("sliding_window_pattern") is None:
            msg = (
                f"model type {kind!r} has a sliding window of {_brief(config['sliding_window'])} and no "
                "layer_types that say which layers use it"
            )
            raise ConfigError(msg)
        period = _field(config, "sliding_window_pattern")
        types = [_SLIDING if layer % period else _FULL for layer in range(1, count + 1)]
    if types and len(types) != count:
        msg = f"layer_types names {len(types)} layers, expected one for each of {count}"
        raise ConfigError(msg)
    if _SLIDING not in types:
        return tuple(range(count)), ()
    full = tuple(layer for layer in range(count) if types[layer] == _FULL)
    if not full:
        msg = (
            f"model type {kind!r} has {_SLIDING} in every layer, so nothing it caches is worth "
            f"keeping; expected {_FULL} in some"
        )
        raise ConfigError(msg)
    return full, tuple(layer for layer in range(count) if types[layer] == _SLIDING)


def _latent(config: Mapping[str, Any], kind: object, dtype: str | Mapping[str, str]) -> Layout:
    """Layout of latent attention (MLA): one latent with its rotated key, a token and layer.

    Draft layers, which few engines run, are not counted.
    """
    layers = _latent_layers(config, kind)
    formats = dtype if isinstance(dtype, Mapping) else {"latent": dtype}
    if formats.keys() != {"latent"}:
        msg = f"dtype names groups {sorted(formats)}, this model has exactly latent"
        raise ConfigError(msg)
    values = _field(config, "kv_lora_rank") + _field(config, "qk_rope_head_dim")
    group = LayerGroup(
        name="latent", layers=layers, values=values, entry_format=_entry_format(formats["latent"])
    )
    return Layout(model=str(config.get("_name_or_path") or kind or "latent"), groups=(group,))


def _latent_layers(config: Mapping[str, Any], kind: object) -> tuple[int, ...]:
    _refuse_other_caches(config, kind, "latent attention (MLA) in every layer")
    full, sliding = _layers_by_type(config, kind)
    if sliding:
        msg = f"model type {kind!r} has {_SLIDING} beside latent attention (MLA), expected {_FULL} alone"
        raise ConfigError(msg)
    return full


_LATENT_SCALE_BLOCK = 128
"""Values of a latent or of an indexer key that share one float32 scale in an FP8 cache of V3.2."""


def _latent_sparse(config: Mapping[str, Any]) -> Layout:
    """Layout of latent attention with an indexer (DeepSeek-V3.2), as engines serve it: in FP8.

    A latent is E4M3 codes with a float32 scale for 128 of them, and its rotated key in BF16: 656
    bytes. An indexer key is E4M3 codes with such scales: 132. Source: the ``fp8_ds_mla`` cache of
    vLLM and FlashMLA. Both are kept as bytes: no codec here reads them.
    """
    kind = config.get("model_type")
    layers = _latent_layers(config, kind)
    rank, index_dim = _field(config, "kv_lora_rank"), _field(config, "index_head_dim")
    if rank % _LATENT_SCALE_BLOCK or index_dim % _LATENT_SCALE_BLOCK:
        msg = (
            f"kv_lora_rank and index_head_dim must be multiples of {_LATENT_SCALE_BLOCK}, found "
            f"{rank} and {index_dim}"
        )
        raise ConfigError(msg)
    scaled = Fraction(_LATENT_SCALE_BLOCK + 4, _LATENT_SCALE_BLOCK)
    latent = int(rank * scaled) + 2 * _field(config, "qk_rope_head_dim")
    return Layout(
        model=str(config.get("_name_or_path") or kind),
        groups=tuple(
            LayerGroup(name=name, layers=layers, values=size, entry_format="u8")
            for name, size in (("latent", latent), ("index", int(index_dim * scaled)))
        ),
    )


_COMPRESSED_RULES = {"nvfp4": "v41", "mxfp4": "rceil"}
"""Scale rules of compressed entries, by format: of V4.1's main ones, and of the indexer keys that it
shares with V4. Source: their engines; docs/format.md, section 3.3."""
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
    layer_count = _layer_count(config)
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
        groups.append(_compressed_group("main", members, ratio, head_dim, "nvfp4"))
        groups.append(_compressed_group("index", members, ratio, index_dim, "mxfp4"))
    groups.append(_window_group(last_owner, head_dim, "mxfp8"))
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
        drafts = _field(config, "num_nextn_predict_layers", most=_MOST_LAYERS)
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


_INDEXED_RATIO = 4
"""The compression ratio of V4 whose layers choose entries with an indexer; others read all of theirs."""
_ROW_SCALE_BLOCK, _ROW_ALIGNMENT = 64, 8
"""Values that share one E8M0 scale in a row of V4, and the bytes that rows are padded to."""


def _compressed(config: Mapping[str, Any]) -> Layout:
    """Layout of compressed attention in every layer, each with its own window (DeepSeek-V4).

    A row is E4M3 codes, the rotated values in BF16 and an E8M0 scale for 64 codes, padded: 448 + 128
    + 7 + 1 = 584 bytes, for compressed entries and for windows alike. Source: the V4 caches of vLLM
    and SGLang. Rows are kept as bytes: no codec here reads them. Indexer keys are MXFP4. Compressor
    states and draft layers are not counted.
    """
    ratios = list(_sequence(config, "compress_ratios"))
    layer_count = _layer_count(config)
    if len(ratios) < layer_count:
        msg = f"compress_ratios needs an item for each of {layer_count} layers, found {len(ratios)}"
        raise ConfigError(msg)
    head_dim, rope = _field(config, "head_dim"), _field(config, "qk_rope_head_dim")
    if rope >= head_dim:
        msg = f"qk_rope_head_dim must be less than head_dim, found {rope} and {head_dim}"
        raise ConfigError(msg)
    codes = head_dim - rope
    row = codes + 2 * rope + math.ceil(codes / _ROW_SCALE_BLOCK)
    row += -row % _ROW_ALIGNMENT
    groups: list[LayerGroup] = []
    for ratio in sorted({ratio for ratio in ratios[:layer_count] if ratio}):
        members = tuple(layer for layer in range(layer_count) if ratios[layer] == ratio)
        groups.append(_compressed_group("main", members, ratio, row, "u8"))
        if ratio == _INDEXED_RATIO:
            index_dim = _field(config, "index_head_dim")
            groups.append(_compressed_group("index", members, ratio, index_dim, "mxfp4"))
    groups.append(_window_group(layer_count, row, "u8"))
    return Layout(
        model=str(config.get("_name_or_path") or config.get("model_type")),
        groups=tuple(groups),
        window_tokens=_field(config, "sliding_window"),
    )


_OWN_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    "deepseek_v41_text": _compressed_sparse,
    "deepseek_v4": _compressed,
}
"""Model types whose entries have formats of their own, which no ``dtype`` changes."""


def _compressed_group(
    part: str, layers: tuple[int, ...], ratio: int, values: int, entry_format: str
) -> LayerGroup:
    return LayerGroup(
        name=f"{part}_r{ratio}",
        layers=layers,
        values=values,
        entry_format=entry_format,
        scale_rule=_COMPRESSED_RULES.get(entry_format, ""),
        tokens_per_entry=ratio,
    )


def _window_group(layers: int, values: int, entry_format: str) -> LayerGroup:
    return LayerGroup(
        name="window",
        layers=tuple(range(layers)),
        values=values,
        entry_format=entry_format,
        lifetime=Lifetime.WINDOW,
    )


def _sequence(config: Mapping[str, Any], name: str) -> Sequence[int]:
    value = config.get(name)
    if not isinstance(value, (list, tuple)) or any(
        isinstance(item, bool) or not isinstance(item, int) for item in value
    ):
        msg = f"config field {name} must be a list of integers, found {_brief(value)}"
        raise ConfigError(msg)
    if any(abs(item) > _MOST_FIELD for item in value):
        msg = f"config field {name} must have no item above {_MOST_FIELD:,}, found {_brief(value)}"
        raise ConfigError(msg)
    return value
