"""Checked reading of config fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvstore import checks
from kvstore.errors import MOST_SHOWN, ConfigError, brief
from kvstore.layout.values import DTYPE_FORMATS, FORMATS, MOST_LAYERS

Config = Mapping[str, Any]

MOST_FIELD = 1 << 20
"""Largest value of a field: no window is longer than the longest context, 1,048,576 tokens."""
_MOST_CONTEXT = 1 << 40
"""Bound of contexts and windows that are compared, far above any public one."""


def type_of(config: Config) -> str:
    """Return the model type of a config, for an error."""
    return brief(config.get("model_type"))


def label_of(config: Config) -> str:
    """Return a config's label for people."""
    name = config.get("_name_or_path")
    return (name if name and isinstance(name, str) else str(config["model_type"]))[:MOST_SHOWN]


def integer(config: Config, *names: str, most: int = MOST_FIELD) -> int:
    """Return the positive integer of a field with alternative names."""
    value, name = one_of_names(config, *names), f"config field {names[0]}"
    if value is None:
        msg = (
            f"{name} must be a positive integer, found None; pass AutoConfig.to_dict() of transformers, "
            f"which has every field of model type {type_of(config)}, or make a kvstore.Layout"
        )
        raise ConfigError(msg)
    return checks.integer(value, name, 1, most, ConfigError)


def one_of_names(config: Config, *names: str) -> object:
    """Return the value of a field with alternative names; None if all are absent.

    Raises ``ConfigError`` if two names have different values, because engines differ in the one they read.
    """
    found = {name: config[name] for name in names if config.get(name) is not None}
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        shown = " and ".join(f"{name} {brief(value)}" for name, value in found.items())
        msg = (
            f"model type {type_of(config)} has {shown}, which are one field; expected equal values"
        )
        raise ConfigError(msg)
    return values[0] if values else None


def layer_count(config: Config, *names: str) -> int:
    """Return the number of layers of a model."""
    return integer(config, *(names or ("num_hidden_layers",)), most=MOST_LAYERS)


def context_tokens(config: Config) -> int | None:
    """Return the longest context of a config, after the scaling of its positions; None if unknown."""
    most = config.get("max_position_embeddings")
    if not _is_count(most):
        return None
    given = config.get("rope_scaling") or config.get("rope_parameters")
    scaling: Config = given if isinstance(given, Mapping) else {}
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or not 1 < factor < _MOST_CONTEXT:
        return int(most)
    # Some configs give the context before scaling, others after it and the one before separately.
    before = scaling.get("original_max_position_embeddings")
    return max(int(most), int((before if _is_count(before) else most) * factor))


def _is_count(value: object) -> TypeGuard[int]:
    return checks.is_integer(value) and 0 < value < _MOST_CONTEXT


def integers(config: Config, name: str) -> Sequence[int]:
    """Return a list of integers."""
    value = config.get(name)
    if not isinstance(value, (list, tuple)) or not all(map(checks.is_integer, value)):
        raise ConfigError(f"config field {name} must be a list of integers, found {brief(value)}")
    if any(abs(item) > MOST_FIELD for item in value):
        msg = f"config field {name} must have no item above {MOST_FIELD:,}, found {brief(value)}"
        raise ConfigError(msg)
    return value


def entry_format(dtype: object) -> str:
    """Return the entry format of a dtype name of a config, of torch or of this package."""
    text = (dtype if isinstance(dtype, str) else brief(dtype)).removeprefix("torch.")
    name = DTYPE_FORMATS.get(text, text)
    if name not in FORMATS:
        known = ", ".join([*FORMATS, *DTYPE_FORMATS])
        raise ConfigError(f"unknown dtype {brief(text)}, expected one of {known}")
    return name


def named_formats(
    dtype: str | Mapping[str, str], needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, object]:
    """Return the format of each group in ``dtype``, which must have all ``needed`` groups."""
    if isinstance(dtype, Mapping):
        formats: dict[str, object] = dict(dtype)
    else:
        formats = dict.fromkeys(needed, dtype)
    if not set(needed) <= formats.keys() <= {*needed, *optional}:
        also = f" and may have {' and '.join(optional)}" if optional else ""
        msg = f"dtype names groups {sorted(map(str, formats))}, this model has exactly {' and '.join(needed)}{also}"
        raise ConfigError(msg)
    return formats
