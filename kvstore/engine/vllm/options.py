"""What an operator configures, and whose cache it then is: the identity of a vLLM engine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

import kvstore
from kvstore.engine.options import check_options
from kvstore.errors import ConfigError

TENANT_RULE = "kvstore.vllm.1"
"""Changes with the rule that makes namespaces, so that another rule's blocks are never found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The connector's ``kv_connector_extra_config``."""

    path: str
    """Folder of the store; each rank owns one folder in it."""
    ssd_bytes: int | str = "4GiB"
    """Hard cap of each rank's file."""
    window_bytes: int | str = "64MiB"
    """Host memory of each rank for windows of models that cannot replay."""
    tenant: str = ""
    """Keeps the blocks of this server apart from those of others."""
    secret: bool = False
    """Whether keys are hashed under a random secret in each store's directory; for good."""

    fixed_weights: bool = False
    """Whether this server never gets other weights while it runs: a reset then forgets nothing."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Return the options in ``extra``.

        Raises:
            ConfigError: for a missing path, an unknown option or a value of another type.
        """
        known = [field.name for field in fields(cls)]
        check_options(
            "kv_connector_extra_config",
            extra,
            known,
            ("path", "tenant"),
            ("secret", "fixed_weights"),
        )
        return cls(**extra)


def check_supported(config: Any) -> None:
    """Raise ``ConfigError`` for what this connector does not do.

    ``config`` is a ``VllmConfig``.
    """
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


def block_format(layout_name: str | None) -> list[str]:
    """Return what decides the order of bytes inside a block of vLLM's KV cache.

    ``layout_name`` is the KV cache layout that the engine has chosen.
    """
    kind = current_platform.device_type
    if kind == "cpu":
        machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *_vector_flags()]
    else:
        machine = [str(current_platform.get_device_capability())]
    return [vllm.__version__, str(layout_name), kind, *machine]


def _vector_flags() -> list[str]:
    """Return the wide vector units of this CPU: vLLM packs keys for them."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return []
    return sorted(word for word in words if word.startswith(("amx", "avx512")))


def base_namespace(config: Any, tenant: str, layout_name: str | None) -> kvstore.Namespace:
    """Return the namespace of requests without salt and adapter.

    What decides KV besides weights and tokens is part of ``model``: the config with its overrides,
    the dtype of computation, quantization on loading, the format of blocks. The served name, the
    folder and the tokenizer are not: vLLM hands over token ids, in which the tokenizer's work is done.

    Raises:
        ConfigError: if the weights cannot be identified.
    """
    model = config.model_config
    described = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    text = json.dumps(
        [
            described,
            str(model.dtype),
            str(model.quantization),
            str(config.cache_config.cache_dtype),
            block_format(layout_name),
        ],
        sort_keys=True,
        default=str,
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = described.get("model_type", "model")
    return kvstore.Namespace(
        model=f"{TENANT_RULE}:{kind}:{digest}",
        weights=_weights(model, config.load_config),
        tenant=json.dumps([tenant, None]),
    )


def _weights(model: Any, load: Any) -> str:
    if str(load.load_format) == "dummy":
        return f"dummy:{model.seed}"
    folder = Path(model.model)
    if folder.exists():
        return kvstore.weights_digest(folder)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=load.download_dir,
            local_files_only=True,
        )
    except Exception as error:
        msg = (
            f"the weights of {model.model!r} are not in a local folder, so they cannot be told from "
            f"others ({error}); download them and serve the folder"
        )
        raise ConfigError(msg) from error
    return kvstore.weights_digest(found)


def request_namespace(
    base: kvstore.Namespace, tenant: str, salt: str | None, adapter: str | None
) -> kvstore.Namespace:
    """Return the namespace of a request; tenant and salt are kept apart by JSON's quoting."""
    return replace(base, tenant=json.dumps([tenant, salt]), adapter=adapter)


def adapter_identity(name: str, path: str) -> str:
    """Return what tells a LoRA adapter from every other: its name and its weights.

    Raises:
        ConfigError: if its weights are not in a local folder.
    """
    return json.dumps([name, kvstore.weights_digest(path)])


def updated(base: kvstore.Namespace, nonce: str) -> kvstore.Namespace:
    """Return the namespace after a weight update in a running engine.

    New weights are in memory only, so their blocks must be out of reach for every engine that
    starts from the folder again: ``nonce`` is never used twice.
    """
    return replace(base, weights=f"{base.weights.partition('+')[0]}+{nonce}", generation=0)
