"""Options of adapters: plain data in an engine's configuration, checked by name and type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar

from kvstore.checks import flag, integer, text
from kvstore.distribution import install_command
from kvstore.errors import ConfigError

T = TypeVar("T")
UNCHECKED = "unchecked"
"""In place of a digest of the weights: the operator guarantees that the model's name identifies them."""


def engine_missing(extra: str, engine: str, error: ImportError) -> NoReturn:
    """Raise the ``ImportError`` of an adapter whose engine cannot be imported."""
    msg = (
        f"kvstore.engine.{extra} needs {engine}, which cannot be imported: {error}; "
        f"run: {install_command(extra)} (docs/{extra}.md)"
    )
    raise ImportError(msg) from error


def check_names(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for an unknown option; ``where`` names the options in the engine."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        msg = f"{where}: {unknown[0]!r} is unknown, expected some of {', '.join(known)}"
        raise ConfigError(msg)


def options_of(kind: type[T], where: str, given: Mapping[str, Any], weights: str = "") -> T:
    """Return ``given`` as a dataclass ``kind``, whose ``str``, ``bool`` and ``int`` fields are checked.

    ``weights`` names the option that identifies the weights, if any.

    Raises:
        ConfigError: naming the option and ``where``, its place in the engine's configuration.
    """
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    check_names(where, given, types)
    if given.get("path", "") == "":
        raise ConfigError(f"{where}: 'path' is missing; name a directory on a local disk")
    for name, value in given.items():
        check = _CHECKS.get(str(types[name]))
        if check is not None:
            check(value, f"{where}: {name!r}", error=ConfigError)
    if weights:
        check_weights(where, weights, given)
    return kind(**given)


_INTEGER = partial(integer, low=1)
_CHECKS: Mapping[str, Callable[..., object]] = {"str": text, "bool": flag, "int": _INTEGER}


def check_weights(where: str, name: str, given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if option ``name``, which identifies the weights, is missing."""
    if not given.get(name, "").strip():
        msg = (
            f"{where}: {name!r} is missing, so blocks of other weights under the same model name "
            "would be served; give the digest of the model's folder (python -c 'import kvstore; "
            'print(kvstore.weights_digest("FOLDER"))\'), a revision that changes with every change '
            f"of weights or config, or {UNCHECKED!r} to serve blocks by model name alone"
        )
        raise ConfigError(msg)
