"""Random models with full and sliding layers, small enough to run in milliseconds.

``python -m tests.engine.hybrids STORES RESULT LENGTH...`` runs prompts in a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM

import kvstore

VOCAB, BLOCK, WINDOW = 211, 16, 24
"""The window is no multiple of the block, so that neither hides the other's mistakes."""
FULL, SLIDING = "full_attention", "sliding_attention"

_SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large weights: with the usual ones attention is nearly uniform and errors would not show.
    "initializer_range": 0.2,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Five sliding layers to a full one, as in the release, with one more sliding layer above it.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "num_hidden_layers": 7,
            "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
            "intermediate_size": 96,
            "query_pre_attn_scalar": 32,  # not the head size, as in the 27B
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL] * 2,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # Yarn with the release's 32 x 4,096 positions, scaled down.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
    ),
}


def hybrid_model(
    kind: str,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str | None = None,
    model_class: Any = None,
    **changes: Any,
) -> Any:
    default_class, config_class, fields = KINDS[kind]
    torch.manual_seed(11)
    config = config_class(**{**_SHARED, **fields, **changes})
    model = (model_class or default_class)(config)
    if attention is not None:
        model.set_attn_implementation(attention)
    if dtype is torch.float64 and kind == "gpt_oss":
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(dtype).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


def open_cache(path: Path, layout: kvstore.Layout, **options: Any) -> kvstore.PrefixCache:
    defaults: dict[str, Any] = {
        "namespace": kvstore.Namespace(model="hybrid"),
        "block_tokens": BLOCK,
        "ssd_bytes": "64MiB",
        "device_bytes": 0,
    }
    return kvstore.PrefixCache.open(path, layout=layout, **{**defaults, **options})


def main(stores: str, result: str, *lengths: str) -> None:
    """Continue a prompt of each length by each kind of model, over the stores of the last run."""
    from kvstore.engine.transformers import TransformersAdapter, model_layout

    facts: dict[str, Any] = {}
    logits: dict[str, Any] = {}
    for kind in KINDS:
        model = hybrid_model(kind)
        for length in lengths:
            name = f"{kind}-{length}"
            with open_cache(Path(stores) / name, model_layout(model)) as cache:
                made = TransformersAdapter(model, cache, store_wait=30).generate(
                    prompt(int(length)), 8
                )
            facts[name] = {
                "hit_tokens": made.hit_tokens,
                "replay_tokens": made.replay_tokens,
                "window_source": made.window_source,
                "new_tokens": made.new_tokens,
            }
            logits[name] = made.logits
    Path(result).with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")
    np.savez(Path(result).with_suffix(".npz"), **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
