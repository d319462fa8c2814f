"""Validation of arguments: each function returns the value as a plain Python type or raises an error.

Errors name the argument, the accepted values and the value found. They are ``ValueError``, or the type given as
``error`` (``ConfigError`` for options). A bool does not count as a number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

from kvstore.errors import brief

ROLES = ("auto", "owner", "reader")  # roles of a process in a store


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of any type, but not a bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number of any type, but not a bool."""
    return isinstance(value, (float, Real, np.number)) and not isinstance(value, bool | np.bool_)


def flag(value: object, name: str, error: type[Exception] = ValueError) -> bool:
    """Return a bool of Python or NumPy as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name} must be True or False, found {brief(value)}")
    return bool(value)


def integer(
    value: object,
    name: str,
    low: int | None = 0,
    high: int | None = None,
    error: type[Exception] = ValueError,
) -> int:
    """Return an integer in ``[low, high]`` as an int; None is no bound, and 16.0 is not an integer."""
    if is_integer(value) and (low is None or low <= value) and (high is None or value <= high):
        return int(value)
    if low is None:
        within = "an integer"
    elif high is not None:
        within = f"an integer in [{low}, {high}]"
    else:
        within = "a positive integer" if low == 1 else f"an integer of at least {low}"
    raise error(f"{name} must be {within}, found {brief(value)}")


def number(
    value: object, name: str, what: str = "a number", error: type[Exception] = ValueError
) -> float:
    """Return a real number other than NaN as a float. ``what`` describes it in the message."""
    try:
        found = float(value) if is_number(value) else math.nan
    except (OverflowError, TypeError, ValueError):  # an int of 400 digits, a complex NumPy number
        found = math.nan
    if math.isnan(found):
        raise error(f"{name} must be {what}, found {brief(value)}")
    return found


def positive(value: object, name: str, what: str, error: type[Exception] = ValueError) -> float:
    """Return a real number above zero, or infinity, as a float."""
    found = number(value, name, f"positive {what}", error)
    if found <= 0:
        raise error(f"{name} must be positive {what}, found {brief(value)}")
    return found


def choice(
    value: object, name: str, known: Collection[str], error: type[Exception] = ValueError
) -> str:
    """Return a text that is one of ``known``."""
    if not isinstance(value, str) or value not in known:
        *most, last = map(repr, known)
        expected = f"{', '.join(most)} or {last}" if most else last
        raise error(f"{name} must be {expected}, found {brief(value)}")
    return value


def several(
    value: object,
    name: str,
    what: str,
    error: type[Exception] = ValueError,
    most: int | None = None,
) -> list[Any]:
    """Return at most ``most + 1`` items of an iterable, named ``what``; text, bytes, sets and mappings are refused."""
    found: list[Any] | None = None
    if not isinstance(value, str | bytes | bytearray | Mapping | Set):
        try:
            found = list(islice(value, None if most is None else most + 1))  # type: ignore[call-overload]
        except Exception:  # a foreign __iter__ may raise anything
            found = None
    if found is None:
        raise error(f"{name} must be a list of {what}, found {brief(value)}")
    if most is not None and len(found) > most:
        raise error(f"{name} must have at most {most:,} items, found more")
    return found


def text(value: object, name: str, error: type[Exception] = ValueError) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise error(f"{name} must be text, found {brief(value)}")
    return value
