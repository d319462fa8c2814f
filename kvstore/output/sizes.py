"""Parsers and formatter of sizes, shares, rates and times. Units are decimal (kB to TB) or binary (KiB to TiB)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvstore.checks import is_integer, number
from kvstore.errors import ConfigError, brief

_BYTES = {"": 1, "B": 1, "KB": 1000}
_BYTES |= {f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)}
_BYTES |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_RATES = {f"{unit}/s": Fraction(factor) for unit, factor in _BYTES.items() if unit}
_SECONDS = {"us": Fraction(1, 10**6), "ms": Fraction(1, 1000)}
_SECONDS |= {unit: Fraction(n) for unit, n in (("s", 1), ("m", 60), ("h", 3600), ("d", 86400))}
_QUANTITY = re.compile(r"\s*([0-9]{1,300}(?:\.[0-9]{1,300})?)\s*(%|[A-Za-z]{0,3}(?:/s)?)\s*")
_MOST_BYTES = 2**63
_MOST_NUMBER = 10**18
_MOST_BLOCKS = 2**62
"""Bound of a size in blocks, so that sums of sizes fit 64 bits."""


def _quantity(text: object) -> tuple[Fraction, str]:
    """Return the number and the unit of a text; ``(0, "?")`` for anything else."""
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    return (Fraction(found[1]), found[2]) if found else (Fraction(0), "?")


def size_bytes(size: object, option: str, expected: str = "") -> int:
    """Return a size in bytes, given as an integer or as text such as ``"4GiB"`` or ``"500MB"``.

    ``expected`` ends the list of accepted values in an error. Raises ``ConfigError``.
    """
    value, unit = (Fraction(int(size)), "") if is_integer(size) else _quantity(size)
    if unit not in _BYTES:
        msg = f"{option} must be bytes or a size such as '4GiB' or '500MB'{expected}, found {brief(size)}"
        raise ConfigError(msg)
    value *= _BYTES[unit]
    if not 0 <= value < _MOST_BYTES:
        limit = "must not be negative" if value < 0 else "must be less than 2**63 bytes"
        raise ConfigError(f"{option} {limit}, found {brief(size)}")
    return int(value)


def size_or_share(size: object, option: str, whole: int, name: str) -> int:
    """Return a size in bytes, or a percentage of ``whole``, ``name`` in errors. Raises ``ConfigError``."""
    value, unit = _quantity(size)
    if unit != "%":
        return size_bytes(size, option, f" or a share of {name} such as '50%'")
    if value > 100:
        raise ConfigError(f"{option} must be at most 100% of {name}, found {brief(size)}")
    return int(whole * value / 100)


def share_of(value: object, option: str) -> float:
    """Return a share in (0, 1]. Raises ``ConfigError``."""
    share = number(value, option, "a share in (0, 1]", ConfigError)
    if not 0 < share <= 1:
        raise ConfigError(f"{option} must be a share in (0, 1], found {brief(value)}")
    return share


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a simulated cache in blocks, and as a share of all distinct blocks of a trace."""

    blocks: int
    fraction: float


def size_of(text: str, distinct_blocks: int, block_bytes: Fraction | None = None) -> Size:
    """Return a size given as a share (``5%``), in blocks (``20000b``) or in bytes (``64GiB``).

    A share f is floor(f * distinct blocks), computed exactly. Raises ``ValueError`` for any other
    text, or for bytes where ``block_bytes`` is None.
    """
    value, unit = _quantity(text)
    if not unit or unit not in {*_BYTES, "%", "b"} or value >= _MOST_NUMBER:
        msg = f"expected a size such as 5%, 20000b (blocks), 64GiB or 64GB, found {_short(text)}"
        raise ValueError(msg)
    if unit == "%":
        blocks = int(value * distinct_blocks / 100)
    elif unit == "b":
        blocks = int(value)
    elif block_bytes is None:
        raise ValueError(
            f"a size in bytes ({text}) needs the bytes per token: give --model or --bytes-per-token"
        )
    else:
        blocks = int(value * _BYTES[unit] / block_bytes)
    if blocks >= _MOST_BLOCKS:
        raise ValueError(f"expected a size below {_MOST_BLOCKS:,} blocks, found {_short(text)}")
    if unit == "%":
        return Size(blocks, float(value / 100))
    return Size(blocks, blocks / distinct_blocks if distinct_blocks else 0.0)


def rate_of(text: str) -> float:
    """Return a rate such as ``3GB/s`` in bytes per second. Raises ``ValueError``."""
    return _measured(text, _RATES, "a rate such as 3GB/s or 500MiB/s")


def seconds_of(text: str) -> float:
    """Return a time such as ``300s``, ``5m`` or ``100us`` in seconds. Raises ``ValueError``."""
    return _measured(text, _SECONDS, "a time such as 300s, 5m or 100us")


def _measured(text: str, units: Mapping[str, Fraction], expected: str) -> float:
    value, unit = _quantity(text)
    if unit not in units or not 0 < value < _MOST_NUMBER:
        raise ValueError(f"expected {expected}, found {_short(text)}")
    return float(value * units[unit])


def size_text(size: float, digits: int = 3) -> str:
    """Return bytes as text with ``digits`` or more and a binary unit, such as ``"1.29 MiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 - the last one is used
        if size < 1024:
            break
        size /= 1024
    else:
        size *= 1024
    decimals = 0 if unit == "bytes" else max(0, digits - len(str(int(size))))
    return f"{size:,.{decimals}f} {unit}"


def _short(text: str) -> str:
    """Return text for an error, without its middle if it is long."""
    return repr(text if len(text) <= 40 else f"{text[:30]}...{text[-7:]}")
