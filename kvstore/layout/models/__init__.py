"""Layouts of Hugging Face configs: the supported model types, and one module for each family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import Config, entry_format
from kvstore.layout.models.known import KNOWN, NESTED, REASONS, WRAPPERS
from kvstore.layout.models.quantized import cache_format
from kvstore.layout.values import Layout

_REMEDY = "make a kvstore.Layout from the groups that its engine caches"


def layout_of(
    config: Config,
    *,
    dtype: str | Mapping[str, str] | None = None,
    quantization: Config | None = None,
) -> Layout:
    """Return the layout of a config; ``quantization`` is its ``hf_quant_config.json``, if any.

    Raises ``ConfigError`` for an unsupported model type or class, or a field that contradicts its rules.
    """
    configs = _nested(config)
    text = configs[0]
    known = KNOWN[_type(text)]
    _check_classes(text, known.stems)
    named = (c.get(name) for c in configs for name in ("dtype", "torch_dtype"))
    quantized = cache_format(configs, quantization) if dtype is None else None
    own = quantized or next(filter(None, named), "bfloat16")
    # An unsupported dtype such as float64 is accepted if ``dtype`` gives all formats.
    return known.read(text, own if isinstance(own, str) else entry_format(own), dtype)


def _nested(config: Config) -> Sequence[Config]:
    """Return the config of the language model and the configs that contain it, innermost first."""
    configs = [config]
    # A config between the two, such as thinker_config, may have no model type.
    while _type(configs[0]) in WRAPPERS or (len(configs) > 1 and not _type(configs[0])):
        name = next((name for name in NESTED if configs[0].get(name) is not None), None)
        if name is None:
            break
        inner = configs[0][name]
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{name} must be an object, found {brief(inner)}")
        _check_classes(configs[0], WRAPPERS.get(_type(configs[0]), ()))
        configs.insert(0, inner)
    _check_type(configs[0], is_nested=len(configs) > 1)
    return configs


def _type(config: Config) -> str:
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _check_type(config: Config, *, is_nested: bool) -> None:
    kind = _type(config)
    if kind in KNOWN:
        return
    where = "the config of its language model" if is_nested else "the config"
    if not kind:
        msg = f"{where} must have a model_type, found {brief(config.get('model_type'))}; {_REMEDY}"
    elif kind in WRAPPERS:
        msg = f"model type {kind!r} has no config of its language model, expected one of the fields {', '.join(NESTED)}"
    elif kind in REASONS:
        msg = f"model type {kind!r} {REASONS[kind]}"
    else:
        msg = f"model type {brief(kind)} (architectures {brief(config.get('architectures'))}) is not supported; {_REMEDY}"
    raise ConfigError(msg)


_TASKS = r"(?:Text)?(?:Model|LMHeadModel|PreTrainedModel|For[A-Za-z0-9]+)"
"""Suffixes of a model type's class names."""


def _check_classes(config: Config, stems: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a config names a class of another model type."""
    classes = config.get("architectures")
    if classes is None or not stems:
        return
    names = classes if isinstance(classes, list | tuple) else [classes]
    pattern = f"(?:{'|'.join(map(re.escape, stems))}){_TASKS}"
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(pattern, name[:256]):
            msg = (
                f"model type {_type(config)!r} with architecture {brief(name)} is not "
                f"supported, expected {stems[0]}ForCausalLM or similar; {_REMEDY}"
            )
            raise ConfigError(msg)
