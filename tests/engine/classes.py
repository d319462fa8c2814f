"""Every causal class of transformers, built small: what its own cache holds, and what a layout says.

``python -m tests.engine.classes`` prints the whole table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto

import kvstore

TOKENS, WINDOW = 12, 8
_MOST_PARAMETERS = 60_000_000
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
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_INDEXED = {
    **_LATENT,
    "kv_lora_rank": 128,
    "index_head_dim": 128,
    "index_n_heads": 2,
    "index_topk": 4,
}
_ROTARY = {"head_dim": None, "rotary_dim": 8}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ["axk1", "deepseek_v3", "minicpm3", "mistral4", "sarvam_mla", "youtu"], _LATENT
    ),
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": None},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 4,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    **dict.fromkeys(["deepseek_v32", "glm_moe_dsa"], _INDEXED),
    **dict.fromkeys(["codegen", "gptj"], _ROTARY),
    **dict.fromkeys(["bloom", "ctrl"], {"n_layer": 8}),
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 8, "layer_types": None},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": None},
    "gpt_neo": {"num_layers": 8, "num_heads": 4, "attention_types": [[["global", "local"], 4]]},
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe"], {"head_dim": 16}),
    "ministral": {"head_dim": 16},
    "jetmoe": {"kv_channels": 16},
    "xglm": {"d_model": 64, "num_layers": 8, "attention_heads": 4, "ffn_dim": 64},
}
"""What a class needs beside the common sizes; None leaves a field to it."""


class NotBuilt(Exception):
    """A class cannot be built small, or its forward does not run."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What the class of a model type holds, beside what a layout says of its config."""

    verdict: str
    """equal, refused, not built, or WRONG."""
    detail: str


def causal_classes() -> dict[str, str]:
    """Return the class of every model type that generates text."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str, **fields: Any) -> Any:
    """Return a small config of a model type. Raises ``NotBuilt``."""
    try:
        config_class = CONFIG_MAPPING[kind]
        whole = config_class().to_dict()
        sizes = {name: value for name, value in _SCALE.items() if _has(config_class, whole, name)}
        sizes |= {"pad_token_id": 0} | _SIZES.get(kind, {}) | fields
        return config_class(**{n: v for n, v in sizes.items() if v is not None})
    except Exception as error:
        raise NotBuilt(_line(error)) from error


def _has(config_class: Any, whole: Mapping[str, Any], name: str) -> bool:
    """Tell whether a class has a number of its own for a field, under this name or another."""
    return whole.get(getattr(config_class, "attribute_map", {}).get(name, name)) is not None


def filled_cache(config: Any, class_name: str) -> tuple[Any, Any]:
    """Return a model and the cache that it filled with ``TOKENS`` tokens. Raises ``NotBuilt``."""
    model_class = getattr(transformers, class_name)
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in model_class(config).parameters())
        if size > _MOST_PARAMETERS:
            raise NotBuilt(f"{size:,} parameters with the smallest sizes tried")
        model = model_class(config).eval()
        ids = torch.arange(3, 3 + TOKENS)[None]
        with torch.no_grad():
            given = model(input_ids=ids, use_cache=True)
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(_line(error)) from error
    past = getattr(given, "past_key_values", None)
    past = getattr(past, "self_attention_cache", past)
    if not isinstance(past, Cache):
        msg = f"its forward gives no cache, but {', '.join(given)}"
        raise NotBuilt(msg)
    return model, past


def held(past: Cache) -> int:
    """Return the bytes of every tensor of a cache that has an item for each token."""
    return sum(
        value.numel() * value.element_size()
        for layer in past.layers
        for value in vars(layer).values()
        if torch.is_tensor(value) and value.dim()
    )


def predicted(layout: kvstore.Layout) -> int:
    """Return the bytes that a layout says ``TOKENS`` tokens take; transformers keeps W - 1 of a window."""
    rows = max(0, min(TOKENS, layout.window_tokens - 1))
    window = sum(len(group.layers) * group.entry_bytes for group in layout.window_groups)
    return int(layout.bytes_per_token * TOKENS) + rows * window


def latent_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the latents and indexer keys of ``TOKENS`` tokens, by the layers' weights.

    transformers caches what it makes of a latent; the projection to it says how large it is.
    """
    rows = sum(
        int(module.weight.shape[0])
        for name, module in model.named_modules()
        if name.endswith("kv_a_proj_with_mqa")
    )
    return rows * TOKENS * 4


