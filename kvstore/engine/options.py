"""Options that an engine hands over as plain data, checked by name before they are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvstore.checks import flag, text
from kvstore.errors import ConfigError

UNCHECKED = "unchecked"
"""Stands for the digest of the weights where an operator vouches for them."""


def check_names(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for an option that is unknown; ``where`` is what the engine calls them."""
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
    """Check the names in ``given``, that ``path`` is among them, and that ``texts`` and ``flags`` are that.

    Raises:
        ConfigError: naming the option, and ``where`` it stands in the engine's configuration.
    """
    check_names(where, given, known)
    if given.get("path", "") == "":
        msg = f"{where}: 'path' is missing; name a directory on a local disk"
        raise ConfigError(msg)
    for name in texts:
        text(given.get(name, ""), f"{where}: {name!r}", ConfigError)
    for name in flags:
        flag(given.get(name, False), f"{where}: {name!r}", ConfigError)


def check_weights(where: str, name: str, given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``name``, which tells one set of weights from another, is left out."""
    if not given.get(name, "").strip():
        msg = (
            f"{where}: {name!r} is missing, so blocks of other weights under the same model name "
            "would be served; give the digest of the model's folder (python -c 'import kvstore; "
            'print(kvstore.weights_digest("FOLDER"))\'), a revision that changes with every change '
            f"of weights or config, or {UNCHECKED!r} to serve what the name has, of whatever weights"
        )
        raise ConfigError(msg)
