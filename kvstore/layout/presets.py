"""Presets of models: the fields of their public configs that determine the cache.

``kvstore.layout`` applies the rules of any config.json to them. A comment gives the source of each;
fields that a config omits are omitted here too.
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
    # Source: config.json of deepseek-ai/DeepSeek-V4-Flash-0731. The bytes of an entry are derived
    # (kvstore.layout); their sum is the 3,514 that "approximately 4-fold" in the V4.1 report means.
    "deepseek-v4-flash": {
        **_V4,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0] * 3,
    },
    # Source: config.json of deepseek-ai/DeepSeek-V4-Pro. No report prints its bytes a token: they are
    # derived as those of V4-Flash are.
    "deepseek-v4-pro": {
        **_V4,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    },
    # Source: config.json of deepseek-ai/DeepSeek-V3.2-Exp. The bytes are derived: they are those of
    # the FP8 cache that engines serve it with (kvstore.layout), 54 times those of V4.1-Flash.
    "deepseek-v3.2": {**_LATENT, "model_type": "deepseek_v32", "index_head_dim": 128},
    # Source: config.json of deepseek-ai/DeepSeek-V3.
    "deepseek-v3": {**_LATENT, "model_type": "deepseek_v3"},
    # Source: config.json of deepseek-ai/deepseek-llm-67b-base, the company's first.
    "deepseek-v1-67b": {
        "model_type": "llama",
        "num_hidden_layers": 95,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # Source: config.json of meta-llama/Llama-3.1-8B.
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # Source: config.json of meta-llama/Llama-3.1-70B.
    "llama-3.1-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # Source: config.json of Qwen/Qwen3-32B.
    "qwen3-32b": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    # Source: config.json of openai/gpt-oss-20b.
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    # Source: config.json of openai/gpt-oss-120b.
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    # Source: text_config in config.json of google/gemma-3-27b-it, which leaves it to its class that
    # every sixth layer is full.
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "torch_dtype": "bfloat16",
    },
    # Source: config.json of mistralai/Mistral-Small-24B-Instruct-2501.
    "mistral-small": {
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
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
