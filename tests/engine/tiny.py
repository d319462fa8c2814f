"""A random Llama with grouped queries, small enough to run in milliseconds, and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 4, 2, 16, 211


def tiny_config(**changes: Any) -> LlamaConfig:
    fields: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**fields, **changes})


def tiny_model(
    dtype: torch.dtype = torch.float32,
    kind: type[LlamaForCausalLM] = LlamaForCausalLM,
    **changes: Any,
) -> Any:
    torch.manual_seed(7)
    # Large weights: with the usual ones attention is nearly uniform and errors would not show.
    model = kind(tiny_config(initializer_range=0.2, **changes))
    return model.to(dtype).eval()


def save_tiny(folder: Path) -> None:
    """Save the model with a tokenizer that knows the words w0, w1, ..."""
    tiny_model().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
