"""Small models of transformers' classes: their own caches, compared with the layouts of their configs.

``python -m tests.engine.classes`` prints the table of all of them: minutes. Also of configs that are unlike
the usual ones, and whether a hit gives each class's logits of a cold run.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto

import kvstore
from kvstore.engine.transformers import TransformersAdapter, model_layout
from kvstore.layout.models.known import KNOWN, WRAPPERS

TOKENS, WINDOW = 12, 8
_MOST_PARAMETERS = 60_000_000
_MOST_ERROR = 1e-4
"""Of logits near 1 in float32, where the order of sums is another one."""
_SCALE: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
_INDEXED: Mapping[str, Any] = {
    **_LATENT,
    "kv_lora_rank": 128,
    "index_head_dim": 128,
    "index_n_heads": 2,
    "index_topk": 4,
}
_ROTARY: Mapping[str, Any] = {"head_dim": None, "rotary_dim": 8}
_MROPE: Mapping[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
_MROPE_HALF: Mapping[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "bloom": {"n_layer": 8},
    "codegen": _ROTARY,
    "ctrl": {"n_layer": 8},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 8, "layer_types": None},
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": None},
    "glm_moe_dsa": _INDEXED,
    "gptj": _ROTARY,
    "glm4v_moe_text": _MROPE_HALF,
    "glm4v_text": _MROPE_HALF,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jetmoe": {"kv_channels": 16},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 4,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
    },
    "minicpm3": _LATENT,
    "ministral": {"head_dim": 16},
    "mistral4": {"num_key_value_heads": 4, "head_dim": None},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    **{f"qwen{name}_text": _MROPE for name in ("2_vl", "2_5_vl", "2_5_omni", "3_vl", "3_vl_moe")},
    "qwen3_omni_moe_text": _MROPE,
    "sarvam_mla": _LATENT,
    "xglm": {"d_model": 64, "num_layers": 8, "attention_heads": 4, "ffn_dim": 64},
    "youtu": _LATENT,
}
"""Config fields of a class besides the common sizes; None keeps its default."""


_TEXT_CLASSES = {
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
}
"""Classes of text parts that ``AutoModel`` does not know."""


class NotBuiltError(Exception):
    """A class cannot be built small, or its forward does not run."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The cache of a model type's class, compared with the layout of its config."""

    verdict: str
    """equal, refused, not built, or WRONG."""
    detail: str


def causal_classes() -> dict[str, str]:
    """Return the class of every model type that generates text."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def text_parts() -> list[str]:
    """Return the known types that are parts of models of several media, with a class here."""
    causal = causal_classes()
    kinds = [kind for kind in KNOWN if kind not in causal and kind in CONFIG_MAPPING]
    return [kind for kind in kinds if kind not in WRAPPERS]


def wrappers() -> list[str]:
    """Return the types of several media that are known and have a class here."""
    return [kind for kind in WRAPPERS if kind in CONFIG_MAPPING]


def tiny_config(kind: str, **fields: Any) -> Any:
    """Return a small config of a model type. Raises ``NotBuiltError``."""
    try:
        config_class = CONFIG_MAPPING[kind]
        whole = config_class().to_dict()
        sizes: dict[str, Any] = {}
        sizes |= {name: value for name, value in _SCALE.items() if _has(config_class, whole, name)}
        sizes |= {"pad_token_id": 0, **_SIZES.get(kind, {}), **fields}
        config = config_class(**{n: v for n, v in sizes.items() if n in fields or v is not None})
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
    except Exception as error:
        raise NotBuiltError(_line(error)) from error
    return config


def _has(config_class: Any, whole: Mapping[str, Any], name: str) -> bool:
    """Tell whether a class has a number of its own for a field, under this name or another."""
    return whole.get(getattr(config_class, "attribute_map", {}).get(name, name)) is not None


def without(kind: str, config: Any, name: str) -> Any:
    """Return the config that a class makes of another's fields without one. Raises ``NotBuiltError``."""
    fields = {key: value for key, value in config.to_dict().items() if key != name}
    try:
        return CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise NotBuiltError(_line(error)) from error


def build(config: Any, class_name: str | None) -> torch.nn.Module:
    """Return a small model: of the class of that name, or of its type's own. Raises ``NotBuiltError``."""
    make: Callable[[Any], torch.nn.Module]
    class_name = class_name or _TEXT_CLASSES.get(config.model_type)
    make = getattr(transformers, class_name) if class_name else AutoModel.from_config
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in make(config).parameters())
        if size <= _MOST_PARAMETERS:
            return make(config).eval()
    except Exception as error:
        raise NotBuiltError(_line(error)) from error
    msg = f"{size:,} parameters with the smallest sizes tried"
    raise NotBuiltError(msg)


