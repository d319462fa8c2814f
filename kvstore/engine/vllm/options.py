"""Options of the connector, and namespaces of a vLLM engine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

import kvstore
from kvstore.engine.options import options_of
from kvstore.errors import ConfigError

TENANT_RULE = "kvstore.vllm.2"
"""Version of the rule for namespaces: blocks of another version are never found."""

DECIDES: Mapping[str, tuple[str, ...]] = {
    "model_config": (
        *("dtype", "quantization", "quantization_config", "model_impl", "model_class_overrides"),
        *("runner_type", "convert_type", "disable_sliding_window"),
    ),
    "cache_config": (
        *("cache_dtype", "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill"),
        "swa_bounded_replay",
    ),
    "load_config": ("load_format", "model_loader_extra_config", "ignore_patterns"),
    "kernel_config": (
        *("linear_backend", "linear_backend_per_quant", "moe_backend"),
        "sparse_indexer_topk_backend",
    ),
}
"""Settings that decide KV besides weights and tokens, by section of vLLM's config."""
ATTENTION_NAMES = ("backend", "backend_per_kind")
"""Attention settings that only choose backends, which are covered; all others decide KV."""
ENCODER = (
    *("language_model_only", "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize"),
    *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    *("video_pruning_rate", "video_pruning_method"),
)
"""Settings that decide the model's input for an image."""
ADAPTERS = (
    *("lora_dtype", "target_modules", "enable_tower_connector_lora"),
    *("enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
)
"""Settings that decide the effect of a LoRA adapter on KV."""
ELSEWHERE = ("tensorizer",)
"""Load formats whose weights are not in the model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options in ``kv_connector_extra_config``."""

    path: str
    """Directory of the stores, with a directory for each rank."""
    ssd_bytes: int | str = "4GiB"
    """Hard cap of each rank's file."""
    window_bytes: int | str = "64MiB"
    """Host memory of each rank for windows of models that cannot replay."""
    tenant: str = ""
    """Salt that separates the blocks of this server from those of others."""
    secret: bool = False
    """Whether keys depend on a random secret in each store's directory. Fixed at creation."""
    fixed_weights: bool = False
    """Whether the weights never change while this server runs, so that a reset keeps all blocks."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Return checked options. Raises ``ConfigError`` for a missing, unknown or mistyped one."""
        return options_of(cls, "kv_connector_extra_config", extra)


def check_supported(config: Any) -> None:
    """Raise ``ConfigError`` for an unsupported feature of ``config``, a ``VllmConfig``."""
    parallel = config.parallel_config
    for name, ranks in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if ranks != 1:
            msg = (
                f"kvstore stores tensor-parallel shards only, found {name}={ranks}, expected 1; "
                "serve without it or without the connector"
            )
            raise ConfigError(msg)
    for feature, is_on in (
        ("a diffusion model", config.model_config.is_diffusion),
        ("attention_config.use_non_causal", config.attention_config.use_non_causal),
    ):
        if is_on:
            msg = (
                f"kvstore stores KV that depends on earlier tokens only, found {feature}, whose KV "
                "depends on later tokens too; serve without the connector"
            )
            raise ConfigError(msg)


def block_format(layout_name: str | None) -> list[str]:
    """Return the facts that decide the byte order of a block in the KV cache layout ``layout_name``."""
    kind = current_platform.device_type
    if kind == "cpu":
        machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *_vector_flags()]
    else:
        machine = [str(current_platform.get_device_capability())]
    return [vllm.__version__, str(layout_name), kind, *machine]


