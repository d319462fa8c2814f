"""Configs of Hugging Face as layouts: the types that are known, and one file for each family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvstore.errors import ConfigError, brief
from kvstore.layout.models.fields import Config, entry_format
from kvstore.layout.models.known import KNOWN, NESTED, REASONS, WRAPPERS
from kvstore.layout.models.quantized import cache_format
from kvstore.layout.values import Layout

_REMEDY = "make a kvstore.Layout of your own from what its engine caches"


def layout_of(
    config: Config,
    *,
    dtype: str | Mapping[str, str] | None = None,
    quantization: Config | None = None,
) -> Layout:
    """Return the layout of a config, with the ``hf_quant_config.json`` beside it if there is one.

    Raises:
        ConfigError: for a model type or a class that is not known here, or a field that contradicts
            what is known of it.
    """
    configs = _nested(config)
    text = configs[0]
    known = KNOWN[_type(text)]
    _check_classes(text, known.stems)
    named = (c.get(name) for c in configs for name in ("dtype", "torch_dtype"))
    quantized = cache_format(configs, quantization) if dtype is None else None
    own = quantized or next(filter(None, named), "bfloat16")
    # A name that is no entry format, as float64, is none of a group that ``dtype`` names.
    return known.read(text, own if isinstance(own, str) else entry_format(own), dtype)


def _nested(config: Config) -> Sequence[Config]:
    """Return the config of the language model and those it is nested in, the innermost first.

    Raises:
        ConfigError: if one of them is of a type that is not known here.
    """
    configs = [config]
    # A part between the two, as thinker_config, may have no type of its own.
    while _type(configs[0]) in WRAPPERS or (len(configs) > 1 and not _type(configs[0])):
        name = next((name for name in NESTED if configs[0].get(name) is not None), None)
        if name is None:
            break
        inner = configs[0][name]
        if not isinstance(inner, Mapping):
            msg = f"{name} must be an object, found {brief(inner)}"
            raise ConfigError(msg)
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
        msg = (
            f"{where} must name its model_type, found {brief(config.get('model_type'))}; {_REMEDY}"
        )
    elif kind in WRAPPERS:
        msg = f"model type {kind!r} has no config of its language model, expected one of {', '.join(NESTED)}"
    elif kind in REASONS:
        msg = f"model type {kind!r} {REASONS[kind]}"
    else:
        msg = (
            f"model type {brief(kind)} (architectures {brief(config.get('architectures'))}) is not one whose "
            f"cache is known here; {_REMEDY}"
        )
    raise ConfigError(msg)


_TASKS = r"(?:Text)?(?:Model|LMHeadModel|PreTrainedModel|For[A-Za-z0-9]+)"
"""What follows the stem in the names of a type's classes."""


def _check_classes(config: Config, stems: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a config names a class that is none of its type's own."""
    classes = config.get("architectures")
    if classes is None or not stems:
        return
    names = classes if isinstance(classes, list | tuple) else [classes]
    pattern = f"(?:{'|'.join(map(re.escape, stems))}){_TASKS}"
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(pattern, name[:256]):
            msg = (
                f"model type {_type(config)!r} with architecture {brief(name)} is not one whose cache is "
                f"known here, expected {stems[0]}ForCausalLM or the like; {_REMEDY}"
            )
            raise ConfigError(msg)
