"""Checked fields of one record of a log. A ``ValueError`` names the field; callers add file and line."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.checks import is_integer, is_number

LARGEST = 2**62
"""Limit of times, of numeric ids, and of sums of lengths: sums of a few fit 64 bits."""
MOST_TOKENS = 2**40
"""Limit of the tokens of one request, so that products with block sizes fit 64 bits."""
DIGITS = 20
"""Most digits of a number given as text: as many as 64 bits need."""

_SHOWN = reprlib.Repr()
_SHOWN.maxother = _SHOWN.maxstring = _SHOWN.maxlong = 40
_SHOWN.maxlevel = 2


def shown(value: Any) -> str:
    """Return a value for an error message, shortened if it is long or nested."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # a whole number with more digits than Python prints
        return f"a number of {value.bit_length():,} bits"


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object of a JSON line. A ``ValueError`` has no text of the line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1:,}") from None
    except UnicodeDecodeError as error:
        msg = f"is not JSON: invalid {error.encoding} at byte {error.start + 1:,}"
        raise ValueError(msg) from None
    except RecursionError:
        msg = "is JSON nested too deeply; expected an object of numbers, text and lists"
        raise ValueError(msg) from None
    except ValueError:  # a whole number with more digits than Python converts
        raise ValueError("has a number with too many digits; expected numbers of 64 bits") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    return record


def number(record: Mapping[str, Any], name: str, below: int = LARGEST) -> float:
    """Return a field that is a number from 0 to ``below``, or its digits as text."""
    value = record.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= DIGITS:
        value = int(value)
    if not is_number(value):
        raise ValueError(f"expected a number as {name}, found {shown(value)}")
    if not 0 <= value < below:  # NaN is in no range
        raise ValueError(f"expected {name} from 0 to below {below:,}, found {shown(value)}")
    return value


def whole_number(record: Mapping[str, Any], name: str, unit: int) -> int:
    """Return a field times a unit, rounded to a whole number."""
    value = number(record, name)
    time = value * unit if isinstance(value, int) else round(value * unit)
    if time >= LARGEST:
        raise ValueError(f"{name} is too large: {value}")
    return time


def count(record: Mapping[str, Any], name: str, absent: int | None = None) -> int:
    """Return a field that is a whole number of tokens; ``absent`` if it is missing or null."""
    if absent is not None and record.get(name) is None:
        return absent
    value = number(record, name, MOST_TOKENS)
    if value != int(value):
        raise ValueError(f"expected a whole number as {name}, found {value}")
    return int(value)


def size(value: Any, name: str) -> int:
    """Return a block size in tokens."""
    if not is_integer(value) or not 0 < value < 2**31:
        raise ValueError(f"expected {name} of 1 or more, found {shown(value)}")
    return value


def label(record: Mapping[str, Any], name: str) -> str | None:
    """Return a name given as text or a whole number; None if it is missing."""
    value = record.get(name)
    if value is None:
        return None
    if not (isinstance(value, str) or is_integer(value)):
        raise ValueError(f"expected text or a whole number as {name}, found {shown(value)}")
    return str(value)


def ids(record: Mapping[str, Any], name: str) -> NDArray[np.int64] | Sequence[str | int]:
    """Return ids, text or any whole numbers; as an array if all are numbers in [0, 2**62)."""
    values = record.get(name)
    if not isinstance(values, list):
        raise ValueError(f"expected a list as {name}, found {shown(values)}")
    if all(type(each) is int and 0 <= each < LARGEST for each in values):
        return np.array(values, np.int64)
    for each in values:
        if not (isinstance(each, str) or is_integer(each)):
            raise ValueError(f"expected numbers or strings in {name}, found {shown(each)}")
    return values