def _vector_flags() -> list[str]:
    """Return the wide vector extensions of this CPU, which decide vLLM's order of keys."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return []
    return sorted(word for word in words if word.startswith(("amx", "avx512")))


def base_namespace(
    config: Any, tenant: str, layout_name: str | None, backends: Sequence[str] = ()
) -> kvstore.Namespace:
    """Return the namespace of requests without salt and adapter.

    ``model`` covers the facts that decide KV besides weights and tokens: the config with overrides, the
    length that may choose position tables, the settings of ``DECIDES``, of attention and of encoders,
    the attention ``backends`` of the loaded layers, and the block format. It does not cover the served
    name, the folder and the tokenizer, because vLLM passes token ids.

    Raises:
        ConfigError: if the weights cannot be identified.
    """
    model = config.model_config
    described = _described(model)
    attention = [field.name for field in fields(config.attention_config)]
    facts = [
        described,
        _length(model),
        {part: settings(getattr(config, part), names) for part, names in DECIDES.items()},
        settings(config.attention_config, [n for n in attention if n not in ATTENTION_NAMES]),
        settings(model.multimodal_config, ENCODER),
        _drafting(config),
        list(backends),
        block_format(layout_name),
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = described.get("model_type", "model")
    return kvstore.Namespace(
        model=f"{TENANT_RULE}:{kind}:{digest}",
        weights=_weights(model, config.load_config),
        tenant=json.dumps([tenant, None]),
    )


def settings(part: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return settings of a section, None without one. Raises ``ConfigError`` if vLLM lacks a setting."""
    if part is None:
        return None
    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        msg = (
            f"{type(part).__name__} of vLLM {vllm.__version__} has no {missing[0]!r}, which decides "
            "KV; use the vLLM version in docs/vllm.md"
        )
        raise ConfigError(msg)
    return {name: getattr(part, name) for name in names}


def _described(model: Any) -> dict[str, Any]:
    """Return a model's config, without fields that do not decide KV."""
    described: dict[str, Any] = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    return described


def _length(model: Any) -> int | str:
    """Return the configured length: it decides position tables (longrope) and attention tuning (Llama 4).

    The shorter length that vLLM later computes for ``auto`` decides neither.
    """
    return "auto" if model.original_max_model_len == -1 else int(model.max_model_len)


def _drafting(config: Any) -> list[Any] | None:
    """Return the facts that decide the KV of draft layers, None without such layers."""
    speculative, model = config.speculative_config, config.model_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or _described(draft) == _described(model):  # n-grams and the like
        return None
    load = speculative.draft_load_config or config.load_config
    return [
        speculative.method,
        _described(draft),
        _length(draft),
        settings(draft, DECIDES["model_config"]),
        "the model's" if draft.model == model.model else _weights(draft, load),
    ]


def _weights(model: Any, load: Any) -> str:
    if str(load.load_format) == "dummy":
        return f"dummy:{model.seed}"
    if model.model_weights or str(load.load_format) in ELSEWHERE:
        msg = (
            f"the weights of {model.model!r} come from {model.model_weights or load.load_format}, so "
            "they cannot be identified; download them and serve the folder"
        )
        raise ConfigError(msg)
    folder = Path(model.model)
    if folder.exists():
        return kvstore.weights_digest(folder)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except Exception as error:
        msg = (
            f"the weights of {model.model!r} are not in a local folder, so they cannot be identified "
            f"({error}); download them and serve the folder"
        )
        raise ConfigError(msg) from error
    return kvstore.weights_digest(found)


def request_namespace(
    base: kvstore.Namespace, tenant: str, salt: str | None, adapter: str | None
) -> kvstore.Namespace:
    """Return the namespace of a request; JSON quoting separates tenant and salt."""
    return replace(base, tenant=json.dumps([tenant, salt]), adapter=adapter)


def adapter_rule(config: Any) -> str:
    """Return the settings that decide how an engine applies LoRA adapters, empty without LoRA."""
    rule = settings(config.lora_config, ADAPTERS)
    return "" if rule is None else json.dumps(rule, sort_keys=True, default=str)


def adapter_identity(name: str, path: str, rule: str = "") -> str:
    """Return the identity of a LoRA adapter: its name, the digest of its weights and ``adapter_rule``.

    Raises:
        ConfigError: if the weights are not in a local folder.
    """
    return json.dumps([name, kvstore.weights_digest(path), rule])


def updated(base: kvstore.Namespace, nonce: str) -> kvstore.Namespace:
    """Return the namespace after a weight update of a running engine.

    New weights exist in memory only, and an engine that starts from the folder again must not find
    their blocks. So every ``nonce`` is used once.
    """
    return replace(base, weights=f"{base.weights.partition('+')[0]}+{nonce}", generation=0)
