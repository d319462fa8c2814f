"""Sizes, rates and times as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

_RATES = {f"{p}B/s": 1000.0**n for n, p in enumerate(["k", "M", "G", "T"], 1)}
_RATES |= {f"{p}iB/s": 1024.0**n for n, p in enumerate("KMGT", 1)}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DIGITS = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)"
"""A number that a float holds, and its shares and multiples too."""
_NUMBER = re.compile(_DIGITS + r"\s?([A-Za-z/]+)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(_DIGITS + r"(%|b|KiB|MiB|GiB|TiB)")
_MOST_BLOCKS = 2**62
"""Bound of a size, so that it can be compared and added up in 64 bits."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size in blocks, and as a share of all distinct blocks of a trace."""

    blocks: int
    fraction: float


def size_of(text: str, distinct_blocks: int, block_bytes: Fraction | None = None) -> Size:
    """Return a size written as a share (``5%``), in blocks (``20000b``) or in bytes (``64GiB``).

    A share f is floor(f * distinct blocks), worked out exactly.

    Raises:
        ValueError: if it is none of these, or bytes are given and ``block_bytes`` is not.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        msg = f"expected a size such as 5%, 20000b (blocks) or 64GiB, found {_short(text)}"
        raise ValueError(msg)
    number, unit = Fraction(found[1]), found[2]
    if unit == "%":
        blocks = int(number * distinct_blocks / 100)
    elif unit == "b":
        blocks = int(number)
    elif block_bytes is None:
        msg = f"a size in bytes ({text}) needs the bytes of a token"
        raise ValueError(msg)
    else:
        blocks = int(number * _UNITS[unit] / block_bytes)
    if blocks >= _MOST_BLOCKS:
        msg = f"expected a size below {_MOST_BLOCKS:,} blocks, found {text!r}"
        raise ValueError(msg)
    if unit == "%":
        return Size(blocks, float(number / 100))
    return Size(blocks, blocks / distinct_blocks if distinct_blocks else 0.0)


def rate_of(text: str) -> float:
    """Return a rate such as ``3GB/s`` in bytes a second.

    Raises:
        ValueError: if it is none.
    """
    return _measured(text, _RATES, "a rate such as 3GB/s or 500MiB/s")


def seconds_of(text: str) -> float:
    """Return a time such as ``300s``, ``5m`` or ``100us`` in seconds.

    Raises:
        ValueError: if it is none.
    """
    return _measured(text, _SECONDS, "a time such as 300s, 5m or 100us")


def _measured(text: str, units: Mapping[str, float], expected: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in units or not float(found[1]):
        msg = f"expected {expected}, found {_short(text)}"
        raise ValueError(msg)
    return float(found[1]) * units[found[2]]


def bytes_text(size: float) -> str:
    """Return a size as people read it: ``38.2 GiB``."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor * (1 - 0.05 / 1024):  # what would be 1,024.0 of the unit below
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def _short(text: str) -> str:
    """Return what was written as a message has it."""
    return repr(text if len(text) <= 40 else f"{text[:30]}...{text[-7:]}")
