"""Sizes of caches as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(%|b|KiB|MiB|GiB|TiB)")


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
        msg = f"expected a size such as 5%, 20000b (blocks) or 64GiB, found {text!r}"
        raise ValueError(msg)
    number, unit = Fraction(found[1]), found[2]
    if unit == "%":
        return Size(int(number * distinct_blocks / 100), float(number / 100))
    if unit == "b":
        blocks = int(number)
    elif block_bytes is None:
        msg = f"a size in bytes ({text}) needs the bytes of a token"
        raise ValueError(msg)
    else:
        blocks = int(number * _UNITS[unit] / block_bytes)
    return Size(blocks, blocks / distinct_blocks if distinct_blocks else 0.0)