def compare(kind: str, class_name: str, **fields: Any) -> Compared:
    """Compare a class's own cache with the layouts of its config, whole and as it is published."""
    try:
        config = tiny_config(kind, **fields)
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        layouts, refusal = layouts_of(kind, config)
        if not layouts:
            return Compared("refused", refusal)
        model, past = filled_cache(config, class_name)
    except NotBuilt as error:
        return Compared("not built", str(error))
    found = [_compared(layout, model, past) for layout in layouts]
    return next((each for each in found if each.verdict == "WRONG"), found[0])


def layouts_of(kind: str, config: Any) -> tuple[list[kvstore.Layout], str]:
    """Return the layouts of a config, whole and with what is not its class's default; and a refusal."""
    layouts, refusal = [], ""
    for published in (config.to_dict(), config.to_diff_dict()):
        try:
            layouts.append(kvstore.layout({**published, "model_type": kind, "dtype": "float32"}))
        except kvstore.ConfigError as error:
            refusal = str(error)
    return layouts, refusal


def _compared(layout: kvstore.Layout, model: torch.nn.Module, past: Cache) -> Compared:
    names = {group.name for group in layout.groups}
    if names == {"latent", "index"}:
        return _sparse(layout, model)
    found = latent_bytes(model) if names == {"latent"} else held(past)
    verdict = "equal" if found == predicted(layout) else "WRONG"
    return Compared(verdict, f"{found:,} bytes held, {predicted(layout):,} predicted")


def _sparse(layout: kvstore.Layout, model: torch.nn.Module) -> Compared:
    """Compare an FP8 cache, which transformers has not, by the values that it packs."""
    modules = dict(model.named_modules())
    latents = [
        int(m.weight.shape[0]) for n, m in modules.items() if n.endswith("kv_a_proj_with_mqa")
    ]
    keys = [int(m.weight.shape[0]) for n, m in modules.items() if n.endswith("indexer.wk")]
    rank, rope, index = 128, 8, 128
    packed = [rank + rank // 128 * 4 + 2 * rope, index + index // 128 * 4]
    is_equal = (
        latents == [rank + rope] * len(layout.group("latent").layers)
        and keys == [index] * len(layout.group("index").layers)
        and [g.entry_bytes for g in layout.groups] == packed
    )
    return Compared("equal" if is_equal else "WRONG", f"{latents}, {keys}, {layout.groups}")


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def variations(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give names and fields of configs that are unlike the usual one."""
    yield "usual", {}
    yield "one KV head", {"num_key_value_heads": 1}
    yield "KV heads null", {"num_key_value_heads": None}
    yield "other head size", {"head_dim": 32}
    yield "window", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}
    yield (
        "full and sliding",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    )
    yield "all full", {"layer_types": ["full_attention"] * 8}
    yield "multi query", {"multi_query": False, "new_decoder_architecture": True}
    yield "own keys", {"multi_query": False}


def main() -> int:
    """Print the verdict on every class and every variation; 1 if one is wrong."""
    totals: Counter[str] = Counter()
    wrong = 0
    for kind, class_name in causal_classes().items():
        for name, fields in variations(kind):
            found = compare(kind, class_name, **fields)
            wrong += found.verdict == "WRONG"
            if name == "usual":
                totals[found.verdict] += 1
            if found.verdict == "WRONG" or name == "usual":
                print(f"{kind:28} {name:18} {found.verdict:10} {found.detail[:150]}", flush=True)
    print(dict(totals), f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
