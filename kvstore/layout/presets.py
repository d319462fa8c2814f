"""Presets of models: fields of their public configs that determine the cache.

They are read as any config.json is. Fields that a config omits are omitted here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_V4 = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}
_LATENT = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def _dense(
    model_type: str, *, layers: int, hidden: int, heads: int, kv_heads: int
) -> Mapping[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
    }


def _gpt_oss(layers: int) -> Mapping[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }


_FIELDS: Mapping[str, Mapping[str, Any]] = {
    # Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
    "deepseek-v4.1-flash": {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "num_nextn_predict_layers": 3,
    },
    # Source: config.json of deepseek-ai/DeepSeek-V4-Flash-0731. The derived bytes (kvstore.layout) add
    # up to 3,514, which agrees with "approximately 4-fold" in the V4.1 report.
    "deepseek-v4-flash": {
        **_V4,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0] * 3,
    },
    # Source: config.json of deepseek-ai/DeepSeek-V4-Pro. Its bytes per token are derived, not published.
    "deepseek-v4-pro": {
        **_V4,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    },
    # Source: config.json of deepseek-ai/DeepSeek-V3.2-Exp. The derived bytes are those of the FP8 cache
    # in engines (kvstore.layout): 54 times those of V4.1-Flash.
    "deepseek-v3.2": {**_LATENT, "model_type": "deepseek_v32", "index_head_dim": 128},
    # Source: config.json of deepseek-ai/DeepSeek-V3.
    "deepseek-v3": {**_LATENT, "model_type": "deepseek_v3"},
    # Source: config.json of deepseek-ai/deepseek-llm-67b-base.
    "deepseek-v1-67b": _dense("llama", layers=95, hidden=8192, heads=64, kv_heads=8),
    # Source: config.json of meta-llama/Llama-3.1-8B.
    "llama-3.1-8b": _dense("llama", layers=32, hidden=4096, heads=32, kv_heads=8),
    # Source: config.json of meta-llama/Llama-3.1-70B.
    "llama-3.1-70b": _dense("llama", layers=80, hidden=8192, heads=64, kv_heads=8),
    # Source: config.json of Qwen/Qwen3-32B.
    "qwen3-32b": {
        **_dense("qwen3", layers=64, hidden=5120, heads=64, kv_heads=8),
        "head_dim": 128,
        "use_sliding_window": False,
    },
    # Source: config.json of openai/gpt-oss-20b.
    "gpt-oss-20b": _gpt_oss(24),
    # Source: config.json of openai/gpt-oss-120b.
    "gpt-oss-120b": _gpt_oss(36),
    # Source: text_config in config.json of google/gemma-3-27b-it. That every sixth layer is full is a
    # default of its class.
    "gemma-3-27b": {
        **_dense("gemma3_text", layers=62, hidden=5376, heads=32, kv_heads=16),
        "head_dim": 128,
        "sliding_window": 1024,
    },
    # Source: config.json of mistralai/Mistral-Small-24B-Instruct-2501.
    "mistral-small": {
        **_dense("mistral", layers=40, hidden=5120, heads=32, kv_heads=8),
        "head_dim": 128,
        "sliding_window": None,
    },
    # Source: config.json of moonshotai/Kimi-K2-Instruct.
    "kimi-k2": {**_LATENT, "model_type": "kimi_k2"},
    # Source: config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "dtype": "bfloat16",
    },
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {"_name_or_path": name, **fields} for name, fields in _FIELDS.items()
}
"""Configs by name, newest DeepSeek first."""
