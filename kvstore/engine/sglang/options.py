"""Options of the backend, and facts of a running SGLang that decide the values in a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_context, get_lora, get_serving
from sglang.version import __version__ as sglang_version

import kvstore
from kvstore.checks import positive
from kvstore.engine.options import options_of
from kvstore.errors import ConfigError

_SETTINGS: dict[str, tuple[str, ...]] = {
    "model": (
        *("context_length", "dtype", "json_model_override_args", "kv_cache_dtype", "load_format"),
        *("model_impl", "modelopt_quant", "qsa_indexer_dtype", "quantization"),
        *("quantization_param_path", "rl_quant_profile"),
    ),
    "mm": ("mm_attention_backend", "mm_process_config", "trust_mm_content_hashes"),
    "spec": (
        *("speculative_algorithm", "speculative_draft_kv_cache_dtype"),
        *("speculative_draft_model_path", "speculative_draft_model_quantization"),
        *("speculative_draft_model_revision", "speculative_draft_window_size"),
    ),
    "exec.kernel": (),
    "exec.deterministic": (),
    "exec.dllm": (),
    "exec.mamba": ("mamba_backend", "mamba_ssm_dtype", "linear_attn_prefill_backend"),
    "exec.moe": (
        *("deepep_dispatcher_output_dtype", "enable_w4a4_mxfp4_megamoe"),
        *("flashinfer_mxfp4_moe_precision", "moe_runner_backend"),
    ),
    "exec.comm": ("enable_quant_communications",),
    "exec.features": (
        *("enable_decoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay"),
        "enable_tf32_matmul",
    ),
}
"""Settings of SGLang that decide the values in a page, by namespace; () is a whole namespace.

Source: ``sglang.srt.arg_groups.fields`` of 0.5.23, without settings that only place work or bound memory.
"""
_SGLANG_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys of the extra config that SGLang's factory and controller read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheOptions:
    """Options of kvstore in ``--hicache-storage-backend-extra-config``."""

    path: str
    """Directory of the stores, with a directory for each rank and pool."""
    ssd_bytes: int | str = "16GiB"
    """Cap of all stores of this rank together."""
    window_bytes: int | str = "1GiB"
    """Cap of the trailing pages in host memory."""
    window_ttl: float = 300.0
    """Lifetime of a trailing page in seconds."""
    tenant: str = ""
    """Salt that separates users of one directory. SGLang's own keys have the salts of requests."""
    weights: str
    """Digest or revision of the weights. The model's name does not identify them."""
    secret: bool = False
    """Whether keys depend on a random secret in each store's directory. Fixed at creation."""

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> HiCacheOptions:
        """Return checked options. Raises ``ConfigError`` for an unknown or invalid one."""
        given = {name: value for name, value in (extra or {}).items() if name not in _SGLANG_KEYS}
        options = options_of(cls, "extra config", given, "weights")
        positive(options.window_ttl, "extra config: 'window_ttl'", "seconds", ConfigError)
        return options


def settings() -> dict[str, Any]:
    """Return the facts that decide a page's values and are not in SGLang's keys, as JSON values.

    Raises:
        ConfigError: if SGLang has not published its settings in this process.
    """
    found: dict[str, Any] = {"version": sglang_version}
    try:
        for namespace, names in _SETTINGS.items():
            top, *below = namespace.split(".")
            bag = get_context().config_bag(top)
            for part in below:
                bag = getattr(bag, part)
            found[namespace] = {name: str(getattr(bag, name)) for name in names or bag._fields}
        found["weight_version"] = get_serving().weight_version
    except ValueError as error:
        msg = (
            f"SGLang's settings decide the values in a page, and cannot be read: {error}; attach the "
            "backend in a scheduler process of SGLang 0.5.23"
        )
        raise ConfigError(msg) from error
    return found


def adapters() -> dict[str, str]:
    """Return digests of the LoRA adapters in ``--lora-paths`` by name; SGLang's keys have the paths.

    SGLang names an adapter loaded later by a random number, so it never hits after a restart.

    Raises:
        ConfigError: if an adapter is not in a local folder.
    """
    return {
        str(ref.lora_name): kvstore.weights_digest(ref.lora_path)
        for ref in get_lora().lora_paths or ()
    }
