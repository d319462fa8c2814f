"""Checks of arguments: each returns the value in one plain type, or says what it should have been.

Errors name the argument, the accepted values and the value found. Methods raise ``ValueError``;
whoever opens something passes ``error=ConfigError``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from itertools import islice
from numbers import Integral, Real
from typing import Any

import numpy as np

from kvstore.errors import brief

ROLES = ("auto", "owner", "reader")
"""What a process may be to a store."""


def flag(value: object, name: str, error: type[Exception] = ValueError) -> bool:
    """Return a truth value as a bool."""
    if not isinstance(value, bool | np.bool_):
        msg = f"{name} must be True or False, found {brief(value)}"
        raise error(msg)
    return bool(value)


def integer(
    value: object,
    name: str,
    low: int = 0,
    high: int | None = None,
    error: type[Exception] = ValueError,
) -> int:
    """Return a whole number in ``[low, high]`` as an int; a bool is none, and neither is 16.0."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if is_whole else low - 1  # type: ignore[call-overload]
    if number < low or (high is not None and number > high):
        within = (
            f"an integer in [{low}, {high}]"
            if high is not None
            else f"an integer of at least {low}"
        )
        if high is None and low == 1:
            within = "a positive integer"
        msg = f"{name} must be {within}, found {brief(value)}"
        raise error(msg)
    return number


def number(
    value: object, name: str, what: str = "a number", error: type[Exception] = ValueError
) -> float:
    """Return a real number as a float; NaN and bools are none. ``what`` names it in the message."""
    is_real = isinstance(value, Real | np.number) and not isinstance(value, bool | np.bool_)
    try:
        found = float(value) if is_real else math.nan  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):  # an int of 400 digits, a complex NumPy number
        found = math.nan
    if math.isnan(found):
        msg = f"{name} must be {what}, found {brief(value)}"
        raise error(msg)
    return found


def positive(value: object, name: str, what: str, error: type[Exception] = ValueError) -> float:
    """Return a real number above zero as a float; infinity is one."""
    found = number(value, name, f"positive {what}", error)
    if found <= 0:
        msg = f"{name} must be positive {what}, found {brief(value)}"
        raise error(msg)
    return found


def choice(
    value: object, name: str, known: Collection[str], error: type[Exception] = ValueError
) -> str:
    """Return a text that is one of ``known``."""
    if not isinstance(value, str) or value not in known:
        *most, last = map(repr, known)
        expected = f"{', '.join(most)} or {last}" if most else last
        msg = f"{name} must be {expected}, found {brief(value)}"
        raise error(msg)
    return value


def several(
    value: object,
    name: str,
    what: str,
    error: type[Exception] = ValueError,
    most: int | None = None,
) -> list[Any]:
    """Return the items of a sequence or an iterator; a text, bytes, a set or a mapping is none of things.

    ``what`` names the items in the message. No more than ``most`` items are taken, and not one more.
    """
    found: list[Any] | None = None
    if not isinstance(value, str | bytes | bytearray | Mapping | Set):
        try:
            found = list(islice(value, None if most is None else most + 1))  # type: ignore[call-overload]
        except Exception:  # somebody else's __iter__ may raise anything
            found = None
    if found is None:
        msg = f"{name} must be a list of {what}, found {brief(value)}"
        raise error(msg)
    if most is not None and len(found) > most:
        msg = f"{name} must have at most {most:,} items, found more"
        raise error(msg)
    return found


def text(value: object, name: str, error: type[Exception] = ValueError) -> str:
    """Return a text."""
    if not isinstance(value, str):
        msg = f"{name} must be a text, found {brief(value)}"
        raise error(msg)
    return value