def filled_cache(model: torch.nn.Module) -> Cache:
    """Return the cache that a model fills with ``TOKENS`` tokens. Raises ``NotBuiltError``."""
    try:
        with torch.no_grad():
            given = model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    except Exception as error:
        raise NotBuiltError(_line(error)) from error
    past = getattr(given, "past_key_values", None)
    past = getattr(past, "self_attention_cache", past)
    if not isinstance(past, Cache):
        msg = f"its forward gives no cache, but {', '.join(given)}"
        raise NotBuiltError(msg)
    return past


def held(past: Cache) -> int:
    """Return the bytes of every tensor of a cache; a scalar is no part of one."""
    return sum(
        value.numel() * value.element_size()
        for layer in past.layers
        for value in vars(layer).values()
        if torch.is_tensor(value) and value.dim()
    )


def has_windows(layout: kvstore.Layout, past: Cache, config: Any) -> bool:
    """Tell whether a cache's sliding layers are a layout's, but for windows beyond the context."""
    ours = {n: layout.window_tokens for group in layout.window_groups for n in group.layers}
    theirs = {n: getattr(layer, "sliding_window", None) for n, layer in enumerate(past.layers)}
    context = getattr(config, "max_position_embeddings", TOKENS)
    left = {n: window for n, window in theirs.items() if window is not None and n not in ours}
    return ours.items() <= theirs.items() and all(window > context for window in left.values())


def predicted(layout: kvstore.Layout) -> int:
    """Return the bytes of ``TOKENS`` tokens by a layout; transformers keeps W - 1 rows of a window."""
    rows = max(0, min(TOKENS, layout.window_tokens - 1))
    window = sum(len(group.layers) * group.entry_bytes for group in layout.window_groups)
    return int(layout.bytes_per_token * TOKENS) + rows * window


def compare(
    kind: str, class_name: str | None = None, *, left_out: str = "", **fields: Any
) -> Compared:
    """Compare a class's own cache with the layouts of its config, whole and as it is published.

    ``fields`` are other than the usual ones; ``left_out`` is a field that the config has not.
    """
    try:
        if kind not in KNOWN:
            layout({"model_type": kind})
        config = tiny_config(kind, **fields)
        if left_out:
            published = [{k: v for k, v in config.to_dict().items() if k != left_out}]
            config = without(kind, config, left_out)
        else:
            published = [config.to_dict(), config.to_diff_dict()]
        found = [layout({**each, "model_type": kind}) for each in published]
    except NotBuiltError as error:
        return Compared("not built", str(error))
    except kvstore.ConfigError as error:
        return Compared("refused", str(error))
    return _judged(found, config, class_name)


def layout(config: Mapping[str, Any]) -> kvstore.Layout:
    """Return the layout of a config whose model computes in float32."""
    return kvstore.layout({**config, "dtype": "float32"})


def compare_wrapper(kind: str, text_kind: str) -> Compared:
    """Compare the cache of a language model with the layout of a config that it is nested in."""
    try:
        text = tiny_config(text_kind)
        outer = CONFIG_MAPPING[kind](text_config=text.to_dict()).to_dict()
    except NotBuiltError as error:
        return Compared("not built", str(error))
    except Exception as error:
        return Compared("not built", _line(error))
    try:
        nested = {**outer, "text_config": {**outer["text_config"], "dtype": "float32"}}
        found = kvstore.layout(nested)
    except kvstore.ConfigError as error:
        return Compared("refused", str(error))
    return _judged([found], text, None)


def text_kind_of(kind: str) -> str:
    """Return the default type of a wrapper's language model."""
    inner = CONFIG_MAPPING[kind]().to_dict().get("text_config")
    return str(inner.get("model_type")) if isinstance(inner, Mapping) else ""


