"""vLLM engines for tests: random models, small enough to answer in milliseconds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from kvstore.engine.vllm import KVStoreConnector

VOCAB, BLOCK = 211, 128
FULL, SLIDING = "full_attention", "sliding_attention"
_SHARED: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large weights: with the usual ones attention is nearly uniform and errors would not show.
    "initializer_range": 0.2,
}


def save_model(folder: Path, kind: str, seed: int = 7) -> str:
    """Save a random ``"llama"``, ``"gpt_oss"`` or ``"gemma3"`` and return its folder."""
    torch.manual_seed(seed)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=3, head_dim=32, hidden_size=128, intermediate_size=96, **_SHARED
            )
        )
    elif kind == "gpt_oss":
        model = GptOssForCausalLM(
            GptOssConfig(
                num_hidden_layers=4,
                layer_types=[SLIDING, FULL] * 2,
                head_dim=64,
                hidden_size=256,
                intermediate_size=128,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=96,
                **_SHARED,
            )
        )
    else:
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                num_hidden_layers=6,
                layer_types=[SLIDING] * 5 + [FULL],
                head_dim=32,
                hidden_size=128,
                intermediate_size=96,
                sliding_window=300,
                query_pre_attn_scalar=32,
                **_SHARED,
            )
        )
    model.save_pretrained(folder)
    return str(folder)


def transfer(store: str | Path, **extra: Any) -> KVTransferConfig:
    """Return the options that make an engine use the store at a path."""
    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore.engine.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"path": str(store), **extra},
    )


@contextmanager
def engine(model: str, store: str | Path | None = None, **options: Any) -> Iterator[LLM]:
    """Run an engine in this process, with or without a store."""
    extra = options.pop("extra", {})
    if store is not None:
        options["kv_transfer_config"] = transfer(store, **extra)
    llm = LLM(
        model=model,
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        kv_transfer_state.ensure_kv_transfer_shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def connectors(llm: LLM) -> tuple[KVStoreConnector, KVStoreConnector]:
    """Return the connectors of the scheduler and of the worker of an engine in this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.get_kv_connector(), kv_transfer_state.get_kv_transfer_group()


def forget(llm: LLM) -> None:
    """Empty vLLM's own prefix cache, once the saves that keep its blocks are over."""
    for _ in range(10_000):  # each step waits a moment for a save
        if llm.reset_prefix_cache():
            return
        llm.llm_engine.engine_core.get_output()
    msg = "vLLM still keeps blocks"
    raise AssertionError(msg)


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return random token ids; those of one seed are prefixes of each other."""
    return np.random.default_rng(seed).integers(0, VOCAB - 1, 4096)[:length].tolist()  # type: ignore[no-any-return]


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int = 8, **options: Any
) -> list[tuple[tuple[int, ...], int]]:
    """Return the tokens that each prompt is continued with, and how many were cached."""
    salt = options.pop("salt", None)
    lora = options.pop("lora", None)
    hints = options.pop("hints", None)
    params = SamplingParams(
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args=None if hints is None else {"kv_transfer_params": {"kvstore": hints}},
        **options,
    )
    asked = [
        {"prompt_token_ids": list(ids)} | ({} if salt is None else {"cache_salt": salt})
        for ids in prompts
    ]
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=lora)
    if (
        kv_transfer_state.has_kv_transfer_group()
    ):  # what was saved can be found when it is committed
        kv_transfer_state.get_kv_transfer_group().worker_side.flush()
    return [(tuple(out.outputs[0].token_ids), out.num_cached_tokens or 0) for out in outputs]
