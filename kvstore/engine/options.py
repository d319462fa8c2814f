"""Options of an adapter: plain data in an engine's configuration, checked by name before use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from kvstore.errors import ConfigError

UNCHECKED = "unchecked"
"""Value in place of the digest of the weights: the operator guarantees that the name identifies them."""


def engine_missing(extra: str, engine: str, error: ImportError) -> NoReturn:
    """Raise the ``ImportError`` of an adapter whose engine cannot be imported."""
    msg = (
        f"kvstore.engine.{extra} needs {engine}, which cannot be imported: {error}; "
        f"run: pip install 'kvstore[{extra}]' (docs/{extra}.md)"
    )
    raise ImportError(msg) from error


def check_names(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for an unknown option; ``where`` is the engine's name of the options."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        msg = f"{where}: {unknown[0]!r} is unknown, expected some of {', '.join(known)}"
        raise ConfigError(msg)


def check_options(
    where: str,
    given: Mapping[str, Any],
    known: Collection[str],
    texts: Collection[str],
    flags: Collection[str] = (),
) -> None:
    """Check the names in ``given``, that it has ``path``, and the types of ``texts`` and ``flags``.

    Raises:
        ConfigError: naming the option, and ``where`` it is in the engine's configuration.
    """
    check_names(where, given, known)
    if given.get("path", "") == "":
        msg = f"{where}: 'path' is missing; name a directory on a local disk"
        raise ConfigError(msg)
    for name in texts:
        if not isinstance(given.get(name, ""), str):
            msg = f"{where}: {name!r} must be a text, found {given[name]!r}"
            raise ConfigError(msg)
    for name in flags:
        if not isinstance(given.get(name, False), bool):
            msg = f"{where}: {name!r} must be true or false, found {given[name]!r}"
            raise ConfigError(msg)


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
