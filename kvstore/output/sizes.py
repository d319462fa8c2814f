"""Sizes as people write them, and as they read them."""

from __future__ import annotations

import re

from kvstore.checks import number
from kvstore.errors import ConfigError, brief

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate(["k", "M", "G", "T"], 1)}
_SIZE = re.compile(r"\s*([0-9]{1,300}(?:\.[0-9]{1,300})?)\s*([A-Za-z]{0,3})\s*")
"""A number that a float holds, and a unit."""


def size_bytes(size: int | str, option: str) -> int:
    """Return a size given as bytes or as text such as ``"4GiB"``. Raises ``ConfigError``."""
    if isinstance(size, int) and not isinstance(size, bool):
        value = float(max(-1, min(size, 2**63)))
    else:
        found = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if found is None or found[2] not in _UNITS:
            msg = f"{option} must be bytes or a size such as '4GiB' or '500MB', found {brief(size)}"
            raise ConfigError(msg)
        value = float(found[1]) * _UNITS[found[2]]
    if value < 0:
        msg = f"{option} must not be negative, found {brief(size)}"
        raise ConfigError(msg)
    if value >= 2**63:
        msg = f"{option} must be less than 2**63 bytes, found {brief(size)}"
        raise ConfigError(msg)
    return int(value)


def share_of(value: object, option: str) -> float:
    """Return a share in (0, 1]. Raises ``ConfigError``."""
    share = number(value, option, "a share in (0, 1]", ConfigError)
    if not 0 < share <= 1:
        msg = f"{option} must be a share in (0, 1], found {brief(value)}"
        raise ConfigError(msg)
    return share


def size_text(size: float) -> str:
    """Return bytes as a person reads them: three digits or more and a unit, such as ``"1.29 MiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 - the last one is used
        if size < 1024:
            break
        size /= 1024
    else:
        size *= 1024
    digits = 0 if unit == "bytes" else max(0, 2 - len(str(int(size))) + 1)
    return f"{size:,.{digits}f} {unit}"
