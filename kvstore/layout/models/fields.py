"""Fields of a config, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvstore.errors import MOST_SHOWN, ConfigError, brief
from kvstore.layout.values import DTYPE_FORMATS, FORMATS, MOST_LAYERS

Config = Mapping[str, Any]

MOST_FIELD = 1 << 20
"""Largest value of a field: no window is longer than the longest context, 1,048,576 tokens."""
_MOST_CONTEXT = 1 << 40
"""Largest context or window that is compared with the other: far above any public one."""


def type_of(config: Config) -> str:
    """Return the model type of a config as an error names it."""
    return brief(config.get("model_type"))


def label_of(config: Config) -> str:
    """Return a config's label for people."""
    name = config.get("_name_or_path")
    return (name if name and isinstance(name, str) else str(config["model_type"]))[:MOST_SHOWN]


def integer(config: Config, *names: str, most: int = MOST_FIELD) -> int:
    """Return the positive integer of a field, which has one of these names."""
    value = one_of_names(config, *names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"config field {names[0]} must be a positive integer, found {brief(value)}"
        if value is None:
            msg += (
                f"; model type {type_of(config)} may leave it to its class (transformers' AutoConfig has "
                "its to_dict() with every field), or cache what this version cannot describe: make a "
                "kvstore.Layout of your own"
            )
        raise ConfigError(msg)
    if value > most:
        msg = f"config field {names[0]} must be at most {most:,}, found {brief(value)}"
        raise ConfigError(msg)
    return value


def one_of_names(config: Config, *names: str) -> object:
    """Return the value of a field that has several names; None if none of them has one.

    Raises:
        ConfigError: if two names have different values: which one counts depends on who reads it.
    """
    found = {name: config[name] for name in names if config.get(name) is not None}
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        shown = " and ".join(f"{name} {brief(value)}" for name, value in found.items())
        msg = (
            f"model type {type_of(config)} has {shown}, which name one thing; expected equal values"
        )
        raise ConfigError(msg)
    return values[0] if values else None


def layer_count(config: Config, *names: str) -> int:
    """Return how many layers a model has."""
    return integer(config, *(names or ("num_hidden_layers",)), most=MOST_LAYERS)


def context_tokens(config: Config) -> int | None:
    """Return the longest context that a config allows, scaled as its positions are; None if unknown."""
    most = config.get("max_position_embeddings")
    if not _is_count(most):
        return None
    given = config.get("rope_scaling") or config.get("rope_parameters")
    scaling: Config = given if isinstance(given, Mapping) else {}
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or not 1 < factor < _MOST_CONTEXT:
        return int(most)
    # Some configs give the context before it was scaled, some that after it; those say the former apart.
    before = scaling.get("original_max_position_embeddings")
    return max(int(most), int((before if _is_count(before) else most) * factor))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_CONTEXT


def integers(config: Config, name: str) -> Sequence[int]:
    """Return a list of integers."""
    value = config.get(name)
    if not isinstance(value, (list, tuple)) or any(
        isinstance(item, bool) or not isinstance(item, int) for item in value
    ):
        msg = f"config field {name} must be a list of integers, found {brief(value)}"
        raise ConfigError(msg)
    if any(abs(item) > MOST_FIELD for item in value):
        msg = f"config field {name} must have no item above {MOST_FIELD:,}, found {brief(value)}"
        raise ConfigError(msg)
    return value


def entry_format(dtype: object) -> str:
    """Return the entry format that a dtype of a config, of torch or of this package names."""
    text = (dtype if isinstance(dtype, str) else brief(dtype)).removeprefix("torch.")
    name = DTYPE_FORMATS.get(text, text)
    if name not in FORMATS:
        known = ", ".join([*FORMATS, *DTYPE_FORMATS])
        msg = f"unknown dtype {brief(text)}, expected one of {known}"
        raise ConfigError(msg)
    return name


def named_formats(
    dtype: str | Mapping[str, str], needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, object]:
    """Return the format of each group that ``dtype`` names; all of ``needed`` are named."""
    if isinstance(dtype, Mapping):
        formats: dict[str, object] = dict(dtype)
    else:
        formats = dict.fromkeys(needed, dtype)
    if not set(needed) <= formats.keys() <= {*needed, *optional}:
        also = f" and may have {' and '.join(optional)}" if optional else ""
        msg = (
            f"dtype names groups {sorted(map(str, formats))}, this model has exactly "
            f"{' and '.join(needed)}{also}"
        )
        raise ConfigError(msg)
    return formats
