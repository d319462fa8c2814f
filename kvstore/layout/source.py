"""Layout of a model from a preset's name, a config.json or a config as a mapping."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.errors import MOST_SHOWN, ConfigError, brief
from kvstore.layout.models import layout_of
from kvstore.layout.presets import PRESETS
from kvstore.layout.values import Layout

Dtype = str | Mapping[str, str] | None


def layout(source: str | Path | Mapping[str, Any], *, dtype: Dtype = None) -> Layout:
    """Return the layout of a model.

    ``source`` is a preset's name, the path of a Hugging Face ``config.json`` or of its folder, or such
    a config as a mapping. A ``hf_quant_config.json`` beside a config.json is read with it.

    ``dtype`` is the entry format of keys and values: one name for both, or one per group as
    ``{"k": "bf16", "v": "nvfp4"}``. Default: the format of the config's cache (``kv_cache_scheme``,
    ``kv_cache_quant_algo``), else the model's dtype. Windows have the model's dtype unless the mapping
    names ``k_window`` and ``v_window``. Latent attention has one group, ``latent``; the formats of
    DeepSeek V3.2, V4 and V4.1 are fixed.

    Raises:
        ConfigError: for an unknown preset, a missing or unreadable file, or an unsupported model.
    """
    if isinstance(source, Mapping):
        return layout_of(source, dtype=dtype)
    given: object = source
    if not isinstance(given, str | Path):
        msg = (
            f"expected a preset's name, the path of a config.json or a config as a mapping, found "
            f"{type(given).__name__}; a transformers config gives one as config.to_dict()"
        )
        raise ConfigError(msg)
    preset = PRESETS.get(str(source))
    if preset is not None:
        with _named(source):
            return layout_of(preset, dtype=dtype)
    path = _config_path(source)
    beside = path.with_name("hf_quant_config.json")
    with _named(beside):
        quantization = _read(beside) if _is_file(beside) else None
    with _named(path):
        return layout_of(_read(path), dtype=dtype, quantization=quantization)


def from_config(config: Mapping[str, Any], *, dtype: Dtype = None) -> Layout:
    """Return the layout of a Hugging Face config. Raises ``ConfigError`` as :func:`layout` does."""
    return layout_of(config, dtype=dtype)


@contextmanager
def _named(source: object) -> Iterator[None]:
    """Prefix errors with the name of a source."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


_MOST_CONFIG_BYTES = 1 << 24
"""Largest accepted config, hundreds of times any public one; refuses weights at once."""


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # text that no file system accepts as a name
        return path.is_file()
    return False


def _config_path(source: str | Path) -> Path:
    """Return the path of a config.json. Raises ``ConfigError`` if there is none."""
    path = Path(source)
    is_folder = exists = False
    with suppress(OSError, ValueError):
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        exists = path.exists()
    if _is_file(path):
        return path
    if is_folder and not exists:
        msg = f"{brief(str(source))} is a folder without a config.json, expected a model's folder"
    elif exists:
        msg = f"{brief(str(path))} is no regular file, expected a config.json"
    elif path.suffix == ".json":
        msg = f"there is no file {brief(str(path))}, expected the path of a config.json or the name of a preset"
    else:
        msg = f"{brief(str(source))} is neither a preset ({', '.join(PRESETS)}) nor the path of a config.json{_near(source)}"
    raise ConfigError(msg)


def _near(source: object) -> str:
    """Return a hint with the presets closest to an unknown name, empty if there are none."""
    name = str(source)[:MOST_SHOWN].lower().rsplit("/", 1)[-1]
    near = [preset for preset in PRESETS if name and (name in preset or preset in name)]
    near = near or difflib.get_close_matches(name, PRESETS)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _read(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises ``ConfigError`` for any other file."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        is_whole = len(text) <= _MOST_CONFIG_BYTES
        config = json.loads(text.decode(), object_pairs_hook=_object) if is_whole else None
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"not a readable JSON file: {error}") from error
    if not is_whole:
        msg = f"larger than any config.json, expected at most {_MOST_CONFIG_BYTES:,} bytes"
        raise ConfigError(msg)
    if not isinstance(config, dict):
        raise ConfigError(f"a JSON {type(config).__name__}, expected an object with a model_type")
    return config


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ``ConfigError`` for a duplicate name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        left = dict(pairs)
        twice = next(name for name, _ in pairs if left.pop(name, _object) is _object)
        msg = f"the name {brief(twice)} occurs twice in one JSON object, expected it once"
        raise ConfigError(msg)
    return found
