"""Options that an engine hands over as plain data, checked by name before they are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvstore.errors import ConfigError


def check_options(
    where: str, given: Mapping[str, Any], known: Collection[str], texts: Collection[str]
) -> None:
    """Check the names in ``given``, that ``path`` is among them, that ``texts`` are texts and ``secret`` a flag.

    Raises:
        ConfigError: naming the option, and ``where`` it stands in the engine's configuration.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        msg = f"{where}: {unknown[0]!r} is unknown, expected some of {', '.join(known)}"
        raise ConfigError(msg)
    if given.get("path", "") == "":
        msg = f"{where}: 'path' is missing; name a directory on a local disk"
        raise ConfigError(msg)
    for name in texts:
        if not isinstance(given.get(name, ""), str):
            msg = f"{where}: {name!r} must be a text, found {given[name]!r}"
            raise ConfigError(msg)
    if not isinstance(given.get("secret", False), bool):
        msg = f"{where}: 'secret' must be true or false, found {given['secret']!r}"
        raise ConfigError(msg)
