"""Fields of one record of a log: each is checked, and a wrong one is named with what was expected.

Everything here raises ``ValueError`` with a sentence that fits behind a file and a line.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.checks import is_integer, is_number

LARGEST = 2**62
"""Bound of times, ids that are kept as numbers, and sums of lengths: a few of them fit 64 bits."""
MOST_TOKENS = 2**40
"""Bound of the tokens of one request, so that products with block sizes stay within 64 bits."""
DIGITS = 20
"""Digits of a number that is given as text: what 64 bits need at most."""

_SHOWN = reprlib.Repr()
_SHOWN.maxother = _SHOWN.maxstring = _SHOWN.maxlong = 40
_SHOWN.maxlevel = 2


def shown(value: Any) -> str:
    """Return a value as a message has it: its beginning and end if it is long or nested."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # the repr of a whole number with more digits than Python prints
        return f"a number of {value.bit_length():,} bits"


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON is. The message has nothing of the line's text.

    Raises:
        ValueError: if it is no JSON, no object, or what no parser of bounded depth can take.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"is not JSON: {error.msg} at character {error.pos + 1:,}"
        raise ValueError(msg) from None
    except UnicodeDecodeError as error:
        msg = f"is not JSON: no {error.encoding} at byte {error.start + 1:,}"
        raise ValueError(msg) from None
    except RecursionError:
        msg = "is JSON that is nested too deeply; expected an object of numbers, text and lists"
        raise ValueError(msg) from None
    except ValueError:  # of whole numbers with more digits than Python converts
        msg = "has a number of too many digits; expected numbers of 64 bits"
        raise ValueError(msg) from None
    if not isinstance(record, dict):
        msg = f"expected an object, found {type(record).__name__}"
        raise ValueError(msg)
    return record


def number(record: Mapping[str, Any], name: str, below: int = LARGEST) -> float:
    """Return a field that is a number of 0 or more, or its digits as text."""
    value = record.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= DIGITS:
        value = int(value)
    if not is_number(value):
        msg = f"expected a number as {name}, found {shown(value)}"
        raise ValueError(msg)
    if not 0 <= value < below:  # a NaN is in no range
        msg = f"expected {name} from 0 to below {below:,}, found {shown(value)}"
        raise ValueError(msg)
    return value


def whole_number(record: Mapping[str, Any], name: str, unit: int) -> int:
    """Return a field times a unit, rounded to a whole number."""
    value = number(record, name)
    time = value * unit if isinstance(value, int) else round(value * unit)
    if time >= LARGEST:
        msg = f"{name} is too large: {value}"
        raise ValueError(msg)
    return time


def count(record: Mapping[str, Any], name: str, absent: int | None = None) -> int:
    """Return a field that is a whole number of tokens; ``absent`` if it is not there or null."""
    if absent is not None and record.get(name) is None:
        return absent
    value = number(record, name, MOST_TOKENS)
    if value != int(value):
        msg = f"expected a whole number as {name}, found {value}"
        raise ValueError(msg)
    return int(value)


def size(value: Any, name: str) -> int:
    """Return the tokens of a block."""
    if not is_integer(value) or not 0 < value < 2**31:
        msg = f"expected {name} of 1 or more, found {shown(value)}"
        raise ValueError(msg)
    return value


def label(record: Mapping[str, Any], name: str) -> str | None:
    """Return a field that names something, by text or by a whole number; None if it is not there."""
    value = record.get(name)
    if value is None:
        return None
    if not (isinstance(value, str) or is_integer(value)):
        msg = f"expected text or a whole number as {name}, found {shown(value)}"
        raise ValueError(msg)
    return str(value)


def ids(record: Mapping[str, Any], name: str) -> NDArray[np.int64] | Sequence[str | int]:
    """Return ids as an array if all are numbers from 0 to below 2**62, else as they are.

    Text and whole numbers of any size and sign are ids; what is equal in the file is equal here.
    """
    values = record.get(name)
    if not isinstance(values, list):
        msg = f"expected a list as {name}, found {shown(values)}"
        raise ValueError(msg)
    if all(type(each) is int and 0 <= each < LARGEST for each in values):
        return np.array(values, np.int64)
    for each in values:
        if not (isinstance(each, str) or is_integer(each)):
            msg = f"expected numbers or strings in {name}, found {shown(each)}"
            raise ValueError(msg)
    return values