def compare_hit(kind: str, class_name: str) -> Compared:
    """Compare the logits after a hit of two blocks with those of a cold run."""
    try:
        model: Any = build(tiny_config(kind), class_name)
        described = model_layout(model)
    except NotBuiltError as error:
        return Compared("not built", str(error))
    except kvstore.ConfigError as error:
        return Compared("refused", str(error))
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 120, 40)]
    with torch.no_grad():
        cold = model(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
    with (
        tempfile.TemporaryDirectory() as path,
        kvstore.PrefixCache.open(
            path,
            layout=described,
            namespace=kvstore.Namespace(model="tiny"),
            block_tokens=16,
            ssd_bytes="64MiB",
            device_bytes=0,
            window_bytes="1MiB",
        ) as cache,
    ):
        adapter = TransformersAdapter(model, cache)
        adapter.generate(prompt[:34], 1)
        cache.flush()
        warm = adapter.generate(prompt, 1)
    off = float(np.abs(warm.logits[0] - cold).max())
    is_equal = warm.hit_tokens == 32 and off < _MOST_ERROR
    return _verdict(is_equal, f"{warm.hit_tokens} tokens hit, logits off by {off:.1e}")


def _judged(layouts: list[kvstore.Layout], config: Any, class_name: str | None) -> Compared:
    try:
        model = build(config, class_name)
        past = filled_cache(model)
    except NotBuiltError as error:
        return Compared("not built", str(error))
    verdicts = [_compared(each, model, past) for each in layouts]
    return next((each for each in verdicts if each.verdict == "WRONG"), verdicts[0])


def _compared(layout: kvstore.Layout, model: Any, past: Cache) -> Compared:
    """Compare a layout with a cache; a latent, which transformers caches expanded, by weights."""
    names = {group.name for group in layout.groups}
    if not names & {"latent", "index"}:
        is_equal = held(past) == predicted(layout)
        is_equal = is_equal and has_windows(layout, past, model.config.get_text_config())
        groups = ", ".join(f"{g.name} {g.layers}" for g in layout.window_groups)
        detail = f"{held(past):,} bytes held, {predicted(layout):,} predicted"
        return _verdict(is_equal, f"{detail}; {layout.window_tokens} in {groups or 'no layer'}")
    latents, keys = _rows(model, "kv_a_proj_with_mqa"), _rows(model, "indexer.wk")
    sizes = {group.name: [group.values] * len(group.layers) for group in layout.groups}
    if "index" in names:
        # Of an FP8 cache, which transformers has not: codes, a float32 scale for 128, the rest BF16.
        rope = 8
        latents = [rows - rope + (rows - rope) // 128 * 4 + 2 * rope for rows in latents]
        keys = [rows + rows // 128 * 4 for rows in keys]
    is_equal = sizes == {"latent": latents} | ({"index": keys} if keys else {})
    return _verdict(is_equal, f"{latents} and {keys} by the weights, {sizes} predicted")


def _rows(model: torch.nn.Module, suffix: str) -> list[int]:
    """Return how many values each projection of that name gives."""
    return [
        int(module.weight.shape[0])
        for name, module in model.named_modules()
        if name.endswith(suffix) and isinstance(module.weight, torch.Tensor)
    ]


def _verdict(is_equal: bool, detail: str) -> Compared:
    return Compared("equal" if is_equal else "WRONG", detail)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


VARIATIONS: Mapping[str, Mapping[str, Any]] = {
    "one KV head": {"num_key_value_heads": 1},
    "KV heads null": {"num_key_value_heads": None},
    "other head size": {"head_dim": 32},
    "head size null": {"head_dim": None},
    "window": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3},
    "window everywhere": {
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "the window of its class": {
        "use_sliding_window": True,
        "max_window_layers": 3,
        "max_position_embeddings": 1 << 16,
        "left_out": "sliding_window",
    },
    "the first window layer of its class": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "left_out": "max_window_layers",
    },
    "window beyond the context": {"sliding_window": 512, "use_sliding_window": True},
    "window switched off": {"sliding_window": WINDOW, "use_sliding_window": False},
    "no window": {"sliding_window": None},
    "full and sliding": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "all full": {"layer_types": ["full_attention"] * 8},
    "a pattern": {"sliding_window": WINDOW, "sliding_window_pattern": 4, "layer_types": None},
    "new decoder": {"multi_query": False, "new_decoder_architecture": True},
    "every head's own keys": {"multi_query": False},
    "cross attention": {"add_cross_attention": True},
    **{
        f"without {name}": {"left_out": name}
        for name in (
            "num_key_value_heads",
            "head_dim",
            "kv_channels",
            "sliding_window",
            "layer_types",
            "use_sliding_window",
            "max_window_layers",
            "multi_query",
        )
    },
}
"""Configs that are unlike the usual one, by name."""


def verdicts(kind: str, class_name: str | None = None) -> Iterator[tuple[str, Compared]]:
    """Give the verdict on every variation of a type that is known."""
    if kind in KNOWN:
        for name, fields in VARIATIONS.items():
            yield name, compare(kind, class_name, **fields)


def _table() -> Iterator[tuple[str, str, str, Compared]]:
    """Print every verdict: set, type, variation and result."""
    for kind, class_name in causal_classes().items():
        yield "causal classes", kind, "", compare(kind, class_name)
        for name, found in verdicts(kind, class_name):
            yield "variations", kind, name, found
        if kind in KNOWN and kind not in WRAPPERS:
            yield "hits", kind, "", compare_hit(kind, class_name)
    for kind in text_parts():
        yield "text parts", kind, "", compare(kind)
        for name, found in verdicts(kind):
            yield "variations", kind, name, found
    for kind in wrappers():
        text_kind = text_kind_of(kind)
        if text_kind:
            yield "wrappers", kind, text_kind, compare_wrapper(kind, text_kind)


def main() -> int:
    """Print the verdict on every class, and every wrong one on a variation; 1 if there is one."""
    totals: Counter[tuple[str, str]] = Counter()
    for group, kind, name, found in _table():
        totals[group, found.verdict] += 1
        if group != "variations" or found.verdict in ("WRONG", "not built"):
            print(f"{kind:28} {name:18} {found.verdict:10} {found.detail[:150]}", flush=True)
    for (group, verdict), count in sorted(totals.items()):
        print(f"{group}: {count} {verdict}")
    return int(any(verdict == "WRONG" for _, verdict in totals))


if __name__ == "__main__":
    sys.exit(main())
