"""Entry format of keys and values in a checkpoint's quantization config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import Config

_ALGORITHMS = {"fp8": "u8", "int8": "u8", "nvfp4": "nvfp4"}
"""``kv_cache_quant_algo`` of ModelOpt as entry formats. FP8 and INT8 caches are stored as bytes: their
scales belong to the checkpoint, one a layer. NVFP4 has an E4M3 scale for each 16 values. Source: vLLM, ModelOpt."""
_SCHEMES = {8: "u8", 4: "nvfp4"}
"""``num_bits`` of a ``kv_cache_scheme`` as entry formats, 4 only with groups of 16."""
_STATIC = ("tensor", "channel", "attn_head", None)
"""Strategies of a ``kv_cache_scheme`` whose scales are not cached. Source: compressed-tensors."""
_REMEDY = "give the format of its keys and values (--dtype, dtype=)"


def cache_format(configs: Sequence[Config], beside: Config | None) -> str | None:
    """Return the entry format that a checkpoint's quantization prescribes for its cache, or None.

    ``configs`` are a config and the configs that contain it; ``beside`` is a
    ``hf_quant_config.json``. Raises ``ConfigError`` for an unknown format.
    """
    for where in _quantizations(configs, beside):
        algorithm = where.get("kv_cache_quant_algo")
        if algorithm:
            found = _ALGORITHMS.get(str(algorithm).lower()) if isinstance(algorithm, str) else None
            return found or _refuse("kv_cache_quant_algo", algorithm)
        scheme = where.get("kv_cache_scheme")
        if scheme:
            return _of_scheme(scheme)
        if where.get("kv_cache_quant_config"):  # of Quark
            return _refuse("kv_cache_quant_config", where["kv_cache_quant_config"])
    return None


def _of_scheme(scheme: Any) -> str:
    if not isinstance(scheme, Mapping):
        return _refuse("kv_cache_scheme", scheme)
    bits, group = scheme.get("num_bits"), scheme.get("group_size")
    is_static = not scheme.get("dynamic") and scheme.get("strategy") in _STATIC
    is_grouped = bits == 4 and scheme.get("type") == "float" and group == 16
    if type(bits) is not int or not (is_grouped or (bits == 8 and is_static)):
        return _refuse("kv_cache_scheme", scheme)
    return _SCHEMES[bits]


def _quantizations(configs: Sequence[Config], beside: Config | None) -> Iterator[Config]:
    """Yield all quantization configs; ModelOpt nests its own in ``quantization``."""
    named = [c.get(name) for c in configs for name in ("quantization_config", "compression_config")]
    for found in (*named, beside):
        if isinstance(found, Mapping):
            yield found
            inner = found.get("quantization")
            if isinstance(inner, Mapping):
                yield inner


def _refuse(name: str, found: object) -> str:
    raise ConfigError(f"{name} {brief(found)} is an unknown format of keys and values; {_REMEDY}")
